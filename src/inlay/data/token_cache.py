"""A cache of tokenised texts, in memory and on disk.

The key of a set of windows is a hash of everything that it depends on: the texts, the words to tag in them, the
tokenizer and its settings. So no entry is ever out of date. Large sets are kept as arrays in files of the user's cache
(`ArrayCache`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from inlay.caches import LIMIT_BYTES, Usage, cache_folder, cache_limit
from inlay.data.encode import Encoded, flatten
from inlay.data.tasks import Split
from inlay.data.windows import Progress, Reading, encode_split, find_layout

SMALL_CHARACTERS = 100_000
"""Smaller sets are not kept on disk: they are tokenised in a fraction of a second."""
MEMORY_BYTES = 256 << 20
_LATER = {"prompt": "", "pairs": "joined"}  # settings added after sets were first kept, with their old values
_FORMAT = 1  # raise it with every change in how texts become windows


class MemoryCache:
    """The most recently used sets of this process, up to a number of bytes."""

    def __init__(self, limit_bytes: int = MEMORY_BYTES) -> None:
        self._limit_bytes, self._num_bytes = limit_bytes, 0
        self._known: OrderedDict[str, Encoded] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Encoded | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def put(self, key: str, encoded: Encoded) -> None:
        with self._lock:
            if key in self._known:
                return
            self._known[key] = encoded
            self._num_bytes += encoded.num_bytes
            while self._num_bytes > self._limit_bytes:
                self._num_bytes -= self._known.popitem(last=False)[1].num_bytes


_MEMORY = MemoryCache()
_IDENTITIES: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()


def encode_cached(tokenizer: Any, split: Split, reading: Reading, progress: Progress | None = None) -> Encoded:
    """Return what `encode_split` returns, kept in this process and, if the set is large, in the user's cache.

    `progress` is not called for a set that is cached.
    """
    key = _name_set(tokenizer, split, reading)
    encoded = _MEMORY.get(key)
    if encoded is None:
        size = sum(map(len, split.texts)) + sum(map(len, split.pairs or ()))
        cache = open_tokens() if size >= SMALL_CHARACTERS else None
        arrays = None if cache is None else cache.read(key)
        if arrays is not None:
            num_truncated, num_lost = arrays.pop("counts").tolist()
            fields: dict[str, Any] = {"flat_segments": None, **arrays}
            encoded = Encoded(**fields, num_truncated=num_truncated, num_lost=num_lost)
        else:
            encoded = encode_split(tokenizer, split, reading, progress)
            if cache is not None:
                counts = np.array([encoded.num_truncated, encoded.num_lost], dtype=np.int64)
                cache.write(key, {**encoded.arrays(), "counts": counts})
        _MEMORY.put(key, encoded)
    return encoded


def open_tokens() -> ArrayCache:
    """Open the user's cache of tokenised texts.

    It is under $XDG_CACHE_HOME/inlay; $INLAY_CACHE_BYTES limits its size, and 0 turns it off.
    """
    return ArrayCache(cache_folder("tokens"), cache_limit())


def _name_set(tokenizer: Any, split: Split, reading: Reading) -> str:
    """Return the key of a set: the sha256 of everything that decides its windows."""
    words = find_layout(reading.kind).words
    asked = {
        "format": _FORMAT,
        # Later settings are left out at their old values, so that sets kept by earlier versions are still found.
        "reading": {key: value for key, value in dataclasses.asdict(reading).items() if _LATER.get(key, ...) != value},
        "tokenizer": _identify(tokenizer),
        "tokenizers": importlib.metadata.version("tokenizers"),
        "inputs": list(tokenizer.model_input_names),
        "cut_side": tokenizer.truncation_side,
        "splits_special": bool(tokenizer.split_special_tokens),
        "columns": [split.texts is not None, split.pairs is not None, words is not None],
    }
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
    for texts in (split.texts, split.pairs):
        if texts is not None:
            contents = [text.encode("utf8", "surrogatepass") for text in texts]
            lengths = np.array([len(contents), *map(len, contents)], dtype=np.int64)
            digest.update(lengths.tobytes())  # else moving a character from one text to the next would change nothing
            digest.update(b"".join(contents))
    for spans in () if words is None else words(split):
        digest.update(f"{len(spans)}:".encode() + flatten(spans).tobytes())
    return digest.hexdigest()


def _identify(tokenizer: Any) -> str:
    """Return a sha256 of what a tokenizer does to texts, computed once; its only later change is more tokens."""
    backend = tokenizer.backend_tokenizer
    num_tokens = int(backend.get_vocab_size())
    known = _IDENTITIES.get(tokenizer)
    if known is None or known[0] != num_tokens:
        parts = json.loads(backend.to_str())
        del parts["truncation"], parts["padding"]  # settings of one call, or of the library that saved it
        known = num_tokens, hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        _IDENTITIES[tokenizer] = known
    return known[1]


_SUFFIX, _DRAFT = ".safetensors", ".draft-"
_STALE_SECONDS = 3600  # a draft as old as this was left by a dead process
_DTYPES: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}


class ArrayCache:
    """Sets of int32 and int64 arrays in files of one folder; the least recently used are deleted beyond the limit."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes

    def read(self, key: str) -> dict[str, np.ndarray] | None:
        """Return the arrays written under `key`, mapped into memory and read-only; None if there are none."""
        if not self.limit_bytes:
            return None
        path = self.folder / f"{key}{_SUFFIX}"
        try:
            arrays = _map_arrays(path)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # a damaged file raises any of these
            return None
        with suppress(OSError):
            os.utime(path)  # a file's time is its last use
        return arrays

    def write(self, key: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep arrays under `key`, if they fit the limit and the folder is writable."""
        from safetensors.numpy import save

        if not 0 < sum(array.nbytes for array in arrays.values()) <= self.limit_bytes:
            return
        whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        draft = self.folder / f"{_DRAFT}{os.getpid()}-{os.urandom(8).hex()}"
        try:
            # For the user alone, whatever the umask: the user's texts can be restored from their token ids.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_bytes(save(whole, {"crc32": _checksum(whole)}))
            os.replace(draft, self.folder / f"{key}{_SUFFIX}")
        except OSError:
            _delete(draft)
        self._make_room()

    def usage(self) -> Usage:
        """Return how many files and bytes the cache has."""
        files = self._files()
        return Usage(len(files), sum(status.st_size for _, status in files))

    def clear(self, *, dry_run: bool = False) -> Usage:
        """Delete everything; return how much that is."""
        files = self._files()
        for path, _ in () if dry_run else files:
            _delete(path)
        return Usage(len(files), sum(status.st_size for _, status in files))

    def _make_room(self) -> None:
        files = sorted(self._files(), key=lambda file: file[1].st_mtime)
        total = sum(status.st_size for _, status in files)
        for path, status in files:
            is_draft, age = path.name.startswith(_DRAFT), time.time() - status.st_mtime
            if age > _STALE_SECONDS if is_draft else total > self.limit_bytes:
                _delete(path)
                total -= status.st_size

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        files = []
        with suppress(OSError):
            for entry in os.scandir(self.folder):
                with suppress(OSError):  # deleted meanwhile
                    if entry.name.endswith(_SUFFIX) or entry.name.startswith(_DRAFT):
                        files.append((Path(entry.path), entry.stat()))
        return files


def _map_arrays(path: Path) -> dict[str, np.ndarray]:
    """Map the arrays of a safetensors file, as views of its bytes. A damaged file raises any error."""
    mapped = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    header = json.loads(mapped[8:start].tobytes())
    checksum = header.pop("__metadata__")["crc32"]
    arrays = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        arrays[name] = mapped[start + first : start + last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    if _checksum(arrays) != checksum:
        raise ValueError(f"{path}: these are not the bytes that were written")
    return arrays


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    found = 0
    for name, array in sorted(arrays.items(), key=lambda item: item[0]):
        found = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), found)
        found = zlib.crc32(array.reshape(-1).view(np.uint8).data, found)
    return f"{found:08x}"


def _delete(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
