"""Several engines asked as one: another one answers when one is lost, and every row gets its own answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from inlay.service.engine import (
    Caller,
    EngineClient,
    EngineRefused,
    FleetClient,
    Predicted,
    Replica,
    Roster,
    RosterFile,
    SyncFleetClient,
    TcpAddress,
    VersionLoaded,
    WireAnswer,
    WireRow,
)
from inlay.service.engine.engine_connections import EngineConnection, bind_port
from inlay.service.engine.placement import order_for
from inlay.service.engine.protocol import AskProbe, LoadVersion, Predict, Probed, Refused

TOKEN = "t" * 64
ME = Caller("local")


class StandIn:
    """An engine's port that answers each row with its text and the engine's name, or as `reply` says."""

    def __init__(self, name: str) -> None:
        self.name, self.asked, self.loaded = name, [], []
        self.reply: Callable[[Any], Any] | None = None
        self.connections: list[EngineConnection] = []

    async def start(self) -> Replica:
        listener = bind_port("127.0.0.1")
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(self._connect, sock=listener)
        return Replica(self.name, "127.0.0.1", listener.getsockname()[1])

    def _connect(self) -> EngineConnection:
        self.connections.append(EngineConnection(self._ask, lambda connection: None, token=TOKEN.encode()))
        return self.connections[-1]

    def _ask(self, question: Any, connection: EngineConnection) -> None:
        if self.reply is not None:
            found = self.reply(question)
            if found is not None:
                connection.reply(found)
            return
        if isinstance(question, Predict):
            self.asked.append(question)
            answers = [
                WireAnswer(row.store_name, row.number, {"by": self.name, "text": row.text}) for row in question.rows
            ]
            connection.reply(Predicted(question.id, answers, len(answers), 1.0, 2.0))
        elif isinstance(question, LoadVersion):
            self.loaded.append((question.store_name, question.number))
            connection.reply(VersionLoaded(question.id, 0.1, 3))
        elif isinstance(question, AskProbe):
            connection.reply(Probed(question.id, 0.1))

    def die(self) -> None:
        """End as a killed process does."""
        self.server.close()
        for connection in self.connections:
            connection.close()


@asynccontextmanager
async def fleet(tmp_path: Path, number: int = 2, *, is_crowded: bool = False) -> AsyncIterator[Any]:
    engines = [StandIn(f"engine-{place + 1}") for place in range(number)]
    file = RosterFile(tmp_path / "roster.json")
    roster = Roster(1, TOKEN, tuple([await each.start() for each in engines]), is_crowded)
    file.write(roster)
    client = FleetClient(file)
    try:
        yield client, engines, roster
    finally:
        await client.close()
        for each in engines:
            each.die()


def rows_of(*tasks: str) -> list[WireRow]:
    return [WireRow(task, task, 1, f"text {place}") for place, task in enumerate(tasks)]


def run(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def test_a_request_goes_to_one_engine_and_its_answers_come_back(tmp_path):
    async def work() -> None:
        async with fleet(tmp_path) as (client, engines, _):
            found = await client.predict(ME, rows_of("a", "b", "a"))
            assert [each.answer["text"] for each in found.answers] == ["text 0", "text 1", "text 2"]
            assert sorted(len(each.asked) for each in engines) == [0, 1]
            assert (await client.probe()).seconds > 0

    run(work())


def test_where_tasks_have_their_own_engines_a_request_is_shared_and_rows_keep_their_order(tmp_path):
    async def work() -> None:
        async with fleet(tmp_path, 3, is_crowded=True) as (client, engines, roster):
            tasks = [f"task-{number % 20}" for number in range(60)]
            found = await client.predict(ME, rows_of(*tasks))
            assert [each.answer["text"] for each in found.answers] == [f"text {place}" for place in range(60)]
            assert found.num_tokens == 60
            assert [each.answer["by"] for each in found.answers] == [order_for(task, roster)[0].name for task in tasks]
            assert all(len(each.asked) == 1 for each in engines)

    run(work())


def test_rows_under_way_on_an_engine_that_dies_are_answered_by_another(tmp_path):
    async def work() -> None:
        async with fleet(tmp_path) as (client, engines, _):
            for each in engines:
                each.reply = lambda question: None  # takes the rows, and says nothing
            asking = [asyncio.ensure_future(client.predict(ME, rows_of("a"))) for _ in range(20)]
            await asyncio.sleep(0.3)
            first, second = engines
            second.reply = None
            first.die()
            second.connections[0].close()
            found = await asyncio.gather(*asking)
            assert {each.answers[0].answer["by"] for each in found} == {"engine-2"}

    run(work())


def test_an_engine_with_a_full_queue_costs_a_request_nothing_while_another_has_room(tmp_path):
    async def work() -> None:
        async with fleet(tmp_path) as (client, engines, _):
            engines[0].reply = lambda question: Refused(question.id, "queue-full", "full", None, 503, 2.0)
            for _ in range(10):
                found = await client.predict(ME, rows_of("a"))
                assert found.answers[0].answer["by"] == "engine-2"
            engines[1].reply = lambda question: Refused(question.id, "tokens-per-minute", "used up", None, 429, 1.0)
            with pytest.raises(EngineRefused) as refused:
                await client.predict(ME, rows_of("a"))
            assert (refused.value.http_status, refused.value.retry_after_s) == (429, 1.0)

    run(work())


def test_what_is_wrong_with_a_request_is_not_asked_twice(tmp_path):
    async def work() -> None:
        async with fleet(tmp_path) as (client, engines, _):
            asked = []
            for each in engines:
                each.reply = lambda question: asked.append(question) or Refused(question.id, "bad", "bad", None, 400)
            with pytest.raises(EngineRefused, match="bad"):
                await client.predict(ME, rows_of("a"))
            assert len(asked) == 1

    run(work())


def test_without_any_engine_who_asks_waits_a_while_and_is_then_told(tmp_path, monkeypatch):
    monkeypatch.setattr("inlay.service.engine.fleet_client.LOST_PATIENCE_S", 0.5)

    async def work() -> None:
        async with fleet(tmp_path, 0) as (client, _, _):
            with pytest.raises(EngineRefused, match="no engine of the cluster") as refused:
                await client.predict(ME, rows_of("a"))
            assert (refused.value.http_status, refused.value.code) == (503, "engine-lost")
            asking = asyncio.ensure_future(client.predict(ME, rows_of("a")))
            await asyncio.sleep(0.1)
            late = StandIn("engine-9")
            RosterFile(tmp_path / "roster.json").write(Roster(2, TOKEN, (await late.start(),)))
            assert (await asking).answers[0].answer["by"] == "engine-9"
            late.die()

    run(work())


def test_a_deadline_is_kept_while_engines_are_looked_for(tmp_path):
    async def work() -> None:
        async with fleet(tmp_path, 0) as (client, _, _):
            began = time.monotonic()
            with pytest.raises(EngineRefused):
                await client.predict(ME, rows_of("a"), deadline_ms=200)
            assert time.monotonic() - began < 2.0

    run(work())


def test_a_version_is_loaded_by_all_engines_that_are_there(tmp_path):
    async def work() -> None:
        async with fleet(tmp_path, 3) as (client, engines, _):
            assert (await client.load("a", 7)).num_probes == 3
            assert all(each.loaded == [("a", 7)] for each in engines)
            engines[0].die()
            await client.load("a", 8)
            assert engines[1].loaded == [("a", 7), ("a", 8)]
            engines[1].reply = lambda question: Refused(question.id, "store-damaged", "another answer", None, 500)
            with pytest.raises(EngineRefused, match="another answer"):
                await client.load("a", 9)

    run(work())


def test_an_engine_says_nothing_to_who_does_not_know_the_token(tmp_path):
    async def work() -> None:
        async with fleet(tmp_path, 1) as (_, engines, roster):
            replica = roster.replicas[0]
            for token in ("x" * 64, "t" * 63 + "x"):
                stranger = EngineClient(TcpAddress(replica.host, replica.port, token))
                with pytest.raises(EngineRefused, match="is not running"):
                    await stranger.predict(ME, rows_of("a"))
            assert engines[0].asked == []
            known = EngineClient(TcpAddress(replica.host, replica.port, TOKEN))
            assert len((await known.predict(ME, rows_of("a"))).answers) == 1
            await known.close()

    run(work())


def test_a_thread_may_ask_and_wait(tmp_path):
    async def work() -> None:
        async with fleet(tmp_path) as (_, engines, _):
            client = SyncFleetClient(RosterFile(tmp_path / "roster.json"))
            found = await asyncio.to_thread(client.predict, ME, rows_of("a", "b"))
            assert len(found.answers) == 2
            await asyncio.to_thread(client.load, "a", 1)
            assert all(each.loaded for each in engines)
            await asyncio.to_thread(client.close)

    run(work())


def test_a_roster_that_is_damaged_leaves_the_last_one(tmp_path, monkeypatch):
    monkeypatch.setattr("inlay.service.engine.roster._LOOK_S", 0.0)
    file = RosterFile(tmp_path / "roster.json")
    assert file.read() == Roster()
    roster = Roster(3, TOKEN, (Replica("engine-1", "h", 1),))
    file.write(roster)
    assert file.read() == roster
    (tmp_path / "roster.json").write_text("{")
    assert file.read() == roster


def test_a_stranger_does_not_learn_how_many_letters_of_the_token_are_right(tmp_path):
    async def work() -> None:
        async with fleet(tmp_path, 1) as (_, _, roster):
            replica = roster.replicas[0]
            for guess in (b"x", b"t", b"t" * 62 + b"x"):
                reader, writer = await asyncio.open_connection(replica.host, replica.port)
                writer.write(guess)
                with pytest.raises(TimeoutError):  # it is left to wait for the rest, right or wrong
                    await asyncio.wait_for(reader.read(1), 0.2)
                writer.close()

    run(work())


def test_a_thread_that_waits_too_long_gets_a_refusal(tmp_path, monkeypatch):
    monkeypatch.setattr("inlay.service.engine.fleet_client.LOST_PATIENCE_S", 0.1)

    async def work() -> None:
        async with fleet(tmp_path, 1) as (_, engines, _):
            engines[0].reply = lambda question: None
            client = SyncFleetClient(RosterFile(tmp_path / "roster.json"))
            with pytest.raises(EngineRefused, match="did not answer"):
                await asyncio.to_thread(client._wait, client._client.predict(ME, rows_of("a")), 0.1)
            await asyncio.to_thread(client.close)

    run(work())
