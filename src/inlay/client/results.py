"""The results of a service's API as dataclasses, with the whole JSON in `about`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from inlay.client.problems_read import ServiceProblem, read_problem
from inlay.errors import InlayError

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteAnswer:
    """A task's answer to a row, or the error if it could not be answered. `about` has the whole JSON."""

    task: str
    version: str | None = None
    """the version that answered, such as `mail@3`"""
    label: str | None = None
    labels: list[str] | None = None
    value: float | None = None
    answer: str | None = None
    entities: list[dict[str, Any]] | None = None
    probability: float | None = None
    probabilities: dict[str, float] | None = None
    abstained: bool = False
    error: InlayError | None = None
    about: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.repr}
        shown = ", ".join(
            f"{name}={value!r}" for name, value in values.items() if value is not None and value is not False
        )
        return f"RemoteAnswer({shown})"

    def to_json(self) -> dict[str, Any]:
        """Return the answer as `inlay predict --json` shows it, errors included."""
        if self.error is not None:
            return {"task": self.task, "error": self.error.to_json()}
        return dict(self.about)


@dataclass(frozen=True)
class RemoteDataset:
    """An uploaded dataset. `problem` says why it cannot be trained on, if it cannot."""

    id: str
    name: str
    format: str
    size_bytes: int
    num_rows: int
    columns: list[dict[str, Any]]
    reading: dict[str, Any] | None
    problem: dict[str, Any] | None
    notes: list[dict[str, Any]]
    first_rows: list[list[Any]]
    created_at: str
    about: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class RemoteJob:
    """The state of a job at the time of the request."""

    id: str
    kind: str
    task: str
    dataset: str | None
    state: str
    place: int | None
    publish: str
    settings: dict[str, Any]
    progress: dict[str, Any] | None
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    created_at: str
    started_at: str | None
    ended_at: str | None
    about: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended."""
        return self.state in ("succeeded", "failed", "cancelled")

    def check(self) -> RemoteJob:
        """Return the job if it succeeded; raise what went wrong with it."""
        if self.state == "failed":
            raise read_problem(self.error or {})
        if self.state == "cancelled":
            raise ServiceProblem(f"job `{self.id}` was cancelled", "start it again", code="cancelled")
        return self


@dataclass(frozen=True)
class RemoteEvent:
    """An event of a job."""

    id: int
    at: str
    kind: str
    message: str
    data: dict[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class RemoteTask:
    """A task; `live` has the version that answers and its score."""

    name: str
    kind: str | None
    labels: list[str]
    metric: str | None
    live: dict[str, Any] | None
    num_versions: int
    policy: str
    etag: str
    about: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class RemoteVersion:
    """An immutable version of a task."""

    version: int
    digest: str
    published_at: str
    metrics: dict[str, Any]
    metric: str | None
    method: str | None
    size: int | None
    num_parameters: int
    dataset: str | None
    job: str | None
    is_live: bool
    about: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class RemoteAlias:
    """The version that is live."""

    version: int
    etag: str
    moved_at: str
    moved_by: str
    reason: str
    about: Mapping[str, Any] = field(default_factory=dict, repr=False)


def make_result(kind: type[T], found: Mapping[str, Any]) -> T:
    """Return JSON as a dataclass; fields that a newer service adds are only in `about`."""
    names = [item.name for item in dataclasses.fields(kind) if item.name != "about"]  # type: ignore[arg-type]
    return kind(**{name: found.get(name) for name in names} | {"about": found})


def make_answer(found: Mapping[str, Any]) -> RemoteAnswer:
    """Return the JSON of an answer as a `RemoteAnswer`."""
    if "error" in found:
        return RemoteAnswer(found["task"], error=read_problem(found["error"]), about=found)
    answer = make_result(RemoteAnswer, {"abstained": False, **found})
    return dataclasses.replace(answer, about=found)
