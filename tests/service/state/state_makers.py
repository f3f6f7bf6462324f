"""What tests of the state make by hand: a clock, datasets, jobs and versions."""

from __future__ import annotations

import itertools
from typing import Any

from inlay.service.state import (
    Dataset,
    DatasetDraft,
    Job,
    JobQueue,
    JobRequest,
    Publication,
    UploadContent,
    Workspace,
)

START = 1_800_000_000.0
DIGEST = "ab" * 32
DRAFTS = itertools.count()
METHOD = {"name": "houlsby", "size": 8}
HEAD = {"kind": "classify", "num_outputs": 2, "pooling": "cls"}
BACKBONE = {
    "name": "tiny",
    "fingerprint": "tiny",
    "family": "bert",
    "num_parameters": 100,
    "exact_digest": "tiny",
    "precision": "float32",
}


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def make_dataset(
    workspace: Workspace, content: str = "text,label\nhello,ham\nwin now,spam\n", **changed: Any
) -> Dataset:
    """A dataset of a workspace, as the web would have uploaded and read it."""
    folder = workspace.db.paths.datasets(workspace.name)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".draft-{next(DRAFTS)}.csv"
    path.write_text(content)
    reading = {"text": "text", "pair": None, "label": "label", "kind": "classify", "labels": []}
    found = UploadContent(columns=[{"name": "text"}, {"name": "label"}], reading=reading)
    known = {"name": "mail.csv", "format": "csv", "size_bytes": len(content), "sha256": DIGEST, "num_rows": 2}
    return workspace.add_dataset(DatasetDraft(**{"path": path, **known, "found": found, **changed}))


def train(workspace: Workspace, task: str = "mail", **asked: Any) -> Job:
    """A queued training job."""
    return workspace.submit(JobRequest("train", task, **{"settings": {"method": "houlsby"}, **asked}))


def go_live(workspace: Workspace, task: str = "mail", number: int = 1, *, goes_live: bool = True, **asked: Any) -> Job:
    """A job that trained a version, which is live unless told otherwise."""
    job = train(workspace, task, **asked)
    queue = JobQueue(workspace.db)
    cohort = queue.claim("tests", company_s=0.0, most=1000)
    assert cohort is not None
    assert job.id in {each.id for each in cohort.jobs}
    return queue.publish_live(cohort, job.id, publication(number, goes_live=goes_live))


def publication(number: int = 1, **changed: Any) -> Publication:
    """What a trainer says of a version it published."""
    said = {"digest": DIGEST, "size_bytes": 100, "goes_live": True, "reason": "first version", "result": {}}
    return Publication(number, **{**said, **changed})


def store_version(workspace: Workspace, task: str = "mail", seed: int = 0, text: str = "hello") -> Any:
    """A version in the store, with a probe that has a text, as training would have published it."""
    import torch

    from inlay.store import Manifest, Probe

    store, prefix = workspace.db.store, workspace.tenant.prefix
    manifest = Manifest(
        kind="classify",
        labels=("ham", "spam"),
        metric="accuracy",
        method=METHOD,
        head=HEAD,
        max_length=64,
        metrics={"dev": {"accuracy": 0.5 + seed / 100}},
        data_digest="data",
        dev_digest="dev",
        backbone=BACKBONE,
        run_id=f"{seed:016x}",
        num_parameters=10,
        probes=(Probe(text, None, (0.5, 0.5)),),
        config={},
    )
    return store.publish(f"{prefix}{task}", {"head": torch.full((4,), float(seed))}, manifest, {"host": "tests"})


def train_and_store(workspace: Workspace, task: str = "mail", seed: int = 0, **asked: Any) -> Any:
    """A version that a job of the workspace trained: in the store, in the database, and live."""
    job = train(workspace, task, **asked)
    queue = JobQueue(workspace.db)
    cohort = queue.claim("tests", company_s=0.0, most=1000)
    assert cohort is not None
    version = store_version(workspace, task, seed)
    queue.publish_live(cohort, job.id, publication(version.number, digest=version.digest))
    return version
