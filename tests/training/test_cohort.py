"""A run in a cohort is the run it would be alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from inlay.model.heads.inference import infer
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.cohort.member import close_epoch
from inlay.training.evaluate import DevScores, encode_rows
from inlay.training.run.make_run import make_run
from inlay.training.run.run import DIVERGED

SETTINGS = CohortSettings(token_budget=65536, num_threads=1, save_every=100)
QUIET = {"dropout": 0.0, "head_dropout": 0.0, "batch_size": 8, "max_length": 32, "epochs": 6}


def make_runs(backbone, toy_task, method="houlsby"):
    """Four runs that differ in task, label count, kind, size, rate, seed, schedule and optimizer."""
    two = toy_task("two", num_labels=2, num_rows=44)
    five = toy_task("five", num_labels=5, num_rows=37, seed=1)
    number = toy_task("number", kind="regress", num_rows=40, seed=2)
    varied = [
        (two, 8, {"lr": 1e-3, "seed": 0}),
        (five, 16, {"lr": 3e-3, "seed": 1, "weight_decay": 0.1}),
        (number, 3, {"lr": 2e-3, "seed": 2, "schedule": "bert", "optimizer": "bert-adam"}),
        (two, 8, {"lr": 1e-2, "seed": 3, "batch_size": 5, "clip_norm": 0.5}),
    ]
    # A smooth activation: at the kink of Pfeiffer's relu a rounding decides whether a unit gets a gradient at all.
    return [
        make_run(
            task,
            RunConfig(method=MethodConfig(method, size, activation="gelu"), train=TrainConfig(**{**QUIET, **settings})),
            backbone,
        )
        for task, size, settings in varied
    ]


def take_steps(cohort, num_steps):
    with cohort.training():
        for _ in range(num_steps):
            cohort.step()
            cohort.backbone.model.eval()
            cohort.finish_epochs()
            cohort.backbone.model.train()


def dev_logits(cohort, slot):
    run = cohort.members[slot].run
    rows = encode_rows(cohort.backbone, run.task.dev, run.config.train.max_length)
    return torch.stack(infer(cohort.bank, [dataclasses.replace(row, slot=slot) for row in rows]))


@pytest.mark.parametrize("method", ["houlsby", "pfeiffer"])
@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert"])
def test_run_in_a_cohort_equals_the_run_alone(backbone_of, toy_task, family, method):
    backbone = backbone_of(family)
    runs = make_runs(backbone, toy_task, method)
    together = Cohort(runs, backbone, SETTINGS)
    take_steps(together, 20)
    for slot, run in enumerate(runs):
        alone = Cohort([run], backbone, SETTINGS)
        take_steps(alone, 20)
        torch.testing.assert_close(dev_logits(together, slot), dev_logits(alone, 0), atol=1e-5, rtol=1e-5)
        for name, tensor in alone.bank.read(0).items():
            torch.testing.assert_close(together.bank.read(slot)[name], tensor, atol=1e-5, rtol=1e-4, msg=name)
        assert together.members[slot].progress.step == alone.members[0].progress.step


def test_cohort_of_eight_makes_one_backbone_forward_per_step(tiny_bert, toy_task):
    task = toy_task(num_rows=32)
    runs = [
        make_run(task, RunConfig(method=MethodConfig(size=8), train=TrainConfig(**{**QUIET, "seed": seed})), tiny_bert)
        for seed in range(8)
    ]
    cohort = Cohort(runs, tiny_bert, SETTINGS)
    forwards = []
    handle = tiny_bert.model.embeddings.register_forward_hook(lambda *_: forwards.append(1))
    try:
        for _ in range(3):
            cohort.step()
    finally:
        handle.remove()
    assert len(forwards) == 3


def test_a_small_token_budget_accumulates_the_same_gradients(tiny_bert, toy_task):
    runs = make_runs(tiny_bert, toy_task)
    whole = Cohort(runs, tiny_bert, SETTINGS)
    pieces = Cohort(runs, tiny_bert, dataclasses.replace(SETTINGS, token_budget=40))
    (losses, grads), (same_losses, same_grads) = (
        cohort.stepper.differentiate(cohort.active, {member.slot: member.next_batch() for member in cohort.members})
        for cohort in (whole, pieces)
    )
    torch.testing.assert_close(same_losses, losses)
    torch.testing.assert_close(same_grads, grads, atol=1e-6, rtol=1e-4)


def test_nan_in_one_slot_leaves_all_others_bit_identical(tiny_bert, toy_task):
    runs = make_runs(tiny_bert, toy_task)
    runs = [make_run(run.task, run.config.override(["train.batch_size=8"]), tiny_bert) for run in runs]
    clean, planted = Cohort(runs, tiny_bert, SETTINGS), Cohort(runs, tiny_bert, SETTINGS)
    with torch.no_grad():
        planted.bank.stacks["adapter.1.feedforward.down"][2, 0, 0] = torch.nan
    others = [0, 1, 3]
    for slot in others:
        assert torch.equal(dev_logits(clean, slot), dev_logits(planted, slot))
    assert dev_logits(planted, 2).isnan().all()
    grads = [
        cohort.stepper.differentiate(cohort.active, {member.slot: member.next_batch() for member in cohort.members})[1]
        for cohort in (clean, planted)
    ]
    assert torch.equal(grads[0][others], grads[1][others])
    for _ in range(3):
        clean.step()
        planted.step()
        assert torch.equal(clean.flat.values_SP[others], planted.flat.values_SP[others])
        assert torch.equal(clean.optimizer.second_SP[others], planted.optimizer.second_SP[others])
        clean.members[2].progress.status = "finished"  # leaves with the diverged one: from here on, equal batches
    progress = planted.members[2].progress
    assert progress.status == DIVERGED
    assert progress.step == 0
    assert "diverged at step 1: loss nan" in progress.message
    assert [member.slot for member in planted.active] == others


def test_mixed_rows_of_a_nan_slot_and_a_good_one_in_one_batch(tiny_bert, toy_task):
    cohort = Cohort(make_runs(tiny_bert, toy_task), tiny_bert, SETTINGS)
    rows = encode_rows(tiny_bert, cohort.members[0].run.task.dev, 32)[:4]
    good = infer(cohort.bank, [dataclasses.replace(row, slot=0) for row in rows])
    with torch.no_grad():
        for name in cohort.bank.stacks:
            cohort.bank.stacks[name][1] = torch.nan
    mixed = infer(cohort.bank, [dataclasses.replace(row, slot=slot) for row in rows for slot in (1, 0)])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(good, mixed[1::2], strict=True))


def test_an_exploding_run_stops_alone(tiny_bert, toy_task):
    runs = make_runs(tiny_bert, toy_task)
    cohort = Cohort(runs, tiny_bert, SETTINGS)
    cohort.step()
    with torch.no_grad():
        cohort.bank.stacks["head.bias"][0] = torch.tensor([1e6, -1e6] + [0.0] * 3)
    cohort.step()
    assert cohort.members[0].progress.status == DIVERGED
    assert "try a smaller learning rate than 0.001" in cohort.members[0].progress.message
    assert len(cohort.active) == 3


def test_initial_values_depend_on_seed_site_and_size_only(tiny_bert, toy_task):
    runs = make_runs(tiny_bert, toy_task)
    together, alone = Cohort(runs, tiny_bert, SETTINGS), Cohort([runs[2]], tiny_bert, SETTINGS)
    for name, tensor in alone.bank.read(0).items():
        assert torch.equal(together.bank.read(2)[name], tensor)
    same_task = make_runs(tiny_bert, toy_task)[0]
    other_seed = make_run(same_task.task, same_task.config.override(["train.seed=9"]), tiny_bert)
    values = [
        Cohort([run], tiny_bert, SETTINGS).bank.read(0)["adapter.0.attention.down"] for run in (same_task, other_seed)
    ]
    assert not torch.equal(*values)


def test_initial_values_are_truncated_normal_at_two_deviations(tiny_bert, toy_task):
    config = RunConfig(method=MethodConfig(size=512, init_std=1e-2), train=TrainConfig(max_length=32))
    run = make_run(toy_task(), config, tiny_bert)
    values = Cohort([run], tiny_bert, SETTINGS).bank.read(0)["adapter.0.attention.down"].flatten()
    assert values.abs().max() <= 2e-2
    # A normal cut at two deviations has 0.8796 of its deviation left.
    assert float(values.std()) == pytest.approx(0.8796e-2, rel=0.02)
    assert abs(float(values.mean())) < 2e-4


def test_balanced_class_weights_are_the_weighted_mean_loss(tiny_bert, toy_task):
    task = toy_task(num_labels=3, num_rows=30)
    run = make_run(task, RunConfig(train=TrainConfig(**QUIET, class_weights="balanced")), tiny_bert)
    member = Cohort([run], tiny_bert, SETTINGS).members[0]
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    indices = np.array([0, 5, 7, 9, 11, 20])
    counts = np.bincount(task.train.targets, minlength=3)
    weights = torch.tensor(30 / (3 * counts), dtype=torch.float32)
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(task.train.targets[indices]), weight=weights)
    targets, counts = map(torch.from_numpy, member.targets_and_weights(indices.tolist(), indices, 3))
    torch.testing.assert_close((member.row_losses(logits, targets) * counts).sum(), expected)


def test_dropout_is_on_in_training_and_off_in_scoring(tiny_bert, toy_task):
    run = make_run(toy_task(), RunConfig(train=TrainConfig(batch_size=8, max_length=32, dropout=0.5)), tiny_bert)
    cohort = Cohort([run], tiny_bert, SETTINGS)
    members, batch = cohort.active, {0: cohort.members[0].next_batch()}
    with tiny_bert.training(0.5):
        first, second = (cohort.stepper.differentiate(members, batch)[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(dev_logits(cohort, 0), dev_logits(cohort, 0))
    rates = {module.p for module in tiny_bert.model.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.1}


def test_ties_on_dev_are_broken_by_the_dev_loss(tiny_bert, toy_task):
    run = make_run(toy_task(), RunConfig(train=TrainConfig(**QUIET, lr=5e-4)), tiny_bert)
    cohort = Cohort([run], tiny_bert, SETTINGS)
    (member,) = cohort.members
    best, gains = [], []
    for accuracy, loss in [(0.9, 0.5), (0.9, 0.6), (0.9, 0.4), (0.8, 0.1), (0.95, 0.9)]:
        close_epoch(member, DevScores({"accuracy": accuracy}, loss, {}), 0.0, cohort.bank)
        best.append(member.progress.best_epoch)
        gains.append(member.progress.last_gain)
    assert best == [1, 1, 3, 3, 5]
    assert gains == [1, 1, 1, 1, 5]  # a tie is no gain: patience goes on running out


def test_patience_runs_out_though_ties_are_won_by_the_loss(tiny_bert, toy_task):
    run = make_run(toy_task(), RunConfig(train=TrainConfig(**QUIET, lr=5e-4, patience=2)), tiny_bert)
    cohort = Cohort([run], tiny_bert, SETTINGS)
    (member,) = cohort.members
    stopped = []
    for loss in (0.5, 0.4, 0.3):
        close_epoch(member, DevScores({"accuracy": 0.9}, loss, {}), 0.0, cohort.bank)
        stopped.append(not member.is_active)
    assert member.progress.best_epoch == 3
    assert stopped == [False, False, True]


def test_a_run_whose_gradient_is_not_finite_does_not_move(tiny_bert, toy_task, monkeypatch):
    """Its loss is a number all the same: the overflow is in the backward pass."""
    cohort = Cohort(make_runs(tiny_bert, toy_task), tiny_bert, SETTINGS)
    differentiate = cohort.stepper.differentiate

    def overflow(*arguments):
        losses, grads = differentiate(*arguments)
        grads[0, 3] = torch.inf
        return losses, grads

    monkeypatch.setattr(cohort.stepper, "differentiate", overflow)
    before = cohort.flat.values_SP.clone()
    cohort.step()
    assert torch.equal(cohort.flat.values_SP[0], before[0])
    assert cohort.optimizer.num_steps == [0, 1, 1, 1]
    assert cohort.members[0].progress.status == DIVERGED
    assert "gradient norm inf" in cohort.members[0].progress.message
    assert [member.slot for member in cohort.active] == [1, 2, 3]
