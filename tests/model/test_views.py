"""Batch norm's statistics, the layers before a head, and what stays still below the first adapted layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import SlotSpec
from inlay.model.bank.pass_hooks import Copies
from inlay.model.batch.route import Row, collate
from inlay.model.heads import readout
from inlay.model.heads.heads import HeadSpec
from inlay.settings.run_config import MethodConfig

ROWS = [[2, 11, 45, 3], [2, 12, 3], [2, 9, 30, 31, 32, 3], [2, 3]]


def make_batch(backbone, slots):
    return collate([Row(ids, slot) for ids, slot in zip(ROWS, slots, strict=True)], backbone.pad_id)


def test_batch_norm_learns_its_statistics_from_the_slots_own_real_tokens(tiny_bert):
    head = HeadSpec("classify", 2, "mean")
    bank = Bank(tiny_bert, 2, trainable=True)
    for slot in range(2):
        bank.initialise(
            slot, SlotSpec.of(MethodConfig(size=3 + slot, inner_norm="batch", init_std=0.3), head), seed=slot
        )
    seen = {}
    site = tiny_bert.model.get_submodule("encoder.layer.0.attention.output.dropout.inner")
    handle = site.register_forward_hook(lambda module, args, out: seen.update(h=out.detach()))
    batch = make_batch(tiny_bert, [0, 1, 0, 1])
    with tiny_bert.training(0.0), bank.routed(batch.route):
        sum(logits.sum() for logits in bank.logits(batch)).backward()
    handle.remove()
    for slot, start, stop in batch.route.segments:
        tensors = bank.read(slot)
        tokens = seen["h"][start:stop][batch.mask_BT[start:stop].bool()]
        z = tokens @ tensors["adapter.0.attention.down"]
        expected_var = 0.9 + 0.1 * z.var(0, correction=0)
        torch.testing.assert_close(tensors["adapter.0.attention.running_mean"], 0.1 * z.mean(0))
        torch.testing.assert_close(tensors["adapter.0.attention.running_var"], expected_var)


def test_batch_norm_statistics_stay_still_outside_of_training(tiny_bert):
    bank = Bank(tiny_bert, 1, trainable=True)
    bank.initialise(0, SlotSpec.of(MethodConfig(size=3, inner_norm="batch"), HeadSpec("classify", 2, "mean")), seed=0)
    batch = make_batch(tiny_bert, [0] * 4)
    before = bank.read(0)
    with bank.routed(batch.route):
        bank.logits(batch)
    after = bank.read(0)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "deberta-v2", "mpnet"])
def test_a_mix_is_the_softmax_mean_of_all_layers_times_a_factor(backbone_of, family):
    backbone = backbone_of(family)
    bank = Bank(backbone, 1)
    bank.initialise(0, SlotSpec.of(MethodConfig("head"), HeadSpec("classify", 3, "cls", features="mix")), seed=0)
    tensors = bank.read(0)
    tensors["head.mix"] = torch.tensor([0.3, -1.0, 2.0, 0.5])
    tensors["head.mix_scale"] = torch.tensor([1.7])
    bank.put(0, bank.specs[0], tensors)
    batch = make_batch(backbone, [0] * 4)
    with torch.no_grad(), bank.routed(batch.route):
        (logits,) = bank.logits(batch)
    from transformers import AutoModel

    attention = backbone.model.config._attn_implementation
    model = AutoModel.from_pretrained(backbone.folder, attn_implementation=attention).eval()
    with torch.no_grad():
        states = model(batch.input_ids_BT, batch.mask_BT, output_hidden_states=True).hidden_states
    shares = tensors["head.mix"].exp() / tensors["head.mix"].exp().sum()
    mixed = 1.7 * sum(share * state[:, 0] for share, state in zip(shares, states, strict=True))
    torch.testing.assert_close(logits, mixed @ tensors["head.weight"].T + tensors["head.bias"], atol=1e-5, rtol=1e-4)


def test_a_tanh_layer_stands_before_the_head_and_a_pooler_starts_as_the_backbones(tiny_bert):
    batch = make_batch(tiny_bert, [0] * 4)
    head = HeadSpec("classify", 3, "cls", hidden="pooler")
    bank = Bank(tiny_bert, 2)
    bank.initialise(0, SlotSpec.of(MethodConfig("head"), head), seed=0)
    with torch.no_grad(), bank.routed(batch.route):
        (logits,) = bank.logits(batch)
        hidden = tiny_bert.hidden(batch)
        pooled = tiny_bert.pool(hidden, batch.mask_BT, "pooler")
    tensors = bank.read(0)
    torch.testing.assert_close(logits, pooled @ tensors["head.weight"].T + tensors["head.bias"])

    bank.initialise(0, SlotSpec.of(MethodConfig("head"), dataclasses.replace(head, hidden="tanh")), seed=0)
    tensors = bank.read(0)
    with torch.no_grad(), bank.routed(batch.route):
        (logits,) = bank.logits(batch)
    z = torch.tanh(hidden[:, 0] @ tensors["head.hidden.weight"].T + tensors["head.hidden.bias"])
    torch.testing.assert_close(logits, z @ tensors["head.weight"].T + tensors["head.bias"])


def test_dropout_is_before_and_after_a_tanh_layer_but_not_before_a_pooler(tiny_bert, monkeypatch):
    batch = make_batch(tiny_bert, [0] * 4)
    for hidden, times in [("none", 1), ("tanh", 2), ("pooler", 1)]:
        bank = Bank(tiny_bert, 1, trainable=True)
        bank.initialise(0, SlotSpec.of(MethodConfig("head"), HeadSpec("classify", 3, "cls", hidden=hidden)), seed=0)
        rates = []
        monkeypatch.setattr(readout, "_dropped", lambda x, rate, rates=rates: rates.append(rate) or x)
        with bank.routed(batch.route):
            bank.logits(batch, dropout={0: 0.3})
        assert [rate for rate in rates if rate] == [0.3] * times, hidden


@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "deberta-v2", "mpnet"])
def test_below_the_first_trained_layer_nothing_is_dropped(backbone_of, family):
    backbone = backbone_of(family)
    batch = make_batch(backbone, [0] * 4)
    torch.manual_seed(0)

    def layers():
        with torch.no_grad():
            return backbone.hidden_layers(batch, all_layers=True)

    still = layers()
    with backbone.training(0.5, 2):
        moving = layers()
    for layer in range(3):  # embeddings and two blocks
        assert torch.equal(moving[layer], still[layer])
    assert not torch.equal(moving[3], still[3])
    assert all(torch.equal(a, b) for a, b in zip(layers(), still, strict=True))


def test_copies_follow_what_was_copied_and_share_one_where_it_lies_together():
    whole = torch.randn(3, 2, 16, requires_grad=True)
    sites, apart = [whole[index] for index in range(3)], torch.randn(2, 40)[:, 3:19]
    copies = Copies(torch.bfloat16)
    found = [copies.add(stack) for stack in (*sites, apart)]
    assert copies.add(sites[0]).data_ptr() == found[0].data_ptr()
    assert len({copy.untyped_storage().data_ptr() for copy in found}) == 2
    for _ in range(2):
        copies.renew()
        for copy, stack in zip(found, (*sites, apart), strict=True):
            assert not copy.requires_grad
            assert torch.equal(copy, stack.detach().to(torch.bfloat16))
        with torch.no_grad():
            whole.mul_(3)
