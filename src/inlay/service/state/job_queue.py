"""The queue of jobs, from the trainer's side: cohorts are claimed, held by a lease, and every write is fenced.

A cohort is up to 32 jobs of one structure, of any tenants. Its token grows with every attempt, and each write names
the attempt it belongs to: a trainer that was stopped, and wakes up after its cohort went to another, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from inlay.service.state import claiming, schema
from inlay.service.state.aliases import Publication, TaskKey, enter_version
from inlay.service.state.database import Database
from inlay.service.state.jobs import (
    ENDED,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    TRAIN,
    Job,
    end_job,
    find_job,
    job_of,
    write_event,
)
from inlay.service.state.state_errors import Conflict, StaleLease

LEASE_S = claiming.LEASE_S + claiming.GRACE_S
"""the longest that a trainer without a sign of life keeps its jobs"""
HEARTBEAT_S = 5.0
COMPANY_S = 2.0
MOST_JOBS = 32


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
    others: tuple[Job, ...] = ()
    """its members that are not to be done: ended ones, and those that left it"""


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
        with self._db.reading() as connection:
            if not claiming.has_work(connection, kinds, self._db.now()):
                return None
        with self._db.writing() as connection:
            now = self._db.now()
            claiming.take_back_expired(connection, now)
            picked = claiming.find_parked(connection, kinds)
            if picked is None:
                picked = claiming.pick_fresh(connection, claiming.Wish(kinds, most, company_s), now)
            if picked is None:
                return None
            return _read_cohort(connection, claiming.hold(connection, picked, owner, now))

    def heartbeat(self, cohort: JobCohort) -> Heartbeat:
        """Renew the lease; false if it was lost. Never raises StaleLease."""
        row, job = schema.cohorts.c, schema.jobs.c
        with self._db.writing() as connection:
            if not _is_held(connection, cohort):
                return Heartbeat(False)
            lease_until = self._db.now() + claiming.LEASE_S
            mine = update(schema.cohorts).where(row.id == cohort.id)
            connection.execute(mine.values(state=claiming.HELD, lease_until=lease_until))
            query = select(job.id).where(job.cohort == cohort.id, job.state == RUNNING, job.cancel_requested)
            return Heartbeat(True, tuple(connection.execute(query).scalars()))

    def record(self, cohort: JobCohort, job_id: str, note: JobNote) -> None:
        """Add an event to a job, with its progress."""
        with self._working(cohort, job_id) as (connection, job):
            write_event(connection, job.number, self._db.now(), note.kind, (note.message, note.data))
            if note.progress is not None:
                mine = update(schema.jobs).where(schema.jobs.c.number == job.number)
                connection.execute(mine.values(progress=dict(note.progress)))

    def note_path(self, cohort: JobCohort, job_id: str, path: Path) -> None:
        """Note a file or folder below the home BEFORE it is made for a job: it goes when the job's task is erased."""
        below = str(path.resolve().relative_to(self._db.places.home))
        with self._working(cohort, job_id) as (connection, job):
            note_file(connection, TaskKey(job.tenant, job.task), below)

    def finish(
        self,
        cohort: JobCohort,
        job_id: str,
        state: str,
        *,
        result: Mapping[str, Any] | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> Job:
        """End a job: succeeded with its result, failed with its error (as `InlayError.to_json`), or cancelled.

        Ending it again in the same way changes nothing.
        """
        if state not in ENDED:
            raise ValueError(f"`{state}` is no end")
        said = {name: value for name, value in (("result", result), ("error", error)) if value is not None}
        with self._db.writing() as connection:
            job = _find_member(connection, cohort, job_id)
            if job.state == RUNNING:
                end_job(connection, job.number, state, self._db.now(), said)
                claiming.close_if_done(connection, cohort.id)
            elif job.state != state:
                raise Conflict(f"job `{job_id}` has ended: {job.state}", "it cannot end twice")
            return find_job(connection, job.tenant, job_id)

    def publish_live(self, cohort: JobCohort, job_id: str, publication: Publication) -> Job:
        """End a training job: its version's row, `live` and its history if it goes live, and the job's result, at once.

        LiveMoved if what it was compared with is not live any more: compare again. Conflict if its task is being
        erased, or the job is to be cancelled: finish it as cancelled.
        """
        now = self._db.now()
        with self._db.writing() as connection:
            job = _find_member(connection, cohort, job_id)
            if job.state == SUCCEEDED:  # said before, by a trainer that did not hear the answer
                return job
            if job.state != RUNNING or job.cancel_requested:
                raise Conflict(f"job `{job_id}` is cancelled or has ended", "finish it as cancelled")
            result = {**publication.result, **enter_version(connection, job, publication, now)}
            kind = "live" if publication.goes_live else "kept"
            write_event(connection, job.number, now, kind, (publication.reason, {"version": publication.number}))
            end_job(connection, job.number, SUCCEEDED, now, {"result": result})
            claiming.close_if_done(connection, cohort.id)
            return find_job(connection, job.tenant, job_id)

    def release(self, cohort: JobCohort) -> None:
        """Give a cohort back as it is, without blame: the trainer is asked to stop. The next claim goes on with it."""
        with self._db.writing() as connection:
            _check_held(connection, cohort)
            claiming.park(connection, cohort.id, self._db.now(), has_died=False)

    def reclaim_expired(self) -> list[str]:
        """Take back the cohorts whose lease is over, with blame; return their ids. `claim` does so by itself.

        A lease is over after two looks: at the first, the holder gets 10 seconds for a sign of life, in case that only
        the clock has jumped. Jobs whose trainer died once go on in the same cohort, after the second time alone, and
        fail after the third.
        """
        with self._db.writing() as connection:
            return claiming.take_back_expired(connection, self._db.now())

    def reclaim_of(self, owner: str) -> list[str]:
        """Take back at once, with blame, what an owner held: its process has ended, and this is its successor."""
        row = schema.cohorts.c
        states = (claiming.HELD, claiming.LATE)
        with self._db.writing() as connection:
            query = select(row.id).where(row.owner == owner[:128], row.state.in_(states))
            lost = list(connection.execute(query).scalars())
            for cohort in lost:
                claiming.park(connection, cohort, self._db.now(), has_died=True)
        return lost

    def open_cohorts(self) -> set[str]:
        """Return the ids of the cohorts that are not done: files of any other may be deleted."""
        row = schema.cohorts.c
        with self._db.reading() as connection:
            return set(connection.execute(select(row.id).where(row.state != claiming.DONE)).scalars())

    def stats(self) -> QueueStats:
        """Return the state of the queue."""
        row = schema.jobs.c
        open_jobs = row.state.in_((QUEUED, RUNNING))
        with self._db.reading() as connection:
            query = select(row.tenant, row.state, func.count()).where(open_jobs).group_by(row.tenant, row.state)
            counts = connection.execute(query).all()
            oldest = connection.execute(select(func.min(row.created_at)).where(row.state == QUEUED)).scalar()
        by_tenant: dict[str, dict[str, int]] = {}
        for tenant, state, count in counts:
            by_tenant.setdefault(tenant, {QUEUED: 0, RUNNING: 0})[state] = count
        total = {state: sum(found[state] for found in by_tenant.values()) for state in (QUEUED, RUNNING)}
        wait_s = 0.0 if oldest is None else max(0.0, self._db.now() - oldest)
        return QueueStats(total[QUEUED], total[RUNNING], wait_s, by_tenant)

    @contextmanager
    def _working(self, cohort: JobCohort, job_id: str) -> Iterator[tuple[Connection, Job]]:
        """Give a transaction in which the cohort is held and the job runs; StaleLease otherwise."""
        with self._db.writing() as connection:
            job = _find_member(connection, cohort, job_id)
            if job.state != RUNNING:
                raise Conflict(f"job `{job_id}` has ended: {job.state}", "stop its work")
            yield connection, job


def note_file(connection: Connection, task: TaskKey, path: str) -> None:
    """Note a path below the home as one that goes when a task is erased."""
    row = schema.job_files.c
    is_it = (row.tenant == task.tenant, row.task == task.name, row.path == path)
    if connection.execute(select(row.path).where(*is_it)).first() is None:
        connection.execute(insert(schema.job_files).values(tenant=task.tenant, task=task.name, path=path))


def _is_held(connection: Connection, cohort: JobCohort) -> bool:
    row = schema.cohorts.c
    query = select(row.state, row.token).where(row.id == cohort.id)
    found = connection.execute(query).one_or_none()
    return found is not None and found.state in (claiming.HELD, claiming.LATE) and found.token == cohort.token


def _check_held(connection: Connection, cohort: JobCohort) -> None:
    if not _is_held(connection, cohort):
        raise StaleLease(cohort.id, cohort.token)


def _find_member(connection: Connection, cohort: JobCohort, job_id: str) -> Job:
    """Return a job of a cohort that is held; StaleLease for any other."""
    row = schema.jobs.c
    found = connection.execute(select(schema.jobs).where(row.id == job_id, row.cohort == cohort.id)).one_or_none()
    if found is None:
        raise StaleLease(cohort.id, cohort.token)
    if found.state in (QUEUED, RUNNING):  # what has ended closed the cohort, perhaps
        _check_held(connection, cohort)
    return job_of(found)


def _read_cohort(connection: Connection, row: Any) -> JobCohort:
    job, member = schema.jobs.c, schema.cohort_members.c
    of_it = select(schema.jobs).join(schema.cohort_members, member.job == job.number).where(member.cohort == row.id)
    rows = connection.execute(of_it.order_by(member.position)).all()
    # A job that has killed two trainers goes on in a cohort of its own.
    todo = tuple(job_of(item) for item in rows if item.state == RUNNING and item.cohort == row.id)
    others = tuple(job_of(item) for item in rows if item.state != RUNNING or item.cohort != row.id)
    ids = tuple(item.id for item in rows)
    return JobCohort(row.id, row.token, row.owner, row.structure, todo, ids, row.lease_until, others)
