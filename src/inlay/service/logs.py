"""The log of a service's processes: one line for each event on stderr, for people or as JSON.

What always holds: a line never has a customer's text, label or key, and no logged value can begin a new line. An
unexpected error is logged with its type and traceback but without its message, because other libraries put values into
their messages.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_LOG = logging.getLogger("inlay.service")
_QUIET = ("httpx", "httpcore", "alembic", "sqlalchemy", "multipart", "asyncio", "uvicorn.access")


class _Lines(logging.Formatter):
    """Log lines of one process."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def formatException(self, ei: Any) -> str:
        """Return the traceback and the type of an exception, without its message."""
        error: BaseException | None = ei[1]
        parts: list[str] = []
        while error is not None and len(parts) < 5:
            frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
            parts.append(f"{frames}\n{type(error).__module__}.{type(error).__qualname__}")
            error = error.__cause__ or error.__context__
        return "\nafter\n".join(parts)


class PlainLines(_Lines):
    """Log lines for people: `12:03:04 engine: loaded mail@3  seconds=0.2`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return an event as one line, with a traceback below it if there is one."""
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        fields = "".join(f"  {name}={_word(value)}" for name, value in _fields_of(record).items())
        trace = "" if record.exc_info is None else "\n" + self.formatException(record.exc_info)
        return f"{at} {self._process}: {level}{_one_line(record.getMessage())}{fields}{trace}"


class JsonLines(_Lines):
    """Log lines for programs: one JSON object for each event."""

    def format(self, record: logging.LogRecord) -> str:
        """Return an event as one JSON object."""
        tree: dict[str, Any] = {
            "at": write_time(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
        }
        tree |= {"event": record.getMessage(), **_fields_of(record)}
        if record.exc_info is not None:
            tree["trace"] = self.formatException(record.exc_info)
        return json.dumps(tree, default=str)


def write_time(seconds: float) -> str:
    """Return a time as ISO 8601 with milliseconds and Z. (The database's `to_iso` would bring in all of SQLAlchemy.)"""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def log_event(event: str, fields: Mapping[str, object] = {}, *, level: int = logging.INFO) -> None:
    """Log an event with its fields: ids, counts and times, and never a text, a label or a key."""
    _LOG.log(level, "%s", event, extra={"fields": dict(fields)})


def log_failure(event: str, fields: Mapping[str, object] = {}) -> None:
    """Log an unexpected error, with the traceback of the current exception."""
    _LOG.error("%s", event, extra={"fields": dict(fields)}, exc_info=True)


def set_up_logs(process: str, *, as_json: bool) -> None:
    """Send all logs of this process to stderr, under the process's name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process) if as_json else PlainLines(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    _LOG.setLevel(logging.INFO)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _word(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return _one_line(text)


def _one_line(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
