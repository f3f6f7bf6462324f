"""Scores of outputs that are not finite: NaN, which no epoch is chosen by."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.training import fit, make_run
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.evaluate import judge_split, score_dev, score_split
from inlay.training.run.run import DIVERGED
from inlay.training.run.run_folder import read_result
from joint_runs import make_joint

SETTINGS = CohortSettings(token_budget=65536, num_threads=1, save_every=100)
TRAIN = TrainConfig(batch_size=16, max_length=32, epochs=3, lr=1e-3)


def make_runs(backbone, tasks, **train):
    config = RunConfig(method=MethodConfig(size=4), train=dataclasses.replace(TRAIN, **train))
    return [make_run(task, config, backbone) for task in tasks]


def all_kinds(toy_task, toy_tags, toy_answers):
    return [
        toy_task("classes", num_labels=3),
        toy_task("number", kind="regress", seed=3),
        toy_task("sets", kind="multilabel", num_labels=3, seed=4),
        toy_tags("tags"),
        toy_answers("answers", with_none=True),
    ]


def finish_epoch(cohort):
    """Take the steps of an epoch, without scoring it."""
    cohort.step()
    while not cohort.is_unscored:
        cohort.step()


def test_one_dev_row_that_is_not_finite_makes_every_score_nan(tiny_bert, toy_task, toy_tags, toy_answers):
    for run in make_runs(tiny_bert, all_kinds(toy_task, toy_tags, toy_answers)):
        member = Cohort([run], tiny_bert, SETTINGS).members[0]
        num_outputs = run.spec.head.num_outputs
        shapes = [(num_outputs,) if run.spec.head.reads_rows else (len(ids), num_outputs) for ids in member.dev.ids]
        logits = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes]
        sound = score_dev(run, member.dev, logits)
        assert sound.num_lost == 0
        assert not any(map(math.isnan, sound.scores.values())), run.name
        logits[3].view(-1)[0] = torch.nan
        lost = score_dev(run, member.dev, logits)
        assert lost.num_lost == 1
        assert math.isnan(lost.loss)
        assert lost.scores.keys() == sound.scores.keys() - {"ece", "ece_uncalibrated"}
        assert all(map(math.isnan, lost.scores.values())), run.name
        assert lost.fitted == {}


def test_a_run_whose_dev_outputs_are_not_finite_has_diverged_and_keeps_its_best_epoch(tiny_bert, toy_task):
    tasks = [toy_task("bad"), toy_task("good", seed=1)]
    cohort = Cohort(make_runs(tiny_bert, tasks, epochs=2), tiny_bert, SETTINGS)
    bad, good = cohort.members
    finish_epoch(cohort)
    cohort.finish_epochs()
    best = {name: tensor.clone() for name, tensor in bad.best_tensors.items()}
    finish_epoch(cohort)  # every loss is finite
    with torch.no_grad():
        cohort.bank.stacks["head.bias"][bad.slot, 0] = torch.nan
    cohort.finish_epochs()
    assert bad.progress.status == DIVERGED
    num_dev = len(bad.run.task.dev)
    assert bad.progress.message == (
        f"diverged in epoch 2: the outputs of {num_dev} dev rows are not finite; try a smaller learning rate than 0.001"
    )
    assert math.isnan(bad.progress.history[-1]["dev"]["accuracy"])
    assert bad.progress.best_epoch == 1
    assert all(torch.equal(bad.best_tensors[name], tensor) for name, tensor in best.items())
    assert good.progress.status == "finished"


def test_a_run_that_was_never_finite_on_dev_has_no_weights(tiny_bert, toy_task, tmp_path, monkeypatch):
    (run,) = make_runs(tiny_bert, [toy_task("bad")])
    plain = Cohort.finish_epochs

    def finish(self, *arguments, **settings):
        if self.is_unscored:
            with torch.no_grad():
                self.bank.stacks["head.bias"][0] = torch.inf
        return plain(self, *arguments, **settings)

    monkeypatch.setattr(Cohort, "finish_epochs", finish)
    (result,) = fit([run], tiny_bert, tmp_path)
    assert (result.status, result.best_epoch, result.dev_metric) == (DIVERGED, 0, None)
    assert not result.tensors
    assert len(result.history) == 1


def test_a_run_of_several_tasks_has_diverged_with_one_of_them(tiny_bert, toy_task):
    cohort = Cohort([make_joint(tiny_bert, toy_task)], tiny_bert, SETTINGS)
    (member,) = cohort.members
    finish_epoch(cohort)
    with torch.no_grad():
        cohort.bank.stacks["head.bias"][member.parts[1].slot] = torch.nan
    cohort.finish_epochs()
    dev = member.progress.history[-1]["dev"]
    assert math.isnan(dev["mean"])
    assert math.isnan(dev["five/accuracy"])
    assert not math.isnan(dev["two/accuracy"])
    assert member.progress.status == DIVERGED
    assert member.progress.best_epoch == 0


def test_scores_of_any_rows_are_nan_where_outputs_are_not_finite(tiny_bert, toy_task, tmp_path):
    (run,) = make_runs(tiny_bert, [toy_task("task")], epochs=1)
    (result,) = fit([run], tiny_bert, tmp_path)
    bad = dataclasses.replace(result, tensors={**result.tensors, "head.bias": torch.full((2,), torch.nan)})
    scores = score_split(run, bad, tiny_bert, run.task.dev)
    assert scores.keys() == score_split(run, result, tiny_bert, run.task.dev).keys()
    assert all(map(math.isnan, scores.values()))
    judged = judge_split(run.spec, bad.tensors, tiny_bert, run.task.dev, run.reading)
    assert judged.ece == pytest.approx(math.nan, nan_ok=True)


def with_dev(run, dev):
    return dataclasses.replace(run, task=dataclasses.replace(run.task, dev=dev))


def random_logits(run, encoded):
    num_outputs = run.spec.head.num_outputs
    shapes = [(num_outputs,) if run.spec.head.reads_rows else (len(ids), num_outputs) for ids in encoded.ids]
    return [torch.randn(shape, generator=torch.Generator().manual_seed(row)) for row, shape in enumerate(shapes)]


def test_classes_that_training_never_saw_are_wrong_and_no_part_of_loss_and_temperature(tiny_bert, toy_task):
    (run,) = make_runs(tiny_bert, [toy_task("classes", num_labels=3)])
    dev = run.task.dev
    encoded = Cohort([run], tiny_bert, SETTINGS).members[0].dev
    logits = random_logits(run, encoded)
    targets, seen = dev.targets.copy(), np.arange(len(dev)) >= 4
    targets[~seen] = [3, 4, 3, 3]
    odd = with_dev(run, dataclasses.replace(dev, targets=targets, unseen=("eggs", "fish")))
    found = score_dev(odd, encoded, logits)
    known = [logits[row] for row in np.flatnonzero(seen)]
    losses = torch.nn.functional.cross_entropy(torch.stack(known), torch.as_tensor(targets[seen]))
    assert found.loss == pytest.approx(float(losses))
    guesses = np.array([int(row.argmax()) for row in logits])
    assert found.scores["accuracy"] == pytest.approx((guesses == targets).mean())
    assert found.scores["accuracy"] == pytest.approx((guesses[seen] == targets[seen]).sum() / len(dev))
    all_known = score_dev(run, encoded, logits)
    assert set(found.scores) == set(all_known.scores)
    probabilities = torch.stack(logits).softmax(-1).max(-1).values.numpy()
    bins = np.ceil(probabilities * 15).astype(int)
    gaps = [abs(((guesses == targets) - probabilities)[bins == number].sum()) for number in range(1, 16)]
    assert found.scores["ece_uncalibrated"] == pytest.approx(sum(gaps) / len(dev), abs=1e-6)
    lost = with_dev(run, dataclasses.replace(dev, targets=np.full(len(dev), 3), unseen=("eggs",)))
    assert (score_dev(lost, encoded, logits).loss, score_dev(lost, encoded, logits).scores["accuracy"]) == (0.0, 0.0)


def test_labels_of_a_set_that_training_never_saw_are_missed(tiny_bert, toy_task):
    (run,) = make_runs(tiny_bert, [toy_task("sets", kind="multilabel", num_labels=3, seed=4)])
    dev = run.task.dev
    encoded = Cohort([run], tiny_bert, SETTINGS).members[0].dev
    logits = random_logits(run, encoded)
    plain = score_dev(run, encoded, logits)
    extra = np.zeros((len(dev), 1), dtype=np.float32)
    extra[:5] = 1
    wide = dataclasses.replace(dev, targets=np.concatenate([dev.targets, extra], axis=1), unseen=("eggs",))
    found = score_dev(with_dev(run, wide), encoded, logits)
    assert found.loss == plain.loss
    assert found.fitted == plain.fitted
    guesses, truth = (torch.stack(logits) > 0).numpy(), dev.targets > 0
    hits, total = (guesses & truth).sum(), guesses.sum() + truth.sum()
    assert found.scores["micro_f1"] == pytest.approx(2 * hits / (total + 5))
    right = (guesses == truth).all(axis=1)
    assert found.scores["accuracy"] == pytest.approx(right[5:].sum() / len(dev))
    assert found.scores["macro_f1"] == pytest.approx(plain.scores["macro_f1"] * 3 / 4)


def test_tags_that_training_never_saw_are_wrong_words(tiny_bert, toy_tags):
    (run,) = make_runs(tiny_bert, [toy_tags("tags")])
    dev, labels = run.task.dev, run.task.labels
    encoded = Cohort([run], tiny_bert, SETTINGS).members[0].dev
    logits = random_logits(run, encoded)
    plain = score_dev(run, encoded, logits)
    targets = dev.targets.copy()
    (start, end, _), *rest = targets[0]
    targets[0] = ((start, end, len(labels)), *rest)
    found = score_dev(with_dev(run, dataclasses.replace(dev, targets=targets, unseen=("B-NEW",))), encoded, logits)
    assert math.isfinite(found.loss)
    assert found.loss != plain.loss
    num_words = sum(map(len, targets))
    first = int(logits[0][1].argmax())  # the word behind [CLS]
    lost = (first == dev.targets[0][0][2]) / num_words
    assert found.scores["token_accuracy"] == pytest.approx(plain.scores["token_accuracy"] - lost)
    assert found.scores["entity_recall"] <= plain.scores["entity_recall"] + 1e-9


def test_labels_that_no_dev_row_is_answered_with_are_kept_in_the_history(tiny_bert, toy_task, tmp_path, monkeypatch):
    runs = make_runs(tiny_bert, [toy_task("classes", num_labels=3), toy_task("sets", kind="multilabel", num_labels=3)])
    for run in runs:
        encoded = Cohort([run], tiny_bert, SETTINGS).members[0].dev
        logits = [torch.tensor([-1.0, 2.0, -1.0]) for _ in encoded.ids]
        assert score_dev(run, encoded, logits).unpredicted == (run.task.labels[0], run.task.labels[2])
        logits[0] = torch.tensor([3.0, -1.0, -1.0])
        assert score_dev(run, encoded, logits).unpredicted == (run.task.labels[2],)
        absent = run.task.dev.targets.copy()
        absent[absent == 2] = 1
        if absent.ndim == 2:
            absent = run.task.dev.targets * np.array([1, 1, 0], dtype=np.float32)
        dev = dataclasses.replace(run.task.dev, targets=absent)
        assert score_dev(with_dev(run, dev), encoded, logits).unpredicted == (), "a label that no dev row has"
    plain = Cohort.finish_epochs

    def finish(self, *arguments, **settings):
        if self.is_unscored:
            with torch.no_grad():
                self.bank.stacks["head.bias"][0] = torch.tensor([0.0, 1e4, 0.0])
        return plain(self, *arguments, **settings)

    monkeypatch.setattr(Cohort, "finish_epochs", finish)
    (result,) = fit(runs[:1], tiny_bert, tmp_path)
    assert result.unpredicted == (runs[0].task.labels[0], runs[0].task.labels[2])
    assert read_result(tmp_path / runs[0].id).unpredicted == result.unpredicted
