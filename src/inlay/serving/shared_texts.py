"""Passes of rows that share a text: the layers below their adapters are computed once for all of them.

Below the lowest layer that a task adapts, its hidden states are the backbone's own. So when several tasks are asked
about one text, each starts at its own layer, from states that were computed once; a task that trains only its head runs
no layer. This needs more passes, so it is done only where it saves more work than the extra passes cost. Shared states
are kept for the next batches: a request for many tasks may fill several batches, and clients may ask about one text
several times in a row.

What always holds: answers differ from those of whole passes by rounding alone; rows of different keys (such as those of
different tenants) share nothing; the kept states never take more bytes than `KEPT_BYTES`, and none are on disk.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
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

KEPT_BYTES = 32 << 20
"""most bytes of kept states: enough for a few hundred short texts on a MiniLM"""
LAUNCH_TOKENS = {"cpu": 24, "cuda": 65536}
"""The fixed cost of launching a layer, as a number of tokens. A MiniLM on one core of a CPU: one row of 8
tokens takes 6.9 ms, 32 rows take 61 ms. BERT-base on an H200: 9,830 tokens of 256 tasks take 9 ms in a captured pass
and 77 ms launched kernel by kernel (results/speed/serve-h200.json), so it is rarely worth another launched pass."""


@dataclass(frozen=True)
class _Group:
    """Rows with the same tokens, counted by the depth to which each is frozen."""

    num_tokens: int
    rows: tuple[int, ...]
    depths: Counter[int]
    key: Hashable = None


class KeptStates:
    """The frozen states of recent texts by key, at one or more depths; the least recently used text goes first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._texts: OrderedDict[Hashable, dict[CacheDepth, CachedStates]] = OrderedDict()
        self.num_bytes = 0

    def find(self, key: Hashable, depth: CacheDepth) -> CachedStates | None:
        """Return the deepest states of a text from which a row frozen to `depth` can start."""
        known = self._texts.get(key)
        if known is None:
            return None
        usable = [reach for reach in known if _is_within(reach, depth)]
        if not usable:
            return None
        self._texts.move_to_end(key)
        return known[max(usable)]

    def keep(self, key: Hashable, states: CachedStates) -> None:
        """Keep a copy of a text's states at their depth."""
        size = _count_bytes(states)
        if size > self._most_bytes:
            return
        known = self._texts.setdefault(key, {})
        if states.reach not in known:
            # A copy: the original is a view into the states of all texts of its pass.
            known[states.reach] = CachedStates(states.reach, states.states.clone())
            self.num_bytes += size
        self._texts.move_to_end(key)
        while self.num_bytes > self._most_bytes:
            _, gone = self._texts.popitem(last=False)
            self.num_bytes -= sum(map(_count_bytes, gone.values()))


def _is_within(reach: CacheDepth, depth: CacheDepth) -> bool:
    """Return whether states computed to `reach` are frozen for a row of `depth`."""
    if reach.layer == depth.layer:
        return depth.with_attention or not reach.with_attention
    return reach.layer < depth.layer


def _count_bytes(states: CachedStates) -> int:
    return states.states.numel() * states.states.element_size()


class SharedTexts:
    """Computes the logits of rows for a bank; the frozen layers of a text that occurs several times run once."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._frozen = Bank(bank.backbone, 1)  # an empty slot: the backbone as it is
        self._num_layers = bank.anatomy.num_layers
        self._depths: dict[ResolvedMethod, CacheDepth] = {}
        self._kept = KeptStates(KEPT_BYTES)
        self._launch_tokens = LAUNCH_TOKENS[bank.backbone.device.type]

    def forget_texts(self) -> None:
        """Forget the kept states of all texts."""
        self._kept = KeptStates(KEPT_BYTES)

    def find_depth(self, spec: SlotSpec) -> CacheDepth:
        """Return the depth to which rows of a slot are frozen, and from which they can start."""
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

        Rows with the same key have the same tokens, also in different calls.
        """
        # 1. how deep each row is frozen, of those that are frozen at all
        depth_of_slot: dict[int, CacheDepth] = {}
        for slot in {row.slot for row in rows}:
            spec = self._bank.specs[slot]
            depth_of_slot[slot] = CacheDepth(0) if spec is None else self.find_depth(spec)
        depths = {
            index: depth_of_slot[row.slot]
            for index, row in enumerate(rows)
            if depth_of_slot[row.slot].layer and row.prefix is None
        }
        # 2. rows whose text has states from an earlier batch
        kept = self._find_kept(rows, keys, depths)
        found: dict[int, Tensor] = {}
        if kept:
            begun = [replace(rows[index], prefix=prefix) for index, prefix in kept.items()]
            found |= dict(zip(kept, infer(self._bank, begun), strict=True))
        # 3. the depth from which each other row starts; with the attention there, where it is frozen for all of them
        groups = _group(rows, keys, {index: depth for index, depth in depths.items() if index not in kept})
        has_others = sum(len(group.rows) for group in groups) + len(kept) < len(rows)
        levels = _choose_levels(groups, self._num_layers, self._launch_tokens, has_others=has_others)
        begins = {index: _floor(levels, depths[index].layer) for group in groups for index in group.rows}
        mixed = {depths[index].layer for index in begins if not depths[index].with_attention}
        reaches = [CacheDepth(level, level not in mixed and level < self._num_layers) for level in levels]
        shared = [group for group in groups if any(begins[index] for index in group.rows)]
        # 4. compute the states of some texts and answer their rows, before the next ones need the memory
        backbone, lengths = self._bank.backbone, [group.num_tokens for group in shared]
        for chosen in batches_by_length(lengths, TOKEN_BUDGET[backbone.device.type], packs=backbone.packs):
            chunk = [shared[index] for index in chosen]
            ready: dict[int, Row] = {}
            for group, states in zip(chunk, self._states(rows, chunk, begins, reaches), strict=True):
                own = {index: states[begins[index]] for index in group.rows if begins[index]}
                ready |= {index: replace(rows[index], prefix=prefix) for index, prefix in own.items()}
                for prefix in states.values():
                    self._kept.keep(group.key, prefix)
            found |= dict(zip(ready, infer(self._bank, list(ready.values())), strict=True))
        # 5. all other rows
        left = [index for index in range(len(rows)) if index not in found]
        found |= dict(zip(left, infer(self._bank, [rows[index] for index in left]), strict=True))
        return [found[index] for index in range(len(rows))]

    def _find_kept(
        self, rows: Sequence[Row], keys: Sequence[Hashable], depths: dict[int, CacheDepth]
    ) -> dict[int, CachedStates]:
        """Find the rows that can start from kept states, where that saves more than another pass costs.

        Where several rows of a text are frozen deeper than its kept states reach, these are not used: computing the
        text once to the deeper layer serves all of the rows.
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

    def _states(
        self, rows: Sequence[Row], chunk: Sequence[_Group], begins: dict[int, int], reaches: Sequence[CacheDepth]
    ) -> list[dict[int, CachedStates]]:
        """Return each text's states at the depths where its rows start, with one pass from each depth to the next."""
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
    """Group the rows that share a text and are frozen to some depth."""
    by_key: dict[Hashable, list[int]] = {}
    for index in depths:
        by_key.setdefault(keys[index], []).append(index)
    return [
        _Group(rows[own[0]].num_tokens, tuple(own), Counter(depths[index].layer for index in own), key)
        for key, own in by_key.items()
        if len(own) > 1
    ]


def _floor(levels: Sequence[int], depth: int) -> int:
    """Return the deepest of the levels up to `depth`; 0 if there is none."""
    return max((level for level in levels if level <= depth), default=0)


def _choose_levels(groups: Sequence[_Group], num_layers: int, launch_tokens: int, *, has_others: bool) -> list[int]:
    """Return the depths at which states are computed, ascending, chosen so that the total work is least.

    Starts with all depths that occur, and drops them one by one while that saves work. With `has_others` there are
    rows that go through all layers anyway.
    """

    def count_work(levels: Sequence[int]) -> int:
        """Return the work of all groups in tokens that go through a layer; each extra layer launched costs some."""
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

    levels = sorted({depth for group in groups for depth in group.depths})
    least = count_work(levels)
    while levels:
        without = [[level for level in levels if level != left_out] for left_out in levels]
        works = [count_work(few) for few in without]
        if min(works) > least:
            break
        least = min(works)
        levels = without[works.index(least)]
    return levels
