"""Times of the service: seconds since 1970 (UTC) in the database, ISO 8601 with Z in JSON."""

from __future__ import annotations

from datetime import UTC, datetime


def to_iso(seconds: float | None) -> str | None:
    """Return a time as ISO 8601 with milliseconds and Z; None stays None."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def day_of(seconds: float) -> str:
    """Return the day (UTC) of a time, as `2026-11-19`."""
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
