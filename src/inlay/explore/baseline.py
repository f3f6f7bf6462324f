"""The baseline without a transformer: TF-IDF of words, and a linear model on it.

Words and pairs of words, weighted by TF-IDF, go into a logistic regression (one per label if a row may have several; a
ridge regression if the target is a number). Its only free setting is chosen on the dev rows, like a run's best epoch,
and it is scored by the same metrics, so that its scores can be compared with those of any run. Pairs of texts share one
vocabulary: the features are both texts' vectors, followed by three numbers on how much the texts overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer

from inlay.data import KINDS, Split, Task, is_better, list_metrics, score
from inlay.errors import BadData, Unsupported
from inlay.training import MAX_STEPS, Linear, fit_linear, linear_kinds

STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1000.0)
"""inverse regularisation: C of a logistic regression, 1/alpha of a ridge regression"""


@dataclass(frozen=True)
class Baseline:
    """The scores of a baseline, and how it was fitted."""

    task: str
    kind: str
    metric: str
    strength: float
    """the inverse regularisation that was best on dev"""
    metrics: dict[str, dict[str, float]]
    """split -> metric -> value"""
    tried: dict[str, float]
    """strength -> dev score"""
    num_features: int
    num_parameters: int
    num_train: int
    seconds: float
    notes: tuple[str, ...] = ()


def fit_baseline(
    task: Task,
    *,
    chars: bool = False,
    strengths: Sequence[float] = STRENGTHS,
    on_fit: Callable[[int], object] = lambda _: None,
) -> Baseline:
    """Train on a task's training rows, choose the strength on dev, score dev and test.

    `chars` adds n-grams of three to five letters within words. `on_fit` is called with the number of strengths tried.
    """
    if KINDS[task.kind].linear is None:
        raise Unsupported(f"a baseline for a `{task.kind}` task", f"it knows: {linear_kinds()}")
    began = time.perf_counter()
    features = _Features(task.train, chars=chars)
    train, dev = features.read(task.train), features.read(task.dev)
    assert task.train.targets is not None
    assert task.dev.targets is not None
    models: dict[float, Linear] = {}
    tried: dict[float, float] = {}
    best: float | None = None
    for number, strength in enumerate(strengths, start=1):
        models[strength] = fit_linear(task.kind, train, task.train.targets, strength, len(task.labels))
        tried[strength] = score(task.metric, models[strength].outputs(dev), task.dev.targets)
        if best is None or is_better(task.metric, tried[strength], tried[best]):
            best = strength
        on_fit(number)
    assert best is not None
    chosen = models[best]
    metrics: dict[str, dict[str, float]] = {}
    for name, split in (("dev", task.dev), ("test", task.test)):
        if split is not None and split.targets is not None:
            outputs, names = chosen.outputs(features.read(split)), list_metrics(task.kind, len(task.labels))
            metrics[name] = {metric: score(metric, outputs, split.targets) for metric in names}
    return Baseline(
        task=task.name,
        kind=task.kind,
        metric=task.metric,
        strength=best,
        metrics=metrics,
        tried={f"{strength:g}": value for strength, value in tried.items()},
        num_features=train.shape[1],
        num_parameters=chosen.num_parameters,
        num_train=len(task.train),
        seconds=time.perf_counter() - began,
        notes=() if chosen.has_converged else (f"stopped after {MAX_STEPS:,} steps, before it had converged",),
    )


class _Features:
    """Turns texts into sparse rows, with the vocabulary of the training rows."""

    def __init__(self, split: Split, *, chars: bool) -> None:
        settings: dict[str, Any] = {"sublinear_tf": True, "dtype": np.float64, "strip_accents": None}
        # Single letters count as words: "I" and "a" are informative, and in some scripts a letter is a whole word.
        self._makers = [TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b|[!?$£€]", **settings)]
        if chars:
            self._makers.append(TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), **settings))
        texts = [*split.texts, *(split.pairs or ())]
        try:
            for maker in self._makers:
                maker.fit(texts)
        except ValueError:  # scikit-learn's "empty vocabulary"
            hint = "the baseline counts words, and texts of punctuation alone have none"
            raise BadData("no word in any text", hint, path=split.path) from None

    def read(self, split: Split) -> Any:
        """Return the features of a split's rows [n, features]."""
        first = self._vectors(split.texts)
        if split.pairs is None:
            return first
        second = self._vectors(split.pairs)
        return sparse.hstack([first, second, sparse.csr_matrix(_overlap(first, second))]).tocsr()

    def _vectors(self, texts: Sequence[str]) -> Any:
        return sparse.hstack([maker.transform(texts) for maker in self._makers]).tocsr()


def _overlap(first: Any, second: Any) -> np.ndarray:
    """Measure how alike two texts are [n, 3]: cosine, share of terms in common, and ratio of their lengths."""
    cosine = _sum(first.multiply(second)) / np.maximum(_norm(first) * _norm(second), 1e-12)
    num_first, num_second = first.getnnz(axis=1), second.getnnz(axis=1)
    both = _sum((first > 0).multiply(second > 0))
    jaccard = both / np.maximum(num_first + num_second - both, 1)
    lengths = np.minimum(num_first, num_second) / np.maximum(np.maximum(num_first, num_second), 1)
    return np.stack([cosine, jaccard, lengths], axis=1)


def _sum(rows: Any) -> np.ndarray:
    return np.asarray(rows.sum(axis=1), dtype=np.float64).ravel()


def _norm(rows: Any) -> np.ndarray:
    return np.sqrt(_sum(rows.multiply(rows)))
