"""The kinds of arms a study may have, and the function that does the work of each.

`runs` are trained in cohorts; `spans` are such runs, whose layers' adapters are then taken out; a `baseline` has no
transformer; a `sequence` is one network fine-tuned through all tasks. `joint` is one run of all tasks, and `single` the
same of every task by itself, with as many steps. A new kind is a new entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class ArmKind:
    """A kind of arm."""

    is_trained: bool
    """whether each point is a run for `fit`"""
    spans_tasks: bool = False
    """whether one piece of work goes through all tasks, in order"""
    is_joint: bool = False
    """whether its runs may have several tasks that share parameters; their length is a number of steps"""
    needs_backbone: bool = True
    """whether it trains on the backbone at all"""
    function: str = ""
    """`room.module.name` of the function that does the work, or the work after training"""

    def find(self) -> Callable[..., Any]:
        """Import and return the function; its module may be heavy."""
        module, _, name = self.function.rpartition(".")
        return getattr(import_module(f"inlay.{module}"), name)


ARM_KINDS = {
    "runs": ArmKind(is_trained=True),
    "spans": ArmKind(is_trained=True, function="studies.ablate.score_spans"),
    "joint": ArmKind(is_trained=True, spans_tasks=True, is_joint=True),
    "single": ArmKind(is_trained=True, is_joint=True),
    "baseline": ArmKind(is_trained=False, needs_backbone=False, function="explore.baseline.fit_baseline"),
    "sequence": ArmKind(is_trained=False, spans_tasks=True, function="studies.task_sequence.conduct_sequence"),
}
