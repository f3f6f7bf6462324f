"""Jobs: what a tenant asked to be done, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Connection, func, insert, select, update

from inlay.errors import BadConfig, UnknownName
from inlay.service.state import schema
from inlay.service.state.identifiers import make_id
from inlay.service.state.paging import Page, check_limit, cut_page, read_cursor
from inlay.service.state.queue_order import find_places
from inlay.service.state.state_errors import Conflict, OverLimit
from inlay.service.state.timestamps import to_iso

if TYPE_CHECKING:
    from inlay.service.state.tenants import Tenant

TRAIN, BATCH, ERASE = "train", "batch", "erase"
KINDS_OF_JOB = (TRAIN, BATCH, ERASE)
QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED = "queued", "running", "succeeded", "failed", "cancelled"
ENDED = (SUCCEEDED, FAILED, CANCELLED)
POLICIES = ("always", "if-better", "never")
"""when a trained version goes live"""
MOST_PRIORITY = 9


@dataclass(frozen=True)
class JobRequest:
    """A job as it is asked for. `structure` names jobs that may train together; by default the method does."""

    kind: str
    task: str
    dataset: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    publish: str | None = None
    """one of `POLICIES`; by default the task's"""
    priority: int = 0
    """-9 to 9: higher ones come first among the tenant's own"""
    structure: str | None = None


@dataclass(frozen=True)
class Job:
    """A job as it stands."""

    id: str
    tenant: str
    kind: str
    task: str
    dataset: str | None
    state: str
    priority: int
    publish: str
    settings: dict[str, Any]
    structure: str
    deaths: int
    """trainers that ended without a word while they had it"""
    cancel_requested: bool
    progress: dict[str, Any] | None
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    number: int
    place: int | None = None
    """jobs that come before it in the queue, and itself; None if it is not queued"""

    @property
    def has_ended(self) -> bool:
        """Whether nothing will happen to it any more."""
        return self.state in ENDED

    def to_json(self) -> dict[str, Any]:
        """Return the job as the API shows it."""
        shown = (
            *("id", "kind", "task", "dataset", "state", "place", "priority", "publish", "settings"),
            *("progress", "result", "error"),
        )
        times = {name: to_iso(getattr(self, name)) for name in ("created_at", "started_at", "ended_at")}
        return {
            **{name: getattr(self, name) for name in shown},
            **times,
            "cancel_requested": self.cancel_requested,
        }


@dataclass(frozen=True)
class JobEvent:
    """Something that happened to a job; `id` grows over all jobs."""

    id: int
    at: float
    kind: str
    message: str
    data: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the event as the API shows it."""
        return {"id": self.id, "at": to_iso(self.at), "kind": self.kind, "message": self.message, "data": self.data}


def check_request(request: JobRequest) -> None:
    """Refuse a request that no job can be made of."""
    if request.kind not in (TRAIN, BATCH):
        raise UnknownName("kind of job", request.kind, (TRAIN, BATCH))
    if request.publish is not None and request.publish not in POLICIES:
        raise UnknownName("policy", request.publish, POLICIES)
    if isinstance(request.priority, bool) or not -MOST_PRIORITY <= request.priority <= MOST_PRIORITY:
        raise BadConfig(
            f"the priority is {request.priority}", f"a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}"
        )


def insert_job(connection: Connection, tenant: Tenant, request: JobRequest, actor: str, now: float) -> Job:
    """Queue a job whose request was checked, with its first event. OverLimit if the tenant has too many."""
    job, row = schema.jobs, schema.jobs.c
    mine = row.tenant == tenant.name
    allowed = tenant.limits.queued_jobs
    if request.kind != ERASE and allowed is not None:
        counted = select(func.count()).where(mine, row.state == QUEUED, row.kind != ERASE)
        num_queued = connection.execute(counted).scalar_one()
        if num_queued >= allowed:
            raise OverLimit("queued_jobs", num_queued + 1, allowed)
    _join_turns(connection, tenant.name)
    job_id = make_id("job")
    structure = request.structure or str(request.settings.get("method", "default"))
    values = {
        "tenant": tenant.name,
        "id": job_id,
        "kind": request.kind,
        "task": request.task,
        "dataset": request.dataset,
        "state": QUEUED,
        "priority": request.priority,
        "publish": request.publish or "never",
        "settings": dict(request.settings),
        "structure": f"{request.kind}:{structure if request.kind == TRAIN else job_id}",
        "deaths": 0,
        "cancel_requested": False,
        "asked_by": actor,
        "created_at": now,
    }
    number = connection.execute(insert(job).values(**values).returning(row.number)).scalar_one()
    write_event(connection, number, now, "queued")
    return find_job(connection, tenant.name, job_id)


def _join_turns(connection: Connection, tenant: str) -> None:
    """Lift a tenant that comes back from idle to the least turn of those at work: idling saves nothing up."""
    row, job = schema.tenants.c, schema.jobs.c
    at_work = select(job.tenant).where(job.state.in_((QUEUED, RUNNING))).distinct()
    turns = connection.execute(select(row.name, row.turn).where(row.name.in_(at_work))).all()
    if turns and tenant not in {name for name, _ in turns}:
        least = min(turn for _, turn in turns)
        connection.execute(update(schema.tenants).where(row.name == tenant, row.turn < least).values(turn=least))


def write_event(
    connection: Connection, number: int, at: float, kind: str, said: tuple[str, Mapping[str, Any]] = ("", {})
) -> None:
    """Add an event to the job with a number; `said` is its message and data."""
    message, data = said
    values = {"job": number, "at": at, "kind": kind[:16], "message": message, "data": dict(data)}
    connection.execute(insert(schema.job_events).values(**values))


def job_of(row: Any, place: int | None = None) -> Job:
    """Return a row of the table as a job."""
    return Job(
        id=row.id,
        tenant=row.tenant,
        kind=row.kind,
        task=row.task,
        dataset=row.dataset,
        state=row.state,
        priority=row.priority,
        publish=row.publish,
        settings=row.settings,
        structure=row.structure,
        deaths=row.deaths,
        cancel_requested=row.cancel_requested,
        progress=row.progress,
        result=row.result,
        error=row.error,
        created_at=row.created_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        number=row.number,
        place=place,
    )


def find_job(connection: Connection, tenant: str, job_id: str) -> Job:
    """Return a tenant's job."""
    row = schema.jobs.c
    found = connection.execute(select(schema.jobs).where(row.tenant == tenant, row.id == job_id)).one_or_none()
    if found is None:
        raise UnknownName("job", job_id, (), hint="`GET /v1/jobs` lists them")
    return job_of(found)


def placed(connection: Connection, jobs: list[Job]) -> list[Job]:
    """Return jobs with their places in the queue."""
    if not any(job.state == QUEUED for job in jobs):
        return jobs
    places = find_places(connection)
    return [replace(job, place=places.get(job.number)) for job in jobs]


def list_jobs(
    connection: Connection, tenant: str, only: Mapping[str, str | None], limit: int, cursor: str | None
) -> Page[Job]:
    """Return a page of a tenant's jobs, newest first; `only` has values of `task` and `state` that they must have."""
    check_limit(limit)
    row = schema.jobs.c
    query = select(schema.jobs).where(row.tenant == tenant)
    for name, value in only.items():
        query = query if value is None else query.where(row[name] == value)
    after = read_cursor("jobs", cursor, int)
    query = query if after is None else query.where(row.number < after)
    found = connection.execute(query.order_by(row.number.desc()).limit(limit + 1)).all()
    jobs = placed(connection, [job_of(item) for item in found])
    return cut_page("jobs", jobs, limit, lambda job: job.number)


def list_events(connection: Connection, number: int, after: int, limit: int) -> list[JobEvent]:
    """Return events of the job with a number, oldest first."""
    row = schema.job_events.c
    query = select(schema.job_events).where(row.job == number, row.id > after).order_by(row.id).limit(limit)
    return [JobEvent(item.id, item.at, item.kind, item.message, item.data) for item in connection.execute(query)]


def cancel_job(connection: Connection, job: Job, now: float) -> None:
    """Cancel a job that has not ended: at once if it is queued, else its trainer is asked to."""
    if job.kind == ERASE:
        raise Conflict("an erasure cannot be cancelled", "wait until it is done")
    row = schema.jobs.c
    cancel_where(connection, row.number == job.number, now)


def cancel_where(connection: Connection, which: ColumnElement[bool], now: float) -> None:
    """Cancel all jobs, but erasures, that a condition holds for and that have not ended."""
    row = schema.jobs.c
    queued = select(row.number).where(which, row.state == QUEUED, row.kind != ERASE)
    for number in connection.execute(queued).scalars().all():
        end_job(connection, number, CANCELLED, now)
    running = update(schema.jobs).where(which, row.state == RUNNING, row.kind != ERASE)
    connection.execute(running.values(cancel_requested=True))


def end_job(
    connection: Connection, number: int, state: str, now: float, said: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """End a job, with its last event; `said` may have its `result` or its `error`."""
    said = said or {}
    values = {name: dict(value) for name, value in said.items()}
    connection.execute(
        update(schema.jobs).where(schema.jobs.c.number == number).values(state=state, ended_at=now, **values)
    )
    if state in (FAILED, CANCELLED):
        message = str(said.get("error", {}).get("message", ""))
        write_event(connection, number, now, state, (message, values.get("error", {})))
