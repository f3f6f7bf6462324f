"""The service's database: SQLite in WAL mode, opened by many processes and threads at once.

What always holds: whoever changes anything holds the one writer's lock from the beginning of the transaction
(BEGIN IMMEDIATE), and what is acknowledged is on the disk (synchronous=FULL). Opening brings the schema up to date.
What is deleted is overwritten (secure_delete): an erased text is in no free page.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, select, update
from sqlalchemy import exc as sql_errors

from inlay.errors import DiskFull, InlayError, StoreBusy, StoreDamaged, Unsupported
from inlay.service.state import schema
from inlay.service.state.metering import UsageMeter
from inlay.service.state.places import Places
from inlay.service.state.upgrade import bring_up_to_date
from inlay.store import Store

T = TypeVar("T")
BUSY_S = 10.0
"""longest wait for other writers"""
_POOL, _MORE = 4, 60  # connections kept open, and more of them under load
_MOST_CACHED = 100_000
_CHECKPOINT_S = 0.2
_PRAGMAS = (
    f"PRAGMA busy_timeout = {int(1000 * BUSY_S)}",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA secure_delete = ON",
    "PRAGMA journal_size_limit = 67108864",
)
_HOT = "hot"


class Database:
    """The database of one service. Safe to share between threads; every process opens its own."""

    def __init__(self, places: Places, clock: Callable[[], float] = time.time) -> None:
        self.places = places
        self.store = Store(places.home)
        self._clock = clock
        self._pid = os.getpid()
        self._engine = _make_engine(places.database)
        self._writer = threading.Lock()  # threads wait here, which is quicker and fairer than SQLite's polling
        self._watch_lock = threading.Lock()
        self._watch = _open_watch(places.database)
        self._seen_change, self._hot_revision = -1, -1
        self.seen_in_store: dict[str, Any] = {}
        """what references meant in the store, by the time of the last change there"""
        self._cache: tuple[int, dict[Hashable, Any]] = (-1, {})
        self.meter = UsageMeter(self)

    @classmethod
    def open(cls, home: Path | str, *, clock: Callable[[], float] = time.time) -> Database:
        """Open the database below a store's root, made or brought up to date if need be.

        A newer schema is refused. Several processes may open at once.
        """
        if "://" in str(home):
            raise Unsupported("only SQLite is supported so far, not a database URL", "give the folder of the store")
        places = Places(Path(home).expanduser().resolve())
        with telling_sql_errors(places.database):
            bring_up_to_date(places, clock)
            return cls(places, clock)

    def close(self) -> None:
        """Write what is waiting to be written (usage, last use of keys) and close all connections."""
        try:
            self.meter.close()
        finally:
            self._engine.dispose()
            with self._watch_lock:
                self._watch.close()

    def now(self) -> float:
        """Return the time, in seconds since 1970. All times of the service come from here."""
        return self._clock()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Give a connection that sees one state of the database, whatever others write."""
        with telling_sql_errors(self.places.database), self._connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Give a connection in a transaction of its own: all of it is kept, or, after an error, nothing."""
        self._check_process()
        if not self._writer.acquire(timeout=BUSY_S):
            raise _busy()
        try:
            with telling_sql_errors(self.places.database), self._connect() as connection:
                connection = connection.execution_options(is_writing=True)
                with connection.begin():
                    yield connection
        finally:
            self._writer.release()

    def revision(self) -> int:
        """Return a number that changes whenever keys, tenants, tasks or aliases may have. Takes microseconds."""
        self._check_process()
        with self._watch_lock:
            # Of other connections' changes SQLite tells cheaply; only then is the counter read that says which kind.
            try:
                change = self._watch.execute("PRAGMA data_version").fetchone()[0]
                if change != self._seen_change:
                    query = "SELECT value FROM revisions WHERE name = ?"
                    self._hot_revision = self._watch.execute(query, (_HOT,)).fetchone()[0]
                    self._seen_change = change
            except sqlite3.Error as error:  # not a `with`: that would cost as much as the question
                told = _explain(error, self.places.database)
                raise told or error from None
            return self._hot_revision

    def cached(self, key: Hashable, load: Callable[[], T]) -> T:
        """Return what `load` gave for a key since keys, tenants, tasks and aliases last changed. Errors are not kept.

        The revision is taken before loading, so what is kept is never older than its revision.
        """
        revision = self.revision()
        if self._cache[0] != revision:
            self._cache = (revision, {})
        kept = self._cache[1] if self._cache[0] == revision else {}
        if key not in kept:
            value = load()
            if len(kept) >= _MOST_CACHED:
                kept.clear()
            kept[key] = value
            return value
        found: T = kept[key]
        return found

    def probe(self) -> None:
        """Prove that the database can be written: for readiness."""
        with self.writing() as connection:
            bump(connection, "probe")

    def checkpoint(self) -> bool:
        """Bring the write-ahead log into the database and empty it; False if readers kept it from it.

        Writers wait meanwhile, so it gives up soon.
        """
        with (
            telling_sql_errors(self.places.database),
            closing(sqlite3.connect(self.places.database, isolation_level=None, timeout=_CHECKPOINT_S)) as connection,
        ):
            return bool(connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)

    def free_bytes(self) -> int:
        """Return the room that is left on the disk of the database."""
        return shutil.disk_usage(self.places.service).free

    def _connect(self) -> Connection:
        self._check_process()
        return self._engine.connect()

    def _check_process(self) -> None:
        """Leave a parent's connections alone in a forked child: SQLite allows no others to use them."""
        if self._pid != os.getpid():
            self._engine.dispose(close=False)
            self._writer, self._watch_lock = threading.Lock(), threading.Lock()
            self._watch = _open_watch(self.places.database)
            self._seen_change = -1
            self._pid = os.getpid()
            self.meter = UsageMeter(self)


def bump(connection: Connection, name: str = _HOT) -> None:
    """Say that something changed: of keys, tenants, tasks and aliases, which the hot route keeps in memory."""
    row = schema.revisions.c
    connection.execute(update(schema.revisions).where(row.name == name).values(value=row.value + 1))


def counted(connection: Connection, name: str) -> int:
    """Return how often something changed, ever."""
    found = connection.execute(select(schema.revisions.c.value).where(schema.revisions.c.name == name)).scalar()
    return int(found or 0)


def _make_engine(path: Path) -> Engine:
    engine = create_engine(
        f"sqlite:///{path}",
        connect_args={"isolation_level": None, "check_same_thread": False, "timeout": BUSY_S},
        pool_size=_POOL,
        max_overflow=_MORE,
        pool_timeout=BUSY_S,
        hide_parameters=True,  # errors and logs must not have a customer's text
        json_serializer=lambda value: json.dumps(value, separators=(",", ":"), allow_nan=False),
    )

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, record: Any) -> None:
        for pragma in _PRAGMAS:
            connection.execute(pragma)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        is_writing = connection.get_execution_options().get("is_writing", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writing else "BEGIN")

    return engine


def _open_watch(path: Path) -> sqlite3.Connection:
    """Open the connection that only watches: it writes nothing, so it hears of every change, this process's too."""
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_S)


def _busy() -> StoreBusy:
    return StoreBusy("the service's database was locked for too long", "send the request again in a moment")


@contextmanager
def telling_sql_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, a lock that is held too long and damage into errors that say so."""
    try:
        yield
    except sql_errors.TimeoutError:
        raise _busy() from None
    except (sql_errors.DBAPIError, sqlite3.Error) as error:
        raised = error.orig if isinstance(error, sql_errors.DBAPIError) else error
        told = _explain(raised, path)
        if told is None:
            raise
        # Not `from error`: SQLAlchemy's has the statement with its values, which may be a customer's text.
        raise told from None


def _explain(raised: Any, path: Path) -> InlayError | None:
    code = getattr(raised, "sqlite_errorcode", None)
    if code is None:
        return None
    primary = code & 0xFF  # the rest says more than anybody asks
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return _busy()
    if primary == sqlite3.SQLITE_FULL or (primary == sqlite3.SQLITE_IOERR and _is_full(path)):
        return DiskFull("no room on the disk for the service's database", "make room there; nothing was changed")
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreDamaged(f"`{path}` is damaged", "restore a backup: docs/operating.md says how")
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM):
        return InlayError(f"`{path}` cannot be read and written: {raised}", "check the disk and who owns the file")
    return None


def _is_full(path: Path) -> bool:
    with suppress(OSError):
        return shutil.disk_usage(path.parent).free < 2**20
    return False
