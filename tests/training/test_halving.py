"""Successive halving: who goes on at a rung, when time is up, and that the winner is the run it would be alone."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal

import pytest
import torch

from hooks import Hooks
from inlay.errors import BadConfig
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.training import FitSettings, fit, make_run
from inlay.training.cohort.fit import Interrupted
from inlay.training.recipe.halving import SPENT, Contest, Halving, Rung, Standing, find_chance, make_rungs

NAMES = tuple("abcdef")


def stand(*scores, status="", message="", stages=(), loss=1.0):
    """A candidate with these dev scores, an epoch each, after stages with theirs."""
    lines = [{"epoch": 0, "stage": "probe", "dev": {"accuracy": score}, "dev_loss": loss} for score in stages]
    lines += [{"epoch": epoch, "dev": {"accuracy": score}, "dev_loss": loss} for epoch, score in enumerate(scores, 1)]
    best = max((*scores, *stages), default=None)
    return Standing(lines, status, message, best)


@pytest.mark.parametrize(
    ("num_candidates", "num_epochs", "expected"),
    [
        (1, 40, []),
        (2, 8, [(4, 1)]),
        (3, 8, [(2, 2), (4, 1)]),
        (4, 8, [(2, 2), (4, 1)]),
        (6, 5, [(2, 3), (3, 1)]),
        (4, 3, [(1, 2), (2, 1)]),
        (4, 2, [(1, 1)]),
        (4, 1, []),
        (4, 0, []),
    ],
)
def test_rungs_are_at_a_quarter_and_half_of_the_epochs(num_candidates, num_epochs, expected):
    assert [(rung.epoch, rung.kept) for rung in make_rungs(num_candidates, num_epochs)] == expected


def test_halving_never_ends_the_best_and_leaves_as_many_as_the_rung_says():
    generator = random.Random(0)
    for number, num_dev in itertools.product(range(2, 7), (20, 100_000)):
        for _ in range(50):
            contest = Contest(NAMES[:number], "accuracy", num_dev, make_rungs(number, 8))
            scores = {name: generator.choice([0.2, 0.5, 0.8, generator.random()]) for name in contest.runs}
            for rung in contest.rungs:
                alive = {name: stand(*[score] * rung.epoch) for name, score in scores.items()}
                lost = contest.find_losers(alive, alive.keys())
                assert len(alive) - len(lost) == min(rung.kept, len(alive))
                best, usual = max(scores.values()), scores.get("a", -1.0)
                if best - usual <= find_chance("accuracy", best, num_dev):
                    assert "a" not in lost
                else:
                    assert any(scores[name] == best for name in alive.keys() - lost.keys())
                for name in lost:
                    del scores[name]
            assert len(scores) == 1


def test_who_is_not_at_a_rung_goes_on():
    contest = Contest(("a", "b"), "accuracy", 1000, (Rung(2, 1),))
    assert contest.find_losers({"a": stand(0.9), "b": stand(0.1)}, {"a", "b"}) == {}
    later = {"a": stand(0.9, 0.9, 0.9), "b": stand(0.1, 0.1, 0.1)}
    assert contest.find_losers(later, {"a", "b"}) == {}
    at_it = {"a": stand(0.9, 0.9), "b": stand(0.1, 0.1)}
    assert contest.find_losers(at_it, {"a"}) == {}, "b was judged before, when it came there"
    assert contest.find_losers(at_it, {"b"}) == {"b": "halved away at epoch 2: dev accuracy 0.1000, the best 0.9000"}


def test_one_that_comes_later_is_held_against_what_the_others_had_at_the_rung():
    contest = Contest(("a", "b"), "accuracy", 100_000, (Rung(1, 1),))
    ahead = stand(0.5, 0.9)
    assert contest.find_losers({"a": ahead, "b": stand(0.7)}, {"b"}) == {}
    assert set(contest.find_losers({"a": ahead, "b": stand(0.4)}, {"b"})) == {"b"}


def test_within_chance_of_the_best_the_usual_settings_go_on():
    few, many = (Contest(("a", "b"), "accuracy", number, (Rung(1, 1),)) for number in (50, 50_000))
    close = {"a": stand(0.80), "b": stand(0.84)}
    (reason,) = few.find_losers(close, {"a", "b"}).values()
    assert reason == "halved away at epoch 1: dev accuracy 0.8400, within chance of 0.8000 with the usual settings"
    assert set(many.find_losers(close, {"a", "b"})) == {"a"}


def test_chance_is_the_standard_error_of_a_share():
    assert find_chance("accuracy", 0.5, 100) == pytest.approx(0.05)
    assert find_chance("accuracy", 0.9, 10**6) == pytest.approx(math.sqrt(0.9 * 0.1 / 10**6), rel=1e-3)
    assert find_chance("accuracy", 1.0, 20) > 0
    assert find_chance("rmse", 3.0, 20) == 0


def test_the_best_score_so_far_counts_and_ties_go_to_the_smaller_loss():
    contest = Contest(("a", "b", "c"), "accuracy", 10**9, (Rung(2, 1),))
    standings = {"a": stand(0.7, 0.6), "b": stand(0.8, 0.5, loss=2.0), "c": stand(0.5, 0.8, loss=1.0)}
    assert set(contest.find_losers(standings, standings.keys())) == {"a", "b"}


def test_a_score_before_training_counts_only_where_nothing_is_trained():
    contest = Contest(("a", "b", "c"), "accuracy", 10**9, (Rung(1, 1),))
    done = stand(stages=(0.8,), status="finished")
    standings = {"a": done, "b": stand(0.9, stages=(0.95,)), "c": stand(0.7, stages=(0.95,))}
    assert set(contest.find_losers(standings, {"b", "c"})) == {"c"}


def test_less_is_better_where_the_metric_says_so():
    lines = {name: [{"epoch": 1, "dev": {"rmse": value}, "dev_loss": 1.0}] for name, value in (("a", 2.0), ("b", 1.0))}
    contest = Contest(("a", "b"), "rmse", 10, (Rung(1, 1),))
    assert set(contest.find_losers({name: Standing(own) for name, own in lines.items()}, {"a", "b"})) == {"a"}


def test_the_chosen_one_is_the_best_but_for_chance():
    contest = Contest(("a", "b", "c", "d"), "accuracy", 100)
    halved = {"status": "stopped-early", "message": "halved away at epoch 1: …"}
    standings = {
        "a": stand(0.70, **halved),
        "b": stand(0.91, **halved),
        "c": stand(0.90, status="finished"),
        "d": stand(0.99, status="diverged"),
    }
    assert contest.choose(standings) == ["c", "b", "a", "d"], "trained to the end, and within chance of the best"
    standings["a"] = stand(0.89, status="finished")
    assert contest.choose(standings)[0] == "a", "the usual settings, within chance"
    standings["b"] = stand(0.99, **halved)
    assert contest.choose(standings)[0] == "b", "beyond chance"


# Runs that are trained.


def make(backbone, toy_task, lr, **train):
    settings = {"batch_size": 8, "max_length": 32, "epochs": 4, "dropout": 0.0, "head_dropout": 0.0, "lr": lr, **train}
    task = toy_task(num_rows=96)
    return make_run(task, RunConfig(method=MethodConfig(size=4), train=TrainConfig(**settings)), backbone)


def hold(runs, seconds=None, **settings):
    contest = Contest(
        tuple(run.id for run in runs),
        runs[0].task.metric,
        10**6,
        make_rungs(len(runs), runs[0].config.train.num_epochs),
    )
    return Halving(contest, seconds, **settings)


class Clock:
    """Time goes by a second with every step."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Ticking(Hooks):
    """Moves the clock, and interrupts at a step."""

    def __init__(self, stop_at=None):
        self.clock, self.stop_at, self.steps = Clock(), stop_at, 0

    def on_step(self, cohort, num_rows):
        self.clock.now += 1
        cohort.seconds = self.clock.now  # as time is kept in the resume state
        self.steps += 1
        if cohort.num_steps == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)


RATES = (1e-6, 1e-2, 3e-6, 1e-5)


@pytest.fixture(scope="module")
def alone(tiny_bert, toy_task, tmp_path_factory):
    """The run that wins, trained by itself."""
    run = make(tiny_bert, toy_task, 1e-2)
    return fit([run], tiny_bert, tmp_path_factory.mktemp("alone"))[0]


def check_winner(results, alone):
    assert [result.status for result in results] == ["stopped-early", "finished", "stopped-early", "stopped-early"]
    assert sorted(len(result.history) for result in results) == [1, 1, 2, 4]
    for name, tensor in alone.tensors.items():
        torch.testing.assert_close(results[1].tensors[name], tensor, rtol=1e-4, atol=1e-5)
    for result in (results[0], results[2], results[3]):
        assert result.message.startswith(f"halved away at epoch {len(result.history)}: dev accuracy ")
        assert result.tensors


def test_bad_candidates_are_halved_away_and_the_winner_equals_the_run_alone(tiny_bert, toy_task, tmp_path, alone):
    runs = [make(tiny_bert, toy_task, lr) for lr in RATES]
    check_winner(fit(runs, tiny_bert, tmp_path, referee=hold(runs)), alone)


def test_a_contest_that_was_stopped_goes_on_to_the_same_end(tiny_bert, toy_task, tmp_path, alone):
    runs = [make(tiny_bert, toy_task, lr) for lr in RATES]
    per_epoch = runs[0].steps_per_epoch
    for stop_at in (per_epoch, per_epoch + 2, 3 * per_epoch + 1):
        with pytest.raises(Interrupted):
            fit(runs, tiny_bert, tmp_path, emit=Ticking(stop_at=stop_at), referee=hold(runs))
    check_winner(fit(runs, tiny_bert, tmp_path, referee=hold(runs)), alone)


def test_candidates_that_waited_take_the_slots_of_losers(tiny_bert, toy_task, tmp_path, alone):
    runs = [make(tiny_bert, toy_task, lr) for lr in RATES]
    results = fit(runs, tiny_bert, tmp_path, FitSettings(max_cohort=2), referee=hold(runs))
    assert results[1].status == "finished"
    assert all(result.message.startswith("halved away") for result in (results[0], *results[2:]))
    for name, tensor in alone.tensors.items():
        torch.testing.assert_close(results[1].tensors[name], tensor, rtol=1e-4, atol=1e-5)


def test_at_the_deadline_the_step_in_hand_is_the_last_and_what_was_trained_is_scored(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task, 1e-2)
    watch = Ticking()
    (result,) = fit([run], tiny_bert, tmp_path, emit=watch, referee=hold([run], 5, clock=watch.clock))
    assert (result.status, result.message) == ("stopped-early", SPENT)
    assert watch.steps == 6  # five seconds were over when the sixth step ended
    assert [(line["epoch"], line["step"]) for line in result.history] == [(1, 6)]
    assert 0 < result.history[0]["train_loss"] < 2, "the mean of the steps that were taken"
    assert result.tensors
    assert result.dev_metric == result.history[0]["dev"]["accuracy"]


def test_time_for_the_last_score_is_kept_back(tiny_bert, toy_task, tmp_path):
    runs = [make(tiny_bert, toy_task, lr) for lr in (1e-2, 1e-3)]
    watch = Ticking()
    fit(runs, tiny_bert, tmp_path, emit=watch, referee=hold(runs, 9, score_seconds=2, clock=watch.clock))
    assert watch.steps == 6  # 9 seconds without the scores of two


def test_where_the_time_is_up_with_an_epoch_no_other_step_is_taken(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task, 1e-2, head_start="probe")
    clock = Clock()

    class Scored(Ticking):
        def on_epoch(self, member, record):
            clock.now = 100.0

    watch = Scored()
    (result,) = fit([run], tiny_bert, tmp_path, emit=watch, referee=hold([run], 50, clock=clock))
    assert watch.steps == 1  # the round that fitted the probe, without a step
    assert [line["stage"] for line in result.history] == ["probe"]
    assert (result.message, bool(result.tensors)) == (SPENT, True)


def test_who_waited_when_time_was_up_never_begins(tiny_bert, toy_task, tmp_path):
    runs = [make(tiny_bert, toy_task, lr) for lr in RATES]
    watch = Ticking()
    results = fit(runs, tiny_bert, tmp_path, FitSettings(max_cohort=2), watch, referee=hold(runs, 3, clock=watch.clock))
    assert [result.message for result in results] == [SPENT, SPENT, *[f"{SPENT}: it never began"] * 2]
    assert [bool(result.tensors) for result in results] == [True, True, False, False]
    assert watch.steps == 4


def test_a_stopped_run_has_the_rest_of_its_budget(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task, 1e-2)
    first = Ticking(stop_at=5)
    with pytest.raises(Interrupted):
        fit([run], tiny_bert, tmp_path, emit=first, referee=hold([run], 8, clock=first.clock))
    later = Clock()
    later.now = 1000.0

    class Count(Hooks):
        def __init__(self):
            self.steps, self.notices = 0, []

        def on_step(self, cohort, num_rows):
            later.now += 1
            self.steps += 1

        def on_notice(self, message):
            self.notices.append(message)

    second = Count()
    (result,) = fit([run], tiny_bert, tmp_path, emit=second, referee=hold([run], 8, clock=later))
    assert result.message == SPENT
    assert second.steps == 8 - 5 + 1
    assert "budget: 5 s were trained before, the other 3 s are left" in second.notices


def test_a_budget_is_refused_in_several_processes(tiny_bert, toy_task, tmp_path, monkeypatch):
    run = make(tiny_bert, toy_task, 1e-2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadConfig, match="one of 2"):
        fit([run], tiny_bert, tmp_path, referee=hold([run]))
