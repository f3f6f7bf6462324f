"""Jobs: what a tenant asked to be done, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inlay.service.state.timestamps import to_iso

TRAIN, BATCH, ERASE = "train", "batch", "erase"
KINDS_OF_JOB = (TRAIN, BATCH, ERASE)
QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED = "queued", "running", "succeeded", "failed", "cancelled"
ENDED = (SUCCEEDED, FAILED, CANCELLED)
POLICIES = ("always", "if-better", "never")
"""when a trained version goes live"""
MOST_PRIORITY = 9


@dataclass(frozen=True)
class JobRequest:
    """A job as it is asked for. `structure` names jobs that may train together; by default the method does."""

    kind: str
    task: str
    dataset: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    publish: str | None = None
    """one of `POLICIES`; by default the task's"""
    priority: int = 0
    """-9 to 9: higher ones come first among the tenant's own"""
    structure: str | None = None


@dataclass(frozen=True)
class Job:
    """A job as it stands."""

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
    """trainers that ended without a word while they had it"""
    cancel_requested: bool
    progress: dict[str, Any] | None
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    number: int
    place: int | None = None
    """jobs that come before it in the queue, and itself; None if it is not queued"""

    @property
    def has_ended(self) -> bool:
        """Whether nothing will happen to it any more."""
        return self.state in ENDED

    def to_json(self) -> dict[str, Any]:
        """Return the job as the API shows it."""
        shown = (
            *("id", "kind", "task", "dataset", "state", "place", "priority", "publish", "settings"),
            *("progress", "result", "error"),
        )
        times = {name: to_iso(getattr(self, name)) for name in ("created_at", "started_at", "ended_at")}
        return {
            **{name: getattr(self, name) for name in shown},
            **times,
            "cancel_requested": self.cancel_requested,
        }


@dataclass(frozen=True)
class JobEvent:
    """Something that happened to a job; `id` grows over all jobs."""

    id: int
    at: float
    kind: str
    message: str
    data: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the event as the API shows it."""
        return {"id": self.id, "at": to_iso(self.at), "kind": self.kind, "message": self.message, "data": self.data}
