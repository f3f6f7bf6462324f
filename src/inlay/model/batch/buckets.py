"""Rungs: packed batches of fixed capacities at fixed addresses, so that one compiled pass serves every mix of rows.

Capacities lie on a ladder: four to a doubling where launches cost more than work, thirty-two beyond, where a batch of
many rows is nearly always as long and a thirty-third of it at most is empty; eight for runs of several tasks, whose
batches are long or short as their tasks' rows are: every rung that occurs has to be prepared. What is left over is
filled with rows of padding that go through the last segment's slot and that no head reads: everything a pass computes
is defined.

Shape letters: N packed tokens, B rows, M tiles, S slots; R rows that are answered, T tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from inlay.model.batch.route import IGNORED, LONG, Batch, Pack, Route, Tiling
from inlay.model.batch.tiles import Tiles, lay_tiles, place_tiles, tile_capacity, tile_for

SMALLEST, LARGE = 256, 8192
PAD_ROW = 64  # tokens of a row of padding at most


def round_up_tokens(num_tokens: int, *, is_varied: bool = False) -> int:
    """The lowest rung that holds this number of tokens: 256, 320, 384, 448, 512, 640 … 7168, 8192, 8448, 8704 …

    Where steps are of varied lengths the large ones are eight to a doubling: 8192, 9216, 10240 …
    """
    if num_tokens <= SMALLEST:
        return SMALLEST
    step = 1 << ((num_tokens - 1).bit_length() - (3 if num_tokens <= LARGE else 4 if is_varied else 6))
    return -(-num_tokens // step) * step


def bound_length(lengths: np.ndarray) -> int:
    """The longest a row may be in a pass made for such rows: a power of two, and no shorter than rows of padding."""
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


class BucketBuffers:
    """The buffers of one capacity. `fill` writes a batch into them in one copy; `batch` and `route` never change."""

    def __init__(self, capacity: Capacity, first_position: int, pad_id: int, device: torch.device) -> None:
        self.capacity = capacity
        self._first_position, self._pad_id = first_position, pad_id
        n, b, m, r, s = (
            capacity.num_tokens, capacity.all_rows, capacity.num_tiles, capacity.num_row_tiles, capacity.num_slots
        )  # fmt: skip
        sizes = {"ids": n, "types": n, "positions": n, "slots": n, "rows": n, "starts": b, "stops": b, "row_slots": b}
        sizes |= {"tile_slots": m, "tile_starts": m, "tile_stops": m, "begins": s, "ends": s}
        sizes |= {"row_tile_slots": r, "row_tile_starts": r, "row_tile_stops": r, "row_begins": s, "row_ends": s}
        self._sizes = sizes
        self._host = torch.zeros(sum(sizes.values()), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._there = torch.zeros_like(self._host, device=device)
        self.parts = dict(zip(sizes, self._there.split(list(sizes.values())), strict=True))
        self._device = device

    @property
    def is_long(self) -> bool:
        """Whether its rows are so long that attention goes through another kernel."""
        return self.capacity.num_tokens >= LONG * self.capacity.num_rows

    @cached_property
    def route(self) -> Route:
        """The route of whatever batch was filled in last."""
        p = self.parts
        longest, rows = self.capacity.max_length, p["rows"]
        tiling = Tiling(self.tiles, p["slots"], p["starts"], p["stops"], longest, rows, self.is_long)
        return Route((), pack=Pack((), self._device), tiling=tiling)

    @cached_property
    def batch(self) -> Batch:
        """The batch of whatever was filled in last."""
        p = self.parts
        ids, types, positions = (p[name].unsqueeze(0) for name in ("ids", "types", "positions"))
        return Batch(ids, None, types, self.route, (), (), positions)

    @cached_property
    def tiles(self) -> Tiles:
        """The tiles of tokens."""
        p = self.parts
        slots, starts, stops = (p[f"tile_{name}"] for name in ("slots", "starts", "stops"))
        return Tiles(slots, starts, stops, p["begins"], p["ends"], tile=self.capacity.tile)

    @cached_property
    def row_tiles(self) -> Tiles:
        """The tiles of rows, for what works on a vector of each row; `starts` and `row_slots` go with them."""
        p = self.parts
        slots, starts, stops = (p[f"row_tile_{name}"] for name in ("slots", "starts", "stops"))
        return Tiles(slots, starts, stops, p["row_begins"], p["row_ends"], tile=self.capacity.tile)

    def lay(self, rows: PackedRows) -> np.ndarray:
        """The content of the buffers for these rows: int32, zero where there is nothing."""
        packed, start = np.zeros(len(self._host), np.int32), 0
        laid = self._lay_parts(rows)
        for name, size in self._sizes.items():
            if name in laid:
                packed[start : start + len(laid[name])] = laid[name]
            start += size
        return packed

    def _lay_parts(self, rows: PackedRows) -> dict[str, np.ndarray]:
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
        laid = {
            "ids": np.concatenate([rows.ids, np.full(spare, self._pad_id)]),
            "positions": np.arange(n) - np.repeat(stops - lengths, lengths) + self._first_position,
            "slots": np.repeat(slots, lengths),
            "rows": np.repeat(np.arange(len(lengths)), lengths),
            "starts": np.concatenate([stops - lengths, empty]),
            "stops": np.concatenate([stops, empty]),
            "row_slots": every,
        }
        if rows.types is not None:
            laid["types"] = rows.types
        laid |= self._tile(("tile_", ""), slots, lengths, self.capacity.num_tiles)
        return laid | self._tile(("row_tile_", "row_"), every, np.ones_like(every), self.capacity.num_row_tiles)

    def fill(self, laid: np.ndarray) -> None:
        """Write a laid-out batch to the device: one copy, which does not wait."""
        self._host.copy_(torch.from_numpy(laid))
        self._there.copy_(self._host, non_blocking=True)

    def _tile(
        self, prefixes: tuple[str, str], slots: np.ndarray, counts: np.ndarray, most: int
    ) -> dict[str, np.ndarray]:
        """Tiles and ranges of items that lie sorted by slot, `counts` of them for each entry of `slots`."""
        edges = np.flatnonzero(np.diff(slots, prepend=-1))
        ends = np.cumsum(counts)
        firsts = (ends - counts)[edges]
        segments = np.stack([slots[edges], firsts, np.append(firsts[1:], ends[-1])], 1)
        laid = lay_tiles(segments.tolist(), self.capacity.num_slots, self.capacity.tile, most)
        tile, plain = prefixes
        names = (f"{tile}slots", f"{tile}starts", f"{tile}stops", f"{plain}begins", f"{plain}ends")
        return dict(
            zip(names, np.split(laid, [most, 2 * most, 3 * most, 3 * most + self.capacity.num_slots]), strict=True)
        )


class DecoderTargets:
    """The answers to the rows of a rung, at fixed addresses: the decoder's tokens in a pass of fixed shapes.

    Every row has `width` tokens, those behind an answer's end included. Of the rows of padding, which come last, only
    as many are answered as there is room for real ones, with nothing, by the last slot, as they are read. `fill` writes
    them in one copy; `route` never changes.
    """

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
        """the answers to be written, -100 after their ends"""
        placed, nowhere = place_tiles(tiles, self._num_slots, self._tile), written[:0]
        self.route = Route((), tiling=Tiling(placed, slots_N, nowhere, nowhere, max_length=0))

    def lay(self, answers: Sequence[np.ndarray], slots: np.ndarray) -> np.ndarray:
        """The content of the buffers for these answers; `slots` are the slots of their rows, in order."""
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
