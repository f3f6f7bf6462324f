"""The keeper of a fleet, on a Ray that is played here: who is in the roster, who is placed anew, who ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from inlay.service.engine import EngineStats, Roster
from inlay.service.engine.engine_connections import EngineConnection, bind_port
from inlay.service.engine.protocol import AskProbe, AskStats, Probed, Refused
from inlay.service.home import prepare_home
from inlay.service.on_ray import fleet_keeper
from inlay.service.on_ray.fleet_keeper import FleetKeeper
from inlay.service.on_ray.fleet_messages import Failure, MemberReport, ServiceHeartbeat, make_order
from inlay.service.settings import ClusterSettings, ServeSettings


class PlayedRay(ModuleType):
    """The few names of Ray that the keeper uses; an actor is an object of ours."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.actors: dict[str, PlayedMember] = {}
        self.killed: list[str] = []
        self.broken = 0
        """attempts to place a member that fail"""
        self.begin: dict[str, dict[str, Any]] = {}
        """what members of a name are like from their first moment"""
        self.exceptions = ModuleType("ray.exceptions")
        self.exceptions.RayError = type("RayError", (Exception,), {})
        self.exceptions.ActorDiedError = type("ActorDiedError", (self.exceptions.RayError,), {})
        self.util = ModuleType("ray.util")
        self.util.list_named_actors = lambda all_namespaces: [
            {"name": name, "namespace": "space"} for name in self.actors
        ]

    def remote(self, kind: Any) -> Any:
        return self

    def options(self, *, name: str, **asked: Any) -> Any:
        place = ModuleType("place")
        place.remote = lambda order, name, role: self._place(order, name, role)
        return place

    def _place(self, order: Any, name: str, role: str) -> PlayedMember:
        if self.broken:
            self.broken -= 1
            raise ValueError("the cluster cannot place anything now")
        return self.actors.setdefault(name, PlayedMember(self, order, name, role))

    def get_actor(self, name: str, namespace: str) -> str:
        return name

    def kill(self, actor: Any) -> None:
        name = actor if isinstance(actor, str) else actor.name
        self.killed.append(name)
        found = self.actors.pop(name, None)
        if found is not None:
            found.stop()


class PlayedMember:
    """An engine that answers at a port, or a trainer that says it is there."""

    def __init__(self, ray: PlayedRay, order: Any, name: str, role: str) -> None:
        self.ray, self.order, self.name, self.role = ray, order, name, role
        self.failure: Failure | None = None
        self.queue_s, self.resident, self.fingerprint = 0.0, ["a@1"], "f"
        self.was_drained = self.is_dead = False
        self.answers = True
        self.port = 0
        self.server: asyncio.Server | None = None
        self.rosters: list[Roster | None] = []
        self.describe, self.drain = ModuleType("describe"), ModuleType("drain")
        self.describe.remote, self.drain.remote = self._describe, self._drain
        self.connections: list[EngineConnection] = []
        vars(self).update(ray.begin.get(name, {}))

    async def _describe(self, roster: Roster | None) -> MemberReport:
        if self.is_dead:
            raise self.ray.exceptions.ActorDiedError("no module named inlay")
        self.rosters.append(roster)
        if self.role == "engine" and self.server is None:
            listener = bind_port("127.0.0.1")
            self.port = listener.getsockname()[1]
            self.server = await asyncio.get_running_loop().create_server(self._connect, sock=listener)
        facts = {"host": "127.0.0.1", "port": self.port, "fingerprint": self.fingerprint}
        return MemberReport(self.name, "here", "node", 1, {} if self.failure else facts, self.failure)

    async def _drain(self) -> None:
        self.was_drained = True

    def _connect(self) -> EngineConnection:
        self.connections.append(EngineConnection(self._ask, lambda gone: None, token=self.order.token.encode()))
        return self.connections[-1]

    def _ask(self, question: Any, connection: EngineConnection) -> None:
        if isinstance(question, AskProbe):
            refused = Refused(question.id, "unanswered", "it fails", None, 500)
            connection.reply(Probed(question.id, 0.1) if self.answers else refused)
        elif isinstance(question, AskStats):
            counts = dict.fromkeys(("queue_rows", "queue_tokens", "num_batches", "num_rows", "num_tokens"), 0)
            sizes = dict.fromkeys(("memory_bytes", "num_load_failures"), 0)
            known = {"resident": self.resident, "num_slots": 3, "tokens_per_s": 1.0, "per_tenant": {}, "backbone": "b"}
            times = {"queue_s": self.queue_s, "uptime_s": 1.0, "is_draining": False}
            connection.reply(EngineStats(question.id, **counts, **sizes, **known, **times))

    def stop(self) -> None:
        if self.server is not None:
            self.server.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def played(monkeypatch) -> PlayedRay:
    ray = PlayedRay()
    for name, module in {"ray": ray, "ray.exceptions": ray.exceptions, "ray.util": ray.util}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name, seconds in {
        "_STEP_S": 0.01,
        "_LOOK_S": 0.01,
        "_AGAIN_S": 0.05,
        "_WAIT_S": 0.05,
        "_PROBE_S": 0.02,
    }.items():
        monkeypatch.setattr(fleet_keeper, name, seconds)
    monkeypatch.setattr(fleet_keeper, "set_up_logs", lambda *args, **more: None)
    return ray


class Desk:
    """A service that sends heartbeats to its keeper."""

    def __init__(self, settings: ServeSettings) -> None:
        self.order = make_order(settings)
        self.keeper = FleetKeeper(self.order, "space")
        self.cluster = settings.cluster
        self.queued_s = 0.0

    async def heartbeat(self, service: str = "me") -> Any:
        return await self.keeper.heartbeat(ServiceHeartbeat(service, self.order, self.cluster, queued_s=self.queued_s))

    async def until(self, condition: Any, what: str) -> Any:
        for _ in range(1000):
            report = await self.heartbeat()
            if condition(report):
                return report
            await asyncio.sleep(0.01)
        raise AssertionError(f"waited in vain for {what}: {report}")


@pytest.fixture
def settings(tmp_path) -> ServeSettings:
    cluster = ClusterSettings(engines=(2, 4), trainers=(1, 3))
    made = ServeSettings(home=tmp_path / "home", cluster=cluster, drain_s=1.0)
    prepare_home(made)
    return made


@asynccontextmanager
async def ready_desk(settings: ServeSettings, ray: PlayedRay) -> AsyncIterator[Desk]:
    desk = Desk(settings)
    await desk.until(lambda report: report.state == "ready", "a ready fleet")
    try:
        yield desk
    finally:
        await desk.keeper.leave("me")
        await asyncio.sleep(0.05)


def names(report: Any) -> list[str]:
    return [replica.name for replica in report.roster.replicas]


def run(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_engines_that_answer_are_in_the_roster_and_trainers_hear_of_it(played, settings):
    async def work() -> None:
        async with ready_desk(settings, played) as desk:
            report = await desk.heartbeat()
            assert names(report) == ["engine-1", "engine-2"]
            assert not report.roster.is_crowded
            trainer = played.actors["trainer-1"]
            await desk.until(lambda _: trainer.rosters[-1] == report.roster, "the trainer's roster")
            played.actors["engine-1"].resident = ["a@1", "b@1", "c@1", "d@1"]
            await desk.until(lambda found: found.roster.is_crowded, "tasks with engines of their own")
            members = list(played.actors.values())
        assert all(member.was_drained for member in members), "with its last service everything ends"
        await asyncio.sleep(0.1)
        assert played.killed[-1] == "keeper"

    run(work())


def test_an_engine_that_is_lost_leaves_the_roster_and_comes_back(played, settings):
    async def work() -> None:
        async with ready_desk(settings, played) as desk:
            engine = played.actors["engine-2"]
            engine.failure = Failure("lost-process", "it ended five times", None, 1)
            await desk.until(lambda report: names(report) == ["engine-1"], "one engine")
            await desk.until(lambda report: names(report) == ["engine-1", "engine-2"], "both engines")
            assert played.actors["engine-2"] is not engine
            assert (await desk.heartbeat()).failure is None, "after the start nobody is told to give up"

    run(work())


def test_members_that_are_placed_later_get_the_credentials_of_the_latest_heartbeat(played, settings):
    async def work() -> None:
        async with ready_desk(settings, played) as desk:
            token = desk.keeper._order.token
            desk.order = replace(make_order(settings), environment={"AWS_SESSION_TOKEN": "new"})  # another token too
            await desk.heartbeat()
            played.actors["engine-2"].failure = Failure("store-unreachable", "403 Forbidden", None, 1)
            await desk.until(lambda report: names(report) == ["engine-1"], "one engine")
            await desk.until(lambda report: names(report) == ["engine-1", "engine-2"], "both engines")
            found = played.actors["engine-2"].order
            assert (found.environment, found.token) == ({"AWS_SESSION_TOKEN": "new"}, token)

    run(work())


def test_an_engine_that_takes_questions_and_answers_no_row_is_placed_anew(played, settings):
    async def work() -> None:
        async with ready_desk(settings, played) as desk:
            engine = played.actors["engine-1"]
            engine.answers = False
            await desk.until(lambda report: played.actors.get("engine-1", engine) is not engine, "another engine")
            await desk.until(lambda report: names(report) == ["engine-1", "engine-2"], "both engines")

    run(work())


def test_what_is_wrong_with_a_machine_at_the_start_is_told(played, settings):
    async def work() -> None:
        desk = Desk(settings)
        wrong = Failure("unsupported", "machine `x` has inlay 0.0.1", "install the same", 8)
        played.begin["engine-1"] = {"failure": wrong}
        report = await desk.until(lambda report: report.failure is not None, "what is wrong")
        assert report.failure == wrong
        await desk.keeper.leave("me")
        await asyncio.sleep(0.05)

    run(work())


def test_a_machine_without_inlay_is_told_too(played, settings):
    async def work() -> None:
        desk = Desk(settings)
        played.begin["engine-1"] = {"is_dead": True}
        report = await desk.until(lambda report: report.failure is not None, "what is wrong")
        assert "no module named inlay" in report.failure.message
        await desk.keeper.leave("me")
        await asyncio.sleep(0.05)

    run(work())


def test_another_backbone_on_a_machine_is_refused(played, settings):
    async def work() -> None:
        desk = Desk(settings)
        played.begin["engine-2"] = {"fingerprint": "other"}
        report = await desk.until(lambda report: report.failure is not None, "what is wrong")
        assert "is another backbone on machine `here`" in report.failure.message
        await desk.keeper.leave("me")
        await asyncio.sleep(0.05)

    run(work())


def test_long_queues_bring_engines_and_queued_work_brings_trainers(played, settings, monkeypatch):
    monkeypatch.setattr("inlay.service.on_ray.scaling._GROW_AFTER_S", 0.05)
    monkeypatch.setattr("inlay.service.on_ray.scaling._SHRINK_AFTER_S", 0.3)

    async def work() -> None:
        async with ready_desk(settings, played) as desk:
            for name in ("engine-1", "engine-2"):
                played.actors[name].queue_s = 5.0
            desk.queued_s = 1e9
            await desk.until(lambda report: len(names(report)) >= 3 and "trainer-3" in played.actors, "more of both")
            for member in played.actors.values():
                member.queue_s = 0.0
            desk.queued_s = 0.0
            engine = next(member for name, member in played.actors.items() if name == "engine-3")
            await desk.until(lambda report: names(report) == ["engine-1", "engine-2"], "fewer engines")
            await desk.until(lambda report: "engine-3" not in played.actors, "the end of one")
            assert engine.was_drained
            await desk.until(lambda report: "trainer-2" not in played.actors, "fewer trainers")

    run(work())


def test_a_keeper_that_is_started_again_finds_its_members(played, settings):
    async def work() -> None:
        async with ready_desk(settings, played) as desk:
            before = dict(played.actors)
            first = (await desk.heartbeat()).roster
            desk.keeper._is_ending = True  # as if its process were gone
            for member in desk.keeper._members.values():
                member.is_leaving = True
                if member.client is not None:
                    await member.client.close()
            desk.keeper = FleetKeeper(desk.order, "space")
            report = await desk.until(lambda report: report.state == "ready", "the fleet again")
            assert played.actors == before
            assert report.roster.replicas == first.replicas
            assert report.roster.revision > first.revision

    run(work())


def test_a_service_that_wants_another_fleet_waits_for_the_end_of_this_one(played, settings, monkeypatch):
    async def work() -> None:
        async with ready_desk(settings, played) as desk:
            desk.order = replace(desk.order, versions=("another",))
            refused = await desk.heartbeat()
            assert "another service" in refused.failure.message
            monkeypatch.setattr(fleet_keeper, "_SILENT_S", 0.0)  # nobody has shown itself for so long
            assert (await desk.heartbeat()).state == "ending"
            for _ in range(300):
                await asyncio.sleep(0.01)
                if "keeper" in played.killed:
                    return
            raise AssertionError("the fleet has not ended")

    run(work())


async def leave_alone(desk: Desk) -> FleetKeeper:
    """Play a keeper whose machine is gone, and return the one that Ray starts in its place."""
    desk.keeper._is_ending = True
    members = list(desk.keeper._members.values())
    for member in members:
        member.is_leaving = True
    await asyncio.wait([member.task for member in members])  # else one may ask again over a new connection
    for member in members:
        if member.client is not None:
            await member.client.close()
    desk.keeper = FleetKeeper(desk.order, "space")
    return desk.keeper


def test_a_keeper_that_is_started_again_waits_for_the_heartbeats_of_others_before_it_ends_all(
    played, settings, monkeypatch
):
    monkeypatch.setattr(fleet_keeper, "_SILENT_S", 0.5)

    async def work() -> None:
        async with ready_desk(settings, played) as desk:
            keeper = await leave_alone(desk)
            leaving = asyncio.ensure_future(keeper.leave("me"))
            await asyncio.sleep(0.05)
            await desk.heartbeat("another")
            assert not await leaving, "another service is there"
            assert played.actors
            assert await keeper.leave("another")
            assert not played.actors

    run(work())


def test_a_keeper_that_is_started_again_ends_all_with_the_last_service(played, settings, monkeypatch):
    monkeypatch.setattr(fleet_keeper, "_SILENT_S", 0.5)

    async def work() -> None:
        async with ready_desk(settings, played) as desk:
            members = list(played.actors.values())
            keeper = await leave_alone(desk)
            assert await keeper.leave("me"), "the service stops before it has sent this keeper a heartbeat"
            assert all(member.was_drained for member in members)
            assert not played.actors

    run(work())


def test_a_keeper_that_is_started_again_when_no_service_is_there_ends(played, settings, monkeypatch):
    async def work() -> None:
        async with ready_desk(settings, played) as desk:
            members = list(played.actors.values())
            monkeypatch.setattr(fleet_keeper, "_LINGER_S", 0.1)
            await leave_alone(desk)
            for _ in range(300):
                await asyncio.sleep(0.01)
                if "keeper" in played.killed:
                    break
            assert all(member.was_drained for member in members)
            assert not played.actors

    run(work())


def test_trainers_hear_of_engines_though_another_one_has_no_room(played, settings):
    async def work() -> None:
        desk = Desk(settings)
        played.begin["engine-2"] = {"failure": Failure("unsupported", "no room", None, 1)}
        report = await desk.until(lambda report: names(report) == ["engine-1"], "the only engine")
        assert report.state == "starting"
        await desk.until(lambda _: played.actors["trainer-1"].rosters[-1] == report.roster, "the trainer's roster")
        await desk.keeper.leave("me")
        await asyncio.sleep(0.05)

    run(work())


def test_a_cluster_that_cannot_place_a_member_at_once_is_asked_again(played, settings):
    async def work() -> None:
        async with ready_desk(settings, played) as desk:
            played.broken = 1
            engine = played.actors["engine-1"]
            engine.is_dead = True
            await desk.until(lambda report: played.actors.get("engine-1", engine) is not engine, "another engine")
            await desk.until(lambda report: names(report) == ["engine-1", "engine-2"], "both engines")

    run(work())
