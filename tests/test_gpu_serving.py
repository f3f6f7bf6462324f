"""Engines on a GPU: captured or launched, they answer alike. Run with `pytest -m gpu tests/test_gpu_serving.py`."""

from __future__ import annotations

import time

import pytest
import torch

import inlay
from inlay.errors import Unsupported
from inlay.model import Bank, SlotSpec, infer, load_backbone
from inlay.model.bank.methods import METHODS, UNSUPPORTED
from inlay.model.batch.route import Row
from inlay.model.heads.captured_inference import GraphedForward
from inlay.model.heads.heads import HeadSpec
from inlay.serving import passes
from inlay.settings.run_config import MethodConfig
from inlay.store import Store

pytestmark = pytest.mark.gpu

TASKS = {
    "two": SlotSpec.of(MethodConfig("houlsby", 8), HeadSpec("classify", 2, "mean")),
    "tags": SlotSpec.of(MethodConfig("houlsby", 8), HeadSpec("tag", 5, "tokens")),
    "twenty": SlotSpec.of(MethodConfig("pfeiffer", 3), HeadSpec("classify", 20, "cls", hidden="tanh")),
    "number": SlotSpec.of(MethodConfig("houlsby", 16), HeadSpec("regress", 1, "mean")),
    "rank": SlotSpec.of(MethodConfig("lora", 4), HeadSpec("classify", 4, "mean")),
    "set": SlotSpec.of(MethodConfig("bitfit"), HeadSpec("multilabel", 3, "cls")),
    "own": SlotSpec.of(MethodConfig("full"), HeadSpec("classify", 2, "mean")),
    "mix": SlotSpec.of(MethodConfig("houlsby", 8), HeadSpec("classify", 2, "mean", features="mix")),
}
LATER = {
    "larger": SlotSpec.of(MethodConfig("houlsby", 64), HeadSpec("classify", 40, "mean")),
    "last": SlotSpec.of(MethodConfig("pfeiffer", 24), HeadSpec("classify", 3, "cls")),
}


@pytest.fixture
def kept(backbone_folder, publish_random, tmp_path):
    """A backbone on the GPU in float32, and a store with tasks of every kind on it."""
    gpu = load_backbone(str(backbone_folder("bert")), device="cuda", dtype=torch.float32)
    store = Store(tmp_path)
    for seed, (name, spec) in enumerate(TASKS.items()):
        publish_random(store, name, gpu, spec, seed)
    return gpu, store


def ask(names, texts, num_times=1):
    return [inlay.Request(name, text) for _ in range(num_times) for text in texts for name in names]


def check(answers, expected):
    for answer, other in zip(answers, expected, strict=True):
        assert (answer.error, answer.version) == (None, other.version)
        torch.testing.assert_close(answer.logits, other.logits, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("most_tokens", [65536, 512])
def test_a_compiled_engine_answers_as_one_that_is_not(kept, publish_random, texts, monkeypatch, most_tokens):
    """Every mix three times: as it is, while it is captured, and replayed. Tasks come and go in between."""
    gpu, store = kept
    monkeypatch.setattr(passes, "MOST_TOKENS", most_tokens)
    ours = inlay.Engine(gpu, store, num_slots=9, is_compiled=True)
    plain = inlay.Engine(gpu, store, num_slots=9, is_compiled=False)
    for _ in range(3):
        requests = ask(TASKS, texts, 8)
        check(ours.predict(requests), plain.predict(requests))
    for seed, (name, spec) in enumerate(LATER.items(), start=20):
        publish_random(store, name, gpu, spec, seed)
    store.remove("two")
    for _ in range(3):
        requests = ask([*LATER, "number", "tags"], texts, 8)
        check(ours.predict(requests), plain.predict(requests))
    assert ours.is_compiled
    assert not plain.is_compiled


def test_nothing_is_compiled_again_when_tasks_come_and_go(kept, publish_random, texts):
    gpu, store = kept
    ours = inlay.Engine(gpu, store, num_slots=3, is_compiled=True)
    names = ["two", "twenty", "number"]
    for num_times in (1, 40, 1, 40):
        ours.predict(ask(names, texts, num_times))
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    for seed, (name, spec) in enumerate(LATER.items(), start=20):
        publish_random(store, name, gpu, spec, seed)
        ours.predict(ask([name, "number"], texts))
        ours.predict(ask([name, "number"], texts, 40))
    assert counts["unique_graphs"] == before > 0


def test_an_engine_that_may_choose_compiles_when_launched_passes_have_taken_long_enough(kept, texts, monkeypatch):
    gpu, store = kept
    monkeypatch.setattr(passes, "PATIENCE_S", 0.2)
    engine, said = inlay.Engine(gpu, store), []
    engine.on_compile = said.append
    requests = ask(["two", "twenty"], texts)
    expected = engine.predict(requests)
    assert not engine.is_compiled
    began = time.perf_counter()
    while not engine.is_compiled and time.perf_counter() - began < 60:
        engine.predict(requests)
    assert engine.is_compiled
    assert not said
    check(engine.predict(requests), expected)
    assert said


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet"])
def test_a_captured_pass_answers_for_every_method_at_once(backbone_folder, family):
    """Each three times: as it is, while it is captured, and replayed."""
    gpu = load_backbone(str(backbone_folder(family)), device="cuda", dtype=torch.float32)
    names = [name for name, method in METHODS.items() if not method.is_joint and not method.is_finetuned]
    methods = [MethodConfig(name) for name in names if (family, name) not in UNSUPPORTED]
    methods += [MethodConfig("houlsby", 8, **more) for more in ({"inner_norm": "layer"}, {"depth": 2})]
    bank = Bank(gpu, len(methods))
    for slot, method in enumerate(methods):
        spec = SlotSpec.of(method, HeadSpec("classify", 2 + slot % 3, ("mean", "cls")[slot % 2]))
        bank.initialise(slot, spec, seed=slot)
        noise = torch.Generator().manual_seed(slot)
        noisy = {name: t + 0.05 * torch.randn(t.shape, generator=noise) for name, t in bank.read(slot).items()}
        bank.put(slot, spec, noisy)
    rows = [Row([2, *range(8, 8 + length), 3], slot) for length in (1, 5, 30) for slot in range(len(methods))]
    expected, captured = infer(bank, rows), GraphedForward(bank)
    for _ in range(3):
        for row, a, b in zip(rows, captured.logits(rows), expected, strict=True):
            torch.testing.assert_close(a, b, atol=5e-3, rtol=5e-3, msg=methods[row.slot].name)


def test_what_cannot_be_captured_is_refused(backbone_folder, tmp_path):
    gpu = load_backbone(str(backbone_folder("mt5")), device="cuda")
    with pytest.raises(Unsupported, match="no captured passes"):
        inlay.Engine(gpu, Store(tmp_path), is_compiled=True)
