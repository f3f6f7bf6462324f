"""Candidates for a time budget: settings around the usual ones, how many of them, for how many epochs.

The first candidate is always the run as its user asked for it, with the recipe's values for open settings. Each of the
others differs from it in one open setting: the learning rate, the size or the number of epochs. There are more
candidates only if there is time for all epochs of the first. They are halved at rungs (`halving.py`), so that four cost
about as much as two runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.data import Task
from inlay.model import Backbone, find_method
from inlay.settings import RunConfig
from inlay.store import Store
from inlay.training.recipe.halving import Contest, Rung, make_rungs
from inlay.training.recipe.recipe import STEPS_AFTER_CONTRAST, count_epochs, find_recipe
from inlay.training.run.make_run import make_run
from inlay.training.run.plan import Durations
from inlay.training.run.run import Run, count_start_steps

MOST = 6
"""candidates"""
_FACTORS = (0.3, 3.0)
_SIZES = (64, 16)
_LONGER = 2
_MARGIN = 1.15
"""factor on measured times: a run cut short never sees its small rates, which costs more than one candidate less"""

Change = Mapping[str, Any]
"""settings in which a candidate differs from the first one, by config key"""


def list_changes(run: Run, asked: RunConfig) -> list[Change]:
    """List all candidates for a run, the most promising first; `asked` has None for what its user left open."""
    train, method = run.config.train, run.config.method
    assert train.lr is not None
    assert train.epochs is not None
    is_trained = train.epochs or train.contrast  # a linear probe alone has no learning rate to vary
    changes: list[Change] = [{}]
    if asked.train.lr is None and is_trained:
        changes += [{"train.lr": float(f"{factor * train.lr:.2g}")} for factor in _FACTORS]
    if asked.method.size is None and "size" in find_method(method.name).settings and is_trained:
        changes += [{"method.size": size} for size in _SIZES if size != method.size]
    if asked.train.epochs is None and is_trained:
        after = count_epochs(STEPS_AFTER_CONTRAST, run.num_rows, train.batch_size)
        changes.append({"train.epochs": _LONGER * train.epochs or after})
    return changes[:MOST]


def make_candidate(run: Run, asked: RunConfig, change: Change, backbone: Backbone, store: Store | None = None) -> Run:
    """Make the run that has all of `run`'s settings but these."""
    # A given rate would switch the recipe off, so the recipe's other settings are given too.
    known = find_recipe(run.task, asked, backbone, has_sources=bool(asked.train.start))
    config = dataclasses.replace(asked, train=dataclasses.replace(asked.train, **known))
    config = config.override(f"{key}={value}" for key, value in change.items())
    return make_run(run.task, config, backbone, store)


@dataclass(frozen=True)
class Spending:
    """A plan for a number of seconds: which candidates are trained, and when they are halved."""

    changes: tuple[Change, ...]
    rungs: tuple[Rung, ...]
    seconds: float
    """seconds for training: the budget less the estimated rest of the work"""
    needed_seconds: float
    """most seconds that training takes, by the measured steps"""
    epochs: int
    """epochs of the first candidate"""
    usual_epochs: int
    """epochs that the first candidate would have with enough time"""
    usual_seconds: float
    """seconds that the first candidate alone would take with enough time"""
    before_seconds: float
    """seconds before the first step, the least that is done: frozen layers, a linear probe, a contrastive start"""
    epoch_seconds: float
    score_seconds: float

    @property
    def is_enough(self) -> bool:
        """Whether the first candidate ends in time."""
        return self.needed_seconds <= self.seconds

    def contest(self, runs: Sequence[Run]) -> Contest:
        """Return the rules by which these candidates are compared."""
        task = runs[0].task
        return Contest(tuple(run.id for run in runs), task.metric, len(task.dev), self.rungs)

    def to_json(self) -> dict[str, Any]:
        """Return it as data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Spending:
        """Read it back from data."""
        rungs = tuple(Rung(**rung) for rung in content["rungs"])
        return cls(**{**content, "changes": tuple(content["changes"]), "rungs": rungs})


def plan_spending(run: Run, changes: Sequence[Change], seconds: float, parts: Durations, *, may_cut: bool) -> Spending:
    """Plan as many candidates as fit the time; if not even the first fits and `may_cut`, fewer of its epochs."""
    usual = run.config.train.num_epochs
    before, each = _count_before(run, parts), parts.epoch + parts.dev
    alone = _MARGIN * (parts.once + before + each * usual)
    known: dict[str, Any] = {"seconds": seconds, "usual_epochs": usual, "usual_seconds": alone}
    known |= {"before_seconds": parts.once + before, "epoch_seconds": each, "score_seconds": parts.dev}
    for number in range(len(changes), 0, -1):
        all_epochs = [int(change.get("train.epochs", usual)) for change in changes[:number]]
        rungs = make_rungs(number, usual or max(all_epochs))
        needed = _MARGIN * (parts.once + number * before + each * count_epochs_at_most(all_epochs, rungs))
        if needed <= seconds:
            return Spending(tuple(changes[:number]), rungs, needed_seconds=needed, epochs=usual, **known)
    epochs, needed = usual, alone
    if may_cut and usual > 1:
        epochs = min(usual, max(1, int((seconds / _MARGIN - parts.once - before) / max(each, 1e-9))))
        needed = _MARGIN * (parts.once + before + each * epochs)
    change = {} if epochs == usual else {"train.epochs": epochs}
    return Spending((change,), (), needed_seconds=needed, epochs=epochs, **known)


def count_epochs_at_most(epochs: Sequence[int], rungs: Sequence[Rung]) -> int:
    """Return the most epochs of all candidates together: those that train longest are assumed to pass every rung."""
    left, total, behind = sorted(epochs, reverse=True), 0, 0
    for rung in rungs:
        total += sum(min(own, rung.epoch) - min(own, behind) for own in left)
        left, behind = left[: rung.kept], rung.epoch
    return total + sum(own - min(own, behind) for own in left)


def _count_before(run: Run, parts: Durations) -> float:
    """Return the seconds before the first epoch: a probe, and a contrastive start with another probe after it."""
    train = run.config.train
    if train.head_start != "probe":
        return 0.0
    contrast = count_start_steps(train)
    steps = contrast * parts.epoch / max(1, run.steps_per_epoch)
    num_readings = (2 if contrast else 1) + (train.contrast_folds or 0)
    return steps + num_readings * (parts.probe + parts.dev)


def count_answered(task: Task, *, has_probe: bool) -> float:
    """Return the rows answered after training, in dev sets: the test rows, twice if the probe answers them too."""
    if task.test is None or task.test.targets is None:
        return 0.0
    return (1 + has_probe) * len(task.test) / max(1, len(task.dev))
