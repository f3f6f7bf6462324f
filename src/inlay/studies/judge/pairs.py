"""Differences of two rows, task by task and seed by seed.

Who may choose among more settings looks better on the very rows that chose. So a difference on dev is taken twice: as
chosen, which favours the row that had more settings, and with equally many: where one has n settings and the other
k < n, the first counts by the expected best of k of its n (Dodge et al. 2019, "Show Your Work"), which charges it for
settings that nobody would have taken. The truth lies between; a verdict holds by both. Scores on test rows did not
choose anything and are compared as they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from inlay.studies.judge.bounds import MeanWithError, estimate
from inlay.studies.judge.row_sampling import paired_error
from inlay.studies.judge.scores import Cell, Row, average_columns
from inlay.studies.run.records import Record


@dataclass(frozen=True)
class Paired:
    """A row less another, task by task and seed by seed, both at their chosen settings."""

    estimate: MeanWithError
    """mean over tasks of the mean difference; the s.e.m. is that of seeds, the tasks being given"""
    by_task: Mapping[str, MeanWithError]
    equal: Paired | None = None
    """the same with equally many settings to choose from; None: they had equally many"""

    @property
    def num_pairs(self) -> int:
        """Number of pairs of runs with the same task and seed; for multi-task runs, of seeds."""
        return self.estimate.num

    @property
    def num_ahead(self) -> int:
        """Tasks on which the first row's mean is above the second's."""
        return sum(item.mean > 0 for item in self.by_task.values())


def pair(row: Row, other: Row, tasks: Iterable[str] | None = None) -> Paired | None:
    """Return `row` less `other` over the runs that share task and seed; None if there are none.

    What no seed draws (TF-IDF) is a pair with every seed of the other.
    """
    shared = [task for task in (row if tasks is None else tasks) if task in row and task in other]
    numbers = {task: _common_settings(row[task], other[task]) for task in shared}
    found = _pair(row, other, dict.fromkeys(shared))
    if found is None or not any(numbers.values()):
        return found
    return replace(found, equal=_pair(row, other, numbers))


def _pair(row: Row, other: Row, numbers: Mapping[str, int | None]) -> Paired | None:
    """Return the difference over tasks, each with the number of settings in `numbers`; None: as chosen."""
    differences: dict[str, dict[int, float]] = {}
    errors: dict[str, float | None] = {}
    for task, number in numbers.items():
        sides = [_limit(cell, number) for cell in (row[task], other[task])]
        first, second = _match_seeds(row[task], other[task], *(side.scores for side in sides))
        found = {seed: first[seed] - second[seed] for seed in first if seed in second}
        if found:
            differences[task] = found
            errors[task] = _paired_row_error(row[task], other[task], sides, list(found))
    if not differences:
        return None
    networks = {task: row[task].networks | other[task].networks for task in differences}
    by_task = {task: estimate(found.values(), errors[task]) for task, found in differences.items()}
    return Paired(average_columns(differences, networks, errors), by_task)


@dataclass(frozen=True)
class _Side:
    """A cell as it enters a difference."""

    scores: Mapping[int, float]
    runs: Mapping[int, Sequence[tuple[Record, float]]]
    """seed -> the runs that its score is made of, with their weights"""


def _common_settings(first: Cell, second: Cell) -> int | None:
    """Return the number of settings to compare two cells by; None if both have as many, or it does not matter."""
    counts = [len(cell.candidates) for cell in (first, second)]
    is_moot = first.is_fixed or second.is_fixed or 0 in counts
    return None if is_moot or counts[0] == counts[1] else min(counts)


def _limit(cell: Cell, number: int | None) -> _Side:
    """Return a cell as the expected best of `number` random settings; unchanged for None."""
    if number is None or number >= len(cell.candidates):
        return _Side(cell.scores, {seed: _shares(runs, 1.0) for seed, runs in cell.runs.items()})
    # The i-th best is the best of those drawn if it is drawn and none of the i before it is.
    count = len(cell.candidates)
    chances = [math.comb(count - 1 - i, number - 1) / math.comb(count, number) for i in range(count)]
    drawn = [(chance, item) for chance, item in zip(chances, cell.candidates, strict=True) if chance]
    seeds = [seed for seed in drawn[0][1].scores if all(seed in item.scores for _, item in drawn)]
    scores = {seed: sum(chance * item.scores[seed] for chance, item in drawn) for seed in seeds}
    runs = {seed: [pair for chance, item in drawn for pair in _shares(item.runs[seed], chance)] for seed in seeds}
    return _Side(scores, runs)


def _shares(runs: Sequence[Record], whole: float) -> list[tuple[Record, float]]:
    return [(record, whole / len(runs)) for record in runs]


def _paired_row_error(first: Cell, second: Cell, sides: Sequence[_Side], seeds: Sequence[int]) -> float | None:
    """Return the row error of a difference in points: measured on rows both answered, else as if independent."""
    if not first.is_fixed and not second.is_fixed:
        runs = [
            (record, sign * share / len(seeds))
            for sign, side in zip((1, -1), sides, strict=True)
            for seed in seeds
            for record, share in side.runs.get(seed, ())
        ]
        if runs and _cancel(runs):  # the same runs on both sides
            return 0.0
        measured = paired_error(runs, first.metric) if runs else None
        if measured is not None:
            return 100 * measured
    if first.row_error is None or second.row_error is None:
        return None
    return math.hypot(first.row_error, second.row_error)


def _cancel(runs: Sequence[tuple[Record, float]]) -> bool:
    """Tell whether a weighted sum of runs is zero, whatever they scored."""
    weights: dict[str, float] = {}
    for record, weight in runs:
        weights[record.id] = weights.get(record.id, 0.0) + weight
    return all(abs(weight) < 1e-12 for weight in weights.values())


def _match_seeds(
    first: Cell, second: Cell, first_scores: Mapping[int, float], second_scores: Mapping[int, float]
) -> list[Mapping[int, float]]:
    """Return the scores of two cells by common seeds; a cell without seeds takes the other's."""
    scores = (first_scores, second_scores)
    is_fixed = (first.is_fixed, second.is_fixed)
    seeds = next((own for own, fixed in zip(scores, is_fixed, strict=True) if not fixed), first_scores)
    return [
        dict.fromkeys(seeds, statistics.fmean(own.values())) if fixed else own
        for own, fixed in zip(scores, is_fixed, strict=True)
    ]
