"""How a claim is judged: an estimate held against a bound, and what is said of it.

A claim is confirmed if the 95% confidence bound of our estimate keeps it, not confirmed if the bound on the other side
breaks it, and open in between. The bounds are one-sided, by Student's t over seeds. Where one of several rows or tasks
would be enough to decide, the level is that of all of them together (Bonferroni). A single seed has no error: what
rests on one is open, and so is what rests on rows of which planned runs are missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inlay.research.lineup import Scored, averaged_tasks
from inlay.research.scores import Estimate, Paired, pair
from inlay.research.tables import show

CONFIRMED, REFUTED, OPEN = "confirmed", "not confirmed", "open"
NONE = "–"
"""where a claim's study was not run, or not planned with the rows that it compares"""
CLEARLY = 1.0
"""points that make a difference clear"""
CHANCE = 0.05
"""how often a bound may be wrong"""
_POOLED = 4
"""degrees of freedom that the error of all tasks counts for in the error of one"""


@dataclass(frozen=True)
class Verdict:
    """What our records say about a claim."""

    status: str
    sentence: str
    rows: tuple[str, ...] = ()
    """the rows it rests on (`*` stands for any end of a name): while planned runs of them are missing it is open"""
    tasks: tuple[str, ...] | None = None
    """the tasks that it rests on; None: all that count in a mean"""


@dataclass(frozen=True)
class Claim:
    """A published claim and how it is judged."""

    name: str
    text: str
    source: str
    study: str
    judge: Callable[[Scored], Verdict]


def reach(value: Estimate, among: int = 1) -> float:
    """How far a one-sided 95% bound is from the estimate; where the best of several would do, that of all of them."""
    from scipy.special import ndtri, stdtrit

    level = 1 - CHANCE / among
    quantile = ndtri(level) if value.freedom is None else stdtrit(value.freedom, level)
    return float(quantile) * value.margin


def at_most(value: Estimate, bound: float, among: int = 1) -> str:
    """Whether a quantity is at most `bound`; `among` are those of which one that breaks it decides."""
    if value.sem is None:
        return OPEN
    if value.mean + reach(value) <= bound:
        return CONFIRMED
    return REFUTED if value.mean - reach(value, among) > bound else OPEN


def at_least(value: Estimate, bound: float, among: int = 1) -> str:
    """Whether a quantity is at least `bound`; `among` as in `at_most`."""
    return at_most(negated(value), -bound, among)


def above(value: Estimate, bound: float, among: int = 1) -> str:
    """Whether a quantity is greater than `bound`, to be equal is not enough; `among` as in `at_most`."""
    if value.sem is None:
        return OPEN
    if value.mean - reach(value) > bound:
        return CONFIRMED
    return REFUTED if value.mean + reach(value, among) <= bound else OPEN


def all_of(statuses: Sequence[str]) -> str:
    """Several conditions as one: one that is broken breaks it, one that is open leaves it open."""
    if REFUTED in statuses:
        return REFUTED
    return OPEN if OPEN in statuses or not statuses else CONFIRMED


def negated(value: Estimate) -> Estimate:
    """The same with the other sign: what is lost, for what is gained."""
    return value._replace(mean=-value.mean)


def difference(first: Estimate, second: Estimate) -> Estimate:
    """One less another that does not depend on it; degrees of freedom by Satterthwaite."""
    mean = first.mean - second.mean
    if first.sem is None or second.sem is None:
        return Estimate(mean)
    variances = [first.sem**2, second.sem**2]
    parts = [own**2 / (each.freedom or math.inf) for own, each in zip(variances, (first, second), strict=True)]
    freedom = max(1, int(sum(variances) ** 2 / sum(parts))) if sum(parts) else None
    return Estimate(mean, math.sqrt(sum(variances)), first.num + second.num, freedom)


def pooled(values: Sequence[Estimate]) -> Estimate:
    """The mean of estimates that do not depend on each other, as if each had the same error."""
    mean = sum(value.mean for value in values) / len(values)
    error, freedom = pool_error(values)
    return Estimate(mean, None if error is None else error / math.sqrt(len(values)), len(values), freedom)


def pool_error(values: Sequence[Estimate]) -> tuple[float | None, int]:
    """The error of one of several estimates, from all of them: its square is their mean; and its freedom."""
    squares = [value.sem**2 for value in values if value.sem is not None]
    freedom = sum(value.freedom or 0 for value in values)
    return (math.sqrt(sum(squares) / len(squares)) if len(squares) == len(values) else None), freedom


def deviations(values: Sequence[Estimate]) -> list[Estimate]:
    """Each estimate less the mean of all, with one error that is pooled over them."""
    mean = sum(value.mean for value in values) / len(values)
    error, freedom = pool_error(values)
    sem = None if error is None else error * math.sqrt(1 - 1 / len(values))
    return [Estimate(value.mean - mean, sem, value.num, freedom) for value in values]


def all_within(values: Sequence[Estimate], bound: float) -> str:
    """Whether none of several quantities is further than `bound` from zero."""
    sides = [side for value in values for side in (value, negated(value))]
    return all_of([at_most(side, bound, among=len(sides)) for side in sides])


def pool_tasks(by_task: Sequence[Estimate]) -> list[Estimate]:
    """Differences of tasks with errors that few seeds can give: a task's own, drawn towards that of all.

    The pooled variance counts as much as four seeds more: with none a task of two seeds would tell nothing, with many
    more one that varies more than the others would be found different by chance.
    """
    known = [item for item in by_task if item.sem is not None]
    freedom = sum(item.num - 1 for item in known)
    if not freedom:
        return list(by_task)
    variance = sum((item.num - 1) * item.num * item.margin**2 for item in known) / freedom
    found = []
    for item in by_task:
        own = item.num - 1
        drawn = (_POOLED * variance + own * item.num * item.margin**2) / (_POOLED + own)
        found.append(Estimate(item.mean, math.sqrt(drawn / item.num), item.num, min(_POOLED + own, freedom)))
    return found


def compare(scored: Scored, key: str, other: str, tasks: Sequence[str] | None = None) -> Paired | None:
    """A row less another over tasks, or all that count in a mean; None where one of them is not there."""
    if key not in scored.rows or other not in scored.rows:
        return None
    return pair(scored.rows[key], scored.rows[other], averaged_tasks(scored) if tasks is None else tasks)


def lacking(*rows: str) -> Verdict:
    """What is said where rows were not run."""
    return Verdict(OPEN, f"needs {' and '.join(rows)} on the same tasks and seeds, which were not run")


def not_planned(scored: Scored, *rows: str) -> Verdict | None:
    """What is said where a profile leaves out rows that a claim compares; None where all are planned, or there."""
    left_out = [row for row in rows if row not in scored.study.arms and row not in scored.rows]
    return Verdict(NONE, f"{' and '.join(left_out)} not in this profile") if left_out else None


def gap_text(paired: Paired, what: str) -> str:
    """A difference as a sentence's part, with its bounds."""
    tasks, pairs = len(paired.by_task), paired.num_pairs
    text = f"{what}: {show(paired.estimate, signed=True)} points over {tasks} task{'s' * (tasks > 1)}"
    return f"{text} ({pairs} pair{'s' * (pairs > 1)}{unsure(paired)})"


def unsure(paired: Paired) -> str:
    """What is added on the error of a difference: its one-sided bounds, or that it has none."""
    value = paired.estimate
    if value.sem is None:
        return ", of one seed"
    low, high = value.mean - reach(value), value.mean + reach(value)
    return f"; 95% bounds {show(low, signed=True)} and {show(high, signed=True)}"
