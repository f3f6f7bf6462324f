"""The service's database, opened by many processes and threads at once: SQLite, or Postgres by `$INLAY_DATABASE`.

What always holds: whoever changes anything shuts out all other writers from the beginning of the transaction to its
end, and what is acknowledged is on the disk. Opening brings the schema up to date. What the two databases differ in
is in `sqlite.py` and `postgres.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, select, update
from sqlalchemy import exc as sql_errors

from inlay.errors import BadConfig, InlayError, Missing
from inlay.service.state import schema
from inlay.service.state.metering import UsageMeter
from inlay.service.state.one_store import has_store, set_store
from inlay.service.state.places import Places
from inlay.service.state.postgres import Postgres, PostgresWatch
from inlay.service.state.shared_files import SharedFiles
from inlay.service.state.sqlite import BUSY_S, Sqlite, busy
from inlay.service.state.upgrade import bring_up_to_date
from inlay.store import Store, write_atomically

T = TypeVar("T")
VARIABLE = "INLAY_DATABASE"
"""environment variable with the address of a Postgres database; without it there is a file below the home"""
_POOL, _MORE = 4, 60  # connections kept open, and more of them under load
_MOST_CACHED = 100_000
_HOT = "hot"
_HOT_QUERY = f"SELECT value FROM revisions WHERE name = '{_HOT}'"


class Database:
    """The database of one service. Safe to share between threads; every process opens its own."""

    def __init__(self, places: Places, store: Store, clock: Callable[[], float] = time.time) -> None:
        self.places = places
        self.store = store
        self.files = SharedFiles(places, store.storage)
        self._kind = find_kind_of_database(places)
        self._clock = clock
        self._pid = os.getpid()
        self._engine = make_engine(self._kind)
        self._has_written = True  # so what was believed of the watched counter may be wrong
        self._writer = threading.Lock()  # threads wait here, which is quicker and fairer than SQLite's polling
        self._watch_lock = threading.Lock()
        self._watch = self._kind.watch(_HOT_QUERY)
        self.seen_in_store: dict[str, Any] = {}
        """what references meant in the store, by the time of the last change there"""
        self._cache: tuple[int, dict[Hashable, Any]] = (-1, {})
        self.meter = UsageMeter(self)

    @classmethod
    def open(cls, place: Path | str, *, clock: Callable[[], float] = time.time) -> Database:
        """Open the database of the service on a store, made or brought up to date if need be.

        `place` is the store's folder, or its address on object storage. A newer schema is refused. Several processes
        may open at once.
        """
        store = Store(place)
        places = Places(store.root.expanduser().resolve())
        kind = find_kind_of_database(places)
        _check_same_database(kind, places, store)
        if store.storage is not None:
            store.storage.prove_conditions()
        with telling_sql_errors(kind):
            bring_up_to_date(kind, places, clock)
        if isinstance(kind, Postgres) and not places.postgres_note.exists():
            write_atomically(places.postgres_note, f"{kind.where}\n".encode())
        with telling_sql_errors(kind):
            opened = cls(places, store if store.is_remote else Store(places.home), clock)
        if isinstance(kind, Postgres):
            opened._check_store()
        return opened

    def _check_store(self) -> None:
        """Refuse a store that is not the one of the other machines."""
        try:
            with self.reading() as connection:
                is_set = has_store(connection, self.places, self.store)
            if not is_set:
                with self.writing() as connection:
                    set_store(connection, self.places, self.store)
        except BaseException:
            self.close()
            raise

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
        with telling_sql_errors(self._kind), self._connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Give a connection in a transaction of its own: all of it is kept, or, after an error, nothing."""
        self._check_process()
        if not self._writer.acquire(timeout=BUSY_S):
            raise busy()
        try:
            with (
                telling_sql_errors(self._kind),
                self._connect() as connection,
                self._kind.as_writer(connection).begin(),
            ):
                if isinstance(self._kind, Sqlite):
                    _check_not_moved(self.places)  # `inlay serve move` may have held the lock until now
                yield connection
        finally:
            self._writer.release()
            self._has_written = True

    def revision(self) -> int:
        """Return a number that changes whenever keys, tenants, tasks or aliases may have. Takes microseconds."""
        self._check_process()
        with self._watch_lock:
            try:
                if isinstance(self._watch, PostgresWatch):
                    fresh, self._has_written = self._has_written, False
                    return self._watch.read(fresh=fresh)
                return self._watch.read()
            except self._kind.Error as error:  # not a `with`: that would cost as much as the question
                raise _explain(error, self._kind) or error from None

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
        with telling_sql_errors(self._kind):
            return self._kind.checkpoint()

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
            self._watch = self._kind.watch(_HOT_QUERY)
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


def find_kind_of_database(places: Places) -> Sqlite | Postgres:
    """Return the database that `$INLAY_DATABASE` names, or the file below a home."""
    address = os.environ.get(VARIABLE)
    return Postgres(address) if address else Sqlite(places)


def _check_same_database(kind: Sqlite | Postgres, places: Places, store: Store) -> None:
    """Refuse a home whose state lies in the other database: keys made there would be keys of nothing."""
    noted = places.postgres_note
    if isinstance(kind, Sqlite) and store.is_remote:
        raise BadConfig(
            f"`${VARIABLE}` is not set: a service on `{store.place}` needs a database for all its machines",
            "set it to postgresql://USER:PASSWORD@HOST/DATABASE, or give a folder with `--store DIR`",
        )
    if isinstance(kind, Sqlite):
        _check_not_moved(places)
    if isinstance(kind, Postgres) and not noted.exists() and places.database.exists():
        raise BadConfig(
            f"`{places.home}` has a service whose state lies in SQLite, and `${VARIABLE}` names Postgres",
            "start with a new folder, or leave the variable unset",
        )


def _check_not_moved(places: Places) -> None:
    noted = places.postgres_note
    if noted.exists():
        raise Missing(
            f"the state of the service in `{places.home}` lies in Postgres, and `${VARIABLE}` is not set",
            f"set it to the address of {noted.read_text(errors='replace').strip()[:200]}, with its password",
        )


def make_engine(kind: Sqlite | Postgres) -> Engine:
    """Return the engine of a database, with a pool of connections."""
    engine = create_engine(
        kind.url,
        **kind.options,
        pool_size=_POOL,
        max_overflow=_MORE,
        pool_timeout=BUSY_S,
        hide_parameters=True,  # errors and logs must not have a customer's text
        json_serializer=lambda value: json.dumps(value, separators=(",", ":"), allow_nan=False),
    )
    kind.prepare(engine)
    return engine


@contextmanager
def telling_sql_errors(kind: Sqlite | Postgres) -> Iterator[None]:
    """Turn a full disk, a lock that is held too long, damage and a lost database into errors that say so."""
    try:
        yield
    except sql_errors.TimeoutError:
        raise busy() from None
    except (sql_errors.DBAPIError, sqlite3.Error) as error:
        told = _explain(error, kind)
        if told is None and isinstance(error, sql_errors.DBAPIError):
            # A fault of ours, without the details that Postgres adds: they have the row's values.
            plain = Exception(next(iter(str(error.orig).splitlines()), ""))
            raise type(error)(error.statement, None, plain, hide_parameters=True) from None
        if told is None:
            raise
        # Not `from error`: SQLAlchemy's has the statement with its values, which may be a customer's text.
        raise told from None


def _explain(error: Exception, kind: Sqlite | Postgres) -> InlayError | None:
    return kind.explain(error.orig if isinstance(error, sql_errors.DBAPIError) else error)
