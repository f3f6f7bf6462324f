"""A cache of frozen layers: the input of the first trained layer, computed once for all epochs, runs and tasks.

Below the lowest layer that a method trains, no weight changes and there is no dropout, so a text's states there never
change. They are kept under a digest of its tokens, whichever task it is from: in the device's memory first, on a GPU
then in the host's, then in a mapped file. Each has a limit; states beyond the last limit are computed whenever they are
needed. The file has no name: however the process ends, the system frees its space.

What always holds: a text's states do not depend on whether and where they are kept. On a CPU they are the same to the
last bit whatever was computed beside them, so that a resumed run goes on as it would have.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from inlay.data import Encoded
from inlay.model import TOKEN_BUDGET, Backbone, Bank, CacheDepth, CachedStates, Row, batches_by_length, make_rows
from inlay.training.cohort.memory import available_bytes
from inlay.training.events import CacheFull, Emit, StatesCached, ignore

_MEMORY_SHARE, _DISK_SHARE = 4, 2  # shares of the free memory and disk: training needs the rest
# A product of few tokens is rounded otherwise than one of many (on two threads, below 200): a smaller batch repeats its
# rows, so that a text's states do not depend on the texts beside it.
_FEWEST_TOKENS = 512
_TEXTS_PER_REPORT = 100

Key = tuple[CacheDepth, bytes]
"""the depth of the states, and a digest of a window's tokens"""


@dataclass(frozen=True)
class Limits:
    """Upper limits in bytes for each kind of memory and the file; None means a share of the free space."""

    memory_bytes: int | None = None
    file_bytes: int | None = None


@dataclass(eq=False)
class _Buffer:
    """A kind of memory with a limit."""

    limit_bytes: int
    reserve: Callable[[int], Tensor]
    """allocates so many bytes; raises OSError or RuntimeError if they are not available"""
    used_bytes: int = 0

    @property
    def room_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(eq=False)
class _Chunk:
    """The states of several texts, one after another in a buffer."""

    buffer: _Buffer
    states_ND: Tensor
    keys: list[Key] = field(default_factory=list)


class CachedTexts:
    """The cached states of the windows of one set of texts."""

    def __init__(
        self, cache: FrozenCache, reach: CacheDepth, encoded: Encoded, stored: list[tuple[_Chunk, int] | None]
    ) -> None:
        self._cache, self._reach = cache, reach
        self._encoded, self._stored = encoded, stored
        self.chunks = {item[0] for item in stored if item is not None}

    def find(self, window: int) -> CachedStates | None:
        """Return the cached states of a window, if there are any."""
        stored = self._stored[window]
        if stored is None:
            return None
        chunk, start = stored
        return CachedStates(self._reach, chunk.states_ND[start : start + int(self._encoded.lengths[window])])

    def take(self, windows: Sequence[int]) -> list[CachedStates]:
        """Return the states of some windows; those that are not cached are computed now."""
        found = {window: prefix for window in windows if (prefix := self.find(window)) is not None}
        left = [window for window in dict.fromkeys(windows) if window not in found]
        for position, states_TD in self._cache.compute(self._reach, _rows(self._encoded, left)):
            found[left[position]] = CachedStates(self._reach, states_TD)
        return [found[window] for window in windows]


class FrozenCache:
    """The cached states of frozen layers for the runs of one `fit`. Close it to free the memory and the file."""

    def __init__(self, backbone: Backbone, folder: Path, emit: Emit = ignore, limits: Limits = Limits()) -> None:
        self._backbone, self._bank, self._emit = backbone, Bank(backbone, 1), emit
        self._folder, self._limits = folder, limits
        self._chunks: list[_Chunk] = []
        self._index: dict[Key, tuple[_Chunk, int]] = {}
        self._users: weakref.WeakSet[CachedTexts] = weakref.WeakSet()
        self._has_told = False

    @property
    def uses_memory(self) -> bool:
        """Whether anything is kept outside the file."""
        return self._limits.memory_bytes != 0

    def leave(self, free_bytes: int | None) -> int | None:
        """Return how many of `free_bytes` are left for everything else when the cache is full."""
        if free_bytes is None:
            return None
        limit = self._limits.memory_bytes
        return free_bytes - (free_bytes // _MEMORY_SHARE if limit is None else min(limit, free_bytes))

    @cached_property
    def _buffers(self) -> list[_Buffer]:
        return _make_buffers(self._backbone.device, self._folder, self._limits)

    def keep(self, reach: CacheDepth, encoded: Encoded) -> CachedTexts:
        """Return the cached states of a text set at a layer; missing ones are computed now."""
        # 1. Find the texts that are not cached yet; make room if they do not fit.
        keys = [_digest(reach, row) for row in _rows(encoded, range(len(encoded)))]
        new, width = self._find_new(keys), self._backbone.hidden_size * (1 + reach.with_attention)
        token_bytes = width * self._backbone.dtype.itemsize
        if encoded.lengths[new].sum() * token_bytes > self._buffers[0].room_bytes:
            self._drop_unused()  # some of these very texts may be cached already
            new = self._find_new(keys)
        # 2. Fill one buffer after another. Longest first, as they go through the backbone.
        left = new[np.argsort(-encoded.lengths[new], kind="stable")]
        for buffer in self._buffers:
            sizes = np.cumsum(encoded.lengths[left]) * token_bytes
            fitting = left[: np.searchsorted(sizes, buffer.room_bytes, side="right")]
            num_tokens = int(encoded.lengths[fitting].sum())
            if not num_tokens:
                continue
            try:
                memory = buffer.reserve(num_tokens * token_bytes)
            except (OSError, RuntimeError):  # another process took memory that was free when the limit was set
                buffer.limit_bytes = buffer.used_bytes
                continue
            buffer.used_bytes += memory.nbytes
            chunk = _Chunk(buffer, memory.view(self._backbone.dtype).view(num_tokens, width))
            self._chunks.append(chunk)
            starts = np.cumsum(encoded.lengths[fitting]) - encoded.lengths[fitting]
            states = self.compute(reach, _rows(encoded, fitting))
            for num_done, (position, states_TD) in enumerate(states, start=1):
                start = int(starts[position])
                chunk.states_ND[start : start + len(states_TD)] = states_TD
                if num_done % _TEXTS_PER_REPORT == 0 or num_done == len(fitting):
                    self._emit(StatesCached(len(new) - len(left) + num_done, len(new)))
            chunk.keys = [keys[window] for window in fitting]
            self._index |= {key: (chunk, start) for key, start in zip(chunk.keys, starts.tolist(), strict=True)}
            left = left[len(fitting) :]
        if len(left) and not self._has_told:
            self._has_told = True
            self._emit(CacheFull(len(left), len(encoded)))
        texts = CachedTexts(self, reach, encoded, [self._index.get(key) for key in keys])
        self._users.add(texts)
        return texts

    def compute(self, reach: CacheDepth, rows: Sequence[Row]) -> Iterator[tuple[int, Tensor]]:
        """Yield each row's position and its states at depth `reach`."""
        backbone, lengths = self._backbone, [len(row.ids) for row in rows]
        # Padding depends on the rows of the same batch, and padding changes rounding in the last bit.
        is_alone = backbone.device.type == "cpu" and not backbone.packs
        budget = 1 if is_alone else TOKEN_BUDGET[backbone.device.type]
        for positions in batches_by_length(lengths, budget, packs=backbone.packs):
            num_tokens = sum(lengths[position] for position in positions)
            num_copies = 1 if is_alone else -(-_FEWEST_TOKENS // num_tokens)
            batch = backbone.collate([rows[position] for position in positions] * num_copies)
            with torch.no_grad(), self._bank.routed(batch.route):
                states = backbone.prefix(batch, reach)
            for index, origin in enumerate(batch.order):
                if origin < len(positions):  # not a copy
                    length = lengths[positions[origin]]
                    start = 0 if batch.pack is None else batch.pack.starts[index]
                    yield positions[origin], states[index if batch.pack is None else 0, start : start + length]

    def close(self) -> None:
        """Free all memory, including what a stopped run still refers to."""
        for chunk in self._chunks:
            chunk.states_ND = chunk.states_ND.new_empty(0)
        self._chunks.clear()
        self._index.clear()

    def _find_new(self, keys: Sequence[Key]) -> np.ndarray:
        """Find the windows whose states are not cached, each text once."""
        new = {key: window for window, key in enumerate(keys) if key not in self._index}
        return np.array(list(new.values()), dtype=np.int64)

    def _drop_unused(self) -> None:
        """Free the states that no current run reads."""
        used = {chunk for user in self._users for chunk in user.chunks}
        for chunk in [chunk for chunk in self._chunks if chunk not in used]:
            for key in chunk.keys:
                del self._index[key]
            chunk.buffer.used_bytes -= chunk.states_ND.nbytes
            self._chunks.remove(chunk)


def _rows(encoded: Encoded, windows: Iterable[int]) -> list[Row]:
    assert encoded.firsts is None, "texts that are read apart are not reused"
    return make_rows(map(encoded.window, windows))


def _digest(reach: CacheDepth, row: Row) -> Key:
    digest = hashlib.blake2b(bytes(row.ids), digest_size=16)
    if row.segments is not None:
        digest.update(bytes(row.segments))
    return reach, digest.digest()


def _make_buffers(device: torch.device, folder: Path, limits: Limits) -> list[_Buffer]:
    """Make the buffers that hold states, the fastest first."""
    host, is_cuda = torch.device("cpu"), device.type == "cuda"
    reserved = {device: {"device": device}, host: {"pin_memory": is_cuda}}
    memories = [
        _Buffer(
            (available_bytes(kind) or 0) // _MEMORY_SHARE if limits.memory_bytes is None else limits.memory_bytes,
            partial(torch.empty, dtype=torch.uint8, **options),  # type: ignore[arg-type]
        )
        for kind, options in reserved.items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free // _DISK_SHARE
    return [*memories, _Buffer(free if limits.file_bytes is None else limits.file_bytes, partial(_map_file, folder))]


def _map_file(folder: Path, num_bytes: int) -> Tensor:
    """Map a file without a name, which disappears when nothing refers to it."""
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            # Allocate all of it now: writing to a mapped page on a full disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        else:
            file.truncate(num_bytes)
        return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
