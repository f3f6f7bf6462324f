"""The optimizer against torch's own AdamW and against the formulas of docs/methods.md."""

from __future__ import annotations

import math

import pytest
import torch

from inlay.model.bank.flat import FlatBank
from inlay.settings.run_config import TrainConfig
from inlay.training.step.optimizer import SlotOptimizer, _apply_adam, learning_rate

# Of a slot's seven parameters the first five are a matrix's, the rest biases.
DECAYS = torch.tensor([True] * 5 + [False] * 2)


def make_bank(num_slots):
    values = torch.randn(num_slots, 7, generator=torch.Generator().manual_seed(0))
    return FlatBank(values, DECAYS, ())


def make_gradients(bank, seed):
    return torch.randn(bank.values_SP.shape, generator=torch.Generator().manual_seed(seed))


def test_each_slot_steps_as_torchs_adamw_would_alone():
    settings = [TrainConfig(weight_decay=0.1), TrainConfig(weight_decay=0.0)]
    bank = make_bank(2)
    alone = [[row[:5].clone(), row[5:].clone()] for row in bank.values_SP]
    peers = [
        torch.optim.AdamW(
            [{"params": [matrix], "weight_decay": run.weight_decay}, {"params": [bias], "weight_decay": 0}]
        )
        for (matrix, bias), run in zip(alone, settings, strict=True)
    ]
    optimizer = SlotOptimizer(bank, settings)
    for step in range(5):
        grads = make_gradients(bank, step)
        rates = {0: 1e-2 * (step + 1), 1: 3e-3}
        optimizer.step(grads, rates)
        for slot, peer in enumerate(peers):
            for group in peer.param_groups:
                group["lr"] = rates[slot]
            alone[slot][0].grad, alone[slot][1].grad = grads[slot, :5].clone(), grads[slot, 5:].clone()
            peer.step()
    for slot in range(2):
        torch.testing.assert_close(bank.values_SP[slot], torch.cat(alone[slot]), atol=1e-6, rtol=1e-5)


def test_bert_adam_follows_its_formula():
    bank = make_bank(1)
    weights = bank.values_SP[0].double()
    m = v = torch.zeros_like(weights)
    optimizer = SlotOptimizer(bank, [TrainConfig(optimizer="bert-adam", weight_decay=0.01)])
    for step in range(4):
        grads = make_gradients(bank, step)
        g = grads[0].double()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        weights = weights - 1e-3 * (m / (v.sqrt() + 1e-6) + 0.01 * weights * DECAYS)
        optimizer.step(grads, {0: 1e-3})
    torch.testing.assert_close(bank.values_SP[0].double(), weights, atol=1e-6, rtol=1e-5)


def test_a_step_in_pieces_is_a_step_of_all_at_once_and_of_columns(monkeypatch):
    """On a CPU a slot moves piece by piece, on a GPU all slots by columns of their numbers: the same formula."""
    settings = [TrainConfig(weight_decay=0.1, clip_norm=0.5), TrainConfig(optimizer="bert-adam"), TrainConfig()]
    found = []
    for piece in (10**6, 3):
        monkeypatch.setattr("inlay.training.step.optimizer._PIECE", piece)
        bank = make_bank(3)
        optimizer = SlotOptimizer(bank, settings)
        for step in range(3):
            grads = make_gradients(bank, step)
            norms = optimizer.clip(grads)
            optimizer.step(grads, {0: 1e-2, 1: 3e-3})
        found.append((bank.values_SP, optimizer.second_SP, norms))
    torch.testing.assert_close(found[0], found[1], atol=1e-7, rtol=1e-6)
    p, m, v = (torch.rand(2, 7, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    g, rows = make_gradients(make_bank(2), 0), [[x[slot : slot + 1].clone() for x in (p, m, v)] for slot in range(2)]
    columns = [(1e-2, 1e-8, 0.1, 0.001, 0.1), (3e-3, 1e-6, 1.0, 1.0, 0.0)]
    _apply_adam(p, m, v, g, DECAYS, list(torch.tensor(columns).t().unsqueeze(-1)))
    for slot in range(2):
        _apply_adam(*rows[slot], g[slot : slot + 1], DECAYS, columns[slot])
    for stacked, own in zip((p, m, v), zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(stacked, torch.cat(own), atol=1e-7, rtol=1e-6)


def test_a_slot_that_is_not_named_does_not_move():
    bank = make_bank(3)
    optimizer = SlotOptimizer(bank, [TrainConfig()] * 3)
    grads = make_gradients(bank, 0)
    optimizer.step(grads, {0: 1e-2, 1: 1e-2, 2: 1e-2})
    before, moments = bank.values_SP.clone(), optimizer.first_SP.clone()
    optimizer.step(torch.zeros_like(grads), {0: 1e-2, 2: 1e-2})
    assert torch.equal(bank.values_SP[1], before[1])
    assert torch.equal(optimizer.first_SP[1], moments[1])
    assert not torch.equal(bank.values_SP[0], before[0])  # momentum and decay moved the others
    assert optimizer.num_steps == [2, 1, 2]


def test_clipping_is_by_the_norm_of_each_slot():
    bank = make_bank(3)
    grads = make_gradients(bank, 1)
    clipped = grads.clone()
    settings = [TrainConfig(clip_norm=1.0), TrainConfig(clip_norm=100.0), TrainConfig(clip_norm=0.0)]
    norms = SlotOptimizer(bank, settings).clip(clipped)
    for slot in range(3):
        norm = math.sqrt(sum(float(value) ** 2 for value in grads[slot]))
        assert float(norms[slot]) == pytest.approx(norm, rel=1e-5)
        scale = 1 / norm if slot == 0 else 1.0
        torch.testing.assert_close(clipped[slot], grads[slot] * scale)


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


@pytest.mark.parametrize(("name", "eps", "corrects"), [("adamw", 1e-8, True), ("bert-adam", 1e-6, False)])
def test_tiny_gradients_are_tamed_by_each_variants_own_epsilon(name, eps, corrects):
    bank = make_bank(1)
    before, grads = bank.values_SP[0].double(), 1e-6 * make_gradients(bank, 0)
    g = grads[0].double()
    m, v = 0.1 * g, 0.001 * g * g
    if corrects:
        m, v = m / 0.1, v / 0.001
    SlotOptimizer(bank, [TrainConfig(optimizer=name, weight_decay=0.0)]).step(grads, {0: 1.0})
    torch.testing.assert_close(bank.values_SP[0].double(), before - m / (v.sqrt() + eps), atol=1e-5, rtol=1e-5)


def test_a_run_of_several_slots_is_clipped_by_the_norm_of_all_it_has():
    """Two runs of three slots: what each shares, and what its slots have, are one gradient."""
    generator = torch.Generator().manual_seed(0)
    shared, own = torch.randn(2, 7, generator=generator), torch.randn(6, 7, generator=generator)
    settings = [TrainConfig(clip_norm=1.0), TrainConfig(clip_norm=100.0)]
    clipped, clipped_own = shared.clone(), own.clone()
    norms = SlotOptimizer(make_bank(2), settings).clip_together(clipped, clipped_own)
    for run in range(2):
        whole = torch.cat([shared[run], own[3 * run : 3 * run + 3].flatten()])
        norm = math.sqrt(sum(float(value) ** 2 for value in whole))
        assert float(norms[run]) == pytest.approx(norm, rel=1e-5)
        scale = 1 / norm if run == 0 else 1.0
        torch.testing.assert_close(clipped[run], shared[run] * scale)
        torch.testing.assert_close(clipped_own[3 * run : 3 * run + 3], own[3 * run : 3 * run + 3] * scale)
