"""Tiles: the route of a pack as the grouped kernels read it, one int32 tensor on the device; and `send`, its way there.

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
_ALIGNED = 16  # bytes: programs are compiled for memory that begins at such a place


@dataclass(frozen=True)
class Tiles:
    """The tiles of a route, as `lay_tiles` lays them out; the buffer's address may be part of a captured graph."""

    buffer: Tensor
    num_slots: int
    tile: int
    """the most tokens of one tile"""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return split_tiles(self.buffer, self.num_slots)


def split_tiles(buffer: Tensor, num_slots: int) -> tuple[Tensor, ...]:
    """Return the five parts of a buffer: slots_M, starts_M, stops_M, begins_S, ends_S.

    Tile m covers tokens starts_M[m] to stops_M[m], all of slot slots_M[m]; an unused tile starts where it stops. Slot s
    owns tokens begins_S[s] to ends_S[s].
    """
    capacity, rest = divmod(len(buffer) - 2 * num_slots, 3)
    assert not rest, "tiles of another number of slots"
    return buffer.split([capacity] * 3 + [num_slots] * 2)


def make_tiles(
    segments: Sequence[tuple[int, int, int]], num_slots: int, tile: int, capacity: int, device: torch.device | str
) -> Tiles:
    """Return the tiles of (slot, start, stop) ranges of tokens, one range for a slot at most; `capacity` tiles in all.

    For tests and benches that call a kernel by itself: a route sends its tiles along with its other tensors.
    """
    return Tiles(torch.from_numpy(lay_tiles(segments, num_slots, tile, capacity)).to(device), num_slots, tile)


def lay_tiles(segments: Sequence[tuple[int, int, int]], num_slots: int, tile: int, capacity: int) -> np.ndarray:
    """Return the buffer of tiles, on the host."""
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


def tile_for(num_tokens: int) -> int:
    """Return the tokens of a tile: few where tiles would be too few to fill the device."""
    small, large = TILE_SIZES
    return large if num_tokens >= large * FEW_TILES else small


def tile_capacity(num_tokens: int, num_slots: int, tile: int) -> int:
    """Return the largest number of tiles that these tokens of at most `num_slots` slots can need."""
    return (num_tokens + num_slots * (tile - 1)) // tile


def send(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[Tensor]:
    """Send small arrays to a device as tensors: in one copy, which the host does not wait for.

    On a CPU they may share the arrays' memory.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = np.cumsum([0, *(-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays)]).tolist()
    parcel = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")

    def parts_of(memory: Tensor) -> list[Tensor]:
        return [
            memory[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
            for array, start in zip(arrays, starts, strict=False)
        ]

    for array, place in zip(arrays, parts_of(parcel), strict=True):
        place.copy_(torch.from_numpy(array))
    return parts_of(parcel.to(device, non_blocking=True))
