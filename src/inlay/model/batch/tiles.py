"""Tiles: the route of a pack as the grouped kernels read it, five int32 tensors on the device.

A pack's tokens lie on one axis, sorted by slot, so a slot's tokens are one range. That range is cut into tiles of at
most `tile` tokens: one program works on one tile, with the weights of one slot. A launch depends on the number of
tiles and slots only, never on the tensors' values, so a captured CUDA graph goes on being right when a new route is
copied into them.

Shape letters: M tiles, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TILE_SIZES = (16, 64)
FEW_TILES = 132
"""programs that fill a large GPU; where there would be fewer tiles than that, smaller ones"""


@dataclass(frozen=True)
class Tiles:
    """Tile m covers tokens starts_M[m] to stops_M[m], all of slot slots_M[m]; an unused tile starts where it stops.

    Slot s owns tokens begins_S[s] to ends_S[s]. The five are views of one buffer.
    """

    slots_M: Tensor
    starts_M: Tensor
    stops_M: Tensor
    begins_S: Tensor
    ends_S: Tensor
    tile: int
    """the most tokens of one tile"""

    def copy_(self, other: Tiles) -> None:
        """Take the contents of tiles of the same shape, at the addresses these have."""
        assert (self.tile, len(self.slots_M), len(self.begins_S)) == (
            other.tile,
            len(other.slots_M),
            len(other.begins_S),
        )
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine.copy_(theirs, non_blocking=True)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The five, in the order the kernels take them."""
        return self.slots_M, self.starts_M, self.stops_M, self.begins_S, self.ends_S


def make_tiles(
    segments: Sequence[tuple[int, int, int]], num_slots: int, tile: int, capacity: int, device: torch.device | str
) -> Tiles:
    """The tiles of (slot, start, stop) ranges of tokens, one range for a slot at most; `capacity` tiles in all.

    For tests and benches that call a kernel by itself: a route sends its tiles along with its other tensors.
    """
    laid = lay_tiles(segments, num_slots, tile, capacity)
    return place_tiles(torch.from_numpy(laid).to(device), num_slots, tile)


def lay_tiles(segments: Sequence[tuple[int, int, int]], num_slots: int, tile: int, capacity: int) -> np.ndarray:
    """The buffer of tiles, on the host; `place_tiles` reads it."""
    assert tile in TILE_SIZES, tile
    slots, begins, ends = np.asarray(segments, dtype=np.int32).reshape(-1, 3).T
    assert len(np.unique(slots)) == len(slots), "a slot's tokens are one range"
    counts = (ends - begins + tile - 1) // tile
    num_tiles = int(counts.sum())
    assert num_tiles <= capacity, f"{num_tiles} tiles do not fit {capacity}"
    place = np.arange(num_tiles) - np.repeat(np.cumsum(counts) - counts, counts)  # index of a tile within its slot
    by_tile = np.zeros((3, capacity), np.int32)
    by_tile[0, :num_tiles] = np.repeat(slots, counts)
    by_tile[1, :num_tiles] = np.repeat(begins, counts) + place * tile
    by_tile[2, :num_tiles] = np.minimum(by_tile[1, :num_tiles] + tile, np.repeat(ends, counts))
    by_slot = np.zeros((2, num_slots), np.int32)
    by_slot[0, slots], by_slot[1, slots] = begins, ends
    return np.concatenate([by_tile.ravel(), by_slot.ravel()])


def place_tiles(buffer: Tensor, num_slots: int, tile: int) -> Tiles:
    """The tiles that a buffer holds."""
    capacity = (len(buffer) - 2 * num_slots) // 3
    slots_M, starts_M, stops_M, begins_S, ends_S = buffer.split([capacity] * 3 + [num_slots] * 2)
    return Tiles(slots_M, starts_M, stops_M, begins_S, ends_S, tile)


def tile_for(num_tokens: int) -> int:
    """Tokens of a tile: few where tiles would be too few to fill the device."""
    small, large = TILE_SIZES
    return large if num_tokens >= large * FEW_TILES else small


def tile_capacity(num_tokens: int, num_slots: int, tile: int) -> int:
    """The largest number of tiles that these tokens of at most `num_slots` slots can need."""
    return (num_tokens + num_slots * (tile - 1)) // tile
