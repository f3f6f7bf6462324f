"""A page with a task that was trained twice, made once for all tests that only look."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page_bench import PageBench, make_csv, open_page_bench


@pytest.fixture
def bench(tmp_path: Path, backbone_of: Callable[[str], Any]) -> Iterator[PageBench]:
    """An empty service."""
    found = open_page_bench(tmp_path / "home", backbone_of("bert"))
    with found.client:
        yield found
    found.db.close()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, backbone_of: Callable[[str], Any]) -> Iterator[PageBench]:
    """A service whose task `mail` has two versions, the second live, and an answered row."""
    found = open_page_bench(tmp_path_factory.mktemp("page") / "home", backbone_of("bert"))
    with found.client:
        found.train_file(make_csv(60, seed=0))
        found.train_file(make_csv(80, seed=1))
        found.post("/tasks/mail/try", {"text": "anything"})
        found.db.meter.flush()
        yield found
    found.db.close()
