"""Idempotency keys: a request that is sent again does nothing again, and gets the first answer.

A call makes its thing and notes it in one transaction. So after a crash between making and answering, a repeated
request finds what was made (`subject`), and the web shows that.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import Connection, delete, insert, select, update

from inlay.errors import BadConfig
from inlay.service.state import schema
from inlay.service.state.state_errors import CallInFlight, KeyReused

KEPT_S = 24 * 3600.0
HELD_S = 60.0
"""a call without an answer after this time was lost with its process: a repeated request takes over"""


@dataclass(frozen=True)
class Call:
    """A request with an idempotency key that this process is answering."""

    key: str
    token: str


@dataclass(frozen=True)
class StoredAnswer:
    """The first answer to a request; without a status, only what it made is known, and shown as it is now."""

    subject: str | None
    """an id (`ds_…`, `job_…`), or `task:NAME`"""
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None


_KEY = re.compile(r"[\x21-\x7e]{1,255}")


def begin_call(connection: Connection, tenant: str, key: str, digest: str, now: float) -> Call | StoredAnswer:
    """Begin a call, or return the answer of the first one with its key."""
    if not _KEY.fullmatch(key):
        raise BadConfig("the idempotency key is not valid", "1 to 255 printable ASCII characters without blanks")
    row = schema.calls.c
    connection.execute(delete(schema.calls).where(row.created_at < now - KEPT_S))
    is_it = (row.tenant == tenant, row.key == key)
    found = connection.execute(select(schema.calls).where(*is_it)).one_or_none()
    if found is not None and found.digest != digest:
        raise KeyReused
    # Whoever is answering must be gone after `held_until`, or if the clock was set back since.
    is_over = found is not None and not now <= found.held_until <= now + HELD_S
    if found is None or (is_over and found.status is None and found.subject is None):
        connection.execute(delete(schema.calls).where(*is_it))
        call = Call(key, secrets.token_hex(16))
        held = {"tenant": tenant, "key": key, "digest": digest, "token": call.token, "held_until": now + HELD_S}
        connection.execute(insert(schema.calls).values(**held, created_at=now))
        return call
    if found.status is None and (found.subject is None or not is_over):
        raise CallInFlight
    return StoredAnswer(found.subject, found.status, found.headers or {}, found.body)


def note_subject(connection: Connection, tenant: str, call: Call | None, subject: str) -> None:
    """Note what a call makes, in the same transaction. CallInFlight if another process took the call over."""
    if call is None:
        return
    row = schema.calls.c
    mine = update(schema.calls).where(row.tenant == tenant, row.key == call.key, row.token == call.token)
    if connection.execute(mine.values(subject=subject)).rowcount != 1:
        raise CallInFlight


def finish_call(connection: Connection, tenant: str, call: Call, answer: StoredAnswer) -> None:
    """Keep the answer of a call; if another process took the call over, that one's answer stays."""
    row = schema.calls.c
    mine = update(schema.calls).where(row.tenant == tenant, row.key == call.key, row.token == call.token)
    connection.execute(mine.values(status=answer.status, headers=dict(answer.headers), body=answer.body))


def abandon_call(connection: Connection, tenant: str, call: Call) -> None:
    """Forget a call that made nothing."""
    row = schema.calls.c
    is_it = (row.tenant == tenant, row.key == call.key, row.token == call.token, row.subject.is_(None))
    connection.execute(delete(schema.calls).where(*is_it))
