"""Differences of two rows, paired by task and seed, and differences to the reference beside the published ones.

A row that chose among more settings looks better on the dev rows that chose. So a difference of two rows on dev is
taken twice. As chosen, it favours the row with more settings. With equally many settings, where one row has n and the
other k < n, the first counts by the expected best of k of its n (Dodge et al. 2019, "Show Your Work"), which charges it
for settings that nobody would have picked. The truth lies between the two, and a verdict must hold by both. Test rows
chose nothing, so their scores are compared as they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from inlay.studies.judge.bounds import MeanWithError, estimate
from inlay.studies.judge.published import PublishedTable, split_columns
from inlay.studies.judge.row_sampling import paired_error
from inlay.studies.judge.row_specs import NOT_AVERAGED, has_one_setting, name_task
from inlay.studies.judge.scored_study import ScoredStudy, averaged_tasks, mean_tasks
from inlay.studies.judge.scores import Candidate, Cell, Row, average_columns, column_row

BY_CHANCE = 0.05
"""largest p-value at which a row is mentioned whose learning rates lie at one end of the grid"""


@dataclass(frozen=True)
class Paired:
    """A row less another, task by task and seed by seed, both at their chosen settings."""

    estimate: MeanWithError
    """mean over tasks of the mean difference; the s.e.m. is that of seeds, the tasks being given"""
    by_task: Mapping[str, MeanWithError]
    equal: Paired | None = None
    """the same with equally many settings to choose from; None if both rows had equally many"""

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

    A row that no seed changes (TF-IDF) is paired with every seed of the other.
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
        first, second = row[task], other[task]
        sides = [_draw_settings(first, number), _draw_settings(second, number)]
        ours, theirs = (_expect_scores(side) for side in sides)
        # A cell that no seed changes takes the other's seeds.
        seeds = theirs if first.is_fixed and not second.is_fixed else ours
        if first.is_fixed:
            ours = dict.fromkeys(seeds, statistics.fmean(ours.values()))
        if second.is_fixed:
            theirs = dict.fromkeys(seeds, statistics.fmean(theirs.values()))
        found = {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}
        if found:
            differences[task] = found
            errors[task] = _paired_row_error(first, second, sides, list(found))
    if not differences:
        return None
    networks = {task: row[task].networks | other[task].networks for task in differences}
    by_task = {task: estimate(found.values(), errors[task]) for task, found in differences.items()}
    return Paired(average_columns(differences, networks, errors), by_task)


def _common_settings(first: Cell, second: Cell) -> int | None:
    """Return the number of settings to compare two cells by; None if both have as many, or it does not matter."""
    counts = [len(cell.candidates) for cell in (first, second)]
    is_moot = first.is_fixed or second.is_fixed or 0 in counts
    return None if is_moot or counts[0] == counts[1] else min(counts)


def _draw_settings(cell: Cell, number: int | None) -> list[tuple[float, Candidate]]:
    """Return settings with their chances of being the best of `number` random ones; None: the chosen one."""
    if number is None or number >= len(cell.candidates):
        return [(1.0, Candidate(cell.scores, cell.runs))]
    # The i-th best is the best of those drawn if it is drawn and none of the i before it is.
    count = len(cell.candidates)
    chances = [math.comb(count - 1 - i, number - 1) / math.comb(count, number) for i in range(count)]
    return [(chance, item) for chance, item in zip(chances, cell.candidates, strict=True) if chance]


def _expect_scores(settings: Sequence[tuple[float, Candidate]]) -> dict[int, float]:
    """Return the expected score of settings that are drawn with these chances, for each seed that all have."""
    scores = {}
    for seed in settings[0][1].scores:
        if all(seed in item.scores for _, item in settings):
            scores[seed] = sum(chance * item.scores[seed] for chance, item in settings)
    return scores


def _paired_row_error(
    first: Cell, second: Cell, sides: Sequence[Sequence[tuple[float, Candidate]]], seeds: Sequence[int]
) -> float | None:
    """Return the row error of a difference in points: measured on rows both answered, else as if independent."""
    if not first.is_fixed and not second.is_fixed:
        runs = []
        for sign, side in zip((1, -1), sides, strict=True):
            for seed in seeds:
                for chance, item in side:
                    own = item.runs.get(seed, ())
                    runs += [(record, sign * (chance / len(own)) / len(seeds)) for record in own]
        weights: dict[str, float] = {}
        for record, weight in runs:
            weights[record.id] = weights.get(record.id, 0.0) + weight
        if runs and all(abs(weight) < 1e-12 for weight in weights.values()):  # the same runs on both sides
            return 0.0
        measured = paired_error(runs, first.metric) if runs else None
        if measured is not None:
            return 100 * measured
    if first.row_error is None or second.row_error is None:
        return None
    return math.hypot(first.row_error, second.row_error)


# Rows less the reference, ours and published


@dataclass(frozen=True)
class Gaps:
    """A row's difference to the reference: ours, and as published."""

    ours: Paired
    published: float
    tasks: tuple[str, ...]
    """the tasks of both differences"""
    over: str
    """the tasks in words"""


def find_gaps(scored: ScoredStudy, key: str) -> Gaps | None:
    """Find both differences over the same tasks, in the first published table with both rows; None if there is none."""
    reference = scored.reference
    if reference is None or key == reference:
        return None
    for table in scored.published.tables:
        if table.over:
            rows, what, _ = averaged_rows(scored, table)
            tasks, over = list(rows.get(key, ())), f"{what}, published of {table.over}"
        else:
            rows, tasks = dict(scored.rows), averaged_tasks(scored)
            for arm in (key, reference):
                tasks = [
                    task
                    for task in tasks
                    if task in rows.get(arm, {}) and table.value(arm, scored.column(task)) is not None
                ]
            over = f"{len(tasks)} tasks" if len(tasks) > 1 else name_task("".join(tasks))
        theirs = published_gap(scored, table, key, tasks)
        if theirs is not None and reference in rows and key in rows:
            ours = pair(rows[key], rows[reference], tasks)
            return Gaps(ours, theirs, tuple(tasks), over) if ours is not None else None
    return None


def published_gap(scored: ScoredStudy, table: PublishedTable, key: str, tasks: Sequence[str]) -> float | None:
    """Return the published difference to the reference: over exactly these tasks, or over the source's own."""
    row, reference = table.row(key), scored.reference
    if row is None or row.is_difference or reference is None or key == reference:
        return None
    columns = [scored.column(task) for task in tasks] if not table.over else []
    found = [own_mean(table, arm) if table.over else table.mean(arm, columns) for arm in (key, reference)]
    return None if found[0] is None or found[1] is None else found[0] - found[1]


def own_mean(table: PublishedTable, key: str) -> float | None:
    """Return the published mean over the source's own tasks, if it prints nothing else for a row."""
    return next((table.value(key, column) for column in table.columns if column.startswith("mean:")), None)


def averaged_rows(scored: ScoredStudy, table: PublishedTable) -> tuple[dict[str, Row], str, tuple[str, ...]]:
    """Return our rows with the cells of a published mean, a description of that mean, and what is missing."""
    tasks = mean_tasks(scored)
    if not table.mean_of:
        rows = {key: {task: row[task] for task in tasks} for key, row in scored.rows.items()}
        return rows, f"mean of {len(tasks)}", ()
    split = split_columns(table.mean_of)
    known = [column for column in split if column[0] in tasks]
    found = {key: column_row(row, known) for key, row in scored.rows.items()}
    kept = {key: row for key, row in found.items() if row}
    absent = dict.fromkeys(name_task(task) for task, _ in split if task not in tasks)
    notes: tuple[str, ...] = ()
    if absent:
        note = f"the published kind of average, every printed column once; ours lacks {', '.join(absent)}, which the "
        notes = (note + "published one has: only differences compare",)
    return kept, f"avg of {len(known)} columns", notes


def describe_ends(scored: ScoredStudy, keys: Collection[str], tasks: Collection[str] | None = None) -> list[str]:
    """Describe the rows whose learning rate is at an end of the grid on more tasks than by chance.

    A rate beyond that end might be better still. Tasks are those given, or all that count in a mean. Rows whose tasks
    are one run are left out: they have a single rate, which lies at an end too easily.
    """
    joined = {spec.key for spec in scored.specs if has_one_setting(spec)}
    said = []
    for end in ("greatest", "least"):
        found = []
        for key in keys:
            counted = scored.rows[key].keys() - NOT_AVERAGED if tasks is None else scored.rows[key].keys() & set(tasks)
            cells = [scored.rows[key][task] for task in counted if len(scored.rows[key][task].rates) > 1]
            at_end, num = sum(cell.end == end for cell in cells), len(cells)
            if key in joined or not cells:
                continue
            # The probability of at least this many tasks at one end, if all rates were equally good.
            share = 1 / min(len(cell.rates) for cell in cells)
            chance = sum(math.comb(num, n) * share**n * (1 - share) ** (num - n) for n in range(at_end, num + 1))
            if chance <= BY_CHANCE:
                count = "all" if at_end == num else f"{at_end} of {num}"
                found.append(f"{scored.label(key)} ({count} tasks)")
        if found:
            said.append(f"the best learning rate is the {end} that was tried: {', '.join(found)}")
    return said
