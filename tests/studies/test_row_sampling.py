"""The error of a score from its rows, against draws of rows."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from synthetic import Bench

from inlay.studies.judge.row_differences import pair
from inlay.studies.judge.row_sampling import covariances, influence, paired_error, score_error
from inlay.studies.judge.scores import choose

METRICS = {"accuracy": accuracy_score, "f1": f1_score, "matthews": matthews_corrcoef}


def draw_binary(rows: int, seed: int, *, agree: float = 0.0):
    """Gold labels and the answers of two runs, which err on the same rows with a share of `agree`."""
    draw = np.random.default_rng(seed)
    gold = (draw.random(rows) < 0.68).astype(int)
    luck = draw.random(rows)
    answers = []
    for wrong in (0.2, 0.25):
        own = np.where(draw.random(rows) < agree, luck, draw.random(rows))
        answers.append(np.where(own < wrong, 1 - gold, gold))
    return gold, *answers


@pytest.mark.parametrize("metric", METRICS)
def test_the_error_from_metrics_is_that_of_drawing_rows_again(metric):
    rows = 408
    drawn = [draw_binary(rows, seed)[:2] for seed in range(400)]
    truth = np.std([METRICS[metric](gold, answers) for gold, answers in drawn])
    gold, answers = drawn[0]
    scores = {name: float(compute(gold, answers)) for name, compute in METRICS.items()}
    assert score_error(metric, scores, rows) == pytest.approx(truth, rel=0.15)
    assert np.std(influence(metric, gold, answers)) / np.sqrt(rows) == pytest.approx(truth, rel=0.15)


def test_the_error_of_a_rank_correlation_is_that_of_drawing_rows_again():
    rows, draw = 300, np.random.default_rng(0)
    drawn = []
    for _ in range(400):
        gold = draw.normal(size=rows)
        drawn.append((gold, 1.2 * gold + draw.normal(size=rows)))
    truth = np.std([spearmanr(*pair).statistic for pair in drawn])
    gold, answers = drawn[0]
    assert score_error("spearman", {"spearman": spearmanr(gold, answers).statistic}, rows) == pytest.approx(
        truth, rel=0.2
    )
    assert np.std(influence("spearman", gold, answers)) / np.sqrt(rows) == pytest.approx(truth, rel=0.2)


def test_what_cannot_be_computed_is_not_known():
    assert score_error("accuracy", {"accuracy": 0.8}, None) is None
    assert score_error("f1", {"f1": 0.8}, 100) is None, "F1 alone does not tell the table of answers"
    assert score_error("rmse", {"rmse": 0.8}, 100) is None
    assert 0 < score_error("accuracy", {"accuracy": 1.0}, 20) < 0.07, "the next row may be wrong"
    majority = {"accuracy": 0.69, "f1": 0.0, "matthews": 0.0}
    assert score_error("matthews", majority, 1043) == 0.0, "who answers one class alone has 0 on any rows"


@pytest.mark.parametrize("metric", METRICS)
def test_two_runs_that_err_together_have_the_error_of_the_rows_where_they_differ(metric):
    rows = 408
    drawn = [draw_binary(rows, seed, agree=0.8) for seed in range(400)]
    gaps = [METRICS[metric](gold, first) - METRICS[metric](gold, second) for gold, first, second in drawn]
    gold, first, second = drawn[0]
    found = covariances([influence(metric, gold, answers) for answers in (first, second)])
    error = np.sqrt(found[0, 0] + found[1, 1] - 2 * found[0, 1])
    assert error == pytest.approx(np.std(gaps), rel=0.2)
    independent = np.sqrt(found[0, 0] + found[1, 1])
    assert error < 0.75 * independent, "as independent they would be far less sure"


def test_a_difference_takes_covariances_where_all_runs_have_them_and_else_independent_rows():
    gold, first, second = draw_binary(408, 0, agree=0.8)
    found = covariances([influence("accuracy", gold, answers) for answers in (first, second)])
    bench = Bench("glue")
    records = [
        bench.add(arm, "glue/rte", float(np.mean(gold == answers)), extra={"num_dev": 408})
        for arm, answers in (("full", first), ("adapters", second))
    ]

    def row_error():
        rows = [choose([record]) for record in records]
        return pair(*rows).estimate.rows

    independent = 100 * np.sqrt(sum(np.mean(gold == a) * np.mean(gold != a) / 408 for a in (first, second)))
    assert row_error() == pytest.approx(independent, rel=0.02)
    for number, record in enumerate(records):
        known = {other.id: float(found[number, place]) for place, other in enumerate(records)}
        record.extra["row_covariances"] = {"accuracy": known}
    expected = np.sqrt(found[0, 0] + found[1, 1] - 2 * found[0, 1])
    assert paired_error([(records[0], 1.0), (records[1], -1.0)], "accuracy") == pytest.approx(expected)
    assert row_error() == pytest.approx(100 * expected)


def test_scores_on_test_rows_have_no_error_of_dev_rows():
    bench = Bench("extra")
    records = [
        bench.add(arm, "extra/airline", 0.6, test={"accuracy": 0.6}, extra={"num_dev": 10_000, "num_test": 100})
        for arm in ("full", "adapters")
    ]
    for record in records:
        record.extra["row_covariances"] = {"accuracy": {other.id: 1e-6 for other in records}}
    rows = [choose([record], "test") for record in records]
    assert pair(*rows).estimate.rows == pytest.approx(100 * np.sqrt(2 * 0.24 / 100), rel=0.05)


def test_answers_that_are_all_the_same_have_no_influence_and_no_nan():
    gold = np.arange(10.0)
    assert not influence("spearman", gold, np.ones(10)).any()
    bench = Bench("glue")
    record = bench.add("full", "glue/stsb", 0.0, extra={"row_covariances": {"spearman": {}}})
    record.extra["row_covariances"]["spearman"][record.id] = None  # as JSON has what is not a number
    assert paired_error([(record, 1.0)], "spearman") is None


def test_a_row_less_itself_has_no_error():
    bench = Bench("glue")
    bench.add("full", "glue/rte", 0.7, extra={"num_dev": 100})
    row = choose(bench.records)
    assert pair(row, row).estimate.rows == 0.0
