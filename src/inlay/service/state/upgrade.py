"""Bringing a database up to date: made if there is none, and taken through the migrations that it lacks.

All missing migrations are one transaction, under a lock between processes: whoever is killed leaves the old schema.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from sqlalchemy import NullPool, create_engine, event

from inlay.service.state import schema
from inlay.service.state.places import Places
from inlay.service.state.state_errors import NewerDatabase
from inlay.store import locked, make_directory

MIGRATIONS = Path(__file__).parent / "migrations"


def read_revision(path: Path) -> str | None:
    """Return the schema that a database has; None if it has none yet."""
    if not path.exists():
        return None
    with closing(sqlite3.connect(path, timeout=30)) as connection:
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name = 'alembic_version'"
        if connection.execute(query).fetchone() is None:
            return None
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        return None if row is None else str(row[0])


def bring_up_to_date(places: Places, clock: Callable[[], float]) -> None:
    """Make the database, or migrate it to the schema of this Inlay; refuse a schema that this Inlay does not know."""
    if read_revision(places.database) == schema.HEAD and _has_log(places.database):
        return
    make_directory(places.service)
    places.service.chmod(0o700)  # customers' texts and the digests of keys are nobody else's
    with locked(places.service / "upgrade.lock", exclusive=True):
        found = read_revision(places.database)
        _check_known(found)
        _use_log(places.database)  # also where a backup was restored
        if found != schema.HEAD:
            _migrate(places.database, clock())


def _has_log(path: Path) -> bool:
    with closing(sqlite3.connect(path, timeout=30)) as connection:
        return bool(connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal")


def _use_log(path: Path) -> None:
    """Make a database write a log (WAL), so that readers and the one writer do not wait for each other."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")


def _check_known(found: str | None) -> None:
    known = {path.name.split("_")[1] for path in (MIGRATIONS / "versions").glob("step_*.py")}
    if found is not None and found not in known:
        raise NewerDatabase(found)


def _migrate(path: Path, now: float) -> None:
    from alembic import command  # slow to import, and seldom needed
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    engine = create_engine(f"sqlite:///{path}", poolclass=NullPool, connect_args={"isolation_level": None})
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    with engine.begin() as connection:
        config.attributes.update(connection=connection, now=now)
        command.upgrade(config, "head")
