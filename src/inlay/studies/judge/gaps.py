"""Differences of rows to the reference, ours beside the published ones, and learning rates at the end of a grid."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from inlay.studies.judge.pairs import Paired, pair
from inlay.studies.judge.published import PublishedTable
from inlay.studies.judge.row_specs import NOT_AVERAGED, has_one_setting, name_task
from inlay.studies.judge.scored import ScoredStudy, averaged_tasks, mean_tasks
from inlay.studies.judge.scores import Cell, Row, column_row

BY_CHANCE = 0.05
"""largest p-value at which a row is mentioned whose learning rates lie at one end of the grid"""


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
    """Return the tasks on which a row can be compared with the reference, ours and in this table."""
    arms = (key, scored.reference or "")
    return [
        task
        for task in averaged_tasks(scored)
        if all(task in scored.rows.get(arm, {}) and table.value(arm, scored.column(task)) is not None for arm in arms)
    ]


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
    split = [(task, metric) for task, _, metric in (column.partition(":") for column in table.mean_of)]
    known = [column for column in split if column[0] in tasks]
    found = {key: column_row(row, known) for key, row in scored.rows.items()}
    absent = dict.fromkeys(name_task(task) for task, _ in split if task not in tasks)
    note = f"the published kind of average, every printed column once; ours lacks {', '.join(absent)}, which the "
    note += "published one has: only differences compare"
    kept = {key: row for key, row in found.items() if row}
    return kept, f"avg of {len(known)} columns", (note,) * bool(absent)


def describe_ends(scored: ScoredStudy, keys: Collection[str], tasks: Collection[str] | None = None) -> list[str]:
    """Describe the rows whose learning rate is at an end of the grid on more tasks than by chance.

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
    """Return the probability of at least this many tasks at one end, if all rates were equally good."""
    share = 1 / min(len(cell.rates) for cell in cells)
    num = len(cells)
    return sum(math.comb(num, n) * share**n * (1 - share) ** (num - n) for n in range(at_end, num + 1))
