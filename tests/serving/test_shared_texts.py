"""Rows that share a text share its frozen layers, and get the answers they would get alone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from inlay.errors import BadConfig, Unsupported
from inlay.model import Bank, CacheDepth, CachedStates, Row, infer
from inlay.model.backbone.families import FAMILIES
from inlay.model.bank.methods import METHODS, SlotSpec
from inlay.model.heads.heads import WRITTEN, HeadSpec
from inlay.serving import Engine, Request, shared_texts
from inlay.serving.shared_texts import KeptStates, SharedTexts, _choose_levels, _Group
from inlay.settings.run_config import MethodConfig
from inlay.store import Store
from tiny_backbones import NUM_LAYERS, WRITING, random_tensors

LAYERS = [{"layers": "2:"}, {"layers": "1:"}, {"layers": "2"}]
HEADS = [HeadSpec("classify", 3, "mean"), HeadSpec("tag", 5, "tokens"), HeadSpec("regress", 1, "cls")]


def fill(backbone, specs):
    """A bank with random tensors for each of `specs` that the family can have."""
    bank = Bank(backbone, len(specs))
    slots = []
    for slot, spec in enumerate(specs):
        try:
            bank.put(slot, spec, random_tensors(backbone, spec, slot))
            slots.append(slot)
        except (Unsupported, BadConfig):
            continue
    return bank, slots


def read(backbone, text, slot):
    encoded = backbone.tokenizer(text)
    return Row(encoded["input_ids"], slot, encoded.get("token_type_ids"))


def check_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.fixture
def free_launches(monkeypatch):
    """Sharing pays wherever a token is saved."""
    monkeypatch.setattr(shared_texts, "LAUNCH_TOKENS", {"cpu": 0})


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WRITING])
def test_rows_that_share_a_text_get_the_answers_they_get_alone(family, backbone_of, texts, free_launches):
    """Every method in its upper layers and in all, heads alone, heads that mix layers, in one batch."""
    backbone = backbone_of(family)
    specs = []
    for name, method in METHODS.items():
        places = LAYERS if "layers" in method.settings else [{}]
        for index, layers in enumerate([{}, *places]):
            specs.append(SlotSpec.of(MethodConfig(name, **layers), HEADS[index % len(HEADS)]))
    specs.append(SlotSpec.of(MethodConfig("head"), HeadSpec("classify", 2, "mean", features="mix")))
    bank, slots = fill(backbone, specs)
    rows = [read(backbone, text, slot) for text in texts[:3] for slot in slots]
    rows += [read(backbone, texts[3], slot) for slot in slots[:3]]
    random.Random(0).shuffle(rows)
    shared = SharedTexts(bank).logits(rows, [tuple(row.ids) for row in rows])
    check_equal(shared, infer(bank, rows))


@pytest.fixture
def layers_run(tiny_bert, monkeypatch):
    """How many tokens went through each layer of the tiny BERT."""
    counts: Counter[int] = Counter()

    def count(layer):
        def hear(module, args, kwargs):
            counts[layer] += (args[0] if args else kwargs["hidden_states"]).shape[:-1].numel()

        return hear

    blocks = [block.inner for block in tiny_bert._blocks]
    handles = [block.register_forward_pre_hook(count(n), with_kwargs=True) for n, block in enumerate(blocks)]
    yield counts
    for handle in handles:
        handle.remove()


def test_frozen_layers_are_computed_once_for_all_tasks_of_a_text(tiny_bert, layers_run, free_launches):
    adapted = SlotSpec.of(MethodConfig("pfeiffer", 8, layers="2:"), HeadSpec("classify", 3, "mean"))
    bank, slots = fill(tiny_bert, [adapted] * 4)
    rows = [read(tiny_bert, "the movie was good", slot) for slot in slots]
    SharedTexts(bank).logits(rows, ["same"] * 4)
    length = len(rows[0].ids)
    assert layers_run == {0: length, 1: length, 2: 5 * length}  # the attention of layer 2 is frozen, and computed too
    layers_run.clear()
    SharedTexts(bank).logits(rows, range(4))  # of four tenants
    assert layers_run == {0: 4 * length, 1: 4 * length, 2: 4 * length}


def test_the_next_batch_about_a_text_begins_where_it_is_adapted(tiny_bert, layers_run, free_launches):
    adapted = SlotSpec.of(MethodConfig("pfeiffer", 8, layers="2:"), HeadSpec("classify", 3, "mean"))
    bank, slots = fill(tiny_bert, [adapted] * 4)
    rows = [read(tiny_bert, "the movie was good", slot) for slot in slots]
    sharing = SharedTexts(bank)
    sharing.logits(rows[:2], [("a", "same")] * 2)
    layers_run.clear()
    next_ones = sharing.logits(rows[2:], [("a", "same")] * 2)
    length = len(rows[0].ids)
    assert layers_run == {2: 2 * length}
    check_equal(next_ones, infer(bank, rows[2:]))
    layers_run.clear()
    sharing.logits(rows[2:3], [("b", "same")])  # of another tenant
    assert layers_run == {0: length, 1: length, 2: length}
    sharing.forget_texts()
    layers_run.clear()
    sharing.logits(rows[2:3], [("a", "same")])
    assert layers_run == {0: length, 1: length, 2: length}


def test_states_kept_for_tasks_adapted_lower_down_do_not_keep_heads_from_sharing_more(tiny_bert, layers_run):
    heads = HeadSpec("classify", 3, "mean")
    top, alone = SlotSpec.of(MethodConfig("houlsby", 8, layers="2:"), heads), SlotSpec.of(MethodConfig("head"), heads)
    bank, slots = fill(tiny_bert, [top] * 8 + [alone] * 8)
    rows = [read(tiny_bert, "the movie was good " * 4, slot) for slot in slots]
    sharing = SharedTexts(bank)
    sharing.logits(rows[:8], ["same"] * 8)
    layers_run.clear()
    sharing.logits(rows[8:], ["same"] * 8)
    assert layers_run[2] == len(rows[0].ids)


def test_rows_begin_no_deeper_than_their_own_task_is_frozen(tiny_bert, free_launches):
    heads = HeadSpec("classify", 3, "mean")
    top, lower = (SlotSpec.of(MethodConfig("houlsby", 8, layers=layers), heads) for layers in ("2:", "1:"))
    alone = SlotSpec.of(MethodConfig("head"), heads)
    bank, _ = fill(tiny_bert, [top, top, lower, lower, alone, alone])
    rows = [read(tiny_bert, "the movie was good", slot) for slot in range(6)]
    sharing = SharedTexts(bank)
    for chosen in ((4, 5), (0, 1), (0, 2, 4), (2, 3), (1, 3, 5)):
        own = [rows[index] for index in chosen]
        check_equal(sharing.logits(own, ["same"] * len(own)), infer(bank, own))


def test_kept_states_have_a_bound_and_the_oldest_text_goes_first():
    states = CachedStates(CacheDepth(2), torch.zeros(5, 4))
    kept = KeptStates(3 * 80)
    for key in "abc":
        kept.keep(key, states)
    kept.keep("a", states)
    kept.keep("d", states)
    assert kept.num_bytes == 240
    assert [key for key in "abcd" if kept.find(key, CacheDepth(2))] == ["a", "c", "d"]
    kept.keep("e", CachedStates(CacheDepth(2), torch.zeros(500, 4)))  # too large by itself
    assert kept.find("e", CacheDepth(2)) is None
    assert kept.num_bytes == 240


def test_tasks_that_are_heads_alone_need_one_pass(tiny_bert, layers_run):
    spec = SlotSpec.of(MethodConfig("head"), HeadSpec("classify", 3, "mean"))
    bank, slots = fill(tiny_bert, [spec] * 8)
    rows = [read(tiny_bert, "the movie was good", slot) for slot in slots]
    SharedTexts(bank).logits(rows, ["same"] * 8)
    assert layers_run == dict.fromkeys(range(NUM_LAYERS), len(rows[0].ids))


def test_tasks_adapted_in_all_layers_share_nothing(tiny_bert, layers_run):
    spec = SlotSpec.of(MethodConfig("houlsby", 8), HeadSpec("classify", 3, "mean"))
    bank, slots = fill(tiny_bert, [spec] * 8)
    rows = [read(tiny_bert, "the movie was good", slot) for slot in slots]
    SharedTexts(bank).logits(rows, ["same"] * 8)
    assert layers_run == dict.fromkeys(range(NUM_LAYERS), 8 * len(rows[0].ids))


@pytest.mark.parametrize("family", WRITING)
def test_backbones_that_write_share_nothing(family, backbone_of):
    """There the first block of a stack computes the position bias of all."""
    spec = SlotSpec.of(MethodConfig("houlsby", 8, layers="2:"), HeadSpec("classify", 2, WRITTEN, texts=("a", "b")))
    assert SharedTexts(Bank(backbone_of(family), 1)).find_depth(spec).layer == 0


@pytest.mark.parametrize(
    ("num_tokens", "depths", "has_others", "levels"),
    [
        (20, {4: 32}, False, [4]),  # one text, many tasks
        (20, {4: 32, 6: 3, 5: 1}, False, [4, 6]),  # one task adapted higher up is not worth another pass, heads are
        (20, {0: 6, 4: 2}, True, []),  # two rows among others save less than another pass costs
        (500, {0: 6, 4: 2}, True, [4]),  # but they do if they are long
        (8, {6: 2}, False, [6]),  # two heads are one pass instead of one
    ],
)
def test_texts_are_shared_where_it_pays(num_tokens, depths, has_others, levels):
    group = _Group(num_tokens, (), Counter(depths))
    assert _choose_levels([group], 6, 24, has_others=has_others) == levels


def test_an_engine_tokenises_a_text_once_for_all_tasks_and_answers_as_alone(
    tiny_bert, publish_random, tmp_path, layers_run, free_launches
):
    store = Store(tmp_path)
    spec = SlotSpec.of(MethodConfig("pfeiffer", 8, layers="2:"), HeadSpec("classify", 3, "mean"))
    names = [f"task-{index}" for index in range(6)]
    for seed, name in enumerate(names):
        publish_random(store, name, tiny_bert, spec if seed % 2 else replace(spec, method=METHOD_HEAD), seed)
    engine = Engine(tiny_bert, store, num_slots=6)
    text = "the movie was good and the plot was fine"
    alone = [engine.predict([Request(name, text)])[0] for name in names]
    layers_run.clear()
    together = engine.ask(names, text)
    length = len(tiny_bert.tokenizer(text)["input_ids"])
    assert layers_run[0] == length
    assert [answer.version for answer in together] == [f"{name}@1" for name in names]
    check_equal([answer.logits for answer in together], [answer.logits for answer in alone])


def test_requests_of_different_scopes_share_nothing(tiny_bert, publish_random, tmp_path, layers_run, free_launches):
    store = Store(tmp_path)
    for seed, name in enumerate(("one", "two")):
        publish_random(store, name, tiny_bert, SlotSpec(METHOD_HEAD, HeadSpec("classify", 3, "mean")), seed)
    engine = Engine(tiny_bert, store, num_slots=2)
    length = len(tiny_bert.tokenizer("the movie was good")["input_ids"])
    for scopes, times in ((("a", "a"), 1), (("b", "c"), 2)):
        asked = [
            engine.check(Request(n, "the movie was good"), {}, s) for n, s in zip(("one", "two"), scopes, strict=True)
        ]
        with engine.hot_versions.holding({item.found.version.digest: item.found for item in asked}) as states:
            layers_run.clear()
            assert all(answer.error is None for answer in engine.answer(engine.encode(asked), states))
        assert layers_run == dict.fromkeys(range(NUM_LAYERS), times * length)


METHOD_HEAD = SlotSpec.of(MethodConfig("head"), HeadSpec("classify", 3, "mean")).method
