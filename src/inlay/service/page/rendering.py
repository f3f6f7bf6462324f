"""Templates: text in, HTML out, always escaped. How numbers, times and scores are written on every page.

No template may switch escaping off, and `StrictUndefined` makes a misspelt name an error instead of a blank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

FOLDER = Path(__file__).parent
STATIC = FOLDER / "static"
# Metric -> its name in plain words, and whether its values read best as percentages.
_METRICS = {
    "accuracy": ("right answers", True),
    "f1": ("F1", True),
    "macro_f1": ("mean F1 of the labels", True),
    "micro_f1": ("F1 over all labels", True),
    "entity_f1": ("F1 of entities", True),
    "entity_precision": ("precision of entities", True),
    "entity_recall": ("recall of entities", True),
    "token_accuracy": ("right words", True),
    "token_f1": ("F1 of words", True),
    "exact_match": ("exact answers", True),
    "matthews": ("Matthews correlation", False),
    "pearson": ("Pearson correlation", False),
    "spearman": ("rank correlation", False),
    "rmse": ("error, root mean square", False),
    "quadratic_kappa": ("weighted kappa", False),
    "mae": ("mean error", False),
    "ece": ("calibration error", True),
}
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_SOON = 10
_MANY_HOURS = 3


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
        "large": first_large,
        "level": level,
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
    """Return the address of a static file; it changes with the file, so that browsers may keep it for good."""
    return f"/static/{name}?v={hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]}"


def show_number(value: float | None) -> str:
    """Write a count or a measurement with thousands apart, and at most four digits behind the point."""
    if value is None:
        return "–"
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.4g}"


def percent(share: float | None, digits: int = 1) -> str:
    """Write a share as a percentage."""
    if share is None or not math.isfinite(share):
        return "–"
    return f"{100 * share:.{digits}f}%"


def is_share(metric: str) -> bool:
    """Return whether a metric's values are shares from 0 to 1, which read best as percentages."""
    return _METRICS.get(metric, ("", False))[1]


def show_score(value: float | None, metric: str) -> str:
    """Write a score as its metric is usually written."""
    if value is None or not math.isfinite(value):
        return "–"
    return percent(value) if is_share(metric) else f"{value:.3f}"


def metric_words(metric: str | None) -> str:
    """Write a metric's name for people."""
    return "score" if metric is None else _METRICS.get(metric, (metric.replace("_", " "), False))[0]


def first_large(text: str) -> str:
    """Return words as the beginning of a sentence; the letters after the first stay as they are."""
    return text[:1].upper() + text[1:]


def ticked(text: str | None) -> Markup:
    """Return words whose `quoted parts` stand in letters of one width; everything in them is escaped."""
    parts = (text or "").split("`")
    if len(parts) % 2 == 0:  # a tick without its partner is a letter
        return escape(text or "")
    pieces = [
        escape(part) if number % 2 == 0 else Markup("<code>{}</code>").format(part) for number, part in enumerate(parts)
    ]
    return Markup("").join(pieces)


def plural(count: float, one: str, many: str | None = None) -> str:
    """Write a count with its noun: `1 row`, `2 rows`."""
    return f"{show_number(count)} {one if count == 1 else many or one + 's'}"


def nth(number: int) -> str:
    """Write a place: 1st, 2nd, 3rd, 11th."""
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def show_bytes(size: float | None) -> str:
    """Write a size in kB, MB or GB."""
    if size is None:
        return "–"
    size = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1024 or unit == "GB":
            if unit == "bytes":
                return plural(size, "byte")
            return f"{size:.0f} {unit}" if size >= 10 or size.is_integer() else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError(size)


def duration(seconds: float | None) -> str:
    """Write a length of time in the largest unit that fits, roughly."""
    if seconds is None:
        return "–"
    if seconds < _MINUTE:
        return plural(max(1, round(seconds)), "second")
    if seconds < _HOUR:
        return plural(round(seconds / _MINUTE), "minute")
    if seconds < 2 * _DAY:
        hours = seconds / _HOUR
        return plural(round(hours) if hours >= _MANY_HOURS else round(hours, 1), "hour")
    return plural(round(seconds / _DAY), "day")


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


def level(value: float, most: float, steps: int = 4) -> int:
    """Return the step of a scale of colours that a value stands on: 0 for nothing, `steps` for the most."""
    if value <= 0 or most <= 0:
        return 0
    return min(steps, max(1, math.ceil(steps * value / most)))
