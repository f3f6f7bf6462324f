"""S3 on this machine: moto's server, and a proxy before it that fails as real storage does."""

from __future__ import annotations

import http.client
import random
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BUCKET = "models"
KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@contextmanager
def serve_bucket() -> Iterator[str]:
    """Run moto's server with an empty bucket; give its address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    connection = http.client.HTTPConnection(host, port)
    signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=id/x/us-east-1/s3/x"}
    connection.request("PUT", f"/{BUCKET}", headers=signed)
    assert connection.getresponse().status == 200
    yield f"http://{host}:{port}"
    server.stop()


FAULTS = ("500", "lost", "503", "cut", "409", "slow", "412")
"""what a proxy may do to a request that another attempt can mend"""


class FaultyProxy:
    """Hands requests on to a server; `fault` is asked first, and may answer in its place or cut the connection."""

    def __init__(self, address: str, seed: int = 0) -> None:
        self.target = urllib.parse.urlsplit(address)
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.random, self.requests = random.Random(seed), []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy.hand_on(self)

            do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = handle_any

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def hand_on(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        what = self.fault(handler.command, handler.path)
        self.requests.append((handler.command, handler.path, what))
        if what == "412" and "If-None-Match" not in handler.headers:  # else it would be no fault
            what = None
        if what == "slow":
            time.sleep(0.3)
        if what == "412":  # as after an answer that was lost: it is there, and this request is told so
            self._forward(handler, body, ())
        if what in ("500", "503", "409", "412", "403"):  # refused
            self._send(handler, int(what), {}, b"<Error><Code>Fault</Code></Error>")
            return
        answer, content = self._forward(handler, body, {"If-None-Match"} if what == "unconditional" else ())
        if what == "lost":  # done, but nobody hears of it
            handler.close_connection = True
            handler.connection.close()
            return
        self._send(handler, answer.status, dict(answer.headers), content, cut=what == "cut")

    def _forward(
        self, handler: BaseHTTPRequestHandler, body: bytes, left_out: Collection[str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        upstream = http.client.HTTPConnection(self.target.hostname, self.target.port, timeout=30)
        dropped = {"connection", *map(str.lower, left_out)}
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in dropped}
        upstream.request(handler.command, handler.path, body, headers)
        answer = upstream.getresponse()
        return answer, answer.read()

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes, cut: bool = False
    ) -> None:
        handler.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                handler.send_header(name, value)
        length = headers.get("Content-Length") if handler.command == "HEAD" else len(content)
        handler.send_header("Content-Length", str(length))
        handler.end_headers()
        if cut and content:
            handler.wfile.write(content[: len(content) // 2])
            handler.wfile.flush()
            handler.close_connection = True
            handler.connection.close()
        else:
            handler.wfile.write(content)
