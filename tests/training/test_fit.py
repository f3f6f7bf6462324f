"""`fit`: what a run's folder holds, what is never repeated, what may differ within a cohort."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from types import SimpleNamespace

import matplotlib.image
import pytest
import torch
from safetensors.torch import load_file

from hooks import Hooks
from inlay.errors import BadConfig, Diverged
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig, read_toml
from inlay.store import Store
from inlay.training import FitSettings, fit, make_run, publish
from inlay.training.cohort.fit import _group
from inlay.training.cohort.loop import MAX_DRAWN, CohortContext, Interrupted
from inlay.training.run.plan import make_plan
from inlay.training.run.run import count_steps


def make(backbone, task, *, method="houlsby", size=8, **train):
    settings = {"batch_size": 8, "max_length": 32, "epochs": 2, "lr": 3e-3, **train}
    return make_run(task, RunConfig(method=MethodConfig(method, size), train=TrainConfig(**settings)), backbone)


class Cohorts(Hooks):
    def __init__(self):
        self.sizes = []

    def on_start(self, cohort):
        self.sizes.append(len(cohort.members))


# A class of one half, numbers 10 apart: guessing gives 0.5, 5.0 and 0.5. Six seeds gave 0.89, 2.98 and 0.89 at worst.
@pytest.mark.parametrize(
    ("kind", "is_learnt"),
    [("classify", lambda x: x > 0.8), ("regress", lambda x: x < 3.6), ("multilabel", lambda x: x > 0.8)],
)
def test_a_task_is_learnt(tiny_bert, toy_task, tmp_path, kind, is_learnt):
    task = toy_task(kind=kind, num_rows=128)
    run = make(tiny_bert, task, size=16, epochs=10, lr=5e-3, pooling="mean")
    (result,) = fit([run], tiny_bert, tmp_path)
    assert is_learnt(result.dev_metric), result.dev_metric
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


@pytest.mark.draws
def test_run_folder_holds_config_metrics_curve_and_weights(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task(), epochs=3)
    (result,) = fit([run], tiny_bert, tmp_path)
    folder = tmp_path / run.id
    assert sorted(path.name for path in folder.iterdir()) == [
        "best.safetensors", "config.toml", "curve.png", "fingerprint", "last.safetensors", "metrics.jsonl",
        "result.json", "rows.digest",
    ]  # fmt: skip
    assert (folder / "fingerprint").read_text() == f"{tiny_bert.fingerprint}\n"
    assert read_toml(folder / "config.toml") == run.config
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert (
        lines[result.best_epoch - 1]["dev"]["accuracy"] == result.dev_metric == max(x["dev"]["accuracy"] for x in lines)
    )
    assert matplotlib.image.imread(folder / "curve.png").std() > 0.05, "a picture, and not an empty one"
    best = load_file(folder / "best.safetensors")
    assert all(torch.equal(best[name], tensor) for name, tensor in result.tensors.items())
    specs = {item.name: item.shape for item in run.spec.layout(tiny_bert.anatomy)}
    assert {name: tuple(tensor.shape) for name, tensor in best.items()} == specs


def test_a_finished_run_is_never_repeated(tiny_bert, toy_task, tmp_path):
    runs = [make(tiny_bert, toy_task(), seed=seed) for seed in range(3)]
    watch = Cohorts()
    first = fit(runs[:2], tiny_bert, tmp_path, emit=watch)
    again = fit(runs[:2], tiny_bert, tmp_path, emit=watch)
    more = fit(runs, tiny_bert, tmp_path, emit=watch)
    assert watch.sizes == [2, 1]
    assert [result.run_id for result in more] == [run.id for run in runs]
    assert [r.dev_metric for r in first] == [r.dev_metric for r in again] == [r.dev_metric for r in more[:2]]


def test_runs_of_other_methods_or_dropout_train_in_other_cohorts(tiny_bert, toy_task, tmp_path):
    task, watch = toy_task(), Cohorts()
    runs = [
        make(tiny_bert, task),
        make(tiny_bert, task, method="pfeiffer"),
        make(tiny_bert, task, size=3, lr=1e-4),
        make(tiny_bert, task, dropout=0.3),
    ]
    results = fit(runs, tiny_bert, tmp_path, emit=watch)
    assert sorted(watch.sizes) == [1, 1, 2]
    assert [result.run_id for result in results] == [run.id for run in runs]


def test_heads_that_no_program_knows_train_apart_where_steps_are_compiled(tiny_bert, toy_task, tmp_path, monkeypatch):
    plain, mixed = make(tiny_bert, toy_task()), make(tiny_bert, toy_task(), features="mix")
    other = make(tiny_bert, toy_task(), seed=1, hidden="tanh")
    runs = [plain, mixed, other]
    assert _group(runs, tiny_bert, tmp_path) == [runs]
    monkeypatch.setattr(sys.modules[_group.__module__], "has_programs", lambda backbone, method: True)
    assert _group(runs, tiny_bert, tmp_path) == [[plain, other], [mixed]]


@pytest.mark.parametrize("begins_apart", [True, False])
def test_cohorts_go_on_as_they_were_stopped_where_others_would_be_made_now(
    tiny_bert, toy_task, tmp_path, monkeypatch, begins_apart
):
    runs = [make(tiny_bert, toy_task(), epochs=2), make(tiny_bert, toy_task(), epochs=2, features="mix")]

    monkeypatch.setattr(sys.modules[_group.__module__], "has_programs", lambda backbone, method: begins_apart)
    with pytest.raises(Interrupted):
        fit(runs, tiny_bert, tmp_path, FitSettings(), StopAt(3))
    before = {state.parent.name for state in tmp_path.glob("cohorts/*/state.safetensors")}
    assert before
    monkeypatch.setattr(sys.modules[_group.__module__], "has_programs", lambda backbone, method: not begins_apart)
    steps = []
    watch = Hooks()
    watch.on_start = lambda cohort: steps.append(cohort.num_steps)
    fit(runs, tiny_bert, tmp_path, emit=watch)
    assert steps[0] > 0
    assert not list(tmp_path.glob("cohorts/*/state.safetensors"))


def test_runs_beyond_the_slots_wait_and_enter_as_others_end(tiny_bert, toy_task, tmp_path):
    task, seen = toy_task(), []
    epochs = [1, 4, 1, 2, 1]
    runs = [make(tiny_bert, task, seed=seed, epochs=number) for seed, number in enumerate(epochs)]

    class Look(Hooks):
        def on_step(self, cohort, num_rows):
            seen.append([member.run.config.train.seed if member.is_active else None for member in cohort.members])

    results = fit(runs, tiny_bert, tmp_path, FitSettings(max_cohort=2), Look())
    assert [result.run_id for result in results] == [run.id for run in runs]
    assert [len(result.history) for result in results] == epochs
    num = runs[0].steps_per_epoch
    assert len(seen) == (4 + 1) * num  # nine epochs in two slots, the longest run first: no slot is idle before the end
    in_slots = [seen[step] for step in range(0, len(seen), num)]
    assert in_slots == [[1, 3], [1, 3], [1, 0], [1, 2], [4, None]]


def test_early_stopping_keeps_the_best_epoch(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task(), epochs=30, patience=2, lr=1e-7)
    (result,) = fit([run], tiny_bert, tmp_path)
    assert result.status == "stopped-early"
    scores = [line["dev"]["accuracy"] for line in result.history]
    last_gain = scores.index(max(scores)) + 1
    assert len(scores) == last_gain + 2
    assert scores[result.best_epoch - 1] == max(scores)  # perhaps later than the gain: of equal scores the surer one
    assert "no better dev accuracy for 2 epochs" in result.message


@pytest.mark.draws
def test_a_diverging_run_is_reported_and_stops_alone(tiny_bert, toy_task, tmp_path):
    task = toy_task()
    good, bad = make(tiny_bert, task), make(tiny_bert, task, lr=9.9, clip_norm=0.0, warmup=0.0, epochs=40)
    alone, lost = fit([good, bad], tiny_bert, tmp_path)
    assert alone.status == "finished"
    assert lost.status == "diverged"
    assert matplotlib.image.imread(tmp_path / bad.id / "curve.png").std() > 0.01, "its losses up to then are drawn"
    assert "try a smaller learning rate than 9.9" in lost.message
    if not lost.tensors:
        with pytest.raises(Diverged):
            publish(bad, lost, tiny_bert, Store(tmp_path / "store"))


def test_run_id_covers_settings_data_and_backbone_but_no_paths(backbone_of, toy_task):
    bert, task = backbone_of("bert"), toy_task()
    run = make(bert, task)
    moved = dataclasses.replace(run.config, data=dataclasses.replace(run.config.data, source="/elsewhere/x.csv"))
    assert make_run(task, moved, bert).id == run.id
    assert make(bert, task, lr=1e-4).id != run.id
    assert make(bert, task, size=9).id != run.id
    assert make(bert, toy_task(seed=5)).id != run.id
    assert make(backbone_of("roberta"), task).id != run.id


def test_settings_that_cannot_go_together_are_refused_before_training(tiny_bert, toy_task):
    with pytest.raises(BadConfig, match="reads at most 66 tokens"):
        make(tiny_bert, toy_task(), max_length=100)
    with pytest.raises(BadConfig, match="class_weights"):
        make(tiny_bert, toy_task(kind="regress"), class_weights="balanced")


def test_plan_counts_and_estimates_without_changing_anything(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task(num_rows=64), epochs=4)
    before = {name: parameter.clone() for name, parameter in tiny_bert.model.named_parameters()}
    rng = torch.get_rng_state()
    plan = make_plan(run, tiny_bert)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(p, before[n]) for n, p in tiny_bert.model.named_parameters())
    assert not tiny_bert.model.training
    (result,) = fit([run], tiny_bert, tmp_path)
    assert plan.inlay.trained_parameters == sum(tensor.numel() for tensor in result.tensors.values())
    assert plan.num_steps == result.history[-1]["step"]
    assert plan.full.trained_parameters == tiny_bert.num_parameters + 2 * 32 + 2
    assert json.loads(json.dumps(plan.to_json()))["run_id"] == run.id


def test_steps_counted_as_the_original_end_the_last_epoch_early(tiny_bert, toy_task, tmp_path):
    # 44 rows in batches of 8: six steps an epoch, but 44 · 3 / 8 = 16.5 in all.
    plain, counted = (
        make(tiny_bert, toy_task(num_rows=44), epochs=3),
        make(tiny_bert, toy_task(num_rows=44), epochs=3, steps="bert"),
    )
    whole, cut = fit([plain, counted], tiny_bert, tmp_path)
    assert [line["step"] for line in whole.history] == [6, 12, 18]
    assert [line["step"] for line in cut.history] == [6, 12, 16]
    assert (plain.num_steps, counted.num_steps) == (18, 16)
    assert cut.status == "finished"
    assert plain.id != counted.id
    cola = dataclasses.replace(counted.config.train, batch_size=32, epochs=15)
    assert count_steps(8551, cola) == 4008  # the student reproduction's `model.ckpt-4008`


def test_resume_states_are_no_more_often_than_asked_and_curves_are_drawn_if_asked(
    tiny_bert, toy_task, tmp_path, monkeypatch
):
    saved = []
    monkeypatch.setattr("inlay.training.cohort.loop.save_state", lambda place, cohort: saved.append(cohort.num_steps))
    run = make(tiny_bert, toy_task(), epochs=3)
    fit([run], tiny_bert, tmp_path / "often")
    assert saved == [6, 12, 18], "at every epoch's end"
    saved.clear()
    fit([run], tiny_bert, tmp_path / "seldom", FitSettings(save_seconds=1e9, draw_curves=False))
    assert saved == []
    assert (tmp_path / "often" / run.id / "curve.png").is_file()
    assert not (tmp_path / "seldom" / run.id / "curve.png").exists()
    weights = [load_file(tmp_path / place / run.id / "best.safetensors") for place in ("often", "seldom")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_state_that_takes_long_to_write_is_written_seldom(tmp_path, monkeypatch):
    """A save of two seconds is not repeated before 40 more; one of half a second may be at every occasion."""
    now = [100.0]
    context = CohortContext([], tmp_path)
    monkeypatch.setattr("inlay.training.cohort.loop.time.monotonic", lambda: now[0])
    for took, rest in [(2.0, 40.0), (0.5, 0.0)]:
        monkeypatch.setattr(
            "inlay.training.cohort.loop.save_state", lambda place, cohort, took=took: now.__setitem__(0, now[0] + took)
        )
        context.save(SimpleNamespace(num_steps=1))
        now[0] += max(0.0, rest - 0.1)
        assert context.is_due() == (rest == 0.0)
        now[0] += 0.2
        assert context.is_due()


def test_curves_of_many_runs_are_drawn_only_if_asked(tiny_bert, toy_task, tmp_path):
    runs = [make(tiny_bert, toy_task(), epochs=1, seed=seed) for seed in range(MAX_DRAWN + 1)]
    fit(runs, tiny_bert, tmp_path)
    assert not list(tmp_path.glob("*/curve.png"))


class StopAt(Hooks):
    """Ctrl-C at a step, as a study's deadline gives it."""

    def __init__(self, step):
        self.step = step

    def on_step(self, cohort, num_rows):
        if cohort.num_steps == self.step:
            signal.raise_signal(signal.SIGINT)


def test_asked_to_stop_the_state_is_saved_whenever_the_last_one_was(tiny_bert, toy_task, tmp_path):
    runs = [make(tiny_bert, toy_task(), epochs=epochs) for epochs in (1, 3)]
    settings = FitSettings(save_seconds=1e9)
    for step in (4, 8, 9):  # before and after the shorter run has ended, whose end no state has seen
        with pytest.raises(Interrupted):
            fit(runs, tiny_bert, tmp_path / "stopped", settings, StopAt(step))
    results = fit(runs, tiny_bert, tmp_path / "stopped", settings)
    whole = fit(runs, tiny_bert, tmp_path / "whole")
    for ours, theirs in zip(results, whole, strict=True):
        assert ours.dev_metric == theirs.dev_metric
        assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in theirs.tensors)
