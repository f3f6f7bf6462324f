"""The tables of a study, ours beside the published values, as cells of text.

A table of scores has a line for each row of `lineup.py` and, under the same columns, a line for what was published.
Means are over the columns that all lines have, and the published mean is computed anew over exactly these columns. The
last columns compare with full fine-tuning pair by pair. What a half-done study lacks is left out and named in the notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inlay.research.lineup import Scored, mean_tasks, name_column, name_task
from inlay.research.published import PublishedTable
from inlay.research.records import FINISHED, Record
from inlay.research.scores import Estimate, Row, StudySpec, mean_of, pair, total_parameters

ABSENT = "–"
_WIDE = 7  # with more tasks than this, tasks are lines and rows are columns


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
    groups: dict[str, list[str]] = {}
    for task in scored.tasks:
        groups.setdefault(task.partition("/")[0], []).append(task)
    if len(scored.tasks) <= _WIDE:
        groups = {"": list(scored.tasks)} if scored.tasks else {}
    return [_score_table(scored.narrowed(tasks), name if len(groups) > 1 else "") for name, tasks in groups.items()]


def _score_table(scored: Scored, group: str) -> Table:
    reference = scored.reference
    compared = mean_tasks(scored)
    full = scored.rows.get(reference) if reference else None
    less = f"less {scored.label(reference)}" if reference else ""
    columns = ["", *(name_column(task, scored.metric(task)) for task in scored.tasks)]
    columns += [f"mean of {len(compared)}"] * bool(compared) + [less, "pairs"] * bool(full)
    columns += ["trained", "% of backbone", f"total, {len(scored.tasks)} tasks"]
    lines, is_published = [], set()
    for key, row in scored.rows.items():
        line = [scored.label(key), *(show(row[task].estimate) if task in row else ABSENT for task in scored.tasks)]
        line += [show(mean_of(row, compared))] * bool(compared)
        if full is not None:
            difference = pair(row, full) if key != reference else None
            line += [show(difference and difference.estimate, signed=True)]
            line += [str(difference.num_pairs) if difference else ABSENT]
        lines.append((*line, *_count(row, len(scored.tasks))))
        for other in _published_lines(scored, key, compared, has_pairs=full is not None):
            is_published.add(len(lines))
            lines.append(other)
    title = f"{group}, {_split_name(scored)}" if group else _split_name(scored)
    table = Table(title, tuple(columns), tuple(lines), tuple(_notes(scored, compared)), frozenset(is_published))
    return table.turned() if len(scored.tasks) > _WIDE else table


def _count(row: Row, num_tasks: int) -> list[str]:
    counts = sorted(cell.trained_parameters for cell in row.values())
    shares = [cell.share for cell in row.values()]
    few, many = name_count(counts[0]), name_count(counts[-1])
    total = total_parameters(row) if len(row) == num_tasks else None
    share = sum(shares) / len(shares)
    return [
        few if few == many else f"{few}–{many}",
        f"{share:.{0 if share > 95 else 2}f}",
        f"{total:.2f}×" if total else ABSENT,
    ]


def name_count(number: float) -> str:
    """A number of parameters, short: `39.9k`, `2.42M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:g}"


def _published_lines(scored: Scored, key: str, compared: Sequence[str], *, has_pairs: bool) -> list[tuple[str, ...]]:
    """What was published for a row of ours, under our columns; nothing where no column is the same."""
    lines = []
    for table in scored.published.tables:
        row = table.row(key)
        if row is None:
            continue
        values = [table.value(key, scored.column(task)) for task in scored.tasks]
        mean, base = (_published_mean(scored, table, arm, compared) for arm in (key, scored.reference or key))
        if mean is None and not any(value is not None for value in values):
            continue
        line = [f"{row.label}, published", *map(show, values)]
        line += [show(mean)] * bool(compared)
        if has_pairs:
            gap = mean - base if mean is not None and base is not None and key != scored.reference else None
            line += [show(gap, signed=True), ABSENT]
        trained = row.trained_parameters
        share = row.printed.get("trained %")
        total = row.printed.get("total ×")
        line += [ABSENT if trained is None else name_count(trained), ABSENT if share is None else f"{share:g}"]
        lines.append((*line, ABSENT if total is None else f"{total:g}×"))
    return lines


def _published_mean(scored: Scored, table: PublishedTable, key: str, compared: Sequence[str]) -> float | None:
    """The mean over our columns; where the source prints nothing but a mean of its own tasks, that."""
    metrics = {scored.metric(task) for task in compared}
    own = table.value(key, f"mean:{metrics.pop()}") if len(metrics) == 1 else None
    return own if own is not None else table.mean(key, [scored.column(task) for task in compared])


def _split_name(scored: Scored) -> str:
    return "test scores, settings chosen on dev" if scored.split == "test" else "dev scores, settings chosen on dev"


def _notes(scored: Scored, compared: Sequence[str]) -> list[str]:
    seeds = sorted({cell.estimate.num for row in scored.rows.values() for cell in row.values()})
    counted = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    notes = [
        f"mean ± s.e.m. over {counted} seed{'' if seeds == [1] else 's'}, in points; "
        "a row's settings are chosen for each task on dev, by the mean over seeds"
    ]
    if compared and len(compared) < len(scored.tasks):
        names = ", ".join(name_task(task) for task in scored.tasks if task not in compared)
        notes.append(f"not in the mean, as not every row (or nothing published) has it: {names}")
    if scored.reference and len(scored.rows) > 1:
        name = scored.label(scored.reference)
        notes.append(
            f"differences to {name} are paired: same task, same seed, each at its own chosen settings; "
            "mean over tasks ± s.e.m. over seeds"
        )
    if scored.split == "test":
        untested = [
            name_task(task)
            for task in scored.tasks
            if all(_is_untested(row, task, scored) for row in scored.rows.values())
        ]
        notes += [f"no labelled test rows, so dev: {', '.join(untested)}"] * bool(untested)
    return notes


def _is_untested(row: Row, task: str, scored: Scored) -> bool:
    key = next(key for key, value in scored.rows.items() if value is row)
    spec = next(spec for spec in scored.specs if spec.key == key)
    return not any(record.test for record in spec.records if record.task == task)


def settings_table(scored: Scored) -> Table:
    """What was chosen: for each row and task the setting, of how many, and how many runs were lost."""
    lines = []
    for key, row in scored.rows.items():
        for task in (task for task in scored.tasks if task in row):
            cell = row[task]
            setting = ", ".join(f"{name} {_value(value)}" for name, value in cell.setting.items())
            cells = (setting or ABSENT, str(cell.num_settings), str(cell.estimate.num), str(cell.num_lost))
            lines.append((scored.label(key), name_task(task), *cells))
    columns = ("row", "task", "chosen on dev", "settings tried", "seeds", "runs lost")
    return Table("what was chosen", columns, tuple(lines))


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def list_missing(study: StudySpec, records: Sequence[Record]) -> list[str]:
    """What a study has not got yet, in words: arms, tasks of an arm, runs that came to nothing."""
    finished = {(record.arm, record.task) for record in records if record.status == FINISHED}
    by_tasks: dict[tuple[str, ...], list[str]] = {}
    for name, arm in study.arms.items():
        wanted = getattr(arm, "tasks", study.tasks)
        absent = tuple(task for task in wanted if (name, task) not in finished)
        if absent:
            by_tasks.setdefault(absent, []).append(name)
    found = [f"not run: {', '.join(arms)} on {', '.join(map(name_task, tasks))}" for tasks, arms in by_tasks.items()]
    for status in ("diverged", "failed"):
        lost = [record for record in records if record.status == status]
        if lost:
            names = sorted({f"{record.arm} on {name_task(record.task)}" for record in lost})
            named = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            found.append(f"{len(lost)} run{'s' if len(lost) > 1 else ''} {status}: {named}")
    return found
