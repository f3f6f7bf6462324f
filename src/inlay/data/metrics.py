"""Metrics of predictions, and a report with confidence intervals.

Each metric is one function of a summary of the rows: counts per label, counts per entity type, sums of answers' scores,
or weighted rows. The same function scores one sample and a thousand resamples, so that an interval always fits its
metric. Degenerate samples (one class, constant predictions) score 0. A score is NaN in one case only: the outputs of
some row are not finite, so that there is nothing to compare with its target.

A label that training never saw counts as a label that is never predicted: its rows are wrong in accuracy, it has an F1
of 0 in the macro mean and is missed in the micro one, and is a class of its own in Matthews' correlation. F1 of a
binary task is about its second label alone: a row with an unseen label lowers it if that was predicted.

Shapes: leading axes `...` are resamples; the last axis of counts is the label, of weighted rows the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from inlay.data.kinds import KINDS, find_kind_of_metric
from inlay.data.squad import Gold, has_unanswerable, score_answer
from inlay.data.tags import count_rows, entity_types, has_seqeval, require_seqeval
from inlay.errors import BadConfig, NotFinite, UnknownName

MOST_CONFUSED = 1000  # most labels of a confusion matrix
CHUNK_CELLS = 2_000_000  # most cells of resampled weights in memory at a time


class Counts(NamedTuple):
    """A sample of classified rows, or of tagged words, whose labels are the types of entities."""

    hits: np.ndarray  # [..., labels], predicted and true
    support: np.ndarray  # [..., labels], true
    predicted: np.ndarray  # [..., labels]
    num_right: np.ndarray  # [...], rows right as a whole, or words with the right tag
    num_rows: int | np.ndarray  # or words


class Weighted(NamedTuple):
    """A sample of predicted numbers, each row counted as often as its weight says."""

    predictions: np.ndarray  # [rows]
    targets: np.ndarray  # [rows]
    weights: np.ndarray  # [..., rows]


class Means(NamedTuple):
    """A sample of answered questions: the sums of their scores, and the number of questions."""

    exact: np.ndarray  # [...]
    overlap: np.ndarray  # [...]
    num_rows: np.ndarray  # [...]


def _accuracy(sample: Counts) -> np.ndarray:
    return _ratio(sample.num_right, sample.num_rows)


def _macro_f1(sample: Counts) -> np.ndarray:
    occurs = (sample.support + sample.predicted) > 0
    return _ratio((_f1_by_label(sample) * occurs).sum(axis=-1), occurs.sum(axis=-1))


def _micro_f1(sample: Counts) -> np.ndarray:
    return _ratio(2 * sample.hits.sum(axis=-1), (sample.support + sample.predicted).sum(axis=-1))


def _matthews(sample: Counts) -> np.ndarray:
    """Compute Matthews' correlation of classes; for more than two, Gorodkin's R_K."""
    total = float(sample.num_rows)
    support, predicted = sample.support.astype(float), sample.predicted.astype(float)
    covariance = sample.hits.sum(axis=-1) * total - (support * predicted).sum(axis=-1)
    spread = (total**2 - (support**2).sum(axis=-1)) * (total**2 - (predicted**2).sum(axis=-1))
    return _ratio(covariance, np.sqrt(spread))


def _spearman(sample: Weighted) -> np.ndarray:
    """Compute the correlation of ranks; ties share their mean rank."""
    predicted, true = (_rank(values, sample.weights) for values in (sample.predictions, sample.targets))
    return _correlate(predicted, true, sample.weights)


def _quadratic_kappa(sample: Weighted) -> np.ndarray:
    """Compute Cohen's kappa with quadratic weights (Cohen 1968): 1 - observed / expected squared distance.

    Expected is the mean squared distance of predictions and targets drawn independently: the sum of their variances,
    plus the square of the distance of their means.
    """
    observed = _mean((sample.predictions - sample.targets) ** 2, sample.weights)
    means, variances = [], []
    for values in (sample.predictions, sample.targets):
        mean = _mean(values, sample.weights)
        means.append(mean)
        variances.append(_mean((values - mean[..., None]) ** 2, sample.weights))
    expected = variances[0] + variances[1] + (means[0] - means[1]) ** 2
    return np.where(expected > 1e-12, 1 - _ratio(observed, expected), 0.0)


@dataclass(frozen=True)
class Metric:
    """An entry of the metric table."""

    function: Callable[[Any], np.ndarray]
    higher_is_better: bool = True
    is_binary: bool = False  # only for tasks of two labels
    needs_entities: bool = False  # only for tags that are parts of entities
    is_share: bool = False  # whether it is a share of right rows


MEAN = "mean"
"""The metric of a run of several tasks: the mean of their own metrics, each task once."""
METRICS: dict[str, Metric] = {
    # The share of rows that are right; for multilabel rows, right in every label.
    "accuracy": Metric(_accuracy, is_share=True),
    # F1 of the second label, the positive one of a binary task (GLUE's `1`).
    "f1": Metric(lambda sample: _f1_by_label(sample)[..., 1], is_binary=True),
    # The mean F1 over the labels that occur, as predicted or as true ones.
    "macro_f1": Metric(_macro_f1),
    # F1 over all (row, label) decisions together.
    "micro_f1": Metric(_micro_f1),
    "matthews": Metric(_matthews),
    "pearson": Metric(lambda sample: _correlate(sample.predictions, sample.targets, sample.weights)),
    "spearman": Metric(_spearman),
    "rmse": Metric(
        lambda sample: np.sqrt(_mean((sample.predictions - sample.targets) ** 2, sample.weights)),
        higher_is_better=False,
    ),
    "quadratic_kappa": Metric(_quadratic_kappa),
    # For levels, the mean number of levels between them.
    "mae": Metric(
        lambda sample: _mean(np.abs(sample.predictions - sample.targets), sample.weights), higher_is_better=False
    ),
    # An entity is right if its type and both its ends are.
    "entity_f1": Metric(_micro_f1, needs_entities=True),
    "entity_precision": Metric(
        lambda sample: _ratio(sample.hits.sum(axis=-1), sample.predicted.sum(axis=-1)), needs_entities=True
    ),
    "entity_recall": Metric(
        lambda sample: _ratio(sample.hits.sum(axis=-1), sample.support.sum(axis=-1)), needs_entities=True
    ),
    "token_accuracy": Metric(_accuracy),
    # F1 of the answers' words with the nearest gold answer's: SQuAD's F1. Exact match is as its script compares them.
    "token_f1": Metric(lambda sample: _ratio(sample.overlap, sample.num_rows)),
    "exact_match": Metric(lambda sample: _ratio(sample.exact, sample.num_rows), is_share=True),
}


@dataclass(frozen=True)
class Interval:
    """A score with its 95% confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class LabelScore:
    """The scores of one label."""

    label: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class Report:
    """The result of `evaluate`: metrics with intervals, scores of labels, confusion and calibration."""

    kind: str
    num_rows: int
    metrics: dict[str, Interval]
    labels: tuple[LabelScore, ...] = ()
    unseen: tuple[str, ...] = ()  # labels that training never saw: the last of `labels`
    confusion: tuple[tuple[int, ...], ...] | None = None  # [true][predicted], for classify
    ece: float | None = None  # expected calibration error, where there are probabilities
    coverage: float | None = None  # share of the rows answered, where unsure ones were not

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return asdict(self)


def resolve_metric(name: str, kind: str, num_labels: int, *, has_entities: bool = True) -> str:
    """Return the metric of a task, for `auto` the default of its kind; refuse a metric that does not suit the task.

    A metric that needs seqeval is refused here if seqeval is missing, before any training.
    """
    if name == "auto":
        name = KINDS[kind].default_metric
        if METRICS[name].needs_entities and not has_entities:
            name = "token_accuracy"
    if name not in METRICS:
        raise UnknownName("metric", name, METRICS)
    suitable = list_metrics(kind, num_labels, has_entities=has_entities)
    if name not in suitable:
        has_binary = any(METRICS[each].is_binary for each in KINDS[kind].metrics)
        what = f"a {kind} task" + (f" with {num_labels} labels" if has_binary else "")
        raise BadConfig(f"metric `{name}` does not suit {what}", f"use one of: {', '.join(suitable)}")
    if METRICS[name].needs_entities:
        require_seqeval()
    return name


def list_metrics(kind: str, num_labels: int, *, has_entities: bool = True) -> list[str]:
    """Return the metrics that suit a task."""
    return [
        name
        for name in KINDS[kind].metrics
        if (num_labels == 2 or not METRICS[name].is_binary) and (has_entities or not METRICS[name].needs_entities)
    ]


def decide(kind: str, outputs: Any) -> Any:
    """Turn a head's outputs into predictions: classes, labels above one half, numbers, levels, tags or texts.

    Refuses outputs that are not finite: the maximum of NaN would be the first class.
    """
    if lost := find_lost(kind, outputs):
        raise NotFinite(
            f"the outputs of {len(lost):,} of {len(outputs):,} rows are not finite, so they predict nothing",
            "train the task again with a smaller `--lr`",
        )
    decide_outputs = KINDS[kind].decide
    return outputs if decide_outputs is None else decide_outputs(np.asarray(outputs))


def find_lost(kind: str, outputs: Any) -> list[int]:
    """Find the rows whose outputs are not finite: None, or numbers of which some are NaN or infinite."""
    lost = [row for row, output in enumerate(outputs) if output is None]
    if lost or KINDS[kind].decide is None:
        return lost
    numbers = np.asarray(outputs, dtype=np.float64).reshape(len(outputs), -1)
    return np.flatnonzero(~np.isfinite(numbers).all(axis=1)).tolist()


def score(metric: str, outputs: np.ndarray, targets: np.ndarray) -> float:
    """Score logits, or predictions already decided, against targets; NaN if some row's outputs are not finite."""
    if metric not in METRICS:
        raise UnknownName("metric", metric, METRICS)
    entry, targets = METRICS[metric], np.asarray(targets)
    kind = find_kind_of_metric(metric, targets.ndim)
    if find_lost(kind, outputs):
        return math.nan
    predictions = decide(kind, outputs)
    num_labels = np.shape(outputs)[-1] if np.ndim(outputs) == 2 else 0
    return float(entry.function(_sum_up(kind, predictions, targets, num_labels)))


def score_all(
    kind: str, labels: Sequence[str], targets: np.ndarray, outputs: Any, unseen: Sequence[str] = ()
) -> dict[str, float]:
    """Return every metric that suits a task and can be computed here; all NaN if some row's outputs are not finite.

    Targets may have `unseen` labels, counted after the others.
    """
    names = list_metrics(kind, len(labels), has_entities=bool(entity_types(labels)) and has_seqeval())
    if find_lost(kind, outputs):
        return dict.fromkeys(names, math.nan)
    every = (*labels, *unseen)
    sample = _sum_up(kind, decide(kind, outputs), targets, len(every), every)
    return {name: float(METRICS[name].function(sample)) for name in names}


def is_better(metric: str, value: float, best: float | None) -> bool:
    """Return whether a score beats the best so far; NaN beats nothing."""
    if best is None or best != best:
        return value == value
    return value > best if metric == MEAN or METRICS[metric].higher_is_better else value < best


def evaluate_report(
    kind: str,
    labels: tuple[str, ...],
    targets: np.ndarray,
    outputs: Any,
    *,
    unseen: tuple[str, ...] = (),
    num_resamples: int = 1000,
) -> Report:
    """Report all metrics with 95% intervals (percentile bootstrap over rows, seeded), the labels and the confusion.

    A share of rows that is 0 or 1 has Wilson's interval: all resamples would be the same. Targets may have `unseen`
    labels, counted after the others. Refuses outputs that are not finite.
    """
    targets = np.asarray(targets)
    predictions = decide(kind, outputs)
    has_entities = bool(entity_types(labels))
    names = list_metrics(kind, len(labels), has_entities=has_entities)
    if any(METRICS[name].needs_entities for name in names):
        require_seqeval()
    # 1. every metric on the rows, and on resamples of them
    labels = (*labels, *unseen)
    sample = _sum_up(kind, predictions, targets, len(labels), labels)
    resampled: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for resample in _resample(kind, predictions, targets, labels, num_resamples):
        for name in names:
            resampled[name].append(METRICS[name].function(resample))
    intervals = {}
    for name in names:
        low, high = np.quantile(np.concatenate(resampled[name]), [0.025, 0.975])
        value = float(METRICS[name].function(sample))
        if METRICS[name].is_share and value in (0.0, 1.0):  # no resample differs from another
            low, high = _wilson(value, len(targets))
        intervals[name] = Interval(value, float(low), float(high))
    # 2. the scores of each label, and the confusion
    if isinstance(sample, Weighted | Means):
        return Report(kind, len(targets), intervals)
    confusion = None
    if KINDS[kind].is_classifier and len(labels) <= MOST_CONFUSED:
        cells = np.bincount(targets * len(labels) + predictions, minlength=len(labels) ** 2)
        confusion = tuple(tuple(row) for row in cells.reshape(len(labels), len(labels)).tolist())
    scored = entity_types(labels) if KINDS[kind].sample == "tags" else labels
    precision, recall = _ratio(sample.hits, sample.predicted), _ratio(sample.hits, sample.support)
    columns = zip(scored, precision, recall, _f1_by_label(sample), sample.support, strict=True)
    scores = tuple(LabelScore(name, float(p), float(r), float(f), int(n)) for name, p, r, f, n in columns)
    return Report(kind, len(targets), intervals, scores, unseen, confusion)


def _wilson(share: float, num_rows: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share of rows."""
    z, whole = 1.959964, 1 + 1.959964**2 / num_rows
    middle = share + z * z / (2 * num_rows)
    reach = z * math.sqrt(share * (1 - share) / num_rows + (z / num_rows) ** 2 / 4)
    return max(0.0, (middle - reach) / whole), min(1.0, (middle + reach) / whole)


def _sum_up(kind: str, predictions: Any, targets: np.ndarray, num_labels: int, labels: Sequence[str] = ()) -> Sample:
    summing = SAMPLES[KINDS[kind].sample]
    if summing is not None:
        return summing(predictions, targets, labels)(np.ones(len(targets)))
    num_labels = max(num_labels, 2, int(max(predictions.max(initial=0), targets.max(initial=0))) + 1)
    hits, support, proposed = (
        np.bincount(part, minlength=num_labels) for part in (targets[predictions == targets], targets, predictions)
    )
    return Counts(hits, support, proposed, hits.sum(), len(targets))


def _sum_sets(predictions: np.ndarray, targets: np.ndarray, labels: Sequence[str]) -> Summing:
    true = targets > 0
    predicted = np.zeros(true.shape, dtype=bool)  # wider than the predictions by labels that training never saw
    predicted[:, : predictions.shape[1]] = predictions > 0
    right = (true == predicted).all(axis=1).astype(np.float64)
    parts = (true & predicted, true, predicted)

    def sum_up(weights: np.ndarray) -> Counts:
        # As numbers one after the other: together they would take a lot of memory.
        hits, support, proposed = (weights @ part.astype(np.float64) for part in parts)
        return Counts(hits, support, proposed, weights @ right, len(targets))

    return sum_up


def _sum_numbers(predictions: np.ndarray, targets: np.ndarray, labels: Sequence[str]) -> Summing:
    numbers = targets.reshape(len(targets)).astype(np.float64)
    return lambda weights: Weighted(predictions.astype(np.float64), numbers, weights)


def _sum_tags(predictions: Sequence[Sequence[str]], targets: Any, labels: Sequence[str]) -> Summing:
    rows = count_rows(predictions, targets, labels)
    return lambda weights: Counts(*(weights @ part for part in rows))


def _sum_answers(predictions: Sequence[str], targets: Sequence[Sequence[Gold]], *, is_squad2: bool) -> Summing:
    scores = [score_answer(text, golds, is_squad2=is_squad2) for text, golds in zip(predictions, targets, strict=True)]
    exact, overlap = np.array(scores, dtype=np.float64).reshape(-1, 2).T
    return lambda weights: Means(weights @ exact, weights @ overlap, weights.sum(axis=-1))


Sample = Counts | Weighted | Means
Summing = Callable[[np.ndarray], Sample]
SAMPLES: dict[str, Callable[[Any, Any, Sequence[str]], Summing] | None] = {
    "classes": None,  # counted by cells of the confusion
    "sets": _sum_sets,
    "numbers": _sum_numbers,
    "tags": _sum_tags,
    "passages": lambda predictions, targets, labels: _sum_answers(
        predictions, targets, is_squad2=has_unanswerable(targets)
    ),
    # Written answers, each compared with its one text. Equal texts have an F1 of 1, even if no word is left.
    "texts": lambda predictions, targets, labels: _sum_answers(
        predictions, [((0, text),) for text in targets], is_squad2=True
    ),
}
"""`Kind.sample` -> a function of predictions, targets and labels, which returns a function of row counts."""


def _resample(
    kind: str, predictions: Any, targets: np.ndarray, labels: Sequence[str], num_resamples: int
) -> Iterator[Sample]:
    """Yield bootstrap samples in chunks. Rows of one confusion cell are alike, so cells are drawn instead of rows."""
    generator = np.random.default_rng(0)
    sum_up = SAMPLES[KINDS[kind].sample]
    num_rows = len(targets)
    if sum_up is not None:
        summing = sum_up(predictions, targets, labels)
        chunk_size = max(1, CHUNK_CELLS // max(num_rows, 1))
        for start in range(0, num_resamples, chunk_size):
            size = min(chunk_size, num_resamples - start)
            drawn = generator.integers(num_rows, size=(size, num_rows)) + np.arange(size)[:, None] * num_rows
            counts = np.bincount(drawn.ravel(), minlength=size * num_rows)  # how often each row counts
            yield summing(counts.reshape(size, num_rows).astype(np.float64))
        return
    # Only cells with rows: with many labels, the whole confusion matrix would not fit in memory.
    cells, counts = np.unique(targets.astype(np.int64) * len(labels) + predictions, return_counts=True)
    true, predicted = np.divmod(cells, len(labels))
    is_hit = true == predicted
    chunk_size = max(1, CHUNK_CELLS // max(len(cells), len(labels)))
    for start in range(0, num_resamples, chunk_size):
        size = min(chunk_size, num_resamples - start)
        draws = generator.multinomial(num_rows, counts / max(num_rows, 1), size=size).astype(np.float64)
        hits = sum_by(true[is_hit], draws[:, is_hit], len(labels))
        support, proposed = (sum_by(side, draws, len(labels)) for side in (true, predicted))
        yield Counts(hits, support, proposed, hits.sum(axis=-1), num_rows)


def sum_by(labels: np.ndarray, draws: np.ndarray, num_labels: int) -> np.ndarray:
    """Sum draws [resamples, cells] by the label of each cell."""
    sums = np.zeros((len(draws), num_labels))
    order = np.argsort(labels, kind="stable")
    found, starts = np.unique(labels[order], return_index=True)
    if len(found):
        sums[:, found] = np.add.reduceat(draws[:, order], starts, axis=1)
    return sums


def _f1_by_label(sample: Counts) -> np.ndarray:
    return _ratio(2 * sample.hits, sample.support + sample.predicted)


def _rank(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the mean rank of each row among the rows drawn, [..., rows]."""
    order = np.argsort(values, kind="stable")
    is_new = np.concatenate([[True], values[order][1:] != values[order][:-1]])
    starts = np.flatnonzero(is_new)
    counts = np.add.reduceat(weights[..., order], starts, axis=-1)
    ranks = np.cumsum(counts, axis=-1) - counts / 2 + 0.5
    group = np.empty(len(values), dtype=np.int64)
    group[order] = np.cumsum(is_new) - 1
    return ranks[..., group]


def _correlate(first: np.ndarray, second: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Compute the weighted correlation over the last axis, in two passes: in one, digits are lost to cancellation."""
    with np.errstate(invalid="ignore", over="ignore"):  # a diverging run may predict numbers whose squares overflow
        (first, first_spread), (second, second_spread) = (_centre(side, weights) for side in (first, second))
        covariance = (weights * first * second).sum(axis=-1)
        correlation = _ratio(covariance, np.sqrt(first_spread * second_spread))
    return np.clip(np.nan_to_num(correlation), -1.0, 1.0)


def _centre(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return values less their weighted mean, and the sum of their squares."""
    mean = _mean(values, weights)
    centred = values - mean[..., None]
    spread = (weights * centred**2).sum(axis=-1)
    # A constant less its mean leaves rounding errors, which correlate with anything.
    is_rounding = spread <= weights.sum(axis=-1) * (1e-12 * mean) ** 2
    return centred, np.where(is_rounding, 0.0, spread)


def _mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return _ratio((weights * values).sum(axis=-1), weights.sum(axis=-1))


def _ratio(top: np.ndarray, bottom: np.ndarray | int) -> np.ndarray:
    """Return top / bottom, and 0 where that is undefined."""
    top, bottom = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    return np.divide(top, bottom, out=np.zeros(np.broadcast_shapes(top.shape, bottom.shape)), where=bottom != 0)
