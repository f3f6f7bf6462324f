"""Scores of outputs that are not finite: NaN, which no epoch is chosen by."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from inlay.config import MethodConfig, RunConfig, TrainConfig
from inlay.training import fit, make_run
from inlay.training.cohort import Cohort, CohortSettings
from inlay.training.evaluate import judge_split, score_dev, score_split
from inlay.training.run import DIVERGED
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
