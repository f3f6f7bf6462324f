"""The JSON that control routes take, as types: an unknown field or a value of another type is refused by name."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from inlay.service.web.shapes import Policy
from inlay.settings import KIND_NAMES

TASK_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
REFERENCE_PATTERN = r"^[A-Za-z0-9_-]{1,64}(@[0-9]{1,9})?$"
ID_PATTERN = r"^[a-z]{2,3}_[A-Za-z0-9_-]{1,60}$"
MOST_NUMBER = 2**31 - 1
_LONGEST_TEXT = 1_000_000


def _check_characters(text: str) -> str:
    if any("\ud800" <= letter <= "\udfff" or letter == "\0" for letter in text):
        raise ValueError("it has half a character, or a NUL")
    return text


def _read_time(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("it must be a time such as 2027-01-31T12:00:00Z")
    return datetime.fromisoformat(value)


TaskName = Annotated[str, StringConstraints(pattern=TASK_PATTERN)]
Reference = Annotated[str, StringConstraints(pattern=REFERENCE_PATTERN)]
DatasetId = Annotated[str, StringConstraints(pattern=ID_PATTERN)]
ColumnName = Annotated[str, StringConstraints(min_length=1, max_length=500), AfterValidator(_check_characters)]
Words = Annotated[str, StringConstraints(min_length=1, max_length=_LONGEST_TEXT), AfterValidator(_check_characters)]
Reason = Annotated[str, StringConstraints(max_length=500), AfterValidator(_check_characters)]
KeyName = Annotated[str, StringConstraints(max_length=64), AfterValidator(_check_characters)]
Whole = Annotated[int, Field(strict=True)]
Time = Annotated[datetime, BeforeValidator(_read_time)]
KeyScope = Literal["predict", "train", "admin"]
if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[("auto", *KIND_NAMES)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)


class ReadingBody(_Body):
    """The columns to read a dataset by; what is left out is recognised by its name."""

    text: ColumnName | None = None
    pair: ColumnName | None = None
    label: ColumnName | None = None
    kind: Kind | None = None


class TrainSettings(_Body):
    """What may be set of a training. All of it has a default that suits the data."""

    kind: Kind | None = None
    text: ColumnName | None = Field(default=None, description="The column with the text.")
    pair: ColumnName | None = Field(default=None, description="The column with the second text of a pair.")
    label: ColumnName | None = Field(default=None, description="The column with the label.")
    labels: list[ColumnName] | None = Field(default=None, min_length=2, max_length=10_000)
    metric: ColumnName | None = None
    merge_labels: bool | None = Field(default=None, description="Read labels that differ only in spelling as one.")
    bad_rows: Literal["refuse", "skip"] | None = Field(default=None, description="By default `skip`; events say which.")
    dev_share: float | None = Field(default=None, ge=0.01, le=0.5)
    test_share: float | None = Field(default=None, ge=0, le=0.5)
    method: str | None = Field(default=None, max_length=40)
    size: Whole | None = Field(default=None, ge=1, le=1024)
    epochs: Whole | None = Field(default=None, ge=1, le=200)
    lr: float | None = Field(default=None, ge=1e-7, le=1)
    seed: Whole | None = Field(default=None, ge=0, le=MOST_NUMBER)
    class_weights: Literal["none", "balanced"] | None = None
    max_length: Whole | None = Field(default=None, ge=4, le=512)
    thresholds: Literal["auto", "none", "dev"] | None = None
    from_: Reference | None = Field(default=None, alias="from", description="A task of yours to start from.")


class JobBody(_Body):
    """A version to be trained: of a dataset, or of the task's rows with its corrections."""

    task: TaskName
    dataset: DatasetId | None = None
    corrections: bool = Field(
        default=False, description="Train on the live version's dataset with the corrections; `dataset` is left out."
    )
    settings: TrainSettings = TrainSettings()
    publish: Policy | None = Field(default=None, description="When the version goes live; by default as the task says.")
    priority: Whole = Field(default=0, ge=-9, le=9)


class BatchBody(_Body):
    """A dataset to be answered in the background; `task` may name a version."""

    task: Reference
    dataset: DatasetId
    text: ColumnName | None = None
    pair: ColumnName | None = None
    min_confidence: float | None = Field(default=None, ge=0, le=1)
    priority: Whole = Field(default=0, ge=-9, le=9)


class PolicyBody(_Body):
    """When versions trained from now on go live."""

    policy: Policy


class AliasBody(_Body):
    """The version that is to answer."""

    version: Whole = Field(ge=1, le=MOST_NUMBER)
    reason: Reason = ""


class CorrectionBody(_Body):
    """A text and the label it should have been given."""

    text: Words
    label: Words
    pair: Words | None = None
    answered: Words | None = Field(default=None, description="The label that was answered.")
    version: Whole | None = Field(default=None, ge=1, le=MOST_NUMBER, description="The version that answered.")


class FeedbackBody(_Body):
    """Corrections of a task's answers."""

    items: list[CorrectionBody] = Field(min_length=1, max_length=1024)


class KeyBody(_Body):
    """A key to be made."""

    name: KeyName = ""
    scopes: list[KeyScope] = Field(default=["predict", "train", "admin"], min_length=1, max_length=3)
    expires_at: Time | None = Field(default=None, description="ISO 8601, such as 2027-01-31T12:00:00Z.")


class RotationBody(_Body):
    """How long the old key goes on beside its successor."""

    overlap_s: float = Field(default=0, ge=0, le=30 * 24 * 3600)
