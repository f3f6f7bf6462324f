"""Jobs of tenants: requests, results, events, the order of the queue, and the time that queued jobs will take.

Tenants take turns, by weight; of a tenant's jobs the priority decides, then age. A tenant's turn is the number of its
jobs that were claimed, divided by its weight; the tenant with the least turn comes next.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Connection, func, insert, select, update

from inlay.errors import BadConfig, UnknownName
from inlay.service.state import schema
from inlay.service.state.paging import Page, read_newest
from inlay.service.state.state_errors import OverLimit
from inlay.service.state.values import make_id, to_iso

if TYPE_CHECKING:
    from inlay.service.state.database import Database
    from inlay.service.state.tenants import Tenant

TRAIN, BATCH, ERASE = "train", "batch", "erase"
QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED = "queued", "running", "succeeded", "failed", "cancelled"
ENDED = (SUCCEEDED, FAILED, CANCELLED)
POLICIES = ("always", "if-better", "never")
"""when a trained version goes live"""
MOST_PRIORITY = 9
_USUAL_S = 0.01
"""seconds for a row of one epoch, before any training has ended"""
_USUAL_ROUNDS = 10
_START_S = 5.0
_NUM_ENDED = 20
_MOST_COUNTED = 1000


@dataclass(frozen=True)
class JobRequest:
    """A request for a job."""

    kind: str
    task: str
    dataset: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    publish: str | None = None
    """one of `POLICIES`; by default the task's"""
    priority: int = 0
    """-9 to 9: higher ones come first among the tenant's own"""
    structure: str | None = None
    """jobs of one structure may train together; by default the method's name"""


@dataclass(frozen=True)
class Job:
    """A job, as its row says."""

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
    """how many trainers died while they had it"""
    cancel_requested: bool
    progress: dict[str, Any] | None
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    number: int
    place: int | None = None
    """its place in the queue (1: next); None if it is not queued"""

    @property
    def has_ended(self) -> bool:
        """Return whether it has succeeded, failed or been cancelled."""
        return self.state in ENDED

    def to_json(self) -> dict[str, Any]:
        """Return the job as the API shows it."""
        return {
            "id": self.id,
            "kind": self.kind,
            "task": self.task,
            "dataset": self.dataset,
            "state": self.state,
            "place": self.place,
            "priority": self.priority,
            "publish": self.publish,
            "settings": self.settings,
            "progress": self.progress,
            "result": self.result,
            "error": self.error,
            "created_at": to_iso(self.created_at),
            "started_at": to_iso(self.started_at),
            "ended_at": to_iso(self.ended_at),
            "cancel_requested": self.cancel_requested,
        }


@dataclass(frozen=True)
class JobEvent:
    """Something that happened to a job. Ids grow over the events of all jobs."""

    id: int
    at: float
    kind: str
    message: str
    data: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the event as the API shows it."""
        return {"id": self.id, "at": to_iso(self.at), "kind": self.kind, "message": self.message, "data": self.data}


@dataclass(frozen=True)
class WaitingJob:
    """A queued job, with the columns that its order and its cohort depend on."""

    number: int
    tenant: str
    task: str
    kind: str
    structure: str
    priority: int
    deaths: int
    created_at: float
    cohort: str | None


@dataclass(frozen=True)
class Turn:
    """A tenant's turn, and its weight."""

    at: float
    weight: float


def check_request(request: JobRequest) -> None:
    """Refuse a request of an unknown kind or policy, or with a priority out of range."""
    if request.kind not in (TRAIN, BATCH):
        raise UnknownName("kind of job", request.kind, (TRAIN, BATCH))
    if request.publish is not None and request.publish not in POLICIES:
        raise UnknownName("policy", request.publish, POLICIES)
    if isinstance(request.priority, bool) or not -MOST_PRIORITY <= request.priority <= MOST_PRIORITY:
        raise BadConfig(
            f"the priority is {request.priority}", f"a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}"
        )


def insert_job(connection: Connection, tenant: Tenant, request: JobRequest, actor: str, now: float) -> Job:
    """Queue a job of a checked request, with its first event. OverLimit if the tenant has too many queued jobs."""
    allowed = tenant.limits.queued_jobs
    if request.kind != ERASE and allowed is not None:
        num_queued = count_queued(connection, tenant.name)
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
    query = insert(schema.jobs).values(**values).returning(schema.jobs.c.number)
    number = connection.execute(query).scalar_one()
    write_event(connection, number, now, "queued")
    return find_job(connection, tenant.name, job_id)


def count_queued(connection: Connection, tenant: str) -> int:
    """Return the number of a tenant's queued jobs; erasures do not count."""
    row = schema.jobs.c
    query = select(func.count()).where(row.tenant == tenant, row.state == QUEUED, row.kind != ERASE)
    return int(connection.execute(query).scalar_one())


def _join_turns(connection: Connection, tenant: str) -> None:
    """Raise the turn of an idle tenant to the least turn of the active ones: being idle earns no advantage."""
    row, job = schema.tenants.c, schema.jobs.c
    active = select(job.tenant).where(job.state.in_((QUEUED, RUNNING))).distinct()
    turns = connection.execute(select(row.name, row.turn).where(row.name.in_(active))).all()
    if turns and tenant not in {name for name, _ in turns}:
        least = min(turn for _, turn in turns)
        connection.execute(update(schema.tenants).where(row.name == tenant, row.turn < least).values(turn=least))


def write_event(
    connection: Connection, number: int, at: float, kind: str, said: tuple[str, Mapping[str, Any]] = ("", {})
) -> None:
    """Add an event to the job with this number; `said` is the event's message and data."""
    message, data = said
    values = {"job": number, "at": at, "kind": kind[:16], "message": message, "data": dict(data)}
    connection.execute(insert(schema.job_events).values(**values))


def job_of(row: Any) -> Job:
    """Return a row of the table as a job, without its place in the queue."""
    return Job(**{item.name: getattr(row, item.name) for item in fields(Job) if item.name != "place"})


def find_job(connection: Connection, tenant: str, job_id: str) -> Job:
    """Return a tenant's job."""
    row = schema.jobs.c
    found = connection.execute(select(schema.jobs).where(row.tenant == tenant, row.id == job_id)).one_or_none()
    if found is None:
        raise UnknownName("job", job_id, (), hint="`GET /v1/jobs` lists them")
    return job_of(found)


def list_jobs(
    connection: Connection, tenant: str, only: Mapping[str, str | None], limit: int, cursor: str | None
) -> Page[Job]:
    """Return a page of a tenant's jobs, newest first; `only` may have the `task` and the `state` of those wanted."""
    row = schema.jobs.c
    chosen = [row[name] == value for name, value in only.items() if value is not None]
    page = read_newest(connection, schema.jobs, [row.tenant == tenant, *chosen], limit, cursor)
    return Page(tuple(placed(connection, [job_of(item) for item in page.items])), page.next_cursor)


def cancel_where(connection: Connection, which: ColumnElement[bool], now: float) -> None:
    """Cancel the jobs that fulfil a condition and have not ended, except erasures."""
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
    values = {name: dict(value) for name, value in (said or {}).items()}
    mine = update(schema.jobs).where(schema.jobs.c.number == number)
    connection.execute(mine.values(state=state, ended_at=now, **values))
    if state in (FAILED, CANCELLED):
        error = values.get("error", {})
        write_event(connection, number, now, state, (str(error.get("message", "")), error))


# The order of the queue


def read_waiting(connection: Connection) -> list[WaitingJob]:
    """Return all queued jobs."""
    row = schema.jobs.c
    columns = [row[item.name] for item in fields(WaitingJob)]
    return [WaitingJob(*item) for item in connection.execute(select(*columns).where(row.state == QUEUED))]


def read_turns(connection: Connection) -> dict[str, Turn]:
    """Return every tenant's turn."""
    row = schema.tenants.c
    found: Iterable[Any] = connection.execute(select(row.name, row.turn, row.weight))
    return {name: Turn(at, weight) for name, at, weight in found}


def in_order(jobs: Iterable[WaitingJob], turns: Mapping[str, Turn]) -> Iterator[WaitingJob]:
    """Yield jobs in the order in which they are claimed."""
    lines: dict[str, deque[WaitingJob]] = defaultdict(deque)
    for job in sorted(jobs, key=lambda job: (-job.priority, job.number)):
        lines[job.tenant].append(job)
    heap = [(turns[tenant].at, line[0].number, tenant) for tenant, line in lines.items()]
    heapq.heapify(heap)
    while heap:
        at, _, tenant = heapq.heappop(heap)
        line = lines[tenant]
        yield line.popleft()
        if line:
            heapq.heappush(heap, (at + 1 / turns[tenant].weight, line[0].number, tenant))


def placed(connection: Connection, jobs: list[Job]) -> list[Job]:
    """Return the jobs with their places in the queue. Jobs that were begun and given back come first."""
    if not any(job.state == QUEUED for job in jobs):
        return jobs
    waiting, turns = read_waiting(connection), read_turns(connection)
    begun = [job for job in waiting if job.cohort is not None]
    fresh = [job for job in waiting if job.cohort is None]
    order = [*begun, *in_order(fresh, turns)]
    places = {job.number: place for place, job in enumerate(order, start=1)}
    return [replace(job, place=places.get(job.number)) for job in jobs]


def queued_seconds(db: Database) -> float:
    """Return the seconds that one trainer needs for all jobs that have not ended, at the pace of the latest ones."""
    job, dataset = schema.jobs.c, schema.datasets.c
    joined = schema.jobs.join(
        schema.datasets, (dataset.tenant == job.tenant) & (dataset.id == job.dataset), isouter=True
    )
    columns = select(job.settings, job.started_at, job.ended_at, dataset.num_rows).select_from(joined)
    with db.reading() as connection:
        is_open = (job.kind == TRAIN, job.state.in_((QUEUED, RUNNING)))
        waiting = connection.execute(columns.where(*is_open).limit(_MOST_COUNTED)).all()
        is_ended = (job.kind == TRAIN, job.state == SUCCEEDED)
        newest = columns.where(*is_ended).order_by(job.number.desc()).limit(_NUM_ENDED)
        ended = connection.execute(newest).all()
    paces = sorted(
        (row.ended_at - row.started_at) / _rows_to_read(row)
        for row in ended
        if row.started_at is not None and row.ended_at is not None and _rows_to_read(row)
    )
    pace = paces[len(paces) // 2] if paces else _USUAL_S
    return sum(_START_S + _rows_to_read(row) * pace for row in waiting)


def _rows_to_read(row: Any) -> float:
    """Return the number of rows that a job reads in all its epochs."""
    return float((row.num_rows or 0) * (row.settings.get("epochs") or _USUAL_ROUNDS))
