"""Pairs as two towers: both texts through one slot, pooled apart, and what the head makes of the two vectors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import SlotSpec, resolve_method
from inlay.model.batch.route import Row, Segment, collate, pack
from inlay.model.heads import inference
from inlay.model.heads.heads import HeadSpec
from inlay.model.heads.inference import batch_rows, batches_by_length, infer, infer_canonically
from inlay.model.heads.readout import pair_features
from inlay.settings.run_config import MethodConfig
from inlay.training.recipe.probe import _cosine
from tiny_backbones import WIDTH, random_tensors

METHOD = MethodConfig("houlsby", size=8)
TEXTS = ([2, 9, 8, 7, 30, 31, 3], [2, 12, 3], [2, 20, 21, 22, 3], [2, 7, 3], [2, 40, 41, 42, 43, 44, 45, 46, 3])


def tower_spec(pooling="mean", num_outputs=3, **head):
    return SlotSpec.of(METHOD, HeadSpec("classify", num_outputs, pooling, pairs="towers", **head))


def single_spec(kind="classify", num_outputs=2, pooling="mean"):
    return SlotSpec.of(METHOD, HeadSpec(kind, num_outputs, pooling))


def fill(backbone, *specs):
    bank = Bank(backbone, len(specs))
    for slot, spec in enumerate(specs):
        bank.put(slot, spec, random_tensors(backbone, spec, seed=slot))
    return bank


def pool_alone(bank, ids, slot, pooling):
    """The vector of one text through a slot, in a batch by itself, pooled as the formula says."""
    backbone = bank.backbone
    batch = collate([Row(ids, slot)], backbone.pad_id)
    with torch.inference_mode(), bank.routed(batch.route):
        states_TD = backbone.hidden(batch)[0]
    if pooling == "mean":
        return states_TD.mean(0)
    if pooling == "cls":
        return states_TD[0]
    dense = backbone.model.pooler.dense
    return torch.tanh(F.linear(states_TD[0], dense.weight, dense.bias))


def spell_logits(bank, row):
    """The formula: one linear layer on u, v, |u − v|, u · v and their cosine."""
    tensors, pooling = bank.read(row.slot), bank.head_of(row.slot).pooling
    u, v = (pool_alone(bank, ids, row.slot, pooling) for ids in (row.ids, row.other))
    cosine = (u @ v) / (u.norm() * v.norm())
    features = torch.cat([u, v, (u - v).abs(), u * v, cosine.view(1)])
    weight = torch.cat([tensors["head.weight"], tensors["head.pair_weight"]], 1)
    return F.linear(features, weight, tensors["head.bias"])


FAMILIES = ["bert", "roberta", "electra", "mpnet", "distilbert", "deberta-v2", "modernbert"]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("family", FAMILIES)
def test_towers_follow_their_formula_packed_and_padded(backbone_of, family, pooling):
    backbone = backbone_of(family)
    bank = fill(backbone, tower_spec(pooling), tower_spec(pooling, num_outputs=5))
    rows = [
        Row(TEXTS[i], slot, other=TEXTS[j]) for i, j, slot in ((0, 1, 1), (2, 3, 0), (3, 0, 0), (4, 2, 1), (1, 1, 0))
    ]
    wanted = [spell_logits(bank, row) for row in rows]
    for is_padded in (False, True):
        for found, formula in zip(infer(bank, rows, is_padded=is_padded), wanted, strict=True):
            torch.testing.assert_close(found, formula, atol=2e-5, rtol=1e-4)


def test_towers_read_the_pooler_too(tiny_bert):
    bank = fill(tiny_bert, tower_spec("pooler"))
    row = Row(TEXTS[0], 0, [0] * len(TEXTS[0]), other=TEXTS[2])
    torch.testing.assert_close(infer(bank, [row])[0], spell_logits(bank, row), atol=2e-5, rtol=1e-4)


def test_towers_read_a_mix_of_layers(tiny_bert):
    """With all weight on the last layer and a factor of 1 it is that layer."""
    spec = tower_spec("mean", features="mix")
    tensors = random_tensors(tiny_bert, spec)
    tensors["head.mix"] = torch.full_like(tensors["head.mix"], -60.0)
    tensors["head.mix"][-1] = 0.0
    tensors["head.mix_scale"] = torch.ones(1)
    bank = Bank(tiny_bert, 1)
    bank.put(0, spec, tensors)
    row = Row(TEXTS[0], 0, other=TEXTS[2])
    torch.testing.assert_close(infer(bank, [row])[0], spell_logits(bank, row), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["bert", "deberta-v2"])
def test_a_batch_of_towers_and_any_other_heads_equals_rows_alone(backbone_of, family):
    backbone = backbone_of(family)
    tag = SlotSpec.of(METHOD, HeadSpec("tag", 4, "tokens"))
    number = SlotSpec.of(METHOD, HeadSpec("regress", 1, "cls", pairs="towers"))
    bank = fill(backbone, single_spec(), tower_spec(), tag, number, single_spec(pooling="cls"))
    rows = [
        Row(TEXTS[0], 2), Row(TEXTS[4], 0), Row(TEXTS[1], 1, other=TEXTS[4]), Row(TEXTS[3], 4),
        Row(TEXTS[2], 3, other=TEXTS[3]), Row(TEXTS[2], 2), Row(TEXTS[4], 1, other=TEXTS[0]), Row(TEXTS[1], 0),
    ]  # fmt: skip
    batch = backbone.collate(rows)
    assert (batch.num_rows, batch.num_texts) == (8, 11)
    for mixed, row in zip(infer(bank, rows), rows, strict=True):
        torch.testing.assert_close(mixed, infer(bank, [row])[0], atol=2e-5, rtol=1e-4)
        assert mixed.shape == ((len(row.ids), 4) if row.slot == 2 else (bank.head_of(row.slot).num_outputs,))


def test_rows_that_are_one_text_lie_and_answer_as_ever(tiny_bert):
    """Bit for bit, whether or not a slot of the bank has towers."""
    rows = [Row(TEXTS[0], 1), Row(TEXTS[4], 0), Row(TEXTS[3], 1)]
    batch = tiny_bert.collate(rows)
    assert batch.split is None
    assert batch.texts is batch.rows
    plain, mixed = (
        fill(tiny_bert, single_spec(), single_spec()),
        fill(tiny_bert, single_spec(), single_spec(), tower_spec()),
    )
    for alone, beside in zip(infer(plain, rows), infer(mixed, rows), strict=True):
        assert torch.equal(alone, beside)


def test_texts_of_a_pair_lie_side_by_side_and_rows_are_still_counted_as_rows():
    rows = [Row([1, 2, 3], 1, other=[4]), Row([5, 6], 0), Row([7], 1, [1], other=[8, 9])]
    packed = pack(rows, first_position=0)
    assert packed.order == (1, 2, 0)
    assert packed.input_ids_BT.tolist() == [[5, 6, 7, 8, 9, 1, 2, 3, 4]]
    assert packed.positions_BT.tolist() == [[0, 1, 0, 0, 1, 0, 1, 2, 0]]
    assert packed.token_types_BT.tolist() == [[0, 0, 1, 0, 0, 0, 0, 0, 0]]
    assert packed.pack.lengths == (2, 1, 2, 3, 1)
    assert packed.rows == (Segment(0, 0, 1), Segment(1, 1, 3))
    assert packed.texts == (Segment(0, 0, 1), Segment(1, 1, 5))
    assert packed.route.segments == (Segment(0, 0, 2), Segment(1, 2, 9))
    padded = collate(rows, pad_id=0)
    assert padded.order == (1, 0, 2)
    assert padded.input_ids_BT.tolist() == [[5, 6, 0], [1, 2, 3], [4, 0, 0], [7, 0, 0], [8, 9, 0]]
    assert padded.mask_BT.sum(1).tolist() == [2, 3, 1, 1, 2]
    assert padded.token_types_BT.tolist() == [[0] * 3, [0] * 3, [0] * 3, [1, 0, 0], [0] * 3]
    assert (padded.rows, padded.route.segments) == (packed.rows, packed.texts)


def test_narrowed_to_first_tokens_towers_answer_the_same(tiny_bert):
    bank = fill(tiny_bert, tower_spec("cls"), single_spec(pooling="cls"))
    rows = [Row(TEXTS[0], 0, other=TEXTS[1]), Row(TEXTS[2], 1), Row(TEXTS[4], 0, other=TEXTS[2])]
    batch = tiny_bert.collate(rows)
    with torch.no_grad(), bank.routed(batch.route):
        whole = bank.logits(batch)
    narrow = batch.narrowed()
    with torch.no_grad(), bank.routed(narrow.route):
        for found, wanted in zip(bank.logits(narrow), whole, strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_swapping_the_texts_swaps_what_reads_u_and_what_reads_v(tiny_bert):
    """A head whose two halves are swapped says of (b, a) what it said of (a, b); by itself it does not."""
    spec = tower_spec()
    tensors = random_tensors(tiny_bert, spec)
    swapped = dict(tensors)
    swapped["head.weight"] = tensors["head.pair_weight"][:, :WIDTH].clone()
    swapped["head.pair_weight"] = torch.cat([tensors["head.weight"], tensors["head.pair_weight"][:, WIDTH:]], 1)
    bank = Bank(tiny_bert, 2)
    bank.put(0, spec, tensors)
    bank.put(1, spec, swapped)
    there, back, other = infer(
        bank, [Row(TEXTS[0], 0, other=TEXTS[1]), Row(TEXTS[1], 0, other=TEXTS[0]), Row(TEXTS[1], 1, other=TEXTS[0])]
    )
    torch.testing.assert_close(there, other, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(there, back, atol=1e-2)


def test_features_of_a_pair_lie_in_the_order_of_the_linear_probe():
    generator = np.random.default_rng(0)
    u, v = generator.normal(size=(2, 5, 4))
    wanted = np.concatenate([u, v, np.abs(u - v), u * v, _cosine(u, v)[:, None]], axis=1)
    found = pair_features(torch.from_numpy(u), torch.from_numpy(v))
    np.testing.assert_allclose(np.concatenate([u, found.numpy()], axis=1), wanted, atol=1e-12)


def test_texts_that_are_zero_have_the_cosine_zero_and_a_gradient():
    u, v = torch.zeros(2, 4, requires_grad=True), torch.ones(2, 4)
    features = pair_features(u, v)
    features.sum().backward()
    assert features[:, -1].tolist() == [0.0, 0.0]
    assert u.grad.isfinite().all()


@pytest.mark.parametrize("family", ["bert", "deberta-v2"])
def test_gradients_reach_the_adapters_from_both_texts(backbone_of, family):
    """What the loss of a pair does to the adapters is the sum of what its texts do, each with the other held."""
    backbone = backbone_of(family)
    spec = tower_spec()
    tensors = random_tensors(backbone, spec)

    def gradients(loss_of):
        bank = Bank(backbone, 1, trainable=True)
        bank.put(0, spec, tensors)
        loss_of(bank).backward()
        return {name: stack.grad[0] for name, stack in bank.stacks.items() if not name.startswith("head.")}

    def through_bank(bank):
        batch = backbone.collate([Row(TEXTS[0], 0, other=TEXTS[2])])
        with bank.routed(batch.route):
            return bank.logits(batch)[0].square().sum()

    def by_hand(held):
        def loss(bank):
            vectors = []
            for place, ids in enumerate((TEXTS[0], TEXTS[2])):
                batch = collate([Row(ids, 0)], backbone.pad_id)
                with bank.routed(batch.route):
                    vector = backbone.hidden(batch)[0].mean(0)
                vectors.append(vector.detach() if place == held else vector)
            u, v = vectors
            weight = torch.cat([bank.stacks["head.weight"][0], bank.stacks["head.pair_weight"][0]], 1)
            features = torch.cat([u, v, (u - v).abs(), u * v, F.cosine_similarity(u, v, dim=0).view(1)])
            return F.linear(features, weight, bank.stacks["head.bias"][0]).square().sum()

        return loss

    both, only_u, only_v = gradients(through_bank), gradients(by_hand(1)), gradients(by_hand(0))
    for name, found in both.items():
        scale = float(found.abs().max())
        torch.testing.assert_close(found, only_u[name] + only_v[name], atol=1e-4 * max(1.0, scale), rtol=1e-3)
    adapters = [name for name in both if name.startswith("adapter.")]
    assert all(float(each[name].abs().sum()) > 0 for each in (only_u, only_v) for name in adapters)


def test_dropout_falls_on_each_feature_and_keeps_its_mean(tiny_bert):
    bank = fill(tiny_bert, tower_spec())
    row = Row(TEXTS[0], 0, other=TEXTS[2])
    batch = tiny_bert.collate([row] * 400)
    torch.manual_seed(0)
    with torch.no_grad(), bank.routed(batch.route):
        (dropped,), (whole,) = bank.logits(batch, dropout={0: 0.5}), bank.logits(batch)
    assert dropped.std(0).min() > 0.01
    error = dropped.std(0) / len(dropped) ** 0.5
    assert ((dropped.mean(0) - whole[0]).abs() < 4 * error).all()


def test_canonical_answers_read_both_texts(tiny_bert):
    spec = tower_spec()
    tensors = random_tensors(tiny_bert, spec)
    bank = Bank(tiny_bert, 1)
    bank.put(0, spec, tensors)
    row = Row(TEXTS[0], 5, other=TEXTS[2])
    (found,) = infer_canonically(tiny_bert, spec, tensors, [row])
    torch.testing.assert_close(found, spell_logits(bank, dataclasses.replace(row, slot=0)), atol=2e-5, rtol=1e-4)


def test_batches_hold_their_budget_with_both_texts_of_every_pair():
    generator = np.random.default_rng(0)
    rows = [
        Row([1] * int(a), 0, other=[1] * int(b) if is_pair else None)
        for a, b, is_pair in zip(*generator.integers(1, 30, (2, 60)), generator.integers(2, size=60), strict=True)
    ]
    for packs in (True, False):
        seen = []
        for batch in batch_rows(rows, 120, packs=packs):
            chosen = [rows[index] for index in batch]
            laid = pack(chosen, 0).input_ids_BT if packs else collate(chosen, 0).input_ids_BT
            assert laid.numel() <= 120
            seen += batch
        assert sorted(seen) == list(range(60))
    lengths = [len(row.ids) for row in rows]
    singles = [dataclasses.replace(row, other=None) for row in rows]
    for packs in (True, False):
        assert list(batch_rows(singles, 120, packs=packs)) == list(batches_by_length(lengths, 120, packs=packs))


def test_a_slot_with_towers_has_a_matrix_more_and_its_parameters_are_counted(tiny_bert):
    joined = SlotSpec.of(METHOD, HeadSpec("classify", 3, "mean"))
    more = tower_spec().count_parameters(tiny_bert.anatomy) - joined.count_parameters(tiny_bert.anatomy)
    assert more == 3 * (3 * WIDTH + 1)
    assert {item.name for item in tower_spec().layout(tiny_bert.anatomy)} - {
        item.name for item in joined.layout(tiny_bert.anatomy)
    } == {"head.pair_weight"}


def test_manifests_from_before_there_were_towers_read_joined():
    method = dataclasses.asdict(resolve_method(METHOD))
    head = dataclasses.asdict(HeadSpec("classify", 3, "mean"))
    del head["pairs"]
    assert SlotSpec.from_stored(method, head).head.pairs == "joined"


def test_a_row_of_another_reading_than_its_head_is_noticed(tiny_bert):
    bank = fill(tiny_bert, tower_spec(), single_spec())
    for row in (Row(TEXTS[0], 0), Row(TEXTS[0], 1, other=TEXTS[1])):
        with pytest.raises(AssertionError, match="reading of pairs"):
            infer(bank, [row])


def test_texts_that_pairs_share_are_read_once_and_answered_as_the_formula_says(tiny_bert, monkeypatch):
    """One text beside all others, as a question beside documents; rows of other slots are answered as ever."""
    bank = fill(tiny_bert, tower_spec(), tower_spec("cls", num_outputs=5), single_spec())
    rows = [Row(TEXTS[0], 0, other=text) for text in TEXTS[1:]] * 2
    rows[3:3] = [Row(TEXTS[1], 2), Row(TEXTS[1], 1, other=TEXTS[2]), Row(TEXTS[3], 1, other=TEXTS[4])]
    wanted = [infer(bank, [row])[0] for row in rows]
    read, collate_all = [], type(tiny_bert).collate
    monkeypatch.setattr(
        type(tiny_bert),
        "collate",
        lambda self, rows: read.extend(t for r in rows for t in r.texts) or collate_all(self, rows),
    )
    counted: list[int] = []
    for found, formula in zip(infer(bank, rows, on_batch=counted.append), wanted, strict=True):
        torch.testing.assert_close(found, formula, atol=2e-5, rtol=1e-4)
    assert len(read) == 6 + 1 + 4  # five texts of slot 0, the odd one beside itself; then the other rows
    assert sum(counted) == len(rows)


def test_an_answer_is_the_canonical_one_to_rounding_whoever_shares_its_texts(tiny_bert):
    """Its last bits may depend on them: invariant 3 says how far."""
    bank = fill(tiny_bert, tower_spec())
    spec, tensors = bank.specs[0], bank.read(0)
    asked = Row(TEXTS[0], 0, other=TEXTS[1])
    (canonical,) = inference.infer_canonically(tiny_bert, spec, tensors, [asked])
    within = 1e-5 * max(1.0, float(canonical.abs().max()))
    others = [Row(first, 0, other=second) for first in TEXTS for second in TEXTS if first is not second]
    for count in (0, 1, 3, 7, len(others)):
        for company in (others[:count], others[::-1][:count]):
            rows = [*company, asked, *company]
            answers = infer(bank, rows)
            assert float((answers[len(company)] - canonical).abs().max()) <= within
            assert torch.equal(infer(bank, rows)[len(company)], answers[len(company)]), "the same request again"


def test_pairs_of_different_texts_are_read_as_they_come(tiny_bert, monkeypatch):
    bank = fill(tiny_bert, tower_spec())
    rows = [Row(TEXTS[0], 0, other=TEXTS[1]), Row(TEXTS[2], 0, other=TEXTS[3])]
    monkeypatch.setattr(inference, "_infer_sharing", lambda *_: pytest.fail("nothing is shared"))
    assert len(infer(bank, rows)) == 2
    assert len(infer(bank, [Row(TEXTS[0], 0, other=TEXTS[0])])) == 1, "one row has nothing to share with"
