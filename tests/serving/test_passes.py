"""Which rows are captured and which launched, and that the answers are the same: on a CPU, with passes that count."""

from __future__ import annotations

import pytest
import torch

import inlay
from counted import Traced, trace_graphs
from inlay.errors import Unsupported
from inlay.model import Bank, SlotSpec, infer
from inlay.model.batch.route import Row
from inlay.model.heads import captured_inference as graphed
from inlay.model.heads.captured_inference import GraphedForward
from inlay.model.heads.heads import HeadSpec
from inlay.model.kernels import launch
from inlay.serving import Engine, Request, passes
from inlay.settings.run_config import MethodConfig
from inlay.store import Store

ROWS = [[2, 11, 45, 3], [2, 12, 3], [2, 9, 30, 31, 32, 3], [2, 3], [2, *range(8, 40), 3]]
HEADS = [
    HeadSpec("classify", 2, "mean"),
    HeadSpec("tag", 5, "tokens"),
    HeadSpec("classify", 20, "cls"),
    HeadSpec("regress", 1, "mean"),
    HeadSpec("classify", 3, "mean", features="mix"),
    HeadSpec("span", 2, "tokens"),
]
CAPTURED = {0, 2, 3}  # slots whose heads read one vector of the last layer


@pytest.fixture
def bank(tiny_bert):
    bank = Bank(tiny_bert, len(HEADS))
    for slot, head in enumerate(HEADS):
        method = MethodConfig("pfeiffer" if slot % 2 else "houlsby", 8 * (slot + 1), init_std=0.3)
        bank.initialise(slot, SlotSpec.of(method, head), seed=slot)
    return bank


@pytest.fixture
def captured(monkeypatch):
    """The rows of every pass that would have been captured; their logits are those of launched ones."""
    found = []

    class Counted(GraphedForward):
        def logits(self, rows):
            assert all(map(self.takes, rows))
            found.append(rows)
            return infer(self._bank, rows)

    monkeypatch.setattr(passes, "GraphedForward", Counted)
    monkeypatch.setattr(passes, "find_obstacle", lambda backbone: None)
    return found


def check(answers, expected):
    for answer, logits in zip(answers, expected, strict=True):
        torch.testing.assert_close(answer, logits, atol=1e-5, rtol=1e-5)


def test_rows_of_other_heads_are_launched_and_send_no_other_row_there(bank, captured):
    rows = [Row(ids, slot) for ids in ROWS for slot in (1, 0, 5, 2, 4, 3)]
    check(passes.Passes(bank, is_compiled=True).logits(rows), infer(bank, rows))
    assert len(captured) == 1
    assert sorted((row.slot, len(row.ids)) for row in captured[0]) == sorted(
        (row.slot, len(row.ids)) for row in rows if row.slot in CAPTURED
    )


def test_what_exceeds_a_captured_pass_goes_in_several_of_about_one_size(bank, captured, monkeypatch):
    monkeypatch.setattr(passes, "MOST_TOKENS", 200)
    rows = [Row(ids, slot) for ids in ROWS * 4 for slot in (0, 2, 3)]
    check(passes.Passes(bank, is_compiled=True).logits(rows), infer(bank, rows))
    sizes = [sum(len(row.ids) for row in chunk) for chunk in captured]
    assert sum(sizes) == sum(len(row.ids) for row in rows)
    longest = max(map(len, ROWS))
    assert len(sizes) == -(-sum(sizes) // (200 - longest))
    assert max(sizes) <= 200
    assert max(sizes) - min(sizes) <= len(sizes) * longest
    lengths = [len(row.ids) for chunk in captured for row in chunk]
    assert lengths == sorted(lengths, reverse=True)


def test_a_row_that_no_captured_pass_holds_is_launched(bank, captured, monkeypatch):
    monkeypatch.setattr(passes, "MOST_TOKENS", 6)
    monkeypatch.setattr(graphed, "MOST_TOKENS", 6)
    rows = [Row(ids, 0) for ids in ROWS]
    check(passes.Passes(bank, is_compiled=True).logits(rows), infer(bank, rows))
    assert sorted(len(row.ids) for chunk in captured for row in chunk) == [2, 3, 4, 6]


def test_an_engine_that_may_choose_captures_once_launched_passes_have_taken_their_time(bank, captured, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(passes.time, "perf_counter", lambda: next(clock))  # a pass takes a second
    monkeypatch.setattr(passes, "PATIENCE_S", 3.0)
    chosen = passes.Passes(bank, is_compiled=None)
    rows, tags = [Row(ids, 0) for ids in ROWS], [Row(ids, 1) for ids in ROWS]
    for _ in range(8):
        chosen.logits(tags)
    assert not chosen.is_compiled  # they could not have been captured
    for _ in range(3):
        assert not chosen.is_compiled
        chosen.logits(rows)
    assert chosen.is_compiled
    assert not captured
    check(chosen.logits(rows + tags), infer(bank, rows + tags))
    assert [len(chunk) for chunk in captured] == [len(rows)]


def test_the_first_pass_of_an_engine_tries_no_patience(bank, captured, monkeypatch):
    monkeypatch.setattr(passes, "PATIENCE_S", 1e-9)
    chosen = passes.Passes(bank, is_compiled=None)
    chosen.logits([Row(ROWS[0], 0)])
    assert not chosen.is_compiled
    chosen.logits([Row(ROWS[0], 0)])
    assert chosen.is_compiled


def test_nothing_is_captured_where_nobody_wants_it(bank, captured, monkeypatch):
    monkeypatch.setattr(passes, "PATIENCE_S", 0.0)
    rows = [Row(ids, 0) for ids in ROWS]
    plain = passes.Passes(bank, is_compiled=False)
    check(plain.logits(rows) + plain.logits([]), infer(bank, rows))
    assert not captured
    assert not plain.is_compiled


def test_without_memory_for_captured_passes_rows_are_launched_and_it_says_so(bank, captured, monkeypatch):
    def run_out(self, rows):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("the capture could not be ended")

    monkeypatch.setattr(passes.GraphedForward, "logits", run_out)
    asked, said = passes.Passes(bank, is_compiled=True), []
    asked.on_compile = said.append
    rows = [Row(ids, slot) for ids in ROWS for slot in (0, 1)]
    check(asked.logits(rows), infer(bank, rows))
    assert not asked.is_compiled
    assert len(said) == 1
    check(asked.logits(rows), infer(bank, rows))


def test_a_compiled_engine_is_refused_where_there_can_be_none(tiny_bert, backbone_of, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(Unsupported, match="on the device `cpu`, not on a GPU") as caught:
        inlay.Engine(tiny_bert, Store(tmp_path), is_compiled=True)
    assert 'device="cuda"' in caught.value.hint
    for choice in (None, False):
        assert not inlay.Engine(tiny_bert, Store(tmp_path), is_compiled=choice).is_compiled
    monkeypatch.setattr(launch, "is_available", lambda device: True)
    for family in ("mt5", "deberta-v2"):
        with pytest.raises(Unsupported, match=r"family `.*` have no captured passes"):
            inlay.Engine(backbone_of(family), Store(tmp_path), is_compiled=True)
    with pytest.raises(Unsupported, match="int8"):
        inlay.Engine(tiny_bert, Store(tmp_path), is_compiled=True, precision="int8")


@pytest.fixture
def compilations(monkeypatch):
    """The graphs that were compiled; nothing is computed."""
    yield trace_graphs(monkeypatch, graphed)
    torch._dynamo.reset()


def test_nothing_is_compiled_again_when_tasks_come_go_and_change_places(
    tiny_bert, publish_random, tmp_path, compilations
):
    """Of other sizes, label counts, kinds of heads and poolings. Only a method that is new brings something new."""
    store, counts, said = Store(tmp_path), [], []
    engine = Engine(tiny_bert, store, num_slots=3, is_compiled=True)
    engine.on_compile = said.append

    def publish(name, size, head, method="houlsby"):
        norms = {} if method == "pfeiffer" else {"norms": "encoder"}
        publish_random(store, name, tiny_bert, SlotSpec.of(MethodConfig(method, size, **norms), head), len(counts))

    def ask(names, length):
        with pytest.raises(Traced):
            engine.predict([Request(name, "good " * length) for name in names])
        counts.append(len(compilations))

    publish("first", 8, HEADS[0])
    ask(["first"], 3)
    ask(["first"] * 12, 40)  # another rung
    publish("small", 3, HEADS[3])
    ask(["small", "first"], 3)
    publish("large", 40, HEADS[2])
    ask(["large", "small"], 3)
    ask(["large"] * 12, 40)
    publish("last", 64, HeadSpec("classify", 33, "cls"))  # the first leaves its slot
    ask(["last", "large", "small"], 3)
    store.remove("large")
    ask(["first", "last"] * 12, 40)
    assert counts == [1, 2, 2, 2, 2, 2, 2]  # for the first rung, then for any other
    assert len(said) == 2
    publish("other", 16, HEADS[0], "pfeiffer")
    ask(["other", "first"], 3)
    publish("another", 72, HEADS[0], "pfeiffer")
    ask(["another", "first"], 3)
    assert counts[-2:] == [3, 3]
