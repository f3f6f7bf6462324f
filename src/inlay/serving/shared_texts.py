"""Passes of rows that share a text: what is frozen below their adapters is computed once for all of them.

Below the lowest layer that a task adapts, its states are the backbone's own. So of several tasks on one text, each
begins at its own layer, from states that were computed once; a task that trains nothing but its head runs no layer.
More passes are launched for it, so it is done only where the work saved is more than that. States that were shared are
kept for the next batches.

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
from inlay.serving.kept_states import KeptStates

KEPT_BYTES = 32 << 20
"""states that are kept: those of some hundred short texts of a MiniLM"""
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
    key: Hashable = None


class SharedTexts:
    """Computes logits of rows for a bank, texts that occur several times once as far as they are frozen."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._frozen = Bank(bank.backbone, 1)  # it changes nothing
        self._num_layers = bank.anatomy.num_layers
        self._depths: dict[ResolvedMethod, CacheDepth] = {}
        self._kept = KeptStates(KEPT_BYTES)
        self._launch_tokens = LAUNCH_TOKENS[bank.backbone.device.type]

    def forget_texts(self) -> None:
        """Forget the states that are kept of texts."""
        self._kept.clear()

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
        """Return the logits of every row, as `infer` gives them, in order.

        Rows of one key have the same tokens, also those of other calls.
        """
        # 1. rows whose text's states are there from an earlier batch
        depths = self._find_depths(rows)
        kept = self._find_kept(rows, keys, depths)
        found: dict[int, Tensor] = {}
        if kept:
            begun = [replace(rows[index], prefix=prefix) for index, prefix in kept.items()]
            found |= dict(zip(kept, infer(self._bank, begun), strict=True))
        # 2. the depth that each other row begins from; with the attention there, where it is frozen for all of them
        groups = _group(rows, keys, {index: depth for index, depth in depths.items() if index not in kept})
        has_others = sum(len(group.rows) for group in groups) + len(kept) < len(rows)
        levels = _choose_levels(groups, self._num_layers, self._launch_tokens, has_others=has_others)
        begins = {index: _floor(levels, depths[index].layer) for group in groups for index in group.rows}
        mixed = {depths[index].layer for index in begins if not depths[index].with_attention}
        reaches = [CacheDepth(level, level not in mixed and level < self._num_layers) for level in levels]
        shared = [group for group in groups if any(begins[index] for index in group.rows)]
        # 3. compute the states of some texts, and answer their rows, before the next ones need the memory
        for chunk in self._chunks(shared):
            ready: dict[int, Row] = {}
            for group, states in zip(chunk, self._states(rows, chunk, begins, reaches), strict=True):
                own = {index: states[begins[index]] for index in group.rows if begins[index]}
                ready |= {index: replace(rows[index], prefix=prefix) for index, prefix in own.items()}
                for prefix in states.values():
                    self._kept.keep(group.key, prefix)
            found |= dict(zip(ready, infer(self._bank, list(ready.values())), strict=True))
        # 4. all other rows
        left = [index for index in range(len(rows)) if index not in found]
        found |= dict(zip(left, infer(self._bank, [rows[index] for index in left]), strict=True))
        return [found[index] for index in range(len(rows))]

    def _find_depths(self, rows: Sequence[Row]) -> dict[int, CacheDepth]:
        """Find how deep each row is frozen, of those that are at all."""
        by_slot: dict[int, CacheDepth] = {}
        for slot in {row.slot for row in rows}:
            spec = self._bank.specs[slot]
            by_slot[slot] = CacheDepth(0) if spec is None else self.find_depth(spec)
        return {i: by_slot[row.slot] for i, row in enumerate(rows) if by_slot[row.slot].layer and row.prefix is None}

    def _find_kept(
        self, rows: Sequence[Row], keys: Sequence[Hashable], depths: dict[int, CacheDepth]
    ) -> dict[int, CachedStates]:
        """Find the rows that can begin from states that are kept, where that saves more than another pass costs.

        States that end below the depth of several rows are left alone: what is above them is then computed once too.
        """
        by_reach: dict[CacheDepth, dict[int, CachedStates]] = {}
        alike = Counter((keys[index], depth.layer) for index, depth in depths.items())
        for index, depth in depths.items():
            states = self._kept.find(keys[index], depth)
            if states is not None and (states.reach.layer == depth.layer or alike[keys[index], depth.layer] == 1):
                by_reach.setdefault(states.reach, {})[index] = states
        kept: dict[int, CachedStates] = {}
        for reach, own in by_reach.items():
            saved = reach.layer * sum(rows[index].num_tokens for index in own)
            if len(own) == len(rows) or saved > self._launch_tokens * (self._num_layers - reach.layer):
                kept |= own
        return kept

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


def _group(rows: Sequence[Row], keys: Sequence[Hashable], depths: dict[int, CacheDepth]) -> list[_Group]:
    """Find the rows that share a text, of those that are frozen to some depth."""
    by_key: dict[Hashable, list[int]] = {}
    for index in depths:
        by_key.setdefault(keys[index], []).append(index)
    return [
        _Group(rows[own[0]].num_tokens, tuple(own), Counter(depths[index].layer for index in own), key)
        for key, own in by_key.items()
        if len(own) > 1
    ]


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
