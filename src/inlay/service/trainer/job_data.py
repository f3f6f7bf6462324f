"""A run from a job: its dataset is read, its settings are resolved, its limits are checked.

What always holds: a job gives the same run in every attempt, so the resume state of its cohort is found again. What is
wrong with a job is an error of that job alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inlay.data import Task, load_task
from inlay.errors import BadConfig, OutOfMemory
from inlay.model import Backbone
from inlay.service.engine import Caller
from inlay.service.state import Database, Dataset, Job, JobQueue, OverLimit, Tenant, Workspace
from inlay.service.trainer.answering import Answerer
from inlay.service.trainer.job_settings import TRAIN_SETTINGS, make_tree
from inlay.settings import RunConfig, overlay
from inlay.store import Store
from inlay.training import PreparedRun, available_bytes, describe_bytes, inherit, make_run

ACTOR = "trainer"
"""the name that histories and audits have for the trainer"""
_GROWTH = 8  # bytes of memory that training needs for each byte of a dataset's file
_PACK_BYTES = 128 * 2**20


@dataclass(frozen=True, eq=False)
class TrainerContext:
    """What all jobs share: the database, the store, the backbone, and the answerer of rows."""

    db: Database
    queue: JobQueue
    store: Store
    backbone: Backbone
    answers: Answerer
    num_threads: int | None = None

    def workspace(self, tenant: str) -> Workspace:
        """Return the workspace of a job's tenant."""
        return Workspace(self.db, tenant, ACTOR)


@dataclass(frozen=True, eq=False)
class PreparedJob:
    """A job whose rows are read, with its run."""

    job: Job
    tenant: Tenant
    prepared: PreparedRun

    @property
    def task(self) -> Task:
        """The task with its rows."""
        return self.prepared.run.task

    @property
    def store_name(self) -> str:
        """The name that its versions have in the store."""
        return f"{self.tenant.prefix}{self.job.task}"

    @property
    def caller(self) -> Caller:
        """The tenant, as a caller of the engine: in the bulk band, and without its limit of tokens."""
        return Caller(self.tenant.name, self.tenant.weight, None, "bulk")


def prepare_job(job: Job, context: TrainerContext) -> PreparedJob:
    """Read a job's rows and resolve its settings; raise the error of either."""
    workspace = context.workspace(job.tenant)
    tenant, dataset = workspace.tenant, find_dataset(job, workspace)
    check_room(dataset, context.backbone)
    reading = dataset.found.reading
    tree = make_tree(job.settings, reading, TRAIN_SETTINGS)
    tree |= {"task": job.task, "backbone": context.backbone.name}
    base = RunConfig()
    if start := job.settings.get("from"):
        found = workspace.resolve(start)  # finds only the tenant's own tasks
        tree["train"]["start"] = [f"{found.store_name}@{found.number}"]
        base = inherit(tree["train"]["start"], context.store)
    context.store.check_name(f"{tenant.prefix}{job.task}")
    with context.db.files.reading(dataset.path) as path:
        tree["data"]["source"] = str(path)
        config = overlay(base, tree)
        task = load_task(config.data, job.task)
    check_limits(task, tenant)
    run = make_run(task, config, context.backbone, context.store)
    return PreparedJob(job, tenant, PreparedRun(run, context.backbone, context.store))


def find_dataset(job: Job, workspace: Workspace) -> Dataset:
    """Return the dataset that a job names."""
    if job.dataset is None:
        raise BadConfig("the job names no dataset", "send rows first, and name the dataset's id")
    return workspace.dataset(job.dataset)


def check_room(dataset: Dataset, backbone: Backbone) -> None:
    """Refuse a dataset whose rows do not fit in the free memory."""
    free = available_bytes(backbone.device) if backbone.device.type == "cpu" else None
    if free is not None and _GROWTH * dataset.size_bytes > free:
        raise OutOfMemory(
            f"a dataset of {describe_bytes(dataset.size_bytes)} does not fit in the memory that is free for training",
            "send fewer rows, or try again when less is being trained",
        )


def check_limits(task: Task, tenant: Tenant) -> None:
    """Refuse more rows or labels than the tenant may use."""
    sides = (task.train, task.dev, task.test)
    used = {"dataset_rows": sum(len(side) for side in sides if side is not None), "labels": len(task.labels)}
    for limit, number in used.items():
        allowed = getattr(tenant.limits, limit)
        if allowed is not None and number > allowed:
            raise OverLimit(limit, number, allowed)


def pack_jobs(jobs: Sequence[Job], sizes: Sequence[int]) -> list[list[Job]]:
    """Divide the jobs of a cohort, in order, into packs whose rows fit in memory together; a large job is alone."""
    packs: list[list[Job]] = []
    total = 0
    for job, size in zip(jobs, sizes, strict=True):
        if not packs or total + size > _PACK_BYTES:
            packs.append([])
            total = 0
        packs[-1].append(job)
        total += size
    return packs
