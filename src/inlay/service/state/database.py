"""The service's database, opened by many processes and threads at once: SQLite, or Postgres by `$INLAY_DATABASE`.

What always holds: a writer shuts out all other writers from the beginning of its transaction to the end, and what is
acknowledged is on the disk. Opening brings the schema up to date: all missing migrations are one transaction, under a
lock between processes, so a process that is killed leaves the old schema. What differs between the two databases is in
`sqlite.py` and `postgres.py`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, NullPool, create_engine, insert, select, update
from sqlalchemy import exc as sql_errors

from inlay.errors import BadConfig, InlayError, Missing
from inlay.service.state import schema
from inlay.service.state.postgres import Postgres, PostgresWatch
from inlay.service.state.service_files import ServicePaths, SharedFiles
from inlay.service.state.sqlite import BUSY_S, Sqlite, busy
from inlay.service.state.state_errors import NewerDatabase
from inlay.service.state.usage import UsageMeter
from inlay.store import Store, make_directory, write_atomically, write_once

T = TypeVar("T")
MIGRATIONS = Path(__file__).parent / "migrations"
VARIABLE = "INLAY_DATABASE"
"""environment variable with the address of a Postgres database; without it there is a file below the home"""
_POOL, _MORE = 4, 60  # connections kept open, and how many more under load
_MOST_CACHED = 100_000
_HOT = "hot"
_HOT_QUERY = f"SELECT value FROM revisions WHERE name = '{_HOT}'"
_STORE_FACT = "store"
_FOLDER = "folder"


class Database:
    """The database of one service. Safe to share between threads; every process opens its own."""

    def __init__(self, paths: ServicePaths, store: Store, clock: Callable[[], float] = time.time) -> None:
        self.paths = paths
        self.store = store
        self.files = SharedFiles(paths, store.storage)
        self._kind = find_kind_of_database(paths)
        self._clock = clock
        self._pid = os.getpid()
        self._engine = make_engine(self._kind)
        self._has_written = True  # then the watched counter must be read anew
        self._writer = threading.Lock()  # threads wait here: quicker and fairer than SQLite's polling
        self._watch_lock = threading.Lock()
        self._watch = self._kind.watch(_HOT_QUERY)
        self.seen_in_store: dict[str, Any] = {}
        """what references mean in the store, each with the time of the last change there"""
        self._cache: tuple[int, dict[Hashable, Any]] = (-1, {})
        self.meter = UsageMeter(self)

    @classmethod
    def open(cls, place: Path | str, *, clock: Callable[[], float] = time.time) -> Database:
        """Open the database of the service on a store; make it or migrate it where needed.

        `place` is the store's folder, or its address on object storage. A newer schema is refused. Several processes
        may open it at once.
        """
        store = Store(place)
        paths = ServicePaths(store.root.expanduser().resolve())
        kind = find_kind_of_database(paths)
        _check_same_database(kind, paths, store)
        if store.storage is not None:
            store.storage.prove_conditions()
        with telling_sql_errors(kind):
            bring_up_to_date(kind, paths, clock)
        if isinstance(kind, Postgres) and not paths.postgres_note.exists():
            write_atomically(paths.postgres_note, f"{kind.where}\n".encode())
        with telling_sql_errors(kind):
            opened = cls(paths, store if store.is_remote else Store(paths.home), clock)
        if isinstance(kind, Postgres):
            try:
                with opened.reading() as connection:
                    is_known = has_store(connection, paths, opened.store)
                if not is_known:
                    with opened.writing() as connection:
                        set_store(connection, paths, opened.store)
            except BaseException:
                opened.close()
                raise
        return opened

    def close(self) -> None:
        """Write what waits in memory (usage, last use of keys) and close all connections."""
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
        """Give a connection that sees one state of the database, whatever others write meanwhile."""
        with telling_sql_errors(self._kind), self._connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Give a connection in a transaction: all its changes are kept, or, after an error, none."""
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
                    _check_not_moved(self.paths)  # `inlay serve move` may have held the lock until now
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
        """Return what `load` gives for a key, kept until keys, tenants, tasks or aliases change. Errors are not kept.

        The revision is read before loading, so a kept value is never older than its revision.
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
        """Prove, for the readiness check, that the database can be written."""
        with self.writing() as connection:
            count_change(connection, "probe")

    def checkpoint(self) -> bool:
        """Move the write-ahead log into the database and empty it; False if readers prevented it.

        Writers wait meanwhile, so it gives up soon.
        """
        with telling_sql_errors(self._kind):
            return self._kind.checkpoint()

    def free_bytes(self) -> int:
        """Return the free space on the disk of the database."""
        return shutil.disk_usage(self.paths.service).free

    def _connect(self) -> Connection:
        self._check_process()
        return self._engine.connect()

    def _check_process(self) -> None:
        """Leave a parent's connections alone in a forked child: SQLite does not allow it to use them."""
        if self._pid != os.getpid():
            self._engine.dispose(close=False)
            self._writer, self._watch_lock = threading.Lock(), threading.Lock()
            self._watch = self._kind.watch(_HOT_QUERY)
            self._pid = os.getpid()
            self.meter = UsageMeter(self)


def count_change(connection: Connection, name: str = _HOT) -> None:
    """Count a change of keys, tenants, tasks or aliases, which every process caches for the hot route."""
    row = schema.revisions.c
    connection.execute(update(schema.revisions).where(row.name == name).values(value=row.value + 1))


def write_audit(connection: Connection, tenant: str, at: float, what: tuple[str, str, str]) -> None:
    """Note the actor, the action and its target. Never a text or a label of a customer's."""
    actor, action, target = what
    connection.execute(
        insert(schema.audit).values(tenant=tenant, at=at, actor=actor[:64], action=action[:64], target=target)
    )


def find_kind_of_database(paths: ServicePaths) -> Sqlite | Postgres:
    """Return the database that `$INLAY_DATABASE` names, or the file below a home."""
    address = os.environ.get(VARIABLE)
    return Postgres(address) if address else Sqlite(paths)


def _check_same_database(kind: Sqlite | Postgres, paths: ServicePaths, store: Store) -> None:
    """Refuse a home whose state is in the other kind of database: keys made in this one would open nothing."""
    noted = paths.postgres_note
    if isinstance(kind, Sqlite) and store.is_remote:
        raise BadConfig(
            f"`${VARIABLE}` is not set: a service on `{store.place}` needs a database for all its machines",
            "set it to postgresql://USER:PASSWORD@HOST/DATABASE, or give a folder with `--store DIR`",
        )
    if isinstance(kind, Sqlite):
        _check_not_moved(paths)
    if isinstance(kind, Postgres) and not noted.exists() and paths.database.exists():
        raise BadConfig(
            f"the state of the service in `{paths.home}` is in SQLite, and `${VARIABLE}` names Postgres",
            "start with a new folder, or leave the variable unset",
        )


def _check_not_moved(paths: ServicePaths) -> None:
    noted = paths.postgres_note
    if noted.exists():
        raise Missing(
            f"the state of the service in `{paths.home}` is in Postgres, and `${VARIABLE}` is not set",
            f"set it to the address of {noted.read_text(errors='replace').strip()[:200]}, with its password",
        )


def bring_up_to_date(kind: Sqlite | Postgres, paths: ServicePaths, clock: Callable[[], float]) -> None:
    """Make the database, or migrate it to the schema of this Inlay; refuse a schema that this Inlay does not know."""
    if paths.service.is_dir() and kind.read_revision() == schema.HEAD:
        return
    make_directory(paths.service)
    paths.service.chmod(0o700)  # it has customers' texts and the digests of keys
    known = {path.name.split("_")[1] for path in (MIGRATIONS / "versions").glob("step_*.py")}
    with kind.upgrading() as found:
        if found is not None and found not in known:
            raise NewerDatabase(found)
        if found != schema.HEAD:
            _migrate(kind, clock())


def _migrate(kind: Sqlite | Postgres, now: float) -> None:
    from alembic import command  # slow to import, and seldom needed
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    engine = create_engine(kind.url, poolclass=NullPool, **kind.options)
    kind.prepare(engine)
    with engine.connect() as connection, kind.as_writer(connection).begin():
        config.attributes.update(connection=connection, now=now)
        command.upgrade(config, "head")


def has_store(connection: Connection, paths: ServicePaths, store: Store) -> bool:
    """Tell whether the database belongs to this store; False if it belongs to none yet. Refuse another store.

    A machine with another store than the others would miss their files.
    """
    row, mine = schema.facts.c, _identify_store(paths, store)
    found = connection.execute(select(row.value).where(row.name == _STORE_FACT)).scalar()
    if found is None or found == mine:
        return found is not None
    theirs = "a folder, of this machine or of another one" if found.startswith(f"{_FOLDER} ") else f"`{found}`"
    raise BadConfig(
        f"the database belongs to the service on {theirs}, and this machine's store is `{store.place}`",
        "give every machine the same store on object storage (`--store s3://BUCKET/PREFIX`), or use another database",
    )


def set_store(connection: Connection, paths: ServicePaths, store: Store) -> None:
    """Make the database belong to this store, unless it belongs to one; refuse another store."""
    if not has_store(connection, paths, store):
        connection.execute(insert(schema.facts).values(name=_STORE_FACT, value=_identify_store(paths, store)))


def _identify_store(paths: ServicePaths, store: Store) -> str:
    """Return the address of a store on object storage, or a random name that a folder keeps in a file.

    A folder's path would not do: folders of two machines may have the same path.
    """
    if store.is_remote:
        return store.place
    path = paths.service / "id"
    with suppress(FileExistsError):
        if not path.exists():
            write_once(path, f"{_FOLDER} {secrets.token_hex(16)}".encode())
    return path.read_text()


def make_engine(kind: Sqlite | Postgres) -> Engine:
    """Return the engine of a database, with a pool of connections."""
    engine = create_engine(
        kind.url,
        **kind.options,
        pool_size=_POOL,
        max_overflow=_MORE,
        pool_timeout=BUSY_S,
        hide_parameters=True,  # errors and logs must not show a customer's text
        json_serializer=lambda value: json.dumps(value, separators=(",", ":"), allow_nan=False),
    )
    kind.prepare(engine)
    return engine


@contextmanager
def telling_sql_errors(kind: Sqlite | Postgres) -> Iterator[None]:
    """Turn a full disk, a lock held for too long, damage and a lost connection into errors that say so."""
    try:
        yield
    except sql_errors.TimeoutError:
        raise busy() from None
    except (sql_errors.DBAPIError, sqlite3.Error) as error:
        told = _explain(error, kind)
        if told is None and isinstance(error, sql_errors.DBAPIError):
            # A bug of ours, without the details that Postgres adds: they have the row's values.
            plain = Exception(next(iter(str(error.orig).splitlines()), ""))
            raise type(error)(error.statement, None, plain, hide_parameters=True) from None
        if told is None:
            raise
        # Not `from error`: SQLAlchemy's error has the statement with its values, which may be a customer's text.
        raise told from None


def _explain(error: Exception, kind: Sqlite | Postgres) -> InlayError | None:
    return kind.explain(error.orig if isinstance(error, sql_errors.DBAPIError) else error)
