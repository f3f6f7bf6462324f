"""The engine's side of its socket: frames are decoded into questions, replies are encoded into frames.

What always holds: bad bytes cost only their sender. A frame that cannot be decoded is refused alone; a frame that is
too long, or a client that does not read its replies, ends the connection.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

from inlay.errors import InlayError
from inlay.service.engine.protocol import (
    MOST_FRAME_BYTES,
    BadFrame,
    FrameSplitter,
    Question,
    Refused,
    Reply,
    encode_frame,
    read_question,
)
from inlay.service.logs import log_event, log_failure

_MOST_UNREAD_BYTES = 2 * MOST_FRAME_BYTES
"""bytes of replies that a client may leave unread"""
_PRIVATE = 0o600
_GREETING_S = 5.0
"""time in which a client on another machine must send the token"""


class EngineConnection(asyncio.Protocol):
    """A client's connection. `ask` is called with each question; `gone` when the connection has ended.

    With a token, nothing is decoded before the client has sent it.
    """

    def __init__(
        self,
        ask: Callable[[Question, EngineConnection], None],
        gone: Callable[[EngineConnection], None],
        most_bytes: int = MOST_FRAME_BYTES,
        token: bytes = b"",
    ) -> None:
        self._ask, self._gone = ask, gone
        self._token = token
        self._greeting = b""
        self._splitter = FrameSplitter(most_bytes)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; with a token, start the timer for it."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it
        if self._token:
            asyncio.get_running_loop().call_later(_GREETING_S, self._end_without_token)

    def connection_lost(self, error: Exception | None) -> None:
        """Report that the client has gone."""
        self._transport = None
        self._gone(self)

    def data_received(self, data: bytes) -> None:
        """Take bytes, and ask the questions that are complete."""
        if self._token:
            data = self._greet(data)
        try:
            bodies = self._splitter.feed(data)
        except BadFrame as error:
            log_event("a connection ended: a frame that is too long", {"bytes": len(data)}, level=30)
            self.reply(Refused(0, error.code, error.message, error.hint, 400))
            self.close()
            return
        for body in bodies:
            try:
                question = read_question(body)
            except BadFrame as error:
                self.reply(Refused(0, error.code, error.message, error.hint, 400))
                continue
            try:
                self._ask(question, self)
            except Exception:  # the border: an unexpected error costs only its question
                log_failure("a question was not answered")
                self.reply(Refused(question.id, "unanswered", "no answer", "ask it again", 500))

    def _greet(self, data: bytes) -> bytes:
        """Take bytes until the token is complete, and return those after it; end the connection if it is wrong."""
        self._greeting += data
        said, rest = self._greeting[: len(self._token)], self._greeting[len(self._token) :]
        if len(said) < len(self._token):
            return b""  # an early refusal would tell how many letters are right
        if not hmac.compare_digest(said, self._token):
            self._end_without_token()
            return b""
        self._token = self._greeting = b""
        return rest

    def _end_without_token(self) -> None:
        if self._token and self._transport is not None:
            log_event("a connection ended: its client does not know the token", level=30)
            self._transport.abort()

    def reply(self, message: Reply) -> None:
        """Send a reply, unless the client has gone."""
        if self._transport is None or self._transport.is_closing():
            return
        try:
            frame = encode_frame(message)
        except (InlayError, TypeError) as error:  # an answer that is too long, or not plain data
            code = error.code if isinstance(error, InlayError) else "unanswered"
            frame = encode_frame(Refused(message.id, code, "the answers cannot be sent", "ask for fewer rows", 500))
        self._transport.write(frame)
        if self._transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
            log_event("a connection ended: its client does not read", level=30)
            self._transport.abort()

    def close(self) -> None:
        """End the connection after the replies are sent."""
        if self._transport is not None:
            self._transport.close()


def bind_socket(path: Path) -> socket.socket:
    """Bind a Unix socket that only this account may use; one that was left at the path is replaced."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777 & ~_PRIVATE)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.setblocking(False)
    return listener


def bind_port(host: str) -> socket.socket:
    """Bind a socket at a free port of this machine's address."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setblocking(False)
    return listener
