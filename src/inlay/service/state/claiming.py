"""Picking the next cohort, and taking back those whose trainer is gone. All inside one write transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, delete, exists, func, insert, or_, select, update

from inlay.service.state import schema
from inlay.service.state.identifiers import make_id
from inlay.service.state.jobs import CANCELLED, ERASE, FAILED, QUEUED, RUNNING, TRAIN, end_job, write_event
from inlay.service.state.queue_order import Turn, Waiting, in_order, read_turns, read_waiting

HELD, LATE, PARKED, DONE = "running", "late", "waiting", "done"
"""states of a cohort: held; held, but its lease was over when somebody looked; to go on with; finished"""
LEASE_S, GRACE_S = 20.0, 10.0
"""a lease, and the time after it in which a sign of life still counts: a clock that jumps must not take it away"""
MOST_DEATHS, _ALONE_AFTER = 5, 2
"""deaths of trainers that end a job, and those after which it is trained alone: company may have been the reason"""
_GONE = {
    "code": "trainer-died",
    "message": f"the trainer ended without a word {MOST_DEATHS} times while it had this job, in the end alone",
    "hint": "memory probably ran out: use shorter texts, fewer rows or a smaller method, or ask the operator",
}


@dataclass(frozen=True)
class Wish:
    """A claim as a trainer asks for it."""

    kinds: Sequence[str]
    most: int
    company_s: float


def has_work(connection: Connection, kinds: Collection[str], now: float) -> bool:
    """Tell whether there may be anything to claim or to take back: a look that locks nobody out."""
    job, cohort = schema.jobs.c, schema.cohorts.c
    is_overdue = or_(cohort.lease_until < now, cohort.lease_until > now + LEASE_S)
    overdue = exists().where(cohort.state.in_((HELD, LATE)), is_overdue)
    queued = exists().where(job.state == QUEUED, job.kind.in_(kinds))
    return bool(connection.execute(select(or_(overdue, queued))).scalar_one())


def take_back_expired(connection: Connection, now: float) -> list[str]:
    """Take back, with blame, the cohorts that gave no sign of life during lease and grace; return their ids."""
    row = schema.cohorts.c
    lost = []
    for cohort in connection.execute(select(schema.cohorts).where(row.state.in_((HELD, LATE)))).all():
        mine = update(schema.cohorts).where(row.id == cohort.id)
        if cohort.lease_until > now + LEASE_S:  # the clock was set back: the lease must not last as much longer
            connection.execute(mine.values(lease_until=now + LEASE_S))
        elif cohort.lease_until < now and cohort.state == HELD:
            connection.execute(mine.values(state=LATE, lease_until=now + GRACE_S))
        elif cohort.lease_until < now:
            park(connection, cohort.id, now, has_died=True)
            lost.append(cohort.id)
    return lost


def park(connection: Connection, cohort: str, now: float, *, has_died: bool) -> None:
    """Put a cohort aside for the next claim. After a death its jobs are blamed: then alone, in the end failed."""
    row = schema.jobs.c
    for job in connection.execute(select(schema.jobs).where(row.cohort == cohort, row.state == RUNNING)).all():
        deaths = job.deaths + has_died
        mine = update(schema.jobs).where(row.number == job.number)
        connection.execute(mine.values(state=QUEUED, deaths=deaths, progress=None))
        if job.cancel_requested:
            end_job(connection, job.number, CANCELLED, now)
        elif deaths >= MOST_DEATHS and job.kind != ERASE:
            end_job(connection, job.number, FAILED, now, {"error": _GONE})
        elif has_died:
            if deaths >= _ALONE_AFTER and job.kind == TRAIN:
                connection.execute(mine.values(cohort=None))
            write_event(connection, job.number, now, "notice", ("its trainer ended without a word: it goes on", {}))
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


def pick_fresh(connection: Connection, wish: Wish, now: float) -> str | None:
    """Make a cohort of the jobs that come next; None if nobody waits, or all may still get company."""
    waiting = [job for job in read_waiting(connection) if job.cohort is None and job.kind in wish.kinds]
    turns = read_turns(connection)
    sizes = Counter(job.structure for job in waiting if not _is_alone(job))
    unripe: set[str] = set()
    for first in in_order(waiting, turns):
        if first.structure in unripe and not _is_alone(first):
            continue
        if _is_alone(first):
            if first.kind != ERASE or not is_busy(connection, first.tenant, first.task):
                return _make_cohort(connection, [first], turns, now)
            continue
        together = [job for job in waiting if job.structure == first.structure and not _is_alone(job)]
        # Also ripe: what was queued in the future. The clock was set back since, and nobody knows how long it waits.
        longest = max(now - job.created_at for job in together)
        is_ripe = longest >= wish.company_s or any(job.created_at > now for job in together)
        if is_ripe or sizes[first.structure] >= wish.most:
            members = list(in_order(together, turns))[: wish.most]
            return _make_cohort(connection, members, turns, now)
        unripe.add(first.structure)
    return None


def _is_alone(job: Waiting) -> bool:
    return job.kind != TRAIN or job.deaths >= _ALONE_AFTER


def is_busy(connection: Connection, tenant: str, task: str) -> bool:
    """Tell whether a trainer may still write files of a task, or with "" of any task of the tenant."""
    job, member, cohort = schema.jobs.c, schema.cohort_members.c, schema.cohorts.c
    is_of_it = and_(job.tenant == tenant, job.kind != ERASE)
    if task:
        is_of_it = and_(is_of_it, job.task == task)
    joined = and_(member.job == job.number, cohort.id == member.cohort, cohort.state.in_((HELD, LATE)))
    return bool(connection.execute(select(exists().where(is_of_it, joined))).scalar_one())


def _make_cohort(connection: Connection, jobs: Sequence[Waiting], turns: dict[str, Turn], now: float) -> str:
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


def hold(connection: Connection, cohort: str, owner: str, now: float) -> Any:
    """Begin the next attempt of a cohort: its token grows, its jobs run. Returns its row."""
    row, job = schema.cohorts.c, schema.jobs.c
    mine = update(schema.cohorts).where(row.id == cohort)
    connection.execute(mine.values(state=HELD, token=row.token + 1, owner=owner[:128], lease_until=now + LEASE_S))
    begun = connection.execute(select(job.number).where(job.cohort == cohort, job.state == QUEUED)).scalars().all()
    running = update(schema.jobs).where(job.number.in_(begun))
    connection.execute(running.values(state=RUNNING, started_at=func.coalesce(job.started_at, now)))
    for number in begun:
        write_event(connection, number, now, "claimed", ("", {"num_jobs": len(begun)}))
    return connection.execute(select(schema.cohorts).where(row.id == cohort)).one()


def forget_old_cohorts(connection: Connection) -> None:
    """Delete the cohorts whose jobs are all gone: erased."""
    row, job = schema.cohorts.c, schema.jobs.c
    gone = select(row.id).where(~exists().where(job.cohort == row.id))
    numbers = connection.execute(gone).scalars().all()
    connection.execute(delete(schema.cohort_members).where(schema.cohort_members.c.cohort.in_(numbers)))
    connection.execute(delete(schema.cohorts).where(row.id.in_(numbers)))
