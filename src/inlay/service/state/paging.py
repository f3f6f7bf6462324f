"""Pages of long lists, and the opaque cursors that lead from one page to the next."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, Connection, Table, select

from inlay.errors import BadConfig

T = TypeVar("T")
U = TypeVar("U")
MOST_ITEMS = 200


@dataclass(frozen=True)
class Page(Generic[T]):
    """One part of a list, with the cursor of the next part; None at the end."""

    items: tuple[T, ...]
    next_cursor: str | None = None

    def convert(self, convert: Callable[[T], U]) -> Page[U]:
        """Return the page with every item converted."""
        return Page(tuple(convert(item) for item in self.items), self.next_cursor)

    def to_json(self) -> dict[str, Any]:
        """Return the page as the API shows it."""
        return {"items": [item.to_json() for item in self.items], "next_cursor": self.next_cursor}  # type: ignore[attr-defined]


def read_newest(
    connection: Connection, table: Table, is_wanted: Sequence[ColumnElement[bool]], limit: int, cursor: str | None
) -> Page[Any]:
    """Return a page of the rows of a table that are wanted, newest first. The table counts its rows in `number`."""
    check_limit(limit)
    after = read_cursor(table.name, cursor, int)
    query = select(table).where(*is_wanted)
    if after is not None:
        query = query.where(table.c.number < after)
    rows = connection.execute(query.order_by(table.c.number.desc()).limit(limit + 1)).all()
    return cut_page(table.name, rows, limit, lambda row: row.number)


def check_limit(limit: int) -> None:
    """Refuse a number of items that no page can have."""
    if not 1 <= limit <= MOST_ITEMS:
        raise BadConfig(f"`limit` is {limit}", f"a whole number from 1 to {MOST_ITEMS}")


def read_cursor(kind: str, cursor: str | None, expected: type) -> Any:
    """Return where a page begins, None for the first page; refuse a text that is no cursor of a list of this kind."""
    if cursor is None:
        return None
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        said, place = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        if said == kind and type(place) is expected:
            return place
    except (ValueError, TypeError, RecursionError):
        pass
    raise BadConfig("the cursor is not one of this list", "take `next_cursor` of an answer as it is, or leave it out")


def cut_page(kind: str, items: Sequence[T], limit: int, place_of: Callable[[T], int | str]) -> Page[T]:
    """Return the page of the first `limit` items; one item more was read, if there is one, to know of a next page."""
    if len(items) <= limit:
        return Page(tuple(items))
    place = place_of(items[limit - 1])
    cursor = base64.urlsafe_b64encode(json.dumps([kind, place]).encode()).decode().rstrip("=")
    return Page(tuple(items[:limit]), cursor)
