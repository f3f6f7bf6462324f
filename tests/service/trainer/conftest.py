"""A trainer in this process: real database, real store, tiny backbone, no engine unless a test brings one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trainer_bench import Bench, open_bench_at

from inlay.service.state import Tenants


@pytest.fixture
def open_bench(tmp_path: Path, backbone_of: Callable[[str], Any]) -> Iterator[Callable[..., Bench]]:
    """A function that opens a bench on a folder, the test's own by default."""
    opened: list[Bench] = []

    def open_it(home: Path | None = None, client: Any = None) -> Bench:
        opened.append(open_bench_at(home or tmp_path / "home", backbone_of("bert"), client))
        return opened[-1]

    yield open_it
    for found in opened:
        found.db.close()


@pytest.fixture
def bench(open_bench: Callable[..., Bench]) -> Bench:
    """A bench with the tenants `acme` and `other`."""
    found = open_bench()
    for name in ("acme", "other"):
        Tenants(found.db).add(name)
    return found
