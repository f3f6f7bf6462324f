"""Clients of several engines: a request goes to one engine, and to another if that one is lost.

Asking twice is harmless, as a question names versions, which never change. A request for many tasks may be shared by
several engines, and their answers are merged. What always holds: an answer comes from an engine that the roster names;
a request is refused only after other engines were tried; every wait has an end.
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
from inlay.service.engine.placement import TaskShares, choose, find_holders
from inlay.service.engine.protocol import (
    Caller,
    EngineStats,
    Predicted,
    Probed,
    TenantLoad,
    VersionLoaded,
    WireAnswer,
    WireError,
    WireRow,
)
from inlay.service.engine.roster import Replica, Roster, RosterFile

T = TypeVar("T")
LOST = ("engine-lost", "draining")
"""refusals of an engine that has gone: another one can answer"""
_FULL = ("queue-full", "tenant-queue-full", "tokens-per-minute")
"""refusals of an engine that has too much to do: another one may have room"""
_MOST_TRIED = 4  # engines asked for one request, before it waits or is refused
_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
LOST_PATIENCE_S = 10.0
"""longest wait for any engine while all are lost"""
_FAREWELL_S = 5.0  # until the connection to an engine that has left the roster is closed


@dataclass(frozen=True)
class _Part:
    """The rows of a request that go to one engine."""

    caller: Caller
    rows: Sequence[WireRow]
    until: float
    """value of time.monotonic() after which nobody waits for the answers"""
    has_deadline: bool
    request_id: str


class FleetClient:
    """Asks the engines of a roster, from an asyncio loop. It has the methods of `EngineClient`."""

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
        whole = _Part(caller, rows, time.monotonic() + patience_s, deadline_ms is not None, request_id)
        tasks = Counter(row.store_name for row in rows)
        self._shares.add(tasks)
        roster = self._read()
        if len(tasks) < 2 or not roster.is_crowded or len(roster.replicas) < 2:
            return await self._ask(whole)
        # 1. send each row to its task's first engine
        first = {task: choose(task, roster, self._shares.find(task), self._busy)[0] for task in tasks}
        places: dict[Replica, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(first[row.store_name], []).append(place)
        # 2. all engines answer at the same time
        parts = [replace(whole, rows=[rows[place] for place in each]) for each in places.values()]
        asking = [asyncio.ensure_future(self._ask(part, first)) for part, first in zip(parts, places, strict=True)]
        try:
            replies = await asyncio.gather(*asking)
        finally:  # the first error ends the other questions
            for task in asking:
                task.cancel()
        # 3. put the answers in the order of their rows
        return _merge(list(places.values()), replies)

    async def load(self, store_name: str, number: int) -> VersionLoaded:
        """Load a version into a slot of every engine that will be asked for it; raise what is wrong with it."""
        holders = find_holders(store_name, self._read())
        loaded = await self._ask_all(holders, lambda engine: engine.load(store_name, number))
        return VersionLoaded(0, max(each.seconds for each in loaded), max(each.num_probes for each in loaded))

    async def forget(self, store_name: str) -> int:
        """Drop all versions of a task from all engines, and return how many there were."""
        return sum(await self._ask_all(self._read().replicas, lambda engine: engine.forget(store_name)))

    async def stats(self) -> EngineStats:
        """Return the counters of all engines together."""
        return _add_stats(await self._ask_all(self._read().replicas, lambda engine: engine.stats()))

    async def probe(self) -> Probed:
        """Have a real row answered by any engine; raise the refusal if none does."""
        refusal = _no_engine()
        for replica in self._read().replicas[:_MOST_TRIED]:
            try:
                return await self._client(replica).probe()
            except EngineRefused as error:
                refusal = error
        raise refusal

    async def close(self) -> None:
        """Close all connections; callers that still wait get a refusal."""
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.close()

    async def _ask(self, part: _Part, first: Replica | None = None) -> Predicted:
        """Have rows answered by one engine or another; while all are lost, wait and try again."""
        lost_until = min(part.until, time.monotonic() + LOST_PATIENCE_S)
        for pause_s in (*_PAUSES_S, *_PAUSES_S[-1:] * 100):
            try:
                return await self._try_some(part, first)
            except EngineRefused as refusal:
                if refusal.code not in LOST or time.monotonic() + pause_s >= lost_until:
                    raise
            first = None
            await asyncio.sleep(pause_s)
        raise _no_engine()

    async def _try_some(self, part: _Part, first: Replica | None) -> Predicted:
        """Ask one engine after another, until one answers or refuses the request itself."""
        task = part.rows[0].store_name if part.rows else ""
        chosen = choose(task, self._read(), self._shares.find(task), self._busy)
        if first is not None:
            chosen = [first, *(replica for replica in chosen if replica != first)]
        refusal: EngineRefused | None = None
        for replica in chosen[:_MOST_TRIED]:
            left_ms = max(1.0, 1000 * (part.until - time.monotonic())) if part.has_deadline else None
            self._busy[replica.name] += len(part.rows)
            try:
                return await self._client(replica).predict(
                    part.caller, part.rows, deadline_ms=left_ms, request_id=part.request_id
                )
            except EngineRefused as error:
                if error.code not in (*LOST, *_FULL):
                    raise
                refusal = _choose_refusal(refusal, error)
            finally:
                self._busy[replica.name] -= len(part.rows)
        raise refusal or _no_engine()

    async def _ask_all(self, replicas: Sequence[Replica], ask: Any) -> list[Any]:
        """Ask all engines the same. Lost engines are ignored, unless all are lost."""
        found = await asyncio.gather(*(ask(self._client(each)) for each in replicas), return_exceptions=True)
        answers = [each for each in found if not isinstance(each, BaseException)]
        errors = [each for each in found if isinstance(each, BaseException)]
        for error in errors:
            if not isinstance(error, EngineRefused) or error.code not in LOST:
                raise error
        if not answers:
            raise errors[0] if errors else _no_engine()
        return answers

    def _client(self, replica: Replica) -> EngineClient:
        client = self._clients.get(replica)
        if client is None:
            address = TcpAddress(replica.host, replica.port, self._file.read().token)
            client = self._clients[replica] = EngineClient(address)
        return client

    def _read(self) -> Roster:
        """Return the roster. Connections to engines that have left it are closed after a while."""
        roster = self._file.read()
        if roster.revision != self._revision:
            self._revision = roster.revision
            for replica in self._clients.keys() - set(roster.replicas):
                client = self._clients.pop(replica)
                asyncio.get_running_loop().call_later(_FAREWELL_S, _close, client)
        return roster


class SyncFleetClient:
    """Asks the engines of a roster and waits for each reply; for threads and processes without an event loop."""

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
        """Load a version into a slot of every engine that will be asked for it; raise what is wrong with it."""
        return self._wait(self._client.load(store_name, number), LOAD_PATIENCE_S)

    def forget(self, store_name: str) -> int:
        """Drop all versions of a task from all engines, and return how many there were."""
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
        patience_s += LOST_PATIENCE_S
        reply = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return reply.result(patience_s)
        except TimeoutError:  # several engines were asked one after another, and each was slow
            reply.cancel()
            raise too_slow(patience_s) from None


def _choose_refusal(one: EngineRefused | None, other: EngineRefused) -> EngineRefused:
    """Return the more useful refusal: that of a full engine before that of a lost one, then the shorter wait."""
    if one is None or (one.code in LOST and other.code not in LOST):
        return other
    if other.code in LOST or other.retry_after_s is None:
        return one
    return other if one.retry_after_s is None or other.retry_after_s < one.retry_after_s else one


def _no_engine() -> EngineRefused:
    return EngineRefused(
        "no engine of the cluster is running",
        "try again in a moment",
        code="engine-lost",
        status=503,
        retry_after_s=1.0,
    )


def _close(client: EngineClient) -> None:
    asyncio.ensure_future(client.close())  # noqa: RUF006 - closing waits for nothing


def _merge(places: Sequence[Sequence[int]], replies: Sequence[Predicted]) -> Predicted:
    answers: dict[int, WireAnswer | WireError] = {}
    for each, reply in zip(places, replies, strict=True):
        if len(reply.answers) != len(each):
            raise InlayError("an engine answered a different number of rows than it was asked", "ask again")
        answers |= dict(zip(each, reply.answers, strict=True))
    ordered = [answers[place] for place in range(len(answers))]
    tokens = sum(reply.num_tokens for reply in replies)
    slowest = max(replies, key=lambda reply: reply.queue_ms + reply.compute_ms)
    return Predicted(0, ordered, tokens, slowest.queue_ms, slowest.compute_ms)


def _add_stats(each: Sequence[EngineStats]) -> EngineStats:
    """Return the sums of the counters of engines; `num_slots` is that of one engine, `queue_s` the mean."""
    tenants: dict[str, list[TenantLoad]] = {}
    for stats in each:
        for name, load in stats.per_tenant.items():
            tenants.setdefault(name, []).append(load)
    return EngineStats(
        0,
        queue_rows=sum(stats.queue_rows for stats in each),
        queue_tokens=sum(stats.queue_tokens for stats in each),
        queue_s=sum(stats.queue_s for stats in each) / len(each),
        resident=list(dict.fromkeys(name for stats in each for name in stats.resident)),
        num_slots=each[0].num_slots,
        tokens_per_s=sum(stats.tokens_per_s for stats in each),
        num_batches=sum(stats.num_batches for stats in each),
        num_rows=sum(stats.num_rows for stats in each),
        num_tokens=sum(stats.num_tokens for stats in each),
        per_tenant={name: _add_loads(loads) for name, loads in tenants.items()},
        backbone=each[0].backbone,
        uptime_s=max(stats.uptime_s for stats in each),
        memory_bytes=sum(stats.memory_bytes for stats in each),
        num_load_failures=sum(stats.num_load_failures for stats in each),
        is_draining=all(stats.is_draining for stats in each),
    )


def _add_loads(loads: Sequence[TenantLoad]) -> TenantLoad:
    return TenantLoad(
        num_rows=sum(load.num_rows for load in loads),
        num_tokens=sum(load.num_tokens for load in loads),
        num_refused=sum(load.num_refused for load in loads),
        queued_rows=sum(load.queued_rows for load in loads),
        queued_tokens=sum(load.queued_tokens for load in loads),
    )
