"""Paired comparisons, each against its formula written plainly."""

from __future__ import annotations

import math

import numpy as np
import pytest

from inlay.data.calibration import NUM_BINS, bin_confidences
from inlay.data.comparison import ScoredRows, compare_answers, find_right, mcnemar, sign_share
from inlay.data.kinds import KINDS, Scheme
from inlay.data.metrics import METRICS, list_metrics, score_all


def classes(num_rows=60, num_labels=3, seed=0):
    generator = np.random.default_rng(seed)
    labels = tuple(f"label-{index}" for index in range(num_labels))
    targets = generator.integers(num_labels, size=num_rows)
    first = np.where(generator.random(num_rows) < 0.6, targets, generator.integers(num_labels, size=num_rows))
    second = np.where(generator.random(num_rows) < 0.8, targets, generator.integers(num_labels, size=num_rows))
    return ScoredRows("classify", labels, targets), first, second


def every_kind(seed=0):
    """Rows of each kind, with two versions' decisions in the form that metrics take."""
    generator, num_rows = np.random.default_rng(seed), 40
    yield classes(num_rows, 2, seed)
    sets = [generator.integers(2, size=(num_rows, 4)).astype(np.float32) for _ in range(3)]
    yield ScoredRows("multilabel", ("a", "b", "c", "d"), sets[0]), sets[1], np.where(sets[2] > 0.5, sets[0], sets[1])
    numbers = generator.normal(size=num_rows)
    yield ScoredRows("regress", (), numbers), numbers + generator.normal(size=num_rows), numbers + 0.1
    levels = [generator.integers(4, size=num_rows) for _ in range(3)]
    yield ScoredRows("ordinal", ("1", "2", "3", "4"), levels[0]), levels[1], np.minimum(levels[0], 2)
    labels = ("O", "B-LOC", "I-LOC")
    words = [tuple((2 * place, 2 * place + 1, int(generator.integers(3))) for place in range(4)) for _ in range(40)]
    guesses = [[tuple(labels[generator.integers(3)] for _ in range(4)) for _ in range(40)] for _ in range(2)]
    yield ScoredRows("tag", labels, Scheme("tag", labels).collect(words)), *guesses
    golds = Scheme("span", ()).collect([((0, "one two"),) if row % 3 else () for row in range(40)])
    answers = [[str(generator.choice(["one two", "two", ""])) for _ in range(40)] for _ in range(2)]
    yield ScoredRows("span", (), golds), *answers
    texts = Scheme("text", ()).collect([["good film", "bad plot"][row % 2] for row in range(40)])
    yield ScoredRows("text", (), texts), *answers


KINDS_OF_ROWS = list(every_kind())


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (3, 9), (12, 12), (0, 20), (7, 2)])
def test_mcnemar_is_twice_the_smaller_tail_of_a_fair_coin(first, second):
    total, few = first + second, min(first, second)
    tail = sum(math.factorial(total) / (math.factorial(k) * math.factorial(total - k)) for k in range(few + 1))
    assert mcnemar(first, second) == pytest.approx(min(1.0, 2 * tail * 0.5**total))


def test_mcnemar_of_thousands_of_rows_is_a_number():
    assert 0 < mcnemar(2600, 2400) < 0.01
    assert mcnemar(0, 5000) == 0.0


def test_two_of_every_thousand_resamples_on_the_other_side_are_a_small_p():
    differences = np.array([-1.0] * 2 + [1.0] * 997)
    assert sign_share(differences) == pytest.approx(2 * 3 / 1000)
    assert sign_share(np.zeros(99)) == 1.0


@pytest.mark.parametrize("given", KINDS_OF_ROWS, ids=lambda given: given[0].kind)
def test_scores_are_those_of_evaluate(given):
    rows, first, second = given
    has_entities = rows.kind == "tag"
    outputs = [first, second]
    if rows.kind == "multilabel":  # as logits, which `score_all` decides
        outputs = [each - 0.5 for each in outputs]
    known = [score_all(rows.kind, rows.labels, rows.targets, each) for each in outputs]
    for metric in list_metrics(rows.kind, len(rows.labels), has_entities=has_entities):
        found = compare_answers(rows, metric, first, second, num_resamples=20)
        assert (found.score_a, found.score_b) == pytest.approx((known[0][metric], known[1][metric])), metric


def test_the_interval_is_of_the_same_rows_drawn_for_both():
    rows, first, second = classes()
    found = compare_answers(rows, "macro_f1", first, second, seed=3, num_resamples=200)

    def macro_f1(targets, guesses):
        scores = []
        for label in range(3):
            true, told = targets == label, guesses == label
            if true.any() or told.any():
                scores.append(2 * (true & told).sum() / (true.sum() + told.sum()))
        return sum(scores) / len(scores)

    drawn = np.random.default_rng(3).multinomial(60, np.full(60, 1 / 60), size=200)
    differences = []
    for counts in drawn:
        chosen = np.repeat(np.arange(60), counts)
        differences.append(
            macro_f1(rows.targets[chosen], second[chosen]) - macro_f1(rows.targets[chosen], first[chosen])
        )
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(differences, [0.025, 0.975])))
    assert found.p_value == pytest.approx(sign_share(np.array(differences)))


def test_a_share_of_right_rows_is_tested_by_mcnemar():
    rows, first, second = classes()
    right = [each == rows.targets for each in (first, second)]
    found = compare_answers(rows, "accuracy", first, second)
    assert found.p_value == mcnemar(int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum()))


def test_a_verdict_is_beyond_chance_and_knows_which_way_a_metric_goes():
    numbers = np.arange(50.0)
    near, far = numbers + np.tile([0.1, -0.1], 25), numbers + np.tile([2.0, -2.0], 25)
    rows = ScoredRows("regress", (), numbers)
    assert not METRICS["rmse"].higher_is_better
    assert compare_answers(rows, "rmse", far, near).verdict == "better"
    assert compare_answers(rows, "rmse", near, far).verdict == "worse"
    same = compare_answers(rows, "rmse", near, near)
    assert (same.verdict, same.p_value, same.difference) == ("no-difference", 1.0, 0.0)


def test_the_same_seed_gives_the_same_numbers():
    rows, first, second = classes()
    runs = [compare_answers(rows, "macro_f1", first, second, seed=seed) for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize("given", KINDS_OF_ROWS, ids=lambda given: given[0].kind)
def test_a_perfect_version_has_every_row_right(given):
    rows = given[0]
    form = KINDS[rows.kind].targets
    cells = [form.make_cell(target, rows.labels) for target in rows.targets]
    perfect = rows.targets
    if rows.kind == "tag":
        perfect = [tuple(tag for _, _, tag in cell) for cell in cells]
    elif rows.kind in ("span", "text"):
        perfect = [cell if isinstance(cell, str) else (cell[0][1] if cell else "") for cell in cells]
    right = find_right(rows, perfect)
    assert (right is None) == (rows.kind == "regress")
    assert right is None or right.all()


@pytest.mark.parametrize("given", KINDS_OF_ROWS, ids=lambda given: given[0].kind)
def test_a_cell_made_of_a_target_reads_as_that_target(given):
    rows = given[0]
    scheme, form = Scheme(rows.kind, rows.labels), KINDS[rows.kind].targets
    for target in rows.targets:
        cell = form.make_cell(target, rows.labels)
        if rows.kind != "span":  # JSON has lists, golds are tuples
            assert np.array_equal(np.asarray(scheme.read(cell)), np.asarray(target))
        assert isinstance(form.spell(cell, "one two three"), str)


def test_entities_and_tags_are_spelt_in_one_line():
    form = KINDS["tag"].targets
    assert form.spell([[0, 4, "B-LOC"], [5, 9, "I-LOC"], [10, 14, "O"]], "Abcd efgh ijkl") == "Abcd efgh (LOC)"
    assert form.spell([[0, 4, "NOUN"], [5, 9, "VERB"]], "Abcd efgh") == "Abcd/NOUN efgh/VERB"
    assert form.spell([[0, 4, "O"]], "Abcd") == ""


def test_a_bin_has_the_mean_confidence_and_the_share_of_right_rows():
    confidences = np.array([0.5, 0.51, 0.52, 0.99, 1.0])
    hits = np.array([True, False, True, True, True])
    bins = bin_confidences(confidences, hits)
    assert [each.count for each in bins] == [3, 2]
    assert bins[0].confidence == pytest.approx((0.5 + 0.51 + 0.52) / 3)
    assert bins[0].accuracy == pytest.approx(2 / 3)
    assert (bins[1].confidence, bins[1].accuracy) == (pytest.approx(0.995), 1.0)
    assert sum(each.count for each in bins) == len(confidences)
    assert len(bin_confidences(np.linspace(0.001, 1, 1000), np.ones(1000))) == NUM_BINS
