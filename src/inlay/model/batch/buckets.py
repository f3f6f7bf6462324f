"""Rungs: packed batches of fixed capacities at fixed addresses, so that one compiled pass serves every mix of rows.

Capacities lie on a ladder. Small passes, whose launches cost more than their work, have four rungs to a doubling; large
ones have thirty-two, since batches of many rows are nearly all of one length, so that at most a thirty-third is empty.
Large passes of runs of several tasks have eight: their batches vary in length, and every rung that occurs has to be
prepared. The room left over is filled with rows of padding that go through the last segment's slot and that no head
reads, so that everything a pass computes is defined.

Shape letters: N packed tokens, B rows, M tiles, S slots; R rows that are answered, T tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from inlay.model.batch.route import IGNORED, LONG, Batch, Pack, Route, Tiling
from inlay.model.batch.tiles import Tiles, lay_tiles, tile_capacity, tile_for

SMALLEST, LARGE = 256, 8192
PAD_ROW = 64  # tokens of a row of padding at most


def round_up_tokens(num_tokens: int, *, is_varied: bool = False) -> int:
    """Return the lowest rung that holds this number of tokens: 256, 320, 384, 448, 512, 640 … 7168, 8192, 8448, 8704 …

    Where steps are of varied lengths the large ones are eight to a doubling: 8192, 9216, 10240 …
    """
    if num_tokens <= SMALLEST:
        return SMALLEST
    step = 1 << ((num_tokens - 1).bit_length() - (3 if num_tokens <= LARGE else 4 if is_varied else 6))
    return -(-num_tokens // step) * step


def bound_length(lengths: np.ndarray) -> int:
    """Return the longest row of a pass made for such rows: a power of two, and no shorter than rows of padding."""
    return max(PAD_ROW, 1 << (int(lengths.max()) - 1).bit_length())


@dataclass(frozen=True)
class Capacity:
    """The sizes that a compiled pass is made for."""

    num_tokens: int
    num_rows: int
    """real rows; those of padding come on top"""
    num_slots: int
    max_length: int

    @property
    def all_rows(self) -> int:
        return self.num_rows + self.num_tokens // PAD_ROW + 1

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        return tile_for(self.num_tokens)

    @property
    def num_tiles(self) -> int:
        return tile_capacity(self.num_tokens, min(self.num_slots, self.num_rows), self.tile)

    @property
    def num_row_tiles(self) -> int:
        return tile_capacity(self.all_rows, min(self.num_slots, self.num_rows), self.tile)


@dataclass(frozen=True)
class PackedRows:
    """Rows laid end to end on the host, sorted by slot."""

    ids: np.ndarray
    types: np.ndarray | None
    lengths: np.ndarray
    slots: np.ndarray
    """the slot of each row"""


class FixedBuffers:
    """Named int32 parts of one piece of memory, on the host and at a fixed address on the device."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        self._sizes, self.device = sizes, device
        self._host = torch.zeros(sum(sizes.values()), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._there = torch.zeros_like(self._host, device=device)
        self.parts = dict(zip(sizes, self._there.split(list(sizes.values())), strict=True))

    def lay_parts(self, laid: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the content of the buffers: int32, zero where there is nothing."""
        packed, start = np.zeros(len(self._host), np.int32), 0
        for name, size in self._sizes.items():
            if name in laid:
                packed[start : start + len(laid[name])] = laid[name]
            start += size
        return packed

    def fill(self, laid: np.ndarray) -> None:
        """Write a laid-out content to the device: one copy, which does not wait."""
        self._host.copy_(torch.from_numpy(laid))
        self._there.copy_(self._host, non_blocking=True)


class BucketBuffers(FixedBuffers):
    """The buffers of one capacity. `fill` writes a batch into them; `batch` and `route` never change."""

    def __init__(self, capacity: Capacity, first_position: int, pad_id: int, device: torch.device) -> None:
        self.capacity = capacity
        self._first_position, self._pad_id = first_position, pad_id
        num_slots, tile = capacity.num_slots, capacity.tile
        sizes = dict.fromkeys(("ids", "types", "positions", "slots", "rows"), capacity.num_tokens)
        sizes |= dict.fromkeys(("starts", "stops", "row_slots"), capacity.all_rows)
        sizes |= {"tiles": 3 * capacity.num_tiles + 2 * num_slots}
        sizes |= {"row_tiles": 3 * capacity.num_row_tiles + 2 * num_slots}
        super().__init__(sizes, device)
        p = self.parts
        self.is_long = capacity.num_tokens >= LONG * capacity.num_rows
        """whether its rows are so long that attention goes through another kernel"""
        self.tiles = Tiles(p["tiles"], num_slots, tile)
        self.row_tiles = Tiles(p["row_tiles"], num_slots, tile)
        """the tiles of rows, for what works on a vector of each row; `starts` and `row_slots` go with them"""
        tiling = Tiling(
            self.tiles, p["slots"], p["starts"], p["stops"], capacity.max_length, p["rows"], is_long=self.is_long
        )
        self.route = Route((), pack=Pack((), device), tiling=tiling)
        ids, types, positions = (p[name].unsqueeze(0) for name in ("ids", "types", "positions"))
        self.batch = Batch(ids, None, types, self.route, (), (), positions)

    def lay(self, rows: PackedRows) -> np.ndarray:
        """Return the content of the buffers for these rows."""
        # 1. rows of padding for the tokens that are left over, through the last slot; and empty rows up to the capacity
        n, num_real = self.capacity.num_tokens, len(rows.ids)
        spare = n - num_real
        pads = np.full(-(-spare // PAD_ROW), PAD_ROW, dtype=np.int64)
        if len(pads):
            pads[-1] = spare - PAD_ROW * (len(pads) - 1)
        lengths = np.concatenate([rows.lengths, pads])
        last = rows.slots[-1]
        slots = np.concatenate([rows.slots, np.full(len(pads), last)])
        every = np.concatenate([rows.slots, np.full(self.capacity.all_rows - len(rows.slots), last)])  # empty rows too
        stops = np.cumsum(lengths)
        # An empty row lies where the last row begins, so that its "first token" is one of its own slot.
        empty = np.full(self.capacity.all_rows - len(lengths), (stops - lengths)[len(rows.lengths) - 1])
        # 2. where every token and row lies, and the tiles of both
        laid = {
            "ids": np.concatenate([rows.ids, np.full(spare, self._pad_id)]),
            "positions": np.arange(n) - np.repeat(stops - lengths, lengths) + self._first_position,
            "slots": np.repeat(slots, lengths),
            "rows": np.repeat(np.arange(len(lengths)), lengths),
            "starts": np.concatenate([stops - lengths, empty]),
            "stops": np.concatenate([stops, empty]),
            "row_slots": every,
            "tiles": _lay_sorted(slots, lengths, self.tiles, self.capacity.num_tiles),
            "row_tiles": _lay_sorted(every, np.ones_like(every), self.row_tiles, self.capacity.num_row_tiles),
        }
        if rows.types is not None:
            laid["types"] = rows.types
        return self.lay_parts(laid)


def _lay_sorted(slots: np.ndarray, counts: np.ndarray, tiles: Tiles, capacity: int) -> np.ndarray:
    """Return the buffer of `tiles` for items that lie sorted by slot, `counts` of them for each entry of `slots`."""
    edges = np.flatnonzero(np.diff(slots, prepend=-1))
    ends = np.cumsum(counts)
    firsts = (ends - counts)[edges]
    segments = np.stack([slots[edges], firsts, np.append(firsts[1:], ends[-1])], 1)
    return lay_tiles(segments.tolist(), tiles.num_slots, tiles.tile, capacity)


class DecoderTargets(FixedBuffers):
    """The answers to the rows of a rung, at fixed addresses: the decoder's tokens in a pass of fixed shapes.

    Every row has `width` tokens, those behind an answer's end included. Of the rows of padding, which come last, only
    as many are answered as there is room for real ones, with nothing, by the last slot, as they are read. `fill` writes
    the answers; `route` never changes.
    """

    def __init__(self, capacity: Capacity, width: int, device: torch.device) -> None:
        self._num_rows, self._width = capacity.num_rows, width
        num_tokens, num_slots = capacity.num_rows * width, capacity.num_slots
        tile = tile_for(num_tokens)
        self._num_tiles = tile_capacity(num_tokens, min(num_slots, capacity.num_rows), tile)
        super().__init__(
            {"written": num_tokens, "slots": num_tokens, "tiles": 3 * self._num_tiles + 2 * num_slots}, device
        )
        written = self.parts["written"]
        self.written_RT = written.view(self._num_rows, width)
        """the answers to be written, -100 after their ends"""
        self._tiles, nowhere = Tiles(self.parts["tiles"], num_slots, tile), written[:0]
        self.route = Route((), tiling=Tiling(self._tiles, self.parts["slots"], nowhere, nowhere, max_length=0))

    def lay(self, answers: Sequence[np.ndarray], slots: np.ndarray) -> np.ndarray:
        """Return the content of the buffers for these answers; `slots` are the slots of their rows, in order."""
        written = np.full((self._num_rows, self._width), IGNORED, np.int32)
        for row, answer in enumerate(answers):
            written[row, : len(answer)] = answer
        every = np.concatenate([slots, np.full(self._num_rows - len(slots), slots[-1])]).astype(np.int32)
        tiles = _lay_sorted(every, np.full(self._num_rows, self._width), self._tiles, self._num_tiles)
        return self.lay_parts({"written": written.ravel(), "slots": np.repeat(every, self._width), "tiles": tiles})
