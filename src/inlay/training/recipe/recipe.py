"""The recipe: what a run does where its user left the learning rate open, by method, kind of task and rows.

With a given rate the defaults are what they always were: ten epochs, a fresh head. Without one, a run gets the settings
that were measured to be the best for so many rows (docs/defaults.md). The numbers stand only here; the usual rate of
each method is in its row of `METHODS` (model/bank/methods.py).

1. The head begins as the linear probe of the training rows, so that a run begins where logistic regression ends.
2. Classes of single texts, of up to `MOST_FOR_CONTRAST` rows: a contrastive start follows, and the probe of what a part
   of it gives. Up to `MOST_FOR_CONTRAST_ALONE` rows nothing else is trained, since few rows are soon memorised. Where
   rows are enough for folds, the steps are first taken without each of them, and judged on the rows left out: if they
   do worse than the probe, the probe stays.
3. Otherwise training goes on from there, as many epochs as `STEPS` need. With a contrastive start the rate is `FACTOR`
   times the method's own.
4. Heads that cannot begin as a probe (tags) have a higher rate while rows are few: they begin far from a good one.
5. A run that began as a probe keeps the epoch of the least loss on dev rows: scores of few rows are mostly chance, and
   the loss tells sooner than they do when rows are memorised. Others keep the best score, or on few dev rows a
   later epoch within chance of it. Where there are rows enough to tell, thresholds of labels are tuned on dev.
6. It stops where `PATIENCE` epochs, fewer after a contrastive start, have brought no smaller loss on dev rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from inlay.data import KINDS, Task
from inlay.errors import BadConfig
from inlay.model import Backbone, find_head, find_method
from inlay.settings import RunConfig

MOST_FOR_CONTRAST_ALONE, MOST_FOR_CONTRAST = 500, 2000
"""most training rows for which a contrastive start is all that is trained, and for which there is one at all"""
CONTRAST_STEPS = ((100, 32), (MOST_FOR_CONTRAST_ALONE, 100), (MOST_FOR_CONTRAST, 150))
"""(most training rows, steps of the contrastive start)"""
MOST_FOR_FOLDS, FEWEST_FOR_FOLDS, FOLDS = 500, 101, 3
"""training rows for which a contrastive start is judged on rows left out, and by how many folds: below, the steps cost
too much beside all others, above, dev rows can tell"""
MOST_STRENGTH = 0.01
"""strongest linear model after a contrastive start that is judged so: the slot knows the rows that would choose it"""
BLEND = 0.6
"""share of the contrastive start's change that is kept; less if the probe's held-out score is below this too"""
FACTOR = 2.0
"""factor on the method's learning rate, with a contrastive start"""
FRESH_FACTOR, MOST_FOR_FRESH = 4.0, 3000
"""the same for a fresh head"""
STEPS, STEPS_AFTER_CONTRAST = 300, 150
"""fewest steps of training; the number of epochs stays within EPOCHS:"""
EPOCHS = (4, 10)
FEWEST_FOR_CONTRAST = 50
"""fewest dev rows to judge a contrastive start by; with fewer it is kept, unless it is worse by more than chance"""
FEWEST_DEV_ROWS = 20
"""fewest dev rows to end a run by, and to choose by their loss among the epochs after a contrastive start"""
PATIENCE, PATIENCE_AFTER_CONTRAST = 3, 2
"""epochs without a smaller dev loss after which a run ends, if its dev rows are not too few to tell"""
FEW_DEV_ROWS = 200
"""fewest dev rows to choose by score alone; with fewer, a later epoch within chance of the best is kept"""


def find_recipe(task: Task, config: RunConfig, backbone: Backbone, *, has_sources: bool) -> dict[str, Any]:
    """Return the resolved training settings of a run of one task, or of one task of a multi-task run."""
    train, method, kind = config.train, find_method(config.method.name), KINDS[task.kind]
    is_open = train.lr is None and not method.is_joint
    # 1. The head's first weights, and the contrastive start.
    head_start = _find_head_start(task, config, backbone, is_open=is_open and not has_sources)
    has_probe = head_start == "probe"
    contrast = _find_contrast(task, config, is_open=is_open, has_probe=has_probe)
    folds = _find_folds(task, config, contrast)
    if train.blend is not None and not contrast:
        raise BadConfig(
            f"`train.blend` is `{train.blend:g}`, but there is no contrastive start to keep a part of",
            "leave it out, or use `--set train.contrast=100` with it",
        )
    # 2. Which epoch is kept, and whether thresholds are tuned.
    keep, thresholds = train.keep, train.thresholds
    if keep == "auto":
        keep = "best"
        if is_open and has_probe:  # a handful of dev rows says nothing; what helped on other tasks says more
            # After a contrastive start on more rows many epochs are judged, and the last one can be far worse.
            trains_on = len(task.train) > MOST_FOR_CONTRAST_ALONE
            fewest = FEWEST_DEV_ROWS if trains_on else FEWEST_FOR_CONTRAST
            keep = "late" if contrast and len(task.dev) < fewest else "loss"
        elif is_open and len(task.dev) < FEW_DEV_ROWS:
            keep = "late"
    if thresholds == "auto":
        thresholds = "dev" if is_open and kind.has_cuts(len(task.labels)) and not backbone.is_seq2seq else "none"
    # 3. Rate, epochs and patience; with a given rate they are as asked for.
    rate = train.lr or method.find_lr(is_seq2seq=backbone.is_seq2seq, is_alone=config.joint.trained == "task")
    epochs, patience = train.num_epochs, train.patience or 0
    if is_open:
        if not has_sources and not backbone.is_seq2seq and not method.is_finetuned:
            if contrast:
                rate *= FACTOR
            elif not has_probe and kind.raises_fresh_rate and len(task.train) <= MOST_FOR_FRESH:
                rate *= FRESH_FACTOR  # the method's own rate suits thousands of rows
        if train.epochs is None:
            epochs = _find_epochs(task, config, contrast, has_probe=has_probe)
        is_watched = has_probe and keep == "loss" and train.epochs is None and len(task.dev) >= FEWEST_DEV_ROWS
        if train.patience is None and is_watched:
            patience = PATIENCE_AFTER_CONTRAST if contrast else PATIENCE
    return {
        "head_start": head_start,
        "contrast": contrast,
        "contrast_folds": folds,
        "blend": train.blend,
        "keep": keep,
        "thresholds": thresholds,
        "lr": rate,
        "epochs": epochs,
        "patience": patience,
    }


def _find_epochs(task: Task, config: RunConfig, contrast: int, *, has_probe: bool) -> int:
    """Return the number of epochs of a run whose user gave neither a rate nor a number of epochs."""
    train = config.train
    # A convex head, or one fitted after a contrastive start on few rows, needs no training steps.
    is_done = config.method.name == "head" or (contrast and len(task.train) <= MOST_FOR_CONTRAST_ALONE)
    if has_probe and is_done and train.class_weights == "none":  # class weights apply in training alone
        return 0
    epochs = count_epochs(STEPS_AFTER_CONTRAST if contrast else STEPS, len(task.train), train.batch_size)
    return epochs if has_probe else max(epochs, train.num_epochs)  # a fresh head needs a higher rate


def count_epochs(num_steps: int, num_rows: int, batch_size: int) -> int:
    """Return the number of epochs with at least so many steps, within limits."""
    return int(np.clip(-(-num_steps // -(-num_rows // batch_size)), *EPOCHS))


def _find_head_start(task: Task, config: RunConfig, backbone: Backbone, *, is_open: bool) -> str:
    """Return whether the head begins as a linear probe or fresh; refuse a probe where it cannot be one."""
    reason = ""
    if backbone.is_seq2seq:
        reason = f"`{backbone.name}` writes its answers: there is no head"
    elif find_method(config.method.name).is_joint:
        reason = f"`{config.method.name}` trains several tasks as one run"
    elif KINDS[task.kind].linear is None or find_head(task.kind).reads != "pooled":
        reason = f"the head of a `{task.kind}` task is not a linear model of whole rows"
    elif config.train.hidden != "none" or config.train.features != "last":
        reason = "its head reads more than one vector of the last layer"
    asked = config.train.head_start
    if asked == "probe" and reason:
        raise BadConfig(f"`train.head_start` is `probe`, but {reason}", "leave it out, or use `fresh`")
    if asked == "auto":
        return "probe" if is_open and not reason else "fresh"
    return asked


def _find_contrast(task: Task, config: RunConfig, *, is_open: bool, has_probe: bool) -> int:
    """Return the steps of a contrastive start: as asked for, else by the number of rows."""
    asked = config.train.contrast
    if asked:
        if not KINDS[task.kind].is_classifier:
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
    is_single_class = KINDS[task.kind].is_classifier and task.train.pairs is None
    has_slot = config.method.name != "head" and not find_method(config.method.name).is_finetuned
    if not (is_open and has_probe and is_single_class and has_slot):
        return 0
    assert task.train.targets is not None
    counts = np.bincount(task.train.targets, minlength=len(task.labels))
    if (counts > 1).sum() < 2:  # fewer than two classes have rows to pull together
        return 0
    return next((steps for most, steps in CONTRAST_STEPS if len(task.train) <= most), 0)


def _find_folds(task: Task, config: RunConfig, contrast: int) -> int:
    """Return the folds that judge a contrastive start: as asked for, else by the number of rows."""
    asked = config.train.contrast_folds
    if asked:
        if not contrast:
            raise BadConfig(
                f"`train.contrast_folds` is `{asked}`, but there is no contrastive start to judge",
                "leave it out, or use `--set train.contrast=100` with it",
            )
        if 2 * asked > len(task.train):
            raise BadConfig(
                f"`train.contrast_folds` is `{asked}`, but `{task.name}` has {len(task.train)} training rows",
                "use fewer: two rows a fold at least",
            )
    if asked is not None:
        return asked
    # Steps that were asked for are taken as they are.
    is_open = contrast and config.train.contrast is None
    return FOLDS if is_open and FEWEST_FOR_FOLDS <= len(task.train) <= MOST_FOR_FOLDS else 0


def choose_blend(score: float) -> float:
    """Choose the share that is kept of a contrastive start, by the probe's score on held-out rows.

    Where labels hardly follow from the texts, training only memorises them, and less of it is kept.
    """
    return BLEND * float(np.clip(np.nan_to_num(score) / BLEND, 0.0, 1.0))
