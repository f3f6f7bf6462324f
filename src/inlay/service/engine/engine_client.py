"""Clients of the engine's process: one for asyncio with many questions at once, one that waits for each. No torch.

If the engine is lost, full or draining, a call raises `EngineRefused` with status 503, and the next call connects
again. Every call has a time limit.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, cast

from inlay.errors import InlayError
from inlay.service.engine.protocol import (
    AskProbe,
    AskStats,
    BadFrame,
    Caller,
    Cancel,
    EngineStats,
    ForgetTask,
    FrameSplitter,
    LoadVersion,
    Predict,
    Predicted,
    Probed,
    Question,
    Refused,
    Reply,
    TaskForgotten,
    VersionLoaded,
    WireRow,
    encode_frame,
    read_reply,
)

R = TypeVar("R", bound=Reply)
PREDICT_PATIENCE_S = 60.0
"""longest wait for answers without a deadline"""
LOAD_PATIENCE_S = 60.0
PROBE_PATIENCE_S = 10.0
CONNECT_PATIENCE_S = 2.0
_GRACE_S = 1.0  # beyond a deadline, which the engine itself reports
_RETRY_S = 1.0  # in which the supervisor may have restarted a lost engine
_CHUNK_BYTES = 1 << 18
_SILENCE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 8000}
"""a machine that is silent for 8 s counts as lost"""


class EngineRefused(InlayError):
    """A question that the engine did not answer: a tenant's limit (429), a full, draining or lost engine (503).

    `retry_after_s` says when to try again; None if that will not help.
    """

    code = "engine-refused"
    http_status = 503

    def __init__(
        self, message: str, hint: str | None = None, *, code: str, status: int, retry_after_s: float | None
    ) -> None:
        super().__init__(message, hint)
        self.code, self.http_status, self.retry_after_s = code, status, retry_after_s


@dataclass(frozen=True)
class TcpAddress:
    """The address of an engine on another machine, and the token that a client must send first."""

    host: str
    port: int
    token: str


class Answering(Protocol):
    """What answers rows for web processes: the engine of this machine, or the engines of a cluster."""

    async def predict(
        self, caller: Caller, rows: Sequence[WireRow], *, deadline_ms: float | None = None, request_id: str = ""
    ) -> Predicted:
        """Answer rows."""

    async def load(self, store_name: str, number: int) -> VersionLoaded:
        """Load a version wherever it will be asked for."""

    async def stats(self) -> EngineStats:
        """Return counters."""

    async def probe(self) -> Probed:
        """Have a real row answered."""

    async def close(self) -> None:
        """Close all connections."""


class SyncAnswering(Protocol):
    """What answers rows for a trainer, which waits for each reply."""

    def predict(
        self, caller: Caller, rows: Sequence[WireRow], *, deadline_ms: float | None = None, request_id: str = ""
    ) -> Predicted:
        """Answer rows."""

    def load(self, store_name: str, number: int) -> VersionLoaded:
        """Load a version wherever it will be asked for."""

    def forget(self, store_name: str) -> int:
        """Drop all versions of a task from memory."""


class EngineClient:
    """Asks an engine from an asyncio loop, over one connection that is made when it is needed."""

    def __init__(self, address: Path | str | TcpAddress) -> None:
        self._address = address
        self._ids = itertools.count(1)
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()

    async def predict(
        self, caller: Caller, rows: Sequence[WireRow], *, deadline_ms: float | None = None, request_id: str = ""
    ) -> Predicted:
        """Answer rows. If the awaiting task is cancelled, the engine is told to drop the rows."""
        question = Predict(next(self._ids), caller, list(rows), deadline_ms, request_id)
        patience_s = PREDICT_PATIENCE_S if deadline_ms is None else deadline_ms / 1000 + _GRACE_S
        return await self._ask(question, Predicted, patience_s)

    async def load(self, store_name: str, number: int) -> VersionLoaded:
        """Load a version into a slot and check its answers to its probes; raise what is wrong with it."""
        return await self._ask(LoadVersion(next(self._ids), store_name, number), VersionLoaded, LOAD_PATIENCE_S)

    async def forget(self, store_name: str) -> int:
        """Drop all versions of a task from the engine's memory, and return how many there were."""
        return (await self._ask(ForgetTask(next(self._ids), store_name), TaskForgotten, LOAD_PATIENCE_S)).num_versions

    async def stats(self) -> EngineStats:
        """Return the engine's counters."""
        return await self._ask(AskStats(next(self._ids)), EngineStats, PROBE_PATIENCE_S)

    async def probe(self) -> Probed:
        """Have a real row answered; raise what prevents it."""
        return await self._ask(AskProbe(next(self._ids)), Probed, PROBE_PATIENCE_S)

    async def close(self) -> None:
        """Close the connection; callers that still wait get a refusal."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _ask(self, question: Question, kind: type[R], patience_s: float) -> R:
        """Return the reply to a question, which is of this kind; raise a refusal."""
        frame = encode_frame(question)
        connection = await self._connect()
        return _check(await connection.ask(question, frame, patience_s), kind)

    async def _connect(self) -> _Connection:
        async with self._connecting:
            if self._connection is None or self._connection.is_lost:
                try:
                    async with asyncio.timeout(CONNECT_PATIENCE_S):
                        self._connection = await self._open()
                except (OSError, TimeoutError):
                    raise _lost() from None
            return self._connection

    async def _open(self) -> _Connection:
        loop, address = asyncio.get_running_loop(), self._address
        if not isinstance(address, TcpAddress):
            return (await loop.create_unix_connection(_Connection, str(address)))[1]
        transport, connection = await loop.create_connection(_Connection, address.host, address.port)
        notice_lost_machine(transport.get_extra_info("socket"))
        transport.write(address.token.encode())
        return connection


class _Connection(asyncio.Protocol):
    """A connection to the engine, and the callers that wait for replies on it."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()

    @property
    def is_lost(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._can_write.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_lost())
        self._waiting.clear()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        try:
            replies = [read_reply(body) for body in self._splitter.feed(data)]
        except BadFrame:
            self.close()
            return
        for reply in replies:
            future = self._waiting.pop(reply.id, None)
            if future is not None and not future.done():
                future.set_result(reply)

    async def ask(self, question: Question, frame: bytes, patience_s: float) -> Reply:
        """Send a question and wait for its reply; tell the engine if the wait ends without it."""
        try:
            async with asyncio.timeout(patience_s):
                await self._can_write.wait()
                if self._transport is None:
                    raise _lost()
                future = self._waiting[question.id] = asyncio.get_running_loop().create_future()
                self._transport.write(frame)
                return await future
        except TimeoutError:
            raise too_slow(patience_s) from None
        finally:
            if self._waiting.pop(question.id, None) is not None and not self.is_lost:  # nobody waits any more
                assert self._transport is not None
                self._transport.write(encode_frame(Cancel(question.id)))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class SyncEngineClient:
    """Asks the engine one question after another; for threads and processes without an event loop."""

    def __init__(self, path: Path | str) -> None:
        self._path = str(path)
        self._ids = itertools.count(1)
        self._socket: socket.socket | None = None

    def predict(
        self, caller: Caller, rows: Sequence[WireRow], *, deadline_ms: float | None = None, request_id: str = ""
    ) -> Predicted:
        """Answer rows; raise EngineRefused."""
        question = Predict(next(self._ids), caller, list(rows), deadline_ms, request_id)
        patience_s = PREDICT_PATIENCE_S if deadline_ms is None else deadline_ms / 1000 + _GRACE_S
        return self._ask(question, Predicted, patience_s)

    def load(self, store_name: str, number: int) -> VersionLoaded:
        """Load a version into a slot and check its answers to its probes; raise what is wrong with it."""
        return self._ask(LoadVersion(next(self._ids), store_name, number), VersionLoaded, LOAD_PATIENCE_S)

    def forget(self, store_name: str) -> int:
        """Drop all versions of a task from the engine's memory, and return how many there were."""
        return self._ask(ForgetTask(next(self._ids), store_name), TaskForgotten, LOAD_PATIENCE_S).num_versions

    def stats(self) -> EngineStats:
        """Return the engine's counters."""
        return self._ask(AskStats(next(self._ids)), EngineStats, PROBE_PATIENCE_S)

    def probe(self) -> Probed:
        """Have a real row answered; raise what prevents it."""
        return self._ask(AskProbe(next(self._ids)), Probed, PROBE_PATIENCE_S)

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, question: Question, kind: type[R], patience_s: float) -> R:
        """Return the reply to a question, which is of this kind; raise a refusal."""
        frame = encode_frame(question)
        was_connected = self._socket is not None
        try:
            try:
                reply = self._exchange(question.id, frame, patience_s)
            except ConnectionError:
                self.close()
                if not was_connected:
                    raise
                reply = self._exchange(
                    question.id, frame, patience_s
                )  # the engine was restarted since the last question
        except TimeoutError:
            self.close()  # a late reply must not be taken for the reply to the next question
            raise too_slow(patience_s) from None
        except (OSError, BadFrame):
            self.close()
            raise _lost() from None
        except BaseException:
            self.close()
            raise
        return _check(reply, kind)

    def _exchange(self, question_id: int, frame: bytes, patience_s: float) -> Reply:
        """Send a frame and return the reply to it."""
        ends_at = time.monotonic() + patience_s
        if self._socket is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket = connection
            connection.settimeout(CONNECT_PATIENCE_S)
            connection.connect(self._path)
        self._socket.settimeout(patience_s)
        self._socket.sendall(frame)
        splitter = FrameSplitter()
        while True:
            self._socket.settimeout(max(0.001, ends_at - time.monotonic()))
            data = self._socket.recv(_CHUNK_BYTES)
            if not data:
                raise ConnectionResetError
            for body in splitter.feed(data):
                reply = read_reply(body)
                if reply.id == question_id:
                    return reply


def notice_lost_machine(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other machine is silent for some seconds, even while nobody sends."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SILENCE.items():
        if hasattr(socket, name):  # Linux; other systems use their own timeouts
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _check(reply: Reply, kind: type[R]) -> R:
    """Return a reply of this kind; raise a refusal."""
    if isinstance(reply, Refused):
        raise EngineRefused(
            reply.message, reply.hint, code=reply.code, status=reply.status, retry_after_s=reply.retry_after_s
        )
    assert isinstance(reply, kind)
    return reply


def _lost() -> EngineRefused:
    return EngineRefused(
        "the engine is not running", "try again in a moment", code="engine-lost", status=503, retry_after_s=_RETRY_S
    )


def too_slow(patience_s: float) -> EngineRefused:
    """Return the refusal for an engine that did not answer in time."""
    return EngineRefused(
        f"the engine did not answer within {patience_s:.0f} s",
        "try again in a moment, with fewer rows",
        code="engine-too-slow",
        status=503,
        retry_after_s=_RETRY_S,
    )
