"""Temperature scaling and decision thresholds: what is fitted on dev rows besides weights.

Temperature (Guo et al. 2017): logits are divided by one number, chosen to make the targets most likely; no decision
changes. Thresholds: a head decides for a label whose logit is at least 0, and of two classes for the larger logit.
Where a metric such as F1 rewards it, another threshold is better: `tune_thresholds` finds the best one for each label.
A label with few positive rows is drawn towards the one threshold that is best for all labels. Thresholds are kept only
if they also gain, beyond chance, on rows that they were not chosen on.

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
_FEWEST_RIGHT = 10  # fewest rows without a mistake from which a temperature is fitted


def fit_temperature(logits: np.ndarray, targets: np.ndarray, *, num_doubtful: int = 0) -> float:
    """Return the temperature with the least negative log-likelihood; 1 where the rows cannot tell it.

    Also 1 where the likelier probabilities would be worse calibrated, such as those of a model that always predicts one
    class. From rows without a mistake a temperature is fitted only with `num_doubtful`: see `likeliest_temperature`.
    """
    logits = np.asarray(logits, dtype=np.float64)
    if not len(logits) or not np.isfinite(logits).all():
        return 1.0
    if is_right(logits, targets).all():
        # Without doubtful rows the likeliest temperature would be the lowest one.
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
    """Return the temperature with the least negative log-likelihood, without looking at the calibration.

    `num_doubtful` imaginary rows are added, with the same logits but with any label equally likely (Platt 1999 adds one
    row of each label). So rows that are all right give a finite confidence, which grows with their number.
    """
    from scipy.optimize import minimize_scalar

    bounds = np.log(_RANGE[0]), np.log(_RANGE[1])
    doubt = num_doubtful / (len(logits) + num_doubtful)

    def loss(log: float) -> float:
        known = negative_log_likelihood(logits, targets, np.exp(log))
        if not doubt:
            return known
        return (1 - doubt) * known + doubt * _expected_loss(logits / np.exp(log), targets.ndim)

    return float(np.exp(minimize_scalar(loss, bounds=bounds, method="bounded").x))


def _expected_loss(scaled: np.ndarray, num_axes: int) -> float:
    """Return the mean of -log p(target) over rows, each label (or set of labels) being equally likely."""
    if num_axes == 2:
        return float(np.mean(np.logaddexp(0.0, scaled) - scaled / 2))
    largest = scaled.max(axis=-1, keepdims=True)
    return float(np.mean(np.log(np.exp(scaled - largest).sum(axis=-1)) + (largest - scaled).mean(axis=-1)))


def negative_log_likelihood(logits: np.ndarray, targets: np.ndarray, temperature: float = 1.0) -> float:
    """Return the mean of -log p(target) over rows, and over the labels of sets."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    if np.ndim(targets) == 2:
        return float(np.mean(np.logaddexp(0.0, np.where(np.asarray(targets) > 0, -scaled, scaled))))
    scaled = scaled - scaled.max(axis=-1, keepdims=True)
    shares = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    return float(-np.mean(shares[np.arange(len(scaled)), np.asarray(targets)]))


def calibration_error(logits: np.ndarray, targets: np.ndarray, temperature: float = 1.0) -> float:
    """Return the expected calibration error: the mean of |accuracy - confidence| over 15 equal bins, by their size.

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
    """The rows whose confidence is in one of 15 equal bins: its mean, and the share of them that are right."""

    confidence: float
    accuracy: float
    count: int


def bin_confidences(confidences: np.ndarray, hits: np.ndarray) -> list[ConfidenceBin]:
    """Return the bins that have rows, from the least confidence to the highest: a reliability diagram as data."""
    bins = _find_bins(np.asarray(confidences, dtype=np.float64))
    counts, sums, right = (
        np.bincount(bins, weights=weights, minlength=NUM_BINS) for weights in (None, confidences, hits)
    )
    return [
        ConfidenceBin(float(sums[each] / counts[each]), float(right[each] / counts[each]), int(counts[each]))
        for each in np.flatnonzero(counts)
    ]


def is_right(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return which rows, or which labels of a set, are decided as the targets say."""
    if np.ndim(targets) == 2:
        return (logits > 0) == (np.asarray(targets) > 0)
    return logits.argmax(axis=-1) == targets


NUM_ROWS = 50
"""fewest dev rows for tuning"""
NUM_EACH = 10
"""fewest rows with a label, and without it, for a threshold of the label's own"""
_MOST_CUTS = 256  # thresholds tried for a label; where there are more, evenly spaced ones
_MOST_SWEEPS = 8  # passes over the labels, each tuned with the others held
_PULL = 10  # a label's own cut is weighted by its positive rows, the shared one by this number
_NUM_SPLITS, _NUM_RESAMPLES = 5, 100  # splits of the rows into halves, and resamples of each half's rows
_SURE = 0.95  # share of the resamples that must gain


def tune_thresholds(metric: str, logits: np.ndarray, targets: np.ndarray) -> tuple[float, ...] | None:
    """Tune the threshold of each logit (for two classes, of their difference); None where nothing is gained.

    None also where the metric does not depend on decisions, there are more than two classes, or too few rows.
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
    search = _ThresholdSearch(METRICS[metric].function, is_binary=targets.ndim == 1)
    if not _gains_elsewhere(search, scores_nL, true_nL):
        return None
    found = search.tune(scores_nL, true_nL)
    return None if not found.any() else tuple(float(cut) for cut in found)


def _has_each(true_nL: np.ndarray) -> np.ndarray:
    """Return which labels have enough rows with and without them for a threshold of their own."""
    positive = true_nL.sum(axis=0)
    return (positive >= NUM_EACH) & (len(true_nL) - positive >= NUM_EACH)


class _ThresholdSearch:
    """A metric to be maximised by thresholds on scores [n, L]. Two classes are one label: is it the second class?"""

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
        """Return the metric of each resample of rows; a row counts as often as its weight says."""
        hits_RL, support_RL, predicted_RL = (
            weights_Rn @ part.astype(np.float64) for part in (predicted_nL & true_nL, true_nL, predicted_nL)
        )
        right_R = weights_Rn @ (predicted_nL == true_nL).all(axis=1).astype(np.float64)
        return self._judge(hits_RL, support_RL, predicted_RL, right_R, len(true_nL))

    def _score_shared(self, cuts_C: np.ndarray, scores_nL: np.ndarray, true_nL: np.ndarray) -> np.ndarray:
        """Return the metric for each threshold that all labels share."""
        columns = list(zip(scores_nL.T, true_nL.T, strict=True))
        predicted_CL = np.stack([_count_above(scores, cuts_C) for scores, _ in columns], axis=-1)
        hits_CL = np.stack([_count_above(scores[true], cuts_C) for scores, true in columns], axis=-1)
        # A row is right for thresholds from the highest score of a label that it lacks to the lowest that it has.
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
        """Return the metric for each threshold of one label, while the others are held."""
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
        """Return the metric of counts; for two classes, counts of the first class are added."""
        if self._is_binary:
            absent = num_rows - support - predicted + hits
            hits, support, predicted = (
                np.concatenate([other, one], axis=-1)
                for other, one in ((absent, hits), (num_rows - support, support), (num_rows - predicted, predicted))
            )
        return np.asarray(self._metric(Counts(hits, support, predicted, num_right, num_rows)))


def _count_above(scores: np.ndarray, cuts_C: np.ndarray) -> np.ndarray:
    """Count the scores above each threshold."""
    return len(scores) - np.searchsorted(np.sort(scores), cuts_C, side="right")


def _list_cuts(scores: np.ndarray) -> np.ndarray:
    """Return the thresholds to try: 0, and the middles between neighbouring scores, thinned out where they are many."""
    ordered = np.unique(scores)
    middles = (ordered[1:] + ordered[:-1]) / 2
    if len(middles) > _MOST_CUTS:
        middles = middles[np.linspace(0, len(middles) - 1, _MOST_CUTS).round().astype(int)]
    return np.append(middles, 0.0)


def _best(cuts: np.ndarray, values: np.ndarray, present: float = 0.0) -> float:
    """Return the threshold with the highest value; of several, the one nearest to the present one."""
    best = np.flatnonzero(values >= values.max() - 1e-12)
    return float(cuts[best[np.abs(cuts[best] - present).argmin()]])


def _gains_elsewhere(search: _ThresholdSearch, scores_nL: np.ndarray, true_nL: np.ndarray) -> bool:
    """Return whether thresholds chosen on one half of the rows gain on the other, in nearly all resamples of the rows.

    The rows are halved at random several times; the rows of each half are decided by the thresholds of the other.
    """
    generator, num_rows = np.random.default_rng(0), len(true_nL)
    gains: list[np.ndarray] = []
    for _ in range(_NUM_SPLITS):
        halves = np.array_split(generator.permutation(num_rows), 2)
        tuned_nL = np.empty_like(true_nL)
        for chosen_on, used_on in (halves, halves[::-1]):
            tuned_nL[used_on] = scores_nL[used_on] > search.tune(scores_nL[chosen_on], true_nL[chosen_on])
        weights_Rn = generator.multinomial(num_rows, np.full(num_rows, 1 / num_rows), size=_NUM_RESAMPLES)
        untuned_R = search.score(scores_nL > 0, true_nL, weights_Rn)
        gains.append(search.score(tuned_nL, true_nL, weights_Rn) - untuned_R)
    return float(np.mean(np.concatenate(gains) > 0)) >= _SURE
