"""HTTP requests to a service, repeated if that is safe: a POST has an idempotency key, so that it is done only once."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx

from inlay.client.problems_read import ServiceProblem, read_problem, unreachable

_TRIES = 4
_PAUSE_S = 0.5
_BUSY = (429, 503)
_LOST = (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError, httpx.PoolTimeout)


class Transport:
    """A connection to one service with one key; a busy service (429, 503) is asked again for `patience_s` seconds."""

    def __init__(self, url: str, key: str | None, *, timeout_s: float, patience_s: float) -> None:
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        headers["user-agent"] = "inlay-client"
        timeout = httpx.Timeout(timeout_s, connect=10.0)
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def get(self, path: str, params: Mapping[str, Any] = {}) -> Any:
        """Return the JSON of a route."""
        given = {name: value for name, value in params.items() if value is not None}
        return self._send(lambda: self._client.get(path, params=given)).json()

    def pages(self, path: str, params: Mapping[str, Any] = {}) -> Iterator[dict[str, Any]]:
        """Yield the items of a list, page after page."""
        cursor: str | None = None
        while True:
            page = self.get(path, {**params, "cursor": cursor})
            yield from page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send JSON with an idempotency key, so that repeating it does no harm, and return the answer's JSON."""
        headers = {"idempotency-key": uuid.uuid4().hex}
        return self._send(lambda: self._client.post(path, json=body, headers=headers)).json()

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send JSON to a route that changes nothing, and return the answer's JSON."""
        return self._send(lambda: self._client.post(path, json=body)).json()

    def change(self, method: str, path: str, body: Mapping[str, Any] | None = None, etag: str | None = None) -> Any:
        """PUT, PATCH or DELETE something; with `etag`, only if it has not changed since."""
        headers = {} if etag is None else {"if-match": etag}
        answer = self._send(lambda: self._client.request(method, path, json=body, headers=headers))
        return answer.json() if answer.content else None

    def upload(self, path: str, params: Mapping[str, Any], read: Callable[[], Iterator[bytes]]) -> Any:
        """Stream a body; `read` starts it from the beginning for each try."""
        headers = {"idempotency-key": uuid.uuid4().hex, "content-type": "application/octet-stream"}
        given = {name: value for name, value in params.items() if value is not None}
        timeout = httpx.Timeout(600.0, connect=10.0)  # the service takes minutes to read a large file
        return self._send(
            lambda: self._client.post(path, params=given, content=read(), headers=headers, timeout=timeout)
        ).json()

    def lines(self, path: str) -> Iterator[str]:
        """Yield the lines of a body as they come."""
        with self._stream(path, {}) as answer:
            yield from answer.iter_lines()

    def events(self, path: str, after: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (kind, data) of server-sent events as they come; reconnect and continue if the connection is lost."""
        losses = 0
        while True:
            headers = {"accept": "text/event-stream", "last-event-id": str(after)}
            try:
                with self._stream(path, headers) as answer:
                    for number, kind, data in _read_events(answer.iter_lines()):
                        after, losses = number or after, 0
                        yield kind, data
                        if kind == "end":
                            return
            except (*_LOST, httpx.ReadTimeout) as error:
                losses += 1
                if losses >= _TRIES:
                    raise unreachable(self.url, _say(error)) from None
            time.sleep(_PAUSE_S)

    @contextmanager
    def _stream(self, path: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        with self._client.stream("GET", path, headers=headers, timeout=httpx.Timeout(60.0, connect=10.0)) as answer:
            if answer.status_code >= 400:
                answer.read()
                raise _problem_of(answer)
            yield answer

    def _send(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        """Send a request, again if it failed in a way that may pass, and return the answer."""
        ends_at = time.monotonic() + self._patience_s
        for attempt in range(1, 1000):
            try:
                answer = send()
            except _LOST as error:
                if attempt >= _TRIES or time.monotonic() > ends_at:
                    raise unreachable(self.url, _say(error)) from None
                time.sleep(_PAUSE_S * attempt)
                continue
            except (httpx.TimeoutException, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
                raise unreachable(self.url, _say(error)) from None
            if answer.status_code < 400:
                return answer
            problem = _problem_of(answer)
            pause_s = problem.retry_after_s or _PAUSE_S
            if answer.status_code not in _BUSY or time.monotonic() + pause_s > ends_at:
                raise problem
            time.sleep(pause_s)
        raise AssertionError("unreachable: the time to wait ends earlier")


def _problem_of(answer: httpx.Response) -> ServiceProblem:
    try:
        body = answer.json()
    except ValueError:
        body = {}
    problem = read_problem(body if isinstance(body, dict) else {}, status=answer.status_code)
    after = answer.headers.get("retry-after", "")
    problem.retry_after_s = float(after) if after.isdigit() else None
    return problem


def _say(error: Exception) -> str:
    words = str(error) or type(error).__name__
    return words[0].lower() + words[1:]


def _read_events(lines: Iterator[str]) -> Iterator[tuple[int | None, str, dict[str, Any]]]:
    """Parse lines into server-sent events: (id, kind, data)."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
        elif "event" in fields:
            number = int(fields["id"]) if fields.get("id", "").isdigit() else None
            yield number, fields["event"], json.loads(fields.get("data", "{}"))
            fields = {}
        else:
            fields = {}


def in_path(name: str | int) -> str:
    """Return a name quoted for use in a path."""
    return quote(str(name), safe="")
