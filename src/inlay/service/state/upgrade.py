"""Bringing a database up to date: made if there is none, and taken through the migrations that it lacks.

All missing migrations are one transaction, under a lock between processes: whoever is killed leaves the old schema.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sqlalchemy import NullPool, create_engine

from inlay.service.state import schema
from inlay.service.state.places import Places
from inlay.service.state.postgres import Postgres
from inlay.service.state.sqlite import Sqlite
from inlay.service.state.state_errors import NewerDatabase
from inlay.store import make_directory

MIGRATIONS = Path(__file__).parent / "migrations"


def bring_up_to_date(kind: Sqlite | Postgres, places: Places, clock: Callable[[], float]) -> None:
    """Make the database, or migrate it to the schema of this Inlay; refuse a schema that this Inlay does not know."""
    if places.service.is_dir() and kind.read_revision() == schema.HEAD:
        return
    make_directory(places.service)
    places.service.chmod(0o700)  # customers' texts and the digests of keys are nobody else's
    with kind.upgrading() as found:
        _check_known(found)
        if found != schema.HEAD:
            _migrate(kind, clock())


def _check_known(found: str | None) -> None:
    known = {path.name.split("_")[1] for path in (MIGRATIONS / "versions").glob("step_*.py")}
    if found is not None and found not in known:
        raise NewerDatabase(found)


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
