"""An app of one's own for each test, on a home whose database was made once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from web_bench import WebBench, open_bench

from inlay.service.state import Database


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with an empty database: migrations take longer than most tests."""
    home = tmp_path_factory.mktemp("migrated")
    Database.open(home).close()
    return home


@pytest.fixture
def home(migrated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(migrated, tmp_path / "home", dirs_exist_ok=True))


@pytest.fixture
def bench(home: Path) -> Iterator[WebBench]:
    found = open_bench(home)
    with found.client:
        yield found
    found.db.close()


@pytest.fixture
def acme(bench: WebBench):
    """A client of the tenant `acme`, which has the task `mail`."""
    client = bench.add_tenant("acme")
    bench.store_task("acme")
    return client
