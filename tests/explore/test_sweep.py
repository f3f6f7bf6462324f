"""A grid of settings, and the ranking of its results."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from inlay.errors import BadConfig, Diverged
from inlay.explore.sweep import make_grid, parse_axes, rank
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig


def test_grid_has_every_combination_and_seed_once() -> None:
    base = RunConfig(train=TrainConfig(seed=10, epochs=7))
    grid = make_grid(base, parse_axes({"train.lr": "1e-4, 3e-4,1e-4", "method.size": "8,64", "train.epochs": None}), 3)
    points = [(config.train.lr, config.method.size, config.train.seed) for config in grid]
    assert points == [(lr, size, seed) for lr in (1e-4, 3e-4) for size in (8, 64) for seed in (10, 11, 12)]
    assert {config.train.epochs for config in grid} == {7}


def test_grid_without_axes_is_the_config_itself() -> None:
    assert make_grid(RunConfig(), {}) == [RunConfig()]


@pytest.mark.parametrize(
    ("key", "text"), [("train.lr", "fast"), ("method.size", "8,0"), ("train.lrr", "1"), ("a.b", ",")]
)
def test_value_that_cannot_be_is_refused(key: str, text: str) -> None:
    with pytest.raises(BadConfig):
        make_grid(RunConfig(), parse_axes({key: text}))


def outcome(lr: float, seed: int, score: float | None, status: str = "finished", metric: str = "accuracy") -> Any:
    """A run and its result, as far as a ranking looks at them."""
    config = RunConfig(method=MethodConfig(size=8), train=TrainConfig(lr=lr, seed=seed))
    name = f"{lr}-{seed}"
    run = SimpleNamespace(id=name, config=config, task=SimpleNamespace(metric=metric))
    return run, SimpleNamespace(run_id=name, dev_metric=score, best_epoch=1, status=status, message="boom")


def test_runs_are_ranked_by_score_and_settings_by_the_mean_over_seeds() -> None:
    runs, results = zip(
        outcome(1e-3, 0, 0.9), outcome(1e-3, 1, 0.5), outcome(1e-2, 0, 0.8), outcome(1e-2, 1, 0.8), strict=True
    )
    ranking = rank(runs, results, ["train.lr"])
    assert [item.run_id for item in ranking.runs] == ["0.001-0", "0.01-0", "0.01-1", "0.001-1"]
    assert ranking.best.dev_metric == 0.9
    assert [(item.values["train.lr"], item.mean) for item in ranking.settings] == [(1e-2, 0.8), (1e-3, 0.7)]
    assert ranking.settings[1].std == pytest.approx(0.2 * 2**0.5)
    assert ranking.num_seeds == 2


def test_lower_is_better_for_an_error() -> None:
    runs, results = zip(outcome(1e-3, 0, 0.9, metric="rmse"), outcome(1e-2, 0, 0.2, metric="rmse"), strict=True)
    ranking = rank(runs, results, ["train.lr"])
    assert ranking.best.dev_metric == 0.2
    assert ranking.settings[0].best == 0.2


def test_diverged_run_is_last_whatever_it_scored_before() -> None:
    runs, results = zip(
        outcome(1.0, 0, 0.99, "diverged"), outcome(1e-3, 0, 0.6), outcome(1.0, 1, None, "diverged"), strict=True
    )
    ranking = rank(runs, results, ["train.lr"])
    assert ranking.best.run_id == "0.001-0"
    assert [item.status for item in ranking.runs] == ["finished", "diverged", "diverged"]
    assert (ranking.settings[1].scores, ranking.settings[1].mean) == ((), None)
    assert ranking.settings[1].num_runs == 2


def test_sweep_whose_runs_all_diverged_is_an_error() -> None:
    runs, results = zip(outcome(1.0, 0, None, "diverged"), outcome(1.0, 1, None, "diverged"), strict=True)
    with pytest.raises(Diverged, match="all 2 runs diverged"):
        rank(runs, results, ["train.lr"])


def test_ranking_is_plain_data() -> None:
    import json

    runs, results = zip(outcome(1e-3, 0, 0.9), outcome(1e-2, 0, 0.8), strict=True)
    data = json.loads(json.dumps(dataclasses.asdict(rank(runs, results, ["train.lr"]))))
    assert data["runs"][0]["values"] == {"train.lr": 1e-3}
