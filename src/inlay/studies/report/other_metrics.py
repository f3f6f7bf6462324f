"""Published columns in a metric that a study does not show: our scores in that metric stand beside them here.

A study shows one metric of each task, GLUE's own if not said otherwise. Where a source prints another (MRPC's accuracy
beside our F1), neither is compared with the other: the same runs are shown again, in the metric that was printed.
"""

from __future__ import annotations

from collections.abc import Iterator

from inlay.studies.judge.published import PublishedTable
from inlay.studies.judge.rows import Scored, name_column
from inlay.studies.judge.scores import column_row
from inlay.studies.report.tables import ABSENT, Table, show


def other_metric_tables(scored: Scored) -> list[Table]:
    """One for each published table that has such columns and a row of ours."""
    return [table for printed in scored.published.tables for table in _make_table(scored, printed)]


def _make_table(scored: Scored, printed: PublishedTable) -> Iterator[Table]:
    columns = _find_columns(scored, printed)
    lines: list[tuple[str, ...]] = []
    is_published = set()
    for key, row in scored.rows.items():
        theirs = printed.row(key)
        own = {column: column_row(row, [(task, metric)]) for task, metric in columns for column in [f"{task}:{metric}"]}
        if theirs is None or not any(own.values()):
            continue
        cells = [show(found[column].estimate) if found else ABSENT for column, found in own.items()]
        is_published.add(len(lines) + 1)
        lines += [
            (scored.label(key), *cells),
            (f"{theirs.label}, published", *(show(printed.value(key, column)) for column in own)),
        ]
    if lines:
        names = ("", *(name_column(task, metric) for task, metric in columns))
        notes = (
            "the same runs in the metric that was published; settings are chosen by the metric of the first table",
            f"published: {printed.source}, {printed.backbone}",
        )
        yield Table("in the published metric", names, tuple(lines), notes, frozenset(is_published))


def _find_columns(scored: Scored, printed: PublishedTable) -> list[tuple[str, str]]:
    """(task, metric) of the columns of tasks that a source prints, but not in the metric that is shown."""
    columns = [(task, metric) for task, _, metric in (column.partition(":") for column in printed.columns)]
    return [
        (task, metric)
        for task, metric in columns
        if task in scored.tasks and scored.column(task) not in printed.columns
    ]
