"""Linear models of rows of numbers, with the outputs of a head: logits for classes and labels, numbers for numbers.

Logistic regression for classes, one for each label where a row may have several, ridge regression for numbers; by
scikit-learn. Rows may be sparse (words) or dense (a backbone's vectors). Labels without a training row are never
predicted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge

from inlay.data import KINDS, is_better, score

MAX_STEPS = 1000
_NARROWEST = 1e-3  # share of the median feature's deviation
_CERTAIN = 20.0  # the logit of a label that every training row has, or that none has


@dataclass(frozen=True)
class Linear:
    """Weights and biases of a linear model."""

    weights: np.ndarray  # [outputs, features]
    bias: np.ndarray  # [outputs]
    has_converged: bool = True

    @property
    def num_parameters(self) -> int:
        """Number of fitted parameters; two classes share one weight per feature, as their logits are opposite."""
        is_mirrored = len(self.bias) == 2 and np.array_equal(self.weights[0], -self.weights[1])
        return (self.weights.size + self.bias.size) // (2 if is_mirrored else 1)

    def outputs(self, rows: Any) -> np.ndarray:
        """Return the model's outputs for the rows: logits [n, labels], or numbers [n, 1]."""
        return rows @ self.weights.T + self.bias


def _fit_classes(rows: Any, targets: np.ndarray, strength: float, num_labels: int) -> Linear:
    present = np.unique(targets)
    if len(present) == 1:
        return Linear(np.zeros((num_labels, rows.shape[1])), _CERTAIN * (np.arange(num_labels) == present[0]))
    weights, bias, has_converged = _fit_logistic(rows, targets, strength)
    if len(present) == 2:  # scikit-learn keeps one row for two classes: the second's logit less the first's
        weights, bias = np.concatenate([-weights, weights]) / 2, np.concatenate([-bias, bias]) / 2
    all_weights, all_bias = np.zeros((num_labels, rows.shape[1])), np.full(num_labels, bias.min() - _CERTAIN)
    all_weights[present], all_bias[present] = weights, bias
    return Linear(all_weights, all_bias, has_converged)


def _fit_labels(rows: Any, targets: np.ndarray, strength: float, num_labels: int) -> Linear:
    """Fit one-against-the-rest models, one for each label."""
    models = []
    for applies in targets.T > 0:
        if applies.all() or not applies.any():
            certain = _CERTAIN if applies.all() else -_CERTAIN
            models.append((np.zeros((1, rows.shape[1])), np.array([certain]), True))
        else:
            models.append(_fit_logistic(rows, applies, strength))
    weights, bias = np.concatenate([model[0] for model in models]), np.concatenate([model[1] for model in models])
    return Linear(weights, bias, all(model[2] for model in models))


def _fit_logistic(rows: Any, targets: np.ndarray, strength: float) -> tuple[np.ndarray, np.ndarray, bool]:
    model = LogisticRegression(C=strength, max_iter=MAX_STEPS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(rows, targets)
    return model.coef_, model.intercept_, not any(issubclass(item.category, ConvergenceWarning) for item in caught)


def _fit_number(rows: Any, targets: np.ndarray, strength: float, num_labels: int) -> Linear:
    solver = "sparse_cg" if sparse.issparse(rows) else "cholesky"
    model = Ridge(alpha=1 / strength, solver=solver).fit(rows, targets)
    return Linear(np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_))


FITTERS: dict[str, Callable[[Any, np.ndarray, float, int], Linear]] = {
    "classes": _fit_classes,
    "labels": _fit_labels,
    "number": _fit_number,
}
"""`Kind.linear` -> rows, targets, strength, number of outputs -> the model."""

STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""inverse regularisation, on standardised rows"""
FOLDS = 5


def fit_linear(kind: str, rows: Any, targets: np.ndarray, strength: float, num_labels: int) -> Linear:
    """Fit the linear model of a task's kind; `strength` is inverse regularisation: C, or a ridge's 1/alpha."""
    linear = KINDS[kind].linear
    assert linear is not None, "checked before"
    return FITTERS[linear](rows, decision_targets(kind, targets, num_labels), strength, num_labels)


def decision_targets(kind: str, targets: np.ndarray, num_labels: int) -> np.ndarray:
    """Return targets as 0 or 1 for every output that is a decision of its own."""
    entry = KINDS[kind]
    if entry.linear != "labels":
        return targets
    assert entry.output_targets is not None
    return entry.output_targets(targets, num_labels)


def linear_kinds() -> str:
    """List the kinds of task that have a linear model, for a message."""
    return ", ".join(name for name, kind in KINDS.items() if kind.linear is not None)


def _find_scale(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the means and widths by which rows are standardised, feature by feature.

    A feature that hardly varies beside the others is rounding and no signal: made as wide as the others it would get a
    weight that no new row can bear.
    """
    widths = rows.std(axis=0)
    return rows.mean(axis=0), np.maximum(widths, _NARROWEST * float(np.median(widths)) or 1.0)


@dataclass(frozen=True)
class Validated:
    """The result of cross-validating one strength: the score on held-out rows, and the outputs for them."""

    strength: float
    score: float
    outputs: np.ndarray


def cross_validate(
    kind: str, metric: str, rows: np.ndarray, targets: np.ndarray, num_labels: int
) -> dict[float, Validated]:
    """Cross-validate every strength; each row is held out in one of a few folds."""
    folds = np.random.default_rng(0).permutation(len(rows)) % min(FOLDS, len(rows))
    make_outputs = KINDS[kind].output_targets
    assert make_outputs is not None
    num_outputs = make_outputs(targets[:1], num_labels).shape[1]
    outputs = {strength: np.zeros((len(rows), num_outputs)) for strength in STRENGTHS}
    for fold in np.unique(folds):
        kept, left = folds != fold, folds == fold
        means, widths = _find_scale(rows[kept])
        inside, outside = (rows[kept] - means) / widths, (rows[left] - means) / widths
        for strength in STRENGTHS:
            model = fit_linear(kind, inside, targets[kept], strength, num_labels)
            outputs[strength][left] = model.outputs(outside)
    return {s: Validated(s, score(metric, found, targets), found) for s, found in outputs.items()}


def choose_strength(metric: str, tried: Mapping[float, Validated]) -> Validated:
    """Choose the strength with the best score; the first, simplest one in a tie."""
    first, *others = tried.values()
    for found in others:
        if is_better(metric, found.score, first.score):
            first = found
    return first


def fit_raw(kind: str, rows: np.ndarray, targets: np.ndarray, strength: float, num_labels: int) -> Linear:
    """Fit a linear model to standardised rows, and return it for unscaled rows."""
    means, widths = _find_scale(rows)
    model = fit_linear(kind, (rows - means) / widths, targets, strength, num_labels)
    weights = model.weights / widths
    return Linear(weights, model.bias - weights @ means, model.has_converged)
