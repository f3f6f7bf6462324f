"""Feedback: corrections of answers, which become rows of the next dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select

from inlay.errors import BadConfig
from inlay.service.state import schema
from inlay.service.state.aliases import TaskKey
from inlay.service.state.audit import check_storable
from inlay.service.state.identifiers import make_id
from inlay.service.state.paging import Page, check_limit, cut_page, read_cursor
from inlay.service.state.timestamps import to_iso

MOST_CHARACTERS = 1_000_000
MOST_AT_ONCE = 1024


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


def check_corrections(items: Sequence[Correction]) -> None:
    """Refuse corrections that cannot be kept."""
    if not 1 <= len(items) <= MOST_AT_ONCE:
        raise BadConfig(f"{len(items)} corrections at once", f"1 to {MOST_AT_ONCE}")
    for item in items:
        for name in ("text", "pair", "label", "answered"):
            said = getattr(item, name)
            if said is None:
                continue
            check_storable(f"{name} of a correction", said)
            if len(said) > MOST_CHARACTERS:
                raise BadConfig(
                    f"the {name} of a correction has {len(said):,} characters", f"{MOST_CHARACTERS:,} at most"
                )
        if not item.text.strip() or not item.label.strip():
            raise BadConfig("a correction has no text or no label", "give both")


def insert_feedback(
    connection: Connection, task: TaskKey, items: Sequence[Correction], by: str, at: float
) -> list[Feedback]:
    """Keep corrections that were checked."""
    kept = []
    for item in items:
        values = {"tenant": task.tenant, "task": task.name, "id": make_id("fb"), "by": by, "at": at, **vars(item)}
        query = insert(schema.feedback).values(**values).returning(schema.feedback.c.number)
        number = connection.execute(query).scalar_one()
        kept.append(Feedback(str(values["id"]), task.name, item, by, at, number))
    return kept


def list_feedback(connection: Connection, task: TaskKey, limit: int, cursor: str | None) -> Page[Feedback]:
    """Return a page of a task's corrections, newest first."""
    check_limit(limit)
    row = schema.feedback.c
    after = read_cursor("feedback", cursor, int)
    query = select(schema.feedback).where(row.tenant == task.tenant, row.task == task.name)
    query = query if after is None else query.where(row.number < after)
    found = connection.execute(query.order_by(row.number.desc()).limit(limit + 1)).all()
    return cut_page("feedback", [_feedback_of(item) for item in found], limit, lambda item: item.number)


def all_feedback(connection: Connection, task: TaskKey) -> list[Feedback]:
    """Return all of a task's corrections, oldest first."""
    row = schema.feedback.c
    query = select(schema.feedback).where(row.tenant == task.tenant, row.task == task.name)
    return [_feedback_of(item) for item in connection.execute(query.order_by(row.number))]


def count_feedback(connection: Connection, task: TaskKey) -> int:
    """Return the number of a task's corrections."""
    row = schema.feedback.c
    query = select(func.count()).where(row.tenant == task.tenant, row.task == task.name)
    return int(connection.execute(query).scalar_one())


def _feedback_of(row: Any) -> Feedback:
    said = Correction(row.text, row.label, row.pair, row.answered, row.version)
    return Feedback(row.id, row.task, said, row.by, row.at, row.number)
