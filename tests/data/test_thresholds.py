"""Thresholds of labels tuned on dev rows: the best there are, and none where chance would do as well."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from inlay.data import calibration
from inlay.data.calibration import _ThresholdSearch, tune_thresholds
from inlay.data.metrics import METRICS, score


def draw_classes(seed, num_rows, *, shift=0.0, positive=0.3):
    """Logits [n, 2] of a fair model whose second class lies `shift` too low, and targets."""
    generator = np.random.default_rng(seed)
    targets = (generator.random(num_rows) < positive).astype(np.int64)
    margins = generator.normal(2.0 * targets - 1.0) + np.log(positive / (1 - positive)) - shift
    return np.stack([np.zeros(num_rows), margins], axis=1), targets


def draw_sets(seed, num_rows, num_labels=4, *, shift=0.0, positive=0.1):
    generator = np.random.default_rng(seed)
    targets = (generator.random((num_rows, num_labels)) < positive).astype(np.int64)
    return generator.normal(2.0 * targets - 1.0) + np.log(positive / (1 - positive)) - shift, targets


def score_cut(metric, logits, targets, cuts):
    """The metric as evaluation computes it, of logits shifted by the cuts."""
    if targets.ndim == 1:
        return score(metric, logits - np.array([0.0, *cuts]), targets)
    return score(metric, logits - np.array(cuts), targets)


def middles(scores):
    ordered = np.unique(scores)
    return [0.0, *((ordered[1:] + ordered[:-1]) / 2)]


@pytest.mark.parametrize("metric", ["f1", "macro_f1", "matthews", "accuracy"])
@pytest.mark.parametrize("seed", range(4))
def test_the_cut_between_two_classes_is_the_best_of_all(metric, seed):
    logits, targets = draw_classes(seed, 60, shift=1.0)
    scores = logits[:, 1:] - logits[:, :1]
    found = _ThresholdSearch(METRICS[metric].function, is_binary=True).tune(scores, targets[:, None] == 1)
    best = max(score_cut(metric, logits, targets, [cut]) for cut in middles(scores))
    assert score_cut(metric, logits, targets, found) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("metric", ["micro_f1", "macro_f1", "accuracy"])
@pytest.mark.parametrize("seed", range(4))
def test_the_cuts_of_two_labels_are_the_best_of_all_pairs(metric, seed, monkeypatch):
    monkeypatch.setattr(calibration, "_PULL", 0)
    logits, targets = draw_sets(seed, 40, 2, shift=1.0, positive=0.45)
    found = _ThresholdSearch(METRICS[metric].function, is_binary=False).tune(logits, targets > 0)
    pairs = itertools.product(middles(logits[:, 0]), middles(logits[:, 1]))
    best = max(score_cut(metric, logits, targets, pair) for pair in pairs)
    assert score_cut(metric, logits, targets, found) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("metric", ["micro_f1", "macro_f1", "accuracy"])
def test_the_shared_cut_is_the_best_single_one(metric, monkeypatch):
    monkeypatch.setattr(calibration, "NUM_EACH", 1000)  # no label has a cut of its own
    logits, targets = draw_sets(3, 60, shift=1.0, positive=0.2)
    found = _ThresholdSearch(METRICS[metric].function, is_binary=False).tune(logits, targets > 0)
    assert len(set(found.tolist())) == 1
    best = max(score_cut(metric, logits, targets, [cut] * 4) for cut in middles(logits))
    assert score_cut(metric, logits, targets, found) == pytest.approx(best, abs=1e-12)


def test_a_label_of_few_positive_rows_takes_the_shared_cut_and_others_are_drawn_towards_it(monkeypatch):
    logits, targets = draw_sets(0, 400, 3, shift=1.5, positive=0.2)
    targets[9:, 2] = 0  # fewer than ten are left
    problem = _ThresholdSearch(METRICS["macro_f1"].function, is_binary=False)
    drawn = problem.tune(logits, targets > 0)
    monkeypatch.setattr(calibration, "_PULL", 0)
    own = problem.tune(logits, targets > 0)
    shared = drawn[2]
    assert own[2] == shared
    for label in (0, 1):
        weight = targets[:, label].sum() / (targets[:, label].sum() + 10)
        assert drawn[label] == pytest.approx(weight * own[label] + (1 - weight) * shared)
        assert own[label] != shared


@pytest.mark.parametrize("metric", ["micro_f1", "macro_f1"])
def test_rare_labels_gain_on_fresh_rows(metric):
    gains = []
    for seed in range(5):
        logits, targets = draw_sets(seed, 400)
        cuts = tune_thresholds(metric, logits, targets)
        assert cuts is not None
        assert len(cuts) == 4
        fresh, true = draw_sets(100 + seed, 4000)
        gains.append(score_cut(metric, fresh, true, cuts) - score(metric, fresh, true))
    assert min(gains) > 0.03, gains


@pytest.mark.parametrize("metric", ["f1", "matthews"])
def test_a_rare_class_that_lies_too_low_gains_on_fresh_rows(metric):
    logits, targets = draw_classes(1, 400, shift=1.5, positive=0.15)
    cuts = tune_thresholds(metric, logits, targets)
    assert cuts is not None
    assert len(cuts) == 1
    assert cuts[0] < 0
    fresh, true = draw_classes(2, 4000, shift=1.5, positive=0.15)
    assert score_cut(metric, fresh, true, cuts) > score(metric, fresh, true) + 0.05


def test_chance_is_hardly_ever_taken_for_a_gain():
    """A fair model of balanced classes is best at one half, for accuracy and for Matthews' correlation."""
    tuned = [
        tune_thresholds(metric, *draw_classes(seed, 100, positive=0.5)) is not None
        for metric in ("accuracy", "matthews")
        for seed in range(40)
    ]
    assert np.mean(tuned) <= 0.1


def test_too_few_rows_or_too_few_of_one_side_are_left_at_one_half():
    logits, targets = draw_classes(1, 400, shift=3.0)
    assert tune_thresholds("f1", logits, targets) is not None
    assert tune_thresholds("f1", logits[:49], targets[:49]) is None
    order = np.argsort(targets, kind="stable")
    few = order[: (targets == 0).sum() + 9]
    assert tune_thresholds("f1", logits[few], targets[few]) is None


def test_other_decisions_have_no_thresholds():
    logits, targets = draw_classes(1, 400, shift=3.0)
    three = np.concatenate([logits, logits[:, :1] - 9.0], axis=1)
    assert tune_thresholds("macro_f1", three, targets) is None, "three classes"
    assert tune_thresholds("pearson", logits, targets) is None, "numbers"
    logits[0, 0] = np.nan
    assert tune_thresholds("f1", logits, targets) is None, "not finite"
