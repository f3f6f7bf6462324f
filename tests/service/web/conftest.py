"""An app of one's own for each test, on a home whose database was made once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from web_bench import WebBench, open_bench

from inlay.data import FileQuestion
from inlay.service.state import Database
from inlay.service.web import inspection
from inlay.service.web.inspect_file import try_answer


@pytest.fixture(autouse=True)
def quick_reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads are looked into in this process, which is quicker, but in tests that ask for the `real_reader`."""
    if "real_reader" not in request.fixturenames:

        async def run(folder: Path, question: bytes) -> dict[str, Any]:
            asked = json.loads(question)
            found = try_answer(FileQuestion(**{**asked, "path": str(folder / asked["path"])}))
            return dict(json.loads(json.dumps(found, allow_nan=False)))

        monkeypatch.setattr(inspection, "run_reader", run)


@pytest.fixture
def real_reader() -> None:
    """Uploads are looked into by a process of their own."""


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


@pytest.fixture(scope="module")
def shared(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebBench]:
    """An app for tests of one file that change nothing of it but what they bring themselves."""
    found = open_bench(Path(shutil.copytree(migrated, tmp_path_factory.mktemp("shared") / "home")))
    with found.client:
        found.add_tenant("acme")
        found.store_task("acme")
        yield found
    found.db.close()


@pytest.fixture
def asker(shared: WebBench):
    """A client of `acme` in the shared app; its engine is as it was."""
    shared.engine.refusal, shared.engine.lies, shared.engine.delay_s = None, False, 0.0
    yield shared.client_with(shared.secrets["acme"])
    shared.engine.refusal, shared.engine.lies, shared.engine.delay_s = None, False, 0.0
