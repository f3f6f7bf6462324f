"""Where a run begins: the head as a linear probe, a contrastive start, which epoch is kept, and who gets what."""

from __future__ import annotations

import dataclasses
import math
import os
import signal

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from hooks import Hooks
from inlay.data.sampling import draw_by_label
from inlay.data.tasks import Split
from inlay.data.windows import encode_split
from inlay.errors import BadConfig, OutOfMemory
from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import find_method
from inlay.model.heads.inference import infer_vectors
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig, settled
from inlay.training import fit, make_run
from inlay.training.cohort import cohort as room
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.cohort.loop import Interrupted
from inlay.training.cohort.member import close_epoch
from inlay.training.evaluate import DevScores, encode_rows, score_dev
from inlay.training.recipe import head_start
from inlay.training.recipe.head_start import (
    contrast_losses,
    draw_rows,
    fit_calibrated,
    left_out_loss,
    split_fold,
)
from inlay.training.recipe.linear import fit_raw
from inlay.training.recipe.probe import compare_readings, fit_probe
from inlay.training.recipe.recipe import choose_blend
from predicted import predict_split
from toys import make_toy_task

SETTINGS = CohortSettings(token_budget=100_000, num_threads=1, save_every=1000)
SHORT = {"batch_size": 8, "max_length": 32}


def make(backbone, task, method="houlsby", **train):
    size = {} if method == "head" else {"size": 4}
    return make_run(task, RunConfig(method=MethodConfig(method, **size), train=TrainConfig(**SHORT | train)), backbone)


def vectors_of(backbone, run, split):
    """What the head reads of each row, through a slot without adapters."""
    bank = Bank(backbone, 1)
    plain = make(backbone, run.task, "head")
    bank.initialise(0, plain.spec, 0)
    return infer_vectors(bank, encode_rows(backbone, split, run.max_length))


def test_the_method_head_is_scikit_learns_logistic_regression(tiny_bert, toy_task, tmp_path):
    task = toy_task(num_rows=80, num_labels=3)
    run = make(tiny_bert, task, "head")
    assert run.num_steps == 0, "a convex head needs no steps"
    (result,) = fit([run], tiny_bert, tmp_path)
    train, dev = (vectors_of(tiny_bert, run, split) for split in (task.train, task.dev))
    scaler, strength = StandardScaler().fit(train), fit_probe(task, tiny_bert, max_length=32).strength
    model = LogisticRegression(C=strength, max_iter=1000).fit(scaler.transform(train), task.train.targets)
    theirs = model.predict_log_proba(scaler.transform(dev))
    ours = torch.stack(predict_split(run.spec, result.tensors, tiny_bert, task.dev, 32)).double().log_softmax(-1)
    # Equal but for one temperature: ours is no surer than it was right about rows left out.
    shares = [(logits - logits.mean(1, keepdims=True)) for logits in (ours.numpy(), theirs)]
    factor = (shares[0] * shares[1]).sum() / (shares[1] ** 2).sum()
    np.testing.assert_allclose(shares[0], factor * shares[1], atol=2e-3)
    assert (ours.argmax(-1).numpy() == theirs.argmax(-1)).all()
    assert result.best_epoch == 0
    assert result.dev_metric == model.score(scaler.transform(dev), task.dev.targets)


@pytest.mark.parametrize("kind", ["classify", "multilabel", "regress"])
def test_epoch_0_is_the_probe_and_can_be_the_best(tiny_bert, toy_task, tmp_path, kind):
    task = toy_task(kind=kind, num_rows=60)
    run = make(tiny_bert, task, epochs=2, keep="best", contrast=0)
    assert run.config.train.head_start == "probe"
    (result,) = fit([run], tiny_bert, tmp_path)
    first = result.history[0]
    assert (first["epoch"], first["stage"], first["train_loss"], first["step"]) == (0, "probe", None, 0)
    assert [line["epoch"] for line in result.history] == [0, 1, 2]
    expected = fit_probe(task, tiny_bert, max_length=32).metrics["dev"][task.metric]
    assert first["dev"][task.metric] == pytest.approx(expected, rel=0.05, abs=0.05)  # fresh adapters are nearly nothing
    scores = [line["dev"][task.metric] for line in result.history]
    assert result.dev_metric == (min(scores) if task.metric == "rmse" else max(scores))


def test_an_honest_head_answers_as_the_probe_and_leaves_something_to_learn(toy_task):
    task, draw = toy_task(num_rows=40), np.random.default_rng(0)
    vectors = draw.normal(size=(40, 200)) + 0.2 * task.train.targets[:, None]
    found = fit_calibrated(task, vectors)
    honest = found.model
    assert 0 <= found.left_out.score <= 1
    plain = fit_raw("classify", vectors, task.train.targets, 10.0, 2)
    assert (honest.outputs(vectors).argmax(1) == task.train.targets).all(), "more features than rows: all are right"

    def loss(model):
        logits = torch.from_numpy(model.outputs(vectors))
        return float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(task.train.targets)))

    assert loss(plain) < 0.01 < loss(honest)


def mislabel(task, rows):
    targets = task.train.targets.copy()
    targets[rows] = 1 - targets[rows]
    return dataclasses.replace(task, train=dataclasses.replace(task.train, targets=targets))


def test_the_first_record_names_rows_that_may_be_labelled_wrongly(tiny_bert, toy_task, tmp_path):
    rows = [17, 50, 99, 120]
    task = mislabel(toy_task(num_rows=160), rows)
    run = make(tiny_bert, task, epochs=1, contrast=4)
    (result,) = fit([run], tiny_bert, tmp_path)
    probe, *others = result.history
    lines = probe["suspects"]["lines"]
    assert len(lines) == 3 <= probe["suspects"]["num_rows"] <= 10
    assert len(set(lines) & {task.train.lines[row] for row in rows}) >= 2
    assert not any("suspects" in record for record in others), "by then it has been trained on the labels"


def test_the_probe_lists_wrong_labels_of_train_and_dev_by_models_that_left_them_out(tiny_bert, toy_task):
    task = toy_task(num_rows=160)
    targets = task.dev.targets.copy()
    targets[[5, 40]] = 1 - targets[[5, 40]]
    dev = dataclasses.replace(task.dev, targets=targets, path="dev.csv", lines=list(range(1001, 1081)))
    task = mislabel(dataclasses.replace(task, dev=dev), [17, 50, 99])
    found = fit_probe(task, tiny_bert, max_length=32).label_errors
    assert found.num_rows == 240
    listed = {(error.path, error.line) for error in found.errors}
    wrong = {("", 18), ("", 51), ("", 100), ("dev.csv", 1006), ("dev.csv", 1041)}
    assert len(listed & wrong) >= 4
    assert len(listed) <= 12  # of 240: some texts are two words that say little
    unseen = dataclasses.replace(task, dev=dataclasses.replace(dev, unseen=("new",)))
    assert fit_probe(unseen, tiny_bert, max_length=32).label_errors.num_rows == 160
    assert fit_probe(toy_task(kind="regress"), tiny_bert, max_length=32).label_errors is None


def test_a_feature_that_hardly_varies_gets_no_weight_that_new_rows_cannot_bear():
    draw = np.random.default_rng(0)
    rows, targets = draw.normal(size=(50, 8)), draw.integers(2, size=50)
    rows[:, 3] = 0.5 + 1e-9 * draw.normal(size=50)
    model = fit_raw("classify", rows, targets, 10.0, 2)
    assert np.abs(model.weights[:, 3]).max() < 1e-3
    constant = fit_raw("classify", np.ones((50, 8)), targets, 1.0, 2)
    assert np.isfinite(constant.weights).all()


def test_who_gives_a_rate_gets_what_it_always_was(tiny_bert, toy_task):
    given = make(tiny_bert, toy_task(), lr=5e-4).config.train
    assert (given.head_start, given.contrast, given.keep, given.epochs) == ("fresh", 0, "best", 10)
    fresh = {"head_start": "fresh", "contrast": 0, "keep": "best"}
    explicit = make(tiny_bert, toy_task(), lr=5e-4, epochs=10, **fresh)
    assert make(tiny_bert, toy_task(), lr=5e-4).id == explicit.id
    assert make(tiny_bert, toy_task(), lr=5e-4, head_start="probe").id != explicit.id


def test_settings_that_came_later_are_no_part_of_ids_where_a_rate_is_given(tiny_bert, toy_task):
    config = make(tiny_bert, toy_task(), lr=5e-4, epochs=3).config
    assert not {"head_start", "contrast", "contrast_folds", "blend", "keep"} & set(settled(config.train))
    assert settled(config.train)["patience"] == settled(TrainConfig(lr=5e-4, patience=0))["patience"] == 0


def test_pulled_together_and_pushed_apart_as_the_formula_says():
    draw = np.random.default_rng(0)
    vectors, labels = draw.normal(size=(7, 5)), np.array([0, 0, 1, 1, 1, 2, 0])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    same, other = [], []
    for i in range(7):
        for j in range(7):
            if i != j:
                gap = (unit[i] @ unit[j] - (labels[i] == labels[j])) ** 2
                (same if labels[i] == labels[j] else other).append(gap)
    losses = contrast_losses(torch.from_numpy(vectors), torch.from_numpy(labels))
    assert float(losses.mean()) == pytest.approx((np.mean(same) + np.mean(other)) / 2, rel=1e-5)
    alone = contrast_losses(torch.from_numpy(vectors[:1]), torch.from_numpy(labels[:1]))
    assert alone.tolist() == [0.0]


def test_batches_to_contrast_have_several_rows_of_each_label_and_follow_from_seed_and_step():
    targets = np.array([0] * 50 + [1] * 20 + [2] * 3 + [3])
    rows = [draw_by_label(targets, 16, 0, step) for step in range(30)]
    for batch in rows:
        assert len(set(batch.tolist())) == len(batch) <= 16
        labels, counts = np.unique(targets[batch], return_counts=True)
        assert 3 not in labels, "a single row has no partner"
        assert counts.min() > 1
    assert np.array_equal(rows[3], draw_by_label(targets, 16, 0, 3))
    assert any(not np.array_equal(rows[0], other) for other in rows[1:])
    many = draw_by_label(np.repeat(np.arange(40), 5), 32, 0, 0)
    assert len(many) == 32


def test_a_contrastive_start_is_an_epoch_of_its_own_and_gathers_the_rows_of_a_label(tiny_bert, toy_task, tmp_path):
    task = toy_task(num_rows=40)
    settings = {"lr": 1e-2, "head_start": "probe", "contrast": 60, "epochs": 1, "keep": "late", "dropout": 0.0}
    run = make(tiny_bert, task, **settings)
    (result,) = fit([run], tiny_bert, tmp_path)
    stages = [(line["epoch"], line.get("stage", ""), line["step"]) for line in result.history]
    assert stages == [(0, "probe", 0), (1, "contrast", 0), (2, "", 5)]
    cohort = Cohort([make(tiny_bert, task, **settings | {"batch_size": 40})], tiny_bert, SETTINGS)
    (member,) = cohort.members

    def gap():
        vectors = torch.from_numpy(infer_vectors(cohort.bank, member.rows(range(40))))
        return float(contrast_losses(vectors, torch.from_numpy(task.train.targets)).mean())

    cohort.finish_epochs()
    before = gap()
    with cohort.training():
        for _ in range(60):
            cohort.step()
    cohort.backbone.model.eval()
    assert (member.progress.step, member.progress.cursor) == (0, 60), "steps of training come after it"
    assert gap() < 0.9 * before


def test_of_what_contrast_changed_a_part_is_kept(tiny_bert, toy_task):
    run = make(tiny_bert, toy_task(), lr=1e-2, head_start="probe", contrast=3, epochs=1, blend=0.25)
    cohort = Cohort([run], tiny_bert, SETTINGS)
    start = cohort.bank.read(0)
    with cohort.training():
        cohort.finish_epochs()
        for _ in range(3):
            cohort.step()
        end = cohort.bank.read(0)
        cohort.finish_epochs()
    for name, tensor in cohort.bank.read(0).items():
        if not name.startswith("head."):
            torch.testing.assert_close(tensor, start[name] + 0.25 * (end[name] - start[name]), msg=name)


FOLDED = {"lr": 1e-2, "head_start": "probe", "contrast": 3, "contrast_folds": 2, "epochs": 0, "dropout": 0.0}


def train_folds(run, backbone, losses, monkeypatch):
    """Train a run whose folds have these losses; what every contrastive step saw, and the slot after every stage."""
    taken = iter(losses)
    monkeypatch.setattr(room, "left_out_loss", lambda *given, **more: next(taken))
    cohort = Cohort([run], backbone, SETTINGS)
    (member,) = cohort.members
    seen, slots = [], []
    with cohort.training():
        cohort.finish_epochs()
        member.progress.fold_losses["probe"] = 10.0
        while member.is_active:
            seen.append((member.progress.stage, member.progress.fold, set(member.next_batch().tolist())))
            cohort.step()
            before = (member.progress.stage, member.progress.fold)
            cohort.finish_epochs()
            if before != (member.progress.stage, member.progress.fold):
                slots.append(cohort.bank.read(0))
    return member, seen, slots


def test_a_contrastive_start_is_judged_on_rows_that_it_never_saw(tiny_bert, toy_task, monkeypatch):
    run = make(tiny_bert, toy_task(num_rows=40), **FOLDED)
    start = Cohort([run], tiny_bert, SETTINGS).bank.read(0)
    member, seen, slots = train_folds(run, tiny_bert, [4.0, 5.0], monkeypatch)
    assert [stage for stage, *_ in seen] == ["fold"] * 4 + ["contrast"] * 3, "two thirds of the steps without a half"
    for fold in range(2):
        inside, outside = split_fold(40, 2, fold)
        rows = set().union(*(batch for stage, own, batch in seen if (stage, own) == ("fold", fold)))
        assert rows <= set(inside.tolist())
        assert not rows & set(outside.tolist())
    for slot in slots[:2]:  # every start begins where the first one did
        assert all(torch.equal(tensor, start[name]) for name, tensor in slot.items() if not name.startswith("head."))
    assert (member.progress.status, member.progress.best_epoch) == ("finished", 1)
    assert member.progress.history[0]["left_out_loss"] == {"probe": 0.25, "contrast": 0.225}


def test_a_start_that_does_worse_on_rows_left_out_is_never_taken(tiny_bert, toy_task, monkeypatch):
    run = make(tiny_bert, toy_task(num_rows=40), **FOLDED)
    member, seen, _ = train_folds(run, tiny_bert, [4.0, 6.1], monkeypatch)
    assert {stage for stage, *_ in seen} == {"fold"}
    progress = member.progress
    assert (progress.status, progress.best_epoch, len(progress.history)) == ("finished", 0, 1)
    assert progress.message.startswith("the linear probe is kept")
    assert "0.250" in progress.message
    assert "0.253" in progress.message
    assert member.steps_left == 0, "those on all rows are not taken"


def test_training_that_was_asked_for_begins_at_the_probe_where_the_start_does_worse(
    tiny_bert, toy_task, tmp_path, monkeypatch
):
    run = make(tiny_bert, toy_task(num_rows=40), **FOLDED | {"epochs": 2, "keep": "late"})
    member, seen, slots = train_folds(run, tiny_bert, [4.0, 6.1], monkeypatch)
    assert [stage for stage, *_ in seen] == ["fold"] * 4 + [""] * 10
    assert (member.progress.status, len(member.progress.history)) == ("finished", 3)
    assert not member.progress.message
    plain = make(tiny_bert, run.task, **FOLDED | {"contrast": 0, "contrast_folds": 0})
    (probe,) = fit([plain], tiny_bert, tmp_path)
    for name, tensor in slots[1].items():
        torch.testing.assert_close(tensor, probe.tensors[name], msg=name)


def test_losses_that_are_not_finite_are_kept_as_nothing(tiny_bert, toy_task, monkeypatch):
    run = make(tiny_bert, toy_task(num_rows=40), **FOLDED)
    member, _, _ = train_folds(run, tiny_bert, [4.0, math.inf], monkeypatch)
    assert member.progress.best_epoch == 0
    assert member.progress.history[0]["left_out_loss"] == {"probe": 0.25, "contrast": None}


def test_a_run_that_a_fold_ends_is_heard_of_though_answering_was_stopped(tiny_bert, toy_task, monkeypatch):
    """Nothing has changed where dev rows could not be answered: not for the run whose fold was to be judged, too."""
    runs = [
        make(tiny_bert, toy_task("a", num_rows=40), **FOLDED | {"contrast": 2}),
        make(tiny_bert, toy_task("b", num_rows=40), **FOLDED | {"contrast_folds": 0, "contrast": 1}),
    ]
    cohort = Cohort(runs, tiny_bert, SETTINGS)
    folded, _ = cohort.members
    with cohort.training():
        cohort.finish_epochs()
        cohort.step()
        with monkeypatch.context() as patch:
            patch.setattr(cohort._world, "infer", lambda *given, **more: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                cohort.finish_epochs()
        assert (folded.progress.fold, folded.progress.cursor) == (0, 1)
        cohort.finish_epochs()
    assert (folded.progress.fold, folded.progress.cursor) == (1, 0)


@pytest.mark.parametrize("step", [1, 4, 5, 7, 8])
def test_stopped_while_folds_are_judged_a_run_ends_the_same(tiny_bert, toy_task, tmp_path, step):
    run = make(tiny_bert, toy_task(num_rows=40), **FOLDED | {"contrast_folds": 3})
    with pytest.raises(Interrupted):
        fit([run], tiny_bert, tmp_path / "cut", emit=InterruptAt(step))
    (resumed,) = fit([run], tiny_bert, tmp_path / "cut")
    (whole,) = fit([run], tiny_bert, tmp_path / "whole")
    assert all(torch.equal(resumed.tensors[name], whole.tensors[name]) for name in whole.tensors)
    said = [{key: value for key, value in line.items() if key != "seconds"} for line in resumed.history]
    assert said == [{key: value for key, value in line.items() if key != "seconds"} for line in whole.history]


def test_the_loss_of_rows_left_out_is_that_of_models_that_never_saw_them(toy_task):
    task, draw = toy_task(num_rows=60, num_labels=3), np.random.default_rng(0)
    targets = task.train.targets.copy()
    targets[7] = 2
    targets[np.arange(60) != 7] %= 2  # class 2 has one row: where that is left out, nothing could know it
    task = dataclasses.replace(task, train=dataclasses.replace(task.train, targets=targets))
    vectors = draw.normal(size=(60, 12)) + targets[:, None]
    inside, outside = (np.array([row for row in range(60) if (row % 4 == 3) == is_out]) for is_out in (False, True))
    assert 7 in outside
    scaler = StandardScaler().fit(vectors[inside])
    model = LogisticRegression(C=1e-5, max_iter=1000).fit(scaler.transform(vectors[inside]), targets[inside])
    known = outside[outside != 7]
    margins = model.decision_function(scaler.transform(vectors[known])) * np.where(targets[known] == 1, 1, -1)
    best = min(np.logaddexp(0, -margins / heat).sum() for heat in np.geomspace(1e-2, 1e2, 2000))
    weakest = left_out_loss(task, vectors, inside, outside, most_strength=1e-5)  # there is none below
    assert weakest == pytest.approx(best, rel=1e-3)
    assert left_out_loss(task, vectors, inside, outside) != weakest
    spoilt = vectors.copy()
    spoilt[0] = np.nan
    assert left_out_loss(task, spoilt, inside, outside) == math.inf


def test_folds_judge_where_rows_are_enough_and_dev_rows_are_few(tiny_bert, toy_task):
    def folds(num_rows, **train):
        return make(tiny_bert, toy_task(num_rows=num_rows), **train).config.train.contrast_folds

    assert [folds(rows) for rows in (50, 100, 101, 500, 501)] == [0, 0, 3, 3, 0]
    assert folds(200, lr=1e-3) == folds(200, contrast=0) == folds(200, contrast=20) == 0
    assert folds(200, contrast=20, contrast_folds=5) == folds(40, contrast_folds=5) == 5
    with pytest.raises(BadConfig, match="no contrastive start to judge"):
        folds(200, contrast=0, contrast_folds=3)
    with pytest.raises(BadConfig, match="40 training rows"):
        folds(40, contrast_folds=21)
    with pytest.raises(BadConfig, match="contrast_folds"):
        folds(40, contrast_folds=1)


def test_the_less_labels_follow_from_texts_the_less_is_kept():
    assert [choose_blend(score) for score in (-0.2, 0.0, 0.3, 0.6, 0.9)] == pytest.approx([0.0, 0.0, 0.3, 0.6, 0.6])


def test_moments_of_the_contrastive_start_are_forgotten(tiny_bert, toy_task):
    run = make(tiny_bert, toy_task(), lr=1e-3, head_start="probe", contrast=2, epochs=1)
    cohort = Cohort([run], tiny_bert, SETTINGS)
    with cohort.training():
        cohort.finish_epochs()
        cohort.step()
        assert cohort.optimizer.num_steps == [1]
        assert cohort.optimizer.first_SP.abs().max() > 0
        cohort.step()
        cohort.finish_epochs()
    assert cohort.optimizer.num_steps == [0]
    assert cohort.optimizer.first_SP.abs().max() == 0


class InterruptAt(Hooks):
    def __init__(self, step):
        self.step = step

    def on_step(self, cohort, num_rows):
        if cohort.num_steps == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("step", [0, 3, 6, 8])
def test_stopped_before_in_or_after_the_contrastive_start_a_run_ends_the_same(tiny_bert, toy_task, tmp_path, step):
    run = make(tiny_bert, toy_task(), lr=1e-3, head_start="probe", contrast=6, epochs=1, keep="late")
    with pytest.raises(Interrupted):
        fit([run], tiny_bert, tmp_path / "cut", emit=InterruptAt(step))
    (resumed,) = fit([run], tiny_bert, tmp_path / "cut")
    (whole,) = fit([run], tiny_bert, tmp_path / "whole")
    assert all(torch.equal(resumed.tensors[name], whole.tensors[name]) for name in whole.tensors)
    assert [line["dev"] for line in resumed.history] == [line["dev"] for line in whole.history]


def test_ctrl_c_while_a_stage_is_scored_does_nothing_twice(tiny_bert, toy_task, monkeypatch):
    run = make(tiny_bert, toy_task(), lr=1e-2, head_start="probe", contrast=2, epochs=1, blend=0.5)
    cohort = Cohort([run], tiny_bert, SETTINGS)

    class Stop(Exception):
        pass

    def stop(*given, **more):
        raise Stop

    with cohort.training():
        cohort.finish_epochs()
        cohort.step()
        cohort.step()
        with monkeypatch.context() as patch:
            patch.setattr(cohort._world, "infer", stop)
            with pytest.raises(Stop):
                cohort.finish_epochs()
        blended = cohort.bank.read(0)
        cohort.finish_epochs()
    assert all(torch.equal(tensor, blended[name]) for name, tensor in cohort.bank.read(0).items())


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_starts_in_a_cohort_equal_those_alone(backbone_of, toy_task, family):
    backbone, quiet = backbone_of(family), {"dropout": 0.0, "head_dropout": 0.0}
    runs = [
        make(backbone, toy_task(), lr=1e-3, epochs=1, **quiet),
        make(backbone, toy_task("b", seed=1), lr=1e-3, epochs=1, head_start="probe", contrast=4, **quiet),
        make(backbone, toy_task("c", num_labels=3, seed=2), lr=2e-3, epochs=1, head_start="probe", **quiet),
    ]

    def train(cohort):
        with cohort.training():
            while cohort.active:
                if not cohort.is_unscored:
                    cohort.step()
                cohort.backbone.model.eval()
                cohort.finish_epochs()
                cohort.backbone.model.train()
        return [cohort.bank.read(member.slot) for member in cohort.members]

    together = train(Cohort(runs, backbone, SETTINGS))
    for slot, run in enumerate(runs):
        (alone,) = train(Cohort([run], backbone, SETTINGS))
        for name, tensor in alone.items():
            torch.testing.assert_close(together[slot][name], tensor, atol=2e-4, rtol=2e-3, msg=f"{slot} {name}")


def test_on_few_dev_rows_a_later_epoch_within_chance_is_kept(tiny_bert, toy_task):
    run = make(tiny_bert, toy_task(num_rows=50), lr=1e-3, keep="late")  # 25 dev rows: chance is 0.1
    cohort = Cohort([run], tiny_bert, SETTINGS)
    (member,) = cohort.members
    kept = []
    for accuracy in (0.8, 0.75, 0.92, 0.85, 0.8, 0.83):
        close_epoch(member, DevScores({"accuracy": accuracy}, 0.5, {}), 0.0, cohort.bank)
        kept.append(member.progress.best_epoch)
    assert kept == [1, 2, 3, 4, 4, 6]
    assert member.progress.last_gain == 3


def test_the_epoch_of_the_least_loss_is_kept(tiny_bert, toy_task):
    run = make(tiny_bert, toy_task(num_rows=50), lr=1e-3, keep="loss")
    cohort = Cohort([run], tiny_bert, SETTINGS)
    (member,) = cohort.members
    kept = []
    # accuracy, loss, loss at the likeliest temperature, which is there on many rows and then decides
    for accuracy, loss, calibrated in ((0.8, 0.5, None), (0.9, 0.6, None), (0.7, 0.4, None), (0.7, 0.9, 0.3)):
        close_epoch(member, DevScores({"accuracy": accuracy}, loss, {}, calibrated), 0.0, cohort.bank)
        kept.append(member.progress.best_epoch)
    assert kept == [1, 1, 3, 4]
    close_epoch(member, DevScores({"accuracy": math.nan}, math.nan, {}), 0.0, cohort.bank)
    assert member.progress.best_epoch == 4


@pytest.mark.parametrize(("head_start", "is_sure"), [("probe", True), ("fresh", False)])
def test_a_head_that_began_as_a_probe_is_as_sure_as_its_dev_rows_allow(tiny_bert, toy_task, head_start, is_sure):
    run = make(tiny_bert, toy_task(num_rows=50), lr=1e-3, head_start=head_start)
    dev = run.task.dev
    assert len(dev) >= 10
    logits = list(torch.eye(len(run.task.labels))[dev.targets] * 0.1)  # all right, and sure of nothing
    scores = score_dev(run, encode_split(tiny_bert.tokenizer, dev, run.reading), logits).scores
    assert scores["ece_uncalibrated"] > 0.3
    assert (scores["ece"] < 0.1) == is_sure


def test_where_the_loss_decides_patience_counts_from_the_least_loss(tiny_bert, toy_task):
    run = make(tiny_bert, toy_task(num_rows=50), lr=1e-3, keep="loss", patience=2)
    (member,) = (cohort := Cohort([run], tiny_bert, SETTINGS)).members
    stopped = []
    for accuracy, loss in ((0.7, 0.5), (0.8, 0.4), (0.9, 0.6), (0.95, 0.45)):  # the score rises to the end
        close_epoch(member, DevScores({"accuracy": accuracy}, loss, {}), 0.0, cohort.bank)
        stopped.append(not member.is_active)
    assert stopped == [False, False, False, True]
    assert member.progress.best_epoch == 2
    assert member.progress.message == "no smaller dev loss for 2 epochs"


def test_a_plateau_ends_a_run_whose_user_left_its_length_open(tiny_bert, toy_task):
    def patience(num_rows, kind="classify", **train):
        return make(tiny_bert, toy_task(kind=kind, num_rows=num_rows), **train).config.train.patience

    assert patience(1000) == 2, "after a contrastive start"
    assert patience(1000, contrast=0) == patience(1000, kind="multilabel") == 3
    assert patience(20) == patience(30, kind="regress") == 0, "too few dev rows to tell"
    assert patience(1000, epochs=7) == patience(1000, lr=1e-3) == patience(1000, head_start="fresh") == 0
    assert patience(1000, patience=5) == patience(1000, patience=5, lr=1e-3) == 5


def test_many_dev_rows_have_a_loss_at_the_likeliest_temperature(tiny_bert, toy_task):
    """Overconfidence alone does not change it, being wrong does."""
    task = toy_task(num_labels=2, num_rows=800)
    run = make(tiny_bert, task, lr=1e-3)
    draw = np.random.default_rng(0)
    rows = len(task.dev)
    assert rows >= 200
    logits = torch.tensor(draw.normal(size=(rows, 2)) + 2 * np.eye(2)[task.dev.targets], dtype=torch.float32)
    encoded = encode_split(tiny_bert.tokenizer, task.dev, run.reading)
    plain = score_dev(run, encoded, list(logits))
    sure = score_dev(run, encoded, list(20 * logits))
    assert sure.loss > 1.5 * plain.loss
    assert sure.calibrated_loss == pytest.approx(plain.calibrated_loss, rel=1e-3)
    flipped = score_dev(run, encoded, list(torch.cat([logits[: rows // 4].flip(1), logits[rows // 4 :]])))
    assert flipped.calibrated_loss > plain.calibrated_loss + 0.05


@pytest.mark.parametrize(
    ("train", "kind", "said"),
    [
        ({"head_start": "fresh", "contrast": 5}, "classify", "begins fresh"),
        ({"contrast": 5, "lr": 1e-3}, "classify", "begins fresh"),
        ({"contrast": 5}, "regress", "`regress` task"),
        ({"blend": 0.5, "lr": 1e-3}, "classify", "no contrastive start"),
        ({"head_start": "probe", "hidden": "tanh"}, "classify", "more than one vector"),
    ],
)
def test_starts_that_cannot_be_are_refused(tiny_bert, toy_task, train, kind, said):
    with pytest.raises(BadConfig, match=said):
        make(tiny_bert, toy_task(kind=kind), **train)


def test_zero_epochs_are_for_a_probe_alone():
    with pytest.raises(BadConfig, match="at least 1"):
        TrainConfig(epochs=0)
    assert TrainConfig(epochs=0, head_start="probe").num_epochs == 0


def make_rows_of(task, num_rows):
    """The task with so many training rows, some again and again."""
    rows = np.arange(num_rows) % len(task.train)
    return dataclasses.replace(task, train=task.train.take(rows), digest=f"{task.digest}/{num_rows}")


def test_the_recipe_follows_the_number_of_rows(tiny_bert, toy_task):
    def recipe(num_rows, method="houlsby", **more):
        train = TrainConfig(max_length=32)
        config = RunConfig(method=MethodConfig(method), train=train)
        found = make_run(make_rows_of(toy_task(**more), num_rows), config, tiny_bert).config.train
        return found.head_start, found.contrast, found.epochs, found.lr

    assert recipe(50) == ("probe", 32, 0, 1e-3)
    assert recipe(500) == ("probe", 100, 0, 1e-3)
    assert recipe(1000) == ("probe", 150, 5, 1e-3)
    assert recipe(2001) == ("probe", 0, 5, 5e-4)
    assert recipe(100_000) == ("probe", 0, 4, 5e-4)
    assert recipe(40, kind="regress") == ("probe", 0, 10, 5e-4)
    assert recipe(1000, kind="multilabel") == ("probe", 0, 10, 5e-4)
    assert recipe(1000, method="full")[3] == find_method("full").lr
    assert recipe(40, method="head")[:3] == ("probe", 0, 0)


def test_few_dev_rows_and_two_classes_are_told_from_others(tiny_bert, toy_task):
    found = make(tiny_bert, toy_task(num_rows=100)).config.train  # 50 dev rows
    assert (found.keep, found.thresholds) == ("loss", "dev")
    assert make(tiny_bert, toy_task(num_rows=98)).config.train.keep == "late", "a contrastive start, 49 dev rows"
    assert make(tiny_bert, toy_task(num_rows=20, kind="regress")).config.train.keep == "loss", "nothing but training"
    task = toy_task(num_rows=60)
    long = dataclasses.replace(make_rows_of(task, 800), dev=task.dev)  # it has 30 dev rows, and is trained on
    found = make(tiny_bert, long).config.train
    assert (found.keep, found.patience > 0, found.epochs > 0) == ("loss", True, True)
    assert make(tiny_bert, toy_task(), head_start="fresh").config.train.keep == "late"
    found = make(tiny_bert, toy_task(num_labels=3, num_rows=400), head_start="fresh").config.train
    assert (found.keep, found.thresholds) == ("best", "none")
    assert make(tiny_bert, toy_task(), lr=1e-3).config.train.thresholds == "none"


def make_pairs(size, seed):
    """Pairs of texts; the target is how many words they share."""
    draw = np.random.default_rng(seed)
    words = "the movie was good plot fine call now win free prize we come home late cat sat mat dog".split()
    texts, pairs, targets = [], [], []
    for _ in range(size):
        own, shared = list(draw.choice(words, 6, replace=False)), int(draw.integers(0, 7))
        rest = [word for word in words if word not in own]
        texts.append(" ".join(own))
        pairs.append(" ".join([*own[:shared], *draw.choice(rest, 6 - shared, replace=False)]))
        targets.append(float(shared))
    return Split(texts, pairs, np.array(targets), list(range(1, size + 1)))


def test_pairs_are_read_as_the_probe_does_better_with_and_begin_there(tiny_bert, toy_task, tmp_path):
    task = toy_task(kind="regress")
    task = dataclasses.replace(
        task, metric="spearman", train=make_pairs(80, 0), dev=make_pairs(40, 1), digest="pairs", dev_digest="dev"
    )
    run = make(tiny_bert, task, epochs=1, keep="best")
    scores = compare_readings(task, tiny_bert, 32, run.spec.head.pooling)
    assert scores["towers"] > scores["joined"]
    assert run.spec.head.has_towers
    assert any("read as towers" in note for note in run.notes)
    (result,) = fit([run], tiny_bert, tmp_path)
    assert result.history[0]["dev"]["spearman"] > 0.3
    joined = make(tiny_bert, task, lr=1e-3)
    assert not joined.spec.head.has_towers, "who gives a rate gets what it always was"
    assert make(tiny_bert, task, lr=1e-3).id == joined.id != run.id


def test_of_many_rows_some_are_fitted_to_and_always_the_same(tiny_bert, toy_task, monkeypatch):
    assert np.array_equal(draw_rows(5, 9), np.arange(5))
    some = draw_rows(1000, 100)
    assert np.array_equal(some, draw_rows(1000, 100))
    assert len(set(some.tolist())) == 100
    assert (np.diff(some) > 0).all()
    monkeypatch.setattr(head_start, "_MOST_NUMBERS", 30 * tiny_bert.hidden_size)
    monkeypatch.setattr(head_start, "_CHUNK", 7)
    seen = []
    monkeypatch.setattr(
        head_start, "infer_vectors", lambda bank, rows, **more: seen.extend(rows) or infer_vectors(bank, rows)
    )
    cohort = Cohort([make(tiny_bert, toy_task(num_rows=80))], tiny_bert, SETTINGS)
    cohort.finish_epochs()
    assert len(seen) == 30


def test_a_cosine_that_says_it_all_is_where_numbers_begin():
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(30, 41))
    vectors[:, -1] = draw.uniform(-1, 1, size=30)
    targets = 3 * vectors[:, -1] + 2
    task = dataclasses.replace(
        make_toy_task(kind="regress", num_rows=30), metric="spearman", train=Split(["a"] * 30, None, targets, [1] * 30)
    )
    model = fit_calibrated(task, vectors, has_towers=True).model
    assert np.abs(model.weights[:, :-1]).max() == 0
    np.testing.assert_allclose(model.outputs(vectors)[:, 0], targets, atol=0.1)


def test_steps_taken_and_left_add_up_through_all_stages(tiny_bert, toy_task):
    run = make(tiny_bert, toy_task(), lr=1e-3, head_start="probe", contrast=3, epochs=1)
    cohort = Cohort([run], tiny_bert, SETTINGS)
    (member,) = cohort.members
    assert member.num_stages == 2
    taken = [member.steps_taken]
    with cohort.training():
        cohort.finish_epochs()
        while cohort.active:
            assert member.steps_taken + member.steps_left == 3 + run.num_steps
            cohort.step()
            cohort.finish_epochs()
            taken.append(member.steps_taken)
    assert taken == list(range(4 + run.num_steps))


def test_temperatures_stay_within_reason():
    """Rows that are all right would make a model ever surer; a class that a fold never saw ever less sure."""
    outputs = np.array([[3.0, 0.0], [0.0, 3.0]] * 20)
    assert head_start._find_temperature(outputs, np.array([0, 1] * 20)) == 1.0
    wrong = np.array([[60.0, 0.0], [0.0, 60.0]] * 20)
    assert head_start._find_temperature(wrong, np.array([1, 0] * 20)) == 10.0


def test_memory_that_runs_out_while_a_head_is_fitted_leaves_the_slot_as_it_was(tiny_bert, toy_task, monkeypatch):
    run = make(tiny_bert, toy_task(), lr=1e-2, head_start="probe", contrast=2, epochs=1, blend=0.5)
    cohort = Cohort([run], tiny_bert, SETTINGS)

    def run_out(*given, **more):
        raise MemoryError

    with cohort.training():
        cohort.finish_epochs()
        cohort.step()
        cohort.step()
        before = cohort.bank.read(0)
        with monkeypatch.context() as patch:
            patch.setattr(head_start, "infer_vectors", run_out)
            with pytest.raises(OutOfMemory):
                cohort.finish_epochs()
        assert all(torch.equal(tensor, before[name]) for name, tensor in cohort.bank.read(0).items())
        cohort.finish_epochs()
    assert cohort.members[0].progress.epoch == 1


def test_long_rows_are_contrasted_in_smaller_batches(tiny_bert, toy_task, monkeypatch):
    run = make(tiny_bert, toy_task(num_rows=60), head_start="probe", contrast=3, lr=1e-3, batch_size=32)
    cohort = Cohort([run], tiny_bert, SETTINGS)
    (member,) = cohort.members
    cohort.finish_epochs()
    assert len(member.next_batch()) == 32
    monkeypatch.setattr("inlay.training.cohort.member._MOST_CONTRASTED", 8 * member.longest)
    assert len(member.next_batch()) == 8
    assert member.fewest_tokens == 8 * member.longest


def test_a_run_with_class_weights_is_trained_since_nothing_else_heeds_them(tiny_bert, toy_task):
    assert make(tiny_bert, toy_task(), class_weights="balanced").num_steps > 0
    assert make(tiny_bert, toy_task(), "head", class_weights="balanced").num_steps > 0


def test_a_fresh_head_has_ten_epochs_at_least(tiny_bert, toy_task):
    assert make(tiny_bert, make_rows_of(toy_task(), 5000), hidden="tanh").config.train.epochs == 10
