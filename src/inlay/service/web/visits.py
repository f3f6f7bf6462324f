"""A request while it is answered: its id, who sent it, how much of its body may come, and how long that may take."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from inlay.service.web.problems import RequestRefused

JSON_PATIENCE_S = 30.0
"""seconds that a body of JSON may take to arrive"""
CHUNK_PATIENCE_S = 30.0
"""seconds between two pieces of an upload"""
LEAST_RATE = 1024
"""bytes a second that an upload must have, on the whole"""
MOST_HELD_BYTES = 256 << 20
"""bytes of bodies in memory at once"""
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Message = dict[str, Any]


class ClientGone(Exception):
    """The client has closed the connection: nobody waits for the answer."""


class BodyBudget:
    """The bytes of all bodies that are in memory at once: beyond it, long bodies have to wait their turn elsewhere."""

    def __init__(self, most_bytes: int = MOST_HELD_BYTES) -> None:
        self._most_bytes = most_bytes
        self.held_bytes = 0

    def take(self, visit: Visit, num_bytes: int) -> None:
        """Count bytes that came in; refuse them when there are too many."""
        if self.held_bytes + num_bytes > self._most_bytes:
            raise RequestRefused(
                "the service holds too many long requests", "try again in a moment", code="busy", status=503
            ).with_headers({"connection": "close"})
        self.held_bytes += num_bytes
        visit.held_bytes += num_bytes

    def give_back(self, visit: Visit) -> None:
        """Stop counting the bytes of a request that was answered."""
        self.held_bytes -= visit.held_bytes
        visit.held_bytes = 0


@dataclass
class Visit:
    """What is known of one request. It is at `scope["state"]["visit"]`."""

    request_id: str
    most_bytes: int
    """bytes its body may have; an upload has a limit of its own"""
    route: str = "unmatched"
    """the path as a pattern, such as `/v1/tasks/{task}`: what logs and counters name"""
    tenant: str = ""
    status: int = 0
    began_at: float = field(default_factory=time.monotonic)
    num_rows: int = 0
    code: str = ""
    """the code of the problem that it was answered with"""
    budget: BodyBudget = field(default_factory=lambda: BodyBudget())
    held_bytes: int = 0


def find_visit(scope: Any) -> Visit:
    """Return the visit of a request."""
    visit = scope["state"]["visit"]
    assert isinstance(visit, Visit)
    return visit


def make_request_id(given: bytes | None) -> str:
    """Return the caller's own id of a request if it is one that logs can take, or a new one."""
    if given is not None:
        text = given.decode("latin-1")
        if _REQUEST_ID.fullmatch(text):
            return text
    return f"req_{secrets.token_hex(8)}"


def find_header(scope: Any, name: bytes) -> bytes | None:
    """Return a request's header, by its name in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def check_length(scope: Any, most_bytes: int) -> None:
    """Refuse a body that says itself that it is too long, before any of it is read."""
    given = find_header(scope, b"content-length")
    if given is not None and given.isdigit() and int(given) > most_bytes:
        raise too_large(most_bytes)


def too_large(most_bytes: int) -> RequestRefused:
    """Return the refusal of a body that is too long. The connection ends with it: the rest is not read."""
    return RequestRefused(
        f"the body is longer than {most_bytes:,} bytes", "send less at once", code="too-large", status=413
    ).with_headers({"connection": "close"})


async def read_body(scope: Any, receive: Any) -> bytes:
    """Return the whole body of a request, within its limits of bytes and time."""
    most_bytes = find_visit(scope).most_bytes
    check_length(scope, most_bytes)
    try:
        async with asyncio.timeout(JSON_PATIENCE_S):
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                body = message.get("body", b"")
                if len(body) > most_bytes:
                    raise too_large(most_bytes)
                return bytes(body)
            return await _read_rest(find_visit(scope), message, receive)
    except TimeoutError:
        raise too_slow() from None


async def _read_rest(visit: Visit, message: Message, receive: Any) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        num_bytes += len(piece)
        if num_bytes > visit.most_bytes:
            raise too_large(visit.most_bytes)
        visit.budget.take(visit, len(piece))
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)
        message = await receive()


async def stream_body(scope: Any, receive: Any) -> AsyncIterator[bytes]:
    """Yield the pieces of an upload, counted while they come; refuse one that stalls or trickles."""
    most_bytes = find_visit(scope).most_bytes
    check_length(scope, most_bytes)
    began_at, num_bytes, has_more = time.monotonic(), 0, True
    while has_more:
        try:
            async with asyncio.timeout(CHUNK_PATIENCE_S):
                message = await receive()
        except TimeoutError:
            raise too_slow() from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        has_more = message.get("more_body", False)
        num_bytes += len(piece)
        if num_bytes > most_bytes:
            raise too_large(most_bytes)
        if num_bytes < LEAST_RATE * (time.monotonic() - began_at - CHUNK_PATIENCE_S):
            raise too_slow()
        if piece:
            yield piece


def too_slow() -> RequestRefused:
    """Return the refusal of a body that does not arrive."""
    return RequestRefused(
        "the body did not arrive in time", "send the request again", code="too-slow", status=408
    ).with_headers({"connection": "close"})
