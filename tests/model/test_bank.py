"""Slots of a bank: what goes in comes out, and none touches another."""

from __future__ import annotations

import pytest
import torch

from inlay.errors import StoreDamaged
from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import SlotSpec
from inlay.model.batch.route import Route, Row, Segment, collate
from inlay.model.heads.heads import HEADS, HeadSpec, Output, find_head
from inlay.model.heads.inference import batches_by_length, infer, infer_canonically
from inlay.model.kernels import launch
from inlay.model.kernels.bottleneck_weights import ACTIVATIONS, Bottleneck, BottleneckShape
from inlay.model.kernels.reference import bottleneck, layer_norm, linear_heads
from inlay.settings.run_config import MethodConfig
from inlay.threads import single_thread


def spec(size=8, num_labels=2, method="houlsby", **more):
    return SlotSpec.of(MethodConfig(method, size, **more), HeadSpec("classify", num_labels, "mean"))


ROWS = [[2, 11, 45, 3], [2, 12, 3], [2, 9, 30, 31, 32, 3], [2, 3]]


def test_route_is_segments_of_rows_sorted_by_slot():
    batch = collate([Row(ids, slot) for ids, slot in zip(ROWS, [3, 0, 3, 1], strict=True)], pad_id=0)
    assert batch.route.segments == (Segment(0, 0, 1), Segment(1, 1, 2), Segment(3, 2, 4))
    assert batch.order == (1, 3, 0, 2)
    assert batch.input_ids_BT.tolist()[0] == [2, 12, 3, 0, 0, 0]
    assert batch.mask_BT.sum(1).tolist() == [3, 2, 4, 6]


def test_rows_that_are_not_sorted_by_slot_are_a_bug():
    with pytest.raises(AssertionError):
        Route.from_slots([0, 1, 0])


def test_put_grows_the_bank_and_leaves_other_slots_as_they_were(tiny_bert):
    bank = Bank(tiny_bert, 3)
    bank.initialise(0, spec(size=4), seed=0)
    before = bank.read(0)
    bank.initialise(1, spec(size=40, num_labels=30), seed=1)
    bank.initialise(2, spec(size=8, method="pfeiffer"), seed=2)
    after = bank.read(0)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert bank.stacks["adapter.0.attention.down"].shape == (3, 32, 40)


def test_bottlenecks_are_padded_to_a_multiple_of_eight(tiny_bert):
    bank = Bank(tiny_bert, 1)
    bank.initialise(0, spec(size=13), seed=0)
    assert bank.stacks["adapter.2.feedforward.up"].shape == (1, 16, 32)
    assert bank.read(0)["adapter.2.feedforward.up"].shape == (13, 32)


@pytest.mark.parametrize("more", [{"inner_norm": "layer"}, {"inner_norm": "batch"}, {"depth": 2}], ids=str)
@pytest.mark.parametrize("is_wide_first", [True, False])
def test_all_stacks_of_an_adapter_are_as_wide_as_its_widest(tiny_bert, more, is_wide_first):
    specs = [spec(size=40), spec(size=8, **more)]
    bank, kept = Bank(tiny_bert, 2), {}
    for slot in (0, 1) if is_wide_first else (1, 0):
        bank.initialise(slot, specs[slot], seed=slot)
        kept[slot] = bank.read(slot)
    stacks = {name: stack for name, stack in bank.stacks.items() if name.startswith("adapter.0.attention.")}
    assert len(stacks) > 4  # a norm's or a further layer's too
    hidden = 32
    assert all(set(stack.shape[1:]) <= {40, hidden} for stack in stacks.values())
    for slot, tensors in kept.items():
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in bank.read(slot).items())


@pytest.mark.parametrize("more", [{"inner_norm": "layer"}, {"depth": 2}], ids=str)
def test_what_is_put_where_it_was_reserved_stays_among_what_is_trained(tiny_bert, more):
    bank = Bank(tiny_bert, 2, trainable=True)
    narrow, wide = spec(size=8, **more), spec(size=40)
    for one in (narrow, wide):
        bank.reserve(one)
    flat = bank.flatten()
    for slot, one in enumerate((narrow, wide)):
        bank.initialise(slot, one, seed=slot)
    flat.values_SP.detach().fill_(7.0)
    assert all((stack == 7.0).all() for stack in bank.stacks.values())


def test_a_bank_laid_out_for_training_does_not_grow(tiny_bert):
    bank = Bank(tiny_bert, 2, trainable=True)
    bank.reserve(spec(size=8))
    bank.flatten()
    bank.initialise(0, spec(size=4), seed=0)
    for larger in (spec(size=16), spec(size=8, num_labels=3), spec(size=8, depth=2)):
        with pytest.raises(AssertionError, match="leaves what is trained"):
            bank.initialise(1, larger, seed=0)


@pytest.mark.triton
@pytest.mark.parametrize("more", [{"inner_norm": "layer"}, {"inner_norm": "batch"}, {"depth": 2}], ids=str)
def test_wide_plain_and_narrow_other_adapters_go_through_programs_together(tiny_bert, monkeypatch, more):
    rows, answers = [Row(ids, slot) for slot in (0, 1) for ids in ROWS[:2]], []
    for has_programs in (False, True):
        with monkeypatch.context() as here:
            if not has_programs:
                here.setattr(launch, "is_available", lambda device: False)
            bank = Bank(tiny_bert, 2)
            bank.initialise(0, spec(size=40, init_std=0.3), seed=0)
            bank.initialise(1, spec(size=8, init_std=0.3, **more), seed=1)
            answers.append(infer(bank, rows))
    for a, b in zip(*answers, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_a_freed_slot_is_the_identity_again(tiny_bert):
    bank = Bank(tiny_bert, 2)
    bank.initialise(0, spec(init_std=0.5), seed=0)
    bank.initialise(1, spec(), seed=1)
    bank.free(0)
    batch = collate([Row(ids, 0) for ids in ROWS], tiny_bert.pad_id)
    with torch.no_grad():
        plain = tiny_bert.hidden(batch)
        with bank.routed(batch.route):
            assert torch.allclose(tiny_bert.hidden(batch), plain, atol=1e-6)


def test_misfitting_tensors_are_refused_and_change_nothing(tiny_bert):
    bank = Bank(tiny_bert, 1)
    bank.initialise(0, spec(), seed=0)
    good = bank.read(0)
    lacking = {name: tensor for name, tensor in good.items() if name != "head.bias"}
    with pytest.raises(StoreDamaged, match=r"lacks `head\.bias`"):
        bank.put(0, spec(), lacking)
    with pytest.raises(StoreDamaged, match="has `more`"):
        bank.put(0, spec(), {**good, "more": torch.zeros(1)})
    with pytest.raises(StoreDamaged, match="shape"):
        bank.put(0, spec(), {**good, "head.bias": torch.zeros(3)})
    assert all(torch.equal(tensor, good[name]) for name, tensor in bank.read(0).items())


def test_route_ends_with_its_block_even_after_an_error(tiny_bert):
    bank = Bank(tiny_bert, 1)
    bank.initialise(0, spec(), seed=0)
    with pytest.raises(ZeroDivisionError), bank.routed(Route.from_slots([0])):
        _ = 1 / (tiny_bert.mount.active is None)
    assert tiny_bert.mount.active is None


def random_bottleneck(sizes, width=12, padded=16):
    generator = torch.Generator().manual_seed(0)
    slots = len(sizes)
    shapes = [(slots, width, padded), (slots, padded), (slots, padded, width), (slots, width)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    down, down_bias, up, up_bias = tensors
    names = ["gelu", "relu", "tanh", "swish"]
    shapes = [BottleneckShape(size, name) if size else None for size, name in zip(sizes, names, strict=False)]
    return Bottleneck(down, up, shapes, down_bias, up_bias)


def test_bottleneck_is_the_formula_for_each_segment_and_its_own_columns():
    weights = random_bottleneck([5, 16, 0, 1])
    route = Route((Segment(1, 0, 2), Segment(2, 2, 3), Segment(3, 3, 7)))
    h = torch.randn(7, 3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = bottleneck(h, weights, route)
    for slot, start, stop in route.segments:
        shape = weights.shapes[slot]
        if shape is None:
            assert found[start:stop].abs().sum() == 0
            continue
        z = h[start:stop] @ weights.down_SDR[slot, :, : shape.size] + weights.down_bias_SR[slot, : shape.size]
        z = ACTIVATIONS[shape.activation](z)
        expected = z @ weights.up_SRE[slot, : shape.size] + weights.up_bias_SE[slot]
        torch.testing.assert_close(found[start:stop], expected)
    found.sum().backward()
    for tensor in (weights.down_SDR, weights.up_SRE, weights.up_bias_SE):
        assert tensor.grad[0].abs().sum() == 0  # no rows
        assert tensor.grad[2].abs().sum() == 0  # no adapter
    assert weights.down_SDR.grad[3, :, 1:].abs().sum() == 0  # padding
    assert weights.down_SDR.grad[3, :, :1].abs().sum() > 0


def test_layer_norm_is_the_formula_for_each_slot():
    x = torch.randn(5, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scale, shift = torch.rand(3, 6, dtype=torch.float64), torch.rand(3, 6, dtype=torch.float64)
    route = Route((Segment(0, 0, 1), Segment(2, 1, 5)))
    normal = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    slots = torch.tensor([0, 2, 2, 2, 2])
    expected = normal * scale[slots][:, None] + shift[slots][:, None]
    torch.testing.assert_close(layer_norm(x, scale, shift, 1e-5, route), expected)
    torch.testing.assert_close(layer_norm(x, scale, None, 1e-5, route), normal * scale[slots][:, None])


def test_heads_are_as_wide_as_their_own_labels():
    pooled = torch.randn(4, 6)
    weight, bias = torch.randn(2, 20, 6), torch.randn(2, 20)
    few, many = linear_heads(pooled, weight, bias, [2, 20], Route((Segment(0, 0, 3), Segment(1, 3, 4))))
    torch.testing.assert_close(few, pooled[:3] @ weight[0, :2].T + bias[0, :2])
    torch.testing.assert_close(many, pooled[3:] @ weight[1].T + bias[1])


def test_batches_by_length_hold_every_row_once_within_the_budget():
    lengths = [5, 90, 3, 3, 40, 41, 12, 200]
    batches = list(batches_by_length(lengths, 100))
    assert sorted(index for batch in batches for index in batch) == list(range(8))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= 100


@pytest.mark.parametrize("packs", [False, True])
def test_rows_of_a_kind_lie_together_whatever_their_lengths(packs):
    lengths, kinds = [5, 30, 3, 3, 20, 21, 12, 20], "abababab"
    batches = list(batches_by_length(lengths, 70, packs=packs, kinds=kinds))
    order = [index for batch in batches for index in batch]
    assert sorted(order) == list(range(8))
    assert "".join(kinds[index] for index in order) == "aaaabbbb"
    for batch in batches:
        own = [lengths[index] for index in batch]
        assert len(batch) == 1 or (sum(own) if packs else max(own) * len(own)) <= 70
    assert any(len({kinds[index] for index in batch}) == 2 for batch in batches), "no pass is begun for a kind alone"


def test_infer_answers_in_the_order_asked(tiny_bert):
    bank = Bank(tiny_bert, 2)
    bank.initialise(0, spec(num_labels=2), seed=0)
    bank.initialise(1, spec(num_labels=5), seed=1)
    rows = [Row(ids, slot) for ids, slot in zip(ROWS, [1, 0, 0, 1], strict=True)]
    heard = []
    answers = infer(bank, rows, on_batch=heard.append)
    assert [len(answer) for answer in answers] == [5, 2, 2, 5]
    assert sum(heard) == 4
    assert infer(bank, []) == []


def test_canonical_answers_are_bit_identical_whatever_else_the_process_did(tiny_bert):
    bank = Bank(tiny_bert, 1)
    bank.initialise(0, spec(init_std=0.3), seed=0)
    rows = [Row(ids, 0) for ids in ROWS]
    first = infer_canonically(tiny_bert, spec(init_std=0.3), bank.read(0), rows)
    other = Bank(tiny_bert, 4)
    other.initialise(3, spec(size=64), seed=9)
    infer(other, [Row(ids, 3) for ids in ROWS])
    second = infer_canonically(tiny_bert, spec(init_std=0.3), bank.read(0), rows)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    mixed = infer(bank, rows)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(first, mixed, strict=True))


def test_one_thread_inside_the_block_and_as_before_after_it():
    before = torch.get_num_threads()
    with single_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_heads_turn_logits_into_answers():
    logits = torch.tensor([1.0, 3.0])
    answer = find_head("classify").answer(Output((logits,)), HeadSpec("classify", 2, "cls"), ("no", "yes"))
    assert answer.label == "yes"
    assert answer.probabilities["yes"] == pytest.approx(1 / (1 + 2.718281828**-2.0))
    several = find_head("multilabel").answer(
        Output((torch.tensor([-1.0, 0.5, 2.0]),)), HeadSpec("multilabel", 3, "cls"), "abc"
    )
    assert several.labels == ("b", "c")
    number = find_head("regress").answer(Output((torch.tensor([0.5]),)), HeadSpec("regress", 1, "cls", 100.0, 20.0), ())
    assert number.to_json() == {"value": 110.0}


def test_a_label_applies_where_it_is_likelier_than_not():
    """A logit of 0.2 is a probability of 0.55."""
    logits = torch.tensor([-0.2, 0.2])
    answer = find_head("multilabel").answer(Output((logits,)), HeadSpec("multilabel", 2, "cls"), "ab")
    assert answer.labels == ("b",)
    assert answer.probabilities["b"] == pytest.approx(1 / (1 + 2.718281828**-0.2))


def test_row_losses_follow_their_formulas():
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([0, 2, 1, 1])
    expected = torch.logsumexp(logits, 1) - logits[torch.arange(4), chosen]
    torch.testing.assert_close(HEADS["classify"].row_losses(logits, chosen), expected)
    targets = torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    p = torch.sigmoid(logits)
    expected = -(targets * p.log() + (1 - targets) * (1 - p).log()).mean(1)
    torch.testing.assert_close(HEADS["multilabel"].row_losses(logits, targets), expected)
    numbers = torch.tensor([1.0, 2, 3, 4])
    torch.testing.assert_close(HEADS["regress"].row_losses(logits, numbers), (logits[:, 0] - numbers) ** 2)


def hidden_of(bank, slot, ids):
    batch = bank.backbone.collate([Row(ids, slot)])
    with torch.inference_mode(), bank.routed(batch.route):
        return bank.backbone.hidden(batch)


def moved(bank, slot, kind, seed=0):
    """Put a slot whose tensors are all far from neutral; they come back."""
    bank.initialise(slot, kind, seed)
    noise = torch.Generator().manual_seed(seed)
    tensors = {name: t + 0.2 * torch.randn(t.shape, generator=noise) for name, t in bank.read(slot).items()}
    bank.put(slot, kind, tensors)
    return tensors


@pytest.mark.parametrize("method", ["houlsby", "pfeiffer", "parallel", "lora"])
@pytest.mark.parametrize("trainable", [False, True])
def test_a_gate_takes_out_the_adapters_of_its_layers_and_nothing_else(tiny_bert, method, trainable):
    bank, plain = Bank(tiny_bert, 2, trainable=trainable), Bank(tiny_bert, 1)
    kind = spec(method=method)
    tensors = moved(bank, 0, kind)
    moved(bank, 1, kind, seed=1)
    other, before = hidden_of(bank, 1, ROWS[2]), hidden_of(bank, 0, ROWS[2])
    bank.gate(0, [1])
    silent = {
        name: torch.zeros_like(t) if name.split(".")[1] == "1" and name.endswith((".up", ".up_bias")) else t
        for name, t in tensors.items()
    }
    plain.put(0, kind, silent)
    torch.testing.assert_close(hidden_of(bank, 0, ROWS[2]), hidden_of(plain, 0, ROWS[2]))
    assert not torch.allclose(hidden_of(bank, 0, ROWS[2]), before, atol=1e-3)
    assert torch.equal(hidden_of(bank, 1, ROWS[2]), other)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in bank.read(0).items())
    bank.gate(0, [])
    assert torch.equal(hidden_of(bank, 0, ROWS[2]), before)


def test_a_gate_goes_with_the_slot_that_leaves(tiny_bert):
    bank = Bank(tiny_bert, 1)
    tensors = moved(bank, 0, spec())
    before = hidden_of(bank, 0, ROWS[2])
    bank.gate(0, range(3))
    bank.put(0, spec(), tensors)
    assert torch.equal(hidden_of(bank, 0, ROWS[2]), before)


def test_a_shared_adapter_is_gated_in_one_layer_alone(tiny_bert):
    shared, own = Bank(tiny_bert, 1), Bank(tiny_bert, 1)
    tensors = moved(shared, 0, spec(sharing="all"))
    shared.gate(0, [2])
    expanded = {item.name: tensors.get(item.name) for item in spec().layout(tiny_bert.anatomy)}
    for name in expanded:
        if name.startswith("adapter."):
            part = name.rpartition(".")[2]
            is_gone = name.startswith("adapter.2.") and part in ("up", "up_bias")
            expanded[name] = tensors[f"adapter.0-2.{part}"] * (0 if is_gone else 1)
    own.put(0, spec(), expanded)
    torch.testing.assert_close(hidden_of(shared, 0, ROWS[2]), hidden_of(own, 0, ROWS[2]))


def test_repeated_slots_share_the_tensors_of_one(tiny_bert):
    bank = Bank(tiny_bert, 2)
    moved(bank, 0, spec())
    tensors = moved(bank, 1, spec(), seed=1)
    many = bank.repeated(1, 79)
    assert {stack.untyped_storage().data_ptr() for stack in many.stacks.values()} == {
        stack.untyped_storage().data_ptr() for stack in bank.stacks.values()
    }
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in many.read(40).items())
    assert torch.equal(hidden_of(many, 78, ROWS[2]), hidden_of(bank, 1, ROWS[2]))
    with pytest.raises(AssertionError, match="cannot change hands"):
        many.free(0)
