"""Versions in slots: held ones stay, all of a call or none, and reading one keeps nobody waiting."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from inlay.model import SlotSpec
from inlay.model.heads.heads import HeadSpec
from inlay.serving import Engine, Request
from inlay.serving.answers import Resolved
from inlay.settings.run_config import MethodConfig
from inlay.store import Store

SPEC = SlotSpec.of(MethodConfig("pfeiffer", 8), HeadSpec("classify", 3, "mean"))


@pytest.fixture
def kept(tiny_bert, publish_random, tmp_path):
    """A store of six tasks, and each as the engine finds it."""
    store = Store(tmp_path)
    found = {}
    for seed in range(6):
        version = publish_random(store, f"task-{seed}", tiny_bert, SPEC, seed)
        found[version.name] = Resolved(version, store.manifest(version))
    return store, found


def start(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def wait_until(claim, seconds=10.0):
    ends = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_a_held_version_is_not_evicted(tiny_bert, kept):
    store, found = kept
    engine = Engine(tiny_bert, store, num_slots=2)
    held = engine.hot_versions.hold(found["task-0"])
    for name in list(found)[1:]:
        engine.predict([Request(name, "good")])
    assert held in engine.hot_versions.values()
    engine.hot_versions.release([held.version.digest])
    engine.predict([Request(name, "good") for name in ("task-1", "task-2")])
    assert held not in engine.hot_versions.values()


def test_a_call_waits_until_all_its_versions_have_room(tiny_bert, kept):
    store, found = kept
    engine = Engine(tiny_bert, store, num_slots=2)
    hot = engine.hot_versions
    first = hot.hold(found["task-0"])
    answered = threading.Event()

    def ask():
        engine.predict([Request("task-1", "good"), Request("task-2", "good")])
        answered.set()

    start(ask)
    assert not answered.wait(0.2)
    wait_until(lambda: hot.hold_hot(first.version.digest) is None)  # it is to leave, so nobody holds it anew
    hot.release([first.version.digest])
    assert answered.wait(10)


def test_versions_that_are_held_in_turns_for_ever_make_room_for_others(tiny_bert, kept):
    """As batches do, of which the next holds its versions before the last gives them back."""
    store, found = kept
    hot = Engine(tiny_bert, store, num_slots=2).hot_versions
    digests = [hot.hold(found[name]).version.digest for name in ("task-0", "task-1")]
    loaded = threading.Event()

    def load():
        hot.hold(found["task-2"])
        loaded.set()

    start(load)
    ends = time.monotonic() + 10
    while not loaded.is_set():
        assert time.monotonic() < ends
        again = [digest for digest in digests if hot.hold_hot(digest) is not None]
        time.sleep(0.002)
        hot.release(digests)
        digests = again
    assert len(digests) < 2


def test_no_more_versions_are_held_than_there_are_slots(tiny_bert, kept):
    store, found = kept
    engine = Engine(tiny_bert, store, num_slots=2)
    hot = engine.hot_versions
    for name in ("task-0", "task-1"):
        engine.load(found[name].version)
    first, second = (found[name].version.digest for name in ("task-0", "task-1"))
    reading = threading.Event()
    go_on = threading.Event()
    plain = store.load

    def read(*arguments, **settings):
        reading.set()
        go_on.wait(10)
        return plain(*arguments, **settings)

    store.load = read
    thread = start(lambda: hot.hold(found["task-2"]))
    assert reading.wait(10)
    assert hot.hold_hot(first) is not None
    assert hot.hold_hot(second) is None  # the last slot is for the version that is being read
    go_on.set()
    thread.join(10)
    assert {each.version.name for each in hot.values()} == {"task-0", "task-2"}


def test_reading_a_version_keeps_no_other_request_waiting(tiny_bert, kept, monkeypatch):
    store, _ = kept
    engine = Engine(tiny_bert, store, num_slots=3)
    engine.predict([Request("task-0", "good")])
    reading, go_on = threading.Event(), threading.Event()
    plain = Store.load

    def read(self, version, **settings):
        reading.set()
        assert go_on.wait(10)
        return plain(self, version, **settings)

    monkeypatch.setattr(Store, "load", read)
    slow = []
    thread = start(lambda: slow.extend(engine.predict([Request("task-1", "good")])))
    assert reading.wait(10)
    (answer,) = engine.predict([Request("task-0", "good")])
    assert answer.error is None
    assert not slow
    go_on.set()
    thread.join(10)
    assert slow[0].error is None


def test_a_version_that_several_want_is_read_once(tiny_bert, kept, monkeypatch):
    store, _ = kept
    engine = Engine(tiny_bert, store, num_slots=3)
    calls = []
    plain = Store.load

    def read(self, version, **settings):
        calls.append(version)
        time.sleep(0.05)
        return plain(self, version, **settings)

    monkeypatch.setattr(Store, "load", read)
    threads = [start(lambda: engine.predict([Request("task-1", "good")])) for _ in range(4)]
    for thread in threads:
        thread.join(10)
    assert len(calls) == 1


def test_a_version_that_cannot_be_read_leaves_its_slot_to_others(tiny_bert, kept, monkeypatch):
    store, _ = kept
    engine = Engine(tiny_bert, store, num_slots=1)
    plain = Store.load

    def read(self, version, **settings):
        if version.name == "task-1":
            raise MemoryError
        return plain(self, version, **settings)

    monkeypatch.setattr(Store, "load", read)
    for _ in range(3):
        bad, good = engine.predict([Request("task-1", "good"), Request("task-2", "good")])
        assert bad.error.code == "out-of-memory"
        assert good.error is None


def test_a_forgotten_task_is_in_no_slot_and_is_loaded_anew(tiny_bert, kept):
    store, found = kept
    engine = Engine(tiny_bert, store, num_slots=3)
    before = engine.predict([Request("task-0", "good"), Request("task-1", "good")])
    assert engine.hot_versions.forget(lambda version: version.name == "task-0") == 1
    assert [hot.version.name for hot in engine.hot_versions.values()] == ["task-1"]
    held = engine.hot_versions.hold(found["task-1"])
    assert engine.hot_versions.forget(lambda version: version.name == "task-1") == 0  # it is in use
    engine.hot_versions.release([held.version.digest])
    (again,) = engine.predict([Request("task-0", "good")])
    torch.testing.assert_close(again.logits, before[0].logits, atol=1e-5, rtol=1e-5)
