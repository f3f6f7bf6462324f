"""Attention over packed rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from inlay.model.backbone.families import FAMILIES
from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import SlotSpec
from inlay.model.batch.buckets import BucketBuffers, Capacity, PackedRows
from inlay.model.batch.route import Pack, Row, collate, pack
from inlay.model.heads.heads import HeadSpec
from inlay.model.kernels import attention
from inlay.model.kernels.attention import attend, attend_across, attend_first, spread_bias
from inlay.settings.run_config import MethodConfig
from tiny_backbones import WRITING

LENGTHS = (1, 1, 3, 7, 7, 7, 12, 2)
HEADS, CHANNELS = 3, 8


def draw(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(LENGTHS), HEADS, CHANNELS)
    return [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3)]


def plain(q, k, v, bias_HW=None):
    """Softmax over each row's own tokens, head by head, as the formula says."""
    out, start = [], 0
    for length in LENGTHS:
        for token in range(start, start + length):
            heads = []
            for head in range(HEADS):
                scores = [
                    q[token, head] @ k[other, head] / math.sqrt(CHANNELS) for other in range(start, start + length)
                ]
                if bias_HW is not None:
                    middle = bias_HW.shape[1] // 2
                    scores = [score + bias_HW[head, middle + start + i - token] for i, score in enumerate(scores)]
                heads.append(torch.softmax(torch.stack(scores), 0) @ v[start : start + length, head])
            out.append(torch.stack(heads))
        start += length
    return torch.stack(out)


@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("path", ["weights kept", "in place", "padded"])
def test_every_row_attends_to_itself_alone(is_biased, path, monkeypatch):
    monkeypatch.setattr(attention, "MOST_KEPT", max(LENGTHS) - (path == "in place"))
    generator = torch.Generator().manual_seed(9)
    bias = torch.randn(HEADS, 31, dtype=torch.float64, generator=generator) if is_biased else None
    ours, reference = draw(), draw()
    packed = Pack(LENGTHS, torch.device("cpu"))
    if path == "padded":
        is_real = packed.is_real_BT
        out = attention.attend_rows(*map(packed.unpack, ours), is_real, CHANNELS**-0.5, 0.0, bias)[is_real]
    else:
        out = attend(*ours, packed, scaling=CHANNELS**-0.5, bias_HW=bias)
    expected = plain(*reference, bias)
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("is_biased", [False, True])
def test_first_tokens_attend_as_they_do_beside_the_others(is_biased):
    generator = torch.Generator().manual_seed(9)
    bias = torch.randn(HEADS, 31, dtype=torch.float64, generator=generator) if is_biased else None
    packed = Pack(LENGTHS, torch.device("cpu"))
    (q, *ours), reference = draw(), draw()
    first_B = q.detach()[packed.starts_B].requires_grad_()
    out = attend_first(first_B, *ours, packed, scaling=CHANNELS**-0.5, bias_HW=bias)
    expected = plain(*reference, bias)[packed.starts_B]
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(first_B.grad, reference[0].grad[packed.starts_B])
    for mine, theirs in zip(ours, reference[1:], strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_what_is_written_of_a_row_attends_to_what_was_read_of_it():
    drawn, lengths = torch.Generator().manual_seed(0), [3, 1, 7]
    rung = BucketBuffers(Capacity(num_tokens=64, num_rows=4, num_slots=1, max_length=16), 0, 0, torch.device("cpu"))
    rung.fill(rung.lay(PackedRows(np.zeros(11, np.int64), None, np.array(lengths), np.zeros(3, np.int64))))
    q = torch.randn(4, 2, 2, 8, generator=drawn, requires_grad=True)  # of a row of padding too
    k, v = (torch.randn(64, 2, 8, generator=drawn, requires_grad=True) for _ in range(2))
    out = attend_across(q, k, v, rung.route.tiling, scaling=0.5)
    expected, start = [], 0
    for row, length in enumerate(lengths):
        keys, values = (x[start : start + length] for x in (k, v))
        weights = torch.einsum("thc,nhc->htn", q[row], keys).mul(0.5).softmax(-1)
        expected.append(torch.einsum("htn,nhc->thc", weights, values))
        start += length
    given = torch.randn(3, 2, 2, 8, generator=drawn)
    torch.testing.assert_close(out[:3], torch.stack(expected))
    found, plain = (torch.autograd.grad((x * given).sum(), (q, k, v)) for x in (out[:3], torch.stack(expected)))
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.isfinite(out).all()


def test_weights_are_kept_only_where_gradients_are_computed_and_rows_are_short(monkeypatch):
    kept = []
    products = attention._Products.apply
    monkeypatch.setattr(attention._Products, "apply", lambda *inputs: kept.append(inputs) or products(*inputs))
    q, k, v = draw()
    packed = Pack(LENGTHS, torch.device("cpu"))
    attend(q.detach(), k.detach(), v.detach(), packed, scaling=1.0)
    with torch.no_grad():
        attend(q, k, v, packed, scaling=1.0)
    monkeypatch.setattr(attention, "MOST_KEPT", max(LENGTHS) - 1)
    attend(q, k, v, packed, scaling=1.0)
    assert not kept
    monkeypatch.setattr(attention, "MOST_KEPT", max(LENGTHS))
    attend(q, k, v, packed, scaling=1.0)
    assert len(kept) == 1


def test_attention_dropout_keeps_the_mean_and_is_not_the_same_twice():
    q, k, v = (x.detach() for x in draw())
    packed = Pack(LENGTHS, torch.device("cpu"))
    outs = [attend(q, k, v, packed, scaling=1.0, dropout=0.5) for _ in range(2000)]
    assert not torch.equal(outs[0], outs[1])
    expected = attend(q, k, v, packed, scaling=1.0)
    torch.testing.assert_close(torch.stack(outs).mean(0), expected, atol=0.25, rtol=0.1)


def test_a_bias_by_distance_is_the_matrix_of_the_formula():
    bias = torch.arange(2 * 11.0).view(2, 11)
    spread = spread_bias(bias, 4)
    assert spread.shape == (2, 4, 4)
    assert all(spread[h, i, j] == bias[h, 5 + j - i] for h in range(2) for i in range(4) for j in range(4))


PACKED = [name for name, family in FAMILIES.items() if family.packing != "none"]


def test_all_families_but_two_are_packed():
    assert set(FAMILIES) - set(PACKED) == {"deberta-v2", "modernbert"}


@pytest.mark.parametrize("family", PACKED)
def test_packed_logits_and_gradients_equal_padded_ones(backbone_of, family):
    """Position ids, biases and token types all restart in each row."""
    backbone = backbone_of(family)
    rows = [Row([5 + i % 40 for i in range(n)], slot, [i % 2 for i in range(n)] if family == "bert" else None)
            for n, slot in ((3, 1), (40, 0), (1, 0), (17, 1), (17, 1), (2, 0))]  # fmt: skip
    results = []
    for batch in (collate(rows, backbone.pad_id), pack(rows, backbone.first_position)):
        bank = Bank(backbone, 2, trainable=True)
        for slot in range(2):
            bank.initialise(
                slot, SlotSpec.of(MethodConfig("houlsby", 8, init_std=0.3), HeadSpec("classify", 3, "mean")), slot
            )
        flat = bank.flatten()
        with bank.routed(batch.route):
            logits = torch.cat(bank.logits(batch))
            logits.square().sum().backward()
        back = torch.empty_like(logits)
        back[list(batch.order)] = logits
        results.append((back, flat.take_grads()))
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[1][1], results[0][1], atol=1e-4, rtol=1e-4)


METHODS = (
    MethodConfig("houlsby", 8),
    MethodConfig("pfeiffer", 8),
    MethodConfig("parallel", 8),
    MethodConfig("lora", 8),
    MethodConfig("ia3"),
    MethodConfig("bitfit"),
    MethodConfig("mahabadi", 8),
    MethodConfig("pal"),
)


@pytest.mark.parametrize("family", [family for family in PACKED if family not in WRITING])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_last_block_of_first_tokens_alone_gives_heads_and_gradients_the_same(backbone_of, family, method):
    backbone = backbone_of(family)
    rows = [Row([5 + (i * n) % 40 for i in range(n)], slot) for n, slot in ((3, 1), (20, 0), (1, 0), (17, 1), (17, 1))]
    results = []
    for is_narrow in (False, True):
        bank = Bank(backbone, 2, trainable=True)
        for slot in range(2):
            bank.initialise(slot, SlotSpec.of(method, HeadSpec("classify", 3, "cls")), slot)
        flat = bank.flatten()
        # Some methods begin at zero, where half of the gradients are.
        noise = torch.randn(flat.values_SP.shape, generator=torch.Generator().manual_seed(3))
        flat.values_SP.add_(noise, alpha=0.1)
        batch = pack(rows, backbone.first_position)
        batch = batch.narrowed() if is_narrow else batch
        with bank.routed(batch.route):
            hidden = backbone.hidden(batch)
            logits = torch.cat(bank.logits(batch))
            logits.square().sum().backward()
        assert hidden.shape[1] == (len(rows) if is_narrow else sum(len(row.ids) for row in rows))
        results.append((logits, flat.take_grads()))
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[1][1], results[0][1], atol=1e-4, rtol=1e-4)
    assert results[0][1].abs().max() > 1e-3
