"""Sweeping: what crashes left on the disk, and erasures that failed. Run at the trainer's start and once an hour.

Only what is older than an hour is taken for left: an upload or a training may be on its way to its row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Connection, exists, select

from inlay.errors import UnknownName
from inlay.service.state import schema
from inlay.service.state.aliases import ERASING
from inlay.service.state.database import Database
from inlay.service.state.file_lock import deleting_files, remove_tree
from inlay.service.state.jobs import ENDED, ERASE, JobRequest, insert_job
from inlay.service.state.tenants import LOCAL, REMOVING, tenant_of
from inlay.store import DRAFT_PREFIX

_OLD_S = 3600.0
_SWEEPER = "service"


def sweep_leftovers(db: Database, *, old_s: float = _OLD_S) -> int:
    """Delete files and versions that no row knows, and queue erasures that failed again. Returns what was deleted."""
    with db.writing() as connection:
        _queue_failed(connection, db.now())
    with db.reading() as connection:
        files = [path for path in _stray_files(connection, db) if _is_old(path, old_s)]
        versions = [name for name, path in _stray_versions(connection, db) if _is_old(path, old_s)]
    if not files and not versions:
        return 0
    with deleting_files(db.places):
        count = sum(remove_tree(path) for path in files)
        for reference in versions:
            with suppress(UnknownName):
                count += len(db.store.remove(reference))
        if versions:
            db.store.gc()
    return count


def _is_old(path: Path, old_s: float) -> bool:
    with suppress(OSError):
        return time.time() - path.stat().st_mtime >= old_s
    return False


def _queue_failed(connection: Connection, now: float) -> None:
    """Queue the erasure of every task and tenant that is marked but has no erasure that waits or runs."""
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


def _stray_files(connection: Connection, db: Database) -> Iterator[Path]:
    """Yield uploads, evaluations and batches without a row, and folders of tenants that are gone."""
    places = db.places
    tenants = set(connection.execute(select(schema.tenants.c.name)).scalars())
    yield from (path for path in _entries(places.service) if path.name.startswith(DRAFT_PREFIX))
    for kind in ("datasets", "evaluations", "batches"):  # in `runs` are cohorts, which the trainer sweeps itself
        for folder in _entries(places.service / kind):
            if folder.name not in tenants:
                yield folder
    dataset, job, task = schema.datasets.c, schema.jobs.c, schema.tasks.c
    for tenant in tenants:
        files = set(connection.execute(select(dataset.file).where(dataset.tenant == tenant)).scalars())
        yield from (path for path in _entries(places.datasets(tenant)) if path.name not in files)
        jobs = set(connection.execute(select(job.id).where(job.tenant == tenant)).scalars())
        yield from (path for path in _entries(places.batch(tenant, "").parent) if path.stem not in jobs)
        names = set(connection.execute(select(task.name).where(task.tenant == tenant)).scalars())
        evaluated = _entries(places.evaluations(tenant, "x").parent) if tenant != LOCAL else iter(())
        yield from (path for path in evaluated if path.name not in names)


def _stray_versions(connection: Connection, db: Database) -> Iterator[tuple[str, Path]]:
    """Yield versions of tenants that no row knows and no open job can enter: a zombie or a cancelled job made them."""
    task, version, job = schema.tasks.c, schema.versions.c, schema.jobs.c
    tenants = set(connection.execute(select(schema.tenants.c.name)).scalars()) - {LOCAL}
    for folder in _entries(db.places.home / "tasks"):
        tenant, dot, name = folder.name.partition(".")
        if not dot or tenant not in tenants:
            continue
        mine = (version.tenant == tenant, version.task == name)
        numbers = set(connection.execute(select(version.number).where(*mine)).scalars())
        is_open = exists().where(job.tenant == tenant, job.task == name, job.state.not_in(ENDED))
        is_erasing = exists().where(task.tenant == tenant, task.name == name, task.state == ERASING)
        if any(connection.execute(select(is_open, is_erasing)).one()):
            continue
        for path in folder.glob("*.json"):
            if path.stem.isdigit() and int(path.stem) not in numbers:
                yield f"{folder.name}@{path.stem}", path


def _entries(folder: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from sorted(folder.iterdir())
