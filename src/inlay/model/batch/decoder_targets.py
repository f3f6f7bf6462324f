"""The answers to the rows of a rung, at fixed addresses: what a decoder writes in a pass of fixed shapes.

Every row has as many tokens, those behind an answer's end included. Of the rows of padding, which come last, only as
many are answered as there is room for real ones, with nothing, by the last slot, as they are read.

Shape letters: R rows, T tokens of an answer, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from inlay.model.batch.buckets import Capacity
from inlay.model.batch.route import IGNORED, Route, Tiling
from inlay.model.batch.tiles import lay_tiles, place_tiles, tile_capacity, tile_for


class DecoderTargets:
    """Room for answers of at most `width` tokens. `fill` writes them in one copy; `route` never changes."""

    def __init__(self, capacity: Capacity, width: int, device: torch.device) -> None:
        self._num_rows, self._width, self._num_slots = capacity.num_rows, width, capacity.num_slots
        num_tokens = self._num_rows * width
        self._tile = tile_for(num_tokens)
        self._num_tiles = tile_capacity(num_tokens, min(capacity.num_slots, capacity.num_rows), self._tile)
        sizes = [num_tokens, num_tokens, 3 * self._num_tiles + 2 * self._num_slots]
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._there = torch.zeros_like(self._host, device=device)
        written, slots_N, tiles = self._there.split(sizes)
        self.written_RT = written.view(self._num_rows, width)
        """what is to be written, -100 behind its end"""
        placed, nowhere = place_tiles(tiles, self._num_slots, self._tile), written[:0]
        self.route = Route((), tiling=Tiling(placed, slots_N, nowhere, nowhere, max_length=0))

    def lay(self, answers: Sequence[np.ndarray], slots: np.ndarray) -> np.ndarray:
        """What the buffers will hold for these answers, whose slots are those of their rows, in order."""
        written = np.full((self._num_rows, self._width), IGNORED, np.int32)
        for row, answer in enumerate(answers):
            written[row, : len(answer)] = answer
        every = np.concatenate([slots, np.full(self._num_rows - len(slots), slots[-1])]).astype(np.int32)
        firsts = np.flatnonzero(np.diff(every, prepend=-1))
        edges = self._width * np.append(firsts, self._num_rows)
        segments = list(zip(every[firsts].tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True))
        tiles = lay_tiles(segments, self._num_slots, self._tile, self._num_tiles)
        return np.concatenate([written.ravel(), np.repeat(every, self._width), tiles])

    def fill(self, laid: np.ndarray) -> None:
        """Write laid-out answers to the device: one copy, which does not wait."""
        self._host.copy_(torch.from_numpy(laid))
        self._there.copy_(self._host, non_blocking=True)
