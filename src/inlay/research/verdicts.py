"""How a claim is judged: an estimate held against a bound, and what is said of it.

A claim is confirmed if our estimate keeps its bound and would with one s.e.m. against it, not confirmed if it breaks
the bound and would with one s.e.m. in its favour, and open in between, or where the runs it needs are not there. A
single seed has no s.e.m.: what rests on one is open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inlay.research.lineup import Scored, averaged_tasks
from inlay.research.scores import Estimate, Paired, pair
from inlay.research.tables import show

CONFIRMED, REFUTED, OPEN = "confirmed", "not confirmed", "open"
CLEARLY = 1.0
"""points that make a difference clear"""


@dataclass(frozen=True)
class Verdict:
    """What our records say about a claim."""

    status: str
    sentence: str


@dataclass(frozen=True)
class Claim:
    """A published claim and how it is judged."""

    name: str
    text: str
    source: str
    study: str
    judge: Callable[[Scored], Verdict]


def at_most(value: Estimate, bound: float) -> str:
    """Whether a quantity is at most `bound`, by more than its standard error."""
    if value.sem is None:
        return OPEN
    if value.mean + value.sem <= bound:
        return CONFIRMED
    return REFUTED if value.mean - value.sem > bound else OPEN


def at_least(value: Estimate, bound: float) -> str:
    """Whether a quantity is at least `bound`, by more than its standard error."""
    return at_most(Estimate(-value.mean, value.sem, value.num), -bound)


def above(value: Estimate, bound: float) -> str:
    """Whether a quantity is greater than `bound`, by more than its standard error; to be equal is not enough."""
    if value.sem is None:
        return OPEN
    if value.mean - value.sem > bound:
        return CONFIRMED
    return REFUTED if value.mean + value.sem <= bound else OPEN


def all_of(statuses: Sequence[str]) -> str:
    """Several conditions as one: one that is broken breaks it, one that is open leaves it open."""
    if REFUTED in statuses:
        return REFUTED
    return OPEN if OPEN in statuses or not statuses else CONFIRMED


def compare(scored: Scored, key: str, other: str) -> Paired | None:
    """A row less another over the tasks that count in a mean; None where one of them is not there."""
    if key not in scored.rows or other not in scored.rows:
        return None
    return pair(scored.rows[key], scored.rows[other], averaged_tasks(scored))


def lacking(*rows: str) -> Verdict:
    """What is said where rows were not run."""
    return Verdict(OPEN, f"needs {' and '.join(rows)} on the same tasks and seeds, which were not run")


def gap_text(paired: Paired, what: str) -> str:
    """A difference as a sentence's part."""
    tasks, pairs = len(paired.by_task), paired.num_pairs
    return f"{what}: {show(paired.estimate, signed=True)} points over {tasks} tasks ({pairs} pairs{unsure(paired)})"


def unsure(paired: Paired) -> str:
    """What is added where a difference has no error."""
    return ", of one seed" if paired.estimate.sem is None else ""
