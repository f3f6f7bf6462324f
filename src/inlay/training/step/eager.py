"""The steps of a cohort: every active run's batch through one backbone forward, its gradients, its optimizer step.

`Stepper` is the definition, and what runs on a CPU; `compiled.py` has the one for GPUs. What always holds: a run's
losses, gradients and steps do not depend on who is trained beside it, and a run whose loss or gradient is not finite,
or whose loss is above its limit, is not moved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from inlay.model import Bank, Batch, Row, batch_rows, launch, send
from inlay.training.cohort.member import Member
from inlay.training.cohort.parallel import World
from inlay.training.events import Emit, ignore
from inlay.training.step.optimizer import SlotUpdate, StepStats

Rows = tuple[Sequence[Member], Mapping[int, np.ndarray]]
"""the members that have rows in a step, and their row numbers by slot"""
LookAhead = Callable[[], Rows | None]
"""returns the rows of the next step; None if something happens before it"""


class Stepper:
    """Forward and backward passes of a training bank, and its optimizer's steps."""

    def __init__(self, bank: Bank, slot_update: SlotUpdate, token_budget: int, world: World | None = None) -> None:
        self._bank, self._slot_update, self._world = bank, slot_update, world or World()
        self.token_budget = token_budget
        self.may_narrow = True
        """whether the last block may skip tokens that no head reads"""
        self.num_moved = 0
        """number of programs that moved runs: replaying a graph does not change a tensor's version"""
        self.emit: Emit = ignore

    def step(
        self,
        active: Sequence[Member],
        batches: Mapping[int, np.ndarray],
        rates: Mapping[int, float],
        limits: Mapping[int, float],
        look_ahead: LookAhead = lambda: None,
    ) -> dict[int, StepStats]:
        """Take one step of every active run at its rate; a run whose loss is above its limit is not moved.

        `look_ahead` returns the rows of the step after it, which a stepper may prepare early.
        """
        losses_S, grads_SP = self.differentiate(active, batches)
        return self._slot_update.apply(active, losses_S, grads_SP, rates, limits)

    def differentiate(self, active: Sequence[Member], batches: Mapping[int, np.ndarray]) -> tuple[Tensor, Tensor]:
        """Compute the losses [S] and gradients [S, P] of every active run's batch; `batches` has row numbers by slot.

        Where several processes train together each computes its own rows, and gets the sums over all of them.
        """
        self._slot_update.drop_grads()
        backbone = self._bank.backbone
        members = {member.slot: member for member in active}
        rates = {member.slot: member.run.config.train.head_dropout for member in active}
        contrasted = frozenset(member.slot for member in active if member.is_contrasting)
        losses_S = torch.zeros(self._bank.num_slots, device=backbone.device)
        # 1. Lay the batches of all runs end to end: the rows of this process, and which window each one is.
        rows: list[Row] = []
        windows: list[int] = []
        for member in active:
            whole = batches[member.slot]
            share = self._world.share(whole, member.slot)
            if member.slot in contrasted:  # its batches must be whole: they are the first process's
                share = whole if self._world.process.is_first else whole[:0]
            rows += member.rows(share)
            windows += map(int, share)
        # 2. Pass over them, forward and backward, as many at a time as the token budget holds.
        is_narrow = self._reads_first_tokens(active)
        for chunk in self._chunks(rows, is_whole=any(member.is_whole for member in active)):
            batch = backbone.collate([rows[position] for position in chunk])
            if is_narrow and (batch.prefix is None or batch.prefix.reach.layer < backbone.anatomy.num_layers):
                batch = batch.narrowed()
            with self._bank.routed(batch.route):
                logits = self._bank.logits(batch, dropout=rates, as_vectors=contrasted)
                own_windows = [windows[chunk[position]] for position in batch.order]
                losses_B, slots_B = self._row_losses(batch, logits, own_windows, members, batches)
                losses_S.index_add_(0, slots_B, losses_B.detach())
                losses_B.sum().backward()
        # 3. Add up what all processes have.
        grads_SP = self._slot_update.take_grads()
        self._world.add_up(losses_S, grads_SP)
        return losses_S, grads_SP

    def _row_losses(
        self,
        batch: Batch,
        logits: Sequence[Tensor],
        windows: Sequence[int],
        members: Mapping[int, Member],
        batches: Mapping[int, np.ndarray],
    ) -> tuple[Tensor, Tensor]:
        """Return what every row adds to its run's loss [B], and its slot [B]; `windows` has the batch's, in order.

        A row adds its loss times its weight in its batch and its task's share in the run.
        """
        targets, weights = [], []
        for (slot, start, stop), own in zip(batch.rows, logits, strict=True):
            found = members[slot].targets_and_weights(windows[start:stop], batches[slot], own.shape[1])
            share = self._slot_update.share(members[slot], batches)
            targets.append(found[0])
            weights.append((found[1] * share).astype(np.float32))
        slots = np.repeat([slot for slot, *_ in batch.rows], [len(own) for own in weights])
        # one copy to the device for all targets
        *sent, weights_B, slots_B = send([*targets, np.concatenate(weights), slots], logits[0].device)
        losses = [
            members[slot].row_losses(own, target)
            for (slot, *_), own, target in zip(batch.rows, logits, sent, strict=True)
        ]
        return torch.cat(losses) * weights_B, slots_B

    def _reads_first_tokens(self, active: Sequence[Member]) -> bool:
        """Tell whether the last block may skip all tokens but the first of each row without changing a result."""
        backbone, specs = self._bank.backbone, [member.run.spec for member in active]
        return (
            self.may_narrow
            and backbone.packs
            and not launch.is_available(backbone.device)
            and all(
                spec.head.reads_first and not spec.is_finetuned and spec.method.inner_norm != "batch" for spec in specs
            )
            and not any(member.run.config.train.attention_dropout for member in active)
        )

    def _chunks(self, rows: Sequence[Row], *, is_whole: bool) -> Iterator[list[int]]:
        """Yield the positions of the rows of each forward pass; a batch that `is_whole` is never split."""
        if not rows:  # a batch of fewer rows than processes
            return
        budget = self.token_budget
        if not is_whole:
            yield from batch_rows(rows, budget, packs=self._bank.backbone.packs)
            return
        chunk: list[int] = []
        longest = num_texts = 0
        for _, group in itertools.groupby(range(len(rows)), key=lambda position: rows[position].slot):
            own = list(group)
            widest = max(rows[position].width for position in own)
            own_texts = sum(len(rows[position].texts) for position in own)
            if chunk and max(longest, widest) * (num_texts + own_texts) > budget:
                yield chunk
                chunk, longest, num_texts = [], 0, 0
            chunk = chunk + own
            longest = max(longest, widest)
            num_texts += own_texts
        yield chunk
