"""The tables of a study, with our values beside the published ones, as cells of text.

A table of scores has a line for each row of `judge/row_specs.py` and one for published values under the same columns.
Means are over the columns that all our rows have, and the published mean is recomputed over exactly these columns. The
last columns show paired differences to the reference, over the same columns as the means; if only some of these were
published, a second comparison is over those. Tasks that an incomplete study lacks are left out and named in a note.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inlay.errors import UnknownName
from inlay.studies.judge.bounds import ABSENT, estimate, show
from inlay.studies.judge.extra_data import lower_part, read_ablations, read_steps
from inlay.studies.judge.published import PublishedTable, split_columns
from inlay.studies.judge.row_differences import averaged_rows, describe_ends, own_mean, pair, published_gap
from inlay.studies.judge.row_specs import (
    WIDE,
    group_tasks,
    has_joint_runs,
    has_one_setting,
    name_column,
    name_task,
)
from inlay.studies.judge.scored_study import ScoredStudy, averaged_tasks, mean_tasks, needs_backbone, published_tasks
from inlay.studies.judge.scores import column_row, mean_of, total_parameters


@dataclass(frozen=True)
class ReportTable:
    """A table to be printed, with notes below it."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    published: frozenset[int] = frozenset()
    """indices of the lines with published values, which are printed in italics"""

    def turned(self) -> ReportTable:
        """Swap columns and lines. Published lines become columns, with `published` in their names."""
        names = tuple(line[0] for line in self.lines)
        lines = tuple((name, *(line[i] for line in self.lines)) for i, name in enumerate(self.columns) if i)
        kept = tuple(line for line in lines if any(cell not in ("", ABSENT) for cell in line[1:]))
        return ReportTable(self.title, ("", *names), kept, self.notes)


def score_tables(scored: ScoredStudy) -> list[ReportTable]:
    """Make the tables of scores: one, or one for each group of tasks (`glue/…`, `extra/…`)."""
    groups = group_tasks(scored.tasks)
    tables = [_score_table(scored.narrowed(tasks), name if len(groups) > 1 else "") for name, tasks in groups.items()]
    tables += [_mean_table(scored, table) for table in scored.published.tables if table.over]
    return [table for table in tables if table.lines]


@dataclass(frozen=True)
class _Layout:
    """The columns of a table of scores besides its tasks."""

    averaged: Sequence[str]
    """tasks that all rows have, for the first mean and the differences"""
    compared: Sequence[str]
    """the published ones of these, for a second mean and second differences; empty if that is all of them"""
    counted: Sequence[str]
    """tasks whose parameters are added up"""
    reference: str | None
    """the row that others are compared with; None if no task is in all rows"""
    means: Sequence[Sequence[str]]
    """the tasks of each mean"""
    differences: Sequence[Sequence[str]]
    """the tasks of each difference"""


def _score_table(scored: ScoredStudy, group: str) -> ReportTable:
    # 1. the tasks that are averaged and compared
    averaged, compared, counted = mean_tasks(scored), published_tasks(scored), averaged_tasks(scored)
    compared = compared if len(compared) < len(averaged) else []
    reference = scored.reference if len(scored.rows) > 1 and averaged else None
    means = [tasks for tasks in (averaged, compared) if len(tasks) > 1]
    differences = [tasks for tasks in (averaged, compared) if tasks and reference]
    layout = _Layout(averaged, compared, counted, reference, means, differences)
    # 2. the columns
    columns = ["", *(name_column(task, scored.metric(task)) for task in scored.tasks)]
    if len(averaged) > 1:
        columns.append(f"mean of {len(averaged)}")
    if len(compared) > 1:
        columns.append(f"mean of {len(compared)} published")
    for tasks in differences:
        columns += [_name_difference(scored, layout, tasks), "pairs"]
    columns += ["trained", "% of backbone"]
    if len(counted) > 1:
        columns.append(f"total, {len(counted)} tasks")
    # 3. the lines; published rows that match none of ours come last
    lines, is_published = [], set()
    unmatched = [row.arm for table in scored.published.tables for row in table.rows if row.arm not in scored.rows]
    for key in [*scored.rows, *dict.fromkeys(unmatched)]:
        if key in scored.rows:
            lines.append(_own_line(scored, key, layout))
        for other in _published_lines(scored, key, layout):
            is_published.add(len(lines))
            lines.append(other)
    title = "test scores, settings chosen on dev" if scored.split == "test" else "dev scores, settings chosen on dev"
    title = f"{group}, {title}" if group else title
    table = ReportTable(title, tuple(columns), tuple(lines), tuple(_notes(scored, layout)), frozenset(is_published))
    return table.turned() if len(scored.tasks) > WIDE else table


def _name_difference(scored: ScoredStudy, layout: _Layout, tasks: Sequence[str]) -> str:
    """Return the heading of a column of differences, with its tasks if these are not all of the table."""
    less = f"less {scored.label(layout.reference or '')}"
    if len(tasks) == 1 < len(layout.counted):
        return f"{less}, {name_task(tasks[0])}"
    if tasks == layout.compared:
        return f"{less}, {len(tasks)} published"
    return less if len(tasks) == len(layout.counted) else f"{less}, {len(tasks)} tasks"


def _own_line(scored: ScoredStudy, key: str, layout: _Layout) -> tuple[str, ...]:
    # 1. scores, means and differences
    row = scored.rows[key]
    line = [scored.label(key), *(show(row[task].estimate) if task in row else ABSENT for task in scored.tasks)]
    line += [show(mean_of(row, tasks)) for tasks in layout.means]
    for tasks in layout.differences:
        is_compared = layout.reference is not None and key != layout.reference
        difference = pair(row, scored.rows[layout.reference or key], tasks) if is_compared else None
        line += [show(difference.estimate if difference else None, signed=True)]
        line += [str(difference.num_pairs) if difference else ABSENT]
    # 2. parameters of a task, their mean share of the backbone, and the size of all tasks together
    counted = {task: row[task] for task in layout.counted if task in row} or row
    counts = sorted(cell.trained_parameters for cell in counted.values())
    few, many = name_count(counts[0]), name_count(counts[-1])
    shares = [row[task].share for task in layout.averaged] or [cell.share for cell in counted.values()]
    share = sum(shares) / len(shares)
    line += [few if few == many else f"{few}–{many}", f"{share:.{0 if share > 95 else 2}f}"]
    if len(layout.counted) > 1:
        is_whole = len(counted) == len(layout.counted)
        total = total_parameters(counted, needs_backbone=needs_backbone(scored, key)) if is_whole else None
        line.append(f"{total:.2f}×" if total else ABSENT)
    return tuple(line)


def name_count(number: float) -> str:
    """Format a number of parameters: `39.9k`, `2.42M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:g}"


def _published_lines(scored: ScoredStudy, key: str, layout: _Layout) -> list[tuple[str, ...]]:
    """Return the published lines of a row of ours, under our columns; empty if no column is the same."""
    lines = []
    for table in scored.published.tables:
        row = table.row(key)
        if row is None or table.over:
            continue
        values = [table.value(key, scored.column(task)) for task in scored.tasks]
        values += [table.mean(key, [scored.column(task) for task in tasks]) for tasks in layout.means]
        if not any(value is not None for value in values):
            continue
        line = [f"{row.label}, published", *map(show, values)]
        for tasks in layout.differences:
            line += [show(published_gap(scored, table, key, tasks), signed=True), ABSENT]
        share, total, tasks_of_total = (row.printed.get(name) for name in ("trained %", "total ×", "tasks"))
        line.append(ABSENT if row.trained_parameters is None else name_count(row.trained_parameters))
        line.append(ABSENT if share is None else f"{share:g}")
        if len(layout.counted) > 1:
            # The size of all tasks together, with the number of tasks if it differs from ours.
            others = "" if tasks_of_total in (None, len(layout.counted)) else f" ({tasks_of_total:g} tasks)"
            line.append(ABSENT if total is None else f"{total:g}×{others}")
        lines.append(tuple(line))
    return lines


def _mean_table(scored: ScoredStudy, table: PublishedTable) -> ReportTable:
    """Set our means beside those that a source prints over its own tasks; only differences can be compared.

    If the source says which columns its mean is over, ours is over those of them that we have.
    """
    rows, what, notes = averaged_rows(scored, table)
    reference = scored.reference
    lines = []
    for key in [key for key in rows if table.row(key) is not None]:
        is_compared = reference in rows and key != reference
        gap = pair(rows[key], rows[reference]) if is_compared and reference else None
        ours = [show(mean_of(rows[key], rows[key])), show(gap.estimate if gap else None, signed=True)]
        printed = [show(own_mean(table, key)), show(published_gap(scored, table, key, ()), signed=True)]
        lines.append((scored.label(key), *ours, *printed))
    less = f"less {scored.label(reference)}" if reference else "difference"
    columns = ("", f"ours, {what}", less, f"published, mean of its {table.over}", f"{less}, published")
    notes = (f"published: {table.source}, {table.backbone}", *notes)
    return ReportTable("means beside the published", columns, tuple(lines), notes)


def _notes(scored: ScoredStudy, layout: _Layout) -> list[str]:
    seeds = sorted({cell.estimate.num for row in scored.rows.values() for cell in row.values()})
    counted = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    notes = [
        f"mean ± s.e.m. over {counted} seed{'' if seeds == [1] else 's'}, in points; "
        f"settings are chosen {_chosen_for(scored)}, by the mean over seeds"
    ]
    left_out = [name_task(task) for task in scored.tasks if task not in layout.averaged]
    if layout.means and left_out:
        notes.append(f"not in the mean: {', '.join(left_out)}")
    if layout.reference:
        notes.append(
            f"less {scored.label(layout.reference)}: the mean over tasks of differences between runs of the same task "
            "and seed, each at its own chosen settings; ± s.e.m. over seeds; `pairs` is their number, where a run of "
            "several tasks counts once, by the mean of its tasks"
        )
    elif scored.reference and len(scored.rows) > 1:
        notes.append(f"less {scored.label(scored.reference)}: not shown, as no task is in all rows")
    uncounted = [name_task(task) for task in scored.tasks if task not in layout.counted]
    if uncounted:
        notes.append(f"not in trained parameters, their share and total: {', '.join(uncounted)}")
    untested = [name_task(task) for task in scored.tasks if scored.split == "test" and not scored.is_tested(task)]
    if untested:
        notes.append(f"no labelled test rows, so dev: {', '.join(untested)}")
    return notes


def _chosen_for(scored: ScoredStudy) -> str:
    """Describe for what settings are chosen: for each task, or once for all tasks of one run or one sequence."""
    specs = [spec for spec in scored.specs if spec.key in scored.rows]
    once = [spec for spec in specs if has_one_setting(spec)]
    if not once:
        return "for each task on dev"
    kind = "run" if all(map(has_joint_runs, once)) else "sequence"
    if len(once) == len(scored.rows):
        return f"on dev, once for all tasks of a row: they are one {kind}"
    names = ", ".join(scored.label(spec.key) for spec in once)
    return f"on dev, once for all tasks where they are one {kind} ({names}), else for each task"


def ablation_table(scored: ScoredStudy) -> list[ReportTable]:
    """Make the table of losses without adapters: single layers, the lower and the upper part, all of them."""
    lines = []
    for item in read_ablations(scored.records, scored.study.tasks):
        part = lower_part(item)
        single = max(item.singles, key=lambda found: found.mean)
        upper = (item.num_layers - part, item.num_layers - 1)
        printed = scored.published.value("all-removed", f"{item.task}:accuracy")
        cells = [show(estimate(item.whole.values())), show(single)]
        for first, last in ((0, part - 1), upper):
            cells.append(f"{show(item.decrease(first, last))} ({first}–{last})")
        cells += [show(item.accuracy(*item.everything)), show(item.majority), show(printed)]
        lines.append((name_task(item.task), *cells))
    columns = ("", "dev accuracy", "lost: costliest single layer", "lost: lower layers", "lost: upper layers",
               "all removed", "majority class", "all removed, published")  # fmt: skip
    notes = ("mean ± s.e.m. over seeds, in points of accuracy; nothing is retrained, norms and head stay as trained",)
    return [ReportTable("accuracy without the adapters of some layers", columns, tuple(lines), notes)] if lines else []


def step_tables(scored: ScoredStudy) -> list[ReportTable]:
    """Make the tables of earlier tasks' scores after each step of a sequence, one for each row."""
    tables = []
    for spec in scored.specs:
        steps = read_steps(spec.records, scored.study.tasks)
        names = [step.task for step in steps]
        lines = [
            (name_task(step.task), *(show(step.scores.get(name)) if name in step.scores else "" for name in names))
            for step in steps
        ]
        if len(steps) > 1:
            title = f"{spec.label}: dev score on each task after learning the task of the line"
            tables.append(ReportTable(title, ("after", *map(name_task, names)), tuple(lines)))
    return tables


def average_tables(scored: ScoredStudy) -> list[ReportTable]:
    """Make the table of averages over all printed columns, as the HyperFormer paper takes them."""
    # 1. every published column of a task that all rows have
    tasks, published = mean_tasks(scored), scored.published.tables
    names = list(dict.fromkeys(column for table in published for column in table.columns))
    names = [name for name in names if name.partition(":")[0] in tasks]
    columns = split_columns(names)
    # 2. a line for each row, ours and theirs
    lines, is_published = [], set()
    for key, row in scored.rows.items():
        if (cells := column_row(row, columns)) is not None:
            lines.append(
                (scored.label(key), *(show(cell.estimate) for cell in cells.values()), show(mean_of(cells, cells)))
            )
        for table in published:
            mean, printed = table.mean(key, names), table.row(key)
            if mean is not None and printed is not None:
                is_published.add(len(lines))
                lines.append(
                    (f"{printed.label}, published", *(show(table.value(key, name)) for name in names), show(mean))
                )
    titles = ("", *(name_column(task, metric) for task, metric in columns), f"avg of {len(columns)}")
    notes = (
        "the published kind of average: every printed column counts, both metrics of MRPC and STS-B; the published one "
        "is computed anew over the same columns",
    )
    made = ReportTable("the average as published", titles, tuple(lines), notes, frozenset(is_published))
    return [made] if len(columns) > 1 and lines else []


def advice_tables(scored: ScoredStudy) -> list[ReportTable]:
    """Make the table of a paper's advice to practitioners, with our result for each line."""
    report = scored.study.report
    used = {row for line in report.advice for row in line.rows} - set(scored.rows)
    if not any(map(scored.find_row, used)):
        return []
    lines = []
    for line in report.advice:
        if not line.rows:
            lines.append((line.text, ABSENT, line.what))
            continue
        row, other = map(scored.find_row, line.rows)
        found = pair(row, other, line.tasks or scored.tasks)
        said = "not run" if found is None else f"{line.what}: {show(found.estimate, signed=True)}"
        lines.append((line.text, ", ".join(map(name_task, found.by_task)) if found else ABSENT, said))
    notes = ("frozen: the best of the rows of features for each task, by dev; ± is the error of seeds alone",)
    return [ReportTable(report.advice_title, ("advice", "tasks", "ours, in points"), tuple(lines), notes)]


def study_tables(scored: ScoredStudy) -> list[ReportTable]:
    """Make the tables that a study's file asks for."""
    for kind in scored.study.report.tables:
        if kind not in TABLES:
            raise UnknownName("kind of table", kind, TABLES)
    return [table for kind in scored.study.report.tables for table in TABLES[kind](scored)]


def other_metric_tables(scored: ScoredStudy) -> list[ReportTable]:
    """Make a table for each source with our scores in the metrics that it prints and the study does not show.

    A study shows one metric of each task. Where a source prints another one (MRPC's accuracy, and F1 is shown), the
    same runs are shown again in the printed metric.
    """
    tables = []
    for printed in scored.published.tables:
        columns = [
            (task, metric)
            for task, metric in split_columns(printed.columns)
            if task in scored.tasks and scored.column(task) not in printed.columns
        ]
        lines: list[tuple[str, ...]] = []
        for key, row in scored.rows.items():
            theirs = printed.row(key)
            found = [column_row(row, [column]) for column in columns]
            if theirs is not None and any(found):
                cells = [show(next(iter(own.values())).estimate) if own else ABSENT for own in found]
                values = [show(printed.value(key, f"{task}:{metric}")) for task, metric in columns]
                lines += [(scored.label(key), *cells), (f"{theirs.label}, published", *values)]
        if lines:
            titles = ("", *(name_column(task, metric) for task, metric in columns))
            notes = (
                "the same runs in the metric that was published; settings are chosen by the metric of the first table",
                f"published: {printed.source}, {printed.backbone}",
            )
            is_published = frozenset(range(1, len(lines), 2))
            tables.append(ReportTable("in the published metric", titles, tuple(lines), notes, is_published))
    return tables


# kind of table -> the function that makes it; a study's file names kinds
TABLES: dict[str, Callable[[ScoredStudy], list[ReportTable]]] = {
    "scores": score_tables,
    "spans": ablation_table,
    "steps": step_tables,
    "average": average_tables,
    "advice": advice_tables,
}


def settings_table(scored: ScoredStudy) -> ReportTable:
    """Make the table of the settings chosen on dev for each row and task, with the number of lost runs."""
    lines = []
    for key, row in scored.rows.items():
        cells = []
        for task in scored.tasks:
            cell = row.get(task)
            setting = ", ".join(f"{name} {_value(value)}" for name, value in cell.setting.items()) if cell else ""
            lost = f" ({cell.num_lost} lost)" if cell and cell.num_lost else ""
            cells.append((setting or ABSENT) + lost)
        tried = sorted({cell.num_settings for cell in row.values()})
        lines.append((scored.label(key), "–".join(map(str, dict.fromkeys((tried[0], tried[-1])))), *cells))
    columns = ("chosen on dev", "of", *map(name_task, scored.tasks))
    notes = describe_ends(scored, scored.rows)
    if any(cell.num_waiting for row in scored.rows.values() for cell in row.values()):
        note = (
            "`of`: settings that were compared, fewest and most of a task; others have one seed where these have more, "
            "or a run that diverged"
        )
        notes.insert(0, note)
    table = ReportTable("settings", columns, tuple(lines), tuple(notes))
    return table.turned() if len(scored.tasks) > WIDE else table


def _value(value: object) -> str:
    """Format a setting's value: `3e-4`, `0.1`, `64`."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        return f"{value:e}".replace(".000000", "").replace("e-0", "e-")
    return f"{value:g}" if isinstance(value, float) else str(value)
