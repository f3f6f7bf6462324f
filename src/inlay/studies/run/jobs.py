"""Studies done by several processes of one machine, which share its device.

Steps of small models wait for the processor more than for the GPU, and a fine-tuned copy of the backbone cannot train
in a cohort: several processes at once finish far sooner than one, and each gets its part of a tier's copies. This
process deals the agenda out, unit by unit, to whoever is idle, and is the only one that writes results: nothing is lost
but what was in hand, whoever is killed. A process that dies costs its cohort, or of a row of copies the one it was at,
and is replaced. On a GPU few cohorts train at a time: each fills it by itself, and gets the memory that there is then,
less what the copies that wait will need. What is compiled is kept on disk for all: the first process to train units of
a likeness compiles alone, and the others wait for it with something else in hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from inlay.errors import InlayError, LostProcess
from inlay.model import Backbone
from inlay.studies.run.agenda import Unit, make_agenda
from inlay.studies.run.ledger import Places
from inlay.studies.run.recording import Origin, Recorder
from inlay.studies.run.records import Record
from inlay.studies.run.session import Outcome, Pace, Sitting, Stage
from inlay.studies.run.worker import Order, Recipe, serve
from inlay.studies.spec.arms import ARM_KINDS
from inlay.studies.spec.planning import Item, Plan
from inlay.training.cohort.resume import drop_rows
from inlay.training.run.run import is_finished

PROCESSES = multiprocessing.get_context("spawn")
"""how processes are started: anew, since a GPU cannot be shared with a copy of this one"""
_MANY_PARAMETERS = 50_000_000
"""of a backbone whose cohorts keep a GPU busy, two at a time"""
_LISTEN_SECONDS = 0.5
_STOP_SECONDS = 120.0
"""how long a process may take to save what it has in hand"""
_EXIT_SECONDS = 10.0
_MOST_LOST = 3
"""units in a row that are lost before their first step: what takes them would take the whole agenda"""
_USABLE = 0.9
"""of a GPU's memory, what all may take together: the rest is their contexts"""
_FOR_COPIES = 5 / 9
"""of that, what copies may take, if as many train as there is memory for"""
_TOLERANCE = 1e-6
"""of shares of a GPU, which are sums of fractions"""
_BYTES_OF_COPY = 72
"""of memory for a parameter of a copy, at least: MPNet's copies ran out of 47 (5 GB), with passes of a few rows, not of
76; their own numbers take 24"""


@dataclass(frozen=True)
class Crew:
    """How many processes do the work, and how they find the plans again."""

    num_jobs: int
    device: str = "auto"
    root: str | None = None
    skip_missing: bool = False
    commit: str | None = None
    memory_share: float = 1.0
    """of a GPU's memory, what all of them may take together: others may be on it"""


def conduct_in_jobs(
    plans: Sequence[Plan], places: Places, crew: Crew, *, deadline: float | None = None, stage: Stage | None = None
) -> Outcome:
    """As `conduct`, by several processes."""
    sitting = Sitting(plans, places)
    recipe = Recipe(
        studies={plan.study.name: plan.study for plan in plans},
        backbones={plan.study.name: plan.backbone.name for plan in plans},
        device=crew.device,
        root=crew.root,
        skip_missing=crew.skip_missing,
        runs=places.runs,
        commit=crew.commit,
        num_jobs=crew.num_jobs,
        memory_share=crew.memory_share,
    )
    foreman = _Foreman(sitting, places, recipe, stage or Stage(), Pace(deadline))
    foreman.run()
    return sitting.sum_up()


@dataclass(eq=False)
class _Job:
    """A process, and what it has in hand."""

    number: int
    process: BaseProcess
    link: Connection
    log: Path
    unit: Unit | None = None
    share: float = 0.0
    """of its GPU's memory, what its unit may take"""
    began: float = 0.0
    last: tuple[Any, ...] = ()
    """what its last unit was like: its programs are compiled"""
    at: str = ""
    """the run that entered training last"""
    has_stepped: bool = False
    """whether its unit has got as far as training"""
    is_leaving: bool = False
    """whether it has said that it does no more"""


class _Foreman:
    """Deals units out, hears of them, and keeps what they come to."""

    def __init__(self, sitting: Sitting, places: Places, recipe: Recipe, stage: Stage, pace: Pace) -> None:
        self._sitting, self._places, self._recipe = sitting, places, recipe
        self._stage, self._pace = stage, pace
        plans = list(sitting.plans.values())
        self._waiting = make_agenda(plans, sitting.ledger, places.runs, in_pieces=True, num_jobs=recipe.num_jobs)
        self._wanted = [item for unit in self._waiting for item in unit.items]
        self._num_units, self._num_begun, self._num_rows = len(self._waiting), 0, 0
        backbones = [plan.backbone for plan in sitting.plans.values()]
        self._limits = _Limits.of(backbones, recipe.num_jobs, recipe.memory_share, recipe.device)
        self._jobs: list[_Job] = []
        self._familiar: set[tuple[Any, ...]] = set()
        """likenesses of which some process has taken a step, or done a unit too short to tell of one"""
        self._is_stopping = False
        self._lost: list[Unit] = []
        """those lost before their first step since a unit was last done"""

    def run(self) -> None:
        """Have everything done, or what fits before the deadline. Ctrl-C stops all with everything saved."""
        with _noting_interrupts() as asked:
            try:
                self._jobs = [self._hire(number) for number in range(min(self._recipe.num_jobs, self._num_units))]
                while (self._waiting or self._busy) and not (asked.is_set() or self._is_to_end):
                    self._deal()
                    self._listen(_LISTEN_SECONDS)
            finally:
                try:
                    self._stop()
                finally:
                    self._dismiss()
        if asked.is_set():
            raise KeyboardInterrupt
        if len(self._lost) >= _MOST_LOST:
            lost = "; ".join(f"`{unit.describe()}`" for unit in self._lost)
            logs = self._places.runs.parent / "jobs"
            raise LostProcess(
                f"units were lost one after another before their first step: {lost}",
                f"read why in `{logs}`, or see it with `--jobs 1`; the same command goes on from there",
            )

    @property
    def _is_to_end(self) -> bool:
        return self._pace.is_late or len(self._lost) >= _MOST_LOST

    @property
    def _busy(self) -> list[_Job]:
        return [job for job in self._jobs if job.unit is not None]

    def _hire(self, number: int) -> _Job:
        ours, theirs = PROCESSES.Pipe()
        log = self._places.runs.parent / "jobs" / f"{number}.log"
        arguments = (theirs, self._recipe, number, log)
        process = PROCESSES.Process(target=serve, args=arguments, name=f"inlay-{number}")
        process.start()
        theirs.close()
        return _Job(number, process, ours, log)

    def _deal(self) -> None:
        for job in list(self._jobs):
            unit = self._pick(job) if job.unit is None and not job.is_leaving else None
            if unit is None:
                continue
            self._waiting.remove(unit)
            now = self._pace.cut(unit)
            rest = unit.take(item for item in unit.items if item not in now.items)
            if rest.items:  # perhaps it goes faster than it seems
                self._waiting.append(rest)
                self._num_units += 1
            job.unit, job.share = now, self._grant(now, job.number)
            self._num_begun += 1
            self._stage.begin(self._num_begun, self._num_units, job.unit)
            job.began, job.last, job.at, job.has_stepped = time.monotonic(), job.unit.likeness, "", False
            keys = tuple(item.key for item in job.unit.items)
            along = tuple(item.key for item in job.unit.along)
            try:
                job.link.send(Order(job.unit.kind, keys, along, job.share))
            except OSError:
                self._bury(job)  # who takes its place is dealt to in the next round

    def _pick(self, job: _Job) -> Unit | None:
        """What an idle process does next: of what may begin, what fits, is its kind of work, is wanted, is familiar."""
        prefers_cohorts = job.number < self._limits.most_cohorts * self._limits.num_gpus
        free = [unit for unit in self._waiting if self._may_begin(unit, job.number)]
        if not free:
            return None
        order = {id(unit): number for number, unit in enumerate(self._waiting)}
        return min(
            free,
            key=lambda unit: (
                not self._pace.fits(unit),
                _is_cohort(unit) != prefers_cohorts,
                unit.items[0].tier,
                unit.likeness != job.last,
                order[id(unit)],
            ),
        )

    def _may_begin(self, unit: Unit, number: int = 0) -> bool:
        """Whether there is room where the process `number` is, no other process compiles the same, or is at its runs or
        what they go on from, and no other unit is to train that."""
        in_hand = [job.unit for job in self._busy if job.unit is not None]
        if not self._has_room(unit, number):
            return False
        is_new = self._compiles(unit) and unit.likeness not in self._familiar
        if is_new and any(other.likeness == unit.likeness for other in in_hand):
            return False
        held = {item.id for other in in_hand for item in other.items} | set().union(*map(self._needs, in_hand))
        needs = self._needs(unit)
        to_train = {item.id for other in self._waiting if other is not unit for item in other.items} if needs else set()
        return not held & ({item.id for item in unit.items} | needs) and not to_train & needs

    def _beside(self, number: int) -> list[_Job]:
        """Those at work on the GPU of the process `number`."""
        return [job for job in self._busy if (job.number - number) % self._limits.num_gpus == 0]

    def _has_room(self, unit: Unit, number: int) -> bool:
        """Whether the GPU of the process `number` has room for a unit, beside what is in hand there."""
        jobs = self._beside(number)
        left = self._limits.usable - sum(job.share for job in jobs) + _TOLERANCE
        if unit.is_finetuned:
            return sum(map(_has_copy, jobs)) < self._limits.most_copies and left >= self._limits.for_copy
        if _is_cohort(unit):
            return sum(map(_has_cohort, jobs)) < self._limits.most_cohorts and left >= self._limits.for_cohort
        return True

    def _grant(self, unit: Unit, number: int) -> float:
        """What of its GPU's memory a unit may take: a cohort all that those which may yet begin beside it can spare."""
        if unit.is_finetuned:
            return self._limits.for_copy
        if not _is_cohort(unit):
            return 0.0
        jobs = self._beside(number)
        cohorts = [job for job in jobs if _has_cohort(job)]
        num_copies = sum(map(_has_copy, jobs)) + sum(other.is_finetuned for other in self._waiting)
        share = self._limits.share(
            left=self._limits.usable - sum(job.share for job in cohorts),
            num_jobs=self._limits.num_jobs - len(cohorts),
            num_cohorts=min(self._limits.most_cohorts - len(cohorts), 1 + sum(map(_is_cohort, self._waiting))),
            num_copies=num_copies,
        )
        return max(self._limits.for_cohort, share)  # less, where more copies wait than when another took its share

    def _compiles(self, unit: Unit) -> bool:
        """Whether a unit's steps are compiled: not where no backbone is trained on, nor on one that writes."""
        backbone = self._sitting.plans[unit.items[0].study].backbone
        is_trained = ARM_KINDS[unit.items[0].arm.kind].needs_backbone
        return self._limits.compiles and is_trained and backbone.packs and not backbone.is_seq2seq

    def _needs(self, unit: Unit) -> set[str]:
        """The runs that it goes on from and that must be trained first."""
        sources = {item.source.id for item in (*unit.items, *unit.along) if item.source is not None}
        weights = {run_id: self._places.runs / run_id for run_id in sources}
        return {
            run_id
            for run_id, folder in weights.items()
            if not (is_finished(folder) and (folder / "best.safetensors").is_file())
        }

    def _listen(self, seconds: float) -> None:
        """Hear all that is to be heard within some time, and keep it."""
        jobs = {job.link: job for job in self._jobs}
        records: list[Record] = []
        for link in wait(list(jobs), timeout=seconds):
            assert isinstance(link, Connection)
            for what, value in _receive(link):
                if what == "records":
                    records += value
                    continue
                self._keep(records)  # what is heard next may ask what is known
                records = []
                _HEARD[what](self, jobs[link], value)
        self._keep(records)
        num_done = sum(map(self._sitting.ledger.is_known, self._wanted))
        self._stage.tell(num_done, len(self._wanted), len(self._busy), self._num_rows)
        self._num_rows = 0

    def _keep(self, records: Sequence[Record]) -> None:
        if records:
            self._sitting.ledger.keep(records)

    def _hear_entry(self, job: _Job, value: str) -> None:
        job.at = value

    def _hear_rows(self, job: _Job, value: int) -> None:
        self._num_rows += value
        if value:  # none, where an epoch was only scored
            job.has_stepped = True
            self._familiar.add(job.last)

    def _hear_word(self, job: _Job, value: str) -> None:
        self._stage.warn(value)

    def _hear_end(self, job: _Job, value: list[tuple[Any, str]]) -> None:
        assert job.unit is not None
        items = {item.key: item for item in job.unit.items}
        if value:
            self._stage.warn(f"{job.unit.take(items[key] for key, _ in value).describe()}: {value[0][1]}")
        self._sitting.failed += [(items[key], message) for key, message in value]
        seconds = time.monotonic() - job.began
        self._pace.note(job.unit, seconds)
        self._lost = []
        self._familiar.add(job.last)
        self._end(job)

    def _hear_stop(self, job: _Job, value: None) -> None:
        self._end(job)

    def _hear_refusal(self, job: _Job, value: tuple[str, str | None]) -> None:
        assert job.unit is not None
        self._fail(job.unit, self._list_lost(job.unit), InlayError(*value))
        self._end(job)

    def _hear_breakdown(self, job: _Job, value: str) -> None:
        job.is_leaving = True
        self._lose(job, LostProcess(value, f"its last words are in {job.log}"))

    def _lose(self, job: _Job, error: LostProcess) -> None:
        """A process is of no more use: what it had in hand failed. The rest of a row is done by others, one by one."""
        assert job.unit is not None
        if not job.has_stepped and not self._is_stopping:
            self._lost.append(job.unit)
        failed = self._list_lost(job.unit)
        if job.unit.is_row:
            # One that has ended is no failure, nor is any if none had begun: each is tried once by itself.
            failed, rest = self._part(job, failed)
            self._put_back(job.unit, rest, has_state=bool(failed))
        self._fail(job.unit, failed, error)
        self._end(job)

    def _list_lost(self, unit: Unit) -> list[Item]:
        return [item for item in unit.items if not self._sitting.ledger.is_known(item)]

    def _part(self, job: _Job, lost: Sequence[Item]) -> tuple[list[Item], list[Item]]:
        """What a process was at when a row broke, if it had not ended; and the others."""
        in_hand = [item for item in lost if item.id == job.at and not is_finished(self._places.runs / item.id)]
        return in_hand, [item for item in lost if item not in in_hand]

    def _put_back(self, unit: Unit, rest: Sequence[Item], *, has_state: bool) -> None:
        """Have the rest of a row done one by one. Its state stays if it is that of the run that failed."""
        if self._is_stopping:
            return
        if not has_state:
            drop_rows(self._places.runs / "cohorts", {item.id for item in (*unit.items, *unit.along)})
        self._waiting += unit.singly(rest)
        self._num_units += len(rest)

    def _end(self, job: _Job) -> None:
        if job.unit is None:
            return  # stopped just after it was done
        unit, job.unit = job.unit, None
        self._stage.end(unit, time.monotonic() - job.began)

    def _fail(self, unit: Unit, failed: Sequence[Item], error: InlayError) -> None:
        """Say why items of a unit have no records; they are tried again in the next sitting."""
        self._stage.warn(f"{(unit.take(failed) if failed else unit).describe()}: {error}")
        if self._is_stopping:
            return  # it was to end: what it saved goes on
        self._sitting.failed += [(item, error.message) for item in failed]
        for item in failed:
            plan = self._sitting.plans[item.study]
            recorder = Recorder(plan, plan.backbone, Origin.here(plan.backbone, self._recipe.commit))
            self._keep([recorder.record_failure(item, error)])

    def _bury(self, job: _Job, value: None = None) -> None:
        """A process has died: its unit failed, and another takes its place while there is work."""
        _end_process(job)
        if job.unit is not None:
            words = _last_words(job.log)
            said = f"process {job.number} ended with status {job.process.exitcode}" + (f": {words}" if words else "")
            self._lose(job, LostProcess(said, f"its log is {job.log}"))
        job.link.close()
        self._jobs.remove(job)
        if self._waiting and not self._is_to_end:
            self._jobs.append(self._hire(job.number))

    def _stop(self) -> None:
        """Ask those that have something in hand to save it, and hear what they have to say."""
        until = time.monotonic() + _STOP_SECONDS
        self._waiting, self._is_stopping = [], True
        for job in self._busy:
            if job.process.pid is not None and job.process.is_alive():
                os.kill(job.process.pid, signal.SIGINT)
        while self._busy and time.monotonic() < until:
            self._listen(_LISTEN_SECONDS)

    def _dismiss(self) -> None:
        for job in list(self._jobs):
            if job.unit is None:
                with contextlib.suppress(OSError):
                    job.link.send(None)
            else:
                job.process.kill()
        for job in list(self._jobs):
            _end_process(job)
            job.link.close()


def _end_process(job: _Job) -> None:
    """See a process end; one that said its last word may hang at its exit, in a driver or a library."""
    job.process.join(timeout=_EXIT_SECONDS)
    if job.process.is_alive():
        job.process.kill()
        job.process.join()


@contextlib.contextmanager
def _noting_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that no record or process is left half made; a second one interrupts at once."""
    asked, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    # In the background of a script it is ignored; signals come to the main thread alone.
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _is_cohort(unit: Unit) -> bool:
    """Whether it fills a device by itself: not a copy of the backbone, and not what needs no device."""
    return not unit.is_finetuned and ARM_KINDS[unit.items[0].arm.kind].needs_backbone


def _has_cohort(job: _Job) -> bool:
    return job.unit is not None and _is_cohort(job.unit)


def _has_copy(job: _Job) -> bool:
    return job.unit is not None and job.unit.is_finetuned


def _receive(link: Connection) -> Iterator[tuple[str, Any]]:
    """What a process has said by now; `gone` if it says no more, or nothing that can be understood."""
    while True:
        try:
            if not link.poll():
                return
            word = link.recv()
        except Exception:  # the border of that process: its end, or half a word, which unpickles as anything
            yield "gone", None
            return
        yield word


# What a process says -> who hears it.
_HEARD: dict[str, Callable[[_Foreman, _Job, Any], None]] = {
    "entered": _Foreman._hear_entry,
    "rows": _Foreman._hear_rows,
    "said": _Foreman._hear_word,
    "done": _Foreman._hear_end,
    "stopped": _Foreman._hear_stop,
    "refused": _Foreman._hear_refusal,
    "broken": _Foreman._hear_breakdown,
    "gone": _Foreman._bury,
}


@dataclass(frozen=True)
class _Limits:
    """How many processes, cohorts and copies are on a GPU at a time, what of its memory, and what is compiled.

    The processes are dealt out over GPUs one by one; without a GPU it is as if there were one.
    """

    num_jobs: int
    most_cohorts: int
    most_copies: int
    usable: float = 1.0
    """of its memory, by all together"""
    for_cohort: float = 0.0
    """at least: more where fewer train beside it"""
    for_copy: float = 0.0
    compiles: bool = False
    num_gpus: int = 1

    @classmethod
    def of(
        cls, backbones: Sequence[Backbone], num_jobs: int, memory_share: float = 1.0, device: str = "auto"
    ) -> _Limits:
        """Without a GPU there is none: memory is shared evenly, which is not said here."""
        if backbones[0].device.type != "cuda":
            return cls(num_jobs, num_jobs, num_jobs)
        num_gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 1
        num_here = -(-num_jobs // num_gpus)
        num_cohorts = min(num_here, *map(_find_most_cohorts, backbones))
        num_parameters = max(backbone.num_parameters for backbone in backbones)
        total_bytes = torch.cuda.get_device_properties(backbones[0].device).total_memory
        at_rest = (num_here - 1) * 4 * num_parameters / total_bytes  # the backbones of processes that wait
        usable = memory_share * _USABLE
        usable = max(usable / 2, usable - at_rest)
        for_copies = usable * _FOR_COPIES
        num_copies = max(1, min(num_here, int(for_copies * total_bytes / (_BYTES_OF_COPY * num_parameters))))
        limits = cls(num_here, num_cohorts, num_copies, usable, 0.0, for_copies / num_copies, True, num_gpus)
        return dataclasses.replace(limits, for_cohort=limits.share(usable, num_here, num_cohorts, num_copies))

    def share(self, left: float, num_jobs: int, num_cohorts: int, num_copies: int) -> float:
        """What each of some cohorts may take of what is `left`, whatever number of copies is beside them."""
        most = min(self.most_copies, num_copies, num_jobs - 1)
        return min((left - number * self.for_copy) / min(num_cohorts, num_jobs - number) for number in range(most + 1))


def _find_most_cohorts(backbone: Backbone) -> int:
    """How many cohorts keep a GPU busy. More only end later: nothing is done sooner, and of a short time less is whole.

    A step of what writes its answers is many small kernels: three cohorts of six runs on flan-T5-small took an H200 as
    far (14,900 rows/s) as nine processes with cohorts and copies of the backbone did (13,000 to 15,500).
    """
    return 2 if backbone.num_parameters >= _MANY_PARAMETERS and not backbone.is_seq2seq else 4


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf8", errors="replace").strip().splitlines() if log.is_file() else []
    return lines[-1][-300:] if lines else ""
