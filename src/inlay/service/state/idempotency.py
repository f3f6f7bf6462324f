"""Idempotency keys: a request that is sent again does nothing again, and is answered as it was.

What a call makes and the note that it made it are one transaction. So after a crash between making and answering, a
repeated request finds what was made (`subject`), and the web shows that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

KEPT_S = 24 * 3600.0
HELD_S = 60.0
"""a call that is not answered after this long was lost with its process: a repeated request takes over"""


@dataclass(frozen=True)
class Call:
    """A request with an idempotency key that this process is answering."""

    key: str
    token: str


@dataclass(frozen=True)
class StoredAnswer:
    """The first answer to a request; without a status, only what it made is known, and is shown as it is now."""

    subject: str | None
    """an id (`ds_…`, `job_…`), or `task:NAME`"""
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
