"""The queue of jobs, as trainers see it: cohorts are claimed, held by a lease, and every write is fenced.

A cohort is up to 32 jobs of one structure, of any tenants. Its token grows with every attempt, and each write names
its attempt. So a trainer that was stopped, and wakes up after its cohort went to another trainer, changes nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, and_, delete, exists, func, insert, or_, select, update

from inlay.service.state import schema
from inlay.service.state.aliases import Publication, TaskKey, enter_version
from inlay.service.state.database import Database
from inlay.service.state.jobs import (
    CANCELLED,
    ENDED,
    ERASE,
    FAILED,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    TRAIN,
    Job,
    Turn,
    WaitingJob,
    end_job,
    find_job,
    in_order,
    job_of,
    read_turns,
    read_waiting,
    write_event,
)
from inlay.service.state.state_errors import Conflict, StaleLease
from inlay.service.state.values import make_id

_LEASE_S, _GRACE_S = 20.0, 10.0
"""a lease, and the time after it in which a heartbeat still counts: a clock that jumps must not take a lease away"""
LEASE_S = _LEASE_S + _GRACE_S
"""the longest time that a trainer keeps its jobs without a heartbeat"""
HEARTBEAT_S = 5.0
COMPANY_S = 2.0
MOST_JOBS = 32
HELD, LATE, PARKED, DONE = "running", "late", "waiting", "done"
"""states of a cohort: held; held, but its lease was found to be over; waiting to go on; finished"""
_MOST_DEATHS, _ALONE_AFTER = 5, 2
"""deaths of trainers after which a job fails, and after which it is trained alone: another job may be the cause"""
_TRAINER_DIED = {
    "code": "trainer-died",
    "message": f"the trainer died {_MOST_DEATHS} times while it had this job, in the end alone",
    "hint": "memory probably ran out: use shorter texts, fewer rows or a smaller method, or ask the operator",
}


@dataclass(frozen=True)
class JobCohort:
    """Jobs that are claimed together; `token` counts the attempts, and every write names it."""

    id: str
    token: int
    owner: str
    structure: str
    jobs: tuple[Job, ...]
    """the jobs to be done, in order"""
    members: tuple[str, ...]
    """ids of all its jobs, including those that ended or left: the resume state is found by them"""
    lease_until: float
    others: tuple[Job, ...] = ()
    """its jobs that are not to be done: those that ended, and those that left it"""


@dataclass(frozen=True)
class Heartbeat:
    """The answer to a trainer's heartbeat. It is true while the lease is held."""

    is_held: bool
    cancelled: tuple[str, ...] = ()
    """ids of its jobs that are to be cancelled"""

    def __bool__(self) -> bool:
        return self.is_held


@dataclass(frozen=True)
class JobNote:
    """A trainer's report on a job: an event, and the progress if it changed."""

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
    """tenant -> state -> number of jobs that have not ended"""


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
        """Claim the next cohort; None if there is nothing to do. First it takes back the cohorts that others lost.

        All in one transaction. Tenants take turns, by weight; of a tenant's jobs the priority decides, then age. A job
        waits at most `company_s` for others of its structure. Jobs of kind batch and erase are claimed alone.
        """
        with self._db.reading() as connection:
            if not has_work(connection, kinds, self._db.now()):
                return None
        with self._db.writing() as connection:
            now = self._db.now()
            take_back_expired(connection, now)
            picked = find_parked(connection, kinds)
            if picked is None:
                picked = pick_fresh(connection, kinds, most, company_s, now)
            if picked is None:
                return None
            return _read_cohort(connection, begin_attempt(connection, picked, owner, now))

    def heartbeat(self, cohort: JobCohort) -> Heartbeat:
        """Renew the lease; the answer is false if the lease was lost. Never raises StaleLease."""
        row, job = schema.cohorts.c, schema.jobs.c
        with self._db.writing() as connection:
            if not _is_held(connection, cohort):
                return Heartbeat(False)
            lease_until = self._db.now() + _LEASE_S
            mine = update(schema.cohorts).where(row.id == cohort.id)
            connection.execute(mine.values(state=HELD, lease_until=lease_until))
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
        """Note a file or folder of a job BEFORE it is made below the home: the erasure of the task deletes it."""
        below = str(path.resolve().relative_to(self._db.paths.home))
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
            raise ValueError(f"a job cannot end as `{state}`")
        said = {name: value for name, value in (("result", result), ("error", error)) if value is not None}
        with self._db.writing() as connection:
            job = _find_member(connection, cohort, job_id)
            if job.state == RUNNING:
                end_job(connection, job.number, state, self._db.now(), said)
                close_if_done(connection, cohort.id)
            elif job.state != state:
                raise Conflict(f"job `{job_id}` has ended: {job.state}", "it cannot end twice")
            return find_job(connection, job.tenant, job_id)

    def publish_live(self, cohort: JobCohort, job_id: str, publication: Publication) -> Job:
        """End a training job in one transaction: the version's row, the move of `live` if any, and the job's result.

        LiveMoved if the version it was compared with is not live any more: compare again. Conflict if the task is
        being erased, or the job is to be cancelled: finish it as cancelled.
        """
        now = self._db.now()
        with self._db.writing() as connection:
            job = _find_member(connection, cohort, job_id)
            if job.state == SUCCEEDED:  # published before by a trainer that did not get the answer
                return job
            if job.state != RUNNING or job.cancel_requested:
                raise Conflict(f"job `{job_id}` is cancelled or has ended", "finish it as cancelled")
            result = {**publication.result, **enter_version(connection, job, publication, now)}
            kind = "live" if publication.goes_live else "kept"
            write_event(connection, job.number, now, kind, (publication.reason, {"version": publication.number}))
            end_job(connection, job.number, SUCCEEDED, now, {"result": result})
            close_if_done(connection, cohort.id)
            return find_job(connection, job.tenant, job_id)

    def release(self, cohort: JobCohort) -> None:
        """Give a cohort back as it is, since the trainer is asked to stop. The next claim goes on with it."""
        with self._db.writing() as connection:
            _check_held(connection, cohort)
            park(connection, cohort.id, self._db.now(), has_died=False)

    def reclaim_expired(self) -> list[str]:
        """Take back the cohorts whose lease is over, and count a death; return their ids. `claim` does so too.

        A lease is over after two looks: at the first one the holder gets 10 more seconds for a heartbeat, in case only
        the clock has jumped. Jobs go on in the same cohort after the first death, alone after the second, and fail
        after the fifth.
        """
        with self._db.writing() as connection:
            return take_back_expired(connection, self._db.now())

    def reclaim_of(self, owner: str) -> list[str]:
        """Take back at once what an owner held, and count a death: its process has ended, and this is its successor."""
        row = schema.cohorts.c
        states = (HELD, LATE)
        with self._db.writing() as connection:
            query = select(row.id).where(row.owner == owner[:128], row.state.in_(states))
            lost = list(connection.execute(query).scalars())
            for cohort in lost:
                park(connection, cohort, self._db.now(), has_died=True)
        return lost

    def open_cohorts(self) -> set[str]:
        """Return the ids of the cohorts that are not done. Files of all others may be deleted."""
        row = schema.cohorts.c
        with self._db.reading() as connection:
            return set(connection.execute(select(row.id).where(row.state != DONE)).scalars())

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
        """Give a transaction in which the cohort is held and the job runs; else StaleLease or Conflict."""
        with self._db.writing() as connection:
            job = _find_member(connection, cohort, job_id)
            if job.state != RUNNING:
                raise Conflict(f"job `{job_id}` has ended: {job.state}", "stop its work")
            yield connection, job


def note_file(connection: Connection, task: TaskKey, path: str) -> None:
    """Note a path below the home, which the erasure of the task deletes."""
    row = schema.job_files.c
    is_it = (row.tenant == task.tenant, row.task == task.name, row.path == path)
    if connection.execute(select(row.path).where(*is_it)).first() is None:
        connection.execute(insert(schema.job_files).values(tenant=task.tenant, task=task.name, path=path))


def _is_held(connection: Connection, cohort: JobCohort) -> bool:
    row = schema.cohorts.c
    query = select(row.state, row.token).where(row.id == cohort.id)
    found = connection.execute(query).one_or_none()
    return found is not None and found.state in (HELD, LATE) and found.token == cohort.token


def _check_held(connection: Connection, cohort: JobCohort) -> None:
    if not _is_held(connection, cohort):
        raise StaleLease(cohort.id, cohort.token)


def _find_member(connection: Connection, cohort: JobCohort, job_id: str) -> Job:
    """Return a job of a cohort that is held, else raise StaleLease."""
    row = schema.jobs.c
    found = connection.execute(select(schema.jobs).where(row.id == job_id, row.cohort == cohort.id)).one_or_none()
    if found is None:
        raise StaleLease(cohort.id, cohort.token)
    if found.state in (QUEUED, RUNNING):  # once all jobs have ended the cohort is closed, not held
        _check_held(connection, cohort)
    return job_of(found)


def _read_cohort(connection: Connection, row: Any) -> JobCohort:
    job, member = schema.jobs.c, schema.cohort_members.c
    of_it = select(schema.jobs).join(schema.cohort_members, member.job == job.number).where(member.cohort == row.id)
    rows = connection.execute(of_it.order_by(member.position)).all()
    # A job that has killed two trainers has left for a cohort of its own.
    todo = tuple(job_of(item) for item in rows if item.state == RUNNING and item.cohort == row.id)
    others = tuple(job_of(item) for item in rows if item.state != RUNNING or item.cohort != row.id)
    ids = tuple(item.id for item in rows)
    return JobCohort(row.id, row.token, row.owner, row.structure, todo, ids, row.lease_until, others)


# Claiming and taking back, inside the caller's transaction


def has_work(connection: Connection, kinds: Collection[str], now: float) -> bool:
    """Tell whether there may be anything to claim or to take back. It only reads, so it locks nobody out."""
    job, cohort = schema.jobs.c, schema.cohorts.c
    is_overdue = or_(cohort.lease_until < now, cohort.lease_until > now + _LEASE_S)
    overdue = exists().where(cohort.state.in_((HELD, LATE)), is_overdue)
    queued = exists().where(job.state == QUEUED, job.kind.in_(kinds))
    return bool(connection.execute(select(or_(overdue, queued))).scalar_one())


def take_back_expired(connection: Connection, now: float) -> list[str]:
    """Take back the cohorts without a heartbeat during lease and grace, and count a death; return their ids."""
    row = schema.cohorts.c
    lost = []
    for cohort in connection.execute(select(schema.cohorts).where(row.state.in_((HELD, LATE)))).all():
        mine = update(schema.cohorts).where(row.id == cohort.id)
        if cohort.lease_until > now + _LEASE_S:  # the clock was set back, which must not make the lease longer
            connection.execute(mine.values(lease_until=now + _LEASE_S))
        elif cohort.lease_until < now and cohort.state == HELD:
            connection.execute(mine.values(state=LATE, lease_until=now + _GRACE_S))
        elif cohort.lease_until < now:
            park(connection, cohort.id, now, has_died=True)
            lost.append(cohort.id)
    return lost


def park(connection: Connection, cohort: str, now: float, *, has_died: bool) -> None:
    """Put a cohort aside for the next claim. After a death its jobs go on, later alone, and at last they fail."""
    row = schema.jobs.c
    for job in connection.execute(select(schema.jobs).where(row.cohort == cohort, row.state == RUNNING)).all():
        deaths = job.deaths + has_died
        mine = update(schema.jobs).where(row.number == job.number)
        connection.execute(mine.values(state=QUEUED, deaths=deaths, progress=None))
        if job.cancel_requested:
            end_job(connection, job.number, CANCELLED, now)
        elif deaths >= _MOST_DEATHS and job.kind != ERASE:
            end_job(connection, job.number, FAILED, now, {"error": _TRAINER_DIED})
        elif has_died:
            if deaths >= _ALONE_AFTER and job.kind == TRAIN:
                connection.execute(mine.values(cohort=None))
            write_event(connection, job.number, now, "notice", ("its trainer died: it goes on with the next one", {}))
    connection.execute(update(schema.cohorts).where(schema.cohorts.c.id == cohort).values(state=PARKED))
    close_if_done(connection, cohort)


def close_if_done(connection: Connection, cohort: str) -> None:
    """Close a cohort that has no job left to do."""
    row = schema.jobs.c
    left = select(func.count()).where(row.cohort == cohort, row.state.in_((QUEUED, RUNNING)))
    if not connection.execute(left).scalar_one():
        connection.execute(update(schema.cohorts).where(schema.cohorts.c.id == cohort).values(state=DONE))


def find_parked(connection: Connection, kinds: Collection[str]) -> str | None:
    """Return the oldest cohort that waits to go on; close those that have nothing left to do."""
    row = schema.cohorts.c
    for cohort in connection.execute(select(schema.cohorts).where(row.state == PARKED).order_by(row.created_at)).all():
        close_if_done(connection, cohort.id)
        state = connection.execute(select(row.state).where(row.id == cohort.id)).scalar_one()
        if state == PARKED and cohort.structure.partition(":")[0] in kinds:
            return str(cohort.id)
    return None


def pick_fresh(connection: Connection, kinds: Collection[str], most: int, company_s: float, now: float) -> str | None:
    """Make a cohort of the jobs that come next; None if no job is queued, or all wait for company."""
    waiting = [job for job in read_waiting(connection) if job.cohort is None and job.kind in kinds]
    turns = read_turns(connection)
    by_structure: dict[str, list[WaitingJob]] = defaultdict(list)
    for job in waiting:
        if not _is_alone(job):
            by_structure[job.structure].append(job)
    unripe: set[str] = set()
    for first in in_order(waiting, turns):
        if _is_alone(first):
            if first.kind != ERASE or not is_busy(connection, first.tenant, first.task):
                return _make_cohort(connection, [first], turns, now)
            continue
        if first.structure in unripe:
            continue
        together = by_structure[first.structure]
        longest = max(now - job.created_at for job in together)
        # A creation time in the future means that the clock was set back: then the job waits no longer.
        is_ripe = longest >= company_s or any(job.created_at > now for job in together)
        if is_ripe or len(together) >= most:
            members = list(in_order(together, turns))[:most]
            return _make_cohort(connection, members, turns, now)
        unripe.add(first.structure)
    return None


def _is_alone(job: WaitingJob) -> bool:
    return job.kind != TRAIN or job.deaths >= _ALONE_AFTER


def is_busy(connection: Connection, tenant: str, task: str) -> bool:
    """Tell whether a trainer may still write files of a task; with "" for the task, of any task of the tenant."""
    job, member, cohort = schema.jobs.c, schema.cohort_members.c, schema.cohorts.c
    is_of_it = and_(job.tenant == tenant, job.kind != ERASE)
    if task:
        is_of_it = and_(is_of_it, job.task == task)
    joined = and_(member.job == job.number, cohort.id == member.cohort, cohort.state.in_((HELD, LATE)))
    return bool(connection.execute(select(exists().where(is_of_it, joined))).scalar_one())


def _make_cohort(connection: Connection, jobs: Sequence[WaitingJob], turns: dict[str, Turn], now: float) -> str:
    cohort = make_id("cohort")
    values = {"id": cohort, "state": PARKED, "token": 0, "owner": "", "structure": jobs[0].structure}
    connection.execute(insert(schema.cohorts).values(**values, lease_until=now, created_at=now))
    for position, job in enumerate(jobs):
        member = {"cohort": cohort, "job": job.number, "position": position}
        connection.execute(insert(schema.cohort_members).values(**member))
    numbers = [job.number for job in jobs]
    connection.execute(update(schema.jobs).where(schema.jobs.c.number.in_(numbers)).values(cohort=cohort))
    row = schema.tenants.c
    for tenant, count in Counter(job.tenant for job in jobs).items():
        added = count / turns[tenant].weight
        connection.execute(update(schema.tenants).where(row.name == tenant).values(turn=row.turn + added))
    return cohort


def begin_attempt(connection: Connection, cohort: str, owner: str, now: float) -> Any:
    """Begin the next attempt of a cohort: its token grows, its jobs run. Returns its row."""
    row, job = schema.cohorts.c, schema.jobs.c
    mine = update(schema.cohorts).where(row.id == cohort)
    connection.execute(mine.values(state=HELD, token=row.token + 1, owner=owner[:128], lease_until=now + _LEASE_S))
    begun = connection.execute(select(job.number).where(job.cohort == cohort, job.state == QUEUED)).scalars().all()
    running = update(schema.jobs).where(job.number.in_(begun))
    connection.execute(running.values(state=RUNNING, started_at=func.coalesce(job.started_at, now)))
    for number in begun:
        write_event(connection, number, now, "claimed", ("", {"num_jobs": len(begun)}))
    return connection.execute(select(schema.cohorts).where(row.id == cohort)).one()


def forget_old_cohorts(connection: Connection) -> None:
    """Delete the cohorts whose jobs are all erased."""
    row, job = schema.cohorts.c, schema.jobs.c
    gone = select(row.id).where(~exists().where(job.cohort == row.id))
    numbers = connection.execute(gone).scalars().all()
    connection.execute(delete(schema.cohort_members).where(schema.cohort_members.c.cohort.in_(numbers)))
    connection.execute(delete(schema.cohorts).where(row.id.in_(numbers)))
