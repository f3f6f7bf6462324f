"""The plan of a study compared with its records: which runs are missing, in words, and whether a row is complete.

A planned run is an arm's setting on a task with a seed. It is done once there is a record with the same arm, task, seed
and settings that does not say it failed; a diverged run is done too. A run that several arms ask for is done for all of
them. A record of settings that the study's file no longer has belongs to no planned run, and is shown in no table
beside records that do.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from inlay.studies.judge.row_specs import NOT_AVERAGED, RowSpec, list_rows, make_rows, name_task, plain_value
from inlay.studies.judge.scores import joint_of
from inlay.studies.run.records import FAILED, Record, count_layers
from inlay.studies.spec.report_spec import SETTINGS
from inlay.studies.spec.study import ARM_KINDS, LEFT_OPEN, Study, bare_name

_MOST_LINES, _MOST_NAMES = 8, 8


@dataclass(frozen=True, eq=False)
class Planned:
    """A run that a study asks for; a multi-task run occurs once for each task."""

    run: tuple[Any, ...]
    """the key of the run, equal for all arms that ask for it"""
    arm: str
    task: str
    seed: int
    axes: Mapping[str, Any]
    settings: Mapping[str, Mapping[str, Any]]
    """settings of its method and training, alone or with other tasks, by section"""
    data: Mapping[str, Mapping[str, Any]]
    """short name of each task that may be the run's first -> the settings that choose its rows"""
    sample: int | None
    """most training rows of a task; None: all"""
    depth: int
    """layers that its arm needs; 0 once an arm that needs as many has run"""

    @property
    def place(self) -> tuple[str, int]:
        """The key that tells it apart from the other runs of its arm and task."""
        return (repr(sorted(self.axes.items())), self.seed)

    def is_met_by(self, record: Record) -> bool:
        """Tell whether a record has these settings, as far as it has them at all; open settings match anything."""
        if self.axes and record.axes != dict(self.axes):
            return False
        if self.sample is not None and record.num_train > self.sample:
            return False
        # 1. the same method and training
        for section, settings in self.settings.items():
            found = record.config.get(section, {})
            for name, value in settings.items():
                if name in found and value not in LEFT_OPEN and plain_value(found[name]) != plain_value(value):
                    return False
        # 2. the same rows; a record of several tasks has the data settings of the first
        tasks = list(self.data)
        if len(tasks) > 1:
            named = joint_of(record).get("tasks") or record.extra.get("sequence") or [record.task]
            tasks = [bare_name(task) for task in named]
        if not self.data.keys() >= set(tasks):  # `--skip-missing` drops tasks, so any of them may be the first
            return False
        read, planned = record.config.get("data", {}), dict(self.data[tasks[0]])
        answers = planned.pop("answers", ())
        if "answers" in read and _list_answers(answers) != _list_answers(read["answers"]):
            return False
        return all(plain_value(read[name]) == plain_value(value) for name, value in planned.items() if name in read)


@dataclass(frozen=True)
class Gap:
    """The missing planned runs of some rows; false if none is missing."""

    missing: Sequence[Planned]
    planned: Sequence[Planned]

    def __bool__(self) -> bool:
        return bool(self.missing)

    @property
    def count(self) -> str:
        """Describe the number: `8 of 24 planned runs are missing`."""
        return f"{_count_runs(self.missing)} of {_count_runs(self.planned)} planned runs are missing"

    @property
    def text(self) -> str:
        """Describe the number and the first of the missing runs."""
        lines = describe_runs(self.missing, self.planned)
        more = f"; {len(lines) - 2} more" if len(lines) > 2 else ""
        return f"{self.count} ({'; '.join(lines[:2])}{more})"


class Coverage:
    """A study's plan compared with its records of one backbone and profile."""

    def __init__(self, study: Study, records: Sequence[Record]) -> None:
        self._study = study
        found: dict[tuple[str, str, int], list[Record]] = {}
        for record in records:
            if record.status != FAILED:
                found.setdefault((record.arm, record.task, record.seed), []).append(record)
        planned = list(_plan(study))
        done = {
            (item.run, item.task)
            for item in planned
            if any(map(item.is_met_by, found.get((item.arm, item.task, item.seed), ())))
        }
        missing = [item for item in planned if (item.run, item.task) not in done]
        layers = count_layers(records)
        deepest = layers or max((item.depth for item in planned if (item.run, item.task) in done), default=1)
        # Arms that need more layers than the backbone has are not planned. Where records do not say how many it has, an
        # arm counts as too deep if it needs more than any that ran, once everything else is done.
        self.too_deep: dict[str, int] = {}
        """arm -> layers that it needs and the backbone lacks"""
        if layers is not None or (done and all(item.depth > deepest for item in missing)):
            self.too_deep = {item.arm: item.depth for item in missing if item.depth > deepest}
            planned, missing = ([item for item in items if item.depth <= deepest] for items in (planned, missing))
        self.planned, self.missing = (
            [dataclasses.replace(item, depth=item.depth if item.depth > deepest else 0) for item in items]
            for items in (planned, missing)
        )

    @cached_property
    def _rows(self) -> dict[str, set[tuple[Any, ...]]]:
        """Row (shown, or for claims alone) -> its planned runs; rows are made from these as from records."""
        records = _make_empty_records(self.planned)
        made = list_rows(self._study, records)
        for rule in self._study.report.rows:
            made += [] if rule.is_shown else make_rows(self._study, rule, records)
        rows: dict[str, set[tuple[Any, ...]]] = {}
        for spec in made:
            rows.setdefault(spec.key, set()).update(self.planned[int(record.id)].run for record in spec.records)
        return rows

    def find_gap(self, rows: Sequence[str], tasks: Iterable[str] | None = None) -> Gap:
        """Find the missing runs of these rows, on these tasks or on all that count in a mean.

        A `*` in the name of a row stands for anything.
        """
        keys = match_rows(self._rows, rows)
        runs = {run for key in keys for run in self._rows[key]}
        counted = set(self._study.tasks) - NOT_AVERAGED if tasks is None else set(tasks)
        missing, planned = (
            [item for item in items if item.run in runs and item.task in counted]
            for items in (self.missing, self.planned)
        )
        return Gap(missing, planned)

    @property
    def count(self) -> str:
        """Describe the number: `96 of 154 planned runs`."""
        whole = _count_runs(self.planned)
        return f"{whole - _count_runs(self.missing)} of {whole} planned runs"


def list_planned_rows(study: Study) -> list[RowSpec]:
    """List the rows of a complete study; their records have settings and no results."""
    return list_rows(study, _make_empty_records(list(_plan(study))))


def _make_empty_records(planned: Sequence[Planned]) -> list[Record]:
    """Make a record for each planned run, with the fields that select rows; its id is its position in the list."""
    empty: dict[str, Any] = {item.name: None for item in dataclasses.fields(Record)}
    records = []
    for number, item in enumerate(planned):
        own = {"id": str(number), "arm": item.arm, "task": item.task, "seed": item.seed, "axes": dict(item.axes)}
        records.append(Record(**(empty | own | {"config": dict(item.settings), "extra": {}})))
    return records


def match_rows(keys: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Find the rows of these names; a `*` in a name stands for anything."""
    return [key for key in keys if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)]


def split_planned(
    study: Study, records: Iterable[Record], old_starts: Collection[str] = ()
) -> tuple[list[Record], list[Record]]:
    """Split records into those of the study's current settings (with any seed) and others.

    Records that start from one of `old_starts`, runs of settings that their own study no longer has, are others too.
    """
    planned: dict[tuple[str, str], list[Planned]] = {}
    for item in _plan(study):
        if item.seed == 0:
            planned.setdefault((item.arm, item.task), []).append(item)
    kept: list[Record] = []
    others: list[Record] = []
    for record in records:
        is_own = any(item.is_met_by(record) for item in planned.get((record.arm, record.task), ()))
        is_own &= record.config.get("joint", {}).get("start") not in old_starts
        (kept if is_own else others).append(record)
    return kept, others


def list_missing(study: Study, records: Sequence[Record]) -> list[str]:
    """Describe what a study still lacks: how many runs, which ones, and which failed."""
    coverage = Coverage(study, records)
    lines = describe_runs(coverage.missing, coverage.planned)
    found = [f"{coverage.count} are there", *lines] if lines else []
    if coverage.too_deep:
        deep = [f"{arm} (needs {depth})" for arm, depth in coverage.too_deep.items()]
        found.append(f"left out, as the backbone has too few layers: {_list_some(deep)}")
    for status in ("diverged", "failed"):
        lost = [record for record in records if record.status == status]
        if lost:
            names = sorted({f"{record.arm} on {name_task(record.task)}" for record in lost})
            named = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            found.append(f"{len(lost)} run{'s' if len(lost) > 1 else ''} {status}: {named}")
    return found


# Data settings that do not choose rows: a run infers them, an arm gives them, or they are paths.
_NOT_ROWS = frozenset(("kind", "metric", "labels", "sample", "sample_seed", "root", "source", "dev", "test", "pairs"))


def _plan(study: Study) -> Iterator[Planned]:
    """List every arm, task, setting and seed of a study."""

    @cache
    def row_settings(task: str) -> dict[str, Any]:
        config = dataclasses.asdict(study.data_config(task, None))
        config |= {f"most_{side}": number for side, number in study.most_rows.items()}
        return {name: value for name, value in config.items() if name not in _NOT_ROWS}

    for arm, task, point in study.points():
        config, is_one_run = point.config, ARM_KINDS[arm.kind].spans_tasks
        # 1. the settings that a record of it has
        settings = {section: dataclasses.asdict(getattr(config, section)) for section in SETTINGS}
        del settings["train"]["seed"]
        if arm.source and not is_one_run:
            like = study.like.get(task)
            settings["joint"]["like"] = [f"{bare_name(task)}={like}"] if like is not None else []
        data = {bare_name(first): row_settings(first) for first in (arm.tasks if is_one_run else (task,))}
        # 2. a run for each seed
        rows = (arm.kind, arm.tasks if is_one_run else task, arm.sample, arm.source)
        run = (*rows, repr(config.method), repr(config.train), repr(config.joint))
        for seed in range(arm.seeds):
            yield Planned((*run, seed), arm.name, task, seed, point.axes, settings, data, arm.sample, arm.min_layers)


def _list_answers(given: Iterable[str]) -> set[str]:
    """List the answers (`label=text`) that differ from their label; records of single runs keep only these."""
    return {item for item in given if len(set(item.split("=", 1))) > 1}


def _count_runs(items: Iterable[Planned]) -> int:
    return len({item.run for item in items})


def describe_runs(missing: Sequence[Planned], planned: Sequence[Planned]) -> list[str]:
    """Describe missing runs: a line for arms and tasks that lack the same, `no run with epochs 10: full on CoLA, RTE`.

    Arms that need more layers than any that has run are marked.
    """
    # 1. what each arm lacks on each task
    wanted: dict[tuple[str, str], list[Planned]] = {}
    absent: dict[tuple[str, str], list[Planned]] = {}
    for items, groups in ((planned, wanted), (missing, absent)):
        for item in items:
            groups.setdefault((item.arm, item.task), []).append(item)
    # 2. arms that lack the same on the same tasks share a line
    by_arm: dict[tuple[str, str], list[str]] = {}
    for (arm, task), own in absent.items():
        depth = f" (if the backbone has {own[0].depth} layers)" if own[0].depth > 1 else ""
        by_arm.setdefault((_describe_lack(own, wanted[arm, task]), arm + depth), []).append(name_task(task))
    by_tasks: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (what, arm), tasks in by_arm.items():
        by_tasks.setdefault((what, tuple(tasks)), []).append(arm)
    lines = [f"{what}: {_list_some(arms)} on {_list_some(tasks)}" for (what, tasks), arms in by_tasks.items()]
    if len(lines) <= _MOST_LINES:
        return lines
    rest = dict.fromkeys(arm for arms in list(by_tasks.values())[_MOST_LINES - 1 :] for arm in arms)
    return [*lines[: _MOST_LINES - 1], f"other runs missing: {_list_some(list(rest))}"]


def _describe_lack(missing: Sequence[Planned], planned: Sequence[Planned]) -> str:
    """Describe what an arm lacks on a task: everything, the values without a run, or a number of runs."""
    if len(missing) == len(planned):
        return "not run"
    lacking, whole = (_values(items) for items in (missing, planned))
    if math.prod(map(len, lacking.values())) == len(missing):
        return f"no run with {_name_values({name: own for name, own in lacking.items() if own != whole[name]})}"
    absent = {item.place for item in missing}
    held = _values([item for item in planned if item.place not in absent])
    never = {name: [value for value in values if value not in held[name]] for name, values in whole.items()}
    named = [_name_values({name: values}) for name, values in never.items() if values]
    more = f", among them all with {' and all with '.join(named)}" if named else ""
    return f"{len(missing)} of {len(planned)} runs missing{more}"


def _name_values(values: Mapping[str, Sequence[Any]]) -> str:
    """Describe values: `lr 0.0001 and seeds 1, 2`."""
    names = {name: "seeds" if name == "seed" and len(own) > 1 else name for name, own in values.items()}
    shown = {
        name: [f"{value:g}" if isinstance(value, float) else str(value) for value in values[name]] for name in values
    }
    return " and ".join(f"{names[name]} {', '.join(own)}" for name, own in shown.items())


def _values(items: Sequence[Planned]) -> dict[str, list[Any]]:
    """Map each axis, and `seed`, to the values of these runs."""
    found: dict[str, list[Any]] = {}
    for item in items:
        for name, value in (*item.axes.items(), ("seed", item.seed)):
            values = found.setdefault(name, [])
            if value not in values:
                values.append(value)
    return found


def _list_some(names: Sequence[str]) -> str:
    kept = names if len(names) <= _MOST_NAMES else names[: _MOST_NAMES - 1]
    return ", ".join(kept) + (f" and {len(names) - len(kept)} more" if len(kept) < len(names) else "")
