"""Routes: which rows of a batch go through which slot, and where their tokens lie.

Rows are laid out sorted by slot, so a route is a short list of segments and a banked operation is a product per
segment. A batch is packed where the family allows it: rows end to end on one token axis, no padding, and the segments
count tokens. Elsewhere it is padded to its longest row, and the segments count rows.

A row is one text, or two that are read apart (towers): those lie side by side, each as a row of its own would. Where a
batch has such rows, it has more texts than rows; what is said of rows in packs and padding then applies to its texts.

Rows may bring a prefix: states of the backbone's frozen lower layers, computed before. A batch whose rows all do begins
above those layers.

Shape letters: B rows, T tokens of a padded row, N packed tokens, D hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inlay.model.batch.tiles import TILE_SIZES, Tiles, lay_tiles, send, tile_capacity, tile_for

TokenIds = Sequence[int] | np.ndarray
IGNORED = -100
"""stands for a missing token of an answer"""
LONG = 256
"""Tokens of a packed row, in the mean, from which on rows are long. On an H200, forward and backward, torch's flash
attention takes 4.4 times as long as our programs with rows of 38 tokens, 1.4 times with 192, 0.9 with 256, 0.8 with 384
(bench/norm_attention.py)."""


class Segment(NamedTuple):
    """Items `start` to `stop` of an axis go through `slot`."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Pack:
    """The places of a packed batch's rows on its token axis."""

    lengths: tuple[int, ...]
    device: torch.device

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.lengths[:-1], initial=0))

    def take(self, start: int, stop: int) -> Pack:
        """Return some neighbouring rows as a pack of their own."""
        return self if stop - start == len(self.lengths) else Pack(self.lengths[start:stop], self.device)

    def unpack(self, values_N: Tensor) -> Tensor:
        """Return values of tokens as padded rows [B, T, …]; the padding repeats a row's last value."""
        return values_N[self.places_BT]

    @cached_property
    def starts_B(self) -> Tensor:
        return send([np.array(self.starts)], self.device)[0]

    @cached_property
    def lengths_B(self) -> Tensor:
        return send([np.array(self.lengths)], self.device)[0]

    @cached_property
    def rows_N(self) -> Tensor:
        """The row of every token."""
        return send([np.repeat(np.arange(len(self.lengths)), self.lengths)], self.device)[0]

    @cached_property
    def places_BT(self) -> Tensor:
        """The place in the pack of each token of the padded rows; padding reads its row's last token."""
        columns_T = torch.arange(max(self.lengths), device=self.device)
        return self.starts_B.unsqueeze(1) + torch.minimum(columns_T, self.lengths_B.unsqueeze(1) - 1)

    @cached_property
    def is_real_BT(self) -> Tensor:
        """True for the real tokens of the padded rows, False for padding."""
        return torch.arange(max(self.lengths), device=self.device) < self.lengths_B.unsqueeze(1)

    @cached_property
    def runs_of_equal_length(self) -> tuple[tuple[int, int], ...]:
        """(how many, how long) of neighbouring rows of one length: they are a padded batch as they lie."""
        return tuple((len(list(group)), length) for length, group in itertools.groupby(self.lengths))


class CacheDepth(NamedTuple):
    """The depth of a prefix: the input of block `layer`, or beyond the last block the backbone's last states."""

    layer: int
    with_attention: bool = False
    """also through that block's attention, up to its projection's output"""


@dataclass(frozen=True, eq=False)
class CachedStates:
    """Cached states of the lower layers."""

    reach: CacheDepth
    states: Tensor
    """[T, D] of a row; [B, T, D] of a batch, or [1, N, D] if packed; with attention 2D wide, its output last"""

    @property
    def hidden(self) -> Tensor:
        """The input of the block."""
        return self.states.chunk(2, -1)[0] if self.reach.with_attention else self.states

    @property
    def attended(self) -> Tensor | None:
        """The output of the block's attention, if it is cached."""
        return self.states.chunk(2, -1)[1] if self.reach.with_attention else None


@dataclass(frozen=True, eq=False)
class Tiling:
    """A route as tensors on the device, for operations that take all slots at once: int32, over tokens."""

    tiles: Tiles
    slots_N: Tensor
    """the slot of every token"""
    starts_B: Tensor
    stops_B: Tensor
    """where each packed row begins and ends; empty if rows are padded"""
    max_length: int
    """the longest a packed row may be"""
    rows_N: Tensor | None = None
    """the row of every token, in a pass that is made for any mix of rows"""
    is_long: bool = False
    """whether packed rows are long, in the mean"""

    def unpack(self, values_N: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return values of tokens as the first `num_rows` rows, padded to the longest [B, T, …], and which are real.

        The padding repeats a row's last value.
        """
        places_T = torch.arange(self.max_length, device=values_N.device)
        starts_B1, stops_B1 = (edges_B[:num_rows].unsqueeze(1) for edges_B in (self.starts_B, self.stops_B))
        lengths_B1 = stops_B1 - starts_B1
        tokens_BT = starts_B1 + torch.minimum(places_T, (lengths_B1 - 1).clamp(min=0))
        values_BT = values_N.index_select(0, tokens_BT.flatten()).unflatten(0, tokens_BT.shape)
        return values_BT, places_T < lengths_B1


@dataclass(frozen=True)
class Route:
    """The segments of a batch, in order, without gaps: of rows, or of tokens where the batch is packed."""

    segments: tuple[Segment, ...]
    mask_BT: Tensor | None = field(default=None, compare=False)
    """which tokens are real, where some are padding"""
    pack: Pack | None = field(default=None, compare=False)
    """where the rows lie, if they are packed"""
    prefix: CachedStates | None = field(default=None, compare=False)
    """cached states of the lower layers, which the pass then skips"""
    tiling: Tiling | None = field(default=None, compare=False)
    """the same as tensors, where operations take all slots at once"""
    decoder: Route | None = field(default=None, compare=False)
    """the route of the answers, where their tokens lie otherwise than those of the texts"""
    wide: Route | None = field(default=None, compare=False)
    """where this is the route of first tokens only, the route of all tokens: every block but the last follows it"""

    def tiled(self, num_slots: int, tokens_per_item: int, device: torch.device) -> Route:
        """Return the route with a tiling for a bank of `num_slots` slots; a padded row is an item of several tokens."""
        segments = [(slot, start * tokens_per_item, stop * tokens_per_item) for slot, start, stop in self.segments]
        num_tokens = segments[-1][2]
        # One row to a task leaves tiles half empty; a smaller one wastes less.
        tile = tile_for(num_tokens) if num_tokens >= 32 * len(segments) else min(TILE_SIZES)
        capacity = tile_capacity(num_tokens, len(segments), tile)
        laid = lay_tiles(segments, num_slots, tile, capacity)
        counts = [stop - start for _, start, stop in segments]
        slots = np.repeat(np.array([slot for slot, *_ in segments], dtype=np.int32), counts)
        starts = np.array(self.pack.starts if self.pack else (), dtype=np.int32)
        stops = starts + np.array(self.pack.lengths if self.pack else (), dtype=np.int32)
        buffer, slots_N, starts_B, stops_B = send([laid, slots, starts, stops], device)
        tiles = Tiles(buffer, num_slots, tile)
        longest = max(16, 1 << (max(self.pack.lengths) - 1).bit_length()) if self.pack else 0
        is_long = len(starts) > 0 and num_tokens >= LONG * len(starts)
        return replace(self, tiling=Tiling(tiles, slots_N, starts_B, stops_B, longest, is_long=is_long))

    def renumbered(self, slots: Sequence[int]) -> Route:
        """Return the route with slots counted among these."""
        places = {slot: place for place, slot in enumerate(slots)}
        segments = tuple(Segment(places[slot], start, stop) for slot, start, stop in self.segments)
        if segments == self.segments:
            return self
        decoder, wide = (other and other.renumbered(slots) for other in (self.decoder, self.wide))
        return replace(self, segments=segments, decoder=decoder, wide=wide)

    @cached_property
    def slots_B(self) -> Tensor:
        """The slot of every row, or of every token."""
        device = torch.device("cpu")
        if self.pack:
            device = self.pack.device
        elif self.mask_BT is not None:
            device = self.mask_BT.device
        lengths = torch.tensor([segment.stop - segment.start for segment in self.segments])
        return torch.tensor([segment.slot for segment in self.segments]).repeat_interleave(lengths).to(device)

    @classmethod
    def from_slots(cls, slots: Sequence[int], mask_BT: Tensor | None = None) -> Route:
        """Return the route of rows that are already sorted by slot."""
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
    prefix: CachedStates | None = None
    written: TokenIds | None = None
    """the answer to be written, its end included, where it is known: in training"""
    other: TokenIds | None = None
    """the second text of a pair whose texts are read apart; its token types are 0, as those of any single text"""

    @property
    def texts(self) -> tuple[TokenIds, ...]:
        """The tokens of the one text, or of the two that are read apart."""
        return (self.ids,) if self.other is None else (self.ids, self.other)

    @property
    def num_read(self) -> int:
        """Tokens that are read, of both texts where there are two."""
        return len(self.ids) if self.other is None else len(self.ids) + len(self.other)

    @property
    def num_tokens(self) -> int:
        return self.num_read + (0 if self.written is None else len(self.written))

    @property
    def width(self) -> int:
        """Tokens of its longest text: its padded width when alone; with the answer where it is written."""
        return self.num_tokens if self.other is None else max(len(self.ids), len(self.other))


def make_rows(
    windows: Iterable[tuple[TokenIds, TokenIds | None, TokenIds | None]], slots: int | Iterable[int] = 0
) -> list[Row]:
    """Make a row for every window of an encoded set (ids, segments, second text), for one slot or each for its own."""
    if isinstance(slots, int):
        return [Row(ids, slots, segments, other=other) for ids, segments, other in windows]
    return [Row(ids, slot, segments, other=other) for (ids, segments, other), slot in zip(windows, slots, strict=True)]


@dataclass(frozen=True)
class Batch:
    """Rows sorted by slot, with their route. `order[i]` is where row i stood in the rows handed in."""

    input_ids_BT: Tensor
    """[B, T], or [1, N] if packed"""
    mask_BT: Tensor | None
    """which tokens are real; None if packed: all are"""
    token_types_BT: Tensor | None
    route: Route
    order: tuple[int, ...]
    rows: tuple[Segment, ...]
    """the segments counted in rows"""
    positions_BT: Tensor | None = None
    """position ids [1, N] if packed: they start anew in every row"""
    written_BT: Tensor | None = None
    """the answers to be written, -100 after their ends; None where they are not known"""
    split: tuple[Segment, ...] | None = None
    """the segments counted in texts, where some rows are two; None: every row is one"""

    @property
    def num_rows(self) -> int:
        return len(self.order)

    @property
    def texts(self) -> tuple[Segment, ...]:
        """The segments counted in texts, as they lie in the pack or the padded batch."""
        return self.rows if self.split is None else self.split

    @property
    def num_texts(self) -> int:
        return self.num_rows if self.split is None else self.split[-1].stop

    @property
    def pack(self) -> Pack | None:
        return self.route.pack

    @property
    def prefix(self) -> CachedStates | None:
        return self.route.prefix

    def narrowed(self) -> Batch:
        """Return the batch for heads that read first tokens alone: the last block computes no other tokens."""
        assert self.pack is not None
        firsts = Pack((1,) * self.num_texts, self.pack.device)
        return replace(self, route=Route(self.texts, pack=firsts, prefix=self.prefix, wide=self.route))


def collate(rows: Sequence[Row], pad_id: int, device: torch.device | str = "cpu") -> Batch:
    """Lay rows out sorted by slot (stably) and padded to the longest."""
    order = sorted(range(len(rows)), key=lambda i: rows[i].slot)
    rows = [rows[index] for index in order]
    texts = [(row, text) for row in rows for text in row.texts]
    width = max(len(text) for _, text in texts)
    ids = np.full((len(texts), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(texts), width), dtype=np.int64)
    types = np.zeros((len(texts), width), dtype=np.int64)
    for position, (row, text) in enumerate(texts):
        ids[position, : len(text)] = text
        mask[position, : len(text)] = 1
        if row.segments is not None and text is row.ids:
            types[position, : len(text)] = row.segments
    has_types = any(row.segments is not None for row in rows)
    input_ids_BT, mask_BT, types_BT, *answers = send([ids, mask, types, *_lay_written(rows)], device)
    by_row, split = _segments(rows)
    route = Route(split or by_row, mask_BT, prefix=_prefix(rows, mask_BT))
    if answers:
        route = replace(route, decoder=replace(route, mask_BT=answers[1], prefix=None))
    return Batch(
        input_ids_BT,
        mask_BT,
        types_BT if has_types else None,
        route,
        tuple(order),
        by_row,
        written_BT=answers[0] if answers else None,
        split=split,
    )


def _segments(rows: Sequence[Row]) -> tuple[tuple[Segment, ...], tuple[Segment, ...] | None]:
    """Return the segments of rows that are sorted by slot, and those of their texts where some rows are two."""
    by_row = Route.from_slots([row.slot for row in rows]).segments
    if all(row.other is None for row in rows):
        return by_row, None
    return by_row, Route.from_slots([row.slot for row in rows for _ in row.texts]).segments


def _lay_written(rows: Sequence[Row]) -> list[np.ndarray]:
    """Return the answers of rows, padded, and which of their tokens are real; nothing where they are not known."""
    known = [np.asarray(row.written, dtype=np.int64) for row in rows if row.written is not None]
    if not known:
        return []
    assert len(known) == len(rows), "rows of a batch are all to be trained on, or none"
    padded = np.full((len(known), max(map(len, known))), IGNORED, dtype=np.int64)
    for position, answer in enumerate(known):
        padded[position, : len(answer)] = answer
    return [padded, (padded != IGNORED).astype(np.int64)]


def pack(rows: Sequence[Row], first_position: int, device: torch.device | str = "cpu") -> Batch:
    """Lay rows out end to end on one token axis, sorted by slot and length; positions count from `first_position`."""
    order = sorted(range(len(rows)), key=lambda i: (rows[i].slot, rows[i].num_read))
    rows = [rows[index] for index in order]
    texts = [np.asarray(text, dtype=np.int64) for row in rows for text in row.texts]
    lengths = tuple(map(len, texts))
    packed = Pack(lengths, torch.device(device))
    ids = np.concatenate(texts)
    within = np.arange(len(ids)) - np.repeat(packed.starts, lengths) + first_position
    types = [np.concatenate([_types(row) for row in rows])] if any(row.segments is not None for row in rows) else []
    by_row, split = _segments(rows)
    ends = (*packed.starts, len(ids))
    by_token = tuple(Segment(slot, ends[start], ends[stop]) for slot, start, stop in split or by_row)

    sent = send([ids, within.astype(np.int64, copy=False), *types, *_lay_written(rows)], device)
    ids_1N, positions_1N, *types_1N = (tensor.unsqueeze(0) for tensor in sent[: 2 + len(types)])
    answers = sent[2 + len(types) :]
    decoder = Route(by_row, answers[1]) if answers else None
    return Batch(
        ids_1N,
        None,
        types_1N[0] if types_1N else None,
        Route(by_token, pack=packed, prefix=_prefix(rows, packed.device), decoder=decoder),
        tuple(order),
        by_row,
        positions_1N,
        answers[0] if answers else None,
        split,
    )


def _types(row: Row) -> np.ndarray:
    types = np.zeros(row.num_read, dtype=np.int64)
    if row.segments is not None:
        types[: len(row.ids)] = row.segments
    return types


def _prefix(rows: Sequence[Row], like: Tensor | torch.device) -> CachedStates | None:
    """Join the prefixes of rows: end to end on a device, or padded as a mask is; None if a row has none."""
    found = [row.prefix for row in rows if row.prefix is not None]
    if not found or len(found) < len(rows):
        return None
    reach, pieces = found[0].reach, [prefix.states for prefix in found]
    assert all(prefix.reach == reach for prefix in found), "rows of a batch begin at one place"
    device = like if isinstance(like, torch.device) else like.device
    if len({piece.device for piece in pieces}) > 1:  # some lie on the GPU, some in the host's memory
        pieces = [piece.to(device, non_blocking=True) for piece in pieces]
    states_ND = torch.cat(pieces).to(device, non_blocking=True)
    if isinstance(like, torch.device):
        return CachedStates(reach, states_ND.unsqueeze(0))
    states_BTD = states_ND.new_zeros(*like.shape, states_ND.shape[-1])
    states_BTD[like.bool()] = states_ND
    return CachedStates(reach, states_BTD)
