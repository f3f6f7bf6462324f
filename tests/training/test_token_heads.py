"""Heads that read tokens, trained: beside others as alone, over windows, with what dev rows fit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inlay.data.calibration import negative_log_likelihood
from inlay.data.windows import encode_split
from inlay.model.bank.bank import Bank
from inlay.model.batch.route import make_rows
from inlay.model.heads.inference import infer
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import fit, make_run, publish
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.evaluate import judge_split

SETTINGS = CohortSettings(token_budget=65536, num_threads=1, save_every=100)
QUIET = {"dropout": 0.0, "head_dropout": 0.0, "batch_size": 8, "max_length": 40, "epochs": 4, "stride": 6}


@pytest.fixture
def tasks(toy_task, toy_tags, toy_answers):
    return [
        toy_task("classes", num_labels=3, num_rows=30),
        toy_tags(num_rows=36, seed=1),
        toy_answers(num_rows=24, seed=2, with_none=True),
    ]


def make_runs(backbone, tasks, method="houlsby"):
    return [
        make_run(
            task,
            RunConfig(method=MethodConfig(method, size=size), train=TrainConfig(**{**QUIET, "seed": size, "lr": 2e-3})),
            backbone,
        )
        for task, size in zip(tasks, (8, 5, 16), strict=True)
    ]


def take_steps(cohort, num_steps):
    with cohort.training():
        for _ in range(num_steps):
            cohort.step()
            cohort.backbone.model.eval()
            cohort.finish_epochs()
            cohort.backbone.model.train()


def dev_logits(cohort, slot):
    member = cohort.members[slot]
    return infer(cohort.bank, make_rows(member.dev, slot))


@pytest.mark.parametrize(
    ("family", "method"),
    [("bert", "houlsby"), ("mpnet", "lora"), ("deberta-v2", "pfeiffer"), ("modernbert", "parallel")],
)
def test_tags_and_answers_in_a_cohort_are_as_alone(backbone_of, tasks, family, method):
    backbone = backbone_of(family)
    runs = make_runs(backbone, tasks, method)
    together = Cohort(runs, backbone, SETTINGS)
    assert len(together.members[2].train) > len(tasks[2].train)  # windows
    take_steps(together, 12)
    for slot, run in enumerate(runs):
        alone = Cohort([run], backbone, SETTINGS)
        take_steps(alone, 12)
        for mixed, single in zip(dev_logits(together, slot), dev_logits(alone, 0), strict=True):
            if run.task.kind == "span":
                # A softmax over tokens does not see what is added to all of them: the true gradient of the head's bias
                # is zero, and Adam makes steps of its rounding.
                mixed, single = mixed.log_softmax(0), single.log_softmax(0)
            torch.testing.assert_close(mixed, single, atol=1e-5, rtol=1e-5)
        assert together.members[slot].progress.losses == pytest.approx(alone.members[0].progress.losses, abs=2e-5)


def test_a_mixed_batch_of_pooled_and_token_heads_equals_one_by_one(tiny_bert, tasks):
    runs = make_runs(tiny_bert, tasks)
    bank = Bank(tiny_bert, 3)
    for slot, run in enumerate(runs):
        bank.initialise(slot, run.spec, seed=slot)
    rows = []
    for slot, run in enumerate(runs):
        encoded = encode_split(tiny_bert.tokenizer, run.task.dev.take(range(5)), run.reading)
        rows += make_rows(encoded, slot)
    rows = rows[::2] + rows[1::2]  # no order of slots
    mixed = infer(bank, rows)
    for row, logits in zip(rows, mixed, strict=True):
        kind = runs[row.slot].task.kind
        width = runs[row.slot].spec.head.num_outputs
        assert logits.shape == ((width,) if kind == "classify" else (len(row.ids), width))
        torch.testing.assert_close(logits, infer(bank, [row])[0], atol=1e-5, rtol=1e-5)


def test_a_small_token_budget_gives_the_same_gradients_and_losses(tiny_bert, tasks):
    runs = make_runs(tiny_bert, tasks)
    whole = Cohort(runs, tiny_bert, SETTINGS)
    pieces = Cohort(runs, tiny_bert, dataclasses.replace(SETTINGS, token_budget=80))
    (losses, grads), (same_losses, same_grads) = (
        cohort.stepper.differentiate(cohort.active, {member.slot: member.next_batch() for member in cohort.members})
        for cohort in (whole, pieces)
    )
    torch.testing.assert_close(same_losses, losses)
    torch.testing.assert_close(same_grads, grads, atol=1e-6, rtol=1e-4)


def test_the_loss_of_a_step_is_the_mean_over_its_labelled_tokens(tiny_bert, toy_tags):
    run = make_run(toy_tags(num_rows=20), RunConfig(train=TrainConfig(**QUIET)), tiny_bert)
    cohort = Cohort([run], tiny_bert, SETTINGS)
    (member,) = cohort.members
    batch = member.next_batch()
    logits = infer(cohort.bank, member.rows(batch))
    losses = []
    for index, row in zip(batch, logits, strict=True):
        labels = [label for *_, label in run.task.train.targets[index]]
        tokens = (member.train.places[index][:, 0] >= 0).nonzero()[0]
        shares = row.log_softmax(-1)
        losses += [float(-shares[token, label]) for token, label in zip(tokens, labels, strict=True)]
    losses_S, _ = cohort.stepper.differentiate([member], {0: batch})
    assert float(losses_S[0]) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_a_tagger_learns_which_words_are_entities(tiny_bert, toy_tags, tmp_path):
    train = TrainConfig(batch_size=8, max_length=40, epochs=8, lr=1e-2, dropout=0.0)
    run = make_run(toy_tags(num_rows=160), RunConfig(method=MethodConfig(size=16), train=train), tiny_bert)
    (result,) = fit([run], tiny_bert, tmp_path)
    assert result.dev_metrics["entity_f1"] > 0.9
    assert result.dev_metrics["token_accuracy"] > 0.95
    assert {"ece", "ece_uncalibrated", "entity_precision", "entity_recall"} <= result.dev_metrics.keys()


def test_answers_are_learned_and_the_margin_of_silence_is_tuned(tiny_bert, toy_answers, tmp_path):
    task = toy_answers(num_rows=180, with_none=True, longest=30)
    train = TrainConfig(batch_size=8, max_length=48, epochs=12, lr=1e-2, dropout=0.0)
    run = make_run(task, RunConfig(method=MethodConfig(size=16), train=train), tiny_bert)
    assert run.spec.head.null_threshold == 0.0
    (result,) = fit([run], tiny_bert, tmp_path / "runs")
    share_without = sum(not golds for golds in task.dev.targets) / len(task.dev)
    assert result.dev_metrics["token_f1"] > share_without + 0.3  # silence alone would give the share
    spec = result.spec(run)
    assert spec.head.null_threshold not in (None, 0.0)
    store = Store(tmp_path / "store")
    manifest = store.manifest(publish(run, result, tiny_bert, store))
    assert manifest.head["null_threshold"] == spec.head.null_threshold
    assert manifest.extra == {"pairs": True, "stride": 128}
    judged = judge_split(spec, result.tensors, tiny_bert, task.dev, run.reading)
    predictions = judged.predictions(())
    assert "" in predictions
    assert all(text in context for text, context in zip(predictions, task.dev.pairs, strict=True))


def test_a_task_whose_questions_all_have_answers_never_says_nothing(tiny_bert, toy_answers):
    run = make_run(toy_answers(num_rows=12), RunConfig(), tiny_bert)
    assert run.spec.head.null_threshold is None
    assert run.config.train.max_length == min(384, tiny_bert.max_length)


def test_the_best_epochs_temperature_is_stored_and_makes_dev_rows_likelier(tiny_bert, toy_task, tmp_path):
    task = toy_task("classes", num_labels=3, num_rows=60, seed=3)
    train = TrainConfig(batch_size=8, max_length=32, epochs=6, lr=2e-2, dropout=0.0)
    run = make_run(task, RunConfig(method=MethodConfig(size=16), train=train), tiny_bert)
    (result,) = fit([run], tiny_bert, tmp_path / "runs")
    spec = result.spec(run)
    best = result.history[result.best_epoch - 1]
    assert spec.head.temperature == best["head"]["temperature"] != 1.0
    judged = judge_split(spec, result.tensors, tiny_bert, task.dev, run.reading)
    logits = judged.predictions(task.labels)
    assert judged.ece == pytest.approx(result.dev_metrics["ece"], abs=1e-6)
    before = negative_log_likelihood(logits, task.dev.targets)
    after = negative_log_likelihood(logits, task.dev.targets, spec.head.temperature)
    assert after < before
    (again,) = fit([run], tiny_bert, tmp_path / "runs")  # read back, not trained
    assert again.spec(run) == spec


def test_a_calibrated_tagger_is_a_start_head_included(tiny_bert, toy_tags, tmp_path):
    store = Store(tmp_path / "store")
    train = TrainConfig(batch_size=8, max_length=40, epochs=10, lr=5e-3)
    first = make_run(toy_tags("first", num_rows=40), RunConfig(method=MethodConfig(size=8), train=train), tiny_bert)
    (result,) = fit([first], tiny_bert, store.root / "runs")
    assert result.spec(first).head.temperature != 1.0
    publish(first, result, tiny_bert, store)
    config = RunConfig(method=MethodConfig(size=8), train=dataclasses.replace(train, start=("first",)))
    second = make_run(toy_tags("second", num_rows=40, seed=5), config, tiny_bert, store)
    assert second.spec.head.temperature == 1.0  # fitted on its own dev rows, when it has been trained
    cohort = Cohort([second], tiny_bert, SETTINGS)
    for name, tensor in cohort.bank.read(0).items():
        assert torch.equal(tensor, result.tensors[name]), name
