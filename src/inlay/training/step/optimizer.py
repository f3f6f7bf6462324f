"""Adam for stacked parameters: every slot with its own learning rate, step count, clip norm and variant.

A step's gradients are clipped per run; a run with a non-finite loss or norm is skipped. `SlotUpdate` does so for runs
of one slot each, `JointUpdate` for runs whose slots share parameters. Each has the definition, `apply`, and the same of
tensors alone for programs: `columns` says what these read, `advance` is what they do.

One formula serves AdamW and the original BERT's Adam: `p ← p − lr·(m̂ / (√v̂ + ε) + λ·p)`, where BERT's leaves out the
bias correction (m̂ = m, v̂ = v) and has ε = 1e-6 (docs/methods.md). A slot that is not named in a step does not move:
zero gradients would still move it by momentum and decay.

Shape letters: S slots, P parameters of a slot, side by side, G runs, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from inlay.model import FlatBank, send
from inlay.settings import TrainConfig

if TYPE_CHECKING:
    from inlay.training.cohort.member import Member
    from inlay.training.cohort.parallel import World

_BETA1, _BETA2 = 0.9, 0.999
_PIECE = 2**16
"""numbers that a CPU updates at a time: intermediate results stay in its cache"""


@dataclass(frozen=True)
class Variant:
    """The differences between the named optimizers."""

    eps: float
    corrects_bias: bool


VARIANTS = {"adamw": Variant(1e-8, True), "bert-adam": Variant(1e-6, False)}


class SlotOptimizer:
    """Moments and step counts of every slot. It owns `first_SP` and `second_SP` and updates the bank in place."""

    def __init__(self, bank: FlatBank, settings: Sequence[TrainConfig]) -> None:
        self.bank, self._settings = bank, list(settings)
        self.num_steps = [0] * len(settings)
        self._limits_S = self._send_limits()
        self.values_SP = bank.values_SP
        self.first_SP = torch.zeros_like(bank.values_SP)
        self.second_SP = torch.zeros_like(bank.values_SP)

    @property
    def stored(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values and moments, which steps change in place."""
        return (self.values_SP, self.first_SP, self.second_SP)

    def reset(self, slot: int, settings: TrainConfig) -> None:
        """Reset a slot's moments and step count, for the run that enters it."""
        self._settings[slot], self.num_steps[slot] = settings, 0
        self._limits_S = self._send_limits()
        self.first_SP[slot] = 0
        self.second_SP[slot] = 0

    def clip(self, grads_SP: Tensor) -> Tensor:
        """Scale each slot's gradients, in place, to its own largest norm; returns the norms [S] before it."""
        pieces = grads_SP.split(_PIECE, 1) if grads_SP.device.type == "cpu" else (grads_SP,)
        norms_S = torch.stack([piece.square().sum(1) for piece in pieces]).sum(0).sqrt()
        limits_S = self._limits_S
        grads_SP.mul_(torch.where(norms_S > limits_S, limits_S / norms_S, 1.0).unsqueeze(1))
        return norms_S

    def clip_together(self, grads_GP: Tensor, own_SP: Tensor) -> Tensor:
        """Scale a run's gradients (shared and of each slot) together, in place; return the norms [G] before."""
        num_runs = len(grads_GP)
        norms_G = (grads_GP.square().sum(1) + own_SP.view(num_runs, -1).square().sum(1)).sqrt()
        limits_G = self._limits_S
        factors_G = torch.where(norms_G > limits_G, limits_G / norms_G, 1.0)
        grads_GP.mul_(factors_G.unsqueeze(1))
        own_SP.mul_(factors_G.repeat_interleave(len(own_SP) // num_runs).unsqueeze(1))
        return norms_G

    @torch.no_grad()
    def step(self, grads_SP: Tensor, rates: Mapping[int, float]) -> None:
        """Update the slots named in `rates`, each at its learning rate, and no other."""
        slots = sorted(rates)
        for slot in slots:
            self.num_steps[slot] += 1
        variants = [VARIANTS[self._settings[slot].optimizer] for slot in slots]
        columns = (
            [rates[slot] for slot in slots],
            [variant.eps for variant in variants],
            [self._correction(slot, _BETA1, variant) for slot, variant in zip(slots, variants, strict=True)],
            [self._correction(slot, _BETA2, variant) for slot, variant in zip(slots, variants, strict=True)],
            [self._settings[slot].weight_decay for slot in slots],
        )
        stored = self.stored
        if self.first_SP.device.type == "cpu":
            for slot, own in zip(slots, zip(*columns, strict=True), strict=True):
                rows = (*(tensor[slot] for tensor in stored), grads_SP[slot], self.bank.decays_P)
                for p, m, v, g, decays in zip(*(row.split(_PIECE) for row in rows), strict=True):
                    _apply_adam(p, m, v, g, decays, own)
            return
        sent = send([np.array(columns, dtype=np.float32), np.array(slots)], self.first_SP.device)
        index = None if len(slots) == len(self._settings) else sent[1]
        # Copies of the stepped slots, unless all are: the others are not even read.
        p, m, v = stored if index is None else (tensor[index] for tensor in stored)
        g = grads_SP if index is None else grads_SP[index]
        _apply_adam(p, m, v, g, self.bank.decays_P, sent[0].unsqueeze(-1).unbind())
        if index is not None:
            for tensor, changed in zip(stored, (p, m, v), strict=True):
                tensor[index] = changed

    def columns(self, rates: Mapping[int, float], limits: Mapping[int, float]) -> list[list[float]]:
        """Return the rows of COLUMNS for a step of the slots named in `rates`, and count the step."""
        found = [[0.0, 0.0, 1.0, 1.0, 1.0, 0.0, math.inf, math.inf] for _ in self._settings]
        for slot, rate in rates.items():
            self.num_steps[slot] += 1
            train = self._settings[slot]
            variant = VARIANTS[train.optimizer]
            corrections = (self._correction(slot, beta, variant) for beta in (_BETA1, _BETA2))
            clip = train.clip_norm or math.inf
            found[slot] = [1.0, rate, variant.eps, *corrections, train.weight_decay, clip, limits[slot]]
        return [list(column) for column in zip(*found, strict=True)]

    def _correction(self, slot: int, beta: float, variant: Variant) -> float:
        return 1 - beta ** self.num_steps[slot] if variant.corrects_bias else 1.0

    def _send_limits(self) -> Tensor:
        """Return the largest allowed gradient norm of each slot, on the device; call it when a slot changes hands."""
        limits = [run.clip_norm or math.inf for run in self._settings]
        return torch.tensor(limits, device=self.bank.values_SP.device)


def _apply_adam(p: Tensor, m: Tensor, v: Tensor, g: Tensor, decays: Tensor, columns: Sequence[Any]) -> None:
    """Apply the formula in place to values and moments; `columns` are numbers, or have one for each row."""
    lr, eps, correct1, correct2, decay = columns
    m.lerp_(g, 1 - _BETA1)
    v.mul_(_BETA2).addcmul_(g, g, value=1 - _BETA2)
    update = (m / correct1).div_((v / correct2).sqrt_().add_(eps))
    p.mul_(1 - lr * decay * decays).sub_(update.mul_(lr))


COLUMNS = ("moves", "rate", "eps", "correct1", "correct2", "decay", "clip", "limit")
"""the rows that `advance` reads of every slot"""


Stored = tuple[Tensor, Tensor, Tensor]
"""values and moments, which steps change in place"""


def advance(stored: Stored, grads_SP: Tensor, losses_S: Tensor, columns_CS: Tensor, decays_P: Tensor) -> Tensor:
    """Clip and step tensors as `SlotOptimizer` does, for a compiled or captured step.

    `stored` are values and moments, changed in place; `columns_CS` has the rows of COLUMNS. A slot whose loss or norm
    is not finite, or whose loss is above its limit, does not move. Returns the norms [S] before clipping.
    """
    moves, *_, clip, limit = columns_CS.unsqueeze(-1)
    norms_S1 = grads_SP.square().sum(1, keepdim=True).sqrt()
    is_sound_S1 = _is_sound(losses_S.unsqueeze(1), norms_S1, limit)
    _replace(stored, grads_SP * _shrink(norms_S1, clip), (moves > 0) & is_sound_S1, columns_CS, decays_P)
    return norms_S1.squeeze(1)


def advance_together(
    stored: tuple[Stored, Stored],
    grads: tuple[Tensor, Tensor],
    losses_S: Tensor,
    columns: tuple[Tensor, Tensor],
    decays: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Do what `advance` does for runs whose slots share parameters: slots come first, then what runs share.

    A run is clipped by the norm of all it has, moves whole or not at all, and what it shares counts nothing where that
    does not move. Returns each slot's run's loss and norm [S].
    """
    (grads_SP, grads_GQ), (columns_CS, columns_CG) = grads, columns
    moves_G1, *_, clip_G1, limit_G1 = columns_CG.unsqueeze(-1)
    num_runs, num_slots = len(grads_GQ), len(grads_SP)
    # Not multiplied by 0: an untrained value may be NaN.
    grads_GQ = torch.where(moves_G1 > 0, grads_GQ, 0.0)
    squares_G = grads_GQ.square().sum(1) + grads_SP.square().view(num_runs, -1).sum(1)
    norms_G1, losses_G1 = squares_G.sqrt().unsqueeze(1), losses_S.view(num_runs, -1).sum(1, keepdim=True)
    is_sound_G1, shrink_G1 = _is_sound(losses_G1, norms_G1, limit_G1), _shrink(norms_G1, clip_G1)

    def by_slot(value_G1: Tensor) -> Tensor:
        return value_G1.expand(-1, num_slots // num_runs).reshape(num_slots, 1)

    _replace(stored[1], grads_GQ * shrink_G1, (moves_G1 > 0) & is_sound_G1, columns_CG, decays[1])
    moves_S1 = (columns_CS[0].unsqueeze(-1) > 0) & by_slot(is_sound_G1)
    _replace(stored[0], grads_SP * by_slot(shrink_G1), moves_S1, columns_CS, decays[0])
    return by_slot(losses_G1).squeeze(1), by_slot(norms_G1).squeeze(1)


def _is_sound(losses: Tensor, norms: Tensor, limits: Tensor) -> Tensor:
    return norms.isfinite() & losses.isfinite() & (losses <= limits)


def _shrink(norms: Tensor, limits: Tensor) -> Tensor:
    return torch.where(norms > limits, limits / norms, 1.0)


def _replace(stored: Stored, g: Tensor, moves_S1: Tensor, columns_CS: Tensor, decays_P: Tensor) -> None:
    """Write the values and moments after a step of clipped gradients in place, where the slot moves."""
    _, rate, eps, correct1, correct2, decay, *_ = columns_CS.unsqueeze(-1)
    p, m, v = stored
    m_new = torch.lerp(m, g, 1 - _BETA1)
    v_new = v * _BETA2 + (1 - _BETA2) * g * g
    update = (m_new / correct1) / ((v_new / correct2).sqrt() + eps)
    p_new = p * (1 - rate * decay * decays_P) - update * rate
    for old, new in zip(stored, (p_new, m_new, v_new), strict=True):
        old.copy_(torch.where(moves_S1, new, old))


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
            self._own.num_steps[slot] -= 1


class JointUpdate(SlotUpdate):
    """The update of runs whose slots share parameters: the gradient of a run includes that of the shared ones.

    A slot's own parameters move only in steps with rows of it, shared ones whenever the run has rows. Loss and norm are
    the run's for all of its slots.
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
        weight = member.run.config.joint.weight_of(member.run.name)
        return weight * len(batches[member.slot]) / num_rows

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
            self._shared.num_steps[run] -= 1

    def _run_of(self, slot: int) -> int:
        return slot // self._slots_per_run

    def _frozen(self, active: Sequence[Member]) -> set[int]:
        """Return the runs that train only what each task has of its own."""
        return {self._run_of(member.slot) for member in active if member.run.config.joint.trained == "task"}


def learning_rate(train: TrainConfig, step: int, num_steps: int) -> float:
    """Return the rate of step `step` (from 0) of `num_steps`."""
    if not num_steps:
        return 0.0
    warmup_steps = int(train.warmup * num_steps)
    if train.schedule == "bert":
        # The original's: decay from the very start, overridden by the warm-up, so it drops to 0.9·lr at its end.
        share = step / warmup_steps if step < warmup_steps else 1 - step / num_steps
    elif step < warmup_steps:
        share = (step + 1) / warmup_steps
    elif train.schedule == "constant":
        share = 1.0
    else:
        share = (num_steps - step) / max(1, num_steps - warmup_steps)
    assert train.lr is not None, "make_run resolves it"
    return train.lr * share
