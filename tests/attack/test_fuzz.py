"""A short run of the fuzzer: every kind of input, in ways that seeds repeat. `make fuzz` is the long one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fuzz import run_kind
from kinds import KINDS
from world import World

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # files that a refused input left to the collector
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Any) -> World:
    return World(tmp_path_factory.mktemp("world"), tiny_bert)


@pytest.mark.parametrize("name", KINDS)
def test_no_damaged_input_gets_through(name, world):
    attempts = run_kind(name, world, "suite", iter(range(KINDS[name].num_short)))
    failures = [str(failure) for _, failure in attempts if failure is not None]
    assert not failures, "repeat with `python tests/attack/fuzz.py`:\n" + "\n".join(failures)
