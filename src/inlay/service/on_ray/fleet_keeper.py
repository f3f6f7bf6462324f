"""The keeper of a fleet: a detached actor that has engines and trainers placed, watches them, and says who answers.

Ray starts it again if its machine dies; it then finds its members by their names. What always holds: an engine is in
the roster only while it answers; members without a service end after a while, and with the last service at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
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
    FleetVisit,
    MemberReport,
    describe_failure,
)
from inlay.service.on_ray.scaling import Scaler
from inlay.service.settings import VARIABLE, read_settings

_STEP_S = 0.25
_LOOK_S = 0.5
_SILENT_S = 10.0  # a member that does not answer: it waits for a machine, or its machine is gone
_PROBE_S = 5.0
_MOST_PROBES = 3  # unanswered, until an engine that takes questions and does not answer is started again
_AGAIN_S = 5.0  # between two attempts at a member that gave up
_WAIT_S = 1.0  # of a visit, for news
_LINGER_S = 60.0
"""how long members stay when no service shows itself: it may be starting again"""


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
    """an engine's counters; None while it does not answer"""
    task: asyncio.Task[None] | None = None
    is_leaving: bool = False
    probed_at: float = 0.0
    num_unanswered: int = 0

    @property
    def is_up(self) -> bool:
        """Return whether it can do its work."""
        if self.is_leaving or self.report is None or not self.report.facts:
            return False
        return self.role != ENGINE or self.stats is not None


class FleetKeeper:
    """Keeps the engines and trainers of one service, and tells its services who they are. An actor of one loop."""

    def __init__(self, order: FleetOrder, namespace: str) -> None:
        self._order, self._namespace = order, namespace
        self._settings = read_settings({VARIABLE: order.settings})
        assert self._settings.cluster is not None
        self._cluster = self._settings.cluster
        set_up_logs(KEEPER, as_json=self._settings.log_json)
        self._members: dict[str, _Watched] = {}
        self._visits: dict[str, tuple[float, FleetVisit]] = {}
        self._seen_at = time.monotonic()
        # After a restart of its own, revisions must not begin anew: others would take old ones for known.
        self._roster = Roster(int(time.time() * 1000), order.token)
        self._scalers = {ENGINE: Scaler(self._cluster.engines[0]), TRAINER: Scaler(self._cluster.trainers[0])}
        self._news: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._was_ready = self._is_ending = False
        self._failure: Failure | None = None
        self._fingerprint: str | None = None
        # Started again by Ray it may find no service left to visit it: then it ends what it was there for.
        asyncio.get_running_loop().call_later(_LINGER_S, self._begin)

    async def visit(self, visit: FleetVisit) -> FleetReport:
        """Take a service's visit, and report; if nothing is new, after a moment."""
        self._begin()
        if visit.identity != self._order.identity:
            return self._refuse_other()
        self._seen_at = time.monotonic()
        self._visits[visit.service] = (self._seen_at, visit)
        self._cluster = visit.cluster
        if visit.known_revision == self._roster.revision and self._was_ready:
            assert self._news is not None
            with suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_S):
                    await self._news.wait()
        return self._report()

    def _begin(self) -> None:
        """Find the members that are there, and begin to look after them."""
        if self._task is None:
            self._news = asyncio.Event()
            self._adopt()
            self._task = asyncio.ensure_future(self._run())

    async def leave(self, service: str) -> bool:
        """Take a service's leave; with the last one everything ends. Returns whether that was so."""
        self._begin()  # after a start of its own it has yet to find whom it ends
        self._visits.pop(service, None)
        if not self._visits:
            await self._end()
        return self._is_ending

    def _refuse_other(self) -> FleetReport:
        """Refuse a service that wants other engines; if no other is there any more, make room for it."""
        if any(time.monotonic() - at < _SILENT_S for at, _ in self._visits.values()):
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

    # What there should be, and what there is.

    async def _run(self) -> None:
        while not self._is_ending:
            try:
                await self._step()
            except Exception:
                log_failure("the keeper goes on after an error that nobody foresaw")
            await asyncio.sleep(_STEP_S)

    async def _step(self) -> None:
        now = time.monotonic()
        self._visits = {name: known for name, known in self._visits.items() if now - known[0] < _LINGER_S}
        if now - self._seen_at >= _LINGER_S:
            log_event("ends, as no service is there")
            await self._end()
            return
        self._scale(now)
        for role, number in self._wanted().items():
            names = [f"{role}-{place + 1}" for place in range(number)]
            for name in names:
                if name not in self._members:
                    self._add(name, role)
            for member in list(self._members.values()):
                if member.role == role and member.name not in names and not member.is_leaving:
                    asyncio.ensure_future(self._retire(member))  # noqa: RUF006 - it ends by itself
        self._look_who_is_up()

    def _wanted(self) -> dict[str, int]:
        engines = self._scalers[ENGINE].bound(*self._cluster.engines)
        trainers = self._scalers[TRAINER].bound(*self._cluster.trainers) if self._settings.train else 0
        return {ENGINE: engines, TRAINER: trainers}

    def _scale(self, now: float) -> None:
        queues = [member.stats.queue_s for member in self._members.values() if member.is_up and member.stats]
        if queues:
            self._scalers[ENGINE].follow_queue(sum(queues) / len(queues), now)
        queued_s = max((visit.queued_s for _, visit in self._visits.values()), default=0.0)
        self._scalers[TRAINER].follow_work(queued_s, now)

    def _adopt(self) -> None:
        """Find the members that were there before this keeper was started again."""
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
        """Have Ray place a member, or find it if it is there."""
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

    def _look_who_is_up(self) -> None:
        """Make a new roster if engines came or went."""
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
        """Ask a member how it is, again and again, until it leaves."""
        while not member.is_leaving:
            try:
                await self._ask(member)
            except Exception:
                log_failure("the keeper goes on asking a member after an error that nobody foresaw")
            await asyncio.sleep(_LOOK_S)

    async def _ask(self, member: _Watched) -> None:
        from ray.exceptions import ActorDiedError, RayError

        try:
            # One that was started again and knows of no engine yet must not take them from trainers.
            roster = self._roster if self._was_ready or self._roster.replicas else None
            member.report = await _ask_member(member.actor, roster)
        except (TimeoutError, RayError) as error:
            member.report = member.stats = None
            if isinstance(error, ActorDiedError):  # it could not be made, or was ended: Ray will not start it again
                self._note_failure(member, _explain_death(error))
                await self._replace(member)
        if member.report is not None:
            await self._look_at(member, member.report)

    async def _look_at(self, member: _Watched, report: MemberReport) -> None:
        failure = report.failure or self._compare_backbones(member, report)
        if failure is not None:
            self._note_failure(member, failure)
            await self._replace(member)
        elif member.role == ENGINE and report.facts:
            await self._ask_engine(member, TcpAddress(report.facts["host"], report.facts["port"], self._order.token))
        else:
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
        self._look_who_is_up()

    def _compare_backbones(self, member: _Watched, report: MemberReport) -> Failure | None:
        """Return what is wrong if an engine has another backbone than the first one had."""
        found = report.facts.get("fingerprint")
        self._fingerprint = self._fingerprint or found
        if found is None or found == self._fingerprint:
            return None
        error = Unsupported(
            f"`{self._settings.backbone}` is another backbone on machine `{report.hostname}`",
            "put the same folder on all machines of the cluster",
        )
        return describe_failure(error)

    def _note_failure(self, member: _Watched, failure: Failure) -> None:
        log_event("a member gave up", {"name": member.name, "why": failure.message}, level=30)
        self._failure = failure

    async def _replace(self, member: _Watched) -> None:
        """End a member's actor, and have another placed after a pause."""
        member.report = member.stats = None
        member.num_unanswered = 0
        self._look_who_is_up()
        self._kill(member)
        await asyncio.sleep(_AGAIN_S)
        if not member.is_leaving and not self._is_ending:
            member.actor = self._place(member.name, member.role)

    async def _retire(self, member: _Watched) -> None:
        """Take a member out of the roster, let it finish, and end it."""
        member.is_leaving = True
        self._look_who_is_up()
        if member.role == ENGINE and not self._is_ending:
            await asyncio.sleep(2 * _WAIT_S)  # until nobody asks it any more
        with suppress(Exception):
            await _within(self._settings.drain_s + _SILENT_S, lambda: member.actor.drain.remote())
        self._kill(member)
        if member.task is not None:
            await asyncio.wait([member.task], timeout=_WAIT_S)  # else it may ask once more, over a new connection
        if member.client is not None:
            await member.client.close()
        self._members.pop(member.name, None)

    def _kill(self, member: _Watched) -> None:
        import ray

        with suppress(Exception):
            ray.kill(member.actor)

    async def _end(self) -> None:
        """End all members: trainers first, since they ask engines; then this actor itself."""
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


async def _ask_member(actor: Any, roster: Roster | None) -> MemberReport:
    report: MemberReport = await _within(_SILENT_S, lambda: actor.describe.remote(roster))
    return report


async def _within(patience_s: float, ask: Callable[[], Any]) -> Any:
    async with asyncio.timeout(patience_s):
        return await ask()


def _explain_death(error: Exception) -> Failure:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    reason = (lines[-1] if lines else type(error).__name__)[:300]
    hint = "Ray's log of that machine says more; every machine needs the same Inlay, with its extras `serve` and `ray`"
    return Failure("lost-process", f"a machine of the cluster cannot run this service: {reason}", hint, 1)
