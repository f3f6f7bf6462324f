"""Sweeping: what crashes left on the disk, and erasures that failed. Run at the trainer's start and once an hour.

Only what is older than an hour is taken for left: an upload or a training may be on its way to its row.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from sqlalchemy import Connection, exists, select

from inlay.errors import UnknownName
from inlay.service.state import schema
from inlay.service.state.aliases import ERASING
from inlay.service.state.database import Database
from inlay.service.state.file_lock import deleting_files, remove_tree
from inlay.service.state.jobs import BATCH, ENDED, ERASE, JobRequest, insert_job
from inlay.service.state.places import PARTS
from inlay.service.state.tenants import LOCAL, REMOVING, tenant_of
from inlay.store import DRAFT_PREFIX

_OLD_S = 3600.0
_SWEEPER = "service"


def sweep_leftovers(db: Database, *, old_s: float = _OLD_S) -> int:
    """Delete files and versions that no row knows, and queue erasures that failed again. Returns what was deleted."""
    with db.writing() as connection:
        _queue_failed(connection, db.now())
    before = time.time() - old_s
    with db.reading() as connection:
        files = [path for path, changed in _stray_files(connection, db) if changed <= before]
        versions = [name for name, published in _stray_versions(connection, db) if published <= before]
    kept = db.files.sweep_fetched() + db.store.forget_gone()
    if not files and not versions:
        return kept
    with deleting_files(db.places):
        count = kept + sum(db.files.remove(path) for path in files)
        for reference in versions:
            with suppress(UnknownName):
                count += len(db.store.remove(reference))
        if versions:
            db.store.gc()
    return count


def sweep_lost_parts(db: Database) -> int:
    """Delete what this machine has of offline batches that have ended or are erased, perhaps by another machine."""
    found = list((db.places.service / "batches").glob(f"*/*{PARTS}"))  # before the jobs: no new one is among them
    if not found:
        return 0
    job = schema.jobs.c
    with db.reading() as connection:
        is_open = (job.kind == BATCH) & job.state.not_in(ENDED)
        known = {(row.tenant, row.id) for row in connection.execute(select(job.tenant, job.id).where(is_open))}
    left = [path for path in found if (path.parent.name, path.stem) not in known]
    if not left:
        return 0
    with deleting_files(db.places):
        return sum(map(remove_tree, left))


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


def _stray_files(connection: Connection, db: Database) -> Iterator[tuple[Path, float]]:
    """Yield uploads, evaluations and batches without a row, and folders of tenants that are gone; with their times."""
    places = db.places
    tenants = set(connection.execute(select(schema.tenants.c.name)).scalars())
    for path in places.service.glob(f"{DRAFT_PREFIX}*"):
        with suppress(FileNotFoundError):
            yield path, path.stat().st_mtime
    for kind in ("datasets", "evaluations", "batches"):  # in `runs` are cohorts, which the trainer sweeps itself
        yield from _entries(db, places.service / kind, tenants)
    dataset, job, task = schema.datasets.c, schema.jobs.c, schema.tasks.c
    for tenant in tenants:
        files = set(connection.execute(select(dataset.file).where(dataset.tenant == tenant)).scalars())
        yield from _entries(db, places.datasets(tenant), files)
        jobs = set(connection.execute(select(job.id).where(job.tenant == tenant)).scalars())
        outputs = {f"{job_id}{suffix}" for job_id in jobs for suffix in (".jsonl", PARTS)}
        yield from _entries(db, places.batch(tenant, "").parent, outputs)
        names = set(connection.execute(select(task.name).where(task.tenant == tenant)).scalars())
        if tenant != LOCAL:
            yield from _entries(db, places.evaluations(tenant, "x").parent, names)


def _stray_versions(connection: Connection, db: Database) -> Iterator[tuple[str, float]]:
    """Yield versions of tenants that no row knows and no open job can enter: a zombie or a cancelled job made them."""
    task, version, job = schema.tasks.c, schema.versions.c, schema.jobs.c
    tenants = set(connection.execute(select(schema.tenants.c.name)).scalars()) - {LOCAL}
    for store_name in db.store.names():
        tenant, dot, name = store_name.partition(".")
        if not dot or tenant not in tenants:
            continue
        mine = (version.tenant == tenant, version.task == name)
        numbers = set(connection.execute(select(version.number).where(*mine)).scalars())
        is_open = exists().where(job.tenant == tenant, job.task == name, job.state.not_in(ENDED))
        is_erasing = exists().where(task.tenant == tenant, task.name == name, task.state == ERASING)
        if any(connection.execute(select(is_open, is_erasing)).one()):
            continue
        if not set(db.store.numbers(store_name)[0]) <= numbers:
            for info in db.store.versions(store_name, on_damage=lambda version, error: None):
                if info.version.number not in numbers:
                    yield info.version.reference, datetime.fromisoformat(info.published_at).timestamp()


def _entries(db: Database, folder: Path, known: Collection[str]) -> Iterator[tuple[Path, float]]:
    """Yield the entries of a folder that are not known, with the times of their last change."""
    yield from ((folder / name, changed) for name, changed in db.files.names(folder).items() if name not in known)
