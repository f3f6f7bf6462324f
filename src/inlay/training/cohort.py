"""A cohort: runs trained together, one slot each, in one loop with one backbone forward per step.

Each run keeps its own data order, learning rate, schedule, size, early stop and step count, so that it ends as if it
had been trained alone. A run that ends or diverges leaves the loop; the others go on. Everything that decides the next
step is in the resume state: killed at any moment, the loop goes on from the last state and, on a CPU, ends with the
same weights to the last bit.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from inlay.data.encode import Encoded
from inlay.data.metrics import is_better
from inlay.data.once import encode_once
from inlay.data.windows import Reading
from inlay.errors import BadConfig
from inlay.model.backbone import Backbone
from inlay.model.bank import Bank
from inlay.model.inference import infer
from inlay.model.methods import first_layer
from inlay.training.compiled import CompiledStepper, can_compile
from inlay.training.evaluate import Verdict, score_dev
from inlay.training.member import Member
from inlay.training.optimizer import SlotOptimizer, learning_rate
from inlay.training.prefix import PrefixCache
from inlay.training.run import DIVERGED, FINISHED, STOPPED_EARLY, Run
from inlay.training.steps import Seen, Stepper

_EXPLODED = 50.0  # a loss this many times the first one (or 1, if that was less) will not come back


@dataclass(frozen=True)
class CohortSettings:
    """What is not a run's own: written before the first step, so that a resumed cohort steps as the first one did."""

    token_budget: int
    """tokens of one forward pass at most, with padding; a step that needs more accumulates gradients over several"""
    num_threads: int
    save_every: int
    """steps between resume states"""


class Watcher:
    """Hears how training goes. This one is deaf; the command line's draws progress."""

    def on_encode(self, num_done: int, num_rows: int) -> None:
        """So many rows of a set are tokenised; nothing is heard of a set that is known already."""

    def on_start(self, cohort: Cohort) -> None:
        """Training is about to begin, or to go on."""

    def on_prefix(self, num_done: int, num_texts: int) -> None:
        """The frozen layers of so many texts of those to come are computed, before the first step."""

    def on_prefix_full(self, num_left: int, num_texts: int) -> None:
        """Memory and file are full: the frozen layers of some texts are computed whenever they are needed."""

    def on_step(self, cohort: Cohort, num_rows: int) -> None:
        """One step was taken."""

    def on_epoch(self, member: Member, record: dict[str, Any]) -> None:
        """A run finished an epoch and was scored on its dev rows."""

    def on_end(self, member: Member) -> None:
        """A run left the cohort."""


class Cohort:
    """The bank, optimizer and members of runs trained together."""

    def __init__(
        self, runs: Sequence[Run], backbone: Backbone, settings: CohortSettings, watch: Watcher | None = None
    ) -> None:
        self.backbone, self.settings = backbone, settings
        self.bank = Bank(backbone, len(runs), trainable=True)
        for slot, run in enumerate(runs):
            self.bank.initialise(slot, run.spec, run.config.train.seed)
            if run.start.tensors:
                self.bank.put(slot, run.spec, {**self.bank.read(slot), **run.start.tensors})
        encoder = _Encoder(backbone, watch or Watcher())
        self.members = [
            Member(run, slot, encoder.encode(run, "train"), encoder.encode(run, "dev"), backbone.device)
            for slot, run in enumerate(runs)
        ]
        for member in self.members:
            _check_budget(member, settings.token_budget)
        self.flat = self.bank.flatten()
        self.optimizer = SlotOptimizer(self.flat, [run.config.train for run in runs])
        kind = CompiledStepper if can_compile(self.bank, self.members) else Stepper
        self.stepper = kind(self.bank, self.flat, self.optimizer, settings.token_budget)
        self.num_steps = 0
        self.seconds = 0.0

    @property
    def active(self) -> list[Member]:
        return [member for member in self.members if member.is_active]

    @property
    def first_layer(self) -> int:
        """The lowest layer anything is trained in."""
        return first_layer(self.backbone.anatomy, self.members[0].run.config.method)

    @contextmanager
    def training(self) -> Iterator[None]:
        """The backbone as it trains: dropout as the runs say, none below the lowest trained layer."""
        train = self.members[0].run.config.train
        with self.backbone.training(train.dropout, self.first_layer, attention_dropout=train.attention_dropout):
            yield

    def reuse(self, prefixes: PrefixCache) -> None:
        """Compute what lies below the lowest trained layer once per text, here and now."""
        for member in self.active:
            member.reuse(prefixes, self.first_layer)

    def step(self) -> int:
        """One step of every active run; returns the number of rows seen."""
        active = self.active
        batches = {member.slot: member.next_batch() for member in active}
        rates = {m.slot: learning_rate(m.run.config.train, m.progress.step, m.num_steps) for m in active}
        limits = {member.slot: _loss_limit(member) for member in active}
        seen = self.stepper.step(active, batches, rates, limits)
        for member in active:
            progress, found = member.progress, seen[member.slot]
            if _has_diverged(member, found, limits[member.slot]):
                continue
            progress.step, progress.cursor = progress.step + 1, progress.cursor + 1
            progress.loss_sum += found.loss
            progress.losses.append(round(found.loss, 5))
        self.num_steps += 1
        return sum(len(batch) for batch in batches.values())

    def finish_epochs(self) -> list[tuple[Member, dict[str, Any]]]:
        """Score the runs that just ended an epoch, in one pass; keep the best weights; end the runs that are done."""
        ended = [member for member in self.active if member.progress.cursor == member.steps_per_epoch]
        if not ended:
            return []
        logits = iter(infer(self.bank, [row for member in ended for row in member.dev_rows()]))
        records = []
        for member in ended:
            verdict = score_dev(member.run, member.dev, [next(logits) for _ in member.dev.ids])
            records.append((member, self._close_epoch(member, verdict)))
        return records

    def _close_epoch(self, member: Member, verdict: Verdict) -> dict[str, Any]:
        progress, task, train = member.progress, member.run.task, member.run.config.train
        progress.epoch, progress.cursor = progress.epoch + 1, 0
        loss, progress.loss_sum = progress.loss_sum / member.steps_per_epoch, 0.0
        record = {
            "epoch": progress.epoch,
            "step": progress.step,
            "train_loss": loss,
            "lr": learning_rate(train, progress.step - 1, member.num_steps),
            "dev": verdict.scores,
            "dev_loss": verdict.loss,
            "head": verdict.fitted,
            "seconds": round(self.seconds, 3),
        }
        progress.history.append(record)
        value, dev_loss = verdict.scores[task.metric], verdict.loss
        # On a small dev set epochs tie; the loss still tells a sure answer from a lucky one.
        wins_tie = value == progress.best_metric and dev_loss < progress.best_loss
        if is_better(task.metric, value, progress.best_metric):
            progress.last_gain = progress.epoch
        if progress.last_gain == progress.epoch or wins_tie:
            progress.best_epoch, progress.best_metric, progress.best_loss = progress.epoch, value, dev_loss
            member.best_tensors = self.bank.read(member.slot)
        if progress.epoch == train.epochs:
            progress.status = FINISHED
        elif train.patience and progress.epoch - progress.last_gain >= train.patience:
            progress.status = STOPPED_EARLY
            progress.message = f"no better dev {task.metric} for {train.patience} epochs"
        return record


def _check_budget(member: Member, token_budget: int) -> None:
    config = member.run.config
    most = config.train.batch_size * int(member.train.lengths.max())
    if config.method.inner_norm == "batch" and most > token_budget:
        raise BadConfig(
            f"batch norm sees a run's batch whole, up to {most:,} tokens, but the token budget is {token_budget:,}",
            "use a larger `--token-budget`, a smaller `--batch-size`, or `--set method.inner_norm=layer`",
        )


def _loss_limit(member: Member) -> float:
    """A loss above this will not come back."""
    first = member.progress.first_loss
    return math.inf if first is None else _EXPLODED * max(1.0, first)


def _has_diverged(member: Member, seen: Seen, limit: float) -> bool:
    progress = member.progress
    if progress.first_loss is None and math.isfinite(seen.loss):
        progress.first_loss = seen.loss
    if seen.is_sound(limit):
        return False
    reason = f"loss {seen.loss:g}, gradient norm {seen.norm:g}"
    if math.isfinite(seen.loss) and math.isfinite(seen.norm):
        reason = f"loss {seen.loss:g} after a first loss of {progress.first_loss:g}"
    progress.status = DIVERGED
    progress.message = f"diverged at step {progress.step + 1}: {reason}; try a smaller learning rate than "
    progress.message += f"{member.run.config.train.lr:g}"
    return True


class _Encoder:
    """Tokenises each (task, split, length) once, however many runs share it."""

    def __init__(self, backbone: Backbone, watch: Watcher) -> None:
        self._backbone, self._watch = backbone, watch
        self._known: dict[tuple[str, str, Reading], Encoded] = {}

    def encode(self, run: Run, split: str) -> Encoded:
        key = (run.task.digest, split, run.reading)
        if key not in self._known:
            rows = run.task.train if split == "train" else run.task.dev
            progress = partial(self._watch.on_encode, num_rows=len(rows))
            self._known[key] = encode_once(self._backbone.tokenizer, rows, run.reading, progress)
        return self._known[key]


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: the GPU's, or this process's resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
