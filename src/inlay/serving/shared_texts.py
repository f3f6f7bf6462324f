"""Passes of rows that share a text: what is frozen below their adapters is computed once for all of them.

Below the lowest layer that a task adapts, its states are the backbone's own. So of several tasks on one text, each
begins at its own layer, from states that were computed once; a task that trains nothing but its head runs no layer.
More passes are launched for it, so it is done only where the work saved is more than that.

What always holds: answers differ from those of whole passes by rounding alone, and rows of different keys (of other
tenants, say) share nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inlay.model import (
    TOKEN_BUDGET,
    Bank,
    CacheDepth,
    CachedStates,
    ResolvedMethod,
    Row,
    SlotSpec,
    batches_by_length,
    find_family,
    first_layer,
    has_frozen_attention,
    infer,
)

LAUNCH_TOKENS = {"cpu": 24, "cuda": 65536}
"""What a layer costs beside the work on its tokens, as a number of tokens. A MiniLM on one core of a CPU: one row of 8
tokens takes 6.9 ms, 32 rows take 61 ms. BERT-base on an H200: 9,830 tokens of 256 tasks take 9 ms in a captured pass
and 77 ms launched kernel by kernel (results/speed/serve-h200.json), so it is rarely worth another launched pass."""


@dataclass(frozen=True)
class _Group:
    """Rows of the same tokens, by the depth to which each is frozen."""

    num_tokens: int
    rows: tuple[int, ...]
    depths: Counter[int]


class SharedTexts:
    """Computes logits of rows for a bank, texts that occur several times once as far as they are frozen."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._frozen = Bank(bank.backbone, 1)  # it changes nothing
        self._num_layers = bank.anatomy.num_layers
        self._depths: dict[ResolvedMethod, CacheDepth] = {}

    def find_depth(self, spec: SlotSpec) -> CacheDepth:
        """Return the depth to which rows of a slot are frozen, in a form that they can begin from."""
        head = spec.head
        family = find_family(self._bank.anatomy.family)
        if not family.reuses or head.features != "last" or head.has_towers or head.is_written:
            return CacheDepth(0)
        found = self._depths.get(spec.method)
        if found is None:
            is_frozen = self._bank.backbone.packs and has_frozen_attention(self._bank.anatomy, spec.method)
            found = CacheDepth(first_layer(self._bank.anatomy, spec.method), is_frozen)
            self._depths[spec.method] = found
        return found

    def logits(self, rows: Sequence[Row], keys: Sequence[Hashable]) -> list[Tensor]:
        """Return the logits of every row, as `infer` gives them, in order; rows of one key have the same tokens."""
        groups, depths = self._group(rows, keys)
        has_others = sum(len(group.rows) for group in groups) < len(rows)
        launch_tokens = LAUNCH_TOKENS[self._bank.backbone.device.type]
        levels = _choose_levels(groups, self._num_layers, launch_tokens, has_others=has_others)
        if not levels:
            return infer(self._bank, rows)
        # 1. the depth that each row begins from; with the attention there, where it is frozen for all of them
        begins = {index: _floor(levels, depths[index].layer) for group in groups for index in group.rows}
        mixed = {depths[index].layer for index in begins if not depths[index].with_attention}
        reaches = [CacheDepth(level, level not in mixed and level < self._num_layers) for level in levels]
        shared = [group for group in groups if any(begins[index] for index in group.rows)]
        # 2. compute the states of some texts, and answer their rows, before the next ones need the memory
        found: dict[int, Tensor] = {}
        for chunk in self._chunks(shared):
            ready: dict[int, Row] = {}
            for group, states in zip(chunk, self._states(rows, chunk, begins, reaches), strict=True):
                own = {index: states[begins[index]] for index in group.rows if begins[index]}
                ready |= {index: replace(rows[index], prefix=prefix) for index, prefix in own.items()}
            found |= dict(zip(ready, infer(self._bank, list(ready.values())), strict=True))
        # 3. all other rows
        left = [index for index in range(len(rows)) if index not in found]
        found |= dict(zip(left, infer(self._bank, [rows[index] for index in left]), strict=True))
        return [found[index] for index in range(len(rows))]

    def _group(self, rows: Sequence[Row], keys: Sequence[Hashable]) -> tuple[list[_Group], dict[int, CacheDepth]]:
        """Find the rows that share a text, and how deep each row is frozen."""
        by_key: dict[Hashable, list[int]] = {}
        depths: dict[int, CacheDepth] = {}
        by_slot: dict[int, CacheDepth] = {}
        for index, (row, key) in enumerate(zip(rows, keys, strict=True)):
            if row.slot not in by_slot:
                spec = self._bank.specs[row.slot]
                by_slot[row.slot] = CacheDepth(0) if spec is None else self.find_depth(spec)
            depth = by_slot[row.slot]
            if depth.layer and row.prefix is None:
                depths[index] = depth
                by_key.setdefault(key, []).append(index)
        groups = [
            _Group(rows[own[0]].num_tokens, tuple(own), Counter(depths[index].layer for index in own))
            for own in by_key.values()
            if len(own) > 1
        ]
        return groups, depths

    def _chunks(self, groups: Sequence[_Group]) -> Iterator[list[_Group]]:
        """Yield groups whose texts go through the backbone together."""
        backbone = self._bank.backbone
        lengths = [group.num_tokens for group in groups]
        for indices in batches_by_length(lengths, TOKEN_BUDGET[backbone.device.type], packs=backbone.packs):
            yield [groups[index] for index in indices]

    def _states(
        self, rows: Sequence[Row], chunk: Sequence[_Group], begins: dict[int, int], reaches: Sequence[CacheDepth]
    ) -> list[dict[int, CachedStates]]:
        """Return each text's states at the depths its rows begin from: one pass from depth to depth."""
        found: list[dict[int, CachedStates]] = [{} for _ in chunk]
        texts = [replace(rows[group.rows[0]], slot=0) for group in chunk]
        deepest = [max(begins[index] for index in group.rows) for group in chunk]
        for reach in reaches:
            active = [place for place in range(len(chunk)) if deepest[place] >= reach.layer]
            if not active:
                break
            for place, states_TD in zip(active, self._compute([texts[place] for place in active], reach), strict=True):
                found[place][reach.layer] = prefix = CachedStates(reach, states_TD)
                texts[place] = replace(texts[place], prefix=prefix)
        return found

    def _compute(self, texts: Sequence[Row], reach: CacheDepth) -> list[Tensor]:
        """Return the states [T, D] of some texts at a depth, in order."""
        backbone = self._bank.backbone
        with backbone.turn():
            batch = backbone.collate(texts)
            with torch.inference_mode(), self._frozen.routed(batch.route):
                states = backbone.prefix(batch, reach)
        found: dict[int, Tensor] = {}
        for position, origin in enumerate(batch.order):
            start = 0 if batch.pack is None else batch.pack.starts[position]
            row = states[position if batch.pack is None else 0]
            found[origin] = row[start : start + len(texts[origin].ids)]
        return [found[index] for index in range(len(texts))]


def _floor(levels: Sequence[int], depth: int) -> int:
    """Return the deepest of some ascending levels that is not below `depth`; 0 if there is none."""
    return max((level for level in levels if level <= depth), default=0)


def _choose_levels(groups: Sequence[_Group], num_layers: int, launch_tokens: int, *, has_others: bool) -> list[int]:
    """Return the depths at which states are kept, ascending: those that make the least work of all.

    Beginning with all depths that occur, the one that costs more than it saves is left out, one after another. With
    `has_others` there are rows that go through all layers anyway.
    """

    def count(levels: Sequence[int]) -> int:
        return _count_work(groups, levels, num_layers, launch_tokens, has_others=has_others)

    levels = sorted({depth for group in groups for depth in group.depths})
    least = count(levels)
    while levels:
        without = [[level for level in levels if level != left_out] for left_out in levels]
        works = [count(few) for few in without]
        if min(works) > least:
            break
        least = min(works)
        levels = without[works.index(least)]
    return levels


def _count_work(
    groups: Sequence[_Group], levels: Sequence[int], num_layers: int, launch_tokens: int, *, has_others: bool
) -> int:
    """Return the work of all groups, in tokens that go through a layer, with the layers they launch beside others."""
    num_tokens, deepest = 0, 0
    used: set[int] = set()
    for group in groups:
        begins = Counter[int]()
        for depth, number in group.depths.items():
            begins[_floor(levels, depth)] += number
        used |= begins.keys()
        deepest = max(deepest, *begins)
        above = sum(number * (num_layers - level) for level, number in begins.items())
        num_tokens += group.num_tokens * (max(begins) + above)
    if has_others:
        used.discard(0)
    return num_tokens + launch_tokens * (deepest + sum(num_layers - level for level in used))
