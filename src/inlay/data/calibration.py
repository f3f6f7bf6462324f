"""Honest probabilities: a temperature fitted on dev rows, and how far stated and true shares of right answers differ.

Guo et al. 2017: logits divided by one number, chosen to make the targets most likely; no decision changes. Everything
is computed in float64. `logits` are [n, L]; `targets` are classes [n], or 0 and 1 [n, L] for sets of labels.
"""

from __future__ import annotations

import numpy as np

NUM_BINS = 15
_RANGE = (1e-2, 1e2)


def fit_temperature(logits: np.ndarray, targets: np.ndarray) -> float:
    """The temperature with the least negative log-likelihood; 1 where the rows say nothing about it."""
    from scipy.optimize import minimize_scalar

    logits = np.asarray(logits, dtype=np.float64)
    if not len(logits) or not np.isfinite(logits).all():
        return 1.0
    bounds = (np.log(_RANGE[0]), np.log(_RANGE[1]))
    found = minimize_scalar(
        lambda log: negative_log_likelihood(logits, targets, np.exp(log)), bounds=bounds, method="bounded"
    )
    # Rows that are all right would make every answer certain: such a temperature is no finding, but the range's end.
    is_inside = bounds[0] + 1e-3 < found.x < bounds[1] - 1e-3
    better = found.fun < negative_log_likelihood(logits, targets, 1.0)
    return float(np.exp(found.x)) if is_inside and better else 1.0


def negative_log_likelihood(logits: np.ndarray, targets: np.ndarray, temperature: float = 1.0) -> float:
    """The mean over rows (and labels of a set) of -log p(target)."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    if np.ndim(targets) == 2:
        return float(np.mean(np.logaddexp(0.0, np.where(np.asarray(targets) > 0, -scaled, scaled))))
    scaled = scaled - scaled.max(axis=-1, keepdims=True)
    shares = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    return float(-np.mean(shares[np.arange(len(scaled)), np.asarray(targets)]))


def calibration_error(logits: np.ndarray, targets: np.ndarray, temperature: float = 1.0) -> float:
    """The expected calibration error: |right share - mean confidence| over 15 equal bins of confidence, by their size.

    A class is decided once per row; a set of labels once per row and label.
    """
    scaled, targets = np.asarray(logits, dtype=np.float64) / temperature, np.asarray(targets)
    if np.ndim(targets) == 2:
        confidences = (1 / (1 + np.exp(-np.abs(scaled)))).ravel()
        is_right = ((scaled > 0) == (targets > 0)).ravel()
    else:
        scaled = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
        confidences = scaled.max(axis=-1) / scaled.sum(axis=-1)
        is_right = scaled.argmax(axis=-1) == targets
    if not len(confidences):
        return 0.0
    bins = np.clip(np.ceil(confidences * NUM_BINS).astype(int) - 1, 0, NUM_BINS - 1)
    gaps = np.bincount(bins, weights=is_right - confidences, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(confidences))
