"""Steps of text-to-text backbones, as programs of fixed shapes.

As `compiled.py`, but that nothing is compiled: what a step launches is captured as a CUDA graph. What is read is packed
into a rung, where the decoder attends to it (`attention.crossing`); answers are padded to the longest that occurred.

Shape letters: R rows, T tokens of an answer, S slots.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import cast

import numpy as np
from torch import Tensor

from inlay.model import Bank, BucketBuffers, CachedStates, DecoderTargets, HeadSpec, forced_logits
from inlay.training.cohort.member import Member
from inlay.training.step import compiled
from inlay.training.step.compiled import MOST_EMBEDDED, CompiledStepper, Prepared, Program
from inlay.training.step.losses import Mix, answer_losses
from inlay.training.step.optimizer import SlotUpdate

_WIDTHS = 2  # answers are padded to a multiple of it
_ROWS = 16  # the number of rows is rounded up to a multiple of it


class WrittenProgram(Program):
    """One step on one rung, with its target answers."""

    def __init__(self, rung: BucketBuffers, prefix: CachedStates | None, width: int, num_columns: int) -> None:
        super().__init__(rung, prefix, Mix(), 0, num_columns)
        self.answers = DecoderTargets(rung.capacity, width, rung.batch.input_ids_BT.device)
        route = replace(self.batch.route, decoder=self.answers.route)
        self.batch = replace(self.batch, route=route, written_BT=self.answers.written_RT)

    def fill(self, ready: Prepared, by_slot: np.ndarray) -> None:
        super().fill(ready, by_slot)
        assert ready.answers is not None
        self.answers.fill(ready.answers)


class Seq2SeqStepper(CompiledStepper):
    """Steps as captured programs, one for each rung that occurs."""

    doing = "preparing"

    def __init__(self, bank: Bank, slot_update: SlotUpdate, token_budget: int) -> None:
        super().__init__(bank, slot_update, token_budget)
        self._may_launch = True
        self._widest = 0

    def expect(self, heads: Sequence[HeadSpec]) -> None:
        """Do nothing: all heads are alike, the backbone's own."""

    def _prepare(self, active: Sequence[Member], batches: Mapping[int, np.ndarray], ahead: int = 0) -> Prepared:
        answers = [answer for member in active for answer in member.answers_of(batches[member.slot])]
        self._widest = max(self._widest, -(-max(map(len, answers)) // _WIDTHS) * _WIDTHS)
        ready = super()._prepare(active, batches, ahead)
        slots = np.repeat([member.slot for member in active], [len(batches[member.slot]) for member in active])
        return replace(ready, answers=cast(WrittenProgram, ready.program).answers.lay(answers, slots))

    def _numbers(self, active: Sequence[Member], batches: Mapping[int, np.ndarray], program: Program) -> np.ndarray:
        targets, weights = np.zeros((2, program.rung.capacity.all_rows), np.float32)
        found = [
            member.weights_of(batches[member.slot]) * self._slot_update.share(member, batches) for member in active
        ]
        weights[: sum(map(len, found))] = np.concatenate(found)
        return np.concatenate([targets, weights])

    def _of_head(self, member: Member) -> tuple[float, ...]:
        return 0, 0, 0, 0.0, False, 0.0, member.run.config.train.label_smoothing or 0.0

    def _find_rows(self, num_rows: int) -> int:
        """Round this step's rows up to 16 only: each extra padding row costs a full decoder pass."""
        return -(-num_rows // _ROWS) * _ROWS

    def _grow(self) -> Hashable:
        return self._longest, self._widest

    def _shrink(self) -> None:
        if self.token_budget < self._largest_budget:
            self._widest = 0
        super()._shrink()

    def _make_program(self, rung: BucketBuffers, prefix: CachedStates | None) -> Program:
        return WrittenProgram(rung, prefix, self._widest, self._slot_update.num_columns)

    def _compiled(self) -> AbstractContextManager[None]:
        return self._bank.backbone.compiled(compiled.BACKEND, with_blocks=False)

    def _may_capture(self, program: Program) -> bool:
        if self._most_captured > MOST_EMBEDDED:
            return super()._may_capture(program)
        written_RT = cast(WrittenProgram, program).answers.written_RT  # read as embeddings; so are pairs of places
        most = max(written_RT.numel(), written_RT.shape[1] ** 2)
        return most <= MOST_EMBEDDED and super()._may_capture(program)

    def _losses(self, program: Program) -> Tensor:
        answers = cast(WrittenProgram, program).answers
        weights = self._bank.backbone.in_own_type(self._bank.weights_of(0))
        logits_RTV = forced_logits(self._bank, program.batch, weights)
        smoothing_R = program.smoothing_S[program.rung.parts["row_slots"][: len(logits_RTV)]]
        return self._add_up(program, answer_losses(logits_RTV, answers.written_RT, smoothing_R))
