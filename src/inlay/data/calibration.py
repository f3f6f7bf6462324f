"""Fits two things on dev rows besides weights: the temperature of probabilities, and the thresholds of labels.

Temperature (Guo et al. 2017): logits are divided by one number, chosen to make the targets most likely; no decision
changes. Thresholds: a head decides for a label whose logit is at least 0, and of two classes for the larger logit.
Where a metric such as F1 rewards it, another threshold is better: `tune_thresholds` finds the best one for each label.
A label with few positive rows is drawn towards the one threshold that is best for all. What is found counts only if it
also gains on rows that it was not chosen on, beyond chance.

Everything is computed in float64. `logits` are [n, L]; `targets` are classes [n], or 0 and 1 [n, L] for sets of labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from inlay.data.kinds import KINDS, find_kind_of_metric
from inlay.data.metrics import METRICS, Counts

NUM_BINS = 15
_RANGE = (1e-2, 1e2)
_FEWEST_RIGHT = 10  # rows without a mistake that say how sure a model may be


def fit_temperature(logits: np.ndarray, targets: np.ndarray, *, num_doubtful: int = 0) -> float:
    """The temperature with the least negative log-likelihood; 1 where the rows say nothing about it.

    Also 1 where the likelier probabilities would be worse calibrated, as those of a model that says one class only.
    Rows without a mistake say something only if `num_doubtful` rows more count, as in `likeliest_temperature`.
    """
    logits = np.asarray(logits, dtype=np.float64)
    if not len(logits) or not np.isfinite(logits).all():
        return 1.0
    if is_right(logits, targets).all():
        # Without doubt the likeliest temperature would be the coldest.
        if not num_doubtful or len(logits) < _FEWEST_RIGHT:
            return 1.0
        temperature = likeliest_temperature(logits, targets, num_doubtful=num_doubtful)
    else:
        temperature = likeliest_temperature(logits, targets)
    likelihood = negative_log_likelihood(logits, targets, temperature)
    is_likelier = likelihood < negative_log_likelihood(logits, targets)
    is_nearer = calibration_error(logits, targets, temperature) < calibration_error(logits, targets)
    return temperature if is_likelier and is_nearer else 1.0


def likeliest_temperature(logits: np.ndarray, targets: np.ndarray, *, num_doubtful: int = 0) -> float:
    """The temperature with the least negative log-likelihood, whatever else it does.

    `num_doubtful` rows more count, like these but as likely to have any label (as Platt 1999 counts one of each): rows
    that are all right then say how sure so many rows can make one, and not that nothing ever goes wrong.
    """
    from scipy.optimize import minimize_scalar

    bounds, doubt = (np.log(_RANGE[0]), np.log(_RANGE[1])), num_doubtful / (len(logits) + num_doubtful)

    def loss(log: float) -> float:
        known = negative_log_likelihood(logits, targets, np.exp(log))
        return (1 - doubt) * known + doubt * _expected_loss(logits / np.exp(log), targets.ndim) if doubt else known

    return float(np.exp(minimize_scalar(loss, bounds=bounds, method="bounded").x))


def _expected_loss(scaled: np.ndarray, num_axes: int) -> float:
    """The mean of -log p(target) of rows whose target is any label, or any set of labels."""
    if num_axes == 2:
        return float(np.mean(np.logaddexp(0.0, scaled) - scaled / 2))
    largest = scaled.max(axis=-1, keepdims=True)
    return float(np.mean(np.log(np.exp(scaled - largest).sum(axis=-1)) + (largest - scaled).mean(axis=-1)))


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
    gaps = np.bincount(_find_bins(confidences), weights=hits - confidences, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(confidences))


def _find_bins(confidences: np.ndarray) -> np.ndarray:
    return np.clip(np.ceil(confidences * NUM_BINS).astype(int) - 1, 0, NUM_BINS - 1)


@dataclass(frozen=True)
class ConfidenceBin:
    """The rows whose confidence lies in one of 15 equal bins: its mean, and the share of them that are right."""

    confidence: float
    accuracy: float
    count: int


def bin_confidences(confidences: np.ndarray, hits: np.ndarray) -> list[ConfidenceBin]:
    """The bins that have rows, from the least confidence to the highest: a reliability diagram as data."""
    bins = _find_bins(np.asarray(confidences, dtype=np.float64))
    counts, sums, right = (
        np.bincount(bins, weights=weights, minlength=NUM_BINS) for weights in (None, confidences, hits)
    )
    return [
        ConfidenceBin(float(sums[each] / counts[each]), float(right[each] / counts[each]), int(counts[each]))
        for each in np.flatnonzero(counts)
    ]


def is_right(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Find the rows, or the labels of a set, that are decided as the targets are."""
    if np.ndim(targets) == 2:
        return (logits > 0) == (np.asarray(targets) > 0)
    return logits.argmax(axis=-1) == targets


NUM_ROWS = 50
"""fewest dev rows for tuning"""
NUM_EACH = 10
"""fewest rows with a label, and without it, for a threshold of the label's own"""
_MOST_CUTS = 256  # tried for a label: of more rows, evenly spaced ones
_MOST_SWEEPS = 8  # over the labels, each tuned with the others held
_PULL = 10  # a label's own cut is weighted by its positive rows, the shared one by this number
_NUM_SPLITS, _NUM_RESAMPLES = 5, 100  # splits of the rows into halves, and resamples of each half's rows
_SURE = 0.95  # share of the resamples that must gain


def tune_thresholds(metric: str, logits: np.ndarray, targets: np.ndarray) -> tuple[float, ...] | None:
    """Tune the threshold of each logit (for two classes, of their difference); None: nothing is gained.

    None also where the metric is not one of decisions, there are more than two classes, or too few rows.
    """
    logits, targets = np.asarray(logits, dtype=np.float64), np.asarray(targets)
    # Decisions that thresholds can move are those on sets of labels, and between two classes.
    kind = KINDS[find_kind_of_metric(metric, targets.ndim)]
    if kind.targets.num_dims != targets.ndim or not kind.has_cuts(logits.shape[-1]) or not np.isfinite(logits).all():
        return None
    scores_nL = logits if targets.ndim == 2 else logits[:, 1:] - logits[:, :1]
    true_nL = targets > 0 if targets.ndim == 2 else targets[:, None] == 1
    if len(logits) < NUM_ROWS or not _has_each(true_nL).any():
        return None
    problem = _Problem(METRICS[metric].function, is_binary=targets.ndim == 1)
    if not _gains_elsewhere(problem, scores_nL, true_nL):
        return None
    found = problem.tune(scores_nL, true_nL)
    return None if not found.any() else tuple(float(cut) for cut in found)


def _has_each(true_nL: np.ndarray) -> np.ndarray:
    positive = true_nL.sum(axis=0)
    return (positive >= NUM_EACH) & (len(true_nL) - positive >= NUM_EACH)


class _Problem:
    """A metric to be maximised by thresholds on scores [n, L]. Two classes count as one label: is it the second?"""

    def __init__(self, metric: Callable[[Counts], np.ndarray], *, is_binary: bool) -> None:
        self._metric, self._is_binary = metric, is_binary

    def tune(self, scores_nL: np.ndarray, true_nL: np.ndarray) -> np.ndarray:
        """Find the best cuts: one for all labels first, then each label's own, as far as its rows are enough."""
        num_labels = scores_nL.shape[1]
        shared_C = _list_cuts(scores_nL.ravel())
        shared = _best(shared_C, self._score_shared(shared_C, scores_nL, true_nL))
        found = np.full(num_labels, shared)
        has_own = np.flatnonzero(_has_each(true_nL))
        for _ in range(_MOST_SWEEPS if num_labels > 1 else 0):
            before = found.copy()
            for label in has_own.tolist():
                cuts_C = np.append(_list_cuts(scores_nL[:, label]), found[label])
                found[label] = _best(cuts_C, self._score_one(cuts_C, label, found, scores_nL, true_nL), found[label])
            if (found == before).all():
                break
        weight_L = true_nL.sum(axis=0) / (true_nL.sum(axis=0) + _PULL)
        return np.where(_has_each(true_nL), weight_L * found + (1 - weight_L) * shared, shared)

    def score(self, predicted_nL: np.ndarray, true_nL: np.ndarray, weights_Rn: np.ndarray) -> np.ndarray:
        """The metric of each resample of rows; a row counts as often as its weight says."""
        hits_RL, support_RL, predicted_RL = (
            weights_Rn @ part.astype(np.float64) for part in (predicted_nL & true_nL, true_nL, predicted_nL)
        )
        right_R = weights_Rn @ (predicted_nL == true_nL).all(axis=1).astype(np.float64)
        return self._judge(hits_RL, support_RL, predicted_RL, right_R, len(true_nL))

    def _score_shared(self, cuts_C: np.ndarray, scores_nL: np.ndarray, true_nL: np.ndarray) -> np.ndarray:
        """The metric for each cut of all labels."""
        columns = list(zip(scores_nL.T, true_nL.T, strict=True))
        predicted_CL = np.stack([_count_above(scores, cuts_C) for scores, _ in columns], axis=-1)
        hits_CL = np.stack([_count_above(scores[true], cuts_C) for scores, true in columns], axis=-1)
        # A row is right from the highest score of a label it lacks on, until the lowest of one it has.
        from_n = np.where(true_nL, -np.inf, scores_nL).max(axis=1)
        until_n = np.where(true_nL, scores_nL, np.inf).min(axis=1)
        can_be = from_n < until_n
        right_C = _count_above(until_n[can_be], cuts_C) - _count_above(from_n[can_be], cuts_C)
        return self._judge(
            hits_CL, np.broadcast_to(true_nL.sum(axis=0), hits_CL.shape), predicted_CL, right_C, len(true_nL)
        )

    def _score_one(
        self, cuts_C: np.ndarray, label: int, held: np.ndarray, scores_nL: np.ndarray, true_nL: np.ndarray
    ) -> np.ndarray:
        """The metric for each cut of one label, while the others are held."""
        predicted_nL, scores_n, true_n = scores_nL > held, scores_nL[:, label], true_nL[:, label]
        hits_CL, predicted_CL = (
            np.tile(part.sum(axis=0), (len(cuts_C), 1)) for part in (predicted_nL & true_nL, predicted_nL)
        )
        hits_CL[:, label] = _count_above(scores_n[true_n], cuts_C)
        predicted_CL[:, label] = _count_above(scores_n, cuts_C)
        is_right_nL = predicted_nL == true_nL
        is_right_nL[:, label] = True
        can_be = is_right_nL.all(axis=1)
        lacking = scores_n[can_be & ~true_n]
        right_C = _count_above(scores_n[can_be & true_n], cuts_C) + len(lacking) - _count_above(lacking, cuts_C)
        support_CL = np.broadcast_to(true_nL.sum(axis=0), hits_CL.shape)
        return self._judge(hits_CL, support_CL, predicted_CL, right_C, len(true_nL))

    def _judge(
        self, hits: np.ndarray, support: np.ndarray, predicted: np.ndarray, num_right: np.ndarray, num_rows: int
    ) -> np.ndarray:
        if self._is_binary:
            absent = num_rows - support - predicted + hits
            hits, support, predicted = (
                np.concatenate([other, one], axis=-1)
                for other, one in ((absent, hits), (num_rows - support, support), (num_rows - predicted, predicted))
            )
        return np.asarray(self._metric(Counts(hits, support, predicted, num_right, num_rows)))


def _count_above(scores: np.ndarray, cuts_C: np.ndarray) -> np.ndarray:
    """Count the scores above each cut."""
    return len(scores) - np.searchsorted(np.sort(scores), cuts_C, side="right")


def _list_cuts(scores: np.ndarray) -> np.ndarray:
    """0, and the middles between neighbouring scores; where they are many, evenly spaced ones."""
    ordered = np.unique(scores)
    middles = (ordered[1:] + ordered[:-1]) / 2
    if len(middles) > _MOST_CUTS:
        middles = middles[np.linspace(0, len(middles) - 1, _MOST_CUTS).round().astype(int)]
    return np.append(middles, 0.0)


def _best(cuts: np.ndarray, values: np.ndarray, present: float = 0.0) -> float:
    """The cut of the highest value; of several, the one nearest to the present one."""
    best = np.flatnonzero(values >= values.max() - 1e-12)
    return float(cuts[best[np.abs(cuts[best] - present).argmin()]])


def _gains_elsewhere(problem: _Problem, scores_nL: np.ndarray, true_nL: np.ndarray) -> bool:
    """Whether cuts chosen on one half of the rows gain on the other, in nearly all resamples of the rows.

    Several random halvings; the rows of each half are decided by the cuts of the other.
    """
    generator, num_rows = np.random.default_rng(0), len(true_nL)
    gains: list[np.ndarray] = []
    for _ in range(_NUM_SPLITS):
        halves = np.array_split(generator.permutation(num_rows), 2)
        tuned_nL = np.empty_like(true_nL)
        for chosen_on, used_on in (halves, halves[::-1]):
            tuned_nL[used_on] = scores_nL[used_on] > problem.tune(scores_nL[chosen_on], true_nL[chosen_on])
        weights_Rn = generator.multinomial(num_rows, np.full(num_rows, 1 / num_rows), size=_NUM_RESAMPLES)
        untuned_R = problem.score(scores_nL > 0, true_nL, weights_Rn)
        gains.append(problem.score(tuned_nL, true_nL, weights_Rn) - untuned_R)
    return float(np.mean(np.concatenate(gains) > 0)) >= _SURE
