"""States of texts that tasks shared lately, for rows of the same texts in the next batches.

A request for many tasks may be answered in several batches, and clients may ask about one text one after another. What
always holds: there are never more bytes than asked for, and nothing is on a disk. One thread at a time finds and keeps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from inlay.model import CacheDepth, CachedStates


class KeptStates:
    """The frozen states of some texts by key, at one or more depths; the text not asked for the longest goes first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._texts: OrderedDict[Hashable, dict[CacheDepth, CachedStates]] = OrderedDict()
        self.num_bytes = 0

    def find(self, key: Hashable, depth: CacheDepth) -> CachedStates | None:
        """Return the deepest states of a text that a row frozen to `depth` can begin from."""
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
            # A copy: as they are, they are part of the states of all texts of their pass.
            known[states.reach] = CachedStates(states.reach, states.states.clone())
            self.num_bytes += size
        self._texts.move_to_end(key)
        while self.num_bytes > self._most_bytes:
            _, gone = self._texts.popitem(last=False)
            self.num_bytes -= sum(map(_count_bytes, gone.values()))

    def clear(self) -> None:
        """Forget all texts."""
        self._texts, self.num_bytes = OrderedDict(), 0


def _is_within(reach: CacheDepth, depth: CacheDepth) -> bool:
    """Tell whether what `reach` says was computed is frozen for a row of `depth`."""
    if reach.layer == depth.layer:
        return depth.with_attention or not reach.with_attention
    return reach.layer < depth.layer


def _count_bytes(states: CachedStates) -> int:
    return states.states.numel() * states.states.element_size()
