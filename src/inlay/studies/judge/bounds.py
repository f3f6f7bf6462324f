"""Means with their standard errors, and bounds on them.

An estimate has two errors, which are kept apart:

- `sem`, the error of training: other seeds give other scores. Each task has its own variance over seeds (it differs by
  more than ten-fold between tasks, so it is never pooled); a mean over tasks has the sum of these variances, with the
  degrees of freedom of Welch and Satterthwaite, rounded down.
- `rows`, the error of the scored rows: a dev set is a sample too, and all seeds are scored on the same one.

A one-sided bound lies √((t · sem)² + (z · rows)²) from the mean, with Student's t for the first term and the normal
quantile for the second. `tests/studies/test_error_rates.py` checks on simulated records that bounds are wrong at most
as often as they should be, also with two seeds and with tasks whose deviations differ 17-fold.

A claim is about the tasks it names, so no error is counted for drawing other tasks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ABSENT = "–"
CHANCE = 0.05
"""how often a bound may be wrong"""


class MeanWithError(NamedTuple):
    """A mean with its standard errors; a single score has no error of training."""

    mean: float
    sem: float | None = None
    num: int = 1
    freedom: int | None = None
    """degrees of freedom of `sem`; None if the error is known exactly"""
    rows: float | None = 0.0
    """standard error from the rows that were scored; None if it is not known"""

    @property
    def margin(self) -> float:
        """The error of training; 0 if it is not known."""
        return self.sem or 0.0


def estimate(scores: Iterable[float], rows: float | None = 0.0) -> MeanWithError:
    """Return the mean and its standard error: the sample's standard deviation over √n."""
    values = list(scores)
    sem = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return MeanWithError(statistics.fmean(values), sem, len(values), len(values) - 1, rows)


def average(groups: Sequence[Sequence[float]], weights: Sequence[float] | None = None) -> MeanWithError:
    """Average the groups' means; the error comes from the scores within the groups, which are independent.

    A group with a single score has no variance, and borrows none from other groups: the average then has no error.
    """
    shares = [weight / sum(weights) for weight in weights] if weights else [1 / len(groups)] * len(groups)
    mean = sum(share * statistics.fmean(group) for share, group in zip(shares, groups, strict=True))
    num = sum(map(len, groups))
    if any(len(group) < 2 for group in groups):
        return MeanWithError(mean, None, num, 0)
    parts = [share**2 * statistics.variance(group) / len(group) for share, group in zip(shares, groups, strict=True)]
    freedom = satterthwaite(parts, [len(group) - 1 for group in groups])
    return MeanWithError(mean, math.sqrt(sum(parts)), num, freedom)


def combine(values: Sequence[MeanWithError], weights: Sequence[float]) -> MeanWithError:
    """Return a weighted sum of estimates whose seeds do not depend on each other.

    They are scored on the same rows, where methods tend to make the same mistakes. So the row error of a sum (all
    weights of one sign) is at most the sum of their errors, and that of a difference at most the one of independent
    rows.
    """
    mean = sum(weight * value.mean for weight, value in zip(weights, values, strict=True))
    num = sum(value.num for value in values)
    parts = [abs(weight) * (value.rows or 0.0) for weight, value in zip(weights, values, strict=True)]
    is_sum = min(weights) >= 0 or max(weights) <= 0
    is_known = all(value.rows is not None for value in values)
    rows = (sum(parts) if is_sum else math.hypot(*parts)) if is_known else None
    if any(value.sem is None for value in values):
        return MeanWithError(mean, None, num, 0, rows)
    variances = [weight**2 * value.margin**2 for weight, value in zip(weights, values, strict=True)]
    freedom = satterthwaite(variances, [value.freedom for value in values])
    return MeanWithError(mean, math.sqrt(sum(variances)), num, freedom, rows)


def satterthwaite(variances: Sequence[float], freedoms: Sequence[int | None]) -> int | None:
    """Return the degrees of freedom of a sum of variances, rounded down, but at least the smallest part's.

    None stands for a variance that is known exactly.
    """
    known = [(part, freedom) for part, freedom in zip(variances, freedoms, strict=True) if freedom is not None]
    if not known:
        return None
    least = min(freedom for _, freedom in known)
    below = sum(part**2 / freedom for part, freedom in known if freedom)
    if not below:  # all variances are zero
        return least
    return max(int(sum(variances) ** 2 / below + 1e-9), least)


def negated(value: MeanWithError) -> MeanWithError:
    """Return the estimate with the other sign."""
    return value._replace(mean=-value.mean)


def difference(first: MeanWithError, second: MeanWithError) -> MeanWithError:
    """Return the difference of two estimates with independent seeds."""
    return combine([first, second], [1.0, -1.0])


def mean_of_all(values: Sequence[MeanWithError]) -> MeanWithError:
    """Return the mean of estimates with independent seeds."""
    return combine(values, [1 / len(values)] * len(values))


def deviations(values: Sequence[MeanWithError]) -> list[MeanWithError]:
    """Return each estimate less the mean of all."""
    share = 1 / len(values)
    found = []
    for number, value in enumerate(values):
        weights = [(1.0 if other == number else 0.0) - share for other in range(len(values))]
        found.append(combine(values, weights)._replace(num=value.num))
    return found


def reach(value: MeanWithError, chance: float = CHANCE, *, new_rows: bool = False) -> float:
    """Return the distance from the estimate of a one-sided bound that is wrong with probability `chance`.

    With `new_rows` it is a bound on the score over new rows, else over the rows that were scored.
    """
    from scipy.special import ndtri, stdtrit

    normal = float(ndtri(1 - chance))
    student = normal if value.freedom is None else float(stdtrit(max(value.freedom, 1), 1 - chance))
    rows = (value.rows or 0.0) if new_rows else 0.0
    return math.hypot(student * value.margin, normal * rows)


def tail(value: MeanWithError, distance: float, *, new_rows: bool = False) -> float:
    """Return the p-value of being further than `distance` from the estimate."""
    if distance < 0:
        return 1 - tail(value, -distance, new_rows=new_rows)
    if reach(value, 0.25, new_rows=new_rows) == 0:  # no error at all
        return 0.0 if distance > 0 else 0.5
    low, high = 0.0, 0.5  # `reach` falls from infinity to 0
    for _ in range(60):
        middle = (low + high) / 2
        if reach(value, middle, new_rows=new_rows) > distance:
            low = middle
        else:
            high = middle
    return high


def moderate(values: Sequence[MeanWithError]) -> list[MeanWithError]:
    """Raise the variance of each task's estimate to at least the mean variance of all tasks.

    Needed where one of many tasks is picked: with two or three seeds, some task has nearly equal scores by chance and
    looks certain. The degrees of freedom become those of the mean variance.
    """
    known = [value for value in values if value.sem is not None and value.freedom]
    if len(known) < 2:
        return list(values)
    variances = [value.margin**2 * value.num for value in known]
    mean_variance = statistics.fmean(variances)
    shares = [variance / len(known) for variance in variances]
    freedom = satterthwaite(shares, [value.freedom for value in known])
    found = []
    for value in values:
        variance = max(mean_variance, value.margin**2 * value.num)
        found.append(value._replace(sem=math.sqrt(variance / value.num), freedom=freedom))
    return found


def show(value: MeanWithError | float | None, *, signed: bool = False) -> str:
    """Format points with their standard error: `86.2 ± 0.3`; a dash if there are none."""
    if value is None:
        return ABSENT
    found = value if isinstance(value, MeanWithError) else MeanWithError(value)
    text = f"{found.mean:+.1f}" if signed else f"{found.mean:.1f}"
    return (text if found.sem is None else f"{text} ± {found.sem:.1f}").replace("-", "−")
