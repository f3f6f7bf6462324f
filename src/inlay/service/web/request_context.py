"""What is known of a request while it is answered, and the reading of its body: whole, as JSON, or piece by piece.

A body has bounds on its bytes, on the time it takes, and on the memory of all bodies together.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from inlay.service.web.problems import FieldFault, RequestRefused, bad_fields

T = TypeVar("T")
JSON_PATIENCE_S = 30.0
"""seconds that a body of JSON may take to arrive"""
CHUNK_PATIENCE_S = 30.0
"""seconds between two pieces of an upload"""
LEAST_RATE = 1024
"""average bytes a second that an upload must reach"""
MOST_HELD_BYTES = 256 << 20
"""bytes of bodies in memory at once"""
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# msgspec's messages: what is wrong, then the path of the field.
_FAULT = re.compile(r"^(?P<words>.*?)(?: - at `(?:key in )?\$\.?(?P<field>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_JSON_HINT = "send the body as JSON with the header `Content-Type: application/json`"


class ClientGone(Exception):
    """The client has closed the connection: nobody waits for the answer."""


class BodyBudget:
    """The bytes of all bodies in memory. Bodies that come in one piece are short and not counted."""

    def __init__(self, most_bytes: int = MOST_HELD_BYTES) -> None:
        self._most_bytes = most_bytes
        self.held_bytes = 0

    def take(self, context: RequestContext, num_bytes: int) -> None:
        """Count bytes that came in; refuse the request if there are too many."""
        if self.held_bytes + num_bytes > self._most_bytes:
            raise RequestRefused(
                "the service holds too many long requests", "try again in a moment", code="busy", status=503
            ).with_headers({"connection": "close"})
        self.held_bytes += num_bytes
        context.held_bytes += num_bytes

    def give_back(self, context: RequestContext) -> None:
        """Stop counting the bytes of a request that was answered."""
        self.held_bytes -= context.held_bytes
        context.held_bytes = 0


@dataclass
class RequestContext:
    """What is known of one request. It is at `scope["state"]["context"]`."""

    request_id: str
    most_bytes: int
    """longest body that is accepted; an upload has a limit of its own"""
    route: str = "unmatched"
    """the path as a pattern, such as `/v1/tasks/{task}`, for logs and counters"""
    tenant: str = ""
    status: int = 0
    began_at: float = field(default_factory=time.monotonic)
    num_rows: int = 0
    code: str = ""
    """the code of the problem that was answered, if any"""
    budget: BodyBudget = field(default_factory=lambda: BodyBudget())
    held_bytes: int = 0


def find_context(scope: Any) -> RequestContext:
    """Return the context of a request."""
    context = scope["state"]["context"]
    assert isinstance(context, RequestContext)
    return context


def make_request_id(given: bytes | None) -> str:
    """Return the id that the caller gave the request if it is safe to log, or a new one."""
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


# Bodies


async def read_body(scope: Any, receive: Any) -> bytes:
    """Return the whole body of a request, within its limits of bytes and time."""
    context = find_context(scope)
    _check_length(scope, context.most_bytes)
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(JSON_PATIENCE_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                piece = message.get("body", b"")
                has_more = message.get("more_body", False)
                num_bytes += len(piece)
                if num_bytes > context.most_bytes:
                    raise _too_large(context.most_bytes)
                if not has_more and not pieces:
                    return bytes(piece)
                context.budget.take(context, len(piece))
                pieces.append(piece)
                if not has_more:
                    return b"".join(pieces)
    except TimeoutError:
        raise _too_slow() from None


async def stream_body(scope: Any, receive: Any) -> AsyncIterator[bytes]:
    """Yield the pieces of an upload as they come; refuse an upload that is too long, stalls, or is too slow."""
    most_bytes = find_context(scope).most_bytes
    _check_length(scope, most_bytes)
    began_at, num_bytes, has_more = time.monotonic(), 0, True
    while has_more:
        try:
            async with asyncio.timeout(CHUNK_PATIENCE_S):
                message = await receive()
        except TimeoutError:
            raise _too_slow() from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        has_more = message.get("more_body", False)
        num_bytes += len(piece)
        if num_bytes > most_bytes:
            raise _too_large(most_bytes)
        if num_bytes < LEAST_RATE * (time.monotonic() - began_at - CHUNK_PATIENCE_S):
            raise _too_slow()
        if piece:
            yield piece


def _check_length(scope: Any, most_bytes: int) -> None:
    """Refuse a body whose `Content-Length` is too long, before any of it is read."""
    given = find_header(scope, b"content-length")
    if given is not None and given.isdigit() and int(given) > most_bytes:
        raise _too_large(most_bytes)


def _too_large(most_bytes: int) -> RequestRefused:
    # The connection is closed, as the rest of the body is not read.
    return RequestRefused(
        f"the body is longer than {most_bytes:,} bytes", "send less at once", code="too-large", status=413
    ).with_headers({"connection": "close"})


def _too_slow() -> RequestRefused:
    return RequestRefused(
        "the body did not arrive in time", "send the request again", code="too-slow", status=408
    ).with_headers({"connection": "close"})


# JSON


def check_is_json(scope: Any) -> None:
    """Refuse a body whose `Content-Type` is not JSON. A page of another site cannot send that type without consent."""
    given = (find_header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
    if given != b"application/json" and not (given.startswith(b"application/") and given.endswith(b"+json")):
        raise RequestRefused("the body is not JSON", _JSON_HINT, code="wrong-content-type", status=415)


def read_json(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Return a body as the decoder's type; refuse what is not JSON, and name the field that does not fit the type."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise bad_fields([_find_fault(str(error))]) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad_json(body, error) from None
    except RecursionError:
        raise RequestRefused("JSON nested too deeply", "send a flat object", code="bad-json", status=400) from None


def _find_fault(message: str) -> FieldFault:
    found = _FAULT.match(message)
    assert found is not None
    words, field_name = found["words"][:300], found["field"] or ""
    missing = _MISSING.fullmatch(found["words"])
    if missing is not None:
        field_name, words = f"{field_name}.{missing[1]}".lstrip("."), "it is missing"
    return FieldFault(field_name or "body", words[0].lower() + words[1:])


def _bad_json(body: bytes, error: Exception) -> RequestRefused:
    if not body:
        reason = "the body is empty"
    elif isinstance(error, UnicodeDecodeError):
        reason = "the body is not UTF-8"
    elif b"\\ud" in body or b"\\uD" in body:
        reason = f"{str(error).lower()}, or half a character (a lone surrogate)"
    else:
        reason = str(error).replace("JSON is malformed", "malformed JSON").lower().replace("json", "JSON")
    return RequestRefused(reason[:300], _JSON_HINT, code="bad-json", status=400)
