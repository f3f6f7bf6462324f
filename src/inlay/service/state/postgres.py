"""Postgres: the database of a service on several machines. It runs the same statements as SQLite.

What always holds: a writer holds one lock of the whole database until its transaction ends (an advisory lock), as
SQLite's one writer does. So transactions have one order, and no statement needs to know on which database it runs.
Readers see one state and wait for nobody.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, NullPool, create_engine, event, make_url, text
from sqlalchemy import exc as sql_errors

from inlay.errors import BadData, DiskFull, InlayError, Missing, StoreUnreachable
from inlay.service.state.sqlite import busy

BELIEVED_S = 0.05
"""how long another process may use a revoked key or a moved alias before it reads again"""
_LOCK, _UPGRADE_LOCK = 713_021, 713_022
_BUSY_MS = 10_000
_LOST = ("08", "57P")  # connection failures, and a server that is shutting down
_REFUSED = re.compile(r"authentication failed|no password supplied|FATAL: .* does not exist|no pg_hba.conf entry")
_FULL, _NO_LOCK, _BAD_TEXT, _NO_ENTRY = ("53100",), ("55P03",), ("22021", "22P05"), ("28", "3D")


class Postgres:
    """A database at an address such as `postgresql://user@host/inlay`, and how it is opened and watched."""

    Error = sql_errors.DBAPIError
    options: dict[str, Any] = {
        "isolation_level": "REPEATABLE READ",
        "pool_pre_ping": True,  # reopen a connection that the server closed meanwhile
        "connect_args": {"connect_timeout": 10, "options": f"-c lock_timeout={_BUSY_MS} -c timezone=UTC"},
    }

    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url))
        except sql_errors.ArgumentError:
            hint = "write postgresql://USER:PASSWORD@HOST/DATABASE"
            raise Missing("`$INLAY_DATABASE` is not the address of a database", hint) from None
        self.url = parsed.render_as_string(hide_password=False)
        self.where = parsed.set(drivername="postgresql").render_as_string(hide_password=True)

    def prepare(self, engine: Engine) -> None:
        """Set up the transactions of an engine."""
        event.listen(engine, "begin", _begin)

    def as_writer(self, connection: Connection) -> Connection:
        """Return the connection, for a transaction that shuts out all other writers.

        Its statements each see what was committed before them: a snapshot would be taken before the lock is held.
        """
        return connection.execution_options(is_writing=True, isolation_level="READ COMMITTED")

    def watch(self, query: str) -> PostgresWatch:
        """Open a watch that tells whether the number that a query returns has changed."""
        return PostgresWatch(self._plain_engine(), query)

    def read_revision(self) -> str | None:
        """Return the revision of the database's schema; None if it is not set up yet."""
        engine = self._plain_engine()
        try:
            with engine.connect() as connection:
                return _revision(connection)
        finally:
            engine.dispose()

    @contextmanager
    def upgrading(self) -> Iterator[str | None]:
        """Hold the lock between processes that upgrade; give the revision of the database's schema."""
        engine = self._plain_engine()
        try:
            with engine.connect() as connection:
                connection.execute(text("SET lock_timeout = 0"))
                connection.execute(text(f"SELECT pg_advisory_lock({_UPGRADE_LOCK})"))
                yield _revision(connection)  # the lock ends with the connection
        finally:
            engine.dispose()

    def checkpoint(self) -> bool:
        """Do nothing: Postgres manages its own log, and overwrites deleted rows when it vacuums."""
        return True

    def explain(self, raised: Any) -> InlayError | None:
        """Return the error that explains a failure of the database; None for a bug of ours."""
        state = getattr(raised, "sqlstate", None)
        if state in _BAD_TEXT or (state is None and "NUL" in str(raised)):
            return BadData("a text has a NUL character, which the database cannot store", "leave it out")
        if state is None or state.startswith(_LOST):
            if state is None and type(raised).__name__ not in ("OperationalError", "ConnectionTimeout"):
                return None
            reason = next(iter(str(raised).strip().splitlines()), "it closed the connection")
            if _REFUSED.search(reason):  # psycopg has no code for a refused connection
                return self._refuse(reason)
            hint = "check that it runs and that $INLAY_DATABASE is its address; then send the request again"
            return StoreUnreachable(f"the database `{self.where}` does not answer: {reason[:300]}", hint)
        if state.startswith(_NO_ENTRY):
            return self._refuse(str(raised).splitlines()[0])
        if state in _NO_LOCK:
            return busy()
        if state in _FULL:
            return DiskFull("no room on the disk of the service's database", "make room there; nothing was changed")
        return None

    def _refuse(self, reason: str) -> InlayError:
        said = reason.rpartition("FATAL:")[2].strip()[:300]
        hint = "check the user, password and database in $INLAY_DATABASE; `createdb` makes a database"
        return StoreUnreachable(f"the database `{self.where}` refuses: {said}", hint)

    def _plain_engine(self) -> Engine:
        """Return an engine without a pool, whose statements are transactions of their own."""
        connect = self.options["connect_args"]
        try:
            return create_engine(
                self.url, poolclass=NullPool, isolation_level="AUTOCOMMIT", connect_args=connect, hide_parameters=True
            )
        except ImportError:
            hint = "`pip install 'inlay[postgres]'`"
            raise Missing("a service on Postgres needs psycopg, which is not installed", hint) from None


class PostgresWatch:
    """A connection that asks for a counter, at most every few hundredths of a second."""

    def __init__(self, engine: Engine, query: str) -> None:
        self._engine, self._query = engine, text(query)
        self._connection: Connection | None = None
        self._value, self._read_at = -1, -BELIEVED_S

    def read(self, *, fresh: bool = False) -> int:
        """Return the number."""
        if fresh or time.monotonic() - self._read_at >= BELIEVED_S:
            asked_at = time.monotonic()
            self._value, self._read_at = self._ask(), asked_at
        return self._value

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
        self._engine.dispose()

    def _ask(self) -> int:
        for attempt in (1, 2):  # the server may have closed the connection since
            try:
                if self._connection is None:
                    self._connection = self._engine.connect()
                return int(self._connection.execute(self._query).scalar_one())
            except sql_errors.DBAPIError:
                if self._connection is not None:
                    self._connection.invalidate()
                    self._connection = None
                if attempt == 2:
                    raise
        raise AssertionError


def _begin(connection: Connection) -> None:
    if connection.get_execution_options().get("is_writing", False):
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
    else:
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")


def _revision(connection: Connection) -> str | None:
    if connection.execute(text("SELECT to_regclass('alembic_version')")).scalar() is None:
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return None if found is None else str(found)
