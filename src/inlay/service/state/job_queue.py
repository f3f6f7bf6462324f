"""The queue of jobs, from the trainer's side: cohorts are claimed, held by a lease, and every write is fenced.

A cohort is up to 32 jobs of one structure, of any tenants. Its token grows with every attempt, and each write names
the attempt it belongs to: a trainer that was stopped, and wakes up after its cohort went to another, changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.service.state.database import Database
from inlay.service.state.jobs import TRAIN, Job

LEASE_S = 30.0
HEARTBEAT_S = 5.0
COMPANY_S = 2.0
MOST_JOBS = 32
MOST_DEATHS = 3


@dataclass(frozen=True)
class JobCohort:
    """Jobs that are claimed together; `token` is the attempt that every write with it belongs to."""

    id: str
    token: int
    owner: str
    structure: str
    jobs: tuple[Job, ...]
    """those to be done, in order"""
    members: tuple[str, ...]
    """ids of all it ever had, also ended ones: resume finds its state by them"""
    lease_until: float


@dataclass(frozen=True)
class Heartbeat:
    """An answer to a trainer's sign of life. It is true while the lease is held."""

    is_held: bool
    cancelled: tuple[str, ...] = ()
    """ids of its jobs that are to be cancelled"""

    def __bool__(self) -> bool:
        return self.is_held


@dataclass(frozen=True)
class JobNote:
    """Something a trainer has to tell of a job: an event, and its progress if that changed."""

    kind: str
    message: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    progress: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Publication:
    """A version that a job published, and whether it goes live."""

    number: int
    digest: str
    size_bytes: int
    goes_live: bool
    reason: str
    result: Mapping[str, Any]
    """the job's result; `is_live` and `reason` are set here"""
    compared_with: int | None = None
    """the live version it was compared with; then LiveMoved if another one is live by now"""


@dataclass(frozen=True)
class QueueStats:
    """The state of the queue, for metrics and the operator's page."""

    queued: int
    running: int
    oldest_wait_s: float
    by_tenant: dict[str, dict[str, int]]
    """tenant -> state -> jobs, of those that have not ended"""


class JobQueue:
    """The jobs of all tenants, as a trainer sees them. Every method but `claim` and `stats` may raise StaleLease."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def claim(
        self,
        owner: str,
        *,
        kinds: Sequence[str] = (TRAIN,),
        most: int = MOST_JOBS,
        company_s: float = COMPANY_S,
    ) -> JobCohort | None:
        """Claim the next cohort, None if there is nothing to do. Reclaims what others lost, first of all.

        One transaction: tenants in turn, by weight; of a tenant's jobs by priority, then age. A job waits at most
        `company_s` for others of its structure. Jobs of kind batch and erase come alone.
        """
        raise NotImplementedError

    def heartbeat(self, cohort: JobCohort) -> Heartbeat:
        """Renew the lease; false if it was lost. Never raises StaleLease."""
        raise NotImplementedError

    def record(self, cohort: JobCohort, job_id: str, note: JobNote) -> None:
        """Add an event to a job, with its progress."""
        raise NotImplementedError

    def note_path(self, cohort: JobCohort, job_id: str, path: Path) -> None:
        """Note a file or folder below the home BEFORE it is made for a job: it goes when the job's task is erased."""
        raise NotImplementedError

    def finish(
        self,
        cohort: JobCohort,
        job_id: str,
        state: str,
        *,
        result: Mapping[str, Any] | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> Job:
        """End a job: succeeded with its result, failed with its error (as `InlayError.to_json`), or cancelled."""
        raise NotImplementedError

    def publish_live(self, cohort: JobCohort, job_id: str, publication: Publication) -> Job:
        """End a training job: its version's row, `live` and its history if it goes live, and the job's result, at once.

        LiveMoved if what it was compared with is not live any more: compare again. Conflict if its task is being
        erased, or the job is to be cancelled: finish it as cancelled.
        """
        raise NotImplementedError

    def release(self, cohort: JobCohort) -> None:
        """Give a cohort back as it is, without blame: the trainer is asked to stop. The next claim goes on with it."""
        raise NotImplementedError

    def reclaim_expired(self) -> list[str]:
        """Take back the cohorts whose lease is over, with blame; return their ids. `claim` does so by itself.

        Jobs whose trainer died once go on in the same cohort, after the second time alone, and fail after the third.
        """
        raise NotImplementedError

    def stats(self) -> QueueStats:
        """Return the state of the queue."""
        raise NotImplementedError
