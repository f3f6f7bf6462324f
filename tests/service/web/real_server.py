"""The app behind a real uvicorn on a port of its own, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from web_bench import WebBench

from inlay.service.web.server import DrainingServer, make_config


class RealServer:
    """A server that answers on `url` until its block ends."""

    def __init__(self, bench: WebBench) -> None:
        self.bench = bench
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = DrainingServer(make_config(bench.app, drain_s=5.0))
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        asyncio.run(self.server.serve(sockets=[self._socket]))

    def start(self) -> None:
        """Start, and wait until it answers."""
        self._thread.start()
        ends_at = time.monotonic() + 10
        while not self.server.started and time.monotonic() < ends_at:
            time.sleep(0.01)
        assert self.server.started

    def stop(self) -> None:
        """Finish what is under way, and end."""
        self.server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    def connect(self) -> socket.socket:
        """Return a connection of one's own."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def talk(self, *pieces: bytes, pause_s: float = 0.0) -> bytes:
        """Send bytes piece by piece, and return all that comes back until the server closes."""
        with self.connect() as connection:
            for piece in pieces:
                with contextlib.suppress(OSError):
                    connection.sendall(piece)
                time.sleep(pause_s)
            return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    """Return what comes until the other side closes, or nothing comes any more."""
    found = b""
    with contextlib.suppress(OSError):
        while piece := connection.recv(65536):
            found += piece
    return found


@contextlib.contextmanager
def serving(bench: WebBench) -> Iterator[RealServer]:
    """Serve the app of a bench."""
    server = RealServer(bench)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def wait_until(claim: Any, seconds: float = 5.0) -> None:
    """Wait until a function returns something true."""
    ends_at = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < ends_at, "it did not come true"
        time.sleep(0.01)
