"""The engine's process over its socket: every answer is the canonical one of the version it names."""

from __future__ import annotations

import asyncio
import random

import pytest
from running_engine import caller_of, check_same, run_engine, wire

from inlay.service.engine import Caller, EngineClient, EngineRefused, SyncEngineClient, WireAnswer, WireError
from inlay.serving import Engine, Request, describe_answer
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import fit, make_run, publish


@pytest.fixture
def kept(tiny_bert, publish_tasks, tmp_path):
    store = Store(tmp_path / "store")
    return store, publish_tasks(store, tiny_bert, 8)


def test_mixed_tenants_get_the_answers_their_tasks_give_alone(tiny_bert, kept, texts, tmp_path):
    store, names = kept
    alone = Engine(tiny_bert, store)
    rows = [(name, text) for name in names for text in texts]
    random.Random(0).shuffle(rows)
    with run_engine(Engine(tiny_bert, store, num_slots=3), tmp_path / "s") as running:

        async def ask():
            client = EngineClient(running.path)
            asked = [client.predict(caller_of(name), [wire(name, text)]) for name, text in rows]
            found = await asyncio.gather(*asked)
            stats = await client.stats()
            await client.close()
            return found, stats

        found, stats = asyncio.run(ask())
    for (name, text), predicted in zip(rows, found, strict=True):
        (answer,) = predicted.answers
        assert isinstance(answer, WireAnswer), answer
        assert (answer.store_name, answer.number) == (name, 1)
        assert answer.answer["task"] == name.partition(".")[2]
        assert answer.answer["version"] == f"{name.partition('.')[2]}@1"
        check_same(answer.answer, describe_answer(alone.predict([Request(name, text)])[0]))
        assert predicted.num_tokens == len(tiny_bert.tokenizer(text)["input_ids"])
    assert stats.num_rows == len(rows)
    assert sum(load.num_rows for load in stats.per_tenant.values()) == len(rows)
    assert len(stats.resident) == stats.num_slots == 3
    assert stats.queue_rows == stats.queue_tokens == 0


def test_a_bad_row_is_its_own_error_and_names_no_other_tenant(tiny_bert, kept, tmp_path):
    store, names = kept
    with run_engine(Engine(tiny_bert, store), tmp_path / "s") as running:
        client = SyncEngineClient(running.path)
        rows = [
            wire(names[0], "why"),
            wire(names[0], " "),
            wire("a.nothing", "why"),
            wire(names[0], "why", 7),
            wire(names[0], "why", pair="not"),
            wire("../../etc", "why"),
            wire(names[0], "why", min_confidence=float("nan")),
            wire(names[0], "why", min_confidence=0.0),
        ]
        answers = client.predict(Caller("a"), rows).answers
        client.close()
    kinds = ["ok", "bad-data", "unknown-name", "unknown-name", "bad-data", None, "bad-config", "ok"]
    for answer, kind in zip(answers, kinds, strict=True):
        assert isinstance(answer, WireAnswer if kind == "ok" else WireError)
        if isinstance(answer, WireError):
            assert kind in (None, answer.code)
            said = f"{answer.message} {answer.hint}"
            assert not any(name in said for name in names)
            assert str(tmp_path) not in said


def train_and_publish(backbone, task, store, seed=0):
    train = TrainConfig(batch_size=8, max_length=32, epochs=1, lr=5e-3, seed=seed)
    run = make_run(task, RunConfig(method=MethodConfig("houlsby", 8), train=train), backbone)
    (result,) = fit([run], backbone, store.root / "runs")
    return publish(run, result, backbone, store)


def test_probe_and_load_answer_real_rows(tiny_bert, toy_task, tmp_path):
    store = Store(tmp_path / "store")
    version = train_and_publish(tiny_bert, toy_task("mail"), store)
    with run_engine(Engine(tiny_bert, store), tmp_path / "s") as running:
        client = SyncEngineClient(running.path)
        assert client.probe().reference == ""  # through the backbone alone
        assert client.load("mail", 1).num_probes == len(store.manifest(version).probes) > 0
        assert client.stats().resident == ["mail@1"]
        assert client.probe().reference == "mail@1"
        with pytest.raises(EngineRefused) as refused:
            client.load("mail", 2)
        assert (refused.value.code, refused.value.http_status) == ("unknown-name", 404)
        assert client.forget("mail") == 1
        assert client.stats().resident == []
        client.close()


def test_a_version_whose_probes_are_answered_otherwise_is_not_loaded(tiny_bert, toy_task, tmp_path):
    store = Store(tmp_path / "store")
    loaded = store.load(train_and_publish(tiny_bert, toy_task("mail"), store))
    other = {**loaded.tensors, "head.bias": loaded.tensors["head.bias"] + 1}
    store.publish("mail", other, loaded.manifest)
    with run_engine(Engine(tiny_bert, store), tmp_path / "s") as running:
        client = SyncEngineClient(running.path)
        with pytest.raises(EngineRefused) as refused:
            client.load("mail", 2)
        assert refused.value.code == "store-damaged"
        assert "a probe's answer" in refused.value.message
        client.close()
