"""What is known of the runs that several plans ask for, and the files it is kept in.

A run that has a record, of whatever study, sitting or machine, has one for all who ask for it: it is lent to every arm
of every plan. A study's folder may hold files of other machines, whatever their names: what they have of its backbone
and profile counts as its own. One process writes: those that train hand their records over (`jobs.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.studies.judge.row_covariances import add_covariances
from inlay.studies.run.records import (
    FAILED,
    FINISHED,
    Record,
    add_records,
    list_files,
    merge_records,
    read_records,
    read_study,
    results_file,
    revise_records,
    short_name,
)
from inlay.studies.spec.planning import Item, Plan
from inlay.training.run.joint import JointRun


@dataclass(frozen=True)
class Places:
    """Where studies read and write."""

    results: Path
    """records, a folder for each study"""
    runs: Path
    """folders of runs, of all studies together"""


class Ledger:
    """The records of several plans, whose studies have names of their own."""

    def __init__(self, plans: Sequence[Plan], places: Places) -> None:
        self._places = places
        self._plans = {plan.study.name: plan for plan in plans}
        self._asking: dict[str, list[Item]] = {}
        self._known: dict[tuple[str, str, str], list[Record]] = {}
        for item in (item for plan in plans for item in plan.items):
            self._asking.setdefault(item.id, []).append(item)
        self._beside = {name: self._read_beside(name) for name in self._plans}
        for name in self._plans:
            self._note(name, read_records(self.file_of(name)))
        self._borrowed = self._borrow()

    def file_of(self, study: str) -> Path:
        """Where a study's records are kept."""
        plan = self._plans[study]
        return results_file(self._places.results, study, plan.backbone.name, plan.study.profile)

    def _read_beside(self, study: str) -> list[Record]:
        """What other files of a study's folder have of its plan's backbone and profile."""
        others = [path for path in list_files(self._places.results, study) if path != self.file_of(study)]
        found = (record for path in others for record in read_records(path))
        return [record for record in found if self._group_of(record) == self._group_of_plan(study)]

    @staticmethod
    def _group_of(record: Record) -> tuple[str, str, str]:
        return (record.study, record.profile, record.backbone)

    def _group_of_plan(self, study: str) -> tuple[str, str, str]:
        plan = self._plans[study]
        return (study, plan.study.profile, short_name(plan.backbone.name))

    def is_known(self, item: Item) -> bool:
        """Whether an item has its record; one that says it failed does not count."""
        return item.key in self._known

    def records(self, study: str) -> list[Record]:
        """The records of a plan's items; those of other settings, from earlier sittings, are left out."""
        wanted = {item.key for item in self._plans[study].items}
        return [
            record
            for (name, run_id, arm), records in self._known.items()
            if (name, run_id.partition("-")[0], arm) in wanted  # the later of several tasks are `<id>-1` and so on
            for record in records
        ]

    def run_ids(self, study: str) -> set[str]:
        """The runs of a plan that have records, each once however many tasks it has."""
        return {record.id.partition("-")[0] for record in self.records(study)}

    def write_borrowed(self) -> None:
        """Put what other studies' files had into those of these plans."""
        self._write(self._borrowed)
        self._borrowed = []

    def keep(self, records: Sequence[Record]) -> None:
        """Write records down, for all who ask for their runs."""
        lent = [copy for record in records for copy in self._lend(record)]
        self._write([*records, *lent])
        for record in records:
            self._drop_weights(record)

    def add_covariances(self) -> None:
        """Put into the records how their scores vary together over rows, for plans that ask for it."""
        for name in (name for name, plan in self._plans.items() if plan.study.paired_rows):
            changed = add_covariances(self.records(name), self._places.runs)
            if changed:
                self._note(name, revise_records(self.file_of(name), name, changed))

    def _write(self, records: Sequence[Record]) -> None:
        for study in dict.fromkeys(record.study for record in records):
            own = [record for record in records if record.study == study]
            self._note(study, add_records(self.file_of(study), study, own))

    def _note(self, study: str, records: Iterable[Record]) -> None:
        self._known = {key: value for key, value in self._known.items() if key[0] != study}
        for record in merge_records(records, self._beside[study]):
            if record.status != FAILED and self._is_read_alike(record, study):
                self._known.setdefault((study, record.id, record.arm), []).append(record)

    def _is_read_alike(self, record: Record, study: str) -> bool:
        """Whether a record whose settings, and id, leave open how the backbone is read came to what the plan does."""
        default = self._plans[study].backbone.default_pooling
        return bool(record.extra.get("pooling", default) == default)

    def _borrow(self) -> list[Record]:
        """The records that other arms, studies and profiles have of these plans' runs."""
        if all(self.is_known(item) for items in self._asking.values() for item in items):
            return []
        borrowed = []
        for path in list_files(self._places.results):
            borrowed += [copy for record in read_records(path) for copy in self._lend(record)]
        for record in borrowed:
            self._known.setdefault((record.study, record.id, record.arm), []).append(record)
        return borrowed

    def _lend(self, record: Record) -> list[Record]:
        """Copies of a record for those who ask for its run and have none."""
        if record.status == FAILED:
            return []
        asking = self._asking.get(record.id.partition("-")[0], ())
        return [
            _copy(record, item, self._plans[item.study])
            for item in asking
            if (self._group_of_plan(item.study), item.arm.name) != (self._group_of(record), record.arm)
            and (item.study, record.id, item.arm.name) not in self._known
            and (item.arm.kind != "spans" or "spans" in record.extra)
            and self._is_read_alike(record, item.study)
        ]

    def _drop_weights(self, record: Record) -> None:
        """Drop a fine-tuned copy of the backbone, of which many would fill the disk; each arm's best stays to answer.

        One of several tasks may be gone on from.
        """
        asking = self._asking.get(record.id, [])
        if not any(item.run is not None and item.is_finetuned for item in asking) or record.status == FAILED:
            return
        if any(isinstance(item.run, JointRun) and len(item.run.parts) > 1 for item in asking):
            return
        rivals: dict[tuple[str, str], list[Record]] = {}
        for (study, _, arm), others in self._known.items():
            finished = [other for other in others if other.task == record.task and other.status == FINISHED]
            rivals.setdefault((study, arm), []).extend(finished)
        # Of all, not of the record's own study alone: its run, and those it is compared with, may be others' best too.
        best = {
            max(others, key=lambda other: other.dev[other.metric]).id
            for (study, _), others in rivals.items()
            if others and self._plans[study].study.submission
        }
        beaten = {other.id for item in asking for other in rivals.get((item.study, item.arm.name), ())}
        for run_id in {*beaten, record.id} - best:
            (self._places.runs / run_id / "best.safetensors").unlink(missing_ok=True)


def _copy(record: Record, item: Item, plan: Plan) -> Record:
    return dataclasses.replace(
        record,
        study=item.study,
        arm=item.arm.name,
        profile=plan.study.profile,
        axes=dict(item.axes),
        # The same weights may have another name elsewhere, and a baseline has no backbone: here it is beside this one.
        backbone=short_name(plan.backbone.name),
        fingerprint=plan.backbone.fingerprint,
        backbone_parameters=plan.backbone.num_parameters,
        extra={**record.extra, "layers": plan.backbone.anatomy.num_layers},
    )


def count_read_otherwise(plan: Plan, results: Path) -> dict[str, int]:
    """Pooling -> runs of a plan's study, profile and backbone that differ from the plan's in nothing but that."""
    default, own = plan.backbone.default_pooling, (plan.study.name, plan.study.profile, plan.backbone.fingerprint)
    planned: dict[tuple[Any, ...], list[Item]] = {}
    for item in plan.items:
        planned.setdefault((item.arm.name, item.seed, repr(sorted(item.axes.items()))), []).append(item)
    found: dict[str, set[str]] = {}
    for record in read_study(results, plan.study.name):
        if (record.study, record.profile, record.fingerprint) != own or record.pooling == "auto":
            continue
        for item in planned.get((record.arm, record.seed, repr(sorted(record.axes.items()))), ()):
            pooling = item.config.train.pooling
            reads = default if pooling == "auto" else pooling
            if record.pooling != reads and record.task in item.all_tasks and _is_same_but_pooling(record, item):
                found.setdefault(record.pooling, set()).add(record.id.partition("-")[0])
    return {pooling: len(runs) for pooling, runs in found.items()}


def _is_same_but_pooling(record: Record, item: Item) -> bool:
    """Whether what a record says of method and training is an item's, how rows are read left aside."""
    for section in ("method", "train", "joint"):
        said, asked = record.config.get(section, {}), dataclasses.asdict(getattr(item.config, section))
        names = (said.keys() & asked.keys()) - {"pooling"}
        if any(_plain(said[name]) != _plain(asked[name]) for name in names):
            return False
    return True


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
