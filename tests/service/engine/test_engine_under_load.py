"""What waits, what is refused, what is dropped, and what one row or client can do to the others."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
import time
from contextlib import suppress

import msgspec
import pytest
from running_engine import GatedEngine, caller_of, run_engine, wait_until, wire

from inlay.model import SlotSpec
from inlay.model.heads.heads import HeadSpec
from inlay.service.engine import Caller, EngineClient, EngineRefused, SyncEngineClient, WireAnswer, WireError
from inlay.service.engine.protocol import MOST_FRAME_BYTES, AskStats, FrameSplitter, encode_frame, read_reply
from inlay.settings.run_config import MethodConfig
from inlay.store import Store


@pytest.fixture
def kept(tiny_bert, publish_tasks, tmp_path):
    store = Store(tmp_path / "store")
    return store, publish_tasks(store, tiny_bert, 6)


@pytest.fixture
def gated(tiny_bert, kept, tmp_path):
    """A running engine whose batches wait at a gate; its tasks are hot."""
    store, names = kept
    engine = GatedEngine(tiny_bert, store)
    with run_engine(engine, tmp_path / "s") as running:
        client = SyncEngineClient(running.path)
        client.predict(Caller("a"), [wire(name, "hot") for name in names])
        client.close()
        engine.computed.clear()
        yield engine, running, names


def close_gate(engine, running, name):
    """Close the gate, with one row waiting at it; return the thread that asked for it."""
    engine.gate.clear()
    engine.has_arrived.clear()
    thread = threading.Thread(target=lambda: ask_alone(running.path, name, "first"), daemon=True)
    thread.start()
    assert engine.has_arrived.wait(20)
    return thread


def ask_alone(path, name, text, **more):
    client = SyncEngineClient(path)
    try:
        return client.predict(caller_of(name), [wire(name, text)], **more)
    finally:
        client.close()


def test_rows_of_a_client_that_has_gone_are_not_computed(gated):
    engine, running, names = gated
    thread = close_gate(engine, running, names[0])

    async def wait_for(num_requests):
        """Wait until so many requests are under way; the first one waits at the gate."""
        async with asyncio.timeout(20):
            while running.process._tickets_open() != num_requests:
                await asyncio.sleep(0.002)

    async def ask():
        client = EngineClient(running.path)
        gone = asyncio.create_task(client.predict(caller_of(names[1]), [wire(names[1], "gone")] * 3))
        stays = asyncio.create_task(client.predict(caller_of(names[2]), [wire(names[2], "stays")]))
        await wait_for(3)
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone
        await wait_for(2)
        dead = EngineClient(running.path)
        dying = asyncio.create_task(dead.predict(caller_of(names[1]), [wire(names[1], "dead")]))
        await wait_for(3)
        await dead.close()
        with pytest.raises(EngineRefused):
            await dying
        await wait_for(2)
        engine.gate.set()
        found = await stays
        stats = await client.stats()
        await client.close()
        return found, stats

    found, stats = asyncio.run(ask())
    thread.join(10)
    assert isinstance(found.answers[0], WireAnswer)
    assert sorted(text for texts in engine.computed for text in texts) == ["first", "stays"]
    assert stats.queue_rows == 0


def test_a_row_past_its_deadline_is_told_at_once_and_not_computed(gated):
    engine, running, names = gated
    thread = close_gate(engine, running, names[0])
    began = time.monotonic()
    client = SyncEngineClient(running.path)
    (answer,) = client.predict(caller_of(names[1]), [wire(names[1], "late")], deadline_ms=150).answers
    assert 0.1 < time.monotonic() - began < 3
    assert (answer.code, answer.status) == ("deadline", 504)
    engine.gate.set()
    thread.join(10)
    assert isinstance(ask_alone(running.path, names[1], "early", deadline_ms=20_000).answers[0], WireAnswer)
    assert sorted(text for texts in engine.computed for text in texts) == ["early", "first"]
    client.close()


def test_a_tenant_that_used_up_its_minute_is_told_when_to_come_again(gated):
    _, running, names = gated
    client = SyncEngineClient(running.path)
    limited = Caller("a", tokens_per_minute=60)
    rows = [wire(names[0], "the movie was good")] * 20  # of 6 tokens each: more than a minute's, taken at first
    assert client.predict(limited, rows).num_tokens == 120
    for asked in (rows[:1], rows):  # the same for one text and for many
        with pytest.raises(EngineRefused) as refused:
            client.predict(limited, asked)
        assert (refused.value.http_status, refused.value.code) == (429, "tokens-per-minute")
        assert 50 < refused.value.retry_after_s < 130
    assert client.predict(Caller("b", tokens_per_minute=60), rows[:1]).num_tokens == 6
    assert client.stats().per_tenant["a"].num_refused == 2
    client.close()


def test_a_queue_is_bounded_by_the_time_it_takes_and_a_tenant_by_half_of_it(tiny_bert, kept, tmp_path):
    store, names = kept
    engine = GatedEngine(tiny_bert, store)
    with run_engine(engine, tmp_path / "s", most_queue_s=1.0) as running:
        client = SyncEngineClient(running.path)
        client.predict(Caller("a"), [wire(name, "hot") for name in names])
        running.process._rate.learn = lambda work, seconds, busy_s: (
            None
        )  # the batch above may still be about to teach it
        running.process._rate._work, running.process._rate._seconds = 100.0, 1.0  # 100 tokens a second
        threads = [close_gate(engine, running, names[0])]
        text = "the movie was good"  # 6 tokens

        def ask(tenant, number, expected):
            def work():
                own = SyncEngineClient(running.path)
                with suppress(EngineRefused):
                    own.predict(Caller(tenant), [wire(names[1], text)] * number)
                own.close()

            before = client.stats().queue_rows
            if expected:
                threads.append(threading.Thread(target=work, daemon=True))
                threads[-1].start()
                wait_until(lambda: client.stats().queue_rows > before)
                return None
            with pytest.raises(EngineRefused) as refused:
                client.predict(Caller(tenant), [wire(names[1], text)] * number)
            assert refused.value.retry_after_s >= 1
            return refused.value.http_status, refused.value.code

        running.process._former._find_budget = lambda: 0.0  # nothing more goes into the next batch
        ask("a", 8, True)
        assert ask("a", 1, False) == (429, "tenant-queue-full")
        ask("b", 8, True)
        ask("c", 8, True)  # who has nothing in the queue may put in one request
        assert ask("d", 1, False) == (503, "queue-full")
        assert client.stats().queue_s == pytest.approx(1.44)
        running.process._former._find_budget = lambda: 1000.0
        running.loop.call_soon_threadsafe(running.process._former.fill)
        engine.gate.set()
        for thread in threads:
            thread.join(10)
        assert client.predict(Caller("d"), [wire(names[1], text)]).num_tokens == 6
        client.close()


def test_one_large_request_is_taken_by_an_empty_queue(gated):
    _, running, names = gated
    running.process._rate._work, running.process._rate._seconds = 1.0, 1.0
    client = SyncEngineClient(running.path)
    predicted = client.predict(Caller("a"), [wire(names[0], "the movie was good")] * 40)
    assert len(predicted.answers) == 40
    client.close()


def test_loading_a_version_keeps_no_other_row_waiting(tiny_bert, kept, tmp_path, monkeypatch):
    store, names = kept
    reading, go_on = threading.Event(), threading.Event()
    plain = Store.load

    def read(self, version, **settings):
        if version.name == names[0]:
            reading.set()
            assert go_on.wait(20)
        return plain(self, version, **settings)

    monkeypatch.setattr(Store, "load", read)
    engine = GatedEngine(tiny_bert, store)
    with run_engine(engine, tmp_path / "s") as running:
        slow = []
        thread = threading.Thread(target=lambda: slow.append(ask_alone(running.path, names[0], "cold")))
        thread.start()
        assert reading.wait(10)
        for name in names[1:]:
            assert isinstance(ask_alone(running.path, name, "others").answers[0], WireAnswer)
        assert not slow
        go_on.set()
        thread.join(10)
        assert isinstance(slow[0].answers[0], WireAnswer)


def test_a_version_that_cannot_be_loaded_is_the_error_of_its_rows(tiny_bert, kept, tmp_path):
    store, names = kept
    version = store.resolve(names[0])
    path = next((tmp_path / "store" / "objects").rglob(f"{version.digest}.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    with run_engine(GatedEngine(tiny_bert, store), tmp_path / "s") as running:
        client = SyncEngineClient(running.path)
        for _ in range(3):
            bad, good = client.predict(Caller("a"), [wire(names[0], "why"), wire(names[1], "why")]).answers
            assert isinstance(bad, WireError)
            assert bad.code == "store-damaged"
            assert isinstance(good, WireAnswer)
        assert client.stats().num_load_failures == 1  # not tried again at once
        client.close()


def test_more_hot_tasks_than_slots_take_turns(tiny_bert, kept, tmp_path):
    """Two slots, and clients that ask two tasks all the time: a third one gets its turn."""
    store, names = kept
    with run_engine(GatedEngine(tiny_bert, store, num_slots=2), tmp_path / "s") as running:

        async def ask():
            client = EngineClient(running.path)
            stop = asyncio.Event()

            async def ask_again(name):
                count = 0
                while not stop.is_set():
                    (answer,) = (await client.predict(caller_of(name), [wire(name, "again")])).answers
                    assert isinstance(answer, WireAnswer)
                    count += 1
                return count

            asking = [asyncio.create_task(ask_again(name)) for name in names[:2] * 4]
            await asyncio.sleep(0.3)
            found = [await client.predict(caller_of(name), [wire(name, "cold")]) for name in names[2:] * 2]
            stop.set()
            counts = await asyncio.gather(*asking)
            await client.close()
            return found, counts

        found, counts = asyncio.run(asyncio.wait_for(ask(), 60))
    assert all(isinstance(answer, WireAnswer) for predicted in found for answer in predicted.answers)
    assert min(counts) > 0


class ShortOfMemory(GatedEngine):
    """An engine with memory for two rows at a time, and none for a text called `huge`."""

    def _answer_together(self, batch, states):
        if len(batch) > 2 or any("huge" in item.checked.request.text for item in batch):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return super()._answer_together(batch, states)


def test_out_of_memory_costs_the_row_that_is_too_large_alone(tiny_bert, kept, tmp_path):
    store, names = kept
    with run_engine(ShortOfMemory(tiny_bert, store), tmp_path / "s") as running:
        client = SyncEngineClient(running.path)
        rows = [wire(name, text) for name in names for text in ("why", "huge", "good")]
        answers = client.predict(Caller("a"), rows).answers
        client.close()
    for row, answer in zip(rows, answers, strict=True):
        if row.text == "huge":
            assert (answer.code, answer.status) == ("out-of-memory", 507)
        else:
            assert isinstance(answer, WireAnswer)


def test_outputs_that_are_no_numbers_are_the_error_of_their_rows(tiny_bert, kept, publish_random, tmp_path):
    import torch

    store, names = kept
    loaded = store.load(store.resolve(names[0]))
    lost = {**loaded.tensors, "head.bias": torch.full_like(loaded.tensors["head.bias"], torch.nan)}
    store.publish(names[0], lost, loaded.manifest)
    with run_engine(GatedEngine(tiny_bert, store), tmp_path / "s") as running:
        client = SyncEngineClient(running.path)
        answers = client.predict(Caller("a"), [wire(names[0], "why", number) for number in (1, 2)]).answers
        client.close()
    assert isinstance(answers[0], WireAnswer)
    assert answers[1].code == "not-finite"
    assert names[0] not in answers[1].message  # its tenant knows the task by another name


def connect(path):
    found = socket.socket(socket.AF_UNIX)
    found.settimeout(10)
    found.connect(str(path))
    return found


def read_replies(connection, number=None):
    """The next replies on a connection, or all until it ends."""
    splitter, found = FrameSplitter(), []
    while number is None or len(found) < number:
        data = connection.recv(1 << 16)
        if not data:
            return found
        found += [read_reply(body) for body in splitter.feed(data)]
    return found


def frame(body):
    return len(body).to_bytes(4, "big") + body


def test_bytes_that_are_no_message_cost_only_their_sender(gated):
    _, running, names = gated
    chosen = random.Random(0)
    good = encode_frame(AskStats(7))
    # a frame that is no question is refused, and the connection goes on
    for body in (
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode(["predict", 1]),
        b"\x93" * 9000,
    ):
        connection = connect(running.path)
        connection.sendall(frame(body) + good)
        refused, stats = read_replies(connection, 2)
        assert (refused.code, refused.id, stats.id) == ("bad-frame", 0, 7)
        connection.close()
    # a frame that is too long ends its connection
    connection = connect(running.path)
    connection.sendall((MOST_FRAME_BYTES + 1).to_bytes(4, "big") + b"x" * 100)
    assert [reply.code for reply in read_replies(connection)] == ["bad-frame"]
    connection.close()
    # half a frame, and a client that dies in the middle of it; random bytes
    for _ in range(30):
        connection = connect(running.path)
        connection.sendall(good[: chosen.randrange(len(good))] if chosen.random() < 0.5 else chosen.randbytes(200))
        connection.close()
    assert isinstance(ask_alone(running.path, names[0], "why").answers[0], WireAnswer)


def test_a_client_that_dies_while_its_rows_are_computed_costs_only_itself(gated):
    engine, running, names = gated
    engine.gate.clear()
    connection = connect(running.path)
    from inlay.service.engine.protocol import Predict

    connection.sendall(encode_frame(Predict(1, Caller("a"), [wire(names[0], "gone")])))
    wait_until(lambda: running.process._tickets_open())
    connection.close()
    wait_until(lambda: not running.process._tickets_open())
    engine.gate.set()
    assert isinstance(ask_alone(running.path, names[0], "why").answers[0], WireAnswer)
    client = SyncEngineClient(running.path)
    assert client.stats().queue_rows == 0
    client.close()


def test_an_id_that_is_in_use_is_refused(gated):
    engine, running, names = gated
    from inlay.service.engine.protocol import Predict

    engine.gate.clear()
    connection = connect(running.path)
    question = encode_frame(Predict(1, Caller("a"), [wire(names[0], "twice")]))
    connection.sendall(question + question)
    (refused,) = read_replies(connection, 1)
    assert refused.code == "bad-frame"
    engine.gate.set()
    (predicted,) = read_replies(connection, 1)
    assert len(predicted.answers) == 1
    connection.close()


def test_a_drain_answers_what_was_taken_and_takes_nothing_new(gated):
    engine, running, names = gated
    thread = close_gate(engine, running, names[0])
    found = []
    second = threading.Thread(target=lambda: found.append(ask_alone(running.path, names[1], "second")))
    second.start()
    wait_until(lambda: running.process._tickets_open() == 2)
    drained = threading.Event()
    drain = threading.Thread(target=lambda: (running.call(running.process.drain()), drained.set()))
    drain.start()
    wait_until(lambda: running.process._is_draining)
    with pytest.raises(EngineRefused) as refused:
        ask_alone(running.path, names[2], "third")
    assert (refused.value.http_status, refused.value.code) == (503, "draining")
    assert not drained.is_set()
    engine.gate.set()
    for each in (thread, second, drain):
        each.join(10)
    assert drained.is_set()
    assert isinstance(found[0].answers[0], WireAnswer)


def test_a_lost_engine_is_told_and_a_new_one_is_found(tiny_bert, kept, tmp_path):
    store, names = kept
    path = tmp_path / "s"
    client = SyncEngineClient(path)

    async def ask():
        return await EngineClient(path).stats()

    for call in (client.stats, lambda: asyncio.run(ask())):
        with pytest.raises(EngineRefused) as refused:
            call()
        assert (refused.value.code, refused.value.http_status) == ("engine-lost", 503)
    for _ in range(2):
        with run_engine(GatedEngine(tiny_bert, store), path):
            assert client.predict(Caller("a"), [wire(names[0], "why")]).num_tokens
    client.close()


def test_a_text_asked_of_many_tasks_is_shared_within_a_tenant_alone(tiny_bert, publish_random, tmp_path, monkeypatch):
    monkeypatch.setattr("inlay.serving.shared_texts.LAUNCH_TOKENS", {"cpu": 0})
    store = Store(tmp_path / "store")
    spec = SlotSpec.of(MethodConfig("head"), HeadSpec("classify", 3, "mean"))
    names = [f"{tenant}.task-{index}" for tenant in "ab" for index in range(4)]
    for seed, name in enumerate(names):
        publish_random(store, name, tiny_bert, spec, seed)
    counts = []
    handle = tiny_bert._blocks[0].inner.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append((args[0] if args else kwargs["hidden_states"]).shape[:-1].numel()),
        with_kwargs=True,
    )
    engine = GatedEngine(tiny_bert, store)
    length = len(tiny_bert.tokenizer("the movie was good")["input_ids"])
    with run_engine(engine, tmp_path / "s", target_batch_ms=10_000.0) as running:
        ask_all(running.path, names, "hot")
        thread = close_gate(engine, running, names[0])
        counts.clear()
        engine.computed.clear()
        asking = [
            threading.Thread(target=lambda own=own: ask_all(running.path, own, "the movie was good"))
            for own in (names[:4], names[4:])
        ]
        for each in asking:
            each.start()
        wait_until(lambda: running.process._tickets_open() == 3)
        wait_until(lambda: len(running.process._former._next.rows) == 8)
        engine.gate.set()
        for each in (thread, *asking):
            each.join(10)
    handle.remove()
    assert [len(texts) for texts in engine.computed] == [1, 8]
    assert sum(counts[1:]) == 2 * length


def ask_all(path, names, text):
    client = SyncEngineClient(path)
    answers = client.predict(caller_of(names[0]), [wire(name, text) for name in names]).answers
    client.close()
    assert all(isinstance(answer, WireAnswer) for answer in answers)


def test_the_socket_is_private(gated):
    _, running, _ = gated
    assert os.stat(running.path).st_mode & 0o777 == 0o600
