"""The work on one claimed cohort: read the rows of its jobs, train runs of one structure in one bank, go live.

Jobs of several tenants share a bank; none sees another. A bad job (its data, its settings, its training) fails alone.
What always holds: after a `kill -9` the next attempt finds the same runs and their resume state, and continues bit for
bit. An attempt that was stopped and lost its lease writes to files that nobody reads, because the next attempt has
moved the folder.
"""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from inlay.errors import InlayError, StoreDamaged, StoreUnreachable
from inlay.service.logs import log_event
from inlay.service.state import CANCELLED, FAILED, Conflict, Job, JobCohort, JobNote, StaleLease
from inlay.service.trainer.attempts import KeptAttempts, take_over
from inlay.service.trainer.going_live import GoingLive, list_numbers
from inlay.service.trainer.job_data import PreparedJob, TrainerContext, pack_jobs, prepare_job
from inlay.service.trainer.job_notes import (
    TextCleaner,
    describe_failure,
    make_words,
    note_epoch,
    note_notes,
    note_of,
    note_rows,
    note_start,
)
from inlay.service.trainer.leases import Lease
from inlay.settings import FitSettings
from inlay.training import (
    STOPPED_EARLY,
    AnyMember,
    CohortStarted,
    EpochEnded,
    Event,
    Interrupted,
    Referee,
    RowsAnswered,
    RunEnded,
    RunEntered,
    StateSaved,
    StepTaken,
    fit,
    list_stopped,
    read_result,
    structure_of,
)

_PREFIX_BYTES = 256 * 2**20
_CANCELLED = "cancelled"
_NO_FAULT_OF_A_JOB = (StaleLease, StoreUnreachable)
_IN_THE_LOOP = (StepTaken, RowsAnswered, EpochEnded, RunEnded, RunEntered)
"""events that come while a stop can save the resume state"""


class Canceller(Referee):
    """A referee that ends the runs whose jobs were all cancelled; `unwanted` returns their ids."""

    def __init__(self, unwanted: Callable[[], Collection[str]]) -> None:
        self._unwanted = unwanted

    def judge(self, members: Iterable[AnyMember], fresh: Collection[str], *, is_late: bool) -> None:
        """End unwanted runs."""
        self._end(members)

    def admit(self, entered: Iterable[AnyMember]) -> None:
        """End unwanted runs as they enter a slot."""
        self._end(entered)

    def _end(self, members: Iterable[AnyMember]) -> None:
        unwanted = self._unwanted()
        for member in members:
            if member.is_active and member.run.id in unwanted:
                member.progress.status, member.progress.message = STOPPED_EARLY, _CANCELLED


class CohortWork:
    """One attempt at a cohort of training jobs."""

    def __init__(
        self, cohort: JobCohort, context: TrainerContext, lease: Lease, stopping: threading.Event | None = None
    ) -> None:
        self._cohort, self._context, self._lease = cohort, context, lease
        self._stopping = stopping or threading.Event()
        self._was_asked = False
        self._todo = {job.id for job in cohort.jobs}
        self._open = set(self._todo)
        self._jobs: dict[str, list[PreparedJob]] = {}  # run id -> its jobs that have not ended
        self._ended: set[str] = set()  # run ids of jobs that ended in an earlier attempt
        self._known_epochs: dict[str, set[tuple[str, int]]] = {}
        self._words: dict[str, TextCleaner] = {}
        self._home = context.db.paths.runs / cohort.id
        self.folder = self._home / f"attempt-{cohort.token}"
        self._kept = KeptAttempts(context.db.files, self._home, cohort.token)

    def run(self) -> None:
        """Do all jobs of the cohort. StaleLease if the lease is lost, Interrupted if asked to stop."""
        take_over(self._home, self.folder, self._kept)
        stopped = list_stopped(self.folder / "cohorts")
        members = self._cohort.jobs
        if stopped:  # the resume state is found by all jobs, including those that have ended
            ended = [job for job in self._cohort.others if job.has_ended]
            members = tuple(sorted((*members, *ended), key=lambda job: self._cohort.members.index(job.id)))
        sizes = [self._size_of(job) for job in members]
        for pack in pack_jobs(members, sizes):
            self._train_pack(pack, stopped)
            self._jobs, self._ended = {}, set()
        shutil.rmtree(self._home, ignore_errors=True)
        self._kept.drop()

    def _size_of(self, job: Job) -> int:
        if job.dataset is None:
            return 0
        try:
            return self._context.workspace(job.tenant).dataset(job.dataset).size_bytes
        except InlayError:
            return 0

    def _train_pack(self, pack: Sequence[Job], stopped: Sequence[Sequence[str]]) -> None:
        """Train jobs whose rows fit in memory together."""
        # 1. read the rows; a bad job fails alone
        prepared = [self._prepare(job) for job in pack]
        # 2. group the runs that can share a bank, each run once
        groups: dict[Any, dict[str, PreparedJob]] = {}
        for ready in prepared:
            if ready is None:
                continue
            run = ready.prepared.run
            if ready.job.id in self._todo:
                self._jobs.setdefault(run.id, []).append(ready)
            else:
                self._ended.add(run.id)
            groups.setdefault(structure_of(run), {}).setdefault(run.id, ready)
        # 3. train each group, with the ended runs that are part of its resume state
        for group in groups.values():
            wanted = [run_id for run_id in group if run_id in self._jobs]
            if not wanted:
                continue
            ended: list[str] = []
            for together in stopped:
                if set(wanted) & set(together) and set(together) <= group.keys():
                    ended = [run_id for run_id in together if run_id not in self._jobs]
                    break
            self._train([group[run_id] for run_id in (*wanted, *ended)])

    def _prepare(self, job: Job) -> PreparedJob | None:
        """Read a job's rows; None if the job failed by that, or is cancelled."""
        self._lease.check()
        self._check_stop()
        is_todo = job.id in self._todo
        home = self._context.db.paths.home
        words = make_words(home, None)
        try:
            workspace = self._context.workspace(job.tenant)
            words = make_words(home, workspace.tenant)
            if job.dataset is not None:
                words = make_words(home, workspace.tenant, workspace.dataset(job.dataset))
            if is_todo and job.id in self._lease.cancelled:
                self._finish(job, CANCELLED)
                return None
            ready = prepare_job(job, self._context)
        except _NO_FAULT_OF_A_JOB:
            raise
        except Exception as error:  # whatever is wrong with one job, the others go on
            if is_todo:
                self._fail(job, error, words)
            return None
        self._words[job.id] = words
        if is_todo:
            run = ready.prepared.run
            notes = note_notes([*run.task.notes, *run.start.notes, *run.notes], words)
            self._record(job, note_rows(ready.task, notes))
            self._context.queue.note_path(self._cohort, job.id, self.folder / run.id)
        return ready

    def _train(self, group: Sequence[PreparedJob], *, restart: bool = False) -> None:
        """Train runs of one structure together; if that fails, each alone, so that a bad one fails alone."""
        runs = [ready.prepared.run for ready in group]
        settings = FitSettings(
            threads=self._context.num_threads,
            draw_curves=False,
            keep_last=False,
            restart=restart,
            prefix_bytes=_PREFIX_BYTES,
            prefix_file_bytes=0,
        )
        ids = {run.id for run in runs}
        try:
            fit(
                runs,
                self._context.backbone,
                self.folder,
                settings,
                lambda event: self._hear(event, ids),
                referee=Canceller(self._list_unwanted),
            )
        except _NO_FAULT_OF_A_JOB:
            raise
        except StoreDamaged as error:
            if restart:
                self._fail_runs(ids, error)
                return
            log_event("a resume state is damaged: training begins anew", {"cohort": self._cohort.id}, level=30)
            self._train(group, restart=True)
        except Exception as error:  # memory that one long row used up, among others
            if len(runs) == 1:
                self._fail_runs(ids, error)
            else:
                for ready in [each for each in group if each.prepared.run.id in self._jobs]:
                    self._train([ready])
        for run_id in sorted(ids & self._jobs.keys()):  # an earlier attempt finished them
            self._end_run(run_id)

    def _hear(self, event: Event, ids: set[str]) -> None:
        """Note an event of training on its jobs; stop where the lease is lost or a stop is asked for."""
        self._lease.check()
        if isinstance(event, StateSaved):
            self._kept.save(event.folder)
            return
        self._check_stop(is_step=isinstance(event, _IN_THE_LOOP))
        if isinstance(event, CohortStarted):
            is_resumed = event.cohort.num_steps > 0
            for member in event.cohort.members:
                for ready in self._jobs.get(member.run.id, ()):
                    run = ready.prepared.run
                    added = run.spec.count_parameters(self._context.backbone.anatomy)
                    self._record(ready.job, note_start(member.num_stages, added, is_resumed=is_resumed))
                    self._known_epochs[ready.job.id] = self._list_epochs(ready.job) if is_resumed else set()
        elif isinstance(event, EpochEnded):
            place = (str(event.record.get("stage") or "training"), int(event.record["epoch"]))
            for ready in self._jobs.get(event.member.run.id, ()):
                if place not in self._known_epochs.get(ready.job.id, ()):
                    self._record(ready.job, note_epoch(event))
        elif isinstance(event, RunEnded):
            if event.member.run.id in self._jobs:
                # Random numbers that are drawn here must not change those of the other runs.
                devices = [self._context.backbone.device] if self._context.backbone.device.type == "cuda" else []
                with torch.random.fork_rng(devices=devices):
                    self._end_run(event.member.run.id)
        else:
            for run_id in ids & self._jobs.keys():
                for ready in self._jobs[run_id]:
                    if note := note_of(event, self._words[ready.job.id]):
                        self._record(ready.job, note)

    def _list_epochs(self, job: Job) -> set[tuple[str, int]]:
        """Return the epochs that an earlier attempt has noted."""
        workspace, after, found = self._context.workspace(job.tenant), 0, set()
        while events := workspace.events(job.id, after):
            after = events[-1].id
            found |= {(event.data["stage"], event.data["epoch"]) for event in events if event.kind == "epoch"}
        return found

    def _list_unwanted(self) -> set[str]:
        """Return the runs whose jobs were all cancelled, now or in an earlier attempt."""
        self._lease.check()  # this is called right before the resume state is written
        cancelled = self._lease.cancelled
        wanted = {run_id for run_id, jobs in self._jobs.items() if any(ready.job.id not in cancelled for ready in jobs)}
        return ({*self._jobs} | self._ended) - wanted

    def _end_run(self, run_id: str) -> None:
        """End the jobs of a run that has ended: each goes live, or gets the reason why not."""
        result = read_result(self.folder / run_id)
        for ready in list(self._jobs.get(run_id, ())):
            if ready.job.id in self._lease.cancelled:
                self._finish(ready.job, CANCELLED)
                continue
            before = list_numbers(self._context, ready.store_name)
            way = GoingLive(ready, self._context, self._lease, self._words[ready.job.id])
            try:
                assert result is not None, "a run that ended has its result"
                way.run(result)
                self._close(ready.job)
            except _NO_FAULT_OF_A_JOB:
                raise
            except Conflict:  # cancelled, its task is being erased, or another trainer has ended it
                self._lease.confirm()
                way.withdraw(before)
                self._finish(ready.job, CANCELLED)
            except Exception as error:
                self._fail(ready.job, error, self._words[ready.job.id])
        self._jobs.pop(run_id, None)

    def _fail_runs(self, ids: Iterable[str], error: BaseException) -> None:
        for run_id in ids:
            for ready in self._jobs.pop(run_id, ()):
                self._fail(ready.job, error, self._words[ready.job.id])

    def _fail(self, job: Job, error: BaseException, words: TextCleaner) -> None:
        if job.id in self._lease.cancelled:
            self._finish(job, CANCELLED)
            return
        self._lease.check()
        described = describe_failure(error, words)
        log_event("a job failed", {"job": job.id, "tenant": job.tenant, "code": described["code"]}, level=30)
        self._context.queue.finish(self._cohort, job.id, FAILED, error=described)
        self._close(job)

    def _finish(self, job: Job, state: str) -> None:
        self._lease.check()
        self._context.queue.finish(self._cohort, job.id, state)
        self._close(job)

    def _close(self, job: Job) -> None:
        self._open.discard(job.id)
        if not self._open:
            self._lease.finish()

    def _record(self, job: Job, note: JobNote) -> None:
        with suppress(Conflict):  # something else ended it, such as an erasure
            self._context.queue.record(self._cohort, job.id, note)

    def _check_stop(self, *, is_step: bool = False) -> None:
        """Stop if that is asked for; in the middle of training as Ctrl-C does, which saves the resume state first."""
        if not self._stopping.is_set() or self._was_asked:
            return
        if is_step and threading.current_thread() is threading.main_thread():
            self._was_asked = True
            signal.raise_signal(signal.SIGINT)
        else:
            raise Interrupted
