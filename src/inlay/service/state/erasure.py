"""Erasure of tasks and tenants for good, in the database and on the disk, and the sweep of what crashes left there.

Every function may be killed at any moment and run again: files are deleted first, and the rows that say where they are
last. Deleted rows are overwritten (secure_delete), and the log of the database is emptied at the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sqlalchemy import ColumnElement, Connection, Table, and_, delete, exists, or_, select

from inlay.errors import InlayError, UnknownName
from inlay.service.state import schema
from inlay.service.state.aliases import ERASING, TaskKey, find_task_row
from inlay.service.state.database import Database, count_change
from inlay.service.state.job_queue import (
    HEARTBEAT_S,
    JobCohort,
    JobQueue,
    forget_old_cohorts,
    is_busy,
    note_file,
)
from inlay.service.state.jobs import BATCH, ENDED, ERASE, FAILED, SUCCEEDED, JobRequest, insert_job
from inlay.service.state.served_tasks import store_name
from inlay.service.state.service_files import PARTS, deleting_files, remove_tree
from inlay.service.state.state_errors import Conflict, StaleLease
from inlay.service.state.tenants import LOCAL, REMOVING, Tenants, find_row, split_store_name, tenant_of
from inlay.service.state.usage import add_counts
from inlay.store import DRAFT_PREFIX

OnStep = Callable[[str], None]
_LOG_TRIES, _LOG_PAUSE_S = 20, 0.1
_BUSY_PAUSE_S = 0.5
PATIENCE_S = 40.0
_OLD_S = 3600.0  # a younger file without a row may be an upload or a training that is about to get one
_SWEEPER = "service"


@dataclass(frozen=True)
class ErasureCounts:
    """The number of things that an erasure removed."""

    num_versions: int = 0
    num_datasets: int = 0
    num_files: int = 0

    def __add__(self, other: ErasureCounts) -> ErasureCounts:
        return ErasureCounts(
            self.num_versions + other.num_versions,
            self.num_datasets + other.num_datasets,
            self.num_files + other.num_files,
        )

    def to_json(self) -> dict[str, int]:
        """Return the numbers by name: the result of the job."""
        return vars(self).copy()


def erase_task(db: Database, tenant: str, task: str, on_step: OnStep = lambda step: None) -> ErasureCounts:
    """Erase a task that `Workspace.erase_task` marked: versions, evaluations, runs, feedback, jobs, rows.

    Datasets go too, unless another task of the tenant uses them. A task that does not exist is no error. Conflict
    for a task that was not marked, or that a trainer still works on.
    """
    key = TaskKey(tenant, task)
    erased = ErasureCounts()
    with db.writing() as connection:
        row = find_task_row(connection, key)
        if row is not None:
            if row.state != ERASING:
                raise Conflict(f"task `{task}` is not marked for erasure", "call `Workspace.erase_task` first")
            if is_busy(connection, tenant, task):
                raise Conflict(f"a trainer still works on task `{task}`", "it stops within seconds: try again then")
            erased += ErasureCounts(num_datasets=_give_up_datasets(connection, db, key))
    if row is not None:
        with deleting_files(db.paths):
            on_step("versions")
            erased += ErasureCounts(num_versions=db.store.erase(store_name(key)))
            on_step("files")
            erased += ErasureCounts(num_files=_remove_files(db, key))
        on_step("rows")
        with db.writing() as connection:
            _delete_task_rows(connection, key)
    on_step("log")
    _empty_log(db)
    return erased


def erase_tenant(db: Database, tenant: str, on_step: OnStep = lambda step: None) -> ErasureCounts:
    """Erase a tenant that `Tenants.remove` marked, with all its tasks. A tenant that does not exist is no error."""
    with db.reading() as connection:
        row = find_row(connection, tenant)
        if row is not None and row.state != REMOVING:
            raise Conflict(f"tenant `{tenant}` is not marked for removal", "call `Tenants.remove` first")
        if row is not None and is_busy(connection, tenant, ""):
            raise Conflict(f"a trainer still works for tenant `{tenant}`", "it stops within seconds: try again then")
        names = connection.execute(select(schema.tasks.c.name).where(schema.tasks.c.tenant == tenant)).scalars().all()
    erased = ErasureCounts()
    if row is not None:
        for name in names:
            erased += erase_task(db, tenant, name, on_step)
        on_step("tenant")
        with deleting_files(db.paths):
            for known in db.store.names():
                if known.startswith(f"{tenant}."):
                    erased += ErasureCounts(num_versions=db.store.erase(known))
            folders = ("datasets", "evaluations", "batches", "runs")
            erased += ErasureCounts(
                num_files=sum(db.files.remove(db.paths.service / name / tenant) for name in folders)
            )
        with db.writing() as connection:
            _delete_tenant_rows(connection, tenant)
    _empty_log(db)
    return erased


def remove_tenant(db: Database, name: str) -> ErasureCounts | None:
    """Remove a tenant now; None if a trainer still works for it after `PATIENCE_S`: then the service finishes later.

    A living trainer stops within seconds, and the lease of a dead one ends in less than `PATIENCE_S`.
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


def run_erasure(db: Database, queue: JobQueue, cohort: JobCohort) -> ErasureCounts:
    """Do the one erase job of a claimed cohort (`claim(owner, kinds=("erase",))`), with heartbeats, and finish it.

    An error ends the job as failed and is raised; `sweep_leftovers` queues it again.
    """
    (job,) = cohort.jobs
    with _beating(queue, cohort):
        try:
            erased = erase_task(db, job.tenant, job.task) if job.task else erase_tenant(db, job.tenant)
        except InlayError as error:
            with suppress(StaleLease):
                queue.finish(cohort, job.id, FAILED, error=error.to_json())
            raise
    if job.task:  # the job that erases a tenant is erased with it
        queue.finish(cohort, job.id, SUCCEEDED, result=erased.to_json())
    return erased


@contextmanager
def _beating(queue: JobQueue, cohort: JobCohort) -> Iterator[None]:
    """Send heartbeats while the block runs. A lost lease does not stop it: erasing twice does no harm."""
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
    """Delete the rows of datasets that no other task uses, and note their files, to be deleted with the task's.

    From then on no other task can begin to use them, and after a crash their files are still known.
    """
    dataset, job, call = schema.datasets.c, schema.jobs.c, schema.calls.c
    of_task = exists().where(job.tenant == task.tenant, job.task == task.name, job.dataset == dataset.id)
    of_other = exists().where(job.tenant == task.tenant, job.task != task.name, job.dataset == dataset.id)
    is_own = and_(dataset.tenant == task.tenant, or_(of_task, dataset.task == task.name), ~of_other)
    found = connection.execute(select(dataset.id, dataset.file).where(is_own)).all()
    for dataset_id, file in found:
        path = (db.paths.datasets(task.tenant) / file).relative_to(db.paths.home)
        note_file(connection, task, str(path))
        _delete(connection, schema.calls, (call.tenant == task.tenant) & (call.subject == dataset_id))
    _delete(connection, schema.datasets, is_own)
    return len(found)


def _remove_files(db: Database, task: TaskKey) -> int:
    """Delete the files and folders of a task: evaluations, batches, and the noted runs and datasets."""
    noted, job = schema.job_files.c, schema.jobs.c
    with db.reading() as connection:
        below = select(noted.path).where(noted.tenant == task.tenant, noted.task == task.name)
        paths = [db.paths.home / path for path in connection.execute(below).scalars()]
        jobs = select(job.id).where(job.tenant == task.tenant, job.task == task.name)
        for job_id in connection.execute(jobs).scalars():
            paths += [db.paths.batch(task.tenant, job_id), db.paths.batch_parts(task.tenant, job_id)]
    return sum(db.files.remove(path) for path in (db.paths.evaluations(*task), *paths))


def _delete_task_rows(connection: Connection, task: TaskKey) -> None:
    """Delete all rows of a task except its erase jobs; its usage stays, without the task's name."""
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
    # What was used stays counted, as usage of no task.
    usage = schema.usage.c
    is_its = (usage.tenant == task.tenant) & (usage.task == task.name)
    for item in connection.execute(select(schema.usage).where(is_its)).all():
        counts = {"rows": item.rows, "tokens": item.tokens, "requests": item.requests}
        add_counts(connection, (item.tenant, item.day, ""), counts)
    _delete(connection, schema.usage, is_its)
    count_change(connection)


def _delete_jobs(connection: Connection, which: ColumnElement[bool]) -> None:
    numbers = select(schema.jobs.c.number).where(which)
    _delete(connection, schema.job_events, schema.job_events.c.job.in_(numbers))
    _delete(connection, schema.jobs, which)
    forget_old_cohorts(connection)


def _delete_tenant_rows(connection: Connection, tenant: str) -> None:
    _delete_jobs(connection, schema.jobs.c.tenant == tenant)
    for table in schema.metadata.sorted_tables:
        if "tenant" in table.c and table is not schema.jobs:
            _delete(connection, table, table.c.tenant == tenant)
    _delete(connection, schema.tenants, schema.tenants.c.name == tenant)
    count_change(connection)


def _delete(connection: Connection, table: Table, which: ColumnElement[bool]) -> None:
    connection.execute(delete(table).where(which))


def _empty_log(db: Database) -> None:
    """Empty the write-ahead log, which still has old pages. Readers may prevent it, for moments."""
    for _ in range(_LOG_TRIES):
        if db.checkpoint():
            return
        time.sleep(_LOG_PAUSE_S)


# Sweeping


def sweep_leftovers(db: Database, *, old_s: float = _OLD_S) -> int:
    """Delete files and versions that no row names, and queue failed erasures again; return how many were deleted.

    The trainer calls this at its start and once an hour. Files younger than `old_s` stay.
    """
    with db.writing() as connection:
        _queue_failed(connection, db.now())
    before = time.time() - old_s
    with db.reading() as connection:
        files = [path for path, changed in _stray_files(connection, db) if changed <= before]
        versions = [name for name, published in _stray_versions(connection, db) if published <= before]
    kept = db.files.sweep_fetched() + db.store.forget_gone()
    if not files and not versions:
        return kept
    with deleting_files(db.paths):
        count = kept + sum(db.files.remove(path) for path in files)
        for reference in versions:
            with suppress(UnknownName):
                count += len(db.store.remove(reference))
        if versions:
            db.store.gc()
    return count


def sweep_lost_parts(db: Database) -> int:
    """Delete this machine's parts of offline batches that have ended or are erased, perhaps by another machine."""
    found = list((db.paths.service / "batches").glob(f"*/*{PARTS}"))  # listed before the jobs: none is newer
    if not found:
        return 0
    job = schema.jobs.c
    with db.reading() as connection:
        is_open = (job.kind == BATCH) & job.state.not_in(ENDED)
        known = {(row.tenant, row.id) for row in connection.execute(select(job.tenant, job.id).where(is_open))}
    left = [path for path in found if (path.parent.name, path.stem) not in known]
    if not left:
        return 0
    with deleting_files(db.paths):
        return sum(map(remove_tree, left))


def _queue_failed(connection: Connection, now: float) -> None:
    """Queue the erasure of every marked task and tenant that has no erase job queued or running."""
    job, task, tenant = schema.jobs.c, schema.tasks.c, schema.tenants.c
    is_open = (job.kind == ERASE) & job.state.not_in(ENDED)
    of_task = exists().where(is_open, job.tenant == task.tenant, job.task.in_((task.name, "")))
    query = select(schema.tenants, task.name.label("task")).join(schema.tasks, task.tenant == tenant.name)
    marked = connection.execute(query.where(task.state == ERASING, tenant.state != REMOVING, ~of_task)).all()
    of_tenant = exists().where(is_open, job.tenant == tenant.name, job.task == "")
    leaving = connection.execute(select(schema.tenants).where(tenant.state == REMOVING, ~of_tenant)).all()
    for row in marked:
        insert_job(connection, tenant_of(row), JobRequest(ERASE, row.task), _SWEEPER, now)
    for row in leaving:
        insert_job(connection, tenant_of(row), JobRequest(ERASE, ""), _SWEEPER, now)


def _stray_files(connection: Connection, db: Database) -> Iterator[tuple[Path, float]]:
    """Yield uploads, evaluations and batches without a row, and folders of erased tenants, each with its time."""
    paths = db.paths
    tenants = set(connection.execute(select(schema.tenants.c.name)).scalars())
    for path in paths.service.glob(f"{DRAFT_PREFIX}*"):
        with suppress(FileNotFoundError):
            yield path, path.stat().st_mtime
    for kind in ("datasets", "evaluations", "batches"):  # the trainer sweeps the cohorts in `runs`
        yield from _entries(db, paths.service / kind, tenants)
    dataset, job, task = schema.datasets.c, schema.jobs.c, schema.tasks.c
    for tenant in tenants:
        files = set(connection.execute(select(dataset.file).where(dataset.tenant == tenant)).scalars())
        yield from _entries(db, paths.datasets(tenant), files)
        jobs = set(connection.execute(select(job.id).where(job.tenant == tenant)).scalars())
        outputs = {f"{job_id}{suffix}" for job_id in jobs for suffix in (".jsonl", PARTS)}
        yield from _entries(db, paths.batch(tenant, "").parent, outputs)
        names = set(connection.execute(select(task.name).where(task.tenant == tenant)).scalars())
        if tenant != LOCAL:
            yield from _entries(db, paths.evaluations(tenant, "x").parent, names)


def _stray_versions(connection: Connection, db: Database) -> Iterator[tuple[str, float]]:
    """Yield versions that no row names and no open job can enter: a cancelled job or a stale trainer made them."""
    task, version, job = schema.tasks.c, schema.versions.c, schema.jobs.c
    tenants = set(connection.execute(select(schema.tenants.c.name)).scalars()) - {LOCAL}
    for known in db.store.names():
        tenant, name = split_store_name(known, tenants)
        if tenant == LOCAL:
            continue
        mine = (version.tenant == tenant, version.task == name)
        numbers = set(connection.execute(select(version.number).where(*mine)).scalars())
        is_open = exists().where(job.tenant == tenant, job.task == name, job.state.not_in(ENDED))
        is_erasing = exists().where(task.tenant == tenant, task.name == name, task.state == ERASING)
        if any(connection.execute(select(is_open, is_erasing)).one()):
            continue
        if not set(db.store.numbers(known)[0]) <= numbers:
            for info in db.store.versions(known, on_damage=lambda version, error: None):
                if info.version.number not in numbers:
                    yield info.version.reference, datetime.fromisoformat(info.published_at).timestamp()


def _entries(db: Database, folder: Path, known: Collection[str]) -> Iterator[tuple[Path, float]]:
    """Yield the unknown entries of a folder, with the times of their last change."""
    yield from ((folder / name, changed) for name, changed in db.files.names(folder).items() if name not in known)
