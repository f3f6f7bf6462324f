"""Erasure: all that a task or a tenant left, in the database and on the disk, goes for good.

Every function may be killed at any moment and run again: files go first, the rows that say where they are go last.
Deleted rows are overwritten (secure_delete), and the log of the database is emptied at the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, and_, delete, exists, or_, select

from inlay.errors import InlayError
from inlay.service.state import schema
from inlay.service.state.aliases import ERASING, TaskKey, find_task_row
from inlay.service.state.claiming import forget_old_cohorts, is_busy
from inlay.service.state.database import Database, bump
from inlay.service.state.file_lock import deleting_files
from inlay.service.state.job_queue import HEARTBEAT_S, JobCohort, JobQueue, note_file
from inlay.service.state.jobs import ERASE, FAILED, SUCCEEDED
from inlay.service.state.metering import add_counts
from inlay.service.state.state_errors import Conflict, StaleLease
from inlay.service.state.task_lookup import store_name
from inlay.service.state.tenants import REMOVING, Tenants, find_row

OnStep = Callable[[str], None]
_LOG_TRIES, _LOG_PAUSE_S = 20, 0.1
_BUSY_PAUSE_S = 0.5
PATIENCE_S = 40.0


@dataclass(frozen=True)
class Erased:
    """The number of things that an erasure removed."""

    num_versions: int = 0
    num_datasets: int = 0
    num_files: int = 0

    def __add__(self, other: Erased) -> Erased:
        return Erased(
            self.num_versions + other.num_versions,
            self.num_datasets + other.num_datasets,
            self.num_files + other.num_files,
        )

    def to_json(self) -> dict[str, int]:
        """Return the numbers by name: the result of the job."""
        return vars(self).copy()


def erase_task(db: Database, tenant: str, task: str, on_step: OnStep = lambda step: None) -> Erased:
    """Erase a task that `Workspace.erase_task` marked: versions, evaluations, runs, feedback, jobs, rows.

    Datasets go too, unless another task of the tenant uses them. What never was, or is gone, is no error. Conflict
    for a task that was not marked, or that a trainer still works on.
    """
    key = TaskKey(tenant, task)
    erased = Erased()
    with db.writing() as connection:
        row = find_task_row(connection, key)
        if row is not None:
            _check_erasable(connection, row)
            erased += Erased(num_datasets=_give_up_datasets(connection, db, key))
    if row is not None:
        with deleting_files(db.places):
            on_step("versions")
            erased += Erased(num_versions=db.store.erase(store_name(key)))
            on_step("files")
            erased += Erased(num_files=_remove_files(db, key))
        on_step("rows")
        with db.writing() as connection:
            _delete_task_rows(connection, key)
    on_step("log")
    _empty_log(db)
    return erased


def _check_erasable(connection: Connection, row: Any) -> None:
    if row.state != ERASING:
        raise Conflict(f"task `{row.name}` is not marked for erasure", "call `Workspace.erase_task` first")
    if is_busy(connection, row.tenant, row.name):
        raise Conflict(f"a trainer still works on task `{row.name}`", "it stops within seconds: try again then")


def erase_tenant(db: Database, tenant: str, on_step: OnStep = lambda step: None) -> Erased:
    """Erase a tenant that `Tenants.remove` marked, with all its tasks. What is gone is no error."""
    with db.reading() as connection:
        row = find_row(connection, tenant)
        if row is not None and row.state != REMOVING:
            raise Conflict(f"tenant `{tenant}` is not marked for removal", "call `Tenants.remove` first")
        if row is not None and is_busy(connection, tenant, ""):
            raise Conflict(f"a trainer still works for tenant `{tenant}`", "it stops within seconds: try again then")
        names = connection.execute(select(schema.tasks.c.name).where(schema.tasks.c.tenant == tenant)).scalars().all()
    erased = Erased()
    if row is not None:
        for name in names:
            erased += erase_task(db, tenant, name, on_step)
        on_step("tenant")
        with deleting_files(db.places):
            for known in db.store.names():
                if known.startswith(f"{tenant}."):
                    erased += Erased(num_versions=db.store.erase(known))
            folders = ("datasets", "evaluations", "batches", "runs")
            erased += Erased(num_files=sum(db.files.remove(db.places.service / name / tenant) for name in folders))
        with db.writing() as connection:
            _delete_tenant_rows(connection, tenant)
    _empty_log(db)
    return erased


def remove_tenant(db: Database, name: str) -> Erased | None:
    """Remove a tenant here and now; None if a trainer still works for it after `PATIENCE_S`: a service will go on.

    A trainer that lives stops within seconds; of one that died the lease ends in less than the usual patience.
    """
    until = time.monotonic() + PATIENCE_S
    Tenants(db).remove(name)
    while True:
        JobQueue(db).reclaim_expired()
        try:
            return erase_tenant(db, name)
        except Conflict:
            if time.monotonic() >= until:
                return None
        time.sleep(_BUSY_PAUSE_S)


def run_erasure(db: Database, queue: JobQueue, cohort: JobCohort) -> Erased:
    """Do the one erase job of a claimed cohort (`claim(owner, kinds=("erase",))`), with heartbeats, and finish it.

    An error ends the job as failed and is raised; `sweep_leftovers` queues it again.
    """
    (job,) = cohort.jobs
    # Its own cohort counts as no trainer's: it has no other job.
    with _beating(queue, cohort):
        try:
            erased = erase_task(db, job.tenant, job.task) if job.task else erase_tenant(db, job.tenant)
        except InlayError as error:
            with suppress(StaleLease):
                queue.finish(cohort, job.id, FAILED, error=error.to_json())
            raise
    if job.task:  # a tenant's job is gone with the tenant
        queue.finish(cohort, job.id, SUCCEEDED, result=erased.to_json())
    return erased


@contextmanager
def _beating(queue: JobQueue, cohort: JobCohort) -> Iterator[None]:
    """Give signs of life while the block runs. A lost lease does not stop it: erasing twice does no harm."""
    ending = threading.Event()

    def beat() -> None:
        while not ending.wait(HEARTBEAT_S):
            with suppress(InlayError):
                queue.heartbeat(cohort)

    thread = threading.Thread(target=beat, name="inlay-erasure-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def _give_up_datasets(connection: Connection, db: Database, task: TaskKey) -> int:
    """Delete the rows of datasets that no other task uses, and note their files as the task's, to be deleted with it.

    From then on no other task can come to use them, and whoever goes on after a crash still knows their files.
    """
    dataset, job, call = schema.datasets.c, schema.jobs.c, schema.calls.c
    of_task = exists().where(job.tenant == task.tenant, job.task == task.name, job.dataset == dataset.id)
    of_other = exists().where(job.tenant == task.tenant, job.task != task.name, job.dataset == dataset.id)
    is_own = and_(dataset.tenant == task.tenant, or_(of_task, dataset.task == task.name), ~of_other)
    found = connection.execute(select(dataset.id, dataset.file).where(is_own)).all()
    for dataset_id, file in found:
        path = (db.places.datasets(task.tenant) / file).relative_to(db.places.home)
        note_file(connection, task, str(path))
        _delete(connection, schema.calls, (call.tenant == task.tenant) & (call.subject == dataset_id))
    _delete(connection, schema.datasets, is_own)
    return len(found)


def _remove_files(db: Database, task: TaskKey) -> int:
    """Delete the files and folders of a task: evaluations, batches, and what was noted: runs, datasets."""
    noted, job = schema.job_files.c, schema.jobs.c
    with db.reading() as connection:
        below = select(noted.path).where(noted.tenant == task.tenant, noted.task == task.name)
        paths = [db.places.home / path for path in connection.execute(below).scalars()]
        jobs = select(job.id).where(job.tenant == task.tenant, job.task == task.name)
        for job_id in connection.execute(jobs).scalars():
            paths += [db.places.batch(task.tenant, job_id), db.places.batch_parts(task.tenant, job_id)]
    return sum(db.files.remove(path) for path in (db.places.evaluations(*task), *paths))


def _delete_task_rows(connection: Connection, task: TaskKey) -> None:
    """Delete what the database has of a task but its erasures, and count its usage without its name."""
    job, call = schema.jobs.c, schema.calls.c
    is_of_it = (job.tenant == task.tenant) & (job.task == task.name)
    made_jobs = and_(is_of_it, job.kind != ERASE)
    is_subject = or_(call.subject.in_(select(job.id).where(made_jobs)), call.subject == f"task:{task.name}")
    _delete(connection, schema.calls, (call.tenant == task.tenant) & is_subject)
    _delete_jobs(connection, made_jobs)
    for table in (schema.feedback, schema.versions, schema.aliases, schema.alias_moves, schema.job_files):
        _delete(connection, table, (table.c.tenant == task.tenant) & (table.c.task == task.name))
    row = schema.tasks.c
    _delete(connection, schema.tasks, (row.tenant == task.tenant) & (row.name == task.name))
    _forget_name(connection, task)
    bump(connection)


def _delete_jobs(connection: Connection, which: ColumnElement[bool]) -> None:
    numbers = select(schema.jobs.c.number).where(which)
    _delete(connection, schema.job_events, schema.job_events.c.job.in_(numbers))
    _delete(connection, schema.jobs, which)
    forget_old_cohorts(connection)


def _forget_name(connection: Connection, task: TaskKey) -> None:
    """Add the usage of a task to that of no task: what was used stays counted."""
    usage = schema.usage.c
    of_it = (usage.tenant == task.tenant) & (usage.task == task.name)
    for item in connection.execute(select(schema.usage).where(of_it)).all():
        counts = {"rows": item.rows, "tokens": item.tokens, "requests": item.requests}
        add_counts(connection, (item.tenant, item.day, ""), counts)
    _delete(connection, schema.usage, of_it)


def _delete_tenant_rows(connection: Connection, tenant: str) -> None:
    _delete_jobs(connection, schema.jobs.c.tenant == tenant)
    for table in schema.metadata.sorted_tables:
        if "tenant" in table.c and table is not schema.jobs:
            _delete(connection, table, table.c.tenant == tenant)
    _delete(connection, schema.tenants, schema.tenants.c.name == tenant)
    bump(connection)


def _delete(connection: Connection, table: Table, which: ColumnElement[bool]) -> None:
    connection.execute(delete(table).where(which))


def _empty_log(db: Database) -> None:
    """Empty the write-ahead log, where old pages still are; readers end within moments."""
    for _ in range(_LOG_TRIES):
        if db.checkpoint():
            return
        time.sleep(_LOG_PAUSE_S)
