"""The tables of a study, ours beside the published values, as cells of text.

A table of scores has a line for each row of `lineup.py` and, under the same columns, a line for what was published.
Means are over the columns that all lines have, and the published mean is computed anew over exactly these columns. The
last columns compare with full fine-tuning pair by pair, over the same columns as the means; where fewer of them were
published, a second comparison is over these. What a half-done study lacks is left out and named in a note.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from inlay.studies.judge.bounds import Estimate, estimate
from inlay.studies.judge.extras import read_ablations, read_steps
from inlay.studies.judge.pairs import Paired, pair
from inlay.studies.judge.published import PublishedRow, PublishedTable
from inlay.studies.judge.rows import (
    NOT_AVERAGED,
    WIDE,
    Scored,
    averaged_tasks,
    group_tasks,
    has_joint_runs,
    has_one_setting,
    mean_tasks,
    name_column,
    name_task,
    needs_backbone,
    published_tasks,
    shape_of,
)
from inlay.studies.judge.scores import Cell, Row, column_row, mean_of, total_parameters

ABSENT = "–"
BY_CHANCE = 0.05
"""how likely a row's learning rates may be at one end of those tried before it is said"""


@dataclass(frozen=True)
class Table:
    """A table to be printed; `notes` stand under it."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    published: frozenset[int] = frozenset()
    """lines of published values, which are set apart"""

    def turned(self) -> Table:
        """Columns as lines. Published lines become columns, told apart by their names."""
        names = tuple(line[0] for line in self.lines)
        lines = tuple((name, *(line[i] for line in self.lines)) for i, name in enumerate(self.columns) if i)
        kept = tuple(line for line in lines if any(cell not in ("", ABSENT) for cell in line[1:]))
        return Table(self.title, ("", *names), kept, self.notes)


def show(value: Estimate | float | None, *, signed: bool = False) -> str:
    """A number of points with its standard error: `86.2 ± 0.3`; a dash where there is none."""
    if value is None:
        return ABSENT
    found = value if isinstance(value, Estimate) else Estimate(value)
    text = f"{found.mean:+.1f}" if signed else f"{found.mean:.1f}"
    return (text if found.sem is None else f"{text} ± {found.sem:.1f}").replace("-", "−")


def score_tables(scored: Scored) -> list[Table]:
    """The study's scores: one table, or one for each group of tasks (`glue/…`, `extra/…`)."""
    groups = group_tasks(scored.tasks)
    tables = [_score_table(scored.narrowed(tasks), name if len(groups) > 1 else "") for name, tasks in groups.items()]
    tables += [_mean_table(scored, table) for table in scored.published.tables if table.over]
    return [table for table in tables if table.lines]


@dataclass(frozen=True)
class _Layout:
    """Which columns a table of scores has besides its tasks."""

    tasks: tuple[str, ...]
    averaged: tuple[str, ...]
    """tasks that all rows have: of the first mean and of the differences"""
    compared: tuple[str, ...]
    """those of them that were published, for a second mean and second differences; none where they are the same"""
    counted: tuple[str, ...]
    """tasks whose parameters are added up"""
    reference: str | None
    """the row that others are compared with; none where no task is in all rows"""

    @property
    def means(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tasks for tasks in (self.averaged, self.compared) if len(tasks) > 1)

    @property
    def differences(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tasks for tasks in (self.averaged, self.compared) if tasks and self.reference)


def _lay_out(scored: Scored) -> _Layout:
    averaged, compared = tuple(mean_tasks(scored)), tuple(published_tasks(scored))
    reference = scored.reference if len(scored.rows) > 1 and averaged else None
    compared = compared if len(compared) < len(averaged) else ()
    return _Layout(scored.tasks, averaged, compared, tuple(averaged_tasks(scored)), reference)


def _score_table(scored: Scored, group: str) -> Table:
    layout = _lay_out(scored)
    columns = ["", *(name_column(task, scored.metric(task)) for task in scored.tasks)]
    names = [f"mean of {len(layout.averaged)}", f"mean of {len(layout.compared)} published"]
    columns += [name for name, tasks in zip(names, (layout.averaged, layout.compared), strict=True) if len(tasks) > 1]
    columns += [name for tasks in layout.differences for name in (_name_difference(scored, layout, tasks), "pairs")]
    columns += ["trained", "% of backbone"] + [f"total, {len(layout.counted)} tasks"] * (len(layout.counted) > 1)
    lines, is_published = [], set()
    for key in [*scored.rows, *_unmatched(scored)]:
        if key in scored.rows:
            lines.append(_own_line(scored, key, layout))
        for other in _published_lines(scored, key, layout):
            is_published.add(len(lines))
            lines.append(other)
    title = f"{group}, {_split_name(scored)}" if group else _split_name(scored)
    table = Table(title, tuple(columns), tuple(lines), tuple(_notes(scored, layout)), frozenset(is_published))
    return table.turned() if len(scored.tasks) > WIDE else table


def _name_difference(scored: Scored, layout: _Layout, tasks: Sequence[str]) -> str:
    """What stands over differences; which tasks they are over, where these are not all of the table."""
    less = f"less {scored.label(layout.reference or '')}"
    if len(tasks) == 1 < len(layout.counted):
        return f"{less}, {name_task(tasks[0])}"
    if tasks == layout.compared:
        return f"{less}, {len(tasks)} published"
    return less if len(tasks) == len(layout.counted) else f"{less}, {len(tasks)} tasks"


def _unmatched(scored: Scored) -> list[str]:
    """Published rows that none of ours stands beside; they close the table."""
    return list(
        dict.fromkeys(row.arm for table in scored.published.tables for row in table.rows if row.arm not in scored.rows)
    )


def _own_line(scored: Scored, key: str, layout: _Layout) -> tuple[str, ...]:
    row = scored.rows[key]
    line = [scored.label(key), *(show(row[task].estimate) if task in row else ABSENT for task in layout.tasks)]
    line += [show(mean_of(row, tasks)) for tasks in layout.means]
    for tasks in layout.differences:
        is_compared = layout.reference is not None and key != layout.reference
        difference = pair(row, scored.rows[layout.reference or key], tasks) if is_compared else None
        line += [show(difference.estimate if difference else None, signed=True)]
        line += [str(difference.num_pairs) if difference else ABSENT]
    return (*line, *_count(scored, key, layout))


def _count(scored: Scored, key: str, layout: _Layout) -> list[str]:
    """Parameters of a row: a task's, their share over the tasks of the mean, and those of all tasks together."""
    row = scored.rows[key]
    counted = {task: row[task] for task in layout.counted if task in row} or row
    counts = sorted(cell.trained_parameters for cell in counted.values())
    few, many = name_count(counts[0]), name_count(counts[-1])
    shares = [row[task].share for task in layout.averaged] or [cell.share for cell in counted.values()]
    share = sum(shares) / len(shares)
    is_whole = len(counted) == len(layout.counted)
    total = total_parameters(counted, needs_backbone=needs_backbone(scored, key)) if is_whole else None
    texts = [few if few == many else f"{few}–{many}", f"{share:.{0 if share > 95 else 2}f}"]
    return texts + [f"{total:.2f}×" if total else ABSENT] * (len(layout.counted) > 1)


def name_count(number: float) -> str:
    """A number of parameters, short: `39.9k`, `2.42M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:g}"


def _published_lines(scored: Scored, key: str, layout: _Layout) -> list[tuple[str, ...]]:
    """What was published for a row of ours, under our columns; nothing where no column is the same."""
    lines = []
    for table in scored.published.tables:
        row = table.row(key)
        if row is None or table.over:
            continue
        values = [table.value(key, scored.column(task)) for task in layout.tasks]
        means = [table.mean(key, [scored.column(task) for task in tasks]) for tasks in layout.means]
        if not any(value is not None for value in (*values, *means)):
            continue
        line = [f"{row.label}, published", *map(show, (*values, *means))]
        for tasks in layout.differences:
            line += [show(_table_gap(scored, table, key, tasks), signed=True), ABSENT]
        share = row.printed.get("trained %")
        line += [ABSENT if row.trained_parameters is None else name_count(row.trained_parameters)]
        line += [ABSENT if share is None else f"{share:g}"]
        line += [_published_total(row, len(layout.counted))] * (len(layout.counted) > 1)
        lines.append(tuple(line))
    return lines


def _published_total(row: PublishedRow, num_tasks: int) -> str:
    """What all tasks of a source take together, with their number where ours is another."""
    total, tasks = row.printed.get("total ×"), row.printed.get("tasks")
    if total is None:
        return ABSENT
    return f"{total:g}×" if tasks in (None, num_tasks) else f"{total:g}× ({tasks:g} tasks)"


@dataclass(frozen=True)
class Gaps:
    """A row less the reference: ours, and as published."""

    ours: Paired
    published: float
    tasks: tuple[str, ...]
    """those that both are over"""
    over: str
    """the same in words"""


def find_gaps(scored: Scored, key: str) -> Gaps | None:
    """Both over the same tasks, from the first published table that has the two rows; None where none has."""
    reference = scored.reference
    for table in scored.published.tables if reference is not None and key != reference else ():
        assert reference is not None
        if table.over:
            rows, what, _ = _averaged_rows(scored, table)
            tasks, over = list(rows.get(key, ())), f"{what}, published of {table.over}"
        else:
            rows, tasks = dict(scored.rows), _gap_tasks(scored, table, key)
            over = f"{len(tasks)} tasks" if len(tasks) > 1 else name_task("".join(tasks))
        theirs = _table_gap(scored, table, key, tasks)
        if theirs is not None and reference in rows and key in rows:
            ours = pair(rows[key], rows[reference], tasks)
            return Gaps(ours, theirs, tuple(tasks), over) if ours is not None else None
    return None


def _gap_tasks(scored: Scored, table: PublishedTable, key: str) -> list[str]:
    """The tasks on which a row can be held against the reference, both ours and as this table has them."""
    arms = (key, scored.reference or "")
    return [
        task
        for task in averaged_tasks(scored)
        if all(task in scored.rows.get(arm, {}) and table.value(arm, scored.column(task)) is not None for arm in arms)
    ]


def _table_gap(scored: Scored, table: PublishedTable, key: str, tasks: Sequence[str]) -> float | None:
    """The row less the reference as published: over exactly these tasks, or over the source's own."""
    row, reference = table.row(key), scored.reference
    if row is None or row.is_difference or reference is None or key == reference:
        return None
    columns = [scored.column(task) for task in tasks] if not table.over else []
    found = [_own_mean(table, arm) if table.over else table.mean(arm, columns) for arm in (key, reference)]
    return None if found[0] is None or found[1] is None else found[0] - found[1]


def _own_mean(table: PublishedTable, key: str) -> float | None:
    """The mean over its own tasks that a source prints for a row, where it prints nothing else."""
    return next((table.value(key, column) for column in table.columns if column.startswith("mean:")), None)


def _mean_table(scored: Scored, table: PublishedTable) -> Table:
    """Our means beside those that a source prints of its own tasks: only differences compare.

    Where the source says which columns its mean is over, ours is over those of them that are at hand.
    """
    rows, what, notes = _averaged_rows(scored, table)
    reference = scored.reference
    lines = []
    for key in [key for key in rows if table.row(key) is not None]:
        is_compared = reference in rows and key != reference
        gap = pair(rows[key], rows[reference]) if is_compared and reference else None
        ours = [show(mean_of(rows[key], rows[key])), show(gap.estimate if gap else None, signed=True)]
        printed = [show(_own_mean(table, key)), show(_table_gap(scored, table, key, ()), signed=True)]
        lines.append((scored.label(key), *ours, *printed))
    less = f"less {scored.label(reference)}" if reference else "difference"
    columns = ("", f"ours, {what}", less, f"published, mean of its {table.over}", f"{less}, published")
    notes = (f"published: {table.source}, {table.backbone}", *notes)
    return Table("means beside the published", columns, tuple(lines), notes)


def _averaged_rows(scored: Scored, table: PublishedTable) -> tuple[dict[str, Row], str, tuple[str, ...]]:
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


def _split_name(scored: Scored) -> str:
    return "test scores, settings chosen on dev" if scored.split == "test" else "dev scores, settings chosen on dev"


def _notes(scored: Scored, layout: _Layout) -> list[str]:
    seeds = sorted({cell.estimate.num for row in scored.rows.values() for cell in row.values()})
    counted = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    notes = [
        f"mean ± s.e.m. over {counted} seed{'' if seeds == [1] else 's'}, in points; "
        f"settings are chosen {_chosen_for(scored)}, by the mean over seeds"
    ]
    left_out = [name_task(task) for task in layout.tasks if task not in layout.averaged]
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
    uncounted = [name_task(task) for task in layout.tasks if task not in layout.counted]
    if uncounted:
        notes.append(f"not in trained parameters, their share and total: {', '.join(uncounted)}")
    untested = [name_task(task) for task in layout.tasks if scored.split == "test" and not scored.is_tested(task)]
    return notes + [f"no labelled test rows, so dev: {', '.join(untested)}"] * bool(untested)


def _chosen_for(scored: Scored) -> str:
    """What the settings of a row are chosen for: tasks of one run, or of one sequence, have one setting."""
    specs = [spec for spec in scored.specs if spec.key in scored.rows]
    once = [spec for spec in specs if has_one_setting(spec)]
    if not once:
        return "for each task on dev"
    kind = "run" if all(map(has_joint_runs, once)) else "sequence"
    if len(once) == len(scored.rows):
        return f"on dev, once for all tasks of a row: they are one {kind}"
    names = ", ".join(scored.label(spec.key) for spec in once)
    return f"on dev, once for all tasks where they are one {kind} ({names}), else for each task"


def ablation_table(scored: Scored) -> list[Table]:
    """What removing adapters costs: single layers, the lower and the upper part, all of them."""
    records = [record for spec in scored.specs for record in spec.records]
    lines = []
    for item in read_ablations(records, scored.study.tasks):
        part = max(1, round(item.num_layers * 5 / 12))
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
    return [Table("accuracy without the adapters of some layers", columns, tuple(lines), notes)] if lines else []


def stream_tables(scored: Scored) -> list[Table]:
    """The scores of the rows, and what every earlier task scores after each step."""
    tables = score_tables(scored)
    for spec in scored.specs:
        steps = read_steps(spec.records, scored.study.tasks)
        names = [step.task for step in steps]
        lines = [
            (name_task(step.task), *(show(step.scores.get(name)) if name in step.scores else "" for name in names))
            for step in steps
        ]
        if len(steps) > 1:
            title = f"{spec.label}: dev score on each task after learning the task of the line"
            tables.append(Table(title, ("after", *map(name_task, names)), tuple(lines)))
    return tables


def joint_tables(scored: Scored) -> list[Table]:
    """The scores of the rows, and the average as HyperFormer's authors take it: over all printed columns."""
    columns = _printed_columns(scored)
    lines, is_published = [], set()
    for key, row in scored.rows.items():
        if (cells := column_row(row, columns)) is not None:
            whole = mean_of(cells, cells)
            lines.append((scored.label(key), *(show(cell.estimate) for cell in cells.values()), show(whole)))
        names = [f"{task}:{metric}" for task, metric in columns]
        for table in scored.published.tables:
            mean = table.mean(key, names)
            if mean is not None and (printed := table.row(key)) is not None:
                is_published.add(len(lines))
                values = [show(table.value(key, name)) for name in names]
                lines.append((f"{printed.label}, published", *values, show(mean)))
    titles = ("", *(name_column(task, metric) for task, metric in columns), f"avg of {len(columns)}")
    notes = (
        "the published kind of average: every printed column counts, both metrics of MRPC and STS-B; the published one "
        "is computed anew over the same columns",
    )
    title = "the average as published"
    made = Table(title, titles, tuple(lines), notes, frozenset(is_published))
    return [*score_tables(scored), *([made] if len(columns) > 1 and lines else [])]


def _printed_columns(scored: Scored) -> list[tuple[str, str]]:
    """(task, metric) of every column that was published for a task that all rows have."""
    tasks = mean_tasks(scored)
    columns = dict.fromkeys(column for table in scored.published.tables for column in table.columns)
    found = [(task, metric) for task, _, metric in (column.partition(":") for column in columns)]
    return [(task, metric) for task, metric in found if task in tasks]


def study_tables(scored: Scored) -> list[Table]:
    """The tables of a study."""
    return _TABLES.get(shape_of(scored.study), score_tables)(scored)


_TABLES: dict[str, Callable[[Scored], list[Table]]] = {
    "ablation": ablation_table,
    "stream": stream_tables,
    "multitask": joint_tables,
}


def settings_table(scored: Scored) -> Table:
    """What was chosen on dev for each row and task, with how many runs of it were lost."""
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
    waits = any(cell.num_waiting for row in scored.rows.values() for cell in row.values())
    note = (
        "`of`: settings that were compared, fewest and most of a task; others have one seed where these have more, or "
    )
    note += "a run that diverged"
    table = Table("settings", columns, tuple(lines), (*(note,) * waits, *describe_ends(scored, scored.rows)))
    return table.turned() if len(scored.tasks) > WIDE else table


def describe_ends(scored: Scored, keys: Collection[str], tasks: Collection[str] | None = None) -> list[str]:
    """The rows whose learning rate is the greatest that was tried, or the least, on more tasks than by chance.

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
    """How likely so many tasks or more have the rate of one end, if all rates were as good."""
    share = 1 / min(len(cell.rates) for cell in cells)
    num = len(cells)
    return sum(math.comb(num, n) * share**n * (1 - share) ** (num - n) for n in range(at_end, num + 1))


def _value(value: object) -> str:
    """`3e-4`, `0.1`, `64`."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        return f"{value:e}".replace(".000000", "").replace("e-0", "e-")
    return f"{value:g}" if isinstance(value, float) else str(value)
