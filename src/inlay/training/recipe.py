"""The recipe: what a run does where its user left the learning rate open, by method, backbone and rows.

Who gives a rate gets what he says, and what defaults always were: ten epochs, a fresh head. Who leaves it open gets the
settings measured to be the best for so many rows; `results/defaults` has the study, and docs/defaults.md explains it.
This file is the one place that knows them.

1. The head begins as the linear probe of the training rows, so that a run begins where logistic regression ends.
2. With few rows of each label a contrastive start follows, and the probe of what it gives; nothing else is trained,
   since few rows are soon known by heart.
3. Otherwise the rate is that of the method, and the number of epochs follows from a number of steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from inlay.config import RunConfig, TrainConfig
from inlay.data.tasks import Task
from inlay.errors import BadConfig
from inlay.model.backbone import Backbone
from inlay.model.heads import find_head
from inlay.model.methods import find_method
from inlay.training.linear import KINDS

BLEND = 0.6
"""share of what a contrastive start changed that is kept"""
CONTRAST_STEPS = 100
_MOST_FOR_CONTRAST = 64
"""rows of a label, in the mean, up to which a contrastive start pays"""
_FEW_DEV_ROWS = 200
STEPS = 150
"""of training, at least"""
_EPOCHS = (5, 40)
"""fewest and most"""


def find_recipe(task: Task, config: RunConfig, backbone: Backbone, *, has_sources: bool) -> dict[str, Any]:
    """The settings of training that a run of one task, or a part of one of several, resolves to."""
    train, method = config.train, find_method(config.method.name)
    is_open = train.lr is None and not method.is_joint
    head_start = _find_head_start(task, config, backbone, is_open=is_open and not has_sources)
    contrast = _find_contrast(task, config, is_open=is_open, has_probe=head_start == "probe")
    keep = "late" if is_open and len(task.dev) < _FEW_DEV_ROWS else "best"
    known: dict[str, Any] = {
        "head_start": head_start,
        "blend": _find_blend(train, contrast),
        "contrast": contrast,
        "keep": keep if train.keep == "auto" else train.keep,
    }
    if not is_open:
        lr = train.lr or method.find_lr(writes=backbone.writes, is_alone=config.joint.trained == "task")
        return {**known, "lr": lr, "epochs": train.num_epochs}
    epochs = train.epochs
    if epochs is None:  # a convex head, or one fitted after a contrastive start, needs no steps
        is_done = contrast or config.method.name == "head"
        epochs = 0 if is_done and head_start == "probe" else _count_epochs(task, config)
    return {**known, "lr": method.find_lr(writes=backbone.writes, is_alone=False), "epochs": epochs}


def _find_blend(train: TrainConfig, contrast: int) -> float | None:
    if train.blend is not None and not contrast:
        raise BadConfig(
            f"`train.blend` is `{train.blend:g}`, but there is no contrastive start to keep a part of",
            "leave it out, or use `--set train.contrast=100` with it",
        )
    return (train.blend or BLEND) if contrast else None


def _count_epochs(task: Task, config: RunConfig) -> int:
    """As many as steps need, of few rows more."""
    per_epoch = -(-len(task.train) // config.train.batch_size)
    return int(np.clip(-(-STEPS // per_epoch), *_EPOCHS))


def _find_head_start(task: Task, config: RunConfig, backbone: Backbone, *, is_open: bool) -> str:
    train = config.train
    reason = _why_no_probe(task, config, backbone)
    if train.head_start == "probe" and reason:
        raise BadConfig(f"`train.head_start` is `probe`, but {reason}", "leave it out, or use `fresh`")
    if train.head_start == "auto":
        return "probe" if is_open and not reason else "fresh"
    return train.head_start


def _why_no_probe(task: Task, config: RunConfig, backbone: Backbone) -> str:
    """Why the head of this task cannot begin as a linear model; nothing, if it can."""
    if backbone.writes:
        return f"`{backbone.name}` writes its answers: there is no head"
    if find_method(config.method.name).is_joint:
        return f"`{config.method.name}` trains several tasks as one run"
    if task.kind not in KINDS or find_head(task.kind).reads != "pooled":
        return f"the head of a `{task.kind}` task is no linear model of whole rows"
    if config.train.hidden != "none" or config.train.features != "last":
        return "its head reads more than one vector of the last layer"
    return ""


def _find_contrast(task: Task, config: RunConfig, *, is_open: bool, has_probe: bool) -> int:
    """Steps of a contrastive start: as asked, or where rows of a label are few."""
    asked = config.train.contrast
    if asked:
        if task.kind != "classify":
            raise BadConfig(
                f"`train.contrast` is `{asked}` for the `{task.kind}` task `{task.name}`", "it is for `classify` tasks"
            )
        if not has_probe:
            raise BadConfig(
                f"`train.contrast` is `{asked}`, but the head begins fresh",
                "use `--set train.head_start=probe` with it",
            )
    if asked is not None:
        return asked
    is_single = task.train.pairs is None
    if not (is_open and has_probe and is_single) or task.kind != "classify" or config.method.name == "head":
        return 0
    assert task.train.targets is not None
    counts = np.bincount(task.train.targets, minlength=len(task.labels))
    has_pairs = (counts > 1).sum() > 1
    return CONTRAST_STEPS if has_pairs and len(task.train) <= _MOST_FOR_CONTRAST * len(task.labels) else 0
