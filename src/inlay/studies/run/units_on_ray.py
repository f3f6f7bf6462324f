"""Runs studies on the machines of a Ray cluster: this process claims units of work and sends each as a Ray task.

The session is an ordinary one (`session.py`), with a claim for each unit that was sent, so that other sessions on the
same folders leave its runs alone. A task gets its unit with all rows, so the other machines need no data. Only this
process writes records.

- A machine that sees the folder of runs trains in it and sends each record as soon as its run ends. If the machine
  dies, the unit is started again on another one and continues from the last resume state.
- Any other machine trains in a temporary folder, and sends run folders and records back when the unit ends.

The deadline and Ctrl-C stop a task at its next step, with everything saved. A machine with another version of Inlay or
another backbone ends the session before it trains.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.cluster import (
    RETRIES,
    PackedError,
    RaySettings,
    check_versions,
    connect,
    count_places,
    first_error_line,
    load_same_backbone,
    marked,
    own_versions,
    pack_error,
    read_folders,
    start_relay,
    unpack_error,
    write_files,
)
from inlay.data import Task
from inlay.errors import InlayError, LostProcess
from inlay.model import Backbone
from inlay.studies.run.records import Record, StudyDirs
from inlay.studies.run.session import Deadline, Session, SessionResult, StudyProgress
from inlay.studies.run.units import Unit, UnitRunner
from inlay.studies.run.worker_processes import noting_interrupts, send_event
from inlay.studies.spec.planning import PlannedRun, StudyPlan
from inlay.studies.spec.study import Study
from inlay.training import (
    Event,
    Interrupted,
    StepTaken,
    current_commit,
    is_finished,
)

_LISTEN_SECONDS = 0.5
_STOP_SECONDS = 120.0
"""longest time for a task to save its work"""
_MOST_LOST = 3
"""so many units lost in a row end the session: others would be lost for the same cause"""


def run_studies_on_ray(
    plans: Sequence[StudyPlan],
    dirs: StudyDirs,
    where: RaySettings,
    *,
    device: str | None = None,
    deadline: float | None = None,
    commit: str | None = None,
    progress: StudyProgress | None = None,
) -> SessionResult:
    """Do what `run_studies` does, on the machines of a cluster. `device` is that of each, by default its GPU.

    A cluster that is not there, or has no machine with room for a unit, is refused before the first run.
    """
    ray = connect(where.address)
    num_places = where.num_groups or count_places(ray, where)
    commit = current_commit() if commit is None else commit
    session = Session(plans, dirs, deadline=Deadline(deadline), commit=commit, num_jobs=num_places, is_spread=True)
    if session.has_work:
        with marked(dirs.runs) as mark:
            common = _Common(dirs.runs.absolute(), mark, own_versions(), device, commit)
            _Dispatcher(ray, session, common, where, num_places, progress or StudyProgress()).run()
    return session.sum_up_all()


@dataclass(frozen=True)
class _Common:
    """The settings that the tasks of a session have in common."""

    runs: Path
    mark: str
    """a file in `runs`; a machine that sees it shares the folder"""
    versions: tuple[str, ...]
    device: str | None
    commit: str


@dataclass(frozen=True)
class _PlanPart:
    """The part of a plan that a task needs; the backbone is opened there."""

    study: Study
    backbone: str
    fingerprint: str
    tasks: Mapping[str, Task]


@dataclass(frozen=True)
class _UnitOrder:
    """A unit of work, with everything that another machine needs for it."""

    number: int
    unit: Unit
    plans: tuple[_PlanPart, ...]
    sources: tuple[str, ...]
    """the runs that it starts from"""
    folders: tuple[Any, ...]
    """finished run folders, in Ray's memory, for a machine that does not share the folder of runs"""


@dataclass(frozen=True)
class _UnitOutcome:
    """The outcome of a task; `error` is set if every other unit would fail for the same reason."""

    failed: list[tuple[tuple[str, str, str], str]] = field(default_factory=list)
    """the keys of failed items, with the reason"""
    is_stopped: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    error: PackedError | None = None


@dataclass(eq=False)
class _Sent:
    """A unit that was sent: its claim, and its state as its task reported it."""

    order: _UnitOrder
    claim: contextlib.ExitStack
    num_left: int
    is_begun: bool = False
    began: float = field(default_factory=time.monotonic)
    at: str = ""
    """the run that entered training last"""


class _Dispatcher:
    """Sends units to the cluster, listens to their tasks, and takes back the results."""

    def __init__(
        self, ray: Any, session: Session, common: _Common, where: RaySettings, num_places: int, progress: StudyProgress
    ) -> None:
        self._ray, self._session, self._common, self._progress = ray, session, common, progress
        self._do = ray.remote(num_cpus=where.num_cpus, num_gpus=where.num_gpus, max_retries=RETRIES)(_do_unit)
        self._num_places = num_places
        self._items = {item.key: item for plan in session.plans.values() for item in plan.items}
        self._relay = start_relay(ray)
        self._sent: dict[Any, _Sent] = {}
        self._num_sent, self._num_begun, self._num_rows = 0, 0, 0
        self._lost: list[str] = []
        """descriptions of units that Ray gave up, since a unit was last finished"""
        self._refusal: InlayError | None = None
        self._folders: dict[str, Any] = {}

    def run(self) -> None:
        """Do all the work, or what fits before the deadline. Ctrl-C stops all tasks with everything saved."""
        wanted = [item for unit in self._session.list_units() for item in unit.items]
        with noting_interrupts() as asked:
            try:
                self._fill()
                while self._sent and not (asked.is_set() or self._is_to_end):
                    if self._listen(wanted):
                        self._fill()
                if self._session.has_work and not (asked.is_set() or self._is_to_end):
                    self._progress.warn("other processes are working on what is left")
            finally:
                self._stop(wanted)
        if asked.is_set():
            raise KeyboardInterrupt
        if self._refusal is not None:
            raise self._refusal
        if len(self._lost) >= _MOST_LOST:
            raise LostProcess(
                f"units of work were lost one after another: {'; '.join(self._lost)}",
                "read why in Ray's log, or run it without `--on`; the same command continues from there",
            )

    @property
    def _is_to_end(self) -> bool:
        return self._session.deadline.is_late or self._refusal is not None or len(self._lost) >= _MOST_LOST

    def _fill(self) -> None:
        """Claim and send units until every place is taken."""
        while len(self._sent) < self._num_places and not self._is_to_end:
            with contextlib.ExitStack() as claim:
                unit, num_left = claim.enter_context(self._session.claim_next())
                if unit is None:
                    return
                order = self._make_order(unit)
                reference = self._do.remote(order, self._common, self._relay)
                self._sent[reference] = _Sent(order, claim.pop_all(), num_left)  # the claim is held until the end

    def _make_order(self, unit: Unit) -> _UnitOrder:
        items = (*unit.items, *unit.resumed_with)
        parts = []
        for name in dict.fromkeys(item.study for item in items):
            plan = self._session.plans[name]
            used = {task for item in items for task in (item.task, *item.all_tasks)}
            tasks = {task: rows for task, rows in plan.tasks.items() if task in used}
            parts.append(_PlanPart(plan.study, plan.backbone.name, plan.backbone.fingerprint, tasks))
        sources = tuple(dict.fromkeys(item.source.id for item in items if item.source is not None))
        finished = [run_id for run_id in (*sources, *sorted(unit.run_ids)) if is_finished(self._common.runs / run_id)]
        for run_id in finished:
            if run_id not in self._folders:
                self._folders[run_id] = self._ray.put(read_folders(self._common.runs, [run_id]))
        self._num_sent += 1
        folders = tuple(self._folders[run_id] for run_id in finished)
        return _UnitOrder(self._num_sent, unit, tuple(parts), sources, folders)

    def _listen(self, wanted: Sequence[PlannedRun]) -> bool:
        """Handle what arrives within a short time, and report the overall progress; return whether a task ended."""
        ready, _ = self._ray.wait(list(self._sent), timeout=_LISTEN_SECONDS)
        by_number = {sent.order.number: sent for sent in self._sent.values()}
        for number, what, value in self._ray.get(self._relay.take.remote()):
            if number in by_number:
                self._hear(by_number[number], what, value)
        for reference in ready:
            self._take_back(self._sent.pop(reference), reference)
        self._session.known.refresh()
        num_done = sum(map(self._session.known.is_known, wanted))
        num_busy = sum(sent.is_begun for sent in self._sent.values())
        self._progress.tell(num_done, len(wanted), num_busy, self._num_rows)
        self._num_rows = 0
        return bool(ready)

    def _hear(self, sent: _Sent, what: str, value: Any) -> None:
        if what == "begin" and not sent.is_begun:
            sent.is_begun, sent.began = True, time.monotonic()
            self._num_begun += 1
            self._progress.begin(self._num_begun, self._num_begun + sent.num_left - 1, sent.order.unit)
        elif what == "begin":
            self._progress.warn(f"{sent.order.unit.describe()}: its machine or process died; another one continues it")
        elif what == "enter":
            sent.at = value
        elif what == "rows":
            self._num_rows += value
        elif what == "warn":
            self._progress.warn(value)
        elif what == "keep":
            self._keep(value)

    def _keep(self, records: Sequence[Record]) -> None:
        """Write records, each once: a unit that was started again sends its earlier records again."""
        is_known = self._session.known.is_known
        keys = [(record.study, record.id.partition("-")[0], record.arm) for record in records]
        new = [record for key, record in zip(keys, records, strict=True) if not is_known(self._items[key])]
        if new:
            self._session.known.add(new)

    def _take_back(self, sent: _Sent, reference: Any) -> None:
        """Take a task's results, and release its claim once its records are written: other sessions then read them."""
        with sent.claim:
            try:
                outcome: _UnitOutcome = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                self._lose(sent, error)
                return
            write_files(self._common.runs, outcome.files)
            self._keep(outcome.records)
            unit, seconds = sent.order.unit, time.monotonic() - sent.began
            if outcome.error is not None:
                self._refusal = self._refusal or unpack_error(outcome.error)
            elif outcome.is_stopped:
                self._progress.end(unit, seconds)
            else:
                self._lost = []
                failed = [(self._items[key], message) for key, message in outcome.failed]
                self._session.note_end(unit, failed, seconds, self._progress)

    def _lose(self, sent: _Sent, error: Exception) -> None:
        """Record the runs of a task that Ray gave up as failed."""
        unit = sent.order.unit
        lost = [item for item in unit.items if not self._session.known.is_known(item)]
        if unit.is_sequential:  # of copies trained one after another it was training one
            lost = [item for item in lost if item.id == sent.at] or lost
        reason = first_error_line(error)
        self._lost.append(f"`{unit.describe()}`: {reason}")
        self._progress.warn(f"{unit.take(lost).describe() if lost else unit.describe()}: {reason}")
        self._session.runner.record_failure(lost, LostProcess(reason, "Ray's log says more"))

    def _stop(self, wanted: Sequence[PlannedRun]) -> None:
        """Ask all tasks to save their work, and wait for their end; tasks that have not begun are cancelled."""
        until = time.monotonic() + _STOP_SECONDS
        try:
            if self._sent:
                self._ray.get(self._relay.stop.remote())
            while self._sent and time.monotonic() < until:
                for reference, sent in list(self._sent.items()):
                    if not sent.is_begun:
                        self._drop(reference)
                if self._sent:
                    self._listen(wanted)
        finally:
            for reference in list(self._sent):
                self._drop(reference)
            self._ray.kill(self._relay)

    def _drop(self, reference: Any) -> None:
        self._ray.cancel(reference, force=True)
        self._sent.pop(reference).claim.close()


def _do_unit(order: _UnitOrder, common: _Common, relay: Any) -> _UnitOutcome:
    """Train and score a unit on the machine where Ray put it."""
    import ray

    reporter = _UnitReporter(ray, relay, order.number)
    kept: list[Record] = []
    with contextlib.ExitStack() as stack:
        # 1. open the plans, and the folder to train in
        plans: dict[str, StudyPlan] = {}
        try:
            check_versions(common.versions)
            for part in order.plans:
                backbone = _open_backbone(part.backbone, part.fingerprint, common.device)
                plans[part.study.name] = StudyPlan(part.study, backbone, part.tasks, (), ())
        except InlayError as error:
            return _UnitOutcome(error=pack_error(error))
        unit, runs = order.unit, common.runs
        is_shared = (runs / common.mark).is_file()
        keep: Callable[[Sequence[Record]], None] = reporter.keep if is_shared else kept.extend
        if not is_shared:
            runs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inlay-ray-")))
            for folder in ray.get(list(order.folders)):
                write_files(runs, folder)
        # 2. do the unit
        failed: list[tuple[PlannedRun, InlayError]] = []
        is_stopped = False
        try:
            reporter.begin()
            failed = UnitRunner(plans, runs, keep, common.commit).do(unit, reporter.listen)
        except Interrupted:
            is_stopped = True
        reporter.end()
        # 3. hand back what this process cannot write
        reasons = [(item.key, error.message) for item, error in failed]
        if is_shared:
            return _UnitOutcome(reasons, is_stopped)
        made = {record.id.partition("-")[0] for record in kept}
        made |= {run_id for run_id in (*unit.run_ids, *order.sources) if is_finished(runs / run_id)}
        return _UnitOutcome(reasons, is_stopped, read_folders(runs, sorted(made)), kept)


@functools.lru_cache(maxsize=2)
def _open_backbone(name: str, fingerprint: str, device: str | None) -> Backbone:
    """Open a backbone once for all units of this process."""
    return load_same_backbone(name, fingerprint, device)


class _UnitReporter:
    """Reports the progress of a unit, rows at most every half second, and stops it if asked to."""

    def __init__(self, ray: Any, relay: Any, number: int) -> None:
        self._ray, self._relay, self._number = ray, relay, number
        self._num_rows, self._told = 0, time.monotonic()
        self._answer: Any = None
        self._has_stopped = False

    def begin(self) -> None:
        """Report that the unit begins; raise Interrupted if the session is being stopped."""
        if self._ray.get(self._send("begin")):
            raise Interrupted

    def keep(self, records: Sequence[Record]) -> None:
        """Send records, and wait until they have arrived."""
        self._ray.get(self._send("keep", list(records)))

    def end(self) -> None:
        """Wait until everything has arrived: the messages of one process arrive in their order."""
        self._ray.get(self._send("rows", self._num_rows))

    def listen(self, event: Event) -> None:
        """Report an event of training; stop at a step if asked to."""
        self._num_rows += send_event(event, self._send)
        if isinstance(event, StepTaken) and time.monotonic() - self._told >= _LISTEN_SECONDS:
            self._send_rows()

    def _send_rows(self) -> None:
        """Report the rows; stop if the answer to the previous report asked for it.

        The unit stops as by Ctrl-C, after this step and with its state saved; Ray's workers block the signal itself. It
        stops once: a second interrupt would break off the saving.
        """
        answer, self._answer = self._answer, self._send("rows", self._num_rows)
        self._num_rows, self._told = 0, time.monotonic()
        if answer is not None and not self._has_stopped and self._ray.get(answer):
            self._has_stopped = True
            if threading.current_thread() is not threading.main_thread():
                raise Interrupted
            _thread.interrupt_main()

    def _send(self, what: str, value: Any = None) -> Any:
        return self._relay.put.remote((self._number, what, value))
