"""The end of a step and of an epoch: history records, the choice of the kept weights, early stop, divergence."""

from __future__ import annotations

import math
from typing import Any

from inlay.data import is_better
from inlay.training.cohort.member import CONTRAST, PROBE, AnyMember
from inlay.training.evaluate import DevScores
from inlay.training.run.run import DIVERGED, FINISHED, STOPPED_EARLY
from inlay.training.step.optimizer import learning_rate
from inlay.training.step.updates import StepStats

_EXPLODED = 50.0  # a run whose loss is this many times the first one (or 1, if that was less) counts as diverged


def close_epoch(member: AnyMember, verdict: DevScores, seconds: float) -> tuple[dict[str, Any], bool]:
    """Record an epoch or stage that was just scored, `seconds` after its cohort began; return whether it is kept."""
    progress, metric, train = member.progress, member.run.metric, member.run.config.train
    stage, num_steps = progress.stage, progress.cursor  # fewer than a whole epoch's if time was up
    record = {
        "epoch": progress.epoch + (stage != PROBE),
        "step": progress.step,
        "train_loss": progress.loss_sum / num_steps if num_steps else None,
        "lr": rate_of(member, ahead=-1) if num_steps else 0.0,
        "dev": verdict.scores,
        "dev_loss": verdict.loss,
        "head": verdict.fitted,
        "seconds": round(seconds - progress.began, 3),
        **verdict.findings,
        **({"stage": stage} if stage else {}),
        **({"suspects": progress.suspects} if stage == PROBE and progress.suspects else {}),
    }
    progress.epoch, progress.cursor, progress.loss_sum = progress.epoch + (stage != PROBE), 0, 0.0
    progress.stage, progress.is_fitted = _next_stage(member), False
    progress.history.append(record)
    value, dev_loss = verdict.scores[metric], verdict.loss
    if is_better(metric, value, progress.top_metric):
        progress.last_gain, progress.top_metric = progress.epoch, value
    is_kept = _is_kept(member, value, dev_loss)
    if is_kept:
        progress.best_epoch, progress.best_metric, progress.best_loss = progress.epoch, value, dev_loss
    if verdict.num_lost:
        reason = f"the outputs of {verdict.num_lost:,} dev rows are not finite"
        _end_diverged(member, f"diverged in epoch {progress.epoch}: {reason}")
    elif progress.step == member.num_steps and not progress.stage:
        progress.status = FINISHED
    elif not stage and train.patience and progress.epoch - progress.last_gain >= train.patience:
        progress.status = STOPPED_EARLY
        progress.message = f"no better dev {metric} for {train.patience} epochs"
    return record, is_kept


def _is_kept(member: AnyMember, value: float, dev_loss: float) -> bool:
    """Tell whether the epoch that was just scored is kept instead of the one that is."""
    progress = member.progress
    if progress.last_gain == progress.epoch:
        return True
    if member.leeway and progress.top_metric is not None:  # on few rows the score is chance: later is better
        return value >= progress.top_metric - member.leeway
    # On a small dev set epochs tie; the loss still tells a sure answer from a lucky one.
    return value == progress.best_metric and dev_loss < progress.best_loss


def _next_stage(member: AnyMember) -> str:
    """Return the stage that follows the epoch, or stage, that has ended."""
    return CONTRAST if member.progress.stage == PROBE and member.run.config.train.contrast else ""


def rate_of(member: AnyMember, ahead: int = 0) -> float:
    """Return the learning rate of the next step, or of the step `ahead` of it.

    The steps before training have a schedule of their own.
    """
    train, progress = member.run.config.train, member.progress
    if progress.stage == CONTRAST:
        return learning_rate(train, progress.cursor + ahead, member.steps_of_epoch)
    return learning_rate(train, progress.step + ahead, member.num_steps)


def loss_limit(member: AnyMember) -> float:
    """Return the loss above which a run counts as diverged."""
    first = member.progress.first_loss
    return math.inf if first is None else _EXPLODED * max(1.0, first)


def has_diverged(member: AnyMember, seen: StepStats, limit: float) -> bool:
    """Tell whether a step ended its run: its loss or gradient is not finite, or its loss is above the limit."""
    progress = member.progress
    if progress.first_loss is None and math.isfinite(seen.loss):
        progress.first_loss = seen.loss
    if seen.is_finite(limit):
        return False
    reason = f"loss {seen.loss:g}, gradient norm {seen.norm:g}"
    if math.isfinite(seen.loss) and math.isfinite(seen.norm):
        reason = f"loss {seen.loss:g} after a first loss of {progress.first_loss:g}"
    _end_diverged(member, f"diverged at step {progress.step + 1}: {reason}")
    return True


def _end_diverged(member: AnyMember, reason: str) -> None:
    """End a diverged run; its best epoch's weights are kept."""
    member.progress.status = DIVERGED
    member.progress.message = f"{reason}; try a smaller learning rate than {member.run.config.train.lr:g}"
