"""Sweeps: makes runs from a grid of settings, and a ranking from their results."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inlay.errors import BadConfig, Diverged
from inlay.settings import RunConfig

if TYPE_CHECKING:
    from inlay.training import Result, Run


@dataclass(frozen=True)
class RankedRun:
    """One run of a sweep; `values` are its settings on the axes, by config key."""

    run_id: str
    values: dict[str, Any]
    seed: int
    dev_metric: float | None
    best_epoch: int
    status: str
    message: str = ""


@dataclass(frozen=True)
class RankedSetting:
    """One point of the grid with all its seeds; diverged runs have no score and only count in `num_runs`."""

    values: dict[str, Any]
    num_runs: int
    scores: tuple[float, ...]
    mean: float | None
    std: float | None
    """standard deviation of the sample; None for fewer than two scores"""
    best: float | None


@dataclass(frozen=True)
class Ranking:
    """A sweep's runs and settings, the best first."""

    metric: str
    axes: tuple[str, ...]
    num_seeds: int
    runs: tuple[RankedRun, ...]
    settings: tuple[RankedSetting, ...]

    @property
    def best(self) -> RankedRun:
        """The run with the best dev score."""
        return self.runs[0]


def parse_axes(given: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Split comma lists such as `1e-4,3e-4` into values, by config key; keys without a list are left out."""
    axes = {}
    for key, text in given.items():
        if text is None:
            continue
        axes[key] = list(dict.fromkeys(value.strip() for value in text.split(",") if value.strip()))
        if not axes[key]:
            raise BadConfig(f"`{key}` has no values", f"give one or more, such as `--{key.partition('.')[2]} A,B`")
    return axes


def make_grid(config: RunConfig, axes: Mapping[str, Sequence[Any]], num_seeds: int = 1) -> list[RunConfig]:
    """Return every combination of the axes' values with `num_seeds` seeds, counted up from the config's own seed.

    Values may be texts, which are checked as `--set` checks them. The seeds of one setting follow each other.
    """
    grid = []
    for values in itertools.product(*axes.values()):
        point = config.override(f"{key}={value}" for key, value in zip(axes, values, strict=True))
        for seed in range(config.train.seed, config.train.seed + num_seeds):
            grid.append(dataclasses.replace(point, train=dataclasses.replace(point.train, seed=seed)))
    return grid


def rank(runs: Sequence[Run], results: Sequence[Result], axes: Sequence[str]) -> Ranking:
    """Rank runs by dev score, and settings by their mean; ties keep their order. Raise `Diverged` if all runs did."""
    from inlay.data import METRICS

    task = runs[0].task
    sign = 1 if METRICS[task.metric].higher_is_better else -1
    found = {result.run_id: result for result in results}
    # 1. the runs, in groups of one setting
    ranked: list[RankedRun] = []
    groups: dict[tuple[Any, ...], list[RankedRun]] = {}
    for run in runs:
        result, values = found[run.id], {}
        for key in axes:
            section, _, name = key.partition(".")
            values[key] = getattr(getattr(run.config, section), name)
        # A run that diverged after a good epoch has no score, as its settings are not stable.
        dev = None if result.status == "diverged" else result.dev_metric
        seed = run.config.train.seed
        item = RankedRun(run.id, values, seed, dev, result.best_epoch, result.status, result.message)
        ranked.append(item)
        groups.setdefault(tuple(values.values()), []).append(item)
    # 2. the best first
    settings = [_summarise(items, sign) for items in groups.values()]
    ranked.sort(key=lambda item: _order(item.dev_metric, sign))
    if ranked[0].dev_metric is None:
        raise Diverged(f"all {len(ranked)} runs diverged: {ranked[0].message}", "sweep smaller learning rates")
    settings.sort(key=lambda item: _order(item.mean, sign))
    num_seeds = max(len(items) for items in groups.values())
    return Ranking(task.metric, tuple(axes), num_seeds, tuple(ranked), tuple(settings))


def _summarise(items: Sequence[RankedRun], sign: int) -> RankedSetting:
    scores = tuple(item.dev_metric for item in items if item.dev_metric is not None)
    return RankedSetting(
        values=items[0].values,
        num_runs=len(items),
        scores=scores,
        mean=statistics.fmean(scores) if scores else None,
        std=statistics.stdev(scores) if len(scores) > 1 else None,
        best=max(scores, key=lambda score: sign * score) if scores else None,
    )


def _order(score: float | None, sign: int) -> float:
    return math.inf if score is None or math.isnan(score) else -sign * score
