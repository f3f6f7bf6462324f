"""The load generator: requests over many connections, in a closed or an open loop. Standard library only.

    python http_load.py PLAN.json FOUND.json

- Closed: every connection sends its next request as soon as it has its answer. It tells how much a server can do.
- Open: request number i is sent at `i / rate` seconds, whether or not earlier ones were answered, and its latency
  counts from that moment, also where it had to wait for a connection or for this process. So a server that stalls is
  charged for all who would have come meanwhile (no coordinated omission).

Requests are bytes made beforehand; a response is read as far as its length says, and not decoded. That costs about a
twentieth of a millisecond of CPU a request, which is reported (`generator_cpu_ms`), as is how late the sending was.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MOST_CONNECTIONS = 1024
REFUSED_S = 0.1
"""pause of a closed loop's connection that was refused"""
PRIORITY = -5
"""of this process, where it may: its clock must not stand still because a server computes"""


@dataclass(frozen=True)
class Plan:
    """What is asked of one server, and for how long."""

    host: str
    port: int
    requests: list[str]
    """whole HTTP requests; they are taken in turn, over and over"""
    seconds: float
    connections: int = 64
    """closed: that many ask; open: that many are opened before the clock runs"""
    rate: float | None = None
    """requests a second of an open loop; None: a closed one"""
    most_requests: int = 200_000
    keep: int = 0
    """bodies that are kept, of the first requests"""
    start: int = 0
    """the first request that is taken"""
    timeout_s: float = 60.0


@dataclass
class Found:
    """What came back. Times in ms, in the order of the answers."""

    latencies_ms: list[float] = field(default_factory=list)
    """of answers of status 200: to refuse quickly is no rate"""
    done_s: list[float] = field(default_factory=list)
    """when each of them was there, in seconds since the start"""
    late_ms: list[float] = field(default_factory=list)
    """open: how long after its moment a request was sent"""
    statuses: dict[str, int] = field(default_factory=dict)
    bodies: dict[str, str] = field(default_factory=dict)
    """number of the request -> its answer of status 200"""
    refusal: str = ""
    """the first answer of another status"""
    num_errors: int = 0
    """answers of status 200 that have an error for a row"""
    num_failed: int = 0
    """connections lost, and requests that were never answered"""
    seconds: float = 0.0
    generator_cpu_ms: float = 0.0
    """CPU time of this process, for one request"""


class Connection(asyncio.Protocol):
    """One connection: one request at a time, and one answer."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.transport: asyncio.Transport | None = None
        self._held = bytearray()
        self._asked: tuple[int, float] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self, number: int, since: float) -> None:
        self._asked = (number, since)
        assert self.transport is not None
        self.transport.write(self.load.bytes_of(number))

    def data_received(self, data: bytes) -> None:
        self._held += data
        response = read_response(self._held)
        if response is None or self._asked is None:
            return
        (status, body), asked = response, self._asked
        self._held.clear()
        self._asked = None
        self.load.on_answer(self, asked, status, body)

    def connection_lost(self, error: Exception | None) -> None:
        if self._asked is not None:
            self._asked = None
            self.load.found.num_failed += 1
        self.load.on_lost(self)


def read_response(held: bytes | bytearray) -> tuple[int, bytes] | None:
    """The status and the body, if all of it is there."""
    end = held.find(b"\r\n\r\n")
    if end < 0:
        return None
    head, status = bytes(held[:end]).lower(), int(held[9:12])
    at = head.find(b"content-length:")
    if at >= 0:
        length = int(head[at + 15 :].split(b"\r\n", 1)[0])
        whole = end + 4 + length
        return (status, bytes(held[end + 4 : whole])) if len(held) >= whole else None
    if b"transfer-encoding: chunked" not in head:
        return status, b""
    return _read_chunks(held, end + 4, status)


def _read_chunks(held: bytes | bytearray, at: int, status: int) -> tuple[int, bytes] | None:
    body = bytearray()
    while True:
        end = held.find(b"\r\n", at)
        if end < 0:
            return None
        length = int(held[at:end].split(b";")[0], 16)
        after = end + 2 + length + 2
        if len(held) < after:
            return None
        if length == 0:
            return status, bytes(body)
        body += held[end + 2 : end + 2 + length]
        at = after


class Load:
    """Carries a plan out."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.found = plan, Found()
        self._bytes = [request.encode() for request in plan.requests]
        self._idle: list[Connection] = []
        self._waiting: deque[tuple[int, float]] = deque()
        self._open: set[Connection] = set()
        self._num_sent = self._num_under_way = 0
        self._opening = 0
        self._is_over = asyncio.Event()

    def bytes_of(self, number: int) -> bytes:
        return self._bytes[(self.plan.start + number) % len(self._bytes)]

    async def run(self) -> Found:
        await asyncio.gather(*(self._connect() for _ in range(self.plan.connections)))
        used = _cpu_s()
        self.began = time.monotonic()
        self.ends = self.began + self.plan.seconds
        await (self._run_closed() if self.plan.rate is None else self._run_open(self.plan.rate))
        try:
            await asyncio.wait_for(self._is_over.wait(), self.plan.timeout_s)
        except TimeoutError:
            self.found.num_failed += self._num_under_way + len(self._waiting)
        self.found.seconds = max(self.found.done_s, default=self.plan.seconds)
        self.found.generator_cpu_ms = 1000 * (_cpu_s() - used) / max(1, self._num_sent)
        for connection in self._open:
            connection.transport.abort()  # type: ignore[union-attr]
        return self.found

    async def _connect(self) -> None:
        self._opening += 1
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(lambda: Connection(self), self.plan.host, self.plan.port)
            self._open.add(connection)
            self._idle.append(connection)
        finally:
            self._opening -= 1

    async def _run_closed(self) -> None:
        for connection in list(self._idle):
            self._idle.remove(connection)
            self._send(connection, time.monotonic())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_over.wait(), max(0.0, self.ends - time.monotonic()))
        self._end_if_done()

    async def _run_open(self, rate: float) -> None:
        num = min(int(rate * self.plan.seconds), self.plan.most_requests)
        self.ends = float("inf")  # what is due late is sent late, and waited for
        for number in range(num):
            due = self.began + number / rate
            if (delay := due - time.monotonic()) > 0:
                await asyncio.sleep(delay)
            self._waiting.append((number, due))
            self._send_waiting()
        self.ends = 0.0
        self._end_if_done()

    def _send_waiting(self) -> None:
        while self._waiting and self._idle:
            number, due = self._waiting.popleft()
            self.found.late_ms.append(1000 * (time.monotonic() - due))
            self._send(self._idle.pop(), due, number)
        missing = len(self._waiting) - self._opening
        room = MOST_CONNECTIONS - len(self._open) - self._opening
        for _ in range(min(missing, room)):
            asyncio.get_running_loop().create_task(self._connect_and_send())

    async def _connect_and_send(self) -> None:
        try:
            await self._connect()
        except OSError:
            return
        self._send_waiting()

    def _send(self, connection: Connection, since: float, number: int | None = None) -> None:
        self._num_under_way += 1
        connection.send(self._num_sent if number is None else number, since)
        self._num_sent += 1

    def on_answer(self, connection: Connection, asked: tuple[int, float], status: int, body: bytes) -> None:
        now, (number, since) = time.monotonic(), asked
        self._num_under_way -= 1
        found = self.found
        if status == 200:
            found.latencies_ms.append(1000 * (now - since))
            found.done_s.append(now - self.began)
        found.statuses[str(status)] = found.statuses.get(str(status), 0) + 1
        found.num_errors += status == 200 and b'"error"' in body
        if status != 200:
            found.refusal = found.refusal or body.decode("utf8", "replace")
        elif number < self.plan.keep:
            found.bodies[str(number)] = body.decode("utf8", "replace")
        if self.plan.rate is not None:
            self._idle.append(connection)
            self._send_waiting()
        elif status != 200:
            asyncio.get_running_loop().call_later(REFUSED_S, self._send_after_refusal, connection)
            return
        elif self._has_more():
            self._send(connection, now)
        self._end_if_done()

    def _send_after_refusal(self, connection: Connection) -> None:
        if self._has_more() and connection in self._open:
            self._send(connection, time.monotonic())
        self._end_if_done()

    def on_lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        else:
            self._num_under_way = max(0, self._num_under_way - 1)
        if self.plan.rate is None and self._has_more():
            asyncio.get_running_loop().create_task(self._come_back())
        self._end_if_done()

    async def _come_back(self) -> None:
        """A closed loop whose connection was lost opens another one; a server that closes all is not asked for ever."""
        await asyncio.sleep(0.05)
        try:
            await self._connect()
        except OSError:
            return
        if self._idle and self._has_more():
            self._send(self._idle.pop(), time.monotonic())

    def _has_more(self) -> bool:
        """Tell whether a closed loop goes on asking."""
        return time.monotonic() < self.ends and self._num_sent < self.plan.most_requests

    def _end_if_done(self) -> None:
        if not self._has_more() and self._num_under_way == 0 and not self._waiting:
            self._is_over.set()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def make_request(path: str, body: Any, headers: Sequence[tuple[str, str]] = (), *, host: str = "127.0.0.1") -> str:
    """A whole HTTP request, ASCII only, so that characters are bytes."""
    text = json.dumps(body)
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", f"Content-Length: {len(text)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", text])


def find_percentile(values: Sequence[float], percent: float) -> float:
    """The least value that so many percent of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def summarise(found: Found, *, skip_s: float = 0.0) -> dict[str, Any]:
    """Rate and latencies of the answers after the first `skip_s` seconds."""
    kept = [ms for ms, at in zip(found.latencies_ms, found.done_s, strict=True) if at >= skip_s]
    refused = sum(count for status, count in found.statuses.items() if status != "200")
    summary: dict[str, Any] = {
        "answers": len(kept),
        "per_s": len(kept) / max(1e-9, found.seconds - skip_s),
        "statuses": found.statuses,
        "refused": refused,
        "failed": found.num_failed,
        "errors": found.num_errors,
        "all_answered": found.num_failed == found.num_errors == refused == 0 < len(found.latencies_ms),
        "generator_cpu_ms": found.generator_cpu_ms,
    }
    if kept:
        summary |= {f"p{percent}_ms": find_percentile(kept, percent) for percent in (50, 95, 99)}
        summary |= {"max_ms": max(kept), "mean_ms": sum(kept) / len(kept)}
    if found.late_ms:
        summary["late_p99_ms"] = find_percentile(found.late_ms, 99)
    return summary


def main(plan: Path, target: Path) -> None:
    """Carry out the plan of one file and write what was found into another."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    found = asyncio.run(Load(Plan(**json.loads(plan.read_text(encoding="utf8")))).run())
    target.write_text(json.dumps(asdict(found)), encoding="utf8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
