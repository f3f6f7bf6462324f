"""Parameters as the papers count them, from shapes alone: what `plan` and a dry run print before they measure.

Every source has a number of its own for the same model. Houlsby et al. 2019 print what a task trains as a share of the
backbone, its own copies of layer norms and the head included, and all tasks as a multiple of it (1.3x for nine).
Mahabadi et al. 2021 divide what several tasks train together by their number (0.29% a task). A student reproduction
prints the adapters alone as trainable, and as total the backbone with adapters and head, in which trained layer norms
are not counted again: they stand in for the backbone's. TF-Adapter-BERT counts all that is trained but the last layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from inlay.model import OWN_WEIGHTS, Anatomy, TensorSpec
from inlay.model import head as head_part

_LAST_LAYER = (head_part.WEIGHT, head_part.BIAS)


@dataclass(frozen=True)
class Totals:
    """Parameters that one task or several train on a backbone, by each way of counting."""

    backbone: int
    num_tasks: int
    trained: int
    """parameters trained by all tasks together"""
    adapters: int
    """trained parameters of adapters, or of whatever the method adds in their place"""
    last_layers: int
    """trained parameters of the layers that give the logits"""
    kept: int
    """parameters that the tasks need beside the backbone: trained ones, and shared ones of an earlier run"""
    replaced: int
    """kept parameters that are copies of the backbone's own, and replace those"""
    needs_backbone: bool = True
    """False if every used parameter has a trained copy, as in full fine-tuning"""

    @property
    def trained_without_last(self) -> int:
        """Trained parameters without the layers that give the logits."""
        return self.trained - self.last_layers

    @property
    def with_backbone(self) -> int:
        """The backbone and what is added to it; copies of its own parameters are not counted again."""
        return self.backbone + self.kept - self.replaced

    @property
    def share_per_task(self) -> float:
        """Parameters that a task trains, as a share of the backbone; shared ones are divided equally."""
        return self.trained / self.num_tasks / self.backbone

    @property
    def times_backbone(self) -> float:
        """Parameters to keep for all tasks, as a multiple of the backbone."""
        return float(self.needs_backbone) + self.kept / self.backbone

    @property
    def times_full(self) -> float:
        """Multiple of the backbone that full fine-tuning keeps: one for every task, without heads, as in the papers."""
        return float(self.num_tasks)

    def repeat(self, times: int) -> Totals:
        """Return the counts for `times` as many tasks that share nothing with each other."""
        counts = ("num_tasks", "trained", "adapters", "last_layers", "kept", "replaced")
        return replace(self, **{name: times * getattr(self, name) for name in counts})

    def to_json(self) -> dict[str, Any]:
        """Return every count as data."""
        return {
            "num_tasks": self.num_tasks,
            "trained": self.trained,
            "adapters_alone": self.adapters,
            "trained_without_last_layer": self.trained_without_last,
            "with_backbone": self.with_backbone,
            "share_per_task": self.share_per_task,
            "times_backbone": self.times_backbone,
            "times_full_fine_tuning": self.times_full,
        }


def count_totals(
    items: Sequence[TensorSpec],
    anatomy: Anatomy,
    *,
    num_tasks: int = 1,
    is_shared_frozen: bool = False,
    num_backbone: int | None = None,
) -> Totals:
    """Count the tensors of `num_tasks` tasks.

    `items` are those of all tasks, as `JointRun.layout` lists them. With `is_shared_frozen` tasks train only their
    own parameters. `num_backbone` is the number of parameters in the backbone's files, which may lack some that its
    shape has, such as a pooler.
    """
    trained = [item for item in items if not (is_shared_frozen and item.is_shared)]
    copied = {OWN_WEIGHTS.theirs(_bare(item)) for item in items if item.part == "weights"}
    return Totals(
        backbone=num_backbone or sum(math.prod(site.shape) for site in anatomy.parameters),
        num_tasks=num_tasks,
        trained=_sum(trained),
        adapters=_sum([item for item in trained if item.part == "adapters"]),
        last_layers=_sum([item for item in trained if _bare(item) in _LAST_LAYER]),
        kept=_sum(items),
        replaced=_sum([item for item in items if item.start == "backbone"]),
        needs_backbone=any(not (site.is_pooler or site.name in copied) for site in anatomy.parameters),
    )


def _bare(item: TensorSpec) -> str:
    """Return the tensor's name without the task's name before it."""
    return item.name.rpartition("/")[2]


def _sum(items: Sequence[TensorSpec]) -> int:
    return sum(item.num_parameters for item in items)
