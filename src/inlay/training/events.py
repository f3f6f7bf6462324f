"""Events of training: `emit(event)` is called with each, in the process that trains, as it happens.

A listener is any function of one event. It asks for the types it cares about and ignores the rest:

    def show(event: Event) -> None:
        if isinstance(event, EpochEnded):
            print(event.record["dev"])

What a listener raises ends the training; `Interrupted` and Ctrl-C save the resume state first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.training.cohort.cohort import Cohort
    from inlay.training.cohort.member import AnyMember


@dataclass(frozen=True)
class Event:
    """Something that happened; every kind of event is a subclass."""


Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Listen to nothing."""


def fan_out(*listeners: Emit) -> Emit:
    """Return a listener that hands every event to all of these, in order."""

    def emit(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return emit


@dataclass(frozen=True)
class RowsEncoded(Event):
    """Some rows of a set are tokenised. Sets in the token cache cause no such event."""

    num_done: int
    num_rows: int


@dataclass(frozen=True)
class CompileStarted(Event):
    """Something is about to be compiled, which takes seconds; once for each size of step."""

    what: str


@dataclass(frozen=True)
class CompileEnded(Event):
    """The compilation that started last is done, and the first step through it."""

    what: str
    seconds: float


@dataclass(frozen=True)
class Notice(Event):
    """Something does not go as planned; the result is the same."""

    message: str


@dataclass(frozen=True)
class CohortStarted(Event):
    """A cohort is about to take its first step, or to resume."""

    cohort: Cohort


@dataclass(frozen=True)
class StatesCached(Event):
    """The frozen layers of some texts are computed, before the first step."""

    num_done: int
    num_texts: int


@dataclass(frozen=True)
class CacheFull(Event):
    """Memory and file are full: the frozen layers of `num_left` texts are computed whenever they are needed."""

    num_left: int
    num_texts: int


@dataclass(frozen=True)
class StepTaken(Event):
    """A cohort took a step."""

    cohort: Cohort
    num_rows: int


@dataclass(frozen=True)
class RowsAnswered(Event):
    """Some dev rows were answered, and more follow."""


@dataclass(frozen=True)
class EpochEnded(Event):
    """A run finished an epoch and was scored on its dev rows."""

    member: AnyMember
    record: dict[str, Any]


@dataclass(frozen=True)
class StateSaved(Event):
    """The resume state of a cohort was written: what lies under `folder` is enough to go on from here."""

    folder: Path


@dataclass(frozen=True)
class RunEnded(Event):
    """A run left its cohort: it finished, stopped early or diverged. Its folder is complete."""

    member: AnyMember


@dataclass(frozen=True)
class RunEntered(Event):
    """A run that waited got the slot of one that ended."""

    member: AnyMember


@dataclass(frozen=True)
class MemoryRanOut(Event):
    """Memory ran out, and training goes on in smaller pieces."""

    message: str
