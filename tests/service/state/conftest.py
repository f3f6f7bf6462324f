"""A database of one's own for each test, with a clock that stands still until it is moved."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from state_makers import START, Clock

from inlay.service.state import Database, JobQueue, Tenants, Workspace


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with an empty database: migrations take longer than most tests."""
    home = tmp_path_factory.mktemp("migrated")
    Database.open(home, clock=lambda: START).close()
    return home


@pytest.fixture
def home(migrated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(migrated, tmp_path / "home", dirs_exist_ok=True))


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
