"""A study with the scores of its rows, from which tables, figures and claims are made."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from inlay.studies.judge.coverage import Coverage, list_planned_rows
from inlay.studies.judge.published import Published
from inlay.studies.judge.row_specs import NOT_AVERAGED, RowSpec, has_one_setting, list_rows, make_rows, name_row
from inlay.studies.judge.scores import Row, choose, list_candidates, rank_settings
from inlay.studies.run.records import Record
from inlay.studies.spec.study import ARM_KINDS, Study


@dataclass(frozen=True)
class ScoredStudy:
    """The rows of a study with their cells, of one backbone and profile."""

    study: Study
    specs: tuple[RowSpec, ...]
    rows: Mapping[str, Row]
    """key -> cells"""
    tasks: tuple[str, ...]
    """tasks with a cell in some row, in the study's order"""
    split: str
    published: Published

    @property
    def reference(self) -> str | None:
        """The row that the others are compared with."""
        return next((key for key in (*self.study.report.reference, "full") if key in self.rows), None)

    @property
    def records(self) -> list[Record]:
        """The records of all rows; a record in two rows occurs twice."""
        return [record for spec in self.specs for record in spec.records]

    @cached_property
    def coverage(self) -> Coverage:
        """The study's plan compared with its records."""
        return Coverage(self.study, self.records)

    @cached_property
    def planned_specs(self) -> list[RowSpec]:
        """The rows of a complete study."""
        return list_planned_rows(self.study)

    def label(self, key: str) -> str:
        """Return the label of a row."""
        return next((spec.label for spec in self.specs if spec.key == key), None) or name_row(self.study, key)

    def find_row(self, key: str) -> Row:
        """Return the cells of a row, also of one that is not shown and serves claims alone; empty if not run."""
        if key in self.rows:
            return self.rows[key]
        rules = [rule for rule in self.study.report.rows if rule.key == key and not rule.is_shown]
        specs = [spec for rule in rules for spec in make_rows(self.study, rule, self.records)]
        return score_row(self.study, specs[0], self.split) if specs else {}

    def metric(self, task: str) -> str:
        """Return the metric of a task."""
        return next(row[task].metric for row in self.rows.values() if task in row)

    def column(self, task: str) -> str:
        """Return a task with its metric, as published columns are named."""
        return f"{task}:{self.metric(task)}"

    def is_tested(self, task: str) -> bool:
        """Tell whether a task has scores on labelled test rows."""
        return any(record.test for record in self.records if record.task == task)

    def narrowed(self, tasks: Sequence[str]) -> ScoredStudy:
        """Return the study narrowed to some of its tasks."""
        rows = {key: {task: row[task] for task in tasks if task in row} for key, row in self.rows.items()}
        kept = {key: row for key, row in rows.items() if row}
        split = self.split if any(map(self.is_tested, tasks)) else "dev"
        return ScoredStudy(self.study, self.specs, kept, tuple(tasks), split, self.published)


def score_study(study: Study, records: Sequence[Record], published: Published) -> ScoredStudy:
    """Choose every row's settings on dev. Records are of one backbone and profile.

    Where test scores are to be reported but a task has none (GLUE's test sets are unlabelled), dev scores are shown,
    and a note says so.
    """
    has_test = any(record.test for record in records)
    split = study.report_on if has_test else "dev"
    specs = list_rows(study, records)
    rows = {spec.key: score_row(study, spec, split) for spec in specs}
    # Arms without a backbone (TF-IDF) give the same result with every seed.
    fixed = {name for name, arm in study.arms.items() if not ARM_KINDS[arm.kind].needs_backbone}
    for spec in specs:
        if fixed.issuperset(record.arm for record in spec.records):
            rows[spec.key] = {task: replace(cell, is_fixed=True) for task, cell in rows[spec.key].items()}
    held = {task for row in rows.values() for task in row}
    known = [*study.tasks, *sorted(held - set(study.tasks))]
    tasks = tuple(task for task in known if task in held)
    return ScoredStudy(study, tuple(specs), {key: row for key, row in rows.items() if row}, tasks, split, published)


def score_row(study: Study, spec: RowSpec, split: str) -> Row:
    """Score a row; tasks of one run or of one sequence share one setting."""
    report, found = study.report, spec.records
    # 1. where tasks share one setting, keep the runs of the best one
    ranked = rank_settings(found, report.metric_of()) if has_one_setting(spec) else []
    kept = ranked[0] if ranked else found
    chosen = choose(kept, split, report.metric_of)
    # 2. note in each cell what it was chosen from
    if ranked and split == "dev":
        chosen = {
            task: replace(cell, candidates=list_candidates(ranked, task, report.metric_of(task)))
            for task, cell in chosen.items()
        }
    if len(kept) < len(found):
        tried = choose(found, split, report.metric_of)
        counted = ("num_settings", "num_waiting", "num_lost", "rates")
        chosen = {
            task: replace(cell, **{name: getattr(tried[task], name) for name in counted})
            for task, cell in chosen.items()
        }
    # 3. tasks without labelled test rows are shown on dev
    untested = [record for record in kept if split == "test" and record.task not in chosen]
    return chosen | choose(untested, "dev", report.metric_of)


def needs_backbone(scored: ScoredStudy, key: str) -> bool:
    """Tell whether a row needs the backbone to answer; TF-IDF does not."""
    return not all(cell.is_fixed for cell in scored.rows[key].values())


def mean_tasks(scored: ScoredStudy) -> list[str]:
    """Return the tasks of a mean: those that every row has. WNLI is shown but not averaged, as in the papers."""
    rows = scored.rows.values()
    return [task for task in averaged_tasks(scored) if rows and all(task in row for row in rows)]


def averaged_tasks(scored: ScoredStudy) -> list[str]:
    """Return all tasks that a mean may include, whether or not every row has them."""
    return [task for task in scored.tasks if task not in NOT_AVERAGED]


def published_tasks(scored: ScoredStudy) -> list[str]:
    """Return the tasks of the mean that a published table has with the same metric, so that means can be compared."""
    columns = {column for table in scored.published.tables for column in table.columns}
    return [task for task in mean_tasks(scored) if scored.column(task) in columns]


# Series: the rows of one rule by their numbers. Planned rows that were not run can be listed too, so that the line of a
# figure has a gap there.


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
