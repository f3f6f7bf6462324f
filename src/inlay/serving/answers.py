"""Requests and answers as data, and an answer in words. No torch.

An answer has one field that says what the task found (a label, labels, a number, entities, a text); the tables at the
end of this file say how each of them looks in one cell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inlay.errors import BadConfig, InlayError, Unsupported

if TYPE_CHECKING:
    from torch import Tensor

    from inlay.model import Outcome


@dataclass(frozen=True)
class Request:
    """A text (or pair of texts) for a task: `sms`, `sms@3` or `sms@best`."""

    task: str
    text: str
    pair: str | None = None
    min_confidence: float | None = None
    """the task abstains if its answer is less sure than this"""


@dataclass(frozen=True)
class Answer:
    """A task's answer to a request, or the error that took its place."""

    task: str
    version: str | None = None
    """the version that answered, such as `sms@3`"""
    outcome: Outcome | None = None
    logits: Tensor | None = None
    """the logits of all windows and tokens of the row, as one vector"""
    error: InlayError | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the answer as data, errors included."""
        if self.error is not None:
            return {"task": self.task, "error": self.error.to_json()}
        assert self.outcome is not None
        return {"task": self.task, "version": self.version, **self.outcome.to_json()}


def check_confidence(min_confidence: float | None, kind: str | None = None) -> None:
    """Refuse a threshold that is not a probability, and any threshold for a kind of task without confidences."""
    if min_confidence is None:
        return
    if not 0 <= min_confidence <= 1:
        raise BadConfig(f"`--min-confidence` is `{min_confidence:g}`", "give a probability from 0 to 1")
    if kind is not None:
        from inlay.model import find_head

        if find_head(kind).confidence is None:
            raise Unsupported(f"a `{kind}` task has no confidence to abstain by", "leave out `--min-confidence`")


def describe_answer(answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON data, with the probability of its label, or of the label it would have given."""
    about = answer.to_json()
    if "label" in about:
        label, probabilities = about["label"], about["probabilities"]
        about["probability"] = max(probabilities.values()) if label is None else probabilities[label]
    return about


def answer_cell(about: Mapping[str, Any]) -> str:
    """Return what a described answer says, for one cell of a table; empty if it says nothing."""
    field = next(name for name in _CELLS if name in about)
    return "" if about[field] is None else _CELLS[field](about[field])


def answer_words(about: Mapping[str, Any]) -> str:
    """Return what a described answer says, in words for people; a tagger may withhold some entities and give others."""
    cell = answer_cell(about)
    if about.get("abstained"):
        return f"{cell} (abstained)".lstrip()
    return cell or next(words for name, words in _EMPTY.items() if name in about)


def entities_cell(entities: Sequence[Mapping[str, Any]]) -> str:
    """Return entities in one cell: `Oslo (LOC)|Ada Lovelace (PER)`."""
    return "|".join(f"{entity['text']} ({entity['label']})" for entity in entities)


# The field an answer has -> how it looks in one cell.
_CELLS: dict[str, Callable[[Any], str]] = {
    "labels": "|".join,
    "value": lambda value: f"{value:.6g}",
    "entities": entities_cell,
    "answer": str,
    "label": str,
}
# The field an answer has -> the words for an empty one.
_EMPTY = {"labels": "(no labels)", "entities": "(no entities)", "answer": "(no answer)", "label": "(no label)"}
