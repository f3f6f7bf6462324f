"""The settings of several tasks trained as one run: how tasks are drawn and weighed, and where the run starts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from inlay.errors import BadConfig
from inlay.settings.fields import check_at_least, check_values, require, setting


@dataclass(frozen=True)
class JointConfig:
    """The settings of several tasks trained as one run. A run of one task has none of them.

    >>> inlay.JointConfig(batches="mixed", weights=("cola=2",)).weight_of("cola")
    2.0
    """

    sampling: str = setting(
        "temperature",
        "how tasks are drawn: temperature (p ∝ rows^(1/T)), uniform, or annealed (p ∝ rows^a, a from 1 to 0.2, as in "
        "the paper on PALs)",
        choices=("temperature", "uniform", "annealed"),
    )
    temperature: float = setting(10.0, "T in p ∝ rows^(1/T); 1 draws tasks in proportion to their rows")
    batches: str = setting(
        "homogeneous",
        "rows of a batch: homogeneous (all of one task), or mixed",
        choices=("homogeneous", "mixed"),
    )
    weights: tuple[str, ...] = setting((), "weights of tasks in the loss, where they are not 1: cola=2,sst2=0.5")
    steps: int | None = setting(
        None, "total number of steps, in `train.epochs` equal parts; default: as many as the rows need"
    )
    trained: str = setting(
        "all",
        "what is trained: all, or task (only each task's own parameters, with another default of `train.lr`)",
        choices=("all", "task"),
    )
    start: str | None = setting(
        None, "finished multi-task run to take the shared parameters from (`--from-run` also takes one of its tasks)"
    )
    like: tuple[str, ...] = setting(
        (), "for each new task, the task of that run whose own parameters it starts from: new=old"
    )

    def __post_init__(self) -> None:
        fits = math.isfinite(self.temperature) and self.temperature > 0
        require(fits, "joint.temperature", self.temperature, "a finite number above 0")
        check_at_least(self, "joint", 1, "steps")
        check_values(self, "joint")

    def weight_of(self, task: str) -> float:
        """Return the weight of a task in the loss."""
        return self._weights().get(task, 1.0)

    def resemblances(self) -> dict[str, str]:
        """Return, for each new task, the task of the earlier run whose own parameters it starts from."""
        found = _read_pairs("joint.like", self.like)
        for new, old in found.items():
            require(
                bool(new and old),
                "joint.like",
                f"{new}={old}" if old else new,
                "a new task and an old one: `--like new=old`",
            )
        return found

    def check_tasks(self, names: Iterable[str]) -> None:
        """Refuse settings of tasks that are not in the run, and settings that need a run to start from."""
        known = list(names)
        for key, tasks in (("joint.weights", self._weights()), ("joint.like", self.resemblances())):
            for name in tasks:
                if name not in known:
                    raise BadConfig(
                        f"`{key}` names `{name}`, which is not a task of the run", f"its tasks: {', '.join(known)}"
                    )
        for key, value in (("like", ", ".join(self.like)), ("trained", self.trained)):
            if self.start is None and value not in ("", "all"):
                raise BadConfig(
                    f"`joint.{key}` is `{value}`, but there is no run to start from",
                    "name one that `inlay multitask` trained: `--from-run RUN`",
                )

    def _weights(self) -> dict[str, float]:
        found = {}
        for name, number in _read_pairs("joint.weights", self.weights).items():
            try:
                found[name] = float(number)
            except ValueError:
                given = f": `{number}`" if number else ""
                raise BadConfig(
                    f"`joint.weights` has no number for `{name}`{given}", "write `--set joint.weights=cola=2,sst2=0.5`"
                ) from None
            fits = math.isfinite(found[name]) and found[name] > 0
            require(fits, "joint.weights", f"{name}={number}", "a finite number above 0 for each task")
        return found


def _read_pairs(key: str, items: Iterable[str]) -> dict[str, str]:
    """Return the value of each task from items such as `cola=2`; refuse a task that is named twice."""
    found: dict[str, str] = {}
    for item in items:
        name, _, value = (part.strip() for part in item.partition("="))
        if name in found:
            raise BadConfig(
                f"`{key}` names `{name}` twice: `{name}={found[name]}` and `{item}`", "name every task once"
            )
        found[name] = value
    return found
