"""Inference as captured programs: a batch of any mix of tasks is one copy to the GPU, one launch, one copy back.

For serving, where batches are small and launches cost more than work. A program belongs to a rung of the ladder
(model/batch/buckets.py) and serves every mix; slots that change hands change nothing it was compiled for. Compiling
takes seconds, so this is for banks that will answer many batches; `inference.infer` needs none of it.
`serving/passes.py` says which rows go this way, and from when on.

Shape letters: S slots, N packed tokens, B rows, D width, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inlay.model.backbone.backbone import Backbone
from inlay.model.bank.bank import Bank
from inlay.model.batch.buckets import BucketBuffers, Capacity, PackedRows, bound_length, round_up_tokens
from inlay.model.batch.route import Row
from inlay.model.heads.readout import apply_heads
from inlay.model.kernels import fold_residual as rewrite
from inlay.model.kernels import launch
from inlay.model.kernels.launch import GraphRecorder
from inlay.model.kernels.select import pick
from inlay.model.parts import head as head_part

BACKEND: Callable[..., Any] = rewrite.inductor
"""The compiler backend; a test counts with one of its own."""
MOST_TOKENS = 65536
"""Largest pass to capture, in tokens. Above it launch overhead is small, and the memory that a graph holds is not."""


def find_obstacle(backbone: Backbone) -> tuple[str, str] | None:
    """Return why nothing can be captured on a backbone, and what to do about it; None if something can."""
    leave_out = "leave out `is_compiled`"
    if backbone.device.type != "cuda" and not launch.is_available(backbone.device):
        return f"it is on the device `{backbone.device}`, not on a GPU", f'load it with `device="cuda"`, or {leave_out}'
    if not launch.is_available(backbone.device):
        return "the package `triton` is not installed", f"`pip install triton`, or {leave_out}"
    if backbone.precision == "int8":
        return "its weights are int8", f'give `precision="auto"`, or {leave_out}'
    if backbone.is_seq2seq or not backbone.packs:
        return f"backbones of the family `{backbone.anatomy.family}` have no captured passes", leave_out
    return None


class GraphedForward:
    """Logits of rows for any mix of a bank's slots, through programs compiled once for each rung."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._programs: dict[tuple[Any, ...], _Program] = {}
        self._recorder = GraphRecorder()
        self._num_changes = -1
        self._forms = _Forms()
        self._views: Any = None
        self._shapes: list[tuple[int, bool]] = []
        self.on_compile: Callable[[str], None] = lambda what: None

    def takes(self, row: Row) -> bool:
        """Tell whether a row can go this way: its head reads one vector of the last layer, through shared weights."""
        spec = self._bank.specs[row.slot]
        if spec is None or spec.is_finetuned or row.prefix is not None or len(row.ids) > MOST_TOKENS:
            return False
        head = spec.head
        return head.reads_rows and not head.is_written and not head.has_towers and head.features == "last"

    def logits(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return the logits of every row, float32 on the CPU, in order. All must be taken, and together fit a pass."""
        order = sorted(range(len(rows)), key=lambda index: rows[index].slot)
        ordered = [rows[index] for index in order]
        types = [np.zeros(len(r.ids), np.int64) if r.segments is None else np.asarray(r.segments) for r in ordered]
        laid = PackedRows(
            np.concatenate([np.asarray(row.ids) for row in ordered]),
            np.concatenate(types),
            np.array([len(row.ids) for row in ordered]),
            np.array([row.slot for row in ordered]),
        )
        with self._bank.backbone.turn():
            program = self._program(laid)
            program.rung.fill(program.rung.lay(laid))
            self._run(program)
            logits_BL = program.logits_BL[: len(rows)].cpu()
        answers: list[Tensor] = [logits_BL] * len(rows)
        for position, index in enumerate(order):
            answers[index] = logits_BL[position, : self._bank.head_of(rows[index].slot).num_outputs]
        return answers

    def _program(self, laid: PackedRows) -> _Program:
        bank, backbone = self._bank, self._bank.backbone
        longest = bound_length(laid.lengths)
        capacity = Capacity(round_up_tokens(len(laid.ids)), round_up_tokens(len(laid.lengths)), bank.num_slots, longest)
        if self._num_changes != bank.num_changes:
            self._num_changes, self._forms = bank.num_changes, _Forms.of(bank)
        if self._views is not bank.views:  # stacks were replaced, and captured programs read the old ones
            self._views, self._programs = bank.views, {}
            bank.mark_dynamic(torch._dynamo.maybe_mark_dynamic)  # a larger task must not compile anything again
        key = (capacity, self._forms.poolings, self._forms.has_hidden)
        program = self._programs.get(key)
        if program is None:
            rung = BucketBuffers(capacity, backbone.first_position, backbone.pad_id, backbone.device)
            program = self._programs[key] = _Program(rung, self._forms)
        elif program.forms is not self._forms:
            program.forms = self._forms
            program.forms_2S.copy_(torch.from_numpy(self._forms.by_slot))
        return program

    def _run(self, program: _Program) -> None:
        """Run a program: the first time uncaptured, which compiles new shapes; captured from the second time on."""
        if program.graph is not None:
            program.graph.replay()
            return
        with torch.no_grad(), self._bank.backbone.compiled(BACKEND):
            # Blocks are compiled for the first rung, for all others, for larger tiles and for long rows.
            shape = (program.rung.capacity.tile, program.rung.is_long)
            if not program.has_run and self._shapes.count(shape) < 2:
                self._shapes.append(shape)
                self.on_compile(f"compiling passes of up to {program.rung.capacity.num_tokens:,} tokens")
            if not program.has_run or self._bank.backbone.device.type != "cuda":
                self._compute(program)
                program.has_run = True
                return
            program.graph = graph = self._recorder.capture(lambda: self._compute(program))
            graph.replay()

    def _compute(self, program: _Program) -> None:
        """Compute logits from tensors alone: nothing here depends on which tasks the rows are for."""
        bank, rung, stacks = self._bank, program.rung, self._bank.stacks
        with bank.routed(rung.route):
            hidden_ND = bank.backbone.hidden(rung.batch).squeeze(0)
        pooling_B, has_hidden_B = program.forms_2S[:, rung.parts["row_slots"]]
        pooled_BD = pick(
            program.forms.poolings, pooling_B, lambda pooling: bank.backbone.pool_packed(hidden_ND, rung, pooling)
        )
        has_hidden = has_hidden_B if program.forms.has_hidden else None
        program.logits_BL = apply_heads(pooled_BD.float(), stacks, rung.row_tiles, has_hidden)


@dataclass(frozen=True, eq=False)
class _Forms:
    """The forms of the heads of a bank: poolings, and whether they have a hidden layer."""

    poolings: tuple[str, ...] = ()
    """the poolings that occur"""
    has_hidden: bool = False
    """whether any has, or had, a layer before its last"""
    by_slot: np.ndarray = field(default_factory=lambda: np.zeros((2, 0), np.int32))
    """the place of each slot's pooling among those, and whether it has that layer [2, S]"""

    @classmethod
    def of(cls, bank: Bank) -> _Forms:
        heads = [spec.head if spec is not None and spec.head.reads_rows else None for spec in bank.specs]
        names = tuple(sorted({head.pooling for head in heads if head is not None}))
        places = [0 if head is None else names.index(head.pooling) for head in heads]
        hidden = [head is not None and head.hidden != "none" for head in heads]
        return cls(names, head_part.HIDDEN_WEIGHT in bank.stacks, np.array([places, hidden], np.int32))


class _Program:
    def __init__(self, rung: BucketBuffers, forms: _Forms) -> None:
        self.rung, self.forms = rung, forms
        self.forms_2S = torch.from_numpy(forms.by_slot).to(rung.device, copy=True)  # its address stays
        self.logits_BL: Tensor = torch.empty(0)
        self.graph: Any = None
        self.has_run = False
