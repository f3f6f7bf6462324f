"""The user's caches: their folders, their limits, and the cache of compiled programs. No torch.

A cache only ever saves time. The cache of tokenised texts is in data/token_cache.py. Compiled programs lie in a folder
that torch fills by its own rules: this file only decides where the folder is and what is deleted from it.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from inlay.errors import BadConfig

LIMIT_BYTES = 2 << 30
"""limit of every cache, unless $INLAY_CACHE_BYTES says otherwise"""
_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_GONE = ".gone-"
_LOCKS = "locks"  # torch's own: they weigh nothing, and a process may hold one
_RECENT_SECONDS = 3600


@dataclass(frozen=True)
class Usage:
    """The number of files and bytes in a cache."""

    num_files: int
    num_bytes: int


@dataclass(frozen=True)
class _Entry:
    """A folder with everything below it. It is deleted as a whole: half of a compiled kernel is worse than none."""

    path: Path
    used: float
    usage: Usage

    @property
    def is_recent(self) -> bool:
        return time.time() - self.used < _RECENT_SECONDS


def cache_folder(name: str) -> Path:
    """Return the folder of the user's cache of this name, under $XDG_CACHE_HOME/inlay."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return root / "inlay" / name


def cache_limit() -> int:
    """Return the limit of a cache in bytes, by $INLAY_CACHE_BYTES; 0 means no cache."""
    limit = os.environ.get("INLAY_CACHE_BYTES", "").strip() or str(LIMIT_BYTES)
    if not limit.isdecimal():
        hint = f"give a whole number of bytes, such as {LIMIT_BYTES}, or 0 for no cache"
        raise BadConfig(f"`$INLAY_CACHE_BYTES` is `{limit}`", hint)
    return int(limit)


class CompiledCache:
    """The folder of compiled programs. It grows while processes compile: `make_room` brings it back to its limit.

    Entries used within the hour are never deleted: a process may still be writing them.
    """

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes

    def usage(self) -> Usage:
        """Return how many files and bytes there are."""
        return _add_up(self._entries())

    def clear(self, *, dry_run: bool = False) -> Usage:
        """Delete everything but recent entries, and return how much that was."""
        idle = [entry for entry in self._entries() if not entry.is_recent]
        return _add_up(idle if dry_run else [entry for entry in idle if _delete_idle(entry.path)])

    def make_room(self) -> None:
        """Delete the least recently used entries until the limit holds or only recent ones are left."""
        entries = sorted(self._entries(), key=lambda entry: entry.used)
        total = _add_up(entries).num_bytes
        for entry in entries:
            if total <= self.limit_bytes or entry.is_recent:
                return
            if _delete_idle(entry.path):
                total -= entry.usage.num_bytes

    def _entries(self) -> Iterator[_Entry]:
        """Yield the topmost folders that hold files or are empty, each with everything below it."""
        for root, folders, names in os.walk(self.folder):
            if Path(root) == self.folder:
                folders[:] = [name for name in folders if name != _LOCKS]
            elif names or not folders:
                folders.clear()
                yield _look(Path(root))


def open_compiled() -> CompiledCache:
    """Return the cache of compiled programs. It is not used if $TORCHINDUCTOR_CACHE_DIR names another folder."""
    return CompiledCache(cache_folder("compiled"), cache_limit())


def find_others_folder() -> Path | None:
    """Return the folder of $TORCHINDUCTOR_CACHE_DIR if it is not ours; then we leave it alone."""
    given = os.environ.get(_VARIABLE)
    if not given or Path(given) == cache_folder("compiled"):
        return None
    # Torch itself sets the variable to its temporary folder, as soon as its compiler is imported.
    is_torchs = Path(given).parent == Path(tempfile.gettempdir()) and Path(given).name.startswith("torchinductor_")
    return None if is_torchs else Path(given)


def use_compiled() -> None:
    """Let torch keep compiled programs in the cache from here on; the first call in a process makes room there.

    Without a cache (a limit of 0), or if another folder is named already, torch keeps them where it would anyway.
    """
    compiled = open_compiled()
    if find_others_folder() is not None or not compiled.limit_bytes:
        return
    _make_room_once(compiled.folder, compiled.limit_bytes)
    os.environ[_VARIABLE] = str(compiled.folder)


@cache
def _make_room_once(folder: Path, limit_bytes: int) -> None:
    CompiledCache(folder, limit_bytes).make_room()


def _add_up(entries: Iterable[_Entry]) -> Usage:
    usages = [entry.usage for entry in entries]
    return Usage(sum(usage.num_files for usage in usages), sum(usage.num_bytes for usage in usages))


def _look(path: Path) -> _Entry:
    """Return a folder with everything below it, as it is now."""
    inside = [Path(root, name) for root, folders, names in os.walk(path) for name in (*folders, *names)]
    used, sizes = 0.0, []
    for each in (path, *inside):
        with suppress(OSError):  # deleted meanwhile
            status = each.lstat()
            used = max(used, status.st_mtime)  # of a folder too: a file may be about to appear in it
            if not stat.S_ISDIR(status.st_mode):
                # Reading changes the access time where the system keeps it, once a day or so; else age decides.
                used = max(used, status.st_atime)
                sizes.append(status.st_size)
    return _Entry(path, used, Usage(len(sizes), sum(sizes)))


def _delete_idle(path: Path) -> bool:
    """Delete a folder, unless it was used meanwhile: kernels that have nothing to do with each other share folders.

    Return whether it is gone, if only because another process was faster.
    """
    if _look(path).is_recent:
        return False
    # Renamed first, in one moment: no other process may find half of it.
    gone = path.with_name(f"{_GONE}{os.getpid()}-{os.urandom(4).hex()}")
    try:
        os.rename(path, gone)
    except OSError:
        return not path.exists()
    shutil.rmtree(gone, ignore_errors=True)
    return True
