"""Arrays computed once: a folder of files that keeps within its limit.

A cache only ever saves time. A file that is damaged, half there, just deleted or unwritable counts as absent, and what
it held is computed again. Many processes may use the folder at once: a file appears whole and is never changed, so one
that is in use, mapped into memory, stays as it was even after another process deletes it.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inlay.caches import LIMIT_BYTES, Usage, cache_folder, cache_limit

_SUFFIX, _DRAFT = ".safetensors", ".draft-"
_STALE_SECONDS = 3600  # a draft this old has lost its writer
_DTYPES: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}


@dataclass(frozen=True)
class _File:
    used: float
    size_bytes: int
    path: Path


class ArrayCache:
    """Named sets of int32 and int64 arrays under one folder; the least recently used go when the limit is passed."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes

    def read(self, key: str) -> dict[str, np.ndarray] | None:
        """The arrays written under `key`, mapped into memory and not to be changed; None: there are none."""
        if not self.limit_bytes:
            return None
        path = self._path(key)
        try:
            arrays = _map_arrays(path)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # whatever garbage makes of itself
            return None
        with suppress(OSError):
            os.utime(path)  # its time is that of its last use
        return arrays

    def write(self, key: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep arrays under `key`, if they fit the limit and the folder can be written to."""
        from safetensors.numpy import save

        if not 0 < sum(array.nbytes for array in arrays.values()) <= self.limit_bytes:
            return
        whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        draft = self.folder / f"{_DRAFT}{os.getpid()}-{os.urandom(8).hex()}"
        try:
            # For the user alone, whatever the umask: token ids are the user's texts, near enough.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_bytes(save(whole, {"crc32": _checksum(whole)}))
            os.replace(draft, self._path(key))
        except OSError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        self._make_room()

    def usage(self) -> Usage:
        """How much there is."""
        files = self._files()
        return Usage(len(files), sum(file.size_bytes for file in files))

    def clear(self, *, dry_run: bool = False) -> Usage:
        """Delete everything; says how much that is."""
        files = self._files()
        for file in () if dry_run else files:
            _delete(file)
        return Usage(len(files), sum(file.size_bytes for file in files))

    def _make_room(self) -> None:
        files = sorted(self._files(), key=lambda file: file.used)
        total = sum(file.size_bytes for file in files)
        for file in files:
            is_draft, age = file.path.name.startswith(_DRAFT), time.time() - file.used
            if age > _STALE_SECONDS if is_draft else total > self.limit_bytes:
                _delete(file)
                total -= file.size_bytes

    def _files(self) -> list[_File]:
        files = []
        with suppress(OSError):
            for entry in os.scandir(self.folder):
                with suppress(OSError):  # deleted meanwhile
                    if entry.name.endswith(_SUFFIX) or entry.name.startswith(_DRAFT):
                        status = entry.stat()
                        files.append(_File(status.st_mtime, status.st_size, Path(entry.path)))
        return files

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"


def open_cache(name: str) -> ArrayCache:
    """The user's cache of this name: under $XDG_CACHE_HOME/inlay, as large as $INLAY_CACHE_BYTES allows; 0 is none."""
    return ArrayCache(cache_folder(name), cache_limit())


def _map_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file, as views of its bytes. Raises what the damage makes it raise."""
    mapped = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    header = json.loads(mapped[8:start].tobytes())
    checksum = header.pop("__metadata__")["crc32"]
    arrays = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        arrays[name] = mapped[start + first : start + last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    if _checksum(arrays) != checksum:
        raise ValueError(f"{path}: its bytes are not those that were written")
    return arrays


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    found = 0
    for name, array in sorted(arrays.items(), key=lambda item: item[0]):
        found = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), found)
        found = zlib.crc32(array.reshape(-1).view(np.uint8).data, found)
    return f"{found:08x}"


def _delete(file: _File) -> None:
    with suppress(OSError):
        file.path.unlink(missing_ok=True)
