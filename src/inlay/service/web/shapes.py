"""The JSON that the API answers with, as types: `/openapi.json` is made of them, and every answer is checked."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")
Scope = Literal["predict", "train", "admin", "operator"]
JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
Policy = Literal["always", "if-better", "never"]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class FieldFaultShape(_Shape):
    """A field that is at fault."""

    field: str
    detail: str


class ProblemShape(BaseModel):
    """What went wrong (RFC 9457), and what to do."""

    model_config = ConfigDict(extra="forbid", json_schema_serialization_defaults_required=False)

    type: str = Field(description="A name for this sort of problem, `urn:inlay:problem:CODE`.")
    title: str
    status: int
    detail: str
    hint: str | None = Field(default=None, description="What to do next.")
    code: str
    request_id: str = Field(default="", description="The request's id: the operator finds it in the log.")
    errors: list[FieldFaultShape] = Field(default=[], description="The fields at fault, if it is fields.")


class ListShape(_Shape, Generic[T]):
    """A page of a list; `next_cursor` leads to the next one."""

    items: list[T]
    next_cursor: str | None


class ColumnShape(_Shape):
    """A column of a file."""

    name: str
    examples: list[str]
    num_empty: int


class LabelCount(_Shape):
    """A label, and how many rows have it."""

    label: str
    count: int


class ReadingShape(_Shape):
    """The columns that training would read, the kind of task they make, and its labels."""

    text: str | None
    pair: str | None
    label: str | None
    kind: str | None
    labels: list[LabelCount]


class NoteShape(_Shape):
    """Something that was found in a file."""

    message: str
    line: int | None = None


class DatasetShape(_Shape):
    """An upload, and what it was found to hold. `problem` says why it cannot be trained on, if so."""

    id: str
    name: str
    format: str
    size_bytes: int
    sha256: str
    num_rows: int
    columns: list[ColumnShape]
    reading: ReadingShape | None
    problem: dict[str, Any] | None
    notes: list[NoteShape]
    first_rows: list[list[Any]]
    created_at: str


class JobShape(_Shape):
    """A wish for a version, a batch of answers, or an erasure; and how far it is."""

    id: str
    kind: Literal["train", "batch", "erase"]
    task: str
    dataset: str | None
    state: JobState
    place: int | None = Field(description="Its place in the queue; 1 is next.")
    priority: int
    publish: str
    settings: dict[str, Any]
    progress: dict[str, Any] | None
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    created_at: str
    started_at: str | None
    ended_at: str | None
    cancel_requested: bool


class JobEventShape(_Shape):
    """Something that happened to a job."""

    id: int
    at: str
    kind: str
    message: str
    data: dict[str, Any]


class LiveShape(_Shape):
    """The version that answers, and its score on its dev rows."""

    version: int
    score: float | None
    interval: list[float] | None = Field(description="95%, by bootstrap of the dev rows.")
    published_at: str


class TaskShape(_Shape):
    """A task as it is now."""

    name: str
    kind: str | None
    labels: list[str]
    metric: str | None
    live: LiveShape | None
    num_versions: int
    policy: Policy
    follows: Literal["alias", "latest"]
    rows_today: int
    created_at: str | None
    etag: str


class VersionShape(_Shape):
    """An immutable version of a task."""

    version: int
    digest: str
    published_at: str
    metrics: dict[str, Any]
    metric: str | None
    kind: str | None
    method: str | None
    size: int | None
    num_parameters: int
    dataset: str | None
    job: str | None
    reason: str
    is_live: bool
    size_bytes: int


class AliasShape(_Shape):
    """The version that `live` stands for."""

    alias: str
    version: int
    etag: str
    moved_at: str
    moved_by: str
    reason: str


class AliasMoveShape(_Shape):
    """A move of `live`."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    from_: int | None = Field(alias="from")
    to: int
    at: str
    by: str
    reason: str


class FeedbackShape(_Shape):
    """A correction of an answer."""

    id: str
    task: str
    text: str
    pair: str | None
    label: str
    answered: str | None
    version: int | None
    by: str
    at: str


class SuggestionShape(_Shape):
    """A row worth labelling: what the task answers, and how sure it is."""

    text: str
    pair: str | None
    answer: Any
    confidence: float | None
    line: int | None = None
    expected: Any = None
    source: Literal["dev", "errors", "unlabelled"]


class DayUsageShape(_Shape):
    """The rows that a task answered on a day (UTC)."""

    day: str
    task: str
    rows: int
    tokens: int
    requests: int


class LimitsShape(_Shape):
    """What the tenant may use at most, and what of it is used. Null is no limit."""

    tenant: str
    weight: float
    limits: dict[str, int | None]
    used: dict[str, int]


class KeyShape(_Shape):
    """A key, without its secret."""

    id: str
    name: str
    tenant: str
    scopes: list[Scope]
    created_at: str
    expires_at: str | None
    revoked_at: str | None
    last_used_at: str | None


class MadeKeyShape(KeyShape):
    """A new key; `secret` is its whole text, shown only now."""

    secret: str | None


class HealthShape(_Shape):
    """Whether the process is there."""

    status: Literal["ok"]


class ReadinessShape(_Shape):
    """Whether the service can answer: each part, and what is wrong with it."""

    status: Literal["ready", "not-ready"]
    checks: dict[str, str]
