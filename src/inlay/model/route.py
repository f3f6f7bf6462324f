"""Routes: which rows of a batch go through which slot.

Rows are laid out sorted by slot, so a route is a short list of segments and a banked operation is a product per
segment. Shape letters: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

TokenIds = Sequence[int] | np.ndarray


class Segment(NamedTuple):
    """Rows `start` to `stop` go through `slot`."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True)
class Route:
    """The segments of a batch, in order, without gaps."""

    segments: tuple[Segment, ...]
    mask_BT: Tensor | None = field(default=None, compare=False)
    """which tokens are real, where some are padding"""

    @cached_property
    def slots_B(self) -> Tensor:
        """The slot of every row."""
        device = "cpu" if self.mask_BT is None else self.mask_BT.device
        lengths = torch.tensor([segment.stop - segment.start for segment in self.segments])
        return torch.tensor([segment.slot for segment in self.segments]).repeat_interleave(lengths).to(device)

    @property
    def is_even(self) -> bool:
        """Whether all segments have equally many rows."""
        return len({segment.stop - segment.start for segment in self.segments}) == 1

    @classmethod
    def from_slots(cls, slots: Sequence[int], mask_BT: Tensor | None = None) -> Route:
        """The route of rows that are already sorted by slot."""
        segments: list[Segment] = []
        for row, slot in enumerate(slots):
            if segments and segments[-1].slot == slot:
                segments[-1] = Segment(slot, segments[-1].start, row + 1)
            else:
                segments.append(Segment(slot, row, row + 1))
        assert len({segment.slot for segment in segments}) == len(segments), "rows must be sorted by slot"
        return cls(tuple(segments), mask_BT)


@dataclass(frozen=True)
class Row:
    """One encoded text (or pair) and the slot it goes through."""

    ids: TokenIds
    slot: int
    segments: TokenIds | None = None


@dataclass(frozen=True)
class Batch:
    """Padded rows sorted by slot, with their route. `order[i]` is where row i stood in the rows handed in."""

    input_ids_BT: Tensor
    mask_BT: Tensor
    token_types_BT: Tensor | None
    route: Route
    order: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.input_ids_BT.shape[0]


def collate(rows: Sequence[Row], pad_id: int, device: torch.device | str = "cpu") -> Batch:
    """Lay rows out sorted by slot (stably) and padded to the longest."""
    order = sorted(range(len(rows)), key=lambda i: rows[i].slot)
    width = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.int64)
    types = np.zeros((len(rows), width), dtype=np.int64)
    for position, index in enumerate(order):
        row = rows[index]
        ids[position, : len(row.ids)] = row.ids
        mask[position, : len(row.ids)] = 1
        if row.segments is not None:
            types[position, : len(row.ids)] = row.segments
    has_types = any(row.segments is not None for row in rows)
    mask_BT = torch.from_numpy(mask).to(device)
    return Batch(
        torch.from_numpy(ids).to(device),
        mask_BT,
        torch.from_numpy(types).to(device) if has_types else None,
        Route.from_slots([rows[index].slot for index in order], mask_BT),
        tuple(order),
    )
