"""Errors of means, and bounds that are wrong as often as they say."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest
from scipy import stats

from inlay.studies.judge.bounds import (
    MeanWithError,
    average,
    combine,
    deviations,
    difference,
    estimate,
    mean_of_all,
    reach,
    satterthwaite,
    tail,
)


def test_a_mean_over_tasks_has_the_sum_of_their_own_variances():
    groups = [[80.0, 82.0, 84.0], [60.0, 61.0]]
    found = average(groups)
    variances = [statistics.variance(group) / len(group) / 4 for group in groups]
    assert found.mean == pytest.approx((82 + 60.5) / 2)
    assert found.sem == pytest.approx(math.sqrt(sum(variances)))
    # Welch and Satterthwaite: (Σ v)² / Σ (v² / ν), rounded down.
    assert found.freedom == int(sum(variances) ** 2 / (variances[0] ** 2 / 2 + variances[1] ** 2 / 1))


def test_a_quiet_task_does_not_lend_its_quiet_to_a_loud_one():
    loud, quiet = [50.0, 60.0], [80.0, 80.01]
    found = average([loud, quiet])
    assert found.sem == pytest.approx(estimate(loud).sem / 2, rel=1e-3)
    assert found.freedom == 1, "one pair of seeds decides it, not two"


def test_a_task_with_one_seed_leaves_the_mean_without_an_error():
    assert average([[80.0, 84.0], [60.0]]).sem is None, "nobody knows how loud it is"
    assert average([[80.0], [60.0]]).sem is None


def test_two_samples_are_compared_as_welch_does():
    draw = np.random.default_rng(3)
    first, second = draw.normal(0, 1, 5), draw.normal(0.4, 6, 9)
    found = difference(estimate(first.tolist()), estimate(second.tolist()))
    welch = stats.ttest_ind(first, second, equal_var=False)
    assert found.mean / found.sem == pytest.approx(welch.statistic)
    assert found.freedom == int(welch.df)


def test_degrees_of_freedom_are_never_fewer_than_the_least_of_the_parts():
    assert satterthwaite([1.0, 0.0], [1, 5]) == 1
    assert satterthwaite([0.0, 0.0], [2, 5]) == 2
    assert satterthwaite([1.0], [None]) is None
    assert satterthwaite([1.0, 1.0], [2, 2]) == 4


def test_errors_of_rows_add_up_in_a_sum_and_are_at_most_independent_in_a_difference():
    values = [MeanWithError(1.0, 0.1, 3, 2, rows=0.3), MeanWithError(2.0, 0.1, 3, 2, rows=0.4)]
    assert mean_of_all(values).rows == pytest.approx(0.35)
    assert difference(*values).rows == pytest.approx(0.5)
    assert combine(values, [1.0, 1.0]).rows == pytest.approx(0.7)
    assert mean_of_all([values[0], values[1]._replace(rows=None)]).rows is None


def test_deviations_from_a_mean_have_the_error_of_both():
    values = [MeanWithError(1.0, 0.3, 3, 2), MeanWithError(3.0, 0.6, 3, 2), MeanWithError(5.0, 0.9, 3, 2)]
    found = deviations(values)
    assert [item.mean for item in found] == pytest.approx([-2.0, 0.0, 2.0])
    assert found[0].sem == pytest.approx(math.hypot(2 / 3 * 0.3, 0.6 / 3, 0.9 / 3))


def test_a_bound_and_its_chance_belong_together():
    for value in (
        MeanWithError(0, 0.5, 3, 2, 0.4),
        MeanWithError(0, 0.5, 9, 8),
        MeanWithError(0, 0.0, 3, 2, 0.4),
        MeanWithError(0, 0.5),
    ):
        for chance in (0.001, 0.05, 0.3):
            width = reach(value, chance, new_rows=True)
            assert tail(value, width, new_rows=True) == pytest.approx(chance, rel=1e-6)
            assert tail(value, -width, new_rows=True) == pytest.approx(1 - chance, rel=1e-6)
    assert tail(MeanWithError(0.0, 1.0, 3, 2), 2.0) == pytest.approx(stats.t.sf(2.0, 2))
    assert tail(MeanWithError(0.0, 1.0), 2.0) == pytest.approx(stats.norm.sf(2.0))
    assert reach(MeanWithError(0, 0.5, 3, 2, 0.4)) < reach(MeanWithError(0, 0.5, 3, 2, 0.4), new_rows=True)


@pytest.mark.parametrize("seeds", [2, 3])
@pytest.mark.parametrize("spread", [1.0, 17.0])
@pytest.mark.parametrize("rows", [0.0, 0.5, 2.0])
def test_a_bound_is_wrong_at_most_once_in_twenty_times(seeds, spread, rows):
    """Six tasks whose deviations over seeds differ up to 17-fold, and rows that are drawn once for all seeds."""
    draw, wrong, times = random.Random(f"{seeds}{spread}{rows}"), 0, 3000
    scales = [spread ** (number / 5) for number in range(6)]
    for _ in range(times):
        found = average([[draw.gauss(0, scale) for _ in range(seeds)] for scale in scales])
        seen = found.mean + draw.gauss(0, rows)
        wrong += seen > reach(found._replace(rows=rows), new_rows=True)
    assert wrong / times < 0.05 + 3 * math.sqrt(0.05 * 0.95 / times)
    assert wrong > 0, "a bound that is never wrong says nothing"
