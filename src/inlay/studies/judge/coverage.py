"""The plan of a study compared with its records: what is missing, in words, and whether a row is complete.

A planned run is an arm's setting on a task with a seed. It is there once a record has the same arm, task and seed, the
same values on the arm's axes and no other setting than the arm's, unless that says it failed; one that diverged has
come to its end. What several arms ask for is one run, and there for all of them. A record of settings that the study's
file no longer has is of no run of the plan, and stands in no table beside those that are.
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
from inlay.studies.spec.arms import ARM_KINDS
from inlay.studies.spec.report_spec import SETTINGS
from inlay.studies.spec.study import LEFT_OPEN, Study, bare_name

_MOST_LINES, _MOST_NAMES = 8, 8


@dataclass(frozen=True, eq=False)
class Planned:
    """A run that a study asks for; a multi-task run occurs once for each task."""

    run: tuple[Any, ...]
    """the key that tells runs apart, whichever arm asks for them"""
    arm: str
    task: str
    seed: int
    axes: Mapping[str, Any]
    settings: Mapping[str, Mapping[str, Any]]
    """settings of its method and training, alone or with other tasks, by section"""
    data: Mapping[str, Mapping[str, Any]]
    """short name of a possible first task -> the settings that choose its rows"""
    sample: int | None
    """most training rows of a task; None: all"""
    depth: int
    """layers that its arm needs; 0 if an arm that needs as many has run"""

    @property
    def place(self) -> tuple[str, int]:
        """Return the key that tells it apart from the others of its arm and task."""
        return (repr(sorted(self.axes.items())), self.seed)

    def is_met_by(self, record: Record) -> bool:
        """Tell whether a record has this setting, as far as it says; open settings of the plan match anything."""
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
        # 2. the same rows: the data settings of a record of several tasks are those of the first
        tasks = list(self.data)
        if len(tasks) > 1:
            named = joint_of(record).get("tasks") or record.extra.get("sequence") or [record.task]
            tasks = [bare_name(task) for task in named]
        if not self.data.keys() >= set(tasks):  # `--skip-missing` leaves some tasks out, so the first may be another
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
        # Where records do not say how many layers the backbone has, it is too shallow for arms of more layers than any
        # that ran once all else is there; what it is too shallow for is in no plan.
        self.too_deep: dict[str, int] = {}
        """arm -> layers that it needs and the backbone has not"""
        if layers is not None or (done and all(item.depth > deepest for item in missing)):
            self.too_deep = {item.arm: item.depth for item in missing if item.depth > deepest}
            planned, missing = ([item for item in items if item.depth <= deepest] for items in (planned, missing))
        self.planned, self.missing = (
            [dataclasses.replace(item, depth=item.depth if item.depth > deepest else 0) for item in items]
            for items in (planned, missing)
        )

    @cached_property
    def _rows(self) -> dict[str, set[tuple[Any, ...]]]:
        """Row, also one for claims alone -> its planned runs; rows are made of these as of records."""
        records = _pretend(self.planned)
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
    """List the rows of a complete study; their records are empty but for settings."""
    return list_rows(study, _pretend(list(_plan(study))))


def _pretend(planned: Sequence[Planned]) -> list[Record]:
    """Make records that planned runs would have, with the fields that tables sort rows by, and their numbers as ids."""
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

    So are those that go on from one of `old_starts`: runs of settings that their own study has not.
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
    """Describe what a study still lacks: how many runs, which, and the failed ones."""
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


# Data settings that do not choose rows: found out by a run, given by an arm, or paths.
_NOT_ROWS = frozenset(("kind", "metric", "labels", "sample", "sample_seed", "root", "source", "dev", "test", "pairs"))


def _plan(study: Study) -> Iterator[Planned]:
    """List every arm, task, setting and seed; multi-task runs have the arm's own grid, as in `planning.py`."""

    @cache
    def row_settings(task: str) -> dict[str, Any]:
        config = dataclasses.asdict(study.data_config(task, None))
        config |= {f"most_{side}": number for side, number in study.most_rows.items()}
        return {name: value for name, value in config.items() if name not in _NOT_ROWS}

    for name, arm in study.arms.items():
        is_one = ARM_KINDS[arm.kind].spans_tasks
        made: dict[str, Any] = {}
        for task in arm.tasks:
            own = {} if is_one else study.per_task.get(task, {})
            data = {bare_name(first): row_settings(first) for first in (arm.tasks if is_one else (task,))}
            if repr(own) not in made:
                made[repr(own)] = arm.points(own)
            for point in made[repr(own)]:
                config = point.config
                rows = (arm.kind, arm.tasks if is_one else task, arm.sample, arm.source)
                run = (*rows, repr(config.method), repr(config.train), repr(config.joint))
                settings = {section: dataclasses.asdict(getattr(config, section)) for section in SETTINGS}
                del settings["train"]["seed"]
                if arm.source and not is_one:
                    like = study.like.get(task)
                    settings["joint"]["like"] = [f"{bare_name(task)}={like}"] if like is not None else []
                for seed in range(arm.seeds):
                    yield Planned(
                        (*run, seed), name, task, seed, point.axes, settings, data, arm.sample, arm.min_layers
                    )


def _list_answers(given: Iterable[str]) -> set[str]:
    """List the answers that differ from their label, as `label=text`; records of single runs have only these."""
    return {item for item in given if len(set(item.split("=", 1))) > 1}


def _count_runs(items: Iterable[Planned]) -> int:
    return len({item.run for item in items})


def describe_runs(missing: Sequence[Planned], planned: Sequence[Planned]) -> list[str]:
    """Describe missing runs: a line for arms and tasks that lack the same, `no run with epochs 10: full on CoLA, RTE`.

    An arm that needs more layers than any that has run is said to.
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
        by_arm.setdefault((_name_places(own, wanted[arm, task]), arm + depth), []).append(name_task(task))
    by_tasks: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (what, arm), tasks in by_arm.items():
        by_tasks.setdefault((what, tuple(tasks)), []).append(arm)
    lines = [f"{what}: {_list_some(arms)} on {_list_some(tasks)}" for (what, tasks), arms in by_tasks.items()]
    if len(lines) <= _MOST_LINES:
        return lines
    rest = dict.fromkeys(arm for arms in list(by_tasks.values())[_MOST_LINES - 1 :] for arm in arms)
    return [*lines[: _MOST_LINES - 1], f"other runs missing: {_list_some(list(rest))}"]


def _name_places(missing: Sequence[Planned], planned: Sequence[Planned]) -> str:
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
