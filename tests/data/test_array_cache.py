"""A cache only ever saves time: damage, deletion and other processes never make it wrong, and it keeps its limit."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from inlay.data.token_cache import LIMIT_BYTES, ArrayCache, open_tokens
from inlay.errors import BadConfig

SOURCE = Path(__file__).parents[2] / "src"


def numbers(size, start=0):
    return {"ids": np.arange(start, start + size, dtype=np.int32), "edges": np.array([[0, size]], dtype=np.int64)}


def same(found, wanted):
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype and np.array_equal(found[name], wanted[name]) for name in wanted
    )


def files(cache):
    return sorted(path.name for path in cache.folder.iterdir())


def test_what_is_read_is_what_was_written(tmp_path):
    cache = ArrayCache(tmp_path / "cache")
    wanted = {**numbers(1001), "empty": np.zeros((0, 2), dtype=np.int32), "one": np.ones(1, dtype=np.int64)}
    cache.write("a", wanted)
    assert same(cache.read("a"), wanted)
    assert cache.read("b") is None


def test_arrays_that_do_not_lie_in_order_are_written_as_they_read(tmp_path):
    cache = ArrayCache(tmp_path)
    wanted = {"turned": np.arange(12, dtype=np.int64).reshape(3, 4).T, "skipping": np.arange(9, dtype=np.int32)[::2]}
    cache.write("a", wanted)
    assert same(cache.read("a"), wanted)


def test_what_is_read_is_the_file_itself_and_cannot_be_changed(tmp_path):
    cache = ArrayCache(tmp_path)
    cache.write("a", numbers(1000))
    found = cache.read("a")["ids"]
    base = found
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 7


def test_what_is_in_use_stays_when_its_file_is_deleted(tmp_path):
    cache = ArrayCache(tmp_path)
    cache.write("a", numbers(100_000))
    found = cache.read("a")
    assert cache.clear().num_files == 1
    assert cache.usage().num_files == 0
    assert same(found, numbers(100_000))


def garble(content):
    yield b""
    yield b"\xff" * 7
    yield b"\xff" * 400
    yield (10**6).to_bytes(8, "little") + b"{}"
    yield (2).to_bytes(8, "little") + b"[]"
    yield (4).to_bytes(8, "little") + b"null"
    for cut in (8, 100, len(content) // 2, len(content) - 1):
        yield content[:cut]
    for place in (0, 12, len(content) // 2, len(content) - 1):
        yield content[:place] + bytes([content[place] ^ 8]) + content[place + 1 :]


def test_a_damaged_file_is_as_if_absent_and_is_replaced(tmp_path):
    cache = ArrayCache(tmp_path)
    cache.write("a", numbers(1000))
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for damaged in garble(content):
        path.write_bytes(damaged)
        assert cache.read("a") is None, damaged[:40]
    cache.write("a", numbers(1000))
    assert path.read_bytes() == content


def test_the_limit_is_kept_and_the_least_recently_used_goes_first(tmp_path):
    one = 4 * 10_000
    cache = ArrayCache(tmp_path, limit_bytes=3 * one + 2000)
    for age, key in enumerate("abc"):
        cache.write(key, numbers(10_000))
        os.utime(tmp_path / f"{key}.safetensors", (1000 + age, 1000 + age))
    assert cache.read("a") is not None  # so it is the youngest
    cache.write("d", numbers(10_000))
    assert files(cache) == ["a.safetensors", "c.safetensors", "d.safetensors"]
    assert cache.usage().num_bytes <= cache.limit_bytes
    cache.write("wide", numbers(20_000))
    assert "wide.safetensors" in files(cache)
    assert cache.usage().num_bytes <= cache.limit_bytes


def test_what_is_larger_than_the_limit_is_not_written(tmp_path):
    cache = ArrayCache(tmp_path, limit_bytes=10_000)
    cache.write("small", numbers(100))
    cache.write("large", numbers(10_000))
    assert files(cache) == ["small.safetensors"]


def test_a_limit_of_nothing_is_no_cache(tmp_path):
    ArrayCache(tmp_path).write("a", numbers(10))
    off = ArrayCache(tmp_path / "off", limit_bytes=0)
    off.write("a", numbers(10))
    assert off.read("a") is None
    assert not off.folder.exists()
    assert ArrayCache(tmp_path, limit_bytes=0).read("a") is None


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = ArrayCache(tmp_path / "file" / "cache")
    cache.write("a", numbers(10))
    assert cache.read("a") is None
    assert cache.usage().num_files == cache.clear().num_files == 0


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    cache = ArrayCache(tmp_path)
    monkeypatch.setattr(os, "replace", full)
    cache.write("a", numbers(10))
    assert files(cache) == []


def test_drafts_of_the_dead_are_cleared_and_those_of_the_living_are_not(tmp_path):
    cache = ArrayCache(tmp_path)
    for name, age in ((".draft-1-old", 1000), (".draft-2-new", None)):
        (tmp_path / name).write_bytes(b"half")
        if age is not None:
            os.utime(tmp_path / name, (age, age))
    cache.write("a", numbers(10))
    assert files(cache) == [".draft-2-new", "a.safetensors"]


def test_files_that_are_not_the_caches_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    cache = ArrayCache(tmp_path, limit_bytes=1000)
    cache.write("a", numbers(10))
    cache.clear()
    assert files(cache) == ["notes.txt"]


def test_the_folder_is_for_the_user_alone(tmp_path):
    cache = ArrayCache(tmp_path / "cache")
    cache.write("a", numbers(10))
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700


WRITER = """
import sys; from pathlib import Path; import numpy as np
from inlay.data.token_cache import ArrayCache
cache = ArrayCache(Path(sys.argv[1]), limit_bytes=150_000)
for turn in range(60):
    for key in "abcd":
        found = cache.read(key)
        if found is None:
            cache.write(key, {"ids": np.full(10_000, ord(key), dtype=np.int32)})
        else:
            assert (found["ids"] == ord(key)).all()
"""


def test_processes_that_share_a_folder_beyond_its_limit_read_whole_files_or_none(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for _ in range(3)]
    for writer in writers:
        assert writer.communicate()[1] == b""
        assert writer.returncode == 0
    assert set(files(ArrayCache(tmp_path))) <= {f"{key}.safetensors" for key in "abcd"}
    cache = ArrayCache(tmp_path, limit_bytes=150_000)
    cache.write("a", {"ids": np.full(10_000, ord("a"), dtype=np.int32)})
    assert cache.usage().num_bytes <= 150_000


def test_where_and_how_large_is_the_users_to_say(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("INLAY_CACHE_BYTES")
    assert open_tokens().folder == tmp_path / "inlay" / "tokens"
    assert open_tokens().limit_bytes == LIMIT_BYTES == 2 * 1024**3
    monkeypatch.setenv("INLAY_CACHE_BYTES", "1000")
    assert open_tokens().limit_bytes == 1000
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert open_tokens().folder == Path.home() / ".cache" / "inlay" / "tokens"
    monkeypatch.setenv("INLAY_CACHE_BYTES", "2G")
    with pytest.raises(BadConfig, match="`2G`"):
        open_tokens()
