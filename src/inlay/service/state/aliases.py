"""Aliases: which version of a task is live, with the history of its moves; and the versions that jobs published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, insert, select, update

from inlay.service.state import schema
from inlay.service.state.database import count_change
from inlay.service.state.jobs import Job
from inlay.service.state.state_errors import Conflict, LiveMoved
from inlay.service.state.values import to_iso

LIVE = "live"
ACTIVE, ERASING = "active", "erasing"
"""states of a task"""


class TaskKey(NamedTuple):
    """A task of a tenant."""

    tenant: str
    name: str


class Reason(NamedTuple):
    """Who moves an alias, and why."""

    by: str
    text: str


@dataclass(frozen=True)
class Alias:
    """The version that `live` stands for; `counter` grows with every move."""

    version: int
    counter: int
    moved_at: float
    moved_by: str
    reason: str
    name: str = LIVE
    digest: str = ""

    @property
    def etag(self) -> str:
        """The ETag that `If-Match` is compared with."""
        return f'"{self.counter}"'

    def to_json(self) -> dict[str, Any]:
        """Return the alias as the API shows it."""
        return {
            "alias": self.name,
            "version": self.version,
            "etag": self.etag,
            "moved_at": to_iso(self.moved_at),
            "moved_by": self.moved_by,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class AliasMove:
    """A move of `live` from one version to another."""

    from_version: int | None
    to_version: int
    at: float
    by: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return the move as the API shows it."""
        said = {"from": self.from_version, "to": self.to_version}
        return {**said, "at": to_iso(self.at), "by": self.by, "reason": self.reason}


@dataclass(frozen=True)
class Publication:
    """A version that a job published, and whether it goes live."""

    number: int
    digest: str
    size_bytes: int
    goes_live: bool
    reason: str
    result: Mapping[str, Any]
    """the job's result; `version`, `is_live` and `reason` are set here"""
    compared_with: int | None = None
    """the live version it was compared with (0: none was live); LiveMoved if another one is live by now"""


def find_task_row(connection: Connection, task: TaskKey) -> Any:
    """Return a task's row, None if there is none."""
    row = schema.tasks.c
    if "\0" in task.name:  # no task's name has it, and Postgres refuses it
        return None
    query = select(schema.tasks).where(row.tenant == task.tenant, row.name == task.name)
    return connection.execute(query).one_or_none()


def read_alias(connection: Connection, task: TaskKey) -> Alias | None:
    """Return the alias `live` of a task; None if it was never set."""
    row = schema.aliases.c
    query = select(schema.aliases).where(row.tenant == task.tenant, row.task == task.name, row.name == LIVE)
    found = connection.execute(query).one_or_none()
    if found is None:
        return None
    return Alias(found.number, found.counter, found.moved_at, found.moved_by, found.reason, digest=found.digest)


def set_alias(connection: Connection, task: TaskKey, to: tuple[int, str], why: Reason, now: float) -> Alias:
    """Make a version (number and digest) the live one; nothing changes if it is live already."""
    old = read_alias(connection, task)
    number, digest = to
    if old is not None and old.version == number:
        return old
    moved = {"number": number, "digest": digest, "moved_at": now, "moved_by": why.by, "reason": why.text}
    row = schema.aliases.c
    if old is None:
        place = {"tenant": task.tenant, "task": task.name, "name": LIVE}
        connection.execute(insert(schema.aliases).values(**place, **moved, counter=1))
    else:
        mine = update(schema.aliases).where(row.tenant == task.tenant, row.task == task.name, row.name == LIVE)
        connection.execute(mine.values(**moved, counter=old.counter + 1))
    connection.execute(
        insert(schema.alias_moves).values(
            tenant=task.tenant,
            task=task.name,
            name=LIVE,
            from_number=None if old is None else old.version,
            to_number=number,
            at=now,
            by=why.by,
            reason=why.text,
        )
    )
    touch_task(connection, task)
    count_change(connection)
    return Alias(number, 1 if old is None else old.counter + 1, now, why.by, why.text, digest=digest)


def touch_task(connection: Connection, task: TaskKey) -> None:
    """Count a change of a task: this changes its ETag."""
    row = schema.tasks.c
    mine = update(schema.tasks).where(row.tenant == task.tenant, row.name == task.name)
    connection.execute(mine.values(counter=row.counter + 1))


def enter_version(connection: Connection, job: Job, publication: Publication, now: float) -> dict[str, Any]:
    """Enter a version that a job published, and move `live` if it goes live; return what the job's result says."""
    task = TaskKey(job.tenant, job.task)
    row = find_task_row(connection, task)
    if row is None or row.state != ACTIVE:
        raise Conflict(f"task `{job.task}` is being erased", "finish the job as cancelled")
    alias = read_alias(connection, task)
    live = 0 if alias is None else alias.version
    if publication.compared_with is not None and publication.compared_with != live:
        raise LiveMoved(job.task)
    version = schema.versions.c
    is_it = (version.tenant == job.tenant, version.task == job.task, version.number == publication.number)
    if connection.execute(select(version.number).where(*is_it)).first() is None:
        connection.execute(
            insert(schema.versions).values(
                tenant=job.tenant,
                task=job.task,
                number=publication.number,
                digest=publication.digest,
                job=job.id,
                dataset=job.dataset,
                size_bytes=publication.size_bytes,
                reason=publication.reason,
                published_at=now,
            )
        )
        touch_task(connection, task)
    if publication.goes_live:
        why = Reason(f"job:{job.id}", publication.reason)
        set_alias(connection, task, (publication.number, publication.digest), why, now)
    is_live = publication.goes_live or publication.number == live
    return {"version": publication.number, "is_live": is_live, "reason": publication.reason}
