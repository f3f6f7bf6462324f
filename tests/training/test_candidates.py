"""What a time budget has room for: candidates around the usual settings, epochs, rungs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest

from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.training import make_run
from inlay.training.recipe.candidates import (
    Spending,
    count_epochs_at_most,
    list_changes,
    make_candidate,
    plan_spending,
)
from inlay.training.recipe.halving import make_rungs
from inlay.training.run.plan import Durations, measure_durations

PARTS = Durations(setup=1.0, once=0.0, epoch=9.0, dev=1.0, probe=0.0)


def ask(method="houlsby", size=None, **train):
    return RunConfig(method=MethodConfig(method, size=size), train=TrainConfig(max_length=32, **train))


def find(asked, backbone, task):
    run = make_run(task, asked, backbone)
    return run, list_changes(run, asked)


def test_candidates_vary_only_what_was_left_open(tiny_bert, toy_task):
    task = toy_task(num_rows=600)
    run, changes = find(ask(), tiny_bert, task)
    lr, epochs = run.config.train.lr, run.config.train.epochs
    assert [dict(change) for change in changes] == [
        {},
        {"train.lr": pytest.approx(0.3 * lr)},
        {"train.lr": pytest.approx(3 * lr)},
        {"method.size": 16},
        {"train.epochs": 2 * epochs},
    ]
    (*_, longer) = find(ask(), tiny_bert, toy_task(num_rows=48))[1]
    assert longer["train.epochs"] > 0, "few rows have none after their contrastive start: then some is the other way"
    keys = {key for change in find(ask(size=8), tiny_bert, task)[1] for key in change}
    assert keys == {"train.lr", "train.epochs"}
    keys = {key for change in find(ask(lr=1e-3), tiny_bert, task)[1] for key in change}
    assert keys == {"method.size", "train.epochs"}
    assert find(ask(size=8, lr=1e-3, epochs=3), tiny_bert, task)[1] == [{}]
    assert find(ask("bitfit", lr=1e-3, epochs=3), tiny_bert, task)[1] == [{}], "it has no size"
    assert find(ask("head"), tiny_bert, task)[1] == [{}], "a linear probe has nothing to vary"


def test_the_first_candidate_is_the_run_as_asked_and_the_others_differ_in_one_setting(tiny_bert, toy_task):
    for rows in (48, 600, 2400):  # a contrastive start and nothing else, one with training after it, none
        asked = ask()
        run, changes = find(asked, tiny_bert, toy_task(num_rows=rows))
        made = [make_candidate(run, asked, change, tiny_bert) for change in changes]
        assert made[0].id == run.id
        assert len({item.id for item in made}) == len(made)
        for item, change in zip(made[1:], changes[1:], strict=True):
            ((key, value),) = change.items()
            section, name = key.split(".")
            assert getattr(getattr(item.config, section), name) == value
            own = dataclasses.replace(
                getattr(item.config, section), **{name: getattr(getattr(run.config, section), name)}
            )
            assert dataclasses.replace(item.config, **{section: own}) == run.config


def test_epochs_of_all_candidates_are_those_of_the_longest_that_go_on():
    assert count_epochs_at_most([8] * 4, make_rungs(4, 8)) == 4 * 2 + 2 * 2 + 4  # two runs' worth
    assert count_epochs_at_most([8], ()) == 8
    assert count_epochs_at_most([8, 8, 8, 16], make_rungs(4, 8)) == 4 * 2 + 2 * 2 + 12
    assert count_epochs_at_most([0, 0, 6], make_rungs(3, 6)) == 6


def test_no_course_of_a_contest_takes_more_epochs_than_are_counted():
    generator = random.Random(1)
    for number, usual in itertools.product(range(1, 7), range(1, 12)):
        epochs = [usual] * (number - 1) + [generator.choice([usual, 2 * usual])]
        rungs, left, total = make_rungs(number, usual), list(epochs), 0
        for epoch in range(1, 2 * usual + 1):
            left = [own for own in left if own >= epoch]
            total += len(left)
            for rung in rungs:
                if rung.epoch == epoch:
                    generator.shuffle(left)
                    del left[rung.kept :]
        assert total <= count_epochs_at_most(epochs, rungs)


def plan(tiny_bert, toy_task, seconds, **given):
    asked = ask(**{"lr": 1e-3, **given})  # ten epochs, no probe
    run, _ = find(asked, tiny_bert, toy_task(num_rows=400))
    changes = [{}, *({"method.size": size} for size in (4, 8, 16, 32, 48))]
    return plan_spending(run, changes, seconds, PARTS, may_cut="epochs" not in given)


def test_more_time_is_more_candidates_and_all_fit(tiny_bert, toy_task):
    found = [plan(tiny_bert, toy_task, seconds) for seconds in range(5, 400, 15)]
    numbers = [len(item.changes) for item in found]
    assert numbers == sorted(numbers)
    assert set(numbers) >= {1, 2, 3, 4, 6}
    for item in found:
        assert item.is_enough == (item.needed_seconds <= item.seconds)
        if len(item.changes) > 1:
            assert item.is_enough
            assert item.epochs == item.usual_epochs == 10, "candidates are no reason to train each for less"


def test_little_time_is_fewer_epochs_and_less_than_one_is_told(tiny_bert, toy_task):
    some = plan(tiny_bert, toy_task, 60)
    assert (len(some.changes), some.epochs, some.is_enough) == (1, 5, True)  # 10 s each, with a margin
    assert some.changes[0] == {"train.epochs": 5}
    none = plan(tiny_bert, toy_task, 3)
    assert (none.epochs, none.is_enough) == (1, False)
    assert none.needed_seconds == pytest.approx(11.5)
    fixed = plan(tiny_bert, toy_task, 60, epochs=8)
    assert (fixed.changes[0], fixed.epochs, fixed.is_enough) == ({}, 8, False), "what was asked for stays"


def test_a_plan_is_read_as_it_was_written(tiny_bert, toy_task):
    made = plan(tiny_bert, toy_task, 300)
    assert Spending.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_durations_are_measured_and_leave_the_generators_alone(tiny_bert, toy_task):
    import torch

    run = make_run(toy_task(), ask(lr=1e-3), tiny_bert)
    before = torch.get_rng_state()
    found = measure_durations(run, tiny_bert)
    assert torch.equal(before, torch.get_rng_state())
    assert min(found.epoch, found.dev, found.probe, found.setup) > 0
    assert found.once == 0, "adapters in the lowest layer: nothing is frozen below them"
    assert found.probe == pytest.approx(2 * found.dev, rel=0.5), "twice as many rows"
