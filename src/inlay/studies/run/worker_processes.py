"""Runs studies with several processes of one machine, which share its devices.

Steps of small models wait for the processor more than for the GPU, and a fine-tuned copy of the backbone cannot train
in a cohort, so several processes finish far sooner than one. Each is an ordinary session (`session.py`) that takes
unclaimed work and writes its own records. This process starts them, shows their progress, replaces a process that died,
and stops all at the deadline or by Ctrl-C. The unit of a dead process is continued by another one from the last saved
state; if that one dies too, its run is recorded as failed. Each process gets an equal part of the memory.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from inlay.data import Task
from inlay.errors import LostProcess
from inlay.model import Backbone, load_backbone
from inlay.processes import JOBS
from inlay.studies.run.records import StudyDirs
from inlay.studies.run.session import Deadline, Session, SessionResult, StudyProgress
from inlay.studies.run.units import Unit
from inlay.studies.spec.planning import PlannedRun, StudyPlan, load_tasks, plan_study
from inlay.studies.spec.study import Study
from inlay.training import (
    CohortStarted,
    Emit,
    Event,
    MemoryRanOut,
    RowsAnswered,
    RunEntered,
    StepTaken,
    limit_memory_share,
)

PROCESSES = multiprocessing.get_context("spawn")
"""processes are spawned, as a forked process could not use the GPU"""
_LISTEN_SECONDS = 0.5
_WAIT_SECONDS = 1.0
"""seconds after which an idle process looks again at the claims of others"""
_STOP_SECONDS = 120.0
"""longest time for a process to save its work"""
_EXIT_SECONDS = 10.0
_MOST_LOST = 3
"""so many processes in a row that die before their first step end the session: others would die of the same cause"""
_USABLE = 0.9
"""share of a GPU's memory for all processes together: the rest is for their contexts"""
_MANY_PARAMETERS = 50_000_000
"""size of a backbone from which on two cohorts at a time keep a GPU busy"""


@dataclass(frozen=True)
class JobSettings:
    """The number of processes, and the settings they need to make the plans again."""

    num_jobs: int
    device: str = "auto"
    root: str | None = None
    skip_missing: bool = False
    commit: str | None = None
    memory_share: float = 1.0
    """share of a GPU's memory for all processes together; other programs may need the rest"""


def run_studies_in_jobs(
    plans: Sequence[StudyPlan],
    dirs: StudyDirs,
    settings: JobSettings,
    *,
    deadline: float | None = None,
    progress: StudyProgress | None = None,
) -> SessionResult:
    """Do what `run_studies` does, in several processes."""
    session = Session(plans, dirs, deadline=Deadline(deadline), commit=settings.commit, num_jobs=settings.num_jobs)
    _Workers(session, settings, progress or StudyProgress()).run()
    return session.sum_up_all()


@dataclass(eq=False)
class _Worker:
    """A process, and the state of its work as it reported it."""

    number: int
    process: BaseProcess
    link: Connection
    log: Path
    unit: Unit | None = None
    began: float = 0.0
    at: str = ""
    """the run that entered training last"""
    has_stepped: bool = False
    """whether its unit has taken a training step"""


class _Workers:
    """The processes of one session: starts, listens to, replaces and stops them."""

    def __init__(self, session: Session, settings: JobSettings, progress: StudyProgress) -> None:
        self._session, self._settings, self._progress = session, settings, progress
        self._items = {item.key: item for plan in session.plans.values() for item in plan.items}
        self._workers: list[_Worker] = []
        self._num_begun, self._num_rows = 0, 0
        self._is_stopping = False
        self._log_folder = session.dirs.runs.parent / "jobs"
        self._tried: set[str] = set()
        """runs during which a process died"""
        self._lost: list[str] = []
        """descriptions of processes that died before their first step, since a unit was last finished"""

    def run(self) -> None:
        """Do all the work, or what fits before the deadline. Ctrl-C stops all processes with everything saved."""
        # 1. start the processes, and listen until all have ended
        units = self._session.list_units()
        wanted = [item for unit in units for item in unit.items]
        with noting_interrupts() as asked:
            try:
                for number in range(min(self._settings.num_jobs, len(units))):
                    self._workers.append(self._start(number))
                while self._workers and not (asked.is_set() or self._is_to_end):
                    self._listen(wanted)
            finally:
                self._stop(wanted)
        # 2. raise an error if it stopped before the work was done
        if asked.is_set():
            raise KeyboardInterrupt
        if len(self._lost) >= _MOST_LOST:
            raise LostProcess(
                f"processes ended one after another before their first step: {'; '.join(self._lost)}",
                f"read why in `{self._log_folder}`, or see it with `--jobs 1`; the same command goes on from there",
            )

    @property
    def _is_to_end(self) -> bool:
        return self._session.deadline.is_late or len(self._lost) >= _MOST_LOST

    def _start(self, number: int) -> _Worker:
        session = self._session
        job = _Job(
            number=number,
            studies=[(plan.study, plan.backbone.name) for plan in session.plans.values()],
            dirs=session.dirs,
            settings=self._settings,
            deadline=session.deadline.deadline,
            failed=dict(session.known.failed),
            log=self._log_folder / f"{number}.log",
        )
        ours, theirs = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=_work, args=(theirs, job), name=f"inlay-{number}")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the new process unblocks it when ready
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return _Worker(number, process, ours, job.log)

    def _listen(self, wanted: Sequence[PlannedRun]) -> None:
        """Handle the messages that arrive within a short time, and report the overall progress."""
        workers = {worker.link: worker for worker in self._workers}
        for link in wait(list(workers), timeout=_LISTEN_SECONDS):
            assert isinstance(link, Connection)
            for what, value in _receive(link):
                self._hear(workers[link], what, value)
        self._session.known.refresh()
        num_done = sum(map(self._session.known.is_known, wanted))
        num_busy = sum(worker.unit is not None for worker in self._workers)
        self._progress.tell(num_done, len(wanted), num_busy, self._num_rows)
        self._num_rows = 0

    def _hear(self, worker: _Worker, what: str, value: Any) -> None:
        if what == "begin":
            num_left, kind, keys = value
            worker.unit = Unit(kind, tuple(self._items[key] for key in keys))
            worker.began, worker.at, worker.has_stepped = time.monotonic(), "", False
            self._num_begun += 1
            self._progress.begin(self._num_begun, self._num_begun + num_left - 1, worker.unit)
        elif what == "enter":
            worker.at = value
        elif what == "rows":
            self._num_rows += value
            worker.has_stepped |= value > 0  # 0 if an epoch was only scored
        elif what == "warn":
            self._progress.warn(value)
        elif what == "end":
            self._lost = []
            self._end_unit(worker)
        else:
            self._bury(worker)

    def _end_unit(self, worker: _Worker) -> None:
        if worker.unit is not None:
            self._progress.end(worker.unit, time.monotonic() - worker.began)
            worker.unit = None

    def _bury(self, worker: _Worker) -> None:
        """Clean up an ended process, and start another one if it died and work is left."""
        worker.process.join(timeout=_EXIT_SECONDS)
        if worker.process.is_alive():  # it hangs on exit, in a driver or a library
            worker.process.kill()
            worker.process.join()
        worker.link.close()
        self._workers.remove(worker)
        if worker.process.exitcode != 0 and not self._is_stopping:
            self._lose(worker)
            if not self._is_to_end and self._session.has_work:
                self._workers.append(self._start(worker.number))
        self._end_unit(worker)

    def _lose(self, worker: _Worker) -> None:
        """Report a dead process; record its runs as failed if a process died of them before."""
        # 1. how it ended
        said = f"process {worker.number} ended with status {worker.process.exitcode}"
        log = worker.log.read_text(encoding="utf8", errors="replace").strip() if worker.log.is_file() else ""
        if log:
            said += f": {log.splitlines()[-1][-300:]}"
        if not worker.has_stepped:
            self._lost.append(f"`{worker.unit.describe()}`" if worker.unit is not None else said)
        if worker.unit is None:
            self._progress.warn(said)
            return
        # 2. the runs it was training; those during which a process died before have failed
        self._session.known.refresh()
        lost = [item for item in worker.unit.items if not self._session.known.is_known(item)]
        if worker.unit.is_sequential:  # of copies trained one after another it was training one
            lost = [item for item in lost if item.id == worker.at] or lost
        failed = [item for item in lost if item.id in self._tried]
        self._tried |= {item.id for item in lost}
        outlook = "" if failed else "; another process continues it"
        self._progress.warn(f"{worker.unit.take(failed or worker.unit.items).describe()}: {said}{outlook}")
        self._session.runner.record_failure(failed, LostProcess(said, f"its log is {worker.log}"))

    def _stop(self, wanted: Sequence[PlannedRun]) -> None:
        """Ask all processes to save their work, and wait for their end."""
        # 1. interrupt them as Ctrl-C would
        self._is_stopping = True
        until = time.monotonic() + _STOP_SECONDS
        for worker in self._workers:
            if worker.process.pid is not None and worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGINT)
        # 2. listen until they have ended, and kill those that take too long
        try:
            while self._workers and time.monotonic() < until:
                self._listen(wanted)
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.process.join()
                worker.link.close()


def _receive(link: Connection) -> Iterator[tuple[str, Any]]:
    """Yield the messages of a process; `gone` if it has closed the link or sent a broken message."""
    while True:
        try:
            if not link.poll():
                return
            word = link.recv()
        except Exception:  # it ended; a message that was cut off may raise anything when it is unpickled
            yield "gone", None
            return
        yield word


@contextlib.contextmanager
def noting_interrupts() -> Iterator[threading.Event]:
    """Let the first Ctrl-C only set the event, so that no process is left half started; a second one interrupts."""
    asked, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    # A script's background jobs ignore the signal, and only the main thread gets it.
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class _Job:
    """Everything that a process needs to make the plans and do its part of the work."""

    number: int
    studies: list[tuple[Study, str]]
    """the studies, each with its backbone's name or folder"""
    dirs: StudyDirs
    settings: JobSettings
    deadline: float | None
    failed: dict[str, str]
    """run id -> the reason, for runs that failed in this session before the process was started"""
    log: Path


def _work(link: Connection, job: _Job) -> None:
    """Train units until nothing is left: the main function of a process, whose output goes to a log."""
    # 1. signals, threads and output of this process
    os.setsid()  # Ctrl-C at the terminal must reach the first process alone, which then stops this one
    signal.signal(signal.SIGINT, signal.default_int_handler)
    num_jobs = job.settings.num_jobs
    os.environ[JOBS] = str(num_jobs)
    num_threads = max(1, (os.cpu_count() or 1) // num_jobs)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(num_threads))  # else each compiles with all cores
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(num_threads)
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # 2. the plans, made again from their settings; then an ordinary session
    with contextlib.suppress(KeyboardInterrupt):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        plans = _make_plans(job)
        prefers_copies = [_take_share(plan.backbone, job.number, job.settings) for plan in plans]
        session = Session(
            plans,
            job.dirs,
            deadline=Deadline(job.deadline),
            commit=job.settings.commit,
            num_jobs=num_jobs,
            prefers_copies=any(prefers_copies),
        )
        session.known.failed.update(job.failed)  # do not repeat runs that other processes died of
        progress = _PipeProgress(link)
        session.train(progress, progress.wait)


def _make_plans(job: _Job) -> list[StudyPlan]:
    """Load data and backbones, and plan the studies as the first process did."""
    settings = job.settings
    device: str | None = None if settings.device == "auto" else settings.device
    if settings.device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{job.number % torch.cuda.device_count()}"
    backbones = {name: load_backbone(name, device=device) for name in {name for _, name in job.studies}}
    tasks: dict[Any, Task] = {}
    plans = []
    for study, backbone in job.studies:
        found = load_tasks(study, settings.root, skip_missing=settings.skip_missing, known=tasks)
        plans.append(plan_study(study, backbones[backbone], *found, root=settings.root))
    return plans


def _take_share(backbone: Backbone, number: int, settings: JobSettings) -> bool:
    """Limit this process to its part of a GPU's memory; return whether it prefers copies of the backbone.

    Two cohorts keep a GPU busy; small backbones and those that generate text, with many small kernels, need four.
    """
    if backbone.device.type != "cuda":
        return False
    num_gpus = torch.cuda.device_count() if settings.device in ("auto", "cuda") else 1
    limit_memory_share(backbone.device, settings.memory_share * _USABLE / -(-settings.num_jobs // num_gpus))
    num_cohorts = 2 if backbone.num_parameters >= _MANY_PARAMETERS and not backbone.is_seq2seq else 4
    return number >= num_cohorts * num_gpus


class _PipeProgress(StudyProgress):
    """Reports progress to the first process, rows at most every half second, and stops if that process has died."""

    def __init__(self, link: Connection) -> None:
        self._link, self._parent, self._is_left = link, os.getppid(), False
        self._num_rows, self._told = 0, 0.0

    def send(self, what: str, value: Any = None) -> None:
        """Send a message; if the first process has closed the link, stop as by Ctrl-C."""
        try:
            self._link.send((what, value))
        except OSError:
            self._stop_if_parent_died(is_gone=True)

    def _stop_if_parent_died(self, *, is_gone: bool = False) -> None:
        """Stop as by Ctrl-C if the first process has died, once: a second interrupt would break off the saving."""
        if not self._is_left and (is_gone or os.getppid() != self._parent):
            self._is_left = True
            signal.raise_signal(signal.SIGINT)

    def wait(self) -> None:
        """Sleep while other processes do the rest."""
        self._stop_if_parent_died()
        time.sleep(_WAIT_SECONDS)

    def begin(self, number: int, num_units: int, unit: Unit) -> None:
        self.send("begin", (num_units - number + 1, unit.kind, [item.key for item in unit.items]))

    def watch(self, unit: Unit) -> Emit:
        self._num_rows, self._told = 0, time.monotonic()
        return self._listen

    def end(self, unit: Unit, seconds: float) -> None:
        self.send("end")

    def warn(self, message: str) -> None:
        self.send("warn", message)

    def _listen(self, event: Event) -> None:
        self._num_rows += send_event(event, self.send)
        if isinstance(event, StepTaken) and time.monotonic() - self._told >= _LISTEN_SECONDS:
            self.send("rows", self._num_rows)
            self._num_rows, self._told = 0, time.monotonic()
            self._stop_if_parent_died()
        elif isinstance(event, RowsAnswered):
            self._stop_if_parent_died()


def send_event(event: Event, send: Callable[[str, Any], object]) -> int:
    """Send which runs enter, or a warning, if an event tells of one; return the rows of the step if it is one."""
    match event:
        case CohortStarted(cohort):
            for member in cohort.members:
                send("enter", member.run.id)
        case RunEntered(member):
            send("enter", member.run.id)
        case MemoryRanOut(message):
            send("warn", message)
        case StepTaken(_, num_rows):
            return num_rows
    return 0
