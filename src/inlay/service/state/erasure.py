"""Erasure: all that a task or a tenant left, in the database and on the disk, goes for good.

Every function may be killed at any moment and run again: files go first, the rows that say where they are go last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inlay.service.state.database import Database
from inlay.service.state.job_queue import JobCohort, JobQueue


@dataclass(frozen=True)
class Erased:
    """The number of things that an erasure removed."""

    num_versions: int = 0
    num_datasets: int = 0
    num_files: int = 0


def erase_task(db: Database, tenant: str, task: str, on_step: Callable[[str], None] = lambda step: None) -> Erased:
    """Erase a task that `Workspace.erase_task` marked: versions, evaluations, runs, feedback, jobs, rows.

    Datasets go too, unless another task of the tenant uses them. What never was, or is gone, is no error.
    """
    raise NotImplementedError


def erase_tenant(db: Database, tenant: str, on_step: Callable[[str], None] = lambda step: None) -> Erased:
    """Erase a tenant that `Tenants.remove` marked, with all its tasks."""
    raise NotImplementedError


def run_erasure(db: Database, queue: JobQueue, cohort: JobCohort) -> Erased:
    """Do the one erase job of a claimed cohort (`claim(owner, kinds=("erase",))`), with heartbeats, and finish it."""
    raise NotImplementedError


def sweep_leftovers(db: Database) -> int:
    """Delete files that no row knows: drafts of uploads that broke off, what crashes left. Returns their number."""
    raise NotImplementedError
