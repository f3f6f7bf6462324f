"""Comparison of two versions' answers to the same rows: which is better, by how much, and could it be chance?

All scores are paired: both versions are scored on the same rows, or the same resample of them, so that rows which are
hard for both do not matter. A share of right rows is tested by McNemar's exact test (McNemar 1947): of the rows that
only one version has right, half should belong to each if both were equally good. Any other metric is tested by the
paired bootstrap (Efron and Tibshirani 1993): how often does the difference change its sign?
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from inlay.data.kinds import KINDS
from inlay.data.metrics import CHUNK_CELLS, METRICS, SAMPLES, Counts, Summing, decide, sum_by
from inlay.data.squad import has_unanswerable, score_answer

ALPHA = 0.05
"""a difference counts if chance alone would make one as large less often than this"""
NUM_RESAMPLES = 2000
_SQUAD_SAMPLE = "passages"


@dataclass(frozen=True)
class Comparison:
    """The scores of two versions on the same rows; differences are the second's score less the first's."""

    metric: str
    num_rows: int
    score_a: float
    score_b: float
    low: float
    high: float
    """the ends of the difference's 95% interval (percentiles of the paired bootstrap)"""
    p_value: float

    @property
    def difference(self) -> float:
        """The second's score less the first's."""
        return self.score_b - self.score_a

    @property
    def gain(self) -> float:
        """The difference, above 0 if the second version is better, also for metrics where lower is better."""
        return self.difference if METRICS[self.metric].higher_is_better else -self.difference

    @property
    def verdict(self) -> str:
        """`better` or `worse` if the second version is so beyond chance; else `no-difference`."""
        if self.p_value >= ALPHA or not self.gain:
            return "no-difference"
        return "better" if self.gain > 0 else "worse"


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """The rows that two versions answered, with their targets. `labels` includes those that training never saw."""

    kind: str
    labels: tuple[str, ...]
    targets: np.ndarray


def compare_answers(
    rows: ScoredRows, metric: str, first: Any, second: Any, *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> Comparison:
    """Compare two versions' outputs, or decisions, on the same rows."""
    decisions = [decide(rows.kind, outputs) for outputs in (first, second)]
    sums = [_make_summing(rows, each) for each in decisions]
    function, num_rows = METRICS[metric].function, len(rows.targets)
    score_a, score_b = (float(function(sum_up(np.ones(num_rows)))) for sum_up in sums)
    # The difference on each resample; `weights_Rn` has how often each row is in each of a chunk of resamples.
    generator = np.random.default_rng(seed)
    chunk = max(1, CHUNK_CELLS // max(num_rows, len(rows.labels), 1))
    parts = []
    for start in range(0, num_resamples, chunk):
        size = min(chunk, num_resamples - start)
        weights_Rn = generator.multinomial(num_rows, np.full(num_rows, 1 / num_rows), size=size).astype(np.float64)
        parts.append(function(sums[1](weights_Rn)) - function(sums[0](weights_Rn)))
    differences = np.concatenate(parts)
    low, high = np.quantile(differences, [0.025, 0.975])
    if METRICS[metric].is_share:
        right_a, right_b = (find_right(rows, each) for each in decisions)
        assert right_a is not None
        assert right_b is not None
        p_value = mcnemar(int((right_a & ~right_b).sum()), int((right_b & ~right_a).sum()))
    else:
        p_value = sign_share(differences)
    return Comparison(metric, num_rows, score_a, score_b, float(low), float(high), p_value)


def mcnemar(num_first: int, num_second: int) -> float:
    """Return McNemar's exact two-sided p-value, given how many rows only the first, or only the second, has right."""
    total = num_first + num_second
    tail = sum(math.comb(total, count) for count in range(min(num_first, num_second) + 1))
    return min(1.0, 2 * tail / 2**total)


def sign_share(differences: np.ndarray) -> float:
    """Return the two-sided p-value of bootstrapped differences: twice the smaller share on one side of 0."""
    below, above = (int(part.sum()) + 1 for part in (differences <= 0, differences >= 0))
    return min(1.0, 2 * min(below, above) / (len(differences) + 1))


def find_right(rows: ScoredRows, decisions: Any) -> np.ndarray | None:
    """Return which rows are decided right; None for numbers, which are never exactly right."""
    kind, targets = KINDS[rows.kind], rows.targets
    if kind.is_number:
        return None
    if kind.targets.is_one_label:
        return np.asarray(decisions == targets)
    if kind.targets.num_dims == 2:
        wide = np.zeros(targets.shape, dtype=bool)
        wide[:, : decisions.shape[1]] = decisions > 0
        return np.asarray((wide == (targets > 0)).all(axis=1))
    if kind.targets.has_labels:
        true = [tuple(rows.labels[label] for _, _, label in words) for words in targets]
        return np.array([tuple(tags) == words for tags, words in zip(decisions, true, strict=True)], dtype=bool)
    is_squad = kind.sample == _SQUAD_SAMPLE
    golds = list(targets) if is_squad else [((0, text),) for text in targets]
    is_squad2 = not is_squad or has_unanswerable(golds)
    exact = [score_answer(text, own, is_squad2=is_squad2)[0] for text, own in zip(decisions, golds, strict=True)]
    return np.array(exact, dtype=bool)


def _make_summing(rows: ScoredRows, decisions: Any) -> Summing:
    """Return the function that sums up rows counted by weights, as a metric takes them."""
    summing = SAMPLES[KINDS[rows.kind].sample]
    if summing is not None:
        return summing(decisions, rows.targets, rows.labels)
    targets, num_labels = rows.targets, max(len(rows.labels), 2)
    is_hit = decisions == targets

    def sum_up(weights: np.ndarray) -> Counts:
        draws = np.atleast_2d(weights)
        hits = sum_by(targets[is_hit], draws[:, is_hit], num_labels)
        support, predicted = (sum_by(side, draws, num_labels) for side in (targets, decisions))
        shape = (*weights.shape[:-1], num_labels)
        hits, support, predicted = (part.reshape(shape) for part in (hits, support, predicted))
        return Counts(hits, support, predicted, hits.sum(axis=-1), len(targets))

    return sum_up
