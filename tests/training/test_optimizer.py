"""The optimizer against torch's own AdamW and against the formulas of SEMANTICS §1."""

from __future__ import annotations

import math

import pytest
import torch

from inlay.config import TrainConfig
from inlay.training.optimizer import SlotOptimizer, learning_rate


def stacks_of(num_slots):
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (3, 4), "bias": (4,)}
    return {
        name: torch.randn(num_slots, *shape, generator=generator).requires_grad_() for name, shape in shapes.items()
    }


def set_gradients(stacks, seed):
    generator = torch.Generator().manual_seed(seed)
    for stack in stacks.values():
        stack.grad = torch.randn(stack.shape, generator=generator)


DECAYS = {"matrix": True, "bias": False}


def test_each_slot_steps_as_torchs_adamw_would_alone():
    settings = [TrainConfig(weight_decay=0.1), TrainConfig(weight_decay=0.0)]
    stacks = stacks_of(2)
    alone = [{name: stack[slot].detach().clone() for name, stack in stacks.items()} for slot in range(2)]
    peers = [
        torch.optim.AdamW(
            [
                {"params": [own["matrix"]], "weight_decay": run.weight_decay},
                {"params": [own["bias"]], "weight_decay": 0},
            ]
        )
        for own, run in zip(alone, settings, strict=True)
    ]
    optimizer = SlotOptimizer(stacks, DECAYS, settings)
    for step in range(5):
        set_gradients(stacks, step)
        rates = {0: 1e-2 * (step + 1), 1: 3e-3}
        optimizer.step(rates)
        for slot, peer in enumerate(peers):
            for group in peer.param_groups:
                group["lr"] = rates[slot]
            for name, tensor in alone[slot].items():
                tensor.grad = stacks[name].grad[slot].clone()
            peer.step()
    for slot in range(2):
        for name, tensor in alone[slot].items():
            torch.testing.assert_close(stacks[name][slot].detach(), tensor, atol=1e-6, rtol=1e-5)


def test_bert_adam_follows_its_formula():
    stacks = stacks_of(1)
    weights = stacks["matrix"][0].detach().clone().double()
    m = v = torch.zeros_like(weights)
    optimizer = SlotOptimizer(stacks, DECAYS, [TrainConfig(optimizer="bert-adam", weight_decay=0.01)])
    for step in range(4):
        set_gradients(stacks, step)
        g = stacks["matrix"].grad[0].double()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        weights = weights - 1e-3 * (m / (v.sqrt() + 1e-6) + 0.01 * weights)
        optimizer.step({0: 1e-3})
    torch.testing.assert_close(stacks["matrix"][0].detach().double(), weights, atol=1e-6, rtol=1e-5)


def test_a_slot_that_is_not_named_does_not_move():
    stacks = stacks_of(3)
    optimizer = SlotOptimizer(stacks, DECAYS, [TrainConfig()] * 3)
    set_gradients(stacks, 0)
    optimizer.step({0: 1e-2, 1: 1e-2, 2: 1e-2})
    before = {name: stack.detach().clone() for name, stack in stacks.items()}
    moments = {name: tensor.clone() for name, tensor in optimizer.first.items()}
    for stack in stacks.values():
        stack.grad = torch.zeros_like(stack)
    optimizer.step({0: 1e-2, 2: 1e-2})
    for name, stack in stacks.items():
        assert torch.equal(stack[1], before[name][1])
        assert torch.equal(optimizer.first[name][1], moments[name][1])
        assert not torch.equal(stack[0], before[name][0])  # momentum and decay moved the others
    assert optimizer.num_steps == [2, 1, 2]


def test_clipping_is_by_the_norm_of_each_slot():
    stacks = stacks_of(3)
    set_gradients(stacks, 1)
    grads = {name: stack.grad.clone() for name, stack in stacks.items()}
    settings = [TrainConfig(clip_norm=1.0), TrainConfig(clip_norm=100.0), TrainConfig(clip_norm=0.0)]
    norms = SlotOptimizer(stacks, DECAYS, settings).clip()
    for slot in range(3):
        norm = math.sqrt(sum(float(grad[slot].square().sum()) for grad in grads.values()))
        assert float(norms[slot]) == pytest.approx(norm, rel=1e-5)
        scale = 1 / norm if slot == 0 else 1.0
        for name, grad in grads.items():
            torch.testing.assert_close(stacks[name].grad[slot], grad[slot] * scale)


def test_linear_schedule_rises_to_the_peak_and_falls_to_zero():
    train = TrainConfig(lr=1.0, warmup=0.1)
    rates = [learning_rate(train, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:] == pytest.approx([(100 - step) / 90 for step in range(10, 100)])


def test_bert_schedule_drops_to_nine_tenths_at_the_end_of_warm_up():
    train = TrainConfig(lr=1.0, warmup=0.1, schedule="bert")
    rates = [learning_rate(train, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(10)])
    assert rates[10] == pytest.approx(0.9)
    assert rates[10:] == pytest.approx([1 - step / 100 for step in range(10, 100)])


def test_constant_schedule_stays_after_warm_up():
    train = TrainConfig(lr=2.0, warmup=0.0, schedule="constant")
    assert {learning_rate(train, step, 7) for step in range(7)} == {2.0}
