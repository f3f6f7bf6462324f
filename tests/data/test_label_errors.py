"""Likely label errors: flipped labels are found, clean ones left alone, and what cannot be told is said."""

from __future__ import annotations

import numpy as np
import pytest

from inlay.data.label_errors import FEWEST_ROWS, as_probabilities, find_label_errors
from inlay.data.tasks import Split
from inlay.training.recipe.linear import choose_strength, cross_validate

LABELS = ("ham", "spam", "bulk")


def make_split(targets):
    number = len(targets)
    return Split([f"text {row}" for row in range(number)], None, np.asarray(targets), list(range(2, number + 2)), "x")


def make_points(*, num_labels=3, num_rows=400, seed=0, apart=3.0):
    """Clouds of points, one for each class, that hardly overlap."""
    generator = np.random.default_rng(seed)
    targets = generator.integers(num_labels, size=num_rows)
    return generator.normal(size=(num_rows, 8)) + apart * np.eye(8)[targets], targets


def flip(targets, share, num_labels=3, seed=1):
    generator = np.random.default_rng(seed)
    rows = generator.choice(len(targets), size=round(share * len(targets)), replace=False)
    wrong = targets.copy()
    wrong[rows] = (wrong[rows] + generator.integers(1, num_labels, size=len(rows))) % num_labels
    return wrong, set(rows.tolist())


def look(points, targets, num_labels=3):
    outputs = choose_strength("accuracy", cross_validate("classify", "accuracy", points, targets, num_labels)).outputs
    return find_label_errors(make_split(targets), LABELS, as_probabilities(outputs, targets))


def test_flipped_labels_are_the_most_suspicious_with_the_label_that_they_had():
    points, true = make_points()
    given, flipped = flip(true, 0.05)
    found = look(points, given)
    listed = {error.line - 2 for error in found.errors}
    assert len(listed & flipped) >= 0.9 * len(listed)  # nearly all that is listed is wrong
    assert len(listed & flipped) >= 0.6 * len(flipped)  # and most of what is wrong is listed
    for error in found.errors[:10]:
        assert (error.given, error.likely) == (LABELS[given[error.line - 2]], LABELS[true[error.line - 2]])
        assert error.text == f"text {error.line - 2}"
    margins = [error.margin for error in found.errors]
    assert margins == sorted(margins, reverse=True)


def test_clean_labels_are_left_alone():
    points, true = make_points()
    assert len(look(points, true).errors) <= 4  # of 400; some points lie in another cloud


def test_thresholds_are_the_mean_self_confidence_of_each_class():
    # The mean of class a is 0.868, that of b 0.8: of a's last two rows b is 0.79 and 0.81 likely.
    first = [0.9] * 40 + [0.21, 0.19]
    second = [0.8] * 42
    probabilities = np.array([[p, 1 - p] for p in first] + [[1 - p, p] for p in second])
    split = make_split([0] * len(first) + [1] * len(second))
    (error,) = find_label_errors(split, ("a", "b"), probabilities).errors
    assert (error.line, error.given, error.likely) == (len(first) + 1, "a", "b")
    assert error.probability == pytest.approx(0.81)
    assert error.margin == pytest.approx(0.62)


def test_a_class_that_the_model_does_not_know_is_not_accused():
    generator = np.random.default_rng(0)
    targets = np.repeat([0, 1, 2], [60, 60, 6])
    probabilities = np.where(np.eye(3)[targets], 0.9, 0.05) + 0.01 * generator.random((126, 3))
    own = np.linspace(0.005, 0.03, 6)
    probabilities[120:] = np.stack([0.97 - own, np.full(6, 0.03), own], axis=1)  # the six rows of the rare class
    assert find_label_errors(make_split(targets), LABELS, probabilities).errors == ()


def test_sets_of_labels_are_doubted_label_by_label():
    generator = np.random.default_rng(0)
    true = (generator.random((200, 3)) < 0.4).astype(np.float32)
    probabilities = np.where(true > 0, 0.92, 0.06) + 0.02 * generator.random(true.shape)
    probabilities[:, 2] = generator.random(200)  # nothing is known of the third label
    probabilities[10:13, :2] = np.where(true[10:13, :2] > 0, 0.96, 0.04)  # surer than in the mean
    given = true.copy()
    given[10, 0], given[11, 1] = 1 - given[10, 0], 1 - given[11, 1]
    given[12, :2] = 1 - given[12, :2]
    found = find_label_errors(make_split(given), LABELS, probabilities)
    assert sorted(error.line - 2 for error in found.errors) == [10, 11, 12]
    for error in found.errors:
        row = error.line - 2
        assert error.given == ("|".join(n for n, on in zip(LABELS, given[row], strict=True) if on) or "(no label)")
        fixed = np.append(true[row, :2], given[row, 2])
        assert error.likely == ("|".join(n for n, on in zip(LABELS, fixed, strict=True) if on) or "(no label)")


def test_few_rows_tell_nothing():
    points, true = make_points(num_rows=FEWEST_ROWS - 1)
    found = look(points, flip(true, 0.1)[0])
    assert found.errors == ()
    assert "49 rows are too few" in found.silence


def test_a_model_near_chance_accuses_nobody_even_where_one_class_is_most_rows():
    generator = np.random.default_rng(0)
    points = generator.normal(size=(300, 8))
    for shares in ([1 / 3, 1 / 3, 1 / 3], [0.9, 0.05, 0.05]):
        found = look(points, generator.choice(3, size=300, p=shares))
        assert found.errors == ()
        assert "hardly better than chance" in found.silence


def test_probabilities_are_as_sure_as_they_are_right():
    generator = np.random.default_rng(0)
    targets = generator.integers(2, size=2000)
    is_right = generator.random(2000) < 0.8
    said = np.where(is_right, targets, 1 - targets)
    probabilities = as_probabilities(100.0 * np.eye(2)[said], targets)
    assert probabilities.max(axis=1).mean() == pytest.approx(is_right.mean(), abs=0.01)
    perfect = as_probabilities(np.eye(2)[targets], targets)
    assert perfect.max() == pytest.approx(np.e / (1 + np.e)), "without a mistake nothing says how sure to be"
    sets = as_probabilities(100.0 * (2 * said - 1)[:, None], targets[:, None].astype(np.float32))
    assert np.abs(sets - 0.5).mean() == pytest.approx(is_right.mean() - 0.5, abs=0.01)
