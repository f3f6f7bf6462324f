"""What single studies keep beyond scores: the spans of an ablation, the steps of a sequence of tasks.

Both are read from a record's `extra`. Scores are in points, means over the seeds of a task; a run that was repeated on
other hardware counts once, as the mean of its repeats.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from inlay.studies.judge.bounds import Estimate, estimate
from inlay.studies.judge.row_sampling import num_rows, score_error
from inlay.studies.judge.scores import average_repeats, keep_best
from inlay.studies.run.records import Record

Span = tuple[int, int]


@dataclass(frozen=True)
class Ablation:
    """A task's accuracy without the adapters of each span of layers, over seeds."""

    task: str
    whole: Mapping[int, float]
    """seed -> accuracy with all adapters"""
    spans: Mapping[Span, Mapping[int, float]]
    """(first, last layer removed, both in it) -> seed -> accuracy"""
    majority: float | None
    num_rows: int | None = None
    """dev rows that were scored"""

    @property
    def num_layers(self) -> int:
        """Layers of the backbone."""
        return 1 + max((last for _, last in self.spans), default=-1)

    def accuracy(self, first: int, last: int) -> Estimate:
        """Accuracy without the adapters of layers first … last."""
        scores = self.spans[first, last]
        return estimate(scores.values(), self._row_error(scores))

    def decrease(self, first: int, last: int) -> Estimate:
        """Points lost, paired by seed."""
        return self._less(self.whole, self.spans[first, last])

    def less(self, span: Span, other: Span) -> Estimate:
        """Accuracy without one span of layers less that without another, paired by seed."""
        return self._less(self.spans[span], self.spans[other])

    def _less(self, scores: Mapping[int, float], others: Mapping[int, float]) -> Estimate:
        errors = [self._row_error(scores), self._row_error(others)]
        # Answers with and without some adapters are mostly the same: taken as independent, the error is too large.
        rows = None if None in errors else math.hypot(*(error or 0.0 for error in errors))
        return estimate((scores[seed] - others[seed] for seed in others if seed in scores), rows)

    def _row_error(self, scores: Mapping[int, float]) -> float | None:
        error = score_error("accuracy", {"accuracy": statistics.fmean(scores.values()) / 100}, self.num_rows)
        return None if error is None else 100 * error

    def relative(self, first: int, last: int) -> float:
        """What is lost in percent of the whole: what the paper's heat-map shows."""
        return 100 * statistics.fmean(
            (self.whole[seed] - value) / self.whole[seed] for seed, value in self.spans[first, last].items()
        )

    @property
    def singles(self) -> list[Estimate]:
        """Points lost by the removal of each single layer."""
        return [self.decrease(layer, layer) for layer in range(self.num_layers) if (layer, layer) in self.spans]

    @property
    def everything(self) -> Span:
        """The span of all layers."""
        return (0, self.num_layers - 1)


def read_ablations(records: Iterable[Record], tasks: Sequence[str]) -> list[Ablation]:
    """The ablations among records, in the order of tasks: of each task the setting that is best on dev."""
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
    """Spans from JSON: {"0-11": 0.37, "whole": 0.84}, or [[0, 11, 0.37], …]."""
    pairs = content.items() if isinstance(content, Mapping) else [(f"{a:g}-{b:g}", value) for a, b, value in content]
    spans: dict[Span | None, float] = {}
    for key, value in pairs:
        numbers = re.findall(r"\d+", str(key))
        spans[(int(numbers[0]), int(numbers[1])) if len(numbers) == 2 else None] = float(value)
    return spans


@dataclass(frozen=True)
class Step:
    """After one more task: the scores on all tasks so far."""

    task: str
    scores: Mapping[str, Estimate]


def read_steps(records: Iterable[Record], tasks: Sequence[str]) -> list[Step]:
    """What a row scored after each step of the sequence of tasks, over seeds: `extra["after"]`, task -> score.

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


def forgotten(steps: Sequence[Step]) -> dict[str, Estimate]:
    """Points each earlier task lost between the step that taught it and the last one; none for the last task."""
    if not steps:
        return {}
    last = steps[-1].scores
    lost = {}
    for step in steps[:-1]:
        before, after = step.scores.get(step.task), last.get(step.task)
        if before is not None and after is not None:
            error = (before.margin**2 + after.margin**2) ** 0.5 if before.sem is not None else None
            lost[step.task] = Estimate(before.mean - after.mean, error, before.num)
    return lost
