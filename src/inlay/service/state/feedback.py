"""Feedback: corrections of answers, which become rows of the next dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inlay.service.state.timestamps import to_iso


@dataclass(frozen=True)
class Correction:
    """A row and the label it should have been given, as a caller says it."""

    text: str
    label: str
    pair: str | None = None
    answered: str | None = None
    """the label that was answered"""
    version: int | None = None
    """the version that answered"""


@dataclass(frozen=True)
class Feedback:
    """A correction that was kept."""

    id: str
    task: str
    correction: Correction
    by: str
    at: float
    number: int

    def to_json(self) -> dict[str, Any]:
        """Return the correction as the API shows it."""
        said = self.correction
        return {
            "id": self.id,
            "task": self.task,
            "text": said.text,
            "pair": said.pair,
            "label": said.label,
            "answered": said.answered,
            "version": said.version,
            "by": self.by,
            "at": to_iso(self.at),
        }
