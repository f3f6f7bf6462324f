"""Series of rows, and data beyond scores: spans of an ablation, steps of a sequence, embeddings.

A series are the rows of one rule by their numbers; rows that were planned and have not been run can be listed too, so
that a line breaks where they would stand. Spans and steps are read from a record's `extra`: scores in points, means
over the seeds of a task; a run that was repeated on other hardware counts once, as the mean of its repeats.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.studies.judge.bounds import MeanWithError, estimate
from inlay.studies.judge.row_sampling import num_rows, score_error
from inlay.studies.judge.scored import ScoredStudy
from inlay.studies.judge.scores import average_repeats, keep_best
from inlay.studies.run.records import Record

Span = tuple[int, int]


def series_keys(scored: ScoredStudy, series: str) -> list[str]:
    """Return the rows of a series, fewest parameters first."""
    found = [spec.key for spec in scored.specs if spec.series == series and spec.key in scored.rows]
    return sorted(found, key=lambda key: median_parameters(scored, key))


def median_parameters(scored: ScoredStudy, key: str) -> float:
    """Return the trained parameters of a row: the median over its tasks."""
    return statistics.median(cell.trained_parameters for cell in scored.rows[key].values())


def most_parameters(scored: ScoredStudy, key: str) -> int:
    """Return the trained parameters of a row's largest task."""
    return max(cell.trained_parameters for cell in scored.rows[key].values())


def planned_numbers(scored: ScoredStudy, series: str, tasks: Iterable[str] = ()) -> dict[float, str]:
    """Return number -> row of a series, in order: rows that were run or planned on all of these tasks."""
    wanted = set(tasks)
    planned = [spec for spec in scored.planned_specs if wanted <= {record.task for record in spec.records}]
    held = [spec for spec in scored.specs if spec.key in scored.rows and wanted <= scored.rows[spec.key].keys()]
    keys: dict[str, tuple[float, str]] = {}
    for spec in (*planned, *held):
        if spec.series == series and spec.number is not None:
            keys[spec.key] = (spec.number, spec.key)
    return dict(sorted(keys.values()))


def planned_keys(scored: ScoredStudy, series: str, task: str | None = None) -> list[str]:
    """Return the rows of a series by number, including planned rows (of a task) that were not run."""
    whole = [spec.key for spec in scored.specs if (spec.series, spec.number) == (series, None)]
    numbered = planned_numbers(scored, series, () if task is None else (task,)).values()
    return [*(key for key in whole if key in scored.rows), *numbered]


def list_series(scored: ScoredStudy) -> dict[str, dict[float, str]]:
    """Return series -> number -> its row, numbers in order."""
    found: dict[str, dict[float, str]] = {}
    for spec in scored.specs:
        if spec.number is not None and spec.key in scored.rows:
            found.setdefault(spec.series, {})[spec.number] = spec.key
    return {name: dict(sorted(rows.items())) for name, rows in found.items()}


@dataclass(frozen=True)
class Ablation:
    """A task's accuracy without the adapters of each span of layers, over seeds."""

    task: str
    whole: Mapping[int, float]
    """seed -> accuracy with all adapters"""
    spans: Mapping[Span, Mapping[int, float]]
    """(first, last removed layer, both inclusive) -> seed -> accuracy"""
    majority: float | None
    num_rows: int | None = None
    """dev rows that were scored"""

    @property
    def num_layers(self) -> int:
        """Layers of the backbone."""
        return 1 + max((last for _, last in self.spans), default=-1)

    def accuracy(self, first: int, last: int) -> MeanWithError:
        """Accuracy without the adapters of layers first … last."""
        scores = self.spans[first, last]
        return estimate(scores.values(), self._row_error(scores))

    def decrease(self, first: int, last: int) -> MeanWithError:
        """Return the points lost, paired by seed."""
        return self._less(self.whole, self.spans[first, last])

    def less(self, span: Span, other: Span) -> MeanWithError:
        """Accuracy without one span of layers less that without another, paired by seed."""
        return self._less(self.spans[span], self.spans[other])

    def _less(self, scores: Mapping[int, float], others: Mapping[int, float]) -> MeanWithError:
        errors = [self._row_error(scores), self._row_error(others)]
        # Answers with and without some adapters are mostly the same: taken as independent, the error is too large.
        rows = None if None in errors else math.hypot(*(error or 0.0 for error in errors))
        return estimate((scores[seed] - others[seed] for seed in others if seed in scores), rows)

    def _row_error(self, scores: Mapping[int, float]) -> float | None:
        error = score_error("accuracy", {"accuracy": statistics.fmean(scores.values()) / 100}, self.num_rows)
        return None if error is None else 100 * error

    def relative(self, first: int, last: int) -> float:
        """Return the loss in percent of the whole, as in the paper's heat-map."""
        return 100 * statistics.fmean(
            (self.whole[seed] - value) / self.whole[seed] for seed, value in self.spans[first, last].items()
        )

    @property
    def singles(self) -> list[MeanWithError]:
        """Points lost by the removal of each single layer."""
        return [self.decrease(layer, layer) for layer in range(self.num_layers) if (layer, layer) in self.spans]

    @property
    def everything(self) -> Span:
        """The span of all layers."""
        return (0, self.num_layers - 1)


def lower_part(item: Ablation) -> int:
    """The number of layers called lower: in proportion to layers 0–4 of the twelve in Houlsby et al."""
    return max(1, round(item.num_layers * 5 / 12))


def read_ablations(records: Iterable[Record], tasks: Sequence[str]) -> list[Ablation]:
    """Read the ablations among records in the order of tasks, each at the setting that is best on dev."""
    by_task: dict[str, list[Record]] = {}
    for record in keep_best(record for record in records if record.extra.get("spans")):
        by_task.setdefault(record.task, []).append(record)
    order = [task for task in dict.fromkeys([*tasks, *by_task]) if task in by_task]
    return [_read_ablation(task, by_task[task]) for task in order]


def _read_ablation(task: str, records: Sequence[Record]) -> Ablation:
    whole: list[tuple[Record, float]] = []
    spans: dict[Span, list[tuple[Record, float]]] = {}
    for record in records:
        found = read_spans(record.extra["spans"])
        whole.append((record, 100 * found.pop(None, record.dev.get("accuracy", record.dev[record.metric]))))
        for span, value in found.items():
            assert span is not None
            spans.setdefault(span, []).append((record, 100 * value))
    majority = records[0].majority
    by_span = {span: average_repeats(values) for span, values in spans.items()}
    share = None if majority is None else 100 * majority
    return Ablation(task, average_repeats(whole), by_span, share, num_rows(records[0], "dev"))


def read_spans(content: Mapping[str, float] | Sequence[Sequence[float]]) -> dict[Span | None, float]:
    """Read spans from JSON: {"0-11": 0.37, "whole": 0.84}, or [[0, 11, 0.37], …]."""
    pairs = content.items() if isinstance(content, Mapping) else [(f"{a:g}-{b:g}", value) for a, b, value in content]
    spans: dict[Span | None, float] = {}
    for key, value in pairs:
        numbers = re.findall(r"\d+", str(key))
        spans[(int(numbers[0]), int(numbers[1])) if len(numbers) == 2 else None] = float(value)
    return spans


@dataclass(frozen=True)
class Step:
    """The scores on all tasks so far, after one more task."""

    task: str
    scores: Mapping[str, MeanWithError]


def read_steps(records: Iterable[Record], tasks: Sequence[str]) -> list[Step]:
    """Return a row's scores after each step of its sequence of tasks, over seeds: `extra["after"]`, task -> score.

    One setting goes through the whole sequence: the one whose tasks were best on dev, each when it was learnt.
    """
    found: dict[str, dict[str, list[tuple[Record, float]]]] = {}
    sequences = [record for record in records if isinstance(record.extra.get("after"), Mapping)]
    for record in keep_best(sequences, over_tasks=True):
        for task, value in record.extra["after"].items():
            found.setdefault(record.task, {}).setdefault(task, []).append((record, 100 * float(value)))
    order = [task for task in dict.fromkeys([*tasks, *found]) if task in found]
    return [
        Step(task, {name: estimate(average_repeats(values).values()) for name, values in found[task].items()})
        for task in order
    ]


def forgotten(steps: Sequence[Step]) -> dict[str, MeanWithError]:
    """Return the points each earlier task lost between its own step and the last one; without the last task."""
    if not steps:
        return {}
    last = steps[-1].scores
    lost = {}
    for step in steps[:-1]:
        before, after = step.scores.get(step.task), last.get(step.task)
        if before is not None and after is not None:
            error = (before.margin**2 + after.margin**2) ** 0.5 if before.sem is not None else None
            lost[step.task] = MeanWithError(before.mean - after.mean, error, before.num)
    return lost


@dataclass(frozen=True)
class Embeddings:
    """The embeddings that a hypernetwork learnt of its tasks in one run."""

    tasks: tuple[str, ...]
    vectors: Any
    """[tasks, width]"""
    starts: Any = None
    """[tasks, width] before training; None if it is not known"""

    def alike(self, kinds: Mapping[str, str]) -> tuple[list[Likeness], list[Likeness]]:
        """Return the cosines of all pairs of tasks: of one kind, and of different kinds."""
        return _find_alike(self.tasks, self.vectors, kinds)

    def gap(self, kinds: Mapping[str, str]) -> float | None:
        """Return the mean cosine within kinds less that between kinds; None without pairs of both."""
        return _find_gap(self.tasks, self.vectors, kinds)

    def first_gap(self, kinds: Mapping[str, str]) -> float | None:
        """Return the same gap before training, of random embeddings."""
        return None if self.starts is None else _find_gap(self.tasks, self.starts, kinds)

    @property
    def movement(self) -> float | None:
        """Return how far training moved the embeddings, relative to their initial length; None if it is not known."""
        import numpy

        if self.starts is None:
            return None
        norm = numpy.linalg.norm
        return float((norm(self.vectors - self.starts, axis=1) / norm(self.starts, axis=1)).mean())


Likeness = tuple[tuple[str, str], float]
"""two tasks, and how alike they are"""


def _find_alike(tasks: Sequence[str], vectors: Any, kinds: Mapping[str, str]) -> tuple[list[Likeness], list[Likeness]]:
    import numpy

    unit = vectors / numpy.linalg.norm(vectors, axis=1, keepdims=True)
    groups: tuple[list[Likeness], list[Likeness]] = ([], [])
    for (i, a), (j, b) in itertools.combinations(enumerate(tasks), 2):
        is_one_kind = kinds.get(a, a) == kinds.get(b, b)
        groups[0 if is_one_kind else 1].append(((a, b), float(unit[i] @ unit[j])))
    return groups


def _find_gap(tasks: Sequence[str], vectors: Any, kinds: Mapping[str, str]) -> float | None:
    groups = _find_alike(tasks, vectors, kinds)
    if not all(groups):
        return None
    within, between = (sum(value for _, value in pairs) / len(pairs) for pairs in groups)
    return within - between


def read_embeddings(scored: ScoredStudy) -> dict[int, Embeddings]:
    """Read the embeddings of the best run on dev by seed, for the first row with two tasks or more."""
    for spec in scored.specs:
        known = [record for record in spec.records if record.extra.get("embedding")]
        by_seed: dict[int, dict[str, Record]] = {}
        for record in keep_best(known, over_tasks=True):
            by_seed.setdefault(record.seed, {})[record.task] = record
        found = {seed: own for seed, own in sorted(by_seed.items()) if len(own) > 1}
        if found:
            order = {task: place for place, task in enumerate(scored.study.tasks)}
            return {
                seed: _stack([own[task] for task in sorted(own, key=lambda task: order.get(task, len(order)))])
                for seed, own in found.items()
            }
    return {}


def _stack(records: Sequence[Record]) -> Embeddings:
    import numpy

    starts = [record.extra.get("embedding_start") for record in records]
    vectors = numpy.array([record.extra["embedding"] for record in records])
    return Embeddings(tuple(record.task for record in records), vectors, numpy.array(starts) if all(starts) else None)
