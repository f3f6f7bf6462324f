"""The kinds of arms a study may have; `studies/run/units.py` does the work of each.

`runs` are trained in cohorts; `spans` are such runs, whose layers' adapters are then taken out; a `baseline` has no
transformer; a `sequence` is one network fine-tuned through all tasks. `joint` is one run of all tasks, and `single` the
same of every task by itself, with as many steps.
"""

from __future__ import annotations

from dataclasses import dataclass


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


ARM_KINDS = {
    "runs": ArmKind(is_trained=True),
    "spans": ArmKind(is_trained=True),
    "joint": ArmKind(is_trained=True, spans_tasks=True, is_joint=True),
    "single": ArmKind(is_trained=True, is_joint=True),
    "baseline": ArmKind(is_trained=False, needs_backbone=False),
    "sequence": ArmKind(is_trained=False, spans_tasks=True),
}
