"""Clients of several engines: each request goes to one, is asked again of another if that one is lost, and merged.

Asking twice is harmless: a question names versions, which never change. What always holds: an answer comes from an
engine that the roster names; a request is refused only after other engines were tried, and nobody waits forever.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from inlay.errors import InlayError
from inlay.service.engine.engine_client import (
    LOAD_PATIENCE_S,
    PREDICT_PATIENCE_S,
    EngineClient,
    EngineRefused,
    TcpAddress,
    too_slow,
)
from inlay.service.engine.fleet_stats import add_stats
from inlay.service.engine.placement import TaskShares, choose, find_holders
from inlay.service.engine.protocol import (
    Caller,
    EngineStats,
    Predicted,
    Probed,
    VersionLoaded,
    WireAnswer,
    WireError,
    WireRow,
)
from inlay.service.engine.roster import Replica, Roster, RosterFile

T = TypeVar("T")
LOST = ("engine-lost", "draining")
"""refusals of an engine that is not there any more: another one answers"""
_FULL = ("queue-full", "tenant-queue-full", "tokens-per-minute")
"""refusals of an engine that has too much of something: another one may have room"""
_MOST_TRIED = 4  # engines for one request, before it waits or is refused
_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
LOST_PATIENCE_S = 10.0
"""longest wait for an engine when all are lost"""
_FAREWELL_S = 5.0  # until a connection to an engine that has left the roster is closed


@dataclass(frozen=True)
class _Asked:
    """Rows of one request that go to one engine."""

    caller: Caller
    rows: Sequence[WireRow]
    until: float
    """time.monotonic() after which nobody waits"""
    has_deadline: bool
    request_id: str


class FleetClient:
    """Asks the engines of a roster, from an asyncio loop. It is used as `EngineClient` is."""

    def __init__(self, roster: RosterFile) -> None:
        self._file = roster
        self._clients: dict[Replica, EngineClient] = {}
        self._revision = -1
        self._busy: Counter[str] = Counter()
        self._shares = TaskShares()

    async def predict(
        self, caller: Caller, rows: Sequence[WireRow], *, deadline_ms: float | None = None, request_id: str = ""
    ) -> Predicted:
        """Answer rows; where each task has engines of its own, several may share the request."""
        patience_s = PREDICT_PATIENCE_S if deadline_ms is None else deadline_ms / 1000
        asked = _Asked(caller, rows, time.monotonic() + patience_s, deadline_ms is not None, request_id)
        tasks = Counter(row.store_name for row in rows)
        self._shares.add(tasks)
        roster = self._read()
        if len(tasks) < 2 or not roster.is_crowded or len(roster.replicas) < 2:
            return await self._ask(asked)
        # 1. each row goes to its task's first engine
        first = {task: choose(task, roster, self._shares.find(task), self._busy)[0] for task in tasks}
        places: dict[Replica, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(first[row.store_name], []).append(place)
        # 2. all engines answer at the same time
        parts = [replace(asked, rows=[rows[place] for place in each]) for each in places.values()]
        replies = await _gather([self._ask(part, first) for part, first in zip(parts, places, strict=True)])
        # 3. the answers come back to the places of their rows
        return _merge(list(places.values()), replies)

    async def load(self, store_name: str, number: int) -> VersionLoaded:
        """Bring a version into a slot of every engine that will be asked for it; raise what is wrong with it."""
        loaded = await self._ask_all(find_holders(store_name, self._read()), lambda one: one.load(store_name, number))
        return VersionLoaded(0, max(each.seconds for each in loaded), max(each.num_probes for each in loaded))

    async def forget(self, store_name: str) -> int:
        """Drop all that any engine holds of a task, and return how many versions that were."""
        return sum(await self._ask_all(self._read().replicas, lambda one: one.forget(store_name)))

    async def stats(self) -> EngineStats:
        """Return the counters of all engines together."""
        return add_stats(await self._ask_all(self._read().replicas, lambda one: one.stats()))

    async def probe(self) -> Probed:
        """Have a real row answered by any engine; raise what prevents it."""
        refusal = _nobody()
        for replica in self._read().replicas[:_MOST_TRIED]:
            try:
                return await self._client(replica).probe()
            except EngineRefused as error:
                refusal = error
        raise refusal

    async def close(self) -> None:
        """Close all connections; who still waits gets a refusal."""
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.close()

    async def _ask(self, asked: _Asked, first: Replica | None = None) -> Predicted:
        """Have rows answered by one engine, or another; wait a moment where all are lost."""
        lost_until = min(asked.until, time.monotonic() + LOST_PATIENCE_S)
        for pause_s in (*_PAUSES_S, *_PAUSES_S[-1:] * 100):
            try:
                return await self._try_some(asked, first)
            except EngineRefused as refusal:
                if refusal.code not in LOST or time.monotonic() + pause_s >= lost_until:
                    raise
            first = None
            await asyncio.sleep(pause_s)
        raise _nobody()

    async def _try_some(self, asked: _Asked, first: Replica | None) -> Predicted:
        """Ask one engine after another, until one answers or the request itself is wrong."""
        task = asked.rows[0].store_name if asked.rows else ""
        chosen = choose(task, self._read(), self._shares.find(task), self._busy)
        if first is not None:
            chosen = [first, *(replica for replica in chosen if replica != first)]
        refusal: EngineRefused | None = None
        for replica in chosen[:_MOST_TRIED]:
            try:
                return await self._ask_one(replica, asked)
            except EngineRefused as error:
                if error.code not in (*LOST, *_FULL):
                    raise
                refusal = _kinder(refusal, error)
        raise refusal or _nobody()

    async def _ask_one(self, replica: Replica, asked: _Asked) -> Predicted:
        left_ms = max(1.0, 1000 * (asked.until - time.monotonic())) if asked.has_deadline else None
        self._busy[replica.name] += len(asked.rows)
        try:
            return await self._client(replica).predict(
                asked.caller, asked.rows, deadline_ms=left_ms, request_id=asked.request_id
            )
        finally:
            self._busy[replica.name] -= len(asked.rows)

    async def _ask_all(self, replicas: Sequence[Replica], ask: Any) -> list[Any]:
        """Ask engines the same; those that are lost do not count, as long as one is there."""
        found = await asyncio.gather(*(ask(self._client(each)) for each in replicas), return_exceptions=True)
        answers = [each for each in found if not isinstance(each, BaseException)]
        errors = [each for each in found if isinstance(each, BaseException)]
        for error in errors:
            if not isinstance(error, EngineRefused) or error.code not in LOST:
                raise error
        if not answers:
            raise errors[0] if errors else _nobody()
        return answers

    def _client(self, replica: Replica) -> EngineClient:
        client = self._clients.get(replica)
        if client is None:
            address = TcpAddress(replica.host, replica.port, self._file.read().token)
            client = self._clients[replica] = EngineClient(address)
        return client

    def _read(self) -> Roster:
        """Return the roster; connections to engines that are not in it any more are closed after a while."""
        roster = self._file.read()
        if roster.revision != self._revision:
            self._revision = roster.revision
            for replica in self._clients.keys() - set(roster.replicas):
                client = self._clients.pop(replica)
                asyncio.get_running_loop().call_later(_FAREWELL_S, _close_soon, client)
        return roster


class SyncFleetClient:
    """Asks the engines of a roster and waits for each reply; for threads and processes without a loop."""

    def __init__(self, roster: RosterFile) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = FleetClient(roster)
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True)
        self._thread.start()

    def predict(
        self, caller: Caller, rows: Sequence[WireRow], *, deadline_ms: float | None = None, request_id: str = ""
    ) -> Predicted:
        """Answer rows; raise EngineRefused."""
        return self._wait(self._client.predict(caller, rows, deadline_ms=deadline_ms, request_id=request_id))

    def load(self, store_name: str, number: int) -> VersionLoaded:
        """Bring a version into a slot of every engine that will be asked for it; raise what is wrong with it."""
        return self._wait(self._client.load(store_name, number), LOAD_PATIENCE_S)

    def forget(self, store_name: str) -> int:
        """Drop all that any engine holds of a task, and return how many versions that were."""
        return self._wait(self._client.forget(store_name), LOAD_PATIENCE_S)

    def stats(self) -> EngineStats:
        """Return the counters of all engines together."""
        return self._wait(self._client.stats())

    def probe(self) -> Probed:
        """Have a real row answered; raise what prevents it."""
        return self._wait(self._client.probe())

    def close(self) -> None:
        """Close all connections."""
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T], patience_s: float = PREDICT_PATIENCE_S) -> T:
        asked, patience_s = asyncio.run_coroutine_threadsafe(work, self._loop), patience_s + LOST_PATIENCE_S
        try:
            return asked.result(patience_s)
        except TimeoutError:  # several engines were asked one after another, and each was slow
            asked.cancel()
            raise too_slow(patience_s) from None


def _kinder(one: EngineRefused | None, other: EngineRefused) -> EngineRefused:
    """Return the refusal that says more: one of a full engine before one of a lost engine, then the shorter wait."""
    if one is None or (one.code in LOST and other.code not in LOST):
        return other
    if other.code in LOST or other.retry_after_s is None:
        return one
    return other if one.retry_after_s is None or other.retry_after_s < one.retry_after_s else one


def _nobody() -> EngineRefused:
    return EngineRefused(
        "no engine of the cluster is there", "try again in a moment", code="engine-lost", status=503, retry_after_s=1.0
    )


def _close_soon(client: EngineClient) -> None:
    asyncio.ensure_future(client.close())  # noqa: RUF006 - closing waits for nothing


async def _gather(parts: Sequence[Coroutine[Any, Any, Predicted]]) -> list[Predicted]:
    """Return what all parts return; the first error ends the others."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _merge(places: Sequence[Sequence[int]], replies: Sequence[Predicted]) -> Predicted:
    answers: dict[int, WireAnswer | WireError] = {}
    for each, reply in zip(places, replies, strict=True):
        if len(reply.answers) != len(each):
            raise InlayError("an engine answered another number of rows than it was asked", "ask again")
        answers |= dict(zip(each, reply.answers, strict=True))
    ordered = [answers[place] for place in range(len(answers))]
    tokens = sum(reply.num_tokens for reply in replies)
    slowest = max(replies, key=lambda reply: reply.queue_ms + reply.compute_ms)
    return Predicted(0, ordered, tokens, slowest.queue_ms, slowest.compute_ms)
