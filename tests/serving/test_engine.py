"""The engine: any mix of tasks, in order; a bad request spoils no other."""

from __future__ import annotations

import dataclasses
import math
import os
import time

import numpy as np
import pytest
import torch

from inlay.errors import WrongBackbone
from inlay.model import SlotSpec, load_backbone
from inlay.model.heads.heads import HeadSpec
from inlay.serving import Engine, Request, encoded_requests
from inlay.serving.verification import _difference, verify
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import fit, make_run, publish
from predicted import predict_split


def train_and_publish(backbone, task, store, *, method="houlsby", size=8, seed=0):
    train = TrainConfig(batch_size=8, max_length=32, epochs=1, lr=5e-3, seed=seed)
    run = make_run(task, RunConfig(method=MethodConfig(method, size), train=train), backbone)
    (result,) = fit([run], backbone, store.root / "runs")
    return run, result, publish(run, result, backbone, store)


@pytest.fixture(scope="module")
def kept(tiny_bert, toy_task, tmp_path_factory):
    """A store with tasks of 2, 5 and 20 labels, a number and a label set, of both methods and several sizes."""
    store = Store(tmp_path_factory.mktemp("store"))
    tasks = [
        (toy_task("two", num_labels=2), "houlsby", 8),
        (toy_task("five", num_labels=5, seed=1), "pfeiffer", 16),
        (toy_task("twenty", num_labels=20, num_rows=80, seed=2), "houlsby", 3),
        (toy_task("number", kind="regress", seed=3), "houlsby", 24),
        (toy_task("set", kind="multilabel", num_labels=3, seed=4), "pfeiffer", 8),
    ]
    trained = {
        task.name: train_and_publish(tiny_bert, task, store, method=method, size=size) for task, method, size in tasks
    }
    return store, trained


TEXTS = ["the movie was good", "free prize call now", "why", "a very bad film , it is awful", "seven eight nine"]


def test_answers_in_a_mixed_batch_equal_those_alone(tiny_bert, kept):
    store, trained = kept
    requests = [Request(name, text) for text in TEXTS for name in trained]
    together = Engine(tiny_bert, store).predict(requests)
    for request, answer in zip(requests, together, strict=True):
        assert answer.version == f"{request.task}@1"
        alone = Engine(tiny_bert, store).predict([request])[0]
        torch.testing.assert_close(answer.logits, alone.logits, atol=1e-5, rtol=1e-5)
    kinds = {name: set(together[i].to_json()) - {"task", "version"} for i, name in enumerate(trained)}
    assert kinds["two"] == kinds["twenty"] == {"label", "probabilities"}
    assert kinds["number"] == {"value"}
    assert kinds["set"] == {"labels", "probabilities"}
    assert len(together[2].outcome.probabilities) == 20


def test_what_is_served_is_what_was_trained(tiny_bert, kept):
    store, trained = kept
    for name, (run, result, version) in trained.items():
        dev = run.task.dev
        expected = predict_split(run.spec, result.tensors, tiny_bert, dev, run.config.train.max_length)
        answers = Engine(tiny_bert, store).predict([Request(name, text) for text in dev.texts])
        for answer, logits in zip(answers, expected, strict=True):
            torch.testing.assert_close(answer.logits, logits, atol=1e-5, rtol=1e-5)
        stored = store.load(version).tensors
        assert stored.keys() == result.tensors.keys()
        assert all(torch.equal(stored[key], result.tensors[key]) for key in stored)
        assert store.manifest(version).labels == run.task.labels


def test_a_bad_request_gets_its_own_error_and_spoils_no_other(tiny_bert, kept):
    store, _ = kept
    requests = [
        Request("two", "good"),
        Request("tow", "good"),
        Request("two", "   "),
        Request("two", "good", pair="bad"),
        Request("two@9", "good"),
        Request("five", "bad"),
    ]
    answers = Engine(tiny_bert, store).predict(requests)
    assert [answer.error is None for answer in answers] == [True, False, False, False, False, True]
    assert answers[1].error.hint == "did you mean `two`?"
    assert "empty" in answers[2].error.message
    assert "reads one text" in answers[3].error.message
    good = Engine(tiny_bert, store).predict([requests[0], requests[5]])
    assert torch.allclose(answers[0].logits, good[0].logits, atol=1e-5)
    assert torch.allclose(answers[5].logits, good[1].logits, atol=1e-5)
    assert answers[1].to_json()["error"]["code"] == "unknown-name"


def test_more_tasks_than_slots_are_answered_by_turns(tiny_bert, kept):
    store, trained = kept
    small, large = Engine(tiny_bert, store, num_slots=2), Engine(tiny_bert, store)
    requests = [Request(name, text) for text in TEXTS for name in trained]
    for _ in range(2):  # the second time with slots that hold other tasks
        for a, b in zip(small.predict(requests), large.predict(requests), strict=True):
            torch.testing.assert_close(a.logits, b.logits, atol=1e-5, rtol=1e-5)
    assert len(small.hot_versions.values()) == 2


def test_the_least_recently_used_task_leaves(tiny_bert, kept):
    store, _ = kept
    engine = Engine(tiny_bert, store, num_slots=2)
    for name in ("two", "five", "two", "twenty"):
        engine.predict([Request(name, "good")])
    assert {hot.version.name for hot in engine.hot_versions.values()} == {"two", "twenty"}


def test_a_new_version_answers_from_the_next_request_on(tiny_bert, toy_task, tmp_path):
    store, engine = Store(tmp_path), None
    train_and_publish(tiny_bert, toy_task("two"), store, seed=0)
    engine = Engine(tiny_bert, store)
    assert engine.predict([Request("two", "good")])[0].version == "two@1"
    train_and_publish(tiny_bert, toy_task("two"), store, seed=1)
    assert engine.predict([Request("two", "good")])[0].version == "two@2"
    assert engine.predict([Request("two@1", "good")])[0].version == "two@1"


def test_a_version_of_another_backbone_is_refused_naming_both(backbone_of, kept):
    store, _ = kept
    roberta = backbone_of("roberta")
    (answer,) = Engine(roberta, store).predict([Request("two", "good")])
    assert isinstance(answer.error, WrongBackbone)
    assert roberta.name in answer.error.message
    assert backbone_of("bert").name in answer.error.message


def test_a_damaged_version_is_an_error_for_its_own_requests_only(tiny_bert, toy_task, tmp_path):
    store = Store(tmp_path)
    for seed, name in enumerate(("good", "bad")):
        train_and_publish(tiny_bert, toy_task(name, seed=seed), store)
    damaged = store.resolve("bad")
    path = next((tmp_path / "objects").rglob(f"{damaged.digest}.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    for num_slots in (1, 2):
        good, bad = Engine(tiny_bert, store, num_slots=num_slots).predict(
            [Request("good", "why"), Request("bad", "why")]
        )
        assert bad.error.code == "store-damaged"
        assert good.outcome.label.startswith("label-")


def publish_lost(store, version, name):
    """The same version with a head that is NaN."""
    loaded = store.load(version)
    tensors = {**loaded.tensors, "head.bias": torch.full_like(loaded.tensors["head.bias"], torch.nan)}
    return store.publish(name, tensors, loaded.manifest)


def test_outputs_that_are_not_finite_are_an_error_for_their_own_requests_only(tiny_bert, kept):
    store, trained = kept
    lost = [publish_lost(store, version, f"lost-{name}").name for name, (_, _, version) in trained.items()]
    requests = [Request(name, "why") for pair in zip(trained, lost, strict=True) for name in pair]
    answers = Engine(tiny_bert, store).predict(requests)
    for request, answer in zip(requests, answers, strict=True):
        if request.task in trained:
            assert answer.error is None
            continue
        assert answer.error.code == "not-finite"
        assert answer.error.message == f"the outputs of `{request.task}@1` are not finite for this text"
        assert answer.to_json().keys() == {"task", "error"}
    alone = Engine(tiny_bert, store).predict([requests[0]])[0]
    torch.testing.assert_close(answers[0].logits, alone.logits, atol=1e-5, rtol=1e-5)


def test_verify_finds_outputs_that_are_not_finite(tiny_bert, kept):
    store, trained = kept
    (check,) = verify([publish_lost(store, trained["two"][2], "lost")], tiny_bert, store)
    assert "the outputs of `lost@1` are not finite" in check.problem


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e300])
def test_an_answer_that_is_not_finite_is_an_error_of_its_own_task(tiny_bert, kept, tmp_path, temperature):
    """Its outputs are, but what would be made of them is not: of a temperature that cannot be, no slot is made."""
    store, _ = kept
    other = Store(tmp_path)
    for name in ("five", "two"):
        loaded = store.load(store.resolve(name))
        own = {} if name == "two" else {"head": loaded.manifest.head | {"temperature": temperature}}
        tensors = {
            key: torch.zeros_like(value) if key.startswith("head.") and own else value
            for key, value in loaded.tensors.items()
        }
        tensors["head.bias"][:1] += 1000 if temperature and own else 0
        other.publish(name, tensors, dataclasses.replace(loaded.manifest, **own))
    lost, sound = Engine(tiny_bert, other).predict([Request("five", "why"), Request("two", "why")])
    assert sound.error is None
    assert lost.error.code == "store-damaged"
    words = f"has the temperature `{temperature}`, which it cannot be"
    assert words in lost.error.message
    (check,) = verify([other.resolve("five")], tiny_bert, other)
    assert words in check.problem


def test_verify_finds_weights_that_are_not_finite_where_no_probe_reads_them(tiny_bert, kept, tmp_path):
    store, _ = kept
    loaded = store.load(store.resolve("two"))
    other = Store(tmp_path)
    plain = dataclasses.replace(loaded.manifest, probes=())
    sound = other.publish("sound", loaded.tensors, plain)
    lost = {**loaded.tensors, "head.bias": torch.full_like(loaded.tensors["head.bias"], torch.nan)}
    checks = verify([sound, other.publish("lost", lost, plain)], tiny_bert, other)
    assert [check.problem for check in checks] == ["", "tensor `head.bias` has values that are not finite"]


def test_a_difference_that_is_nan_is_not_hidden_by_one_before_it():
    first, second = torch.zeros(2), torch.tensor([0.0, torch.nan])
    assert math.isnan(_difference([first, first], [first, second]))
    assert math.isnan(_difference([first, first], [second, first]))


def test_verify_proves_every_version_bit_for_bit_and_through_the_engine(tiny_bert, kept):
    store, trained = kept
    versions = [version for _, _, version in trained.values()]
    heard = []
    checks = verify(versions, tiny_bert, store, on_check=heard.append)
    assert checks == heard
    assert all(check.stands and check.is_exact and check.canonical_difference == 0 for check in checks)
    assert all(check.engine_difference < 1e-4 for check in checks)


def test_published_versions_stand_after_more_tasks_and_in_a_new_process_of_the_backbone(
    tiny_bert_folder, toy_task, tmp_path
):
    store = Store(tmp_path)
    first = load_backbone(str(tiny_bert_folder), device="cpu")
    _, _, version = train_and_publish(first, toy_task("one"), store)
    for seed in range(3):
        train_and_publish(first, toy_task(f"later-{seed}", num_labels=3 + seed, seed=seed), store, size=8 + 8 * seed)
    again = load_backbone(str(tiny_bert_folder), device="cpu")
    assert again.fingerprint == first.fingerprint
    versions = [info.version for task in store.ledger() for info in task.versions]
    checks = verify(versions, again, store)
    assert len(checks) == 4
    assert all(check.stands and check.is_exact for check in checks)
    assert version in versions


def test_verify_finds_a_changed_byte_a_changed_answer_and_a_wrong_backbone(backbone_of, toy_task, tmp_path):
    bert = backbone_of("bert")
    store = Store(tmp_path)
    _, result, _ = train_and_publish(bert, toy_task("task"), store)
    manifest = store.manifest(store.resolve("task"))
    probe = manifest.probes[0]
    off = dataclasses.replace(probe, logits=tuple(value + 1e-3 for value in probe.logits))
    lied = store.publish("lied", result.tensors, dataclasses.replace(manifest, probes=(off, *manifest.probes[1:])))
    (check,) = verify([lied], bert, store)
    assert "off by" in check.problem
    (check,) = verify([store.resolve("task")], backbone_of("roberta"), store)
    assert "was trained on the backbone" in check.problem
    path = next((tmp_path / "objects").rglob(f"{lied.digest}.safetensors"))
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.chmod(0o644)
    path.write_bytes(content)
    (check,) = verify([lied], bert, store)
    assert not check.stands


def test_elsewhere_probes_are_compared_with_a_tolerance_and_it_says_so(tiny_bert, toy_task, tmp_path):
    store = Store(tmp_path)
    _, result, version = train_and_publish(tiny_bert, toy_task("task"), store)
    manifest = store.manifest(version)
    sidecar = store.sidecar(version)
    elsewhere = {**sidecar, "environment": {**sidecar["environment"], "processor": "another"}}
    nearly = [
        dataclasses.replace(probe, logits=tuple(value + 1e-6 for value in probe.logits)) for probe in manifest.probes
    ]
    other = store.publish("other", result.tensors, dataclasses.replace(manifest, probes=tuple(nearly)), elsewhere)
    (check,) = verify([other], tiny_bert, store)
    assert check.stands
    assert not check.is_exact
    assert 0 < check.canonical_difference < 1e-4


def test_where_probes_were_answered_one_bit_is_a_problem(tiny_bert, toy_task, tmp_path):
    """Same machine, same libraries: the next float32 number is within every tolerance, and is not the answer."""
    store = Store(tmp_path)
    _, result, version = train_and_publish(tiny_bert, toy_task("task"), store)
    manifest, sidecar = store.manifest(version), store.sidecar(version)
    first, *others = manifest.probes
    logits = np.array(first.logits, dtype=np.float32)
    logits[0] = np.nextafter(logits[0], np.float32(np.inf))
    probes = (dataclasses.replace(first, logits=tuple(logits.tolist())), *others)
    nearly = store.publish("nearly", result.tensors, dataclasses.replace(manifest, probes=probes), sidecar)
    (check,) = verify([nearly], tiny_bert, store)
    assert check.is_exact
    assert 0 < check.canonical_difference < 1e-6
    assert not check.stands
    assert "not bit-identical" in check.problem


def test_verify_finds_an_engine_that_answers_otherwise(tiny_bert, kept):
    """The canonical answers stand; what is served in a mixed batch does not."""
    store, trained = kept

    class Off(Engine):
        def predict(self, requests):
            return [dataclasses.replace(answer, logits=answer.logits + 0.05) for answer in super().predict(requests)]

    versions = [version for _, _, version in trained.values()]
    checks = verify(versions, tiny_bert, store, engine=Off(tiny_bert, store))
    assert all(check.canonical_difference == 0 for check in checks)
    assert all("in a mixed batch is off by" in check.problem for check in checks)


def count_calls(monkeypatch, *names):
    """How often each method of the store is called from now on."""
    calls = dict.fromkeys(names, 0)
    for name in names:

        def call(self, *arguments, name=name, plain=getattr(Store, name), **settings):
            calls[name] += 1
            return plain(self, *arguments, **settings)

        monkeypatch.setattr(Store, name, call)
    return calls


def test_a_batch_reads_the_store_once_for_a_task_and_not_at_all_when_it_is_hot(
    tiny_bert, publish_random, tmp_path, monkeypatch
):
    store = Store(tmp_path)
    spec = SlotSpec.of(MethodConfig("houlsby", 8), HeadSpec("classify", 2, "mean"))
    names = [f"task-{index}" for index in range(6)]
    for seed, name in enumerate(names):
        publish_random(store, name, tiny_bert, spec, seed)
    monkeypatch.setattr("inlay.store.folder._SETTLED_NS", 0)
    time.sleep(0.05)
    calls = count_calls(monkeypatch, "resolve", "manifest", "load")
    engine = Engine(tiny_bert, store, num_slots=6)
    requests = [Request(name, text) for text in TEXTS for name in names]
    cold = engine.predict(requests)
    assert calls == {"resolve": 6, "manifest": 6, "load": 6}
    hot = engine.predict(requests)
    assert calls == {"resolve": 6, "manifest": 6, "load": 6}
    assert [answer.version for answer in hot] == [answer.version for answer in cold]


def test_a_name_that_was_settled_is_looked_up_again_when_its_versions_change(
    tiny_bert, publish_random, tmp_path, monkeypatch
):
    store = Store(tmp_path)
    spec = SlotSpec.of(MethodConfig("houlsby", 8), HeadSpec("classify", 2, "mean"))
    monkeypatch.setattr("inlay.store.folder._SETTLED_NS", 0)
    engine = Engine(tiny_bert, store)
    for number in (1, 2):
        publish_random(store, "task", tiny_bert, spec, number)
        time.sleep(0.05)  # longer than a tick of the file system's clock
        assert engine.predict([Request("task", "good")])[0].version == f"task@{number}"
    store.remove("task@2")
    time.sleep(0.05)
    assert engine.predict([Request("task", "good")])[0].version == "task@1"
    assert engine.predict([Request("task@2", "good")])[0].error.code == "unknown-name"
    store.remove("task")
    assert engine.predict([Request("task", "good")])[0].error.code == "unknown-name"


def test_a_name_that_changed_just_now_has_no_stamp(tiny_bert, publish_random, tmp_path):
    store = Store(tmp_path)
    spec = SlotSpec.of(MethodConfig("houlsby", 8), HeadSpec("classify", 2, "mean"))
    publish_random(store, "task", tiny_bert, spec)
    assert store.stamp("task") is None
    long_ago = time.time() - 60
    os.utime(tmp_path / "tasks" / "task", (long_ago, long_ago))
    assert store.stamp("task") == store.stamp("task@1") == store.stamp("task@best") is not None
    assert store.stamp("nope") is store.stamp("../tasks/task") is None


class Odd:
    """A text that is none, and breaks whoever looks at it."""

    def __len__(self) -> int:
        raise RuntimeError("odd")


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (Request("two", "half a \ud83d character"), "bad-data"),
        (Request("two", b"bytes"), "bad-data"),  # type: ignore[arg-type]
        (Request("two", Odd()), "bad-data"),  # type: ignore[arg-type]
        (Request("two", "a " * 5_000_000), "bad-data"),
        (Request(7, "why"), "bad-data"),  # type: ignore[arg-type]
        (Request(["two"], "why"), "bad-data"),  # type: ignore[arg-type]
        (Request(None, "why"), "bad-data"),  # type: ignore[arg-type]
        (Request("t" * 5_000_000, "why"), "bad-data"),
        (Request("two\0", "why"), "unknown-name"),
        (Request("\ud800", "why"), "unknown-name"),
        (Request("two", "why", min_confidence="much"), "bad-config"),  # type: ignore[arg-type]
        (Request("two", "why", min_confidence=math.nan), "bad-config"),
        (Request("two", "why", min_confidence=10**400), "bad-config"),
        (Request("two", "why", min_confidence=True), "bad-config"),
    ],
    ids=range(14),
)
def test_whatever_is_wrong_with_a_request_is_its_own_error(request_, code, tiny_bert, kept):
    store, _ = kept
    good, bad, also_good = Engine(tiny_bert, store).predict([Request("two", "good"), request_, Request("five", "bad")])
    assert good.error is None
    assert also_good.error is None
    assert bad.error.code == code
    assert bad.error.hint
    assert len(bad.error.message) < 300


def test_an_odd_second_text_is_the_error_of_its_request(tiny_bert, toy_pairs, tmp_path):
    store = Store(tmp_path)
    train_and_publish(tiny_bert, toy_pairs("pairs"), store)
    requests = [Request("pairs", "good", pair) for pair in ("bad", 7, "\udc80", "a" * 3_000_000)]
    answers = Engine(tiny_bert, store).predict(requests)
    assert [answer.error is None for answer in answers] == [True, False, False, False]


def test_a_reference_that_cannot_be_read_is_the_error_of_its_requests(tiny_bert, kept, monkeypatch):
    store, _ = kept
    resolve = Store.resolve

    def fail(self, name):
        if name == "five":
            raise PermissionError(13, "Permission denied", "tasks/five/1.json")
        return resolve(self, name)

    monkeypatch.setattr(Store, "resolve", fail)
    good, bad = Engine(tiny_bert, store).predict([Request("two", "why"), Request("five", "why")])
    assert good.error is None
    assert bad.error.code == "store-damaged"
    assert bad.error.message == "tasks/five/1.json: cannot be read: Permission denied"


def test_what_nobody_foresaw_fails_one_request_and_not_its_batch(tiny_bert, kept, monkeypatch):
    store, _ = kept
    encode = encoded_requests.encode_split

    def fail(tokenizer, split, reading):
        if "poison" in split.texts:
            raise RuntimeError("no such thing")
        return encode(tokenizer, split, reading)

    monkeypatch.setattr(encoded_requests, "encode_split", fail)
    requests = [Request("two", text) for text in ("good", "bad", "poison", "why", "seven")]
    answers = Engine(tiny_bert, store).predict(requests)
    assert [answer.error is None for answer in answers] == [True, True, False, True, True]
    assert answers[2].error.code == "unanswered"
    assert "RuntimeError: no such thing" in answers[2].error.message
