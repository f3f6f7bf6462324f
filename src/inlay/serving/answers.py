"""Requests, answers, and the lookup of the version that a task name stands for. No torch.

An answer has one field with the result (a label, labels, a number, entities, a text); the tables at the end of this
file say how each is shown in one cell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

from inlay.errors import BadConfig, BadData, InlayError, StoreDamaged, Unanswered, Unsupported
from inlay.store import Manifest, Store, Version

if TYPE_CHECKING:
    from torch import Tensor

    from inlay.model import Outcome

_LONGEST_NAME = 200  # letters of a name with its `@version`
_MOST_KNOWN = 10_000  # names whose version is remembered


@dataclass(frozen=True)
class Request:
    """A text (or pair of texts) for a task: `sms`, `sms@3` or `sms@best`.

    >>> inlay.Request("mood@best", "good film 3", min_confidence=0.8).task
    'mood@best'
    """

    task: str
    text: str
    pair: str | None = None
    min_confidence: float | None = None
    """the task abstains if its answer is less sure than this"""


@dataclass(frozen=True)
class Answer:
    """A task's answer to a request, or the error if it could not be answered.

    >>> answer = inlay.predict("mood", "good film 3")
    >>> answer
    Answer(mood@1: ..., 0...)
    >>> sorted(answer.outcome.probabilities)
    ['no', 'yes']
    """

    task: str
    version: str | None = None
    """the version that answered, such as `sms@3`"""
    outcome: Outcome | None = None
    logits: Tensor | None = None
    """the logits of all windows and tokens of the row, as one vector"""
    error: InlayError | None = None

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Answer({self.task}: {self.error.message})"
        about = describe_answer(self)
        sure = f", {about['probability']:.4f}" if about.get("probability") is not None else ""
        return f"Answer({self.version}: {answer_words(about)}{sure})"

    def to_json(self) -> dict[str, Any]:
        """Return the answer as data, errors included."""
        if self.error is not None:
            return {"task": self.task, "error": self.error.to_json()}
        assert self.outcome is not None
        return {"task": self.task, "version": self.version, **self.outcome.to_json()}


class AnswerLike(Protocol):
    """An answer of an engine here, or of a service."""

    @property
    def task(self) -> str: ...
    @property
    def error(self) -> InlayError | None: ...
    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Resolved:
    """The version that a name stands for, and its manifest. `stamp` is the store's stamp of the name at that time."""

    version: Version
    manifest: Manifest
    stamp: int | None = None


class VersionLookup:
    """Finds the version that a name stands for now; reads the store only if the name's versions may have changed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, Resolved] = {}

    def find(self, task: str, found: dict[str, Resolved | InlayError]) -> Resolved:
        """Return the version that `NAME`, `NAME@3` or `NAME@best` stands for; raise what is wrong with the name.

        `found` has the names looked up so far in a call, so that a name keeps its meaning during the call; a new name
        is added.
        """
        if not isinstance(task, str):
            raise BadData(f"the task is a `{type(task).__name__}`, not a name", "give the task's name as a text")
        if len(task) > _LONGEST_NAME:
            raise BadData(f"the task's name has {len(task):,} letters", "`inlay tasks` lists the tasks")
        if task not in found:
            try:
                found[task] = self._resolve(task)
            except Exception as error:  # it is the error of every request with this name
                found[task] = as_error(error)
        answer = found[task]
        if isinstance(answer, InlayError):
            raise answer
        return answer

    def forget(self, name: str) -> None:
        """Forget the looked-up versions of a task."""
        for task in [task for task in self._known if task.partition("@")[0] == name]:
            self._known.pop(task, None)

    def _resolve(self, task: str) -> Resolved:
        stamp = self._store.stamp(task)  # taken first: a change after it shows in the next one
        known = self._known.get(task)
        if known is not None and known.stamp is not None and known.stamp == stamp:
            return known
        version = self._store.resolve(task)
        if known is not None and known.version == version:
            manifest = known.manifest
        else:
            manifest = self._store.manifest(version)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[task] = resolved = Resolved(version, manifest, stamp)
        return resolved


def as_error(error: Exception) -> InlayError:
    """Return whatever went wrong with a request as an `InlayError`.

    It has no traceback: that would keep all requests of the batch alive as long as the answer.
    """
    if isinstance(error, InlayError):
        return error.with_traceback(None)
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{error.filename}: "
        hint = "make it readable, or restore it from a copy; `inlay doctor` checks the store"
        return StoreDamaged(f"{where}cannot be read: {error.strerror or error}", hint)
    words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return Unanswered(
        f"no answer: {words}", "ask again with this text alone; if it fails again, please report a bug in Inlay"
    )


def check_confidence(min_confidence: float | None, kind: str | None = None) -> None:
    """Refuse a threshold that is not a probability, and any threshold for a kind of task without confidences."""
    if min_confidence is None:
        return
    if isinstance(min_confidence, bool) or not isinstance(min_confidence, Real):
        reason = f"`--min-confidence` is a `{type(min_confidence).__name__}`, not a number"
        raise BadConfig(reason, "give a probability from 0 to 1")
    if not 0 <= min_confidence <= 1:
        shown = "too large" if abs(min_confidence) > 1e300 else f"{min_confidence:g}"
        raise BadConfig(f"`--min-confidence` is `{shown}`", "give a probability from 0 to 1")
    if kind is not None:
        from inlay.model import find_head

        if find_head(kind).confidence is None:
            raise Unsupported(f"a `{kind}` task has no confidence to abstain by", "leave out `--min-confidence`")


def describe_answer(answer: AnswerLike) -> dict[str, Any]:
    """Return an answer as JSON data, with the probability of its label, or of the label it withheld."""
    about = answer.to_json()
    if "label" in about:
        label, probabilities = about["label"], about["probabilities"]
        about["probability"] = max(probabilities.values()) if label is None else probabilities[label]
    return about


def answer_cell(about: Mapping[str, Any]) -> str:
    """Return the result of a described answer for one cell of a table; empty if there is none."""
    field = next(name for name in _CELLS if name in about)
    return "" if about[field] is None else _CELLS[field](about[field])


def answer_words(about: Mapping[str, Any]) -> str:
    """Return the result of a described answer in words; a tagger may withhold some entities and give others."""
    cell = answer_cell(about)
    if about.get("abstained"):
        return f"{cell} (abstained)".lstrip()
    return cell or next(words for name, words in _EMPTY.items() if name in about)


# Result field of an answer -> how it is shown in one cell.
_CELLS: dict[str, Callable[[Any], str]] = {
    "labels": "|".join,
    "value": lambda value: f"{value:.6g}",
    "entities": lambda entities: "|".join(f"{entity['text']} ({entity['label']})" for entity in entities),
    "answer": str,
    "label": str,
}
# Result field of an answer -> the words for an empty result.
_EMPTY = {"labels": "(no labels)", "entities": "(no entities)", "answer": "(no answer)", "label": "(no label)"}
