"""A database of one's own for each test, with a clock that stands still until it is moved."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import IS_POSTGRES, drop_database, make_database, url_of
from state_makers import START, Clock

from inlay.service.state import Database, JobQueue, Tenants, Workspace


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def only_where_it_holds(request: pytest.FixtureRequest) -> None:
    """Leave out, on Postgres, what is about SQLite's file."""
    if IS_POSTGRES and request.node.get_closest_marker("sqlite"):
        pytest.skip("about SQLite's file")


@pytest.fixture(scope="session")
def template() -> Iterator[str]:
    """The name of a migrated database on Postgres; nothing on SQLite."""
    name = make_database() if IS_POSTGRES else ""
    yield name
    if name:
        drop_database(name)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory, template: str) -> Path:
    """A home with an empty database: migrations take longer than most tests."""
    home = tmp_path_factory.mktemp("migrated")
    with pytest.MonkeyPatch.context() as patch:
        if template:
            patch.setenv("INLAY_DATABASE", url_of(template))
        Database.open(home, clock=lambda: START).close()
    return home


@pytest.fixture
def home(migrated: Path, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    name = make_database(template) if template else ""
    if name:
        monkeypatch.setenv("INLAY_DATABASE", url_of(name))
    yield Path(shutil.copytree(migrated, tmp_path / "home", dirs_exist_ok=True))
    if name:
        drop_database(name)


@pytest.fixture
def db(home: Path, clock: Clock) -> Iterator[Database]:
    opened = Database.open(home, clock=clock)
    yield opened
    opened.close()


@pytest.fixture
def workspace(db: Database) -> Workspace:
    """The workspace of the tenant `acme`."""
    Tenants(db).add("acme")
    return Workspace(db, "acme", "key:test")


@pytest.fixture
def queue(db: Database) -> JobQueue:
    return JobQueue(db)
