"""The web process: uvicorn on the socket that the supervisor bound, with bounds on the head of a request.

uvicorn itself waits for a head without limit, and accepts it at any length.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import msgspec
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inlay.service.child import Child
from inlay.service.engine import EngineClient, FleetClient, find_roster
from inlay.service.state import Database
from inlay.service.web.app import WebApp, make_app
from inlay.service.web.problems import MEDIA_TYPE, make_problem_body

HEAD_PATIENCE_S = 15.0
"""seconds in which the head of a request must arrive"""
MOST_HEAD_BYTES = 64 * 1024
_KEEP_ALIVE_S = 30
_REFUSALS = {
    400: ("Bad Request", "bad-request", "this is not an HTTP request"),
    408: ("Request Timeout", "too-slow", "the head of the request did not arrive in time"),
    431: ("Request Header Fields Too Large", "too-large", "the head of the request is too long"),
}


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with bounds on the time and length of a request's head."""

    _is_in_head = True
    """whether the first head is awaited, or a head has begun and is not complete"""
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer for the first head."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes, and refuse a head that is too long."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(431)

    def on_message_begin(self) -> None:
        """Start the timer for the rest of a head, if it is not running."""
        self._is_in_head = True
        if self._head_timer is None:
            self._wait_for_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Stop the timer: the head is complete."""
        self._is_in_head, self._head_bytes = False, 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Count the bytes of the next head from zero."""
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP."""
        self._refuse(400)

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_PATIENCE_S, self._refuse, 408)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int) -> None:
        """Answer with a problem and close the connection."""
        self._head_timer = None
        if self.transport.is_closing():
            return
        title, code, detail = _REFUSALS[status]
        body = msgspec.json.encode(make_problem_body(code, status, detail, None))
        head = f"HTTP/1.1 {status} {title}\r\ncontent-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


class DrainingServer(uvicorn.Server):
    """uvicorn's server, without its handlers of signals: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers."""
        yield


def make_config(app: WebApp, drain_s: float = 20.0) -> uvicorn.Config:
    """Return the configuration of uvicorn for the app."""
    return uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )


def serve(child: Child) -> None:
    """Answer requests until the supervisor says stop; then finish those in progress."""
    settings = child.settings
    child.progress("opening the database")
    db = Database.open(settings.store_address)
    try:
        roster = find_roster()
        engine = EngineClient(settings.engine_socket) if roster is None else FleetClient(roster)
        app = make_app(settings, db, engine)
        server = DrainingServer(make_config(app, settings.drain_s))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.get_loop()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            runner.run(_serve(child, server, app))
    finally:
        db.close()


async def _serve(child: Child, server: DrainingServer, app: WebApp) -> None:
    loop = asyncio.get_running_loop()

    def drain() -> None:
        app.state.is_draining = True
        server.should_exit = True

    def stop() -> None:  # called in another thread
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(drain)

    child.on_stop(stop)
    serving = asyncio.ensure_future(server.serve(sockets=[child.listener()]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if not serving.done():
        child.ready()
    await serving
