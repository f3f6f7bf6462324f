"""Honest probabilities: the temperature is the likeliest one, and brings confidence and truth together."""

from __future__ import annotations

import numpy as np
import pytest

from inlay.data.calibration import calibration_error, fit_temperature, negative_log_likelihood


def draw_classes(temperature, num_rows=20000, num_labels=4, seed=0):
    """Classes drawn with the probabilities that logits have at `temperature`."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(scale=3.0, size=(num_rows, num_labels))
    shares = np.exp(logits / temperature)
    shares /= shares.sum(axis=1, keepdims=True)
    targets = (shares.cumsum(axis=1) < generator.random((num_rows, 1))).sum(axis=1)
    return logits, targets


def draw_sets(temperature, num_rows=8000, seed=0):
    generator = np.random.default_rng(seed)
    logits = generator.normal(scale=3.0, size=(num_rows, 3))
    return logits, (generator.random(logits.shape) < 1 / (1 + np.exp(-logits / temperature))).astype(np.float32)


@pytest.mark.parametrize("draw", [draw_classes, draw_sets])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_that_was_drawn_with_is_found(draw, temperature):
    logits, targets = draw(temperature)
    found = fit_temperature(logits, targets)
    assert found == pytest.approx(temperature, rel=0.06)
    assert negative_log_likelihood(logits, targets, found) <= negative_log_likelihood(logits, targets)
    assert calibration_error(logits, targets, found) < 0.02


@pytest.mark.parametrize("draw", [draw_classes, draw_sets])
def test_it_lowers_loss_and_calibration_error_of_overconfident_logits(draw):
    logits, targets = draw(3.0)
    found = fit_temperature(logits, targets)
    assert negative_log_likelihood(logits, targets, found) < negative_log_likelihood(logits, targets) - 0.05
    assert calibration_error(logits, targets, found) < calibration_error(logits, targets) / 4


def test_calibration_error_is_the_weighted_gap_of_fifteen_bins():
    logits, targets = draw_classes(2.0, num_rows=500)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = 0.0
    for edge in range(15):
        rows = [n for n, row in enumerate(shares) if edge / 15 < row.max() <= (edge + 1) / 15]
        if rows:
            right = np.mean([shares[n].argmax() == targets[n] for n in rows])
            expected += len(rows) / 500 * abs(right - np.mean([shares[n].max() for n in rows]))
    assert calibration_error(logits, targets) == pytest.approx(expected)


def test_likelihoods_follow_their_formulas():
    logits = np.array([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]])
    shares = np.exp(logits / 2) / np.exp(logits / 2).sum(axis=1, keepdims=True)
    expected = -np.mean(np.log([shares[0, 1], shares[1, 0]]))
    assert negative_log_likelihood(logits, np.array([1, 0]), 2.0) == pytest.approx(expected)
    sets = np.array([[1.0, 0, 1], [0, 0, 1]])
    p = 1 / (1 + np.exp(-logits / 2))
    expected = -np.mean(sets * np.log(p) + (1 - sets) * np.log(1 - p))
    assert negative_log_likelihood(logits, sets, 2.0) == pytest.approx(expected)


def test_rows_that_say_nothing_leave_the_temperature_at_one():
    assert fit_temperature(np.zeros((0, 3)), np.zeros(0, dtype=int)) == 1.0
    sure = np.array([[5.0, -5.0]] * 10)
    assert fit_temperature(sure, np.zeros(10, dtype=int)) == 1.0  # all right: no temperature is too cold
    assert fit_temperature(np.full((4, 2), np.nan), np.zeros(4, dtype=int)) == 1.0
    assert calibration_error(np.zeros((0, 3)), np.zeros(0, dtype=int)) == 0.0


@pytest.mark.parametrize("gap", [0.3, 3.0])
def test_with_a_doubtful_row_rows_that_are_all_right_say_how_sure_so_many_make_one(gap):
    logits, targets = np.array([[gap, 0.0], [0.0, gap]] * 20), np.array([0, 1] * 20)
    wanted = pytest.approx((40 + 0.5) / 41, abs=1e-3)
    assert 1 / (1 + np.exp(-gap / fit_temperature(logits, targets, num_doubtful=1))) == wanted
    applies = np.array([[1, 0], [0, 1]] * 20)
    temperature = fit_temperature(np.where(applies > 0, gap, -gap), applies, num_doubtful=1)
    assert 1 / (1 + np.exp(-gap / temperature)) == wanted
    assert fit_temperature(logits[:9], targets[:9], num_doubtful=1) == fit_temperature(logits, targets) == 1.0


def test_a_likelier_temperature_that_is_worse_calibrated_is_not_kept():
    """99 rows of 100 are right and said with 0.99: as honest as can be, but for one that is wrong and very sure."""
    logits = np.zeros((100, 2))
    logits[:, 0] = np.log(0.99 / 0.01)
    logits[0, 0] = 60.0
    targets = np.array([1] + [0] * 99)

    def confidences(temperature):
        return 1 / (1 + np.exp(-logits[:, 0] / temperature))

    def loss(temperature):
        right = confidences(temperature)
        return -np.mean(np.log(np.where(targets == 0, right, 1 / (1 + np.exp(logits[:, 0] / temperature)))))

    def gap(temperature):
        """All rows are in one bin, or the sure one in another."""
        said, is_right = confidences(temperature), targets == 0
        bins = np.ceil(said * 15).astype(int)
        return sum(abs(is_right[bins == b].mean() - said[bins == b].mean()) * np.mean(bins == b) for b in set(bins))

    likeliest = min(np.linspace(0.5, 10.0, 200), key=loss)
    assert loss(likeliest) < loss(1.0)
    assert gap(likeliest) > gap(1.0)
    assert fit_temperature(logits, targets) == 1.0
