"""The trainer's process: it claims cohorts one after another, and batches and erasures beside them, until stopped.

It yields to the engine (niced, few threads), keeps only the backbone in memory between two cohorts, and may be killed
at any moment: the next trainer goes on with its work.
"""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from inlay.errors import InlayError, StoreUnreachable
from inlay.service.child import Child
from inlay.service.engine import SyncAnswering, SyncEngineClient, SyncFleetClient, find_roster
from inlay.service.logs import log_event, log_failure
from inlay.service.settings import ServeSettings
from inlay.service.state import (
    BATCH,
    ERASE,
    HEARTBEAT_S,
    LEASE_S,
    TRAIN,
    Database,
    JobCohort,
    JobQueue,
    StaleLease,
    sweep_leftovers,
    sweep_lost_parts,
)
from inlay.service.trainer.answering import Answerer
from inlay.service.trainer.attempts import sweep_runs
from inlay.service.trainer.cohort_work import CohortWork
from inlay.service.trainer.job_data import TrainerContext
from inlay.service.trainer.leases import Lease
from inlay.service.trainer.side_jobs import BatchWork, StopAsked, erase
from inlay.store import Store
from inlay.threads import set_threads

POLL_S = 0.5
SWEEP_S = 3600.0
LOST_S = 60.0
"""between two sweeps of this machine's files of jobs that other machines have ended"""
_ERROR_S = 5.0  # pause after an unexpected error, such as a database that cannot be written


class Trainer:
    """Claims and does jobs. `serve` runs one as a process; tests call `train_next` and `do_next`."""

    def __init__(
        self,
        context: TrainerContext,
        owner: str,
        stopping: threading.Event | None = None,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        lease_s: float = LEASE_S,
    ) -> None:
        self.context, self.owner = context, owner
        self.heartbeat_s, self.lease_s = heartbeat_s, lease_s
        self.stopping = stopping or threading.Event()

    def train_next(self, company_s: float = 2.0) -> bool:
        """Claim and train the next cohort; False if there is nothing to train."""
        cohort = self.context.queue.claim(self.owner, kinds=(TRAIN,), company_s=company_s)
        if cohort is None:
            return False
        self._work(cohort, lambda lease: CohortWork(cohort, self.context, lease, self.stopping).run())
        sweep_runs(self.context)
        return True

    def do_next(self) -> bool:
        """Claim and do the next erasure or batch; False if there is none."""
        erasure = self.context.queue.claim(self.owner, kinds=(ERASE,), company_s=0.0)
        if erasure is not None:
            self._guard(erasure, lambda: erase(erasure, self.context))
            return True
        batch = self.context.queue.claim(self.owner, kinds=(BATCH,), company_s=0.0)
        if batch is not None:
            self._work(batch, lambda lease: BatchWork(batch, self.context, lease, self.stopping).run())
        return batch is not None

    def run(self, step: Callable[[], bool]) -> None:
        """Take step after step until the trainer is stopped."""
        while not self.stopping.is_set():
            try:
                did_something = step()
            except InlayError as error:  # the database is full, or busy for too long
                log_event("the trainer waits", {"code": error.code}, level=40)
                self.stopping.wait(_ERROR_S)
                continue
            except Exception:
                log_failure("the trainer waits after an unexpected error")
                self.stopping.wait(_ERROR_S)
                continue
            if not did_something:
                self.stopping.wait(POLL_S)

    def _work(self, cohort: JobCohort, work: Callable[[Lease], None]) -> None:
        """Do the work on a cohort while its lease holds; give it back if the trainer is asked to stop."""
        with Lease(self.context.queue, cohort, heartbeat_s=self.heartbeat_s, lease_s=self.lease_s) as lease:
            self._guard(cohort, lambda: work(lease))

    def _guard(self, cohort: JobCohort, work: Callable[[], None]) -> None:
        about = {"cohort": cohort.id, "attempt": cohort.token, "jobs": len(cohort.jobs)}
        log_event("claimed", {**about, "structure": cohort.structure})
        try:
            work()
        except StaleLease:
            log_event("dropped: the lease was lost", about, level=30)
        except StoreUnreachable:  # the database or storage, not the jobs: they go on when it answers again
            with suppress(InlayError):
                self.context.queue.release(cohort)
            raise
        except (KeyboardInterrupt, StopAsked):  # asked to stop; the resume state is saved
            self.context.queue.release(cohort)
            log_event("given back", about)
            self.stopping.set()
        else:
            log_event("done", about)


class SideStep:
    """One step of the thread beside training: the next erasure or batch, and once an hour a sweep."""

    def __init__(self, side: Trainer) -> None:
        self._side = side
        self._swept_at = -math.inf

    def __call__(self) -> bool:
        if time.monotonic() - self._swept_at >= SWEEP_S:
            self._swept_at = time.monotonic()
            context = self._side.context
            deleted = {"folders": sweep_runs(context), "files": sweep_leftovers(context.db)}
            if any(deleted.values()):
                log_event("swept", deleted)
        return self._side.do_next()


def sweep_lost(context: TrainerContext) -> None:
    """Delete this machine's files of jobs that have ended or are erased, perhaps by another machine."""
    sweep_runs(context, only_here=True)
    sweep_lost_parts(context.db)


def keep_sweeping(context: TrainerContext, stopping: threading.Event) -> None:
    """Sweep every minute until stopped. It has a thread of its own, as one batch may take hours."""
    while True:
        try:
            sweep_lost(context)
        except InlayError as error:
            log_event("files of lost jobs stay for now", {"code": error.code}, level=30)
        except Exception:
            log_failure("files of lost jobs could not be looked for")
        if stopping.wait(LOST_S):
            return


def serve(child: Child) -> None:
    """Run the trainer's process until it is stopped."""
    settings = child.settings
    os.environ["INLAY_CACHE_BYTES"] = "0"  # a customer's rows are kept nowhere outside the service's folder
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    child.progress(f"loading the backbone {settings.backbone}")
    context = open_context(settings)
    # On a cluster a trainer may be restarted on another machine, under the same name.
    owner = f"{'cluster' if settings.cluster else socket.gethostname()}/{child.name}"
    lost = context.queue.reclaim_of(owner)  # the last process of this name has ended
    if lost:
        log_event("goes on", {"cohorts": len(lost)})
    trainer = Trainer(context, owner, child.stopping)
    # The thread of side jobs has its own connection to the engine.
    answers = Answerer(context.backbone, context.store, _make_client(settings))
    side = Trainer(dataclasses.replace(context, answers=answers), f"{owner}/side", child.stopping)
    context.queue.reclaim_of(side.owner)
    thread = threading.Thread(target=side.run, args=(SideStep(side),), name="side-jobs", daemon=True)
    thread.start()
    sweeps = threading.Thread(target=keep_sweeping, args=(context, child.stopping), name="sweeps", daemon=True)
    sweeps.start()
    child.ready({"backbone": context.backbone.name, "device": str(context.backbone.device)})
    trainer.run(trainer.train_next)
    thread.join(settings.drain_s)
    sweeps.join(settings.drain_s)
    context.db.close()


def open_context(settings: ServeSettings) -> TrainerContext:
    """Load the backbone and open everything that jobs need."""
    from inlay.model import load_backbone

    num_threads = settings.threads_of("trainer")
    set_threads(num_threads)
    backbone = load_backbone(settings.backbone, device=None if settings.device == "auto" else settings.device)
    db, store = Database.open(settings.store_address), Store(settings.store_address)
    answers = Answerer(backbone, store, _make_client(settings))
    return TrainerContext(db, JobQueue(db), store, backbone, answers, num_threads)


def _make_client(settings: ServeSettings) -> SyncAnswering:
    roster = find_roster()
    return SyncEngineClient(settings.engine_socket) if roster is None else SyncFleetClient(roster)
