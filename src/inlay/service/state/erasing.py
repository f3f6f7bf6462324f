"""Marking tasks and tenants for erasure: from then on nobody sees them, and a job of kind erase does the rest."""

from __future__ import annotations

from sqlalchemy import Connection, delete, select, update

from inlay.errors import UnknownName
from inlay.service.state import schema
from inlay.service.state.aliases import ACTIVE, ERASING, TaskKey
from inlay.service.state.database import bump
from inlay.service.state.jobs import ERASE, Job, JobRequest, cancel_where, insert_job, job_of
from inlay.service.state.tenants import REMOVING, Tenant, find_row, tenant_of


def mark_task(connection: Connection, tenant: Tenant, task: TaskKey, actor: str, now: float) -> Job:
    """Hide a task that has a row, cancel its jobs, and queue its erasure."""
    row, job = schema.tasks.c, schema.jobs.c
    mine = update(schema.tasks).where(row.tenant == task.tenant, row.name == task.name, row.state == ACTIVE)
    connection.execute(mine.values(state=ERASING, counter=row.counter + 1))
    cancel_where(connection, (job.tenant == task.tenant) & (job.task == task.name), now)
    bump(connection)
    return insert_job(connection, tenant, JobRequest(ERASE, task.name), actor, now)


def mark_tenant(connection: Connection, name: str, actor: str, now: float) -> Job:
    """End a tenant's keys, hide its tasks, cancel its jobs, and queue its erasure; once begun, return that job."""
    found = find_row(connection, name)
    if found is None:
        raise UnknownName("tenant", name, (), hint="`inlay tenant list` lists them")
    job = schema.jobs.c
    mine = (job.tenant == name, job.kind == ERASE, job.task == "")
    begun = connection.execute(select(schema.jobs).where(*mine)).first()
    if found.state == REMOVING and begun is not None:
        return job_of(begun)
    connection.execute(update(schema.tenants).where(schema.tenants.c.name == name).values(state=REMOVING))
    keys = select(schema.keys.c.id).where(schema.keys.c.tenant == name)
    connection.execute(delete(schema.sessions).where(schema.sessions.c.key.in_(keys)))
    connection.execute(delete(schema.keys).where(schema.keys.c.tenant == name))
    connection.execute(update(schema.tasks).where(schema.tasks.c.tenant == name).values(state=ERASING))
    cancel_where(connection, job.tenant == name, now)
    bump(connection)
    return insert_job(connection, tenant_of(found), JobRequest(ERASE, ""), actor, now)
