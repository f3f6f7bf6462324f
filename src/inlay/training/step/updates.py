"""Applies a step's gradients: clip per run, Adam per slot; a run with a non-finite loss or norm is skipped.

`SlotUpdate` is for runs of one slot each, `JointUpdate` for runs whose slots share parameters. Each has the definition,
`apply`, and the same of tensors alone for programs: `columns` says what these read, `advance` is what they do.

Shape letters: S slots, P parameters of a slot, G runs, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inlay.training.cohort.member import Member
from inlay.training.cohort.parallel import World
from inlay.training.step.optimizer import COLUMNS, SlotOptimizer, advance, advance_together


@dataclass(frozen=True)
class StepStats:
    """The loss and the gradient norm of one run in a step."""

    loss: float
    norm: float
    """norm of the gradient before clipping"""

    def is_finite(self, limit: float) -> bool:
        """Tell whether the run was moved by the step."""
        return math.isfinite(self.loss) and math.isfinite(self.norm) and self.loss <= limit


class SlotUpdate:
    """The update of runs of one slot each."""

    num_columns = len(COLUMNS)
    """number of columns that `advance` reads per slot"""
    formula: Callable[..., Any] = staticmethod(advance)
    """the function on tensors alone that `advance` calls; to be compiled"""

    def __init__(self, optimizer: SlotOptimizer) -> None:
        self._own = optimizer

    def drop_grads(self) -> None:
        """Forget the gradients."""
        self._own.bank.drop_grads()

    def take_grads(self) -> Tensor:
        """Return the gradients of each slot's own parameters [S, P], and drop them."""
        return self._own.bank.take_grads()

    def share(self, member: Member, batches: Mapping[int, np.ndarray]) -> float:
        """Return the weight of a task's loss in its run: 1 for a run of one task."""
        return 1.0

    def apply(
        self,
        active: Sequence[Member],
        losses_S: Tensor,
        grads_SP: Tensor,
        rates: Mapping[int, float],
        limits: Mapping[int, float],
    ) -> dict[int, StepStats]:
        """Clip and step every active run at its rate; skip a run whose loss is above its limit or not finite."""
        norms_S = self._own.clip(grads_SP)
        losses, norms = torch.stack([losses_S, norms_S]).tolist()
        seen = {member.slot: StepStats(losses[member.slot], norms[member.slot]) for member in active}
        sound = {slot: rates[slot] for slot, found in seen.items() if found.is_finite(limits[slot])}
        if sound:
            self._own.step(grads_SP, sound)
        return seen

    def columns(self, active: Sequence[Member], rates: Mapping[int, float], limits: Mapping[int, float]) -> np.ndarray:
        """Return what `advance` reads of every slot [C, S], and count the steps."""
        own = {member.slot: rates[member.slot] for member in active}
        return np.array(self._own.columns(own, limits), np.float32)

    def advance(self, formula: Callable[..., Any], losses_S: Tensor, columns_CS: Tensor) -> tuple[Tensor, Tensor]:
        """Do what `apply` does on tensors alone, by the compiled `formula`; return each slot's loss and norm."""
        return losses_S, formula(self._own.stored, self.take_grads(), losses_S, columns_CS, self._own.bank.decays_P)

    def undo_count(self, slots: Set[int]) -> None:
        """Uncount steps that moved nothing."""
        for slot in slots:
            self._own.undo_count(slot)


class JointUpdate(SlotUpdate):
    """Runs whose slots share parameters: a run's gradient is that of its slots and of what they share.

    What a slot has of its own moves only when it has rows; what is shared, whenever the run has. Every slot of a run
    sees the run's loss and norm.
    """

    num_columns = 2 * len(COLUMNS)
    """columns of every slot, then those of every run, which stand at its first slot"""
    formula = staticmethod(advance_together)

    def __init__(self, optimizer: SlotOptimizer, shared: SlotOptimizer, world: World) -> None:
        super().__init__(optimizer)
        self._shared, self._world = shared, world
        self._slots_per_run = len(optimizer.values_SP) // len(shared.values_SP)
        self._held: set[int] = set()
        """runs whose shared parameters stay frozen"""

    def drop_grads(self) -> None:
        super().drop_grads()
        self._shared.bank.drop_grads()

    def share(self, member: Member, batches: Mapping[int, np.ndarray]) -> float:
        """Return the task's weight times its share of the run's rows: the mean over all rows of the batch."""
        run = self._run_of(member.slot)
        num_rows = sum(len(rows) for slot, rows in batches.items() if self._run_of(slot) == run)
        return member.weight * len(batches[member.slot]) / num_rows

    def apply(
        self,
        active: Sequence[Member],
        losses_S: Tensor,
        grads_SP: Tensor,
        rates: Mapping[int, float],
        limits: Mapping[int, float],
    ) -> dict[int, StepStats]:
        shared_GP = self._shared.bank.take_grads()
        self._world.add_up(torch.zeros_like(losses_S), shared_GP)
        frozen = self._frozen(active)
        for run in frozen:  # without a list index, which would be copied to the device and waited for
            shared_GP[run].zero_()
        norms_G = self._shared.clip_together(shared_GP, grads_SP)
        losses_G = losses_S.view(len(norms_G), -1).sum(1)
        losses, norms = torch.stack([losses_G, norms_G]).tolist()
        seen = {
            member.slot: StepStats(*(each[self._run_of(member.slot)] for each in (losses, norms))) for member in active
        }
        sound = {slot: rates[slot] for slot, found in seen.items() if found.is_finite(limits[slot])}
        if sound:
            self._own.step(grads_SP, sound)
            by_run = {self._run_of(slot): rate for slot, rate in sound.items()}
            if moving := {run: rate for run, rate in by_run.items() if run not in frozen}:
                self._shared.step(shared_GP, moving)
        return seen

    def columns(self, active: Sequence[Member], rates: Mapping[int, float], limits: Mapping[int, float]) -> np.ndarray:
        members = {self._run_of(member.slot): member for member in active}
        frozen = self._frozen(active)
        self._held = self._held - members.keys() | frozen
        moving = {run: rates[member.slot] for run, member in members.items() if run not in frozen}
        by_run = np.array(self._shared.columns(moving, {run: limits[members[run].slot] for run in members}), np.float32)
        for run in frozen:  # the shared part is frozen, but it counts in the clip norm and may be NaN
            clip = members[run].run.config.train.clip_norm or math.inf
            by_run[-2:, run] = clip, limits[members[run].slot]
        of_runs = np.zeros((len(COLUMNS), by_run.shape[1] * self._slots_per_run), np.float32)
        of_runs[:, :: self._slots_per_run] = by_run
        return np.concatenate([super().columns(active, rates, limits), of_runs])

    def advance(self, formula: Callable[..., Any], losses_S: Tensor, columns_CS: Tensor) -> tuple[Tensor, Tensor]:
        own, shared = self._own, self._shared
        columns_CG = columns_CS[len(COLUMNS) :, :: self._slots_per_run]
        found: tuple[Tensor, Tensor] = formula(
            (own.stored, shared.stored),
            (own.bank.take_grads(), shared.bank.take_grads()),
            losses_S,
            (columns_CS[: len(COLUMNS)], columns_CG),
            (own.bank.decays_P, shared.bank.decays_P),
        )
        return found

    def undo_count(self, slots: Set[int]) -> None:
        super().undo_count(slots)
        for run in set(map(self._run_of, slots)) - self._held:
            self._shared.undo_count(run)

    def _run_of(self, slot: int) -> int:
        return slot // self._slots_per_run

    def _frozen(self, active: Sequence[Member]) -> set[int]:
        """Return the runs that train only what each task has of its own."""
        return {self._run_of(member.slot) for member in active if member.run.config.joint.trained == "task"}
