"""A compiled engine answers as the definition does, whatever the mix: kernels in the interpreter, compiled by a
counter."""

from __future__ import annotations

import pytest
import torch

import inlay
from counted import count_graphs
from inlay.model import SlotSpec
from inlay.model.heads import captured_inference as graphed
from inlay.model.heads.heads import HeadSpec
from inlay.model.kernels import launch
from inlay.serving import passes
from inlay.settings.run_config import MethodConfig
from inlay.store import Store

pytestmark = pytest.mark.triton

TASKS = {
    "two": SlotSpec.of(MethodConfig("houlsby", 8), HeadSpec("classify", 2, "mean")),
    "tags": SlotSpec.of(MethodConfig("houlsby", 8), HeadSpec("tag", 5, "tokens")),
    "twenty": SlotSpec.of(MethodConfig("pfeiffer", 3), HeadSpec("classify", 20, "cls", hidden="tanh")),
    "number": SlotSpec.of(MethodConfig("houlsby", 16), HeadSpec("regress", 1, "mean")),
}
LATER = SlotSpec.of(MethodConfig("pfeiffer", 24), HeadSpec("multilabel", 33, "mean"))


@pytest.fixture
def compilations(monkeypatch):
    """The graphs that were compiled, in order."""
    return count_graphs(monkeypatch, graphed)


def test_a_compiled_engine_answers_any_mix_as_the_definition_while_tasks_come_and_go(
    tiny_bert, publish_random, tmp_path, compilations, monkeypatch
):
    """Sizes, label counts, poolings and kinds of heads differ; a tagger's row is among them, and more tokens than one
    captured pass takes."""
    store = Store(tmp_path)
    for seed, (name, spec) in enumerate(TASKS.items()):
        publish_random(store, name, tiny_bert, spec, seed)
    publish_random(store, "later", tiny_bert, LATER, 9)
    texts = {
        "two": "why",
        "tags": "good movie",
        "twenty": "a very bad film",
        "number": "one two",
        "later": "free prize",
    }
    mixes = [["two", "tags", "twenty", "number", "two"], ["later", "number"]]
    asked = [[inlay.Request(name, texts[name]) for name in names] for names in mixes]
    with monkeypatch.context() as plain:
        plain.setattr(launch, "is_available", lambda device: False)
        expected = [inlay.Engine(tiny_bert, store).predict(requests) for requests in asked]

    monkeypatch.setattr(passes, "MOST_TOKENS", 22)
    engine = inlay.Engine(tiny_bert, store, num_slots=4, is_compiled=True)
    answers = [engine.predict(asked[0])]
    assert len(engine._passes._graphed._programs) == 1  # of one size, though it ran twice
    compiled_once = len(compilations)
    store.remove("two")
    answers.append(engine.predict(asked[1]))  # a larger task of a method that was there, in the slot of another
    assert len(compilations) == compiled_once == 1
    for found, known in zip(answers, expected, strict=True):
        for answer, other in zip(found, known, strict=True):
            assert answer.version == other.version
            torch.testing.assert_close(answer.logits, other.logits, atol=1e-4, rtol=1e-3)


def test_an_engine_that_is_not_compiled_lets_tasks_come_and_go_between_passes(tiny_bert, publish_random, tmp_path):
    """What kernels read of a slot is made in the first pass, where autograd is off, and set between passes."""
    store = Store(tmp_path)
    for seed, (name, spec) in enumerate(TASKS.items()):
        publish_random(store, name, tiny_bert, spec, seed)
    requests = [inlay.Request(name, "a very bad film") for name in ("two", "number", "twenty")]
    engine = inlay.Engine(tiny_bert, store, num_slots=1, is_compiled=False)
    for request in requests:  # each in the slot of the one before
        (answer,) = engine.predict([request])
        (alone,) = inlay.Engine(tiny_bert, store, is_compiled=False).predict([request])
        torch.testing.assert_close(answer.logits, alone.logits)
