"""Standard errors of metrics from the rows that were scored: how far a score may be from the score on new rows.

Two ways. Where the answers of two runs to the same rows are at hand, the covariances of their scores are measured (see
`influence`) and kept in the records, so that a difference has the error of rows that were answered by both. Where only
metrics were kept, an error is computed from them (`score_error`), and two runs are taken as independent: they err on
the same rows more often than that, so their difference has a smaller error in truth, never a larger one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inlay.studies.run.records import Record

Floats = NDArray[np.float64]


def num_rows(record: Record, split: str) -> int | None:
    """Return the number of rows a record was scored on; None if it does not say."""
    found = record.extra.get(f"num_{split}")
    return None if found is None else int(found)


def score_error(metric: str, scores: Mapping[str, float], rows: int | None) -> float | None:
    """Return a metric's standard error over `rows` rows, from the kept metrics; None if it is not known."""
    if rows is None or rows < 4 or metric not in scores:
        return None
    value = scores[metric]
    if metric in ("accuracy", "exact_match", "token_f1") or value == 1:
        # A row's score lies between 0 and 1: its variance is at most that of a row that is right or wrong. Two rows
        # of each are added (Agresti and Coull), so that none that is wrong does not mean that none would be.
        share = (value * rows + 2) / (rows + 4)
        return math.sqrt(max(share * (1 - share), 0.0) / rows)
    if metric in ("spearman", "pearson"):
        # Bonett and Wright 2000, Psychometrika 65: of Spearman's coefficient; Pearson's own is smaller.
        return (1 - value**2) * math.sqrt((1 + value**2 / 2) / (rows - 3))
    if metric in ("f1", "matthews"):
        shares = _confusion(scores)
        return None if shares is None else _delta_error(metric, shares, rows)
    return None


def _confusion(scores: Mapping[str, float]) -> Floats | None:
    """Return the shares of true and false positives, false and true negatives, for two classes.

    With W the share of wrong rows and F the F1, 2TP / (2TP + W) = F gives the true positives. Matthews' coefficient
    then tells how the wrong rows are divided, up to which part are the false positives, which neither error depends
    on: by search, since it has no simple inverse.
    """
    if not {"accuracy", "f1", "matthews"} <= scores.keys():
        return None
    accuracy, f1, matthews = (scores[name] for name in ("accuracy", "f1", "matthews"))
    wrong = 1 - accuracy
    if f1 >= 1 or wrong <= 0:
        return None
    right_positive = f1 * wrong / (2 * (1 - f1))
    right_negative = accuracy - right_positive
    if right_negative < -1e-9:
        return None
    false_positive = np.linspace(0, wrong, 2001)
    shares = np.stack([
        np.full_like(false_positive, right_positive),
        false_positive,
        wrong - false_positive,
        np.full_like(false_positive, max(right_negative, 0.0)),
    ])  # fmt: skip
    return np.asarray(shares[:, np.abs(_matthews(shares) - matthews).argmin()])


def _matthews(shares: Floats) -> Floats:
    tp, fp, fn, tn = shares
    below = np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    return np.divide(tp * tn - fp * fn, below, out=np.zeros_like(tp), where=below > 0)


def _f1(shares: Floats) -> Floats:
    tp, fp, fn, _ = shares
    below = 2 * tp + fp + fn
    return np.divide(2 * tp, below, out=np.zeros_like(tp), where=below > 0)


_OF_SHARES = {"f1": _f1, "matthews": _matthews}


def _delta_error(metric: str, shares: Floats, rows: int) -> float:
    """Return the standard error of a function of multinomial shares, to first order."""
    slopes = _slopes(metric, shares)
    return math.sqrt(max(float(shares @ slopes**2 - (shares @ slopes) ** 2), 0.0) / rows)


def _slopes(metric: str, shares: Floats) -> Floats:
    """Return the derivative of a metric by each of the four shares: central differences, one-sided at zero."""
    step = 1e-6
    found = []
    for number in range(4):
        up, down = shares.copy(), shares.copy()
        up[number] += step
        down[number] = max(down[number] - step, 0.0)
        columns = np.stack([up, down], axis=1)
        first, second = _OF_SHARES[metric](columns)
        found.append((first - second) / (up[number] - down[number]))
    return np.asarray(found)


def influence(metric: str, gold: Floats, answers: Floats) -> Floats | None:
    """Return each row's influence on a metric: over draws of rows, the metric varies as the mean of these values.

    The covariance of two runs' metrics on the same n rows is the covariance of their influences over n.
    """
    if metric == "accuracy":
        return np.asarray(gold == answers, dtype=np.float64)
    if metric in ("f1", "matthews"):
        kind = np.where(answers == 1, np.where(gold == 1, 0, 1), np.where(gold == 1, 2, 3))
        shares = np.bincount(kind, minlength=4) / len(gold)
        return np.asarray(_slopes(metric, shares)[kind])
    if metric in ("spearman", "pearson"):
        first, second = (_ranks(gold), _ranks(answers)) if metric == "spearman" else (gold, answers)
        return _correlation_influence(first, second)
    return None


def _ranks(values: Floats) -> Floats:
    from scipy.stats import rankdata

    return np.asarray(rankdata(values), dtype=np.float64)


def _correlation_influence(first: Floats, second: Floats) -> Floats:
    """Return the influence on Pearson's r: uv − r (u² + v²) / 2, u and v standardised (of ranks: first order)."""
    if first.std() == 0 or second.std() == 0:  # no correlation is defined, whichever rows are drawn
        return np.zeros(len(first))
    u, v = ((values - values.mean()) / values.std() for values in (first, second))
    r = float((u * v).mean())
    return np.asarray(u * v - r * (u**2 + v**2) / 2)


def covariances(influences: Sequence[Floats]) -> Floats:
    """Return the covariances of the metrics of several runs on the same rows."""
    stacked = np.stack(influences)
    return np.atleast_2d(np.cov(stacked)) / stacked.shape[1]


def paired_error(records: Sequence[tuple[Record, float]], metric: str) -> float | None:
    """Return the row error of a weighted sum of runs' scores, from measured covariances; None without them."""
    total = 0.0
    for record, weight in records:
        known: Mapping[str, Any] = (record.extra.get("row_covariances") or {}).get(metric, {})
        for other, share in records:
            covariance = known.get(other.id)
            if covariance is None:
                return None
            total += weight * share * float(covariance)
    return math.sqrt(max(total, 0.0))
