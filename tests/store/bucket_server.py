"""S3 on this machine: moto's server, and a proxy before it that fails as real storage does."""

from __future__ import annotations

import http.client
import random
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BUCKET = "models"
KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


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
        if what in ("500", "503", "409", "403"):  # refused before anything is done
            self._send(handler, int(what), {}, b"<Error><Code>Fault</Code></Error>")
            return
        upstream = http.client.HTTPConnection(self.target.hostname, self.target.port, timeout=30)
        headers = {name: value for name, value in handler.headers.items() if name.lower() != "connection"}
        if what == "unconditional":
            headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
        upstream.request(handler.command, handler.path, body, headers)
        answer = upstream.getresponse()
        content = answer.read()
        if what == "lost":  # done, but nobody hears of it
            handler.close_connection = True
            handler.connection.close()
            return
        self._send(handler, answer.status, dict(answer.headers), content, cut=what == "cut")

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
