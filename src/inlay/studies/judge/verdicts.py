"""Verdicts on claims: an estimate compared with a bound, and the sentence about it.

A claim is **confirmed** if our estimate satisfies it and such a statement is wrong at most once in twenty times, **not
confirmed** if our estimate contradicts it with the same certainty, and **open** otherwise. Two things are random: the
seeds and the scored rows (`bounds.py`). A verdict is about new rows; where it differs for exactly the rows that were
scored, the sentence says so. A condition of several parts is confirmed if every part is (the weakest part decides) and
broken if one part is (Bonferroni over the parts). A single seed has no known error, so a claim that rests on one is
open; so is a claim whose rows lack planned runs. Where one row had more settings to choose from than the other, a
verdict must hold both for the difference as chosen and for the difference with equally many settings
(`row_differences.py`).

Each single verdict may be wrong once in twenty times, so in a long table some are. `hold_together` tells which verdicts
stand as a family: the chance that even one of those is wrong is at most one in twenty (Holm).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from inlay.studies.judge.bounds import CHANCE, MeanWithError, negated, reach, show, tail
from inlay.studies.judge.row_differences import Paired, pair
from inlay.studies.judge.scored_study import ScoredStudy, averaged_tasks

CONFIRMED, REFUTED, OPEN = "confirmed", "not confirmed", "open"
NONE = "–"
"""the verdict if a claim's study was not run, or not planned with the rows that it compares"""
CLEARLY = 1.0
"""points that make a difference clear"""

UNSEEN = 0.05
"""points below which an error is shown as 0.0"""


class Chances(NamedTuple):
    """The p-values of a claim: of numbers like ours if it is false, and if it is true."""

    confirm: float
    """p-value of the claim being false"""
    refute: float
    """p-value of the claim being true"""
    is_fact: bool = False
    """whether nothing in it is random, as in a count of parameters"""

    @property
    def status(self) -> str:
        """`confirmed`, `not confirmed` or `open`."""
        if self.confirm <= CHANCE:
            return CONFIRMED
        return REFUTED if self.refute <= CHANCE else OPEN


class Finding(NamedTuple):
    """A condition tested twice: over new rows, and over the rows that were scored."""

    new: Chances
    here: Chances

    @property
    def status(self) -> str:
        """The verdict over new rows."""
        return self.new.status


UNKNOWN = Finding(Chances(1.0, 1.0), Chances(1.0, 1.0))
"""the finding of an estimate without a known error"""


def fact(is_true: bool) -> Finding:
    """Return the finding of a condition that does not depend on chance."""
    test = Chances(0.0, 1.0, is_fact=True) if is_true else Chances(1.0, 0.0, is_fact=True)
    return Finding(test, test)


def at_most(value: MeanWithError, bound: float) -> Finding:
    """Tell whether a quantity is at most `bound`."""
    return _find(value, bound - value.mean)


def at_least(value: MeanWithError, bound: float) -> Finding:
    """Tell whether a quantity is at least `bound`."""
    return _find(value, value.mean - bound)


def above(value: MeanWithError, bound: float) -> Finding:
    """Tell whether a quantity is greater than `bound`; without any error, to be equal is not enough."""
    return _find(value, value.mean - bound, is_strict=True)


def _find(value: MeanWithError, distance: float, *, is_strict: bool = False) -> Finding:
    if value.sem is None:
        return UNKNOWN
    here = _test(value, distance, new_rows=False, is_strict=is_strict)
    new = UNKNOWN.new if value.rows is None else _test(value, distance, new_rows=True, is_strict=is_strict)
    return Finding(new, here)


def _test(value: MeanWithError, distance: float, *, new_rows: bool, is_strict: bool) -> Chances:
    if reach(value, new_rows=new_rows) == 0:
        is_kept = distance > 1e-9 if is_strict else distance >= -1e-9
        return Chances(0.0, 1.0) if is_kept else Chances(1.0, 0.0)
    kept = tail(value, distance, new_rows=new_rows)
    return Chances(kept, 1 - kept)


def all_of(findings: Sequence[Finding]) -> Finding:
    """Combine conditions that must all be confirmed; one broken condition breaks the whole."""
    if not findings:
        return UNKNOWN
    return Finding(_all_of([item.new for item in findings]), _all_of([item.here for item in findings]))


def _all_of(tests: Sequence[Chances]) -> Chances:
    num_drawn = sum(not test.is_fact for test in tests)
    refutes = [test.refute * (1 if test.is_fact else num_drawn) for test in tests]
    return Chances(max(test.confirm for test in tests), min(1.0, *refutes), is_fact=num_drawn == 0)


def any_of(findings: Sequence[Finding]) -> Finding:
    """Combine conditions of which one is enough; all must be broken to break the whole."""
    return negate(all_of([negate(item) for item in findings]))


def negate(finding: Finding) -> Finding:
    """Return the opposite of a condition."""
    return Finding(*(Chances(test.refute, test.confirm, test.is_fact) for test in finding))


def bracket(findings: Sequence[Finding]) -> Finding:
    """Combine conditions on several estimates of one quantity: certain only if all agree."""
    new, here = (
        Chances(max(test.confirm for test in tests), max(test.refute for test in tests))
        for tests in zip(*findings, strict=True)
    )
    return Finding(new, here)


def judge_pair(paired: Paired, test: Callable[[MeanWithError], Finding]) -> Finding:
    """Test a difference as chosen, and with equally many settings if one row had more."""
    sides = [paired, *([paired.equal] if paired.equal else [])]
    return bracket([test(side.estimate) for side in sides])


def never_broken(finding: Finding) -> Finding:
    """Return a condition that can be confirmed but not broken, as its numbers are biased against it."""
    return Finding(*(Chances(test.confirm, 1.0) for test in finding))


def all_within(values: Sequence[MeanWithError], bound: float) -> Finding:
    """Tell whether none of several quantities is further than `bound` from zero."""
    return all_of([at_most(side, bound) for value in values for side in (value, negated(value))])


@dataclass(frozen=True)
class ClaimVerdict:
    """The verdict of our records on a claim."""

    status: str
    sentence: str
    rows: tuple[str, ...] = ()
    """the rows it rests on; the claim is open while planned runs of them are missing; `*` matches any end of a name"""
    tasks: tuple[str, ...] | None = None
    """the tasks it rests on; None: all that count in a mean"""
    chance: float | None = None
    """probability of numbers like ours if the verdict is wrong; 1 if it is open, None if nothing was tested"""


def verdict(
    finding: Finding,
    sentence: str,
    rows: tuple[str, ...] = (),
    tasks: tuple[str, ...] | None = None,
    *,
    is_tested: bool | None = None,
) -> ClaimVerdict:
    """Make the verdict on a claim; add what these dev rows alone would give, if that differs.

    `is_tested` counts the verdict among those that could be wrong, even if its numbers decide nothing.
    """
    status = finding.status
    if finding.here.status != status:
        sentence += f"; for these very rows, without the error of drawing others: {finding.here.status}"
    chance = {CONFIRMED: finding.new.confirm, REFUTED: finding.new.refute}.get(status, 1.0)
    is_tested = finding != UNKNOWN if is_tested is None else is_tested
    return ClaimVerdict(status, sentence, rows, tasks, chance if is_tested else None)


def hold_together(verdicts: Sequence[ClaimVerdict]) -> list[bool]:
    """Find the verdicts that stand as a family, by Holm's step-down: the chance that one of them is wrong is 5%.

    A tested claim is either true or false, so there is one way to judge it wrongly. A claim that was not tested, as its
    rows were not run or decide nothing, cannot be judged wrongly.
    """
    tested = {number: item.chance for number, item in enumerate(verdicts) if item.chance is not None}
    kept = [False] * len(verdicts)
    for place, number in enumerate(sorted(tested, key=lambda number: tested[number])):
        if tested[number] > CHANCE / (len(tested) - place):
            break
        kept[number] = True
    return kept


def compare(scored: ScoredStudy, key: str, other: str, tasks: Sequence[str] | None = None) -> Paired | None:
    """Compare a row with another over tasks, or over all that count in a mean; None if one of them is missing."""
    row, less = scored.find_row(key), scored.find_row(other)
    return pair(row, less, averaged_tasks(scored) if tasks is None else tasks) if row and less else None


def lacking(*rows: str) -> ClaimVerdict:
    """Return the verdict for rows that were not run."""
    return ClaimVerdict(OPEN, f"needs {' and '.join(rows)} on the same tasks and seeds, which were not run")


def not_planned(scored: ScoredStudy, *rows: str) -> ClaimVerdict | None:
    """Return the verdict for rows that a profile leaves out; None if all are planned or there."""
    planned = {spec.key for spec in scored.planned_specs} | set(scored.rows)
    left_out = [row for row in rows if row not in planned]
    return ClaimVerdict(NONE, f"{' and '.join(left_out)} not in this profile") if left_out else None


def gap_text(paired: Paired, what: str) -> str:
    """Describe a difference with its bounds, as part of a sentence."""
    tasks, pairs = len(paired.by_task), paired.num_pairs
    text = f"{what}: {show(paired.estimate, signed=True)} points over {tasks} task{'s' * (tasks > 1)}"
    text += f" ({pairs} pair{'s' * (pairs > 1)}{unsure(paired.estimate)})"
    if paired.equal is None:
        return text
    return (
        f"{text}; with equally many settings {show(paired.equal.estimate, signed=True)}{unsure(paired.equal.estimate)}"
    )


def unsure(value: MeanWithError) -> str:
    """Describe the errors of a difference: its one-sided bounds, or that it has none."""
    if value.sem is None:
        return ", of one seed"
    if value.rows is None:
        return f"; 95% bounds for these rows {_bounds(value, new_rows=False)}; how many rows were scored is not known"
    if value.rows < UNSEEN:
        return f"; 95% bounds {_bounds(value, new_rows=False)}"
    text = f"; error of rows {value.rows:.1f}; 95% bounds {_bounds(value, new_rows=True)}, for these very rows "
    return text + _bounds(value, new_rows=False)


def _bounds(value: MeanWithError, *, new_rows: bool) -> str:
    width = reach(value, new_rows=new_rows)
    return f"{show(value.mean - width, signed=True)} and {show(value.mean + width, signed=True)}"
