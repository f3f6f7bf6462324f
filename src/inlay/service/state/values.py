"""Values that rows of the database hold: random ids, times, and short texts that people type.

Times are seconds since 1970 (UTC) in the database, and ISO 8601 with Z in JSON.
"""

from __future__ import annotations

import base64
import secrets
from datetime import UTC, datetime

from inlay.errors import BadConfig


def make_id(kind: str) -> str:
    """Return a new id, such as `job_…`: 100 random bits, never used again."""
    return f"{kind}_{base64.b32encode(secrets.token_bytes(13)).decode().lower()[:20]}"


def to_iso(seconds: float | None) -> str | None:
    """Return a time as ISO 8601 with milliseconds and Z; None stays None."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def day_of(seconds: float) -> str:
    """Return the day (UTC) of a time, as `2026-11-19`."""
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def check_label(what: str, text: str, most: int) -> None:
    """Refuse a short text that is too long, has control characters, or cannot be stored."""
    if len(text) > most:
        raise BadConfig(f"the {what} has {len(text)} characters", f"{most} at most")
    check_storable(what, text)
    if any(ord(character) < 32 for character in text):
        raise BadConfig(f"the {what} has a control character", "leave it out")


def check_storable(what: str, text: str) -> None:
    """Refuse a text that no database accepts: one with NUL, or with half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadConfig(f"the {what} is not Unicode text: it has half a character", "send it as UTF-8") from None
    if "\0" in text:
        raise BadConfig(f"the {what} has a NUL character", "leave it out")
