"""Pages of long lists, and the opaque cursors that lead from one to the next."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from inlay.errors import BadConfig

T = TypeVar("T")
MOST_ITEMS = 200


@dataclass(frozen=True)
class Page(Generic[T]):
    """A part of a list, and the cursor of the next part; None at the end."""

    items: tuple[T, ...]
    next_cursor: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the page as the API shows it."""
        return {"items": [item.to_json() for item in self.items], "next_cursor": self.next_cursor}  # type: ignore[attr-defined]


def write_cursor(kind: str, place: int | str) -> str:
    """Return the cursor of what comes after `place` in a list of `kind`."""
    return base64.urlsafe_b64encode(json.dumps([kind, place]).encode()).decode().rstrip("=")


def read_cursor(kind: str, cursor: str | None, expected: type) -> Any:
    """Return the place that a cursor stands for, None for none; refuse what is no cursor of such a list."""
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


def check_limit(limit: int) -> int:
    """Return how many items a page has; refuse what is no such number."""
    if not 1 <= limit <= MOST_ITEMS:
        raise BadConfig(f"`limit` is {limit}", f"a whole number from 1 to {MOST_ITEMS}")
    return limit


def cut_page(kind: str, items: Sequence[T], limit: int, place_of: Callable[[T], int | str]) -> Page[T]:
    """Return the page of at most `limit` items, of which one more was read if there is one."""
    if len(items) <= limit:
        return Page(tuple(items))
    return Page(tuple(items[:limit]), write_cursor(kind, place_of(items[limit - 1])))
