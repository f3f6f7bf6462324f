"""Differences of rows to the reference, ours beside the published ones, and rates at an end of those tried."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from inlay.studies.judge.pairs import Paired, pair
from inlay.studies.judge.published import PublishedTable
from inlay.studies.judge.report_rows import NOT_AVERAGED, has_one_setting, name_task
from inlay.studies.judge.scored import ScoredStudy, averaged_tasks, mean_tasks
from inlay.studies.judge.scores import Cell, Row, column_row

BY_CHANCE = 0.05
"""how likely a row's learning rates may be at one end of those tried before it is said"""


@dataclass(frozen=True)
class Gaps:
    """A row less the reference: ours, and as published."""

    ours: Paired
    published: float
    tasks: tuple[str, ...]
    """those that both are over"""
    over: str
    """the same in words"""


def find_gaps(scored: ScoredStudy, key: str) -> Gaps | None:
    """Find both over the same tasks, from the first published table that has the two rows; None where none has."""
    reference = scored.reference
    for table in scored.published.tables if reference is not None and key != reference else ():
        assert reference is not None
        if table.over:
            rows, what, _ = averaged_rows(scored, table)
            tasks, over = list(rows.get(key, ())), f"{what}, published of {table.over}"
        else:
            rows, tasks = dict(scored.rows), _gap_tasks(scored, table, key)
            over = f"{len(tasks)} tasks" if len(tasks) > 1 else name_task("".join(tasks))
        theirs = published_gap(scored, table, key, tasks)
        if theirs is not None and reference in rows and key in rows:
            ours = pair(rows[key], rows[reference], tasks)
            return Gaps(ours, theirs, tuple(tasks), over) if ours is not None else None
    return None


def _gap_tasks(scored: ScoredStudy, table: PublishedTable, key: str) -> list[str]:
    """Return the tasks on which a row can be held against the reference, both ours and as this table has them."""
    arms = (key, scored.reference or "")
    return [
        task
        for task in averaged_tasks(scored)
        if all(task in scored.rows.get(arm, {}) and table.value(arm, scored.column(task)) is not None for arm in arms)
    ]


def published_gap(scored: ScoredStudy, table: PublishedTable, key: str, tasks: Sequence[str]) -> float | None:
    """Return the row less the reference as published: over exactly these tasks, or over the source's own."""
    row, reference = table.row(key), scored.reference
    if row is None or row.is_difference or reference is None or key == reference:
        return None
    columns = [scored.column(task) for task in tasks] if not table.over else []
    found = [own_mean(table, arm) if table.over else table.mean(arm, columns) for arm in (key, reference)]
    return None if found[0] is None or found[1] is None else found[0] - found[1]


def own_mean(table: PublishedTable, key: str) -> float | None:
    """Return the mean over its own tasks that a source prints for a row, where it prints nothing else."""
    return next((table.value(key, column) for column in table.columns if column.startswith("mean:")), None)


def averaged_rows(scored: ScoredStudy, table: PublishedTable) -> tuple[dict[str, Row], str, tuple[str, ...]]:
    """Our rows with the cells that a mean beside this table is over, what that mean is, and what it lacks."""
    tasks = mean_tasks(scored)
    if not table.mean_of:
        rows = {key: {task: row[task] for task in tasks} for key, row in scored.rows.items()}
        return rows, f"mean of {len(tasks)}", ()
    split = [(task, metric) for task, _, metric in (column.partition(":") for column in table.mean_of)]
    known = [column for column in split if column[0] in tasks]
    found = {key: column_row(row, known) for key, row in scored.rows.items()}
    absent = dict.fromkeys(name_task(task) for task, _ in split if task not in tasks)
    note = f"the published kind of average, every printed column once; ours lacks {', '.join(absent)}, which the "
    note += "published one has: only differences compare"
    kept = {key: row for key, row in found.items() if row}
    return kept, f"avg of {len(known)} columns", (note,) * bool(absent)


def describe_ends(scored: ScoredStudy, keys: Collection[str], tasks: Collection[str] | None = None) -> list[str]:
    """Return the rows whose learning rate is the greatest that was tried, or the least, on more tasks than by chance.

    What such a row comes to with a rate beyond that end is not known. Tasks are those given, or all that count in a
    mean; where they are one run they have one rate, which is at an end too easily to be said.
    """
    joined = {spec.key for spec in scored.specs if has_one_setting(spec)}
    said = []
    for end in ("greatest", "least"):
        found = []
        for key in keys:
            counted = scored.rows[key].keys() - NOT_AVERAGED if tasks is None else scored.rows[key].keys() & set(tasks)
            cells = [scored.rows[key][task] for task in counted if len(scored.rows[key][task].rates) > 1]
            at_end = sum(cell.end == end for cell in cells)
            if key not in joined and cells and _chance(at_end, cells) <= BY_CHANCE:
                count = "all" if at_end == len(cells) else f"{at_end} of {len(cells)}"
                found.append(f"{scored.label(key)} ({count} tasks)")
        if found:
            said.append(f"the best learning rate is the {end} that was tried: {', '.join(found)}")
    return said


def _chance(at_end: int, cells: Sequence[Cell]) -> float:
    """Return how likely so many tasks or more have the rate of one end, if all rates were as good."""
    share = 1 / min(len(cell.rates) for cell in cells)
    num = len(cells)
    return sum(math.comb(num, n) * share**n * (1 - share) ** (num - n) for n in range(at_end, num + 1))
