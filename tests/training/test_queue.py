"""Runs that wait for a slot end as if they had been trained alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from hooks import Hooks
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.training import FitSettings, fit, make_run
from inlay.training.cohort.cohort import Cohort, CohortSettings, Queue, longest_first

SETTINGS = CohortSettings(token_budget=65536, num_threads=1, save_every=100)
QUIET = {"dropout": 0.0, "head_dropout": 0.0, "batch_size": 8, "max_length": 32}


def make_runs(backbone, toy_task, **method):
    """Six runs of unlike length, task, kind, label count, size, head and optimizer: the widest are not the first."""
    two = toy_task("two", num_labels=2, num_rows=24)
    five = toy_task("five", num_labels=5, num_rows=20, seed=1)
    number = toy_task("number", kind="regress", num_rows=22, seed=2)
    varied = [
        (two, 8, {"lr": 1e-3, "epochs": 3}),
        (two, 3, {"lr": 3e-3, "epochs": 3, "batch_size": 5}),
        (five, 16, {"lr": 3e-3, "epochs": 1, "weight_decay": 0.1}),
        (number, 24, {"lr": 2e-3, "epochs": 2, "schedule": "bert", "optimizer": "bert-adam"}),
        (two, 8, {"lr": 1e-2, "epochs": 1, "hidden": "tanh"}),
        (five, 5, {"lr": 1e-2, "epochs": 1, "clip_norm": 0.5, "features": "mix"}),
    ]
    return [
        make_run(
            task,
            RunConfig(method=MethodConfig(size=size, **method), train=TrainConfig(**QUIET | more, seed=seed)),
            backbone,
        )
        for seed, (task, size, more) in enumerate(varied)
    ]


@pytest.mark.parametrize(("num_labels", "near"), [(5, 0.0), (2, 1e-5)])
def test_a_copy_of_the_backbone_that_waited_for_another_equals_the_copy_alone(
    backbone_of, toy_task, tmp_path, num_labels, near
):
    """To the last bit, dropout included: each draws its own numbers. Where the other's head is wider, some processors
    round the products of both otherwise. And what was begun alone goes on alone."""
    backbone = backbone_of("bert")
    tasks = [toy_task("first", num_labels=num_labels, num_rows=24), toy_task("five", num_labels=5, num_rows=20, seed=1)]
    train = TrainConfig(lr=1e-3, epochs=2, batch_size=8, max_length=32)
    runs = [make_run(task, RunConfig(method=MethodConfig("full"), train=train), backbone) for task in tasks]
    cohorts = []

    class Watch(Hooks):
        def on_start(self, cohort):
            cohorts.append((len(cohort.queue.runs), cohort.num_seats))

    fit(runs, backbone, tmp_path / "queued", FitSettings(), Watch())
    assert cohorts == [(2, 1)]
    for run in runs:
        fit([run], backbone, tmp_path / "alone")
        queued, alone = (load_file(tmp_path / name / run.id / "last.safetensors") for name in ("queued", "alone"))
        assert queued.keys() == alone.keys()
        for name in alone:
            if not near or not name.endswith(
                "key.bias"
            ):  # whose true gradient is zero: Adam makes steps of its rounding
                torch.testing.assert_close(queued[name], alone[name], atol=near, rtol=0.0, msg=name)

    class Stop(Hooks):
        def on_step(self, cohort, num_rows):
            if cohort.num_steps == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(runs[1:], backbone, tmp_path / "begun", FitSettings(save_every=1), Stop())
    cohorts.clear()
    fit(runs, backbone, tmp_path / "begun", FitSettings(), Watch())
    assert sorted(cohorts) == [(1, 1), (1, 1)]
    assert (tmp_path / "begun" / runs[1].id / "last.safetensors").read_bytes() == (
        tmp_path / "alone" / runs[1].id / "last.safetensors"
    ).read_bytes()


def test_a_copy_that_was_trained_elsewhere_is_not_trained_again_by_its_row(backbone_of, toy_task, tmp_path):
    backbone, task = backbone_of("bert"), toy_task("two", num_labels=2, num_rows=24)
    configs = [TrainConfig(lr=1e-3, epochs=2, batch_size=8, max_length=32, seed=seed) for seed in range(3)]
    runs = [make_run(task, RunConfig(method=MethodConfig("full"), train=train), backbone) for train in configs]

    class Stop(Hooks):
        def on_step(self, cohort, num_rows):
            if cohort.num_steps == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(runs, backbone, tmp_path, FitSettings(save_every=1), Stop())
    fit(runs[1:2], backbone, tmp_path)
    before = (tmp_path / runs[1].id / "result.json").read_bytes()
    seen, waiting = [], []

    class Watch(Hooks):
        def on_start(self, cohort):
            waiting.extend(run.id for run in cohort.queue.waiting)

        def on_step(self, cohort, num_rows):
            seen.extend(member.run.id for member in cohort.members)

    fit(runs, backbone, tmp_path, FitSettings(save_every=1), Watch())
    assert waiting == [runs[2].id]
    assert seen == [runs[0].id] * 3 + [runs[2].id] * 6, "3 steps an epoch, of which 3 were taken before"
    assert (tmp_path / runs[1].id / "result.json").read_bytes() == before
    assert not list((tmp_path / "cohorts").glob("*/state.safetensors"))


# Before a batch norm the gradient is nearly zero, and Adam, which divides by its size, makes a step of its rounding.
@pytest.mark.parametrize(
    ("family", "method", "within"),
    [
        ("bert", {}, 1e-5),
        ("mpnet", {"name": "lora"}, 1e-5),
        ("bert", {"inner_norm": "batch"}, 1e-4),
        ("modernbert", {"name": "pfeiffer"}, 1e-5),
    ],
    ids=str,
)
def test_a_run_that_waited_for_its_slot_equals_the_run_alone(backbone_of, toy_task, tmp_path, family, method, within):
    backbone = backbone_of(family)
    runs = make_runs(backbone, toy_task, **method)
    queued = fit(runs, backbone, tmp_path / "queued", FitSettings(max_cohort=2))
    for run, result in zip(runs, queued, strict=True):
        (alone,) = fit([run], backbone, tmp_path / "alone")
        assert result.best_epoch == alone.best_epoch
        assert [line["step"] for line in result.history] == [line["step"] for line in alone.history]
        assert result.tensors.keys() == alone.tensors.keys()
        for name, tensor in alone.tensors.items():
            torch.testing.assert_close(result.tensors[name], tensor, atol=within, rtol=1e-4, msg=name)


def test_refilling_a_slot_touches_no_other_and_changes_no_shape(tiny_bert, toy_task):
    runs = make_runs(tiny_bert, toy_task)
    cohort = Cohort(runs, tiny_bert, dataclasses.replace(SETTINGS, num_slots=2))
    shapes = {name: (stack.shape, stack.data_ptr()) for name, stack in cohort.bank.stacks.items()}
    cohort.step()
    other = {name: stored_SP[1].clone() for name, stored_SP in cohort.stored.items()}
    for run in runs[2:]:
        cohort.members[0].progress.status = "finished"
        (entered,) = cohort.refill()
        assert (entered.run, entered.slot) == (run, 0)
        fresh = Cohort([run], tiny_bert, SETTINGS).bank.read(0)
        assert all(torch.equal(fresh[name], tensor) for name, tensor in cohort.bank.read(0).items())
        assert not cohort.optimizer.first_SP[0].any()
        assert not cohort.optimizer.second_SP[0].any()
        assert cohort.optimizer.num_steps == [0, 1]
        assert all(torch.equal(other[name], stored_SP[1]) for name, stored_SP in cohort.stored.items())
    assert shapes == {name: (stack.shape, stack.data_ptr()) for name, stack in cohort.bank.stacks.items()}
    cohort.members[0].progress.status = "finished"
    assert cohort.refill() == []  # nobody waits: the slot stays free, and the other goes on
    assert [member.slot for member in cohort.active] == [1]
    assert cohort.step() == 5


def test_the_longest_runs_enter_first_and_one_that_lost_its_slot_before_all(tiny_bert, toy_task):
    runs = make_runs(tiny_bert, toy_task)
    ordered = longest_first(runs)
    lengths = [run.num_steps for run in ordered]
    assert lengths == sorted(lengths, reverse=True)
    assert [run for run in ordered if run.num_steps == runs[2].num_steps] == [
        run for run in runs if run.num_steps == runs[2].num_steps
    ]
    queue = Queue(ordered)
    assert queue.take() is ordered[0]
    queue.parked = ["had begun"]
    assert queue.take() == "had begun"
    assert queue.take() is ordered[1]
    assert queue.waiting == ordered[2:]


def test_seconds_of_a_run_count_from_its_entry(tiny_bert, toy_task, tmp_path):
    class Slow(Hooks):
        def on_start(self, cohort):
            cohort.seconds = 1000.0

    results = fit(make_runs(tiny_bert, toy_task), tiny_bert, tmp_path, FitSettings(max_cohort=2), Slow())
    late = [result.seconds for result in results if result.seconds < 1000]
    assert len(late) == 4
    assert all(line["seconds"] < 1000 for result in results[-1:] for line in result.history)
