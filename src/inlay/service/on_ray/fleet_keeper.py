"""The keeper of a fleet: a detached actor that has engines and trainers placed, watches them, and makes the roster.

Ray restarts the keeper if its machine dies, and it finds its members by their names. What always holds: an engine is in
the roster only while it answers; when the last service leaves, the members end, and if services are only silent, after
a while.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from inlay.errors import Unsupported
from inlay.service.engine import EngineClient, EngineRefused, EngineStats, Replica, Roster, TcpAddress
from inlay.service.logs import log_event, log_failure, set_up_logs
from inlay.service.on_ray.fleet_member import FleetMember
from inlay.service.on_ray.fleet_messages import (
    ENGINE,
    KEEPER,
    TRAINER,
    Failure,
    FleetOrder,
    FleetReport,
    MemberReport,
    ServiceHeartbeat,
    describe_failure,
)
from inlay.service.on_ray.scaling import Scaler
from inlay.service.settings import VARIABLE, read_settings

_STEP_S = 0.25
_LOOK_S = 0.5
_SILENT_S = 10.0  # until a call counts as unanswered: the member waits for a machine, or its machine is gone
_PROBE_S = 5.0
_MOST_PROBES = 3  # unanswered questions until an engine is replaced
_AGAIN_S = 5.0  # between two attempts to place a member that failed
_WAIT_S = 1.0  # for which a heartbeat waits for a change
_LINGER_S = 60.0
"""how long members stay while no service sends heartbeats: it may be restarting"""


@dataclass
class _Watched:
    """A member as its keeper sees it."""

    name: str
    role: str
    actor: Any
    report: MemberReport | None = None
    client: EngineClient | None = None
    address: TcpAddress | None = None
    stats: EngineStats | None = None
    """the counters of an engine; None while it does not answer"""
    task: asyncio.Task[None] | None = None
    is_leaving: bool = False
    probed_at: float = 0.0
    num_unanswered: int = 0

    @property
    def is_up(self) -> bool:
        """Return whether the member works."""
        if self.is_leaving or self.report is None or not self.report.facts:
            return False
        return self.role != ENGINE or self.stats is not None


class FleetKeeper:
    """Keeps the engines and trainers of one service, and tells it which of them answer. An actor with an event loop."""

    def __init__(self, order: FleetOrder, namespace: str) -> None:
        self._order, self._namespace = order, namespace
        self._settings = read_settings({VARIABLE: order.settings})
        assert self._settings.cluster is not None
        self._cluster = self._settings.cluster
        set_up_logs(KEEPER, as_json=self._settings.log_json)
        self._members: dict[str, _Watched] = {}
        self._heartbeats: dict[str, tuple[float, ServiceHeartbeat]] = {}
        self._seen_at = time.monotonic()
        self._adopted_at = -_SILENT_S
        # Revisions must not start again after a restart: the same number would stand for two rosters.
        self._roster = Roster(int(time.time() * 1000), order.token)
        self._scalers = {ENGINE: Scaler(self._cluster.engines[0]), TRAINER: Scaler(self._cluster.trainers[0])}
        self._news: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._was_ready = self._is_ending = False
        self._failure: Failure | None = None
        self._fingerprint: str | None = None
        # After a restart there may be no service left to send heartbeats: then the keeper ends its members and itself.
        asyncio.get_running_loop().call_later(_LINGER_S, self._begin)

    async def heartbeat(self, heartbeat: ServiceHeartbeat) -> FleetReport:
        """Note that a service runs, and return the report; if it has nothing new, only after a moment."""
        self._begin()
        if heartbeat.order.identity != self._order.identity:
            return self._refuse_other()
        self._order = replace(heartbeat.order, token=self._order.token)
        self._seen_at = time.monotonic()
        self._heartbeats[heartbeat.service] = (self._seen_at, heartbeat)
        self._cluster = heartbeat.cluster
        if heartbeat.known_revision == self._roster.revision and self._was_ready:
            assert self._news is not None
            with suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_S):
                    await self._news.wait()
        return self._report()

    def _begin(self) -> None:
        """Find the members that run already, and begin to look after them; only the first call does so."""
        if self._task is None:
            self._news = asyncio.Event()
            self._adopt()
            if self._members:
                self._adopted_at = time.monotonic()
            self._task = asyncio.ensure_future(self._run())

    async def leave(self, service: str) -> bool:
        """Note that a service has ended. With the last one everything ends; return whether it does."""
        self._begin()  # after a restart it must find the members before it can end them
        self._heartbeats.pop(service, None)
        if not self._heartbeats and (left := self._adopted_at + _SILENT_S - time.monotonic()) > 0:
            await asyncio.sleep(left)  # after a restart it does not know yet what other services there are
        if not self._heartbeats:
            await self._end()
        return self._is_ending

    def _refuse_other(self) -> FleetReport:
        """Refuse a service that needs other engines. If no other service is left, end, so that it can have its own."""
        if any(time.monotonic() - at < _SILENT_S for at, _ in self._heartbeats.values()):
            error = Unsupported(
                "another service with this database or folder runs on the cluster, with other versions or settings",
                "stop it first, or start this one as that one was",
            )
            return FleetReport("starting", self._roster, failure=describe_failure(error))
        asyncio.ensure_future(self._end())  # noqa: RUF006 - it ends this process
        return FleetReport("ending", self._roster)

    def _report(self) -> FleetReport:
        members = self._members.values()
        reports = tuple(member.report for member in members if member.report is not None)
        waiting = tuple(member.name for member in members if not member.is_up)
        state = "ending" if self._is_ending else "ready" if self._was_ready else "starting"
        failure = None if self._was_ready else self._failure
        return FleetReport(state, self._roster, reports, waiting, failure)

    # The number of members.

    async def _run(self) -> None:
        while not self._is_ending:
            try:
                await self._step()
            except Exception:
                log_failure("the keeper goes on after an unexpected error")
            await asyncio.sleep(_STEP_S)

    async def _step(self) -> None:
        now = time.monotonic()
        self._heartbeats = {name: known for name, known in self._heartbeats.items() if now - known[0] < _LINGER_S}
        if now - self._seen_at >= _LINGER_S:
            log_event("ends: no service sends heartbeats any more")
            await self._end()
            return
        for role, number in self._count_wanted(now).items():
            names = [f"{role}-{place + 1}" for place in range(number)]
            for name in names:
                if name not in self._members:
                    self._add(name, role)
            for member in list(self._members.values()):
                if member.role == role and member.name not in names and not member.is_leaving:
                    asyncio.ensure_future(self._retire(member))  # noqa: RUF006 - it ends by itself
        self._update_roster()

    def _count_wanted(self, now: float) -> dict[str, int]:
        """Return how many engines and trainers there should be now."""
        queues = [member.stats.queue_s for member in self._members.values() if member.is_up and member.stats]
        if queues:
            self._scalers[ENGINE].follow_queue(sum(queues) / len(queues), now)
        queued_s = max((heartbeat.queued_s for _, heartbeat in self._heartbeats.values()), default=0.0)
        self._scalers[TRAINER].follow_work(queued_s, now)
        engines = self._scalers[ENGINE].bound(*self._cluster.engines)
        trainers = self._scalers[TRAINER].bound(*self._cluster.trainers) if self._settings.train else 0
        return {ENGINE: engines, TRAINER: trainers}

    def _adopt(self) -> None:
        """Find the members that were placed before a restart of this keeper."""
        import ray

        for found in ray.util.list_named_actors(all_namespaces=True):
            role = found["name"].partition("-")[0]
            if found["namespace"] == self._namespace and role in self._scalers:
                self._add(found["name"], role)
        for role, scaler in self._scalers.items():
            scaler.number = max(scaler.number, sum(member.role == role for member in self._members.values()))

    def _add(self, name: str, role: str) -> None:
        member = self._members[name] = _Watched(name, role, self._place(name, role))
        member.task = asyncio.ensure_future(self._watch(member))

    def _place(self, name: str, role: str) -> Any:
        """Have Ray place a member, or find it if it runs already."""
        import ray

        make = ray.remote(FleetMember).options(
            name=name,
            namespace=self._namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=4,
            num_cpus=self._cluster.num_cpus,
            num_gpus=self._cluster.num_gpus,
            scheduling_strategy="SPREAD",
        )
        return make.remote(self._order, name, role)

    def _update_roster(self) -> None:
        """Make a new roster if engines came or went, and wake the calls of `heartbeat` that wait for it."""
        up = [member for member in self._members.values() if member.is_up]
        engines = [member for member in up if member.role == ENGINE and member.address is not None]
        replicas = tuple(
            sorted(Replica(each.name, each.address.host, each.address.port) for each in engines if each.address)
        )
        resident = {name for each in engines if each.stats is not None for name in each.stats.resident}
        num_slots = min((each.stats.num_slots for each in engines if each.stats is not None), default=0)
        is_crowded = len(replicas) > 1 and len(resident) > num_slots
        if (replicas, is_crowded) != (self._roster.replicas, self._roster.is_crowded):
            revision = self._roster.revision + 1
            self._roster = Roster(revision, self._order.token, replicas, is_crowded)
            log_event("engines", {"number": len(replicas), "is_crowded": is_crowded})
            self._tell()
        if not self._was_ready and self._members and len(up) == len(self._members):
            self._was_ready = True
            self._tell()

    def _tell(self) -> None:
        assert self._news is not None
        self._news.set()
        self._news = asyncio.Event()

    # One member.

    async def _watch(self, member: _Watched) -> None:
        """Ask a member again and again, until it leaves."""
        while not member.is_leaving:
            try:
                await self._ask(member)
            except Exception:
                log_failure("the keeper goes on asking a member after an unexpected error")
            await asyncio.sleep(_LOOK_S)

    async def _ask(self, member: _Watched) -> None:
        """Ask a member for its report, and an engine for its counters too; replace a member that failed."""
        from ray.exceptions import ActorDiedError, RayError

        # A restarted keeper that has found no engine yet must not give trainers an empty roster.
        roster = self._roster if self._was_ready or self._roster.replicas else None
        report: MemberReport | None = None
        failure: Failure | None = None
        try:
            async with asyncio.timeout(_SILENT_S):
                report = await member.actor.describe.remote(roster)
        except (TimeoutError, RayError) as error:
            member.stats = None
            if isinstance(error, ActorDiedError):  # it could not start, or was killed: Ray will not restart it
                failure = _explain_death(error)
        member.report = report
        if report is not None:
            failure = report.failure or self._compare_backbones(report)
        if failure is not None:
            log_event("a member failed", {"name": member.name, "why": failure.message}, level=30)
            self._failure = failure
            await self._replace(member)
        elif report is not None and report.facts and member.role == ENGINE:
            await self._ask_engine(member, TcpAddress(report.facts["host"], report.facts["port"], self._order.token))
        elif report is not None:
            member.stats = None
            member.num_unanswered = 0

    async def _ask_engine(self, member: _Watched, address: TcpAddress) -> None:
        """Ask an engine for its counters, and now and then for an answer."""
        if member.address != address:
            if member.client is not None:
                await member.client.close()
            member.client, member.address = EngineClient(address), address
        assert member.client is not None
        try:
            member.stats = await member.client.stats()
            if time.monotonic() - member.probed_at >= _PROBE_S:
                member.probed_at = time.monotonic()
                await member.client.probe()
                member.num_unanswered = 0
        except EngineRefused as error:
            member.num_unanswered += 1
            if error.code == "engine-lost" or member.num_unanswered >= _MOST_PROBES:
                member.stats = None
            if member.num_unanswered >= _MOST_PROBES:
                log_event("an engine does not answer", {"name": member.name, "code": error.code}, level=30)
                await self._replace(member)
        self._update_roster()

    def _compare_backbones(self, report: MemberReport) -> Failure | None:
        """Return the error of an engine whose backbone differs from that of the first engine."""
        found = report.facts.get("fingerprint")
        self._fingerprint = self._fingerprint or found
        if found is None or found == self._fingerprint:
            return None
        error = Unsupported(
            f"`{self._settings.backbone}` is another backbone on machine `{report.hostname}`",
            "put the same folder on all machines of the cluster",
        )
        return describe_failure(error)

    async def _replace(self, member: _Watched) -> None:
        """End a member's actor, and have another one placed after a pause."""
        member.report = member.stats = None
        member.num_unanswered = 0
        self._update_roster()
        _kill(member.actor)
        await asyncio.sleep(_AGAIN_S)
        if not member.is_leaving and not self._is_ending:
            member.actor = self._place(member.name, member.role)

    async def _retire(self, member: _Watched) -> None:
        """Take a member out of the roster, let it finish, and end it."""
        member.is_leaving = True
        self._update_roster()
        if member.role == ENGINE and not self._is_ending:
            await asyncio.sleep(2 * _WAIT_S)  # until all clients have the new roster
        with suppress(Exception):
            async with asyncio.timeout(self._settings.drain_s + _SILENT_S):
                await member.actor.drain.remote()
        _kill(member.actor)
        if member.task is not None:
            await asyncio.wait([member.task], timeout=_WAIT_S)  # else it might open a new connection
        if member.client is not None:
            await member.client.close()
        self._members.pop(member.name, None)

    async def _end(self) -> None:
        """End all members, trainers before engines as they ask them, and then this actor."""
        if self._is_ending:
            return
        self._is_ending = True
        for role in (TRAINER, ENGINE):
            members = [member for member in self._members.values() if member.role == role]
            await asyncio.gather(*(self._retire(member) for member in members))
        asyncio.get_running_loop().call_later(_STEP_S, self._kill_itself)

    def _kill_itself(self) -> None:
        import ray

        with suppress(Exception):
            ray.kill(ray.get_actor(KEEPER, namespace=self._namespace))


def _kill(actor: Any) -> None:
    import ray

    with suppress(Exception):
        ray.kill(actor)


def _explain_death(error: Exception) -> Failure:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    reason = (lines[-1] if lines else type(error).__name__)[:300]
    hint = "Ray's log of that machine says more; every machine needs the same Inlay, with its extras `serve` and `ray`"
    return Failure("lost-process", f"a machine of the cluster cannot run this service: {reason}", hint, 1)
