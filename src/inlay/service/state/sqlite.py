"""SQLite in WAL mode, opened by many processes and threads at once: the database of a service on one machine.

What always holds: a writer holds the single writer's lock from the beginning of its transaction (BEGIN IMMEDIATE), and
what is acknowledged is on the disk (synchronous=FULL). Deleted rows are overwritten (secure_delete), so no free page
has an erased text.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, event

from inlay.errors import DiskFull, InlayError, StoreBusy, StoreDamaged
from inlay.service.state.service_files import ServicePaths
from inlay.store import locked

BUSY_S = 10.0
"""longest wait for other writers"""
_CHECKPOINT_S = 0.2
_PRAGMAS = (
    f"PRAGMA busy_timeout = {int(1000 * BUSY_S)}",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA secure_delete = ON",
    "PRAGMA journal_size_limit = 67108864",
)


class Sqlite:
    """The SQLite file below a home, and how it is opened and watched."""

    Error = sqlite3.Error
    options: dict[str, Any] = {"connect_args": {"isolation_level": None, "check_same_thread": False, "timeout": BUSY_S}}

    def __init__(self, paths: ServicePaths) -> None:
        self.path = paths.database
        self.url = f"sqlite:///{self.path}"
        self._upgrade_lock = paths.service / "upgrade.lock"

    def prepare(self, engine: Engine) -> None:
        """Set up the connections and transactions of an engine."""

        @event.listens_for(engine, "connect")
        def set_up(connection: Any, record: Any) -> None:
            for pragma in _PRAGMAS:
                connection.execute(pragma)

        event.listen(engine, "begin", begin)

    def as_writer(self, connection: Connection) -> Connection:
        """Return the connection, for a transaction that shuts out all other writers."""
        return connection.execution_options(is_writing=True)

    def watch(self, query: str) -> SqliteWatch:
        """Open a watch that tells cheaply whether the number that a query returns has changed."""
        return SqliteWatch(self.path, query)

    def read_revision(self) -> str | None:
        """Return the revision of the database's schema; None if it is not set up yet."""
        if not self.path.exists():
            return None
        with closing(sqlite3.connect(self.path, timeout=30)) as connection:
            return None if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal" else _revision(connection)

    @contextmanager
    def upgrading(self) -> Iterator[str | None]:
        """Hold the lock between processes that upgrade; give the revision of the database's schema."""
        with locked(self._upgrade_lock, exclusive=True):
            with closing(sqlite3.connect(self.path, isolation_level=None, timeout=30)) as connection:
                found = _revision(connection)
                # With a log, readers and the one writer do not wait for each other. A restored backup has none.
                connection.execute("PRAGMA journal_mode = WAL")
            yield found

    def checkpoint(self) -> bool:
        """Move the write-ahead log into the database and empty it; False if readers prevented it.

        Writers wait meanwhile, so it gives up soon.
        """
        with closing(sqlite3.connect(self.path, isolation_level=None, timeout=_CHECKPOINT_S)) as connection:
            return bool(connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)

    def explain(self, raised: Any) -> InlayError | None:
        """Return the error that explains a failure of the database; None for a bug of ours."""
        code = getattr(raised, "sqlite_errorcode", None)
        if code is None:
            return None
        primary = code & 0xFF  # without the details of the extended code
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return busy()
        if primary == sqlite3.SQLITE_FULL or (primary == sqlite3.SQLITE_IOERR and _is_full(self.path)):
            return DiskFull("no room on the disk for the service's database", "make room there; nothing was changed")
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return StoreDamaged(f"`{self.path}` is damaged", "restore a backup: docs/operating.md says how")
        if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM):
            hint = "check the disk and who owns the file"
            return InlayError(f"`{self.path}` cannot be read and written: {raised}", hint)
        return None


class SqliteWatch:
    """A connection that only watches: it writes nothing, so it notices every change, also those of this process."""

    def __init__(self, path: Path, query: str) -> None:
        self._query = query
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
        self._seen, self._value = -1, -1

    def read(self) -> int:
        """Return the number. It is read only after SQLite tells, cheaply, that another connection changed something."""
        change = self._connection.execute("PRAGMA data_version").fetchone()[0]
        if change != self._seen:
            self._value = self._connection.execute(self._query).fetchone()[0]
            self._seen = change
        return self._value

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def begin(connection: Connection) -> None:
    """Begin a transaction as its connection's options say."""
    is_writing = connection.get_execution_options().get("is_writing", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writing else "BEGIN")


def busy() -> StoreBusy:
    """Return the error of a process that waited too long for a lock."""
    return StoreBusy("the service's database was locked for too long", "send the request again in a moment")


def read_revision(path: Path) -> str | None:
    """Return the revision of a database file's schema; None if it is not set up yet."""
    if not path.exists():
        return None
    with closing(sqlite3.connect(path, timeout=30)) as connection:
        return _revision(connection)


def _revision(connection: sqlite3.Connection) -> str | None:
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name = 'alembic_version'"
    if connection.execute(query).fetchone() is None:
        return None
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return None if row is None else str(row[0])


def _is_full(path: Path) -> bool:
    with suppress(OSError):
        return shutil.disk_usage(path.parent).free < 2**20
    return False
