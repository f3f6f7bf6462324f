"""The cache of compiled programs: where it is, what leaves it, and that processes find what others compiled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inlay import caches
from inlay.caches import CompiledCache, find_others_folder, open_compiled, use_compiled

HOUR, DAY = 3600, 24 * 3600
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """The user's cache under `tmp_path`; what a test sets in the environment is gone after it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("INLAY_CACHE_BYTES", "3000")
    monkeypatch.setenv(VARIABLE, "")
    return tmp_path / "inlay" / "compiled"


def put(folder: Path, *, age_s: float, sizes=(1000,)) -> Path:
    """An entry as torch makes one: a folder of files, last used so long ago."""
    folder.mkdir(parents=True)
    for number, size in enumerate(sizes):
        file = folder / f"part-{number}"
        file.write_bytes(bytes(size))
        os.utime(file, (time.time() - age_s,) * 2)
    os.utime(folder, (time.time() - age_s,) * 2)
    return folder


def test_what_was_used_longest_ago_leaves_when_the_limit_is_passed(tmp_path):
    old, middle = put(tmp_path / "triton/0/AB", age_s=3 * DAY), put(tmp_path / "fxgraph/cd/key", age_s=2 * DAY)
    new = put(tmp_path / "ef", age_s=DAY)
    CompiledCache(tmp_path, 2000).make_room()
    assert [path.exists() for path in (old, middle, new)] == [False, True, True]


def test_files_of_one_kernel_leave_together(tmp_path):
    kernel, other = put(tmp_path / "triton/0/AB", age_s=2 * DAY, sizes=(10, 10, 1000)), put(tmp_path / "cd", age_s=DAY)
    os.utime(kernel / "part-0", (time.time() - 3 * DAY,) * 2)
    CompiledCache(tmp_path, 1500).make_room()
    assert not kernel.exists()
    assert other.exists()


def test_what_was_read_lately_counts_as_used(tmp_path):
    read, written = put(tmp_path / "ab", age_s=3 * DAY), put(tmp_path / "cd", age_s=2 * DAY)
    os.utime(read / "part-0", (time.time() - DAY, time.time() - 3 * DAY))  # as the system notes a reader
    CompiledCache(tmp_path, 1000).make_room()
    assert read.exists()
    assert not written.exists()


def test_what_may_still_be_being_written_stays_whatever_the_limit(tmp_path):
    fresh = put(tmp_path / "ab", age_s=HOUR / 2)
    CompiledCache(tmp_path, 10).make_room()
    assert fresh.exists()


@pytest.mark.parametrize("fresh", ["sub/part-0", "part-1", "sub"])
def test_a_folder_stays_if_anything_under_it_is_recent(tmp_path, fresh):
    old = put(tmp_path / "ab", age_s=3 * DAY, sizes=(1000, 1000))
    put(old / "sub", age_s=3 * DAY), os.utime(old, (0, 0))
    os.utime(old / fresh)
    other = put(tmp_path / "cd", age_s=2 * DAY)
    cache = CompiledCache(tmp_path, 10)
    cache.make_room()
    assert cache.clear() == caches.Usage(0, 0), "the other one left before"
    assert not other.exists()
    assert sorted(path.name for path in old.rglob("*")) == ["part-0", "part-0", "part-1", "sub"]


@pytest.mark.parametrize("way", ["make_room", "clear"])
def test_what_another_process_writes_after_the_first_look_stays(tmp_path, monkeypatch, way):
    used, unused = put(tmp_path / "ab", age_s=3 * DAY), put(tmp_path / "cd", age_s=2 * DAY)
    entries = CompiledCache._entries

    def look_before_another_writes(cache):
        yield from list(entries(cache))
        (used / "new.py").write_bytes(bytes(10))

    monkeypatch.setattr(CompiledCache, "_entries", look_before_another_writes)
    getattr(CompiledCache(tmp_path, 1000), way)()
    assert (used / "new.py").exists()
    assert not unused.exists(), "its turn instead: the limit holds by what was deleted, not by what was tried"


def test_two_processes_that_make_room_at_once_delete_no_more_than_one(tmp_path, monkeypatch):
    old, *others = [put(tmp_path / name, age_s=days * DAY) for days, name in ((4, "ab"), (3, "cd"), (2, "ef"))]
    entries = CompiledCache._entries

    def look_before_another_deletes(cache):
        yield from list(entries(cache))
        shutil.rmtree(old)

    monkeypatch.setattr(CompiledCache, "_entries", look_before_another_deletes)
    CompiledCache(tmp_path, 2000).make_room()
    assert all(path.exists() for path in others)


def test_clearing_spares_locks_and_what_is_recent_and_says_how_much_it_deleted(tmp_path):
    put(tmp_path / "ab", age_s=DAY, sizes=(10, 20)), put(tmp_path / "triton/0/CD", age_s=DAY, sizes=(5,))
    lock, fresh = put(tmp_path / "locks", age_s=DAY, sizes=(0,)), put(tmp_path / "triton/0/EF", age_s=0, sizes=(7,))
    cache = CompiledCache(tmp_path)
    assert vars(cache.usage()) == {"num_files": 4, "num_bytes": 42}
    assert cache.clear(dry_run=True) == caches.Usage(3, 35)
    assert vars(cache.usage()) == {"num_files": 4, "num_bytes": 42}
    assert cache.clear() == caches.Usage(3, 35)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {lock / "part-0", fresh / "part-0"}
    assert vars(cache.usage()) == {"num_files": 1, "num_bytes": 7}


def test_folders_that_were_emptied_leave_later(tmp_path):
    put(tmp_path / "fxgraph/ab", age_s=DAY, sizes=())
    CompiledCache(tmp_path).clear()
    assert [path.name for path in tmp_path.rglob("*")] == ["fxgraph"]


def test_a_folder_that_is_not_there_is_an_empty_cache(tmp_path):
    cache = CompiledCache(tmp_path / "nothing")
    cache.make_room()
    assert cache.clear() == caches.Usage(0, 0)


def test_torch_is_told_our_folder_after_room_was_made_in_it(own_cache):
    old = put(own_cache / "ab", age_s=DAY, sizes=(4000,))
    use_compiled()
    assert os.environ[VARIABLE] == str(own_cache)
    assert not old.exists()
    assert find_others_folder() is None


@pytest.mark.parametrize("ending", ["", "/"])
def test_room_is_made_though_the_environment_names_our_folder_already(own_cache, monkeypatch, ending):
    monkeypatch.setenv(VARIABLE, f"{own_cache}{ending}")  # as a parent process leaves it
    old = put(own_cache / "ab", age_s=DAY, sizes=(4000,))
    use_compiled()
    assert not old.exists()


def test_room_is_made_once_in_a_process(own_cache):
    use_compiled()
    old = put(own_cache / "ab", age_s=DAY, sizes=(4000,))
    use_compiled()
    assert old.exists(), "this process may be about to read it"


def test_the_temporary_folder_that_torch_names_itself_is_nobodys_wish(own_cache, monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv(VARIABLE, default_cache_dir())  # as importing the compiler does
    use_compiled()
    assert os.environ[VARIABLE] == str(own_cache)


def test_a_folder_that_somebody_named_is_theirs(own_cache, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "theirs"))
    old = put(own_cache / "ab", age_s=DAY, sizes=(4000,))
    use_compiled()
    assert os.environ[VARIABLE] == str(tmp_path / "theirs")
    assert find_others_folder() == tmp_path / "theirs"
    assert old.exists()


def test_without_a_cache_torch_is_told_nothing(own_cache, monkeypatch):
    monkeypatch.setenv("INLAY_CACHE_BYTES", "0")
    use_compiled()
    assert not os.environ[VARIABLE]
    assert open_compiled().limit_bytes == 0


PROGRAM = """
import contextlib, json, sys
import torch
from torch._dynamo.utils import counters
from inlay.caches import use_compiled
from inlay.model.kernels import fold_residual as rewrite

def norm(x_ND, slots):
    return torch.ops.inlay.layer_norm(x_ND @ x_ND, None, x_ND, None, slots, 16, 1e-5, False)[0]

use_compiled()
# The operator's own program needs a GPU: that it is compiled is enough, it need not run.
with contextlib.suppress(Exception):
    torch.compile(norm, backend=rewrite.inductor, fullgraph=True)(torch.ones(8, 8), torch.zeros(1, dtype=torch.int32))
found = counters["inductor"]
print(json.dumps([found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]]))
"""


@pytest.mark.long
def test_a_second_process_finds_what_a_first_compiled(own_cache, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("INLAY_CACHE_BYTES", "100000000")
    source = Path(caches.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    run = [sys.executable, "-c", PROGRAM]
    counts = [
        json.loads(subprocess.run(run, capture_output=True, text=True, check=True, env=environment).stdout)
        for _ in range(2)
    ]
    assert counts == [[1, 0], [0, 1]], "misses and hits: the first compiles, the second reads"
    assert open_compiled().usage().num_files > 0
