"""Conducting a study: what is missing is trained, what is there is not, and every result is on disk once it is known.

A run that has a record, of whatever study, sitting or machine, is not trained again; its record is copied. A run whose
folder is finished is read back, and a cohort that was stopped goes on. With a deadline the most valuable work is done
first, units of work are cut to what is likely to fit, and what is in hand at the deadline is stopped and saved.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.data.tasks import Task
from inlay.errors import InlayError
from inlay.research.arms import ARM_KINDS
from inlay.research.planning import Item, Plan, Unit
from inlay.research.recording import Origin, Recorder, has_diverged, list_notes, name_processor
from inlay.research.records import FAILED, FINISHED, Record, add_records, read_records, results_file
from inlay.training import FitSettings, Result, fit
from inlay.training.cohort import Watcher
from inlay.training.joint import AnyMember, AnyRun, JointRun
from inlay.training.loop import Interrupted
from inlay.training.materialize import start_from
from inlay.training.resume import find_stopped
from inlay.training.run import is_finished, read_result

if TYPE_CHECKING:
    from inlay.model import Backbone

_SAVE_SECONDS = 60.0  # a state holds every slot's weights and moments: at each epoch's end it costs more than the epoch
_HEARD = ("on_encode", "on_compile", "on_start", "on_prefix", "on_prefix_full", "on_epoch", "on_enter", "on_fallback")


@dataclass(frozen=True)
class Places:
    """Where a study reads and writes."""

    results: Path
    """records, a folder for each study"""
    runs: Path
    """folders of runs, of all studies together"""


@dataclass
class Outcome:
    """What a sitting came to."""

    records: list[Record] = field(default_factory=list)
    """all that the plan asks for and that there is"""
    missing: list[Item] = field(default_factory=list)
    failed: list[tuple[Item, str]] = field(default_factory=list)
    """what could not be done, and why; it is tried again next time"""
    num_trained: int = 0
    """runs that got their record in this sitting"""
    seconds: float = 0.0


def conduct(
    plan: Plan,
    backbone: Backbone,
    places: Places,
    *,
    deadline: float | None = None,
    commit: str | None = None,
    stage: Stage | None = None,
) -> Outcome:
    """Do what is missing of a plan, the most valuable first, until `deadline` (of `time.monotonic`), if there is one.

    Ctrl-C stops at once with everything saved: KeyboardInterrupt, and the same call goes on from there.
    """
    began = time.monotonic()
    recorder = Recorder(plan, backbone, Origin.here(backbone, commit))
    sitting = _Sitting(recorder, places, stage or Stage(), deadline)
    before = len(sitting.run_ids())
    for number, unit in enumerate(plan.units, start=1):
        todo = sitting.cut(sitting.find_todo(unit))
        if sitting.is_late:
            break
        if todo.items:
            sitting.stage.begin(number, len(plan.units), todo)
            sitting.do(todo)
    records = sitting.records()
    return Outcome(
        records=records,
        missing=[item for item in plan.items if not sitting.is_known(item)],
        failed=sitting.failed,
        num_trained=len(sitting.run_ids()) - before,
        seconds=time.monotonic() - began,
    )


def list_todo(plan: Plan, backbone: Backbone, places: Places) -> list[Unit]:
    """The units that `conduct` would do, with the items it would do of them."""
    sitting = _Sitting(Recorder(plan, backbone, Origin.here(backbone)), places, Stage())
    return [todo for todo in map(sitting.find_todo, plan.units) if todo.items]


class Stage:
    """Hears how a study goes. This one is deaf; the command line's draws progress."""

    def begin(self, number: int, num_units: int, unit: Unit) -> None:
        """A unit of work begins."""

    def watch(self, unit: Unit) -> Watcher:
        """Who hears how its training goes."""
        return Watcher()

    def end(self, unit: Unit, seconds: float) -> None:
        """A unit of work is done, or was stopped."""

    def warn(self, message: str) -> None:
        """Something failed, and the study goes on without it."""


class _Sitting:
    """One call of `conduct`: the records so far, and how each kind of work is done."""

    def __init__(self, recorder: Recorder, places: Places, stage: Stage, deadline: float | None = None) -> None:
        self.plan, self.backbone, self._recorder = recorder.plan, recorder.backbone, recorder
        self.places, self.stage, self.deadline = places, stage, deadline
        study = self.plan.study
        self.file = results_file(places.results, study.name, self.backbone.name, study.profile)
        self.known: dict[tuple[str, str], list[Record]] = {}
        self.failed: list[tuple[Item, str]] = []
        self._rates: dict[bool, float] = {}
        self._note(read_records(self.file))
        self._borrow()

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def is_known(self, item: Item) -> bool:
        """Whether an item has its record; one that says it failed does not count."""
        return (item.id, item.arm.name) in self.known

    def records(self) -> list[Record]:
        """The records of the plan's items; those of other settings, from earlier sittings, are left out."""
        wanted = {(item.id, item.arm.name) for item in self.plan.items}
        return [
            record
            for (run_id, arm), records in self.known.items()
            if (run_id.partition("-")[0], arm) in wanted  # the later of several tasks are `<id>-1` and so on
            for record in records
        ]

    def run_ids(self) -> set[str]:
        """The runs that have records, each once however many tasks it has."""
        return {record.id.partition("-")[0] for record in self.records()}

    def find_todo(self, unit: Unit) -> Unit:
        """What of a unit has no record yet; with all that trained together before, if it was stopped on the way."""
        todo = unit.take(item for item in unit.items if not self.is_known(item))
        runs = [item.run for item in unit.items if item.run is not None]
        unfinished = [run for run in runs if not is_finished(self.places.runs / run.id)]
        if not todo.items or find_stopped(self.places.runs / "cohorts", runs, unfinished) is None:
            return todo
        return unit.take(item for item in unit.items if item in todo.items or is_finished(self.places.runs / item.id))

    def cut(self, unit: Unit) -> Unit:
        """As much of a unit as is likely to be done by the deadline, at least one run of it."""
        rate = self._rates.get(unit.is_solo)
        if self.deadline is None or rate is None or any(self.is_known(item) for item in unit.items):
            return unit  # a cohort that was stopped goes on whole
        left = (self.deadline - time.monotonic()) / rate
        ids: set[str] = set()
        for item in unit.items:
            if item.id not in ids and ids and item.cost > left:
                break
            left -= 0.0 if item.id in ids else item.cost
            ids.add(item.id)
        return unit.take(item for item in unit.items if item.id in ids)

    def do(self, unit: Unit) -> None:
        """Do a unit's work and keep its records. What a user can mend fails alone; all else stops the study."""
        began = time.monotonic()
        try:
            self._work(unit)
        except Interrupted:
            self._keep_finished(unit)
            if not self.is_late:
                raise
        except InlayError as error:
            self.stage.warn(f"{unit.describe()}: {error}")
            self._keep_finished(unit)
            lost = [item for item in unit.items if not self.is_known(item)]
            self.failed += [(item, error.message) for item in lost]
            self._keep([self._recorder.record_failure(item, error) for item in lost])
        seconds = time.monotonic() - began
        if unit.cost and not self.is_late:
            self._rates[unit.is_solo] = seconds / unit.cost
        self.stage.end(unit, seconds)

    def _work(self, unit: Unit) -> None:
        if unit.kind == "runs":
            self._train(unit)
        else:
            _WORKERS[unit.kind](self, unit.items[0])

    def _train(self, unit: Unit) -> None:
        for item in unit.items:
            has_tests = item.run is not None and any(part.task.test is not None for part in item.run.parts)
            if (item.arm.kind == "spans" or has_tests) and not self.is_known(item):
                self._forget_bare(item.id)
        watch = _Chorus(_Keeper(self, unit), self.stage.watch(unit))
        self._train_sources(unit)
        runs = [self._started(item) for item in unit.items if item.run is not None]
        fit(runs, self.backbone, self.places.runs, self._settings, watch)
        self._keep_finished(unit)

    @property
    def _settings(self) -> FitSettings:
        return FitSettings(save_seconds=_SAVE_SECONDS, draw_curves=False, **self.plan.study.fit)

    def _train_sources(self, unit: Unit) -> None:
        """Train the runs of other studies that those of this unit go on from, where their weights are not here."""
        sources = {item.source.id: item.source for item in unit.items if item.source is not None}
        for source in sources.values():
            self._forget_bare(source.id)
        if any(not is_finished(self.places.runs / run_id) for run_id in sources):
            watch = _Chorus(_Keeper(self, Unit("runs", ())), self.stage.watch(unit))
            fit(list(sources.values()), self.backbone, self.places.runs, self._settings, watch)

    def _started(self, item: Item) -> AnyRun:
        """The run of an item, with the weights it goes on from."""
        assert item.run is not None
        if item.source is None or not isinstance(item.run, JointRun):
            return item.run
        names = [part.name for part in item.run.parts]
        start = start_from(self.places.runs / item.source.id, item.run.config, names)
        return dataclasses.replace(item.run, start=start)

    def _forget_bare(self, run_id: str) -> None:
        """Let a run be trained again whose weights, dropped after its record was kept, are needed once more."""
        folder = self.places.runs / run_id
        is_bare = is_finished(folder) and not (folder / "best.safetensors").is_file()
        result = read_result(folder) if is_bare else None
        if result is not None and result.dev_metric is not None:
            (folder / "result.json").unlink()

    def _keep_finished(self, unit: Unit) -> None:
        for item in unit.items:
            if item.run is not None and not self.is_known(item):
                result = read_result(self.places.runs / item.id)
                if result is not None:
                    self._keep(self._describe(item, result, len({item.id for item in unit.items})))

    def _describe(self, item: Item, result: Result, num_together: int) -> list[Record]:
        """The records of a trained run; scores the test rows, and takes its spans out if the arm asks for that."""
        assert item.run is not None
        extra: dict[str, Any] = {"together": num_together}
        if isinstance(item.run, JointRun):
            records = self._recorder.record_joint(item, result, extra)
        else:
            if item.arm.kind == "spans" and not has_diverged(result):
                extra["spans"] = self._score_spans(item, item.run.task)
            records = [self._recorder.record_result(item, result, extra)]
        if item.run.spec.is_solo and len(records) == 1:  # one of several tasks may be gone on from
            self._drop_weights(records[0])
        return records

    def _drop_weights(self, record: Record) -> None:
        """Drop a fine-tuned copy of the backbone, of which every run would fill the disk; the best stays to answer."""
        rivals = [
            other
            for others in self.known.values()
            for other in others
            if (other.arm, other.task) == (record.arm, record.task) and other.status == FINISHED
        ]
        contenders = [item for item in (*rivals, record) if item.status == FINISHED]
        keeps = self.plan.study.submission and bool(contenders)
        best = max(contenders, key=lambda item: item.dev[item.metric]) if keeps else None
        for other in (*rivals, record):
            if best is None or other.id != best.id:
                (self.places.runs / other.id / "best.safetensors").unlink(missing_ok=True)
        (self.places.runs / record.id / "last.safetensors").unlink(missing_ok=True)

    def _score_spans(self, item: Item, task: Task) -> dict[str, float]:
        """`first-last` -> dev score without the adapters of these layers; under `whole` that with all."""
        scores = ARM_KINDS["spans"].find()(self.backbone, self.places.runs / item.id, task)
        return {"whole" if span is None else f"{span[0]}-{span[1]}": value for span, value in scores.items()}

    def _score_baseline(self, item: Item) -> None:
        task = self.plan.tasks[item.task]
        found = ARM_KINDS["baseline"].find()(task)
        record = self._recorder.record(
            item,
            task,
            trained_parameters=found.num_parameters,
            dev=found.metrics["dev"],
            test=found.metrics.get("test"),
            seconds=found.seconds,
            hardware=name_processor(),
            extra={"notes": [*list_notes(task), *found.notes], "tried": found.tried},
        )
        self._keep([record])

    def _conduct_sequence(self, item: Item) -> None:
        """One network through all tasks: a record for each, as the function gives them, completed with the rest."""
        tasks = [self.plan.tasks[name] for name in item.arm.tasks if name in self.plan.tasks]
        watch = _Chorus(_Keeper(self, Unit("sequence", ())), self.stage.watch(Unit("sequence", (item,))))
        conduct_sequence = ARM_KINDS["sequence"].find()
        found = conduct_sequence(self.backbone, tasks, item.config, self.places.runs / item.id, watch)
        records = []
        for number, given in enumerate(found):
            known = {key: value for key, value in dict(given).items() if key not in ("id", "study", "arm", "profile")}
            task = self.plan.tasks[known.pop("task")]
            extra = {**known.pop("extra", {}), "sequence": [other.name for other in tasks]}
            known["id"] = f"{item.id}-{number}" if number else item.id
            records.append(self._recorder.record(item, task, extra=extra, **known))
        self._keep(records)

    def _keep(self, records: Sequence[Record]) -> None:
        self._note(add_records(self.file, self.plan.study.name, records))

    def _note(self, records: Iterable[Record]) -> None:
        self.known = {}
        for record in records:
            if record.status != FAILED:
                self.known.setdefault((record.id, record.arm), []).append(record)

    def _borrow(self) -> None:
        """Copy the records that other arms, studies and profiles have of this plan's runs."""
        wanted: dict[str, list[Item]] = {}
        for item in self.plan.items:
            if not self.is_known(item):
                wanted.setdefault(item.id, []).append(item)
        if not wanted:
            return
        borrowed = []
        for path in sorted(self.places.results.glob("*/*.json")):
            if '"records"' not in path.read_text(encoding="utf8", errors="replace"):
                continue
            for record in read_records(path):
                asking = wanted.get(record.id.partition("-")[0], ())
                borrowed += [self._lend(record, item) for item in asking if _serves(record, item)]
        if borrowed:
            self._keep(borrowed)

    def _lend(self, record: Record, item: Item) -> Record:
        study = self.plan.study
        own = {"study": study.name, "arm": item.arm.name, "profile": study.profile, "axes": dict(item.axes)}
        return Record.from_json({**record.to_json(), **own})


# Kind of unit -> how it is done, where it is not trained in a cohort.
_WORKERS: dict[str, Callable[[_Sitting, Item], None]] = {
    "baseline": _Sitting._score_baseline,
    "sequence": _Sitting._conduct_sequence,
}


def _serves(record: Record, item: Item) -> bool:
    """Whether another arm's record says all that this item's would."""
    return record.status != FAILED and (item.arm.kind != "spans" or "spans" in record.extra)


class _Keeper(Watcher):
    """Keeps a run's record as soon as it has ended, where that needs no more work, and looks at the clock."""

    def __init__(self, sitting: _Sitting, unit: Unit) -> None:
        self._sitting, self._unit, self._has_asked = sitting, unit, False

    def on_step(self, cohort: Any, num_rows: int) -> None:
        if self._sitting.is_late and not self._has_asked:
            self._has_asked = True
            if threading.current_thread() is not threading.main_thread():
                raise Interrupted
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C: the step in hand is finished and saved

    def on_end(self, member: AnyMember) -> None:
        has_tests = any(part.task.test is not None for part in member.run.parts)
        if has_tests or any(item.arm.kind == "spans" for item in self._unit.items):
            return  # more is computed with its weights, once the cohort has ended
        self._sitting._keep_finished(self._unit.take(item for item in self._unit.items if item.id == member.run.id))


class _Chorus(Watcher):
    """Several that hear as one."""

    def __init__(self, *watchers: Watcher) -> None:
        for name in (*_HEARD, "on_step", "on_end"):
            setattr(self, name, _tell([getattr(watcher, name) for watcher in watchers]))


def _tell(listeners: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def tell(*heard: Any, **named: Any) -> None:
        for listener in listeners:
            listener(*heard, **named)

    return tell
