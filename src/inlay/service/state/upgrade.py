"""Bringing a database up to date: made if there is none, and taken through the migrations that it lacks.

All missing migrations are one transaction, under a lock between processes: whoever is killed leaves the old schema.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
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
    connection = sqlite3.connect(path, timeout=30)
    try:
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        return None if row is None else str(row[0])
    except sqlite3.OperationalError as error:
        if "no such table" not in str(error):
            raise
        return None
    finally:
        connection.close()


def bring_up_to_date(places: Places, clock: Callable[[], float]) -> None:
    """Make the database, or migrate it to the schema of this Inlay; refuse a schema that this Inlay does not know."""
    if read_revision(places.database) == schema.HEAD:
        return
    make_directory(places.service)
    places.service.chmod(0o700)  # customers' texts and the digests of keys are nobody else's
    with locked(places.service / "upgrade.lock", exclusive=True):
        found = read_revision(places.database)
        if found != schema.HEAD:
            _migrate(places.database, found, clock())


def _migrate(path: Path, found: str | None, now: float) -> None:
    from alembic import command  # slow to import, and seldom needed
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise NewerDatabase(found)
    first = sqlite3.connect(path, isolation_level=None, timeout=30)
    first.execute("PRAGMA journal_mode = WAL")
    first.close()
    engine = create_engine(f"sqlite:///{path}", poolclass=NullPool, connect_args={"isolation_level": None})
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    with engine.begin() as connection:
        config.attributes.update(connection=connection, now=now)
        command.upgrade(config, "head")
