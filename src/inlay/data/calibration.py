"""Honest probabilities: a temperature fitted on dev rows, and how far stated and true shares of right answers differ.

Guo et al. 2017: logits divided by one number, chosen to make the targets most likely; no decision changes. Everything
is computed in float64. `logits` are [n, L]; `targets` are classes [n], or 0 and 1 [n, L] for sets of labels.
"""

from __future__ import annotations

import numpy as np

NUM_BINS = 15
_RANGE = (1e-2, 1e2)


def fit_temperature(logits: np.ndarray, targets: np.ndarray) -> float:
    """The temperature with the least negative log-likelihood; 1 where the rows say nothing about it.

    Also 1 where the likelier probabilities would be worse calibrated, as those of a model that says one class only.
    """
    logits = np.asarray(logits, dtype=np.float64)
    # Without a mistake the likeliest temperature is the coldest: that is no finding.
    if not len(logits) or not np.isfinite(logits).all() or is_right(logits, targets).all():
        return 1.0
    temperature = likeliest_temperature(logits, targets)
    likelihood = negative_log_likelihood(logits, targets, temperature)
    is_likelier = likelihood < negative_log_likelihood(logits, targets)
    is_nearer = calibration_error(logits, targets, temperature) < calibration_error(logits, targets)
    return temperature if is_likelier and is_nearer else 1.0


def likeliest_temperature(logits: np.ndarray, targets: np.ndarray) -> float:
    """The temperature with the least negative log-likelihood, whatever else it does."""
    from scipy.optimize import minimize_scalar

    bounds = (np.log(_RANGE[0]), np.log(_RANGE[1]))
    found = minimize_scalar(
        lambda log: negative_log_likelihood(logits, targets, np.exp(log)), bounds=bounds, method="bounded"
    )
    return float(np.exp(found.x))


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
    else:
        confidences = 1 / np.exp(scaled - scaled.max(axis=-1, keepdims=True)).sum(axis=-1)
    if not len(confidences):
        return 0.0
    hits = is_right(scaled, targets).ravel()
    bins = np.clip(np.ceil(confidences * NUM_BINS).astype(int) - 1, 0, NUM_BINS - 1)
    gaps = np.bincount(bins, weights=hits - confidences, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(confidences))


def is_right(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Which rows, or which labels of a set, are decided as the targets are."""
    if np.ndim(targets) == 2:
        return (logits > 0) == (np.asarray(targets) > 0)
    return logits.argmax(axis=-1) == targets
