"""Placement: which of several engines is asked for a task.

While all requested versions fit the slots of one engine, any engine may answer: the less busy of two taken at random
(Mitzenmacher 2001). Beyond that each task has engines of its own, by rendezvous hashing (Thaler and Ravishankar 1998):
all clients choose the same engines without talking to each other, and an engine that comes or goes moves only its own
share of the tasks. A task with more requests has more engines. While these have far more to do than the others, the
next engine in the task's order helps (bounded loads, Mirrokni, Thorup and Zadimoghaddam 2018).
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b

from inlay.service.engine.roster import Replica, Roster

_FADE_S = 10.0
"""half-life of the counts of rows"""
_MOST_TASKS = 10_000
_ROOM = 2.0
"""a task may use this many times its share of all engines"""
_MOST_BUSY, _FREE_ROWS = 2.0, 32
"""a task asks other engines while its own have this many times the rows of an average one, and more rows than that"""
LEAST_LOADED = 2
"""engines that load a new version before it goes live, if tasks have engines of their own"""


class TaskShares:
    """The share of recent rows that each task has."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows: OrderedDict[str, float] = OrderedDict()
        self._total, self._faded_at = 0.0, clock()

    def add(self, tasks: Counter[str]) -> None:
        """Count rows by task."""
        now = self._clock()
        if now - self._faded_at >= _FADE_S:
            factor = 0.5 ** ((now - self._faded_at) / _FADE_S)
            faded = ((task, rows * factor) for task, rows in self._rows.items())
            self._rows = OrderedDict((task, rows) for task, rows in faded if rows >= 0.5)
            self._total, self._faded_at = sum(self._rows.values()), now
        for task, rows in tasks.items():
            self._rows[task] = self._rows.pop(task, 0.0) + rows
            self._total += rows
        while len(self._rows) > _MOST_TASKS:
            self._total -= self._rows.popitem(last=False)[1]

    def find(self, task: str) -> float:
        """Return a task's share, from 0 to 1."""
        return self._rows.get(task, 0.0) / self._total if self._total > 0 else 0.0


def count_engines(share: float, num_replicas: int) -> int:
    """Return how many engines a task with this share of all rows has."""
    return max(1, min(num_replicas, math.ceil(_ROOM * share * num_replicas)))


@lru_cache(maxsize=65536)
def rank(task: str, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return a task's order of the engines, as indices into `names`."""
    scores = [blake2b(f"{name}\0{task}".encode(), digest_size=8).digest() for name in names]
    return tuple(sorted(range(len(names)), key=lambda place: scores[place], reverse=True))


def order_for(task: str, roster: Roster) -> list[Replica]:
    """Return all engines in a task's order: its own come first."""
    names = tuple(replica.name for replica in roster.replicas)
    return [roster.replicas[place] for place in rank(task, names)]


def find_holders(task: str, roster: Roster) -> Sequence[Replica]:
    """Return the engines that must load a task's version before it goes live."""
    return order_for(task, roster)[:LEAST_LOADED] if roster.is_crowded else roster.replicas


def choose(
    task: str, roster: Roster, share: float, busy: Counter[str], chance: random.Random | None = None
) -> list[Replica]:
    """Return the engines to ask for a task's rows: the first, and the others in case it is lost.

    `busy` has the number of rows that each engine is answering.
    """
    chance = chance or _CHANCE
    if roster.is_crowded:
        ordered = order_for(task, roster)
        own = ordered[: count_engines(share, len(ordered))]
        rest = ordered[len(own) :]
    else:
        own, rest = list(roster.replicas), []
    first = sorted(chance.sample(own, min(2, len(own))), key=lambda replica: busy[replica.name])[:1]
    others = [replica for replica in own if replica not in first]
    chosen = [*first, *sorted(others, key=lambda replica: busy[replica.name]), *rest]
    if not rest:
        return chosen
    most = max(_FREE_ROWS, _MOST_BUSY * sum(busy.values()) / len(chosen))
    return sorted(chosen, key=lambda replica: busy[replica.name] > most)  # stable: the order stays among equals


_CHANCE = random.Random()
