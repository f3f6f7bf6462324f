"""Rendering of templates, always escaped, and the writing of times. `inlay.reports` writes numbers.

No template may switch escaping off. `StrictUndefined` makes a misspelt name an error instead of a blank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from inlay.reports import (
    capitalize_first,
    duration,
    level,
    metric_words,
    percent,
    plural,
    show_bytes,
    show_number,
    show_score,
)

FOLDER = Path(__file__).parent
STATIC = FOLDER / "static"
_SOON = 10


@lru_cache(maxsize=1)
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "ago": ago,
        "bytes": show_bytes,
        "clock": clock,
        "day": show_day,
        "duration": duration,
        "large": capitalize_first,
        "level": level,
        "listed": listed,
        "number": show_number,
        "nth": nth,
        "percent": percent,
        "plural": plural,
        "score": show_score,
        "ticked": ticked,
        "words": metric_words,
    }
    made.globals["static"] = static_url
    return made


def render(template: str, context: Mapping[str, Any]) -> str:
    """Return a template as HTML."""
    return _environment().get_template(template).render(context)


@lru_cache(maxsize=64)
def static_url(name: str) -> str:
    """Return the address of a static file. It changes with the content, so that browsers may keep the file for good."""
    return f"/static/{name}?v={hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]}"


def ticked(text: str | None) -> Markup:
    """Return words as HTML, with the parts in backticks as code; everything is escaped."""
    parts = (text or "").split("`")
    if len(parts) % 2 == 0:  # a backtick without a partner is a letter
        return escape(text or "")
    pieces = [
        escape(part) if number % 2 == 0 else Markup("<code>{}</code>").format(part) for number, part in enumerate(parts)
    ]
    return Markup("").join(pieces)


def listed(cell: str) -> str:
    """Write the labels of a set, which files separate by `|`."""
    return cell.replace("|", ", ") or "no label"


def nth(number: int) -> str:
    """Write an ordinal number: 1st, 2nd, 3rd, 11th."""
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def read_time(text: str) -> datetime:
    """Read an ISO 8601 time; one without a zone is in UTC."""
    found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def ago(text: str | None) -> str:
    """Write how long ago something was."""
    if text is None:
        return "never"
    seconds = (datetime.now(UTC) - read_time(text)).total_seconds()
    return "just now" if seconds < _SOON else f"{duration(seconds)} ago"


def clock(text: str) -> str:
    """Write the time of day (UTC) of an event."""
    return read_time(text).astimezone(UTC).strftime("%H:%M:%S")


def show_day(text: str | None) -> str:
    """Write a day: `19 Nov 2026`."""
    return "never" if text is None else read_time(text).strftime("%-d %b %Y")
