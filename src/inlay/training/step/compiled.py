"""Compiled steps for GPUs: forward, backward, clipping and Adam of a whole cohort as one program of fixed shapes.

A cohort's rows are packed into a rung of the ladder (model/batch/buckets.py). What is compiled for a block serves all
blocks and nearly all rungs; whatever the mix of runs, nothing is compiled again within a rung. Small steps are
captured as CUDA graphs: what they read lies at fixed addresses and is written by two copies. While the GPU works on a
step, the host lays out the next one. Fine-tuning is a bank of one that goes through its own copy of the weights.
`Stepper` (eager.py) is the definition, and takes over wherever a step does not fit: a run's gradients that need
several passes, heads that read a mix of layers, batch norm.

Shape letters: S slots, P parameters of a slot, N packed tokens, B rows, D hidden, L labels, C columns of the optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inlay.model import (
    Backbone,
    Bank,
    BucketBuffers,
    CacheDepth,
    CachedStates,
    Capacity,
    GraphRecorder,
    HeadSpec,
    PackedRows,
    ResolvedMethod,
    Tiles,
    apply_heads,
    bound_length,
    is_out_of_memory,
    launch,
    round_up_tokens,
)
from inlay.model import fold_residual as rewrite
from inlay.model import head as head_part
from inlay.training.cohort.member import Member
from inlay.training.cohort.memory import brief_reason
from inlay.training.events import CompileEnded, CompileStarted, Notice
from inlay.training.step.eager import LookAhead, Rows, Stepper
from inlay.training.step.losses import (
    KINDS,
    NO_TARGET,
    OF_ROWS,
    POOLINGS,
    Choice,
    Mix,
    batched_row_losses,
    batched_token_losses,
    has_batched_loss,
)
from inlay.training.step.optimizer import SlotUpdate, StepStats

BACKEND: Callable[..., Any] = rewrite.inductor
"""the compiler backend; a test replaces it by one that counts"""
MOST_GRAPHED = 65536
"""Largest captured step, in tokens. Above it launch overhead is small and the graph's memory is not."""
MOST_EMBEDDED = 3072
"""The same if embeddings are trained: torch sorts larger gradients, and waits for the device."""
_NUM_BY_SLOT = 7
"""numbers a step needs of each slot's head: kind, pooling, outputs, dropout, hidden layer, its dropout, smoothing"""


def can_compile(bank: Bank, members: Sequence[Member]) -> bool:
    """Tell whether compiled programs can step these runs, which have one structure."""
    specs = [member.run.spec for member in members]
    are_known = bank.backbone.is_seq2seq or all(has_batched_loss(spec.head) for spec in specs)
    if any(member.is_contrasting for member in members):  # its loss compares the rows of a whole batch
        return False
    return are_known and has_programs(bank.backbone, specs[0].method)


def has_programs(backbone: Backbone, method: ResolvedMethod) -> bool:
    """Tell whether steps can be compiled: packed rows, a device with kernels, and no batch norm."""
    return launch.is_available(backbone.device) and backbone.packs and method.inner_norm != "batch"


class Program:
    """One step on one rung: its inputs at fixed addresses, and what it computes."""

    def __init__(
        self, rung: BucketBuffers, prefix: CachedStates | None, mix: Mix, num_labels: int, num_columns: int
    ) -> None:
        self.rung, self.mix = rung, mix
        self.batch = replace(rung.batch, route=replace(rung.route, prefix=prefix))
        device = rung.batch.input_ids_BT.device
        num_rows, num_slots = rung.capacity.all_rows, rung.capacity.num_slots
        num_marks = 2 * rung.capacity.num_tokens if mix.of_tokens else 0
        self._sizes = [num_rows, num_rows, num_rows * num_labels, num_marks, num_columns * num_slots]
        self._sizes.append(_NUM_BY_SLOT * num_slots)
        self._host = torch.zeros(sum(self._sizes), pin_memory=device.type == "cuda")
        self._there = torch.zeros_like(self._host, device=device)
        targets, weights, labels, marks, columns, by_slot = self._there.split(self._sizes)
        self.targets_B, self.weights_B = targets, weights
        """the class or number of each row, and its weight; 0 for padding rows"""
        self.labels_BL = labels.view(num_rows, num_labels)
        """which labels apply, for heads of several labels"""
        self.marks_N2 = marks.view(-1, 2)
        """targets of tokens, for heads that read tokens; else empty"""
        self.columns_CS = columns.view(num_columns, num_slots)
        self.kinds_S, self.poolings_S, self.num_outputs_S, *rest = by_slot.view(_NUM_BY_SLOT, num_slots)
        self.dropout_S, self.has_hidden_S, self.hidden_dropout_S, self.smoothing_S = rest
        self.seen_2S = torch.zeros(2, num_slots, device=device)
        """losses and norms of the last step"""
        self.graph: Any = None
        self.layout_key: Any = None
        """the bank's layout key at the first computation: with another one, tensors lie at other addresses"""

    def fill(self, ready: Prepared, by_slot: np.ndarray) -> None:
        """Copy a step's rows and its slots' settings into the fixed inputs; no copy waits for the device."""
        numbers = ready.numbers
        self.rung.fill(ready.rows)
        if self.batch.prefix is not None:
            ready.write_states(self.batch.prefix.states[0])
        self._host[: len(numbers)].copy_(torch.from_numpy(numbers))
        self._host[-by_slot.size :].copy_(torch.from_numpy(by_slot.ravel()))
        self._there.copy_(self._host, non_blocking=True)


@dataclass(frozen=True)
class Prepared:
    """A step laid out on the host."""

    key: tuple[tuple[str, int, int, int], ...]
    """(run, slot, epoch, cursor) of every run in the step"""
    program: Program
    rows: np.ndarray
    numbers: np.ndarray
    """float32: targets, weights and labels of the rows, marks of the tokens"""
    states: list[Tensor]
    """the cached states of each row's lower layers [T, D]; empty if nothing is cached"""
    answers: np.ndarray | None = None
    """int32: the target answers, on a seq2seq backbone"""

    def write_states(self, into_ND: Tensor) -> None:
        """Copy the states end to end into the input; padding keeps old values."""
        num_tokens = sum(map(len, self.states))
        pieces = self.states
        if len({piece.device for piece in pieces}) > 1:  # some are cached on the GPU, some in the host's memory
            pieces = [piece.to(into_ND.device, non_blocking=True) for piece in pieces]
        into_ND[:num_tokens].copy_(torch.cat(pieces), non_blocking=True)


class CompiledStepper(Stepper):
    """Steps as compiled programs, one for each rung that occurs."""

    doing = "compiling"
    """the verb of the notice when a rung occurs first"""

    def __init__(self, bank: Bank, slot_update: SlotUpdate, token_budget: int) -> None:
        super().__init__(bank, slot_update, token_budget)
        self._programs: dict[tuple[Any, ...], Program] = {}
        self._next: Prepared | None = None
        self._dealt: tuple[Any, list[list[Member]]] = ((), [])
        """the groups of runs for the step that was prepared ahead, with its key and token budget"""
        self._formula = torch.compile(slot_update.formula, backend=BACKEND, dynamic=False)
        self._is_captured = bank.backbone.device.type == "cuda"
        self._recorder = GraphRecorder()
        self._longest = 0
        self._most_rows = 0
        self._mix = Mix()
        self._grown: Hashable = None
        self._largest_budget = token_budget
        self._most_captured = MOST_EMBEDDED if _trains_embeddings(bank) else MOST_GRAPHED
        self._may_launch = bank.is_finetuned(0)
        """whether steps that this torch cannot capture are launched uncaptured"""

    def expect(self, heads: Sequence[HeadSpec]) -> None:
        """Include these heads in the programs from the start: their runs will enter later."""
        self._mix = self._mix.with_heads([head for head in heads if has_batched_loss(head)])

    def step(
        self,
        active: Sequence[Member],
        batches: Mapping[int, np.ndarray],
        rates: Mapping[int, float],
        limits: Mapping[int, float],
        look_ahead: LookAhead = lambda: None,
    ) -> dict[int, StepStats]:
        """Do what `Stepper.step` does in one program, or in several if the token budget does not hold all runs."""
        self._shrink()
        is_dealt = self._dealt[0] == (_key(active), self.token_budget)
        groups = self._dealt[1] if is_dealt else []
        if not is_dealt and can_compile(self._bank, active):
            groups = self._group(active, batches)
        if not groups:
            return super().step(active, batches, rates, limits, look_ahead)
        seen: dict[int, StepStats] = {}
        for index, group in enumerate(groups):
            ready, self._next = self._next, None
            if ready is None or ready.key != _key(group):
                ready = self._prepare(group, batches)
            ready.program.fill(ready, self._by_slot(group, rates, limits))
            self._launch(ready.program)
            self.num_moved += 1
            if index + 1 < len(groups):
                self._next = self._prepare(groups[index + 1], batches)
            else:
                self._prepare_ahead(look_ahead())
            losses, norms = ready.program.seen_2S.tolist()  # waits for the device
            seen |= {member.slot: StepStats(losses[member.slot], norms[member.slot]) for member in group}
        self._slot_update.undo_count({slot for slot, found in seen.items() if not found.is_finite(limits[slot])})
        return seen

    def _shrink(self) -> None:
        """Forget the programs of a larger budget that ran out of memory, and their numbers of rows."""
        if self.token_budget < self._largest_budget:
            self._programs, self._next, self._longest, self._most_rows = {}, None, 0, 0
        self._largest_budget = self.token_budget

    def _group(self, active: Sequence[Member], batches: Mapping[int, np.ndarray]) -> list[list[Member]]:
        """Divide the runs into as few groups of about equal size as the token budget allows.

        Empty if one run's batch alone is too large: its gradients need several passes.
        """
        tokens: dict[int, int] = {}
        for member in active:
            run, num_tokens = self._bank.run_of(member.slot), int(member.lengths[batches[member.slot]].sum())
            tokens[run] = tokens.get(run, 0) + num_tokens
        if not all(self._holds(tokens, [run]) for run in tokens):
            return []
        fewest = -(-sum(tokens.values()) // self.token_budget)
        dealt = (_deal(tokens, num_groups) for num_groups in range(fewest, len(tokens) + 1))  # at last one run each
        groups = next(found for found in dealt if all(self._holds(tokens, runs) for runs in found))
        return [[member for member in active if self._bank.run_of(member.slot) in runs] for runs in groups]

    def _holds(self, tokens: Mapping[int, int], runs: Iterable[int]) -> bool:
        return self._climb(sum(tokens[run] for run in runs)) <= self.token_budget

    def _climb(self, num_tokens: int) -> int:
        """Return the rung of a step; a finer one if the coarse one exceeds the token budget."""
        coarse = round_up_tokens(num_tokens, is_varied=self._bank.slots_per_run > 1)
        return coarse if coarse <= self.token_budget else round_up_tokens(num_tokens)

    def _prepare_ahead(self, rows: Rows | None) -> None:
        """Lay out the next step while the device works on this one, unless something happens in between."""
        if rows is None or not can_compile(self._bank, rows[0]):
            return
        active, batches = rows
        groups = self._group(active, batches)
        self._dealt = ((_key(active, ahead=1), self.token_budget), groups)
        with suppress(torch.OutOfMemoryError):  # a step laid out early needs memory too, and is optional
            self._next = self._prepare(groups[0], batches, ahead=1) if groups else None

    def _prepare(self, active: Sequence[Member], batches: Mapping[int, np.ndarray], ahead: int = 0) -> Prepared:
        parts = [member.train.gather(batches[member.slot]) for member in active]
        lengths = np.concatenate([part.lengths for part in parts])
        slots = np.repeat([member.slot for member in active], [len(part.lengths) for part in parts])
        types = [part.segments if part.segments is not None else np.zeros_like(part.ids) for part in parts]
        laid = PackedRows(np.concatenate([part.ids for part in parts]), np.concatenate(types), lengths, slots)
        prefixes = [prefix for member in active for prefix in member.prefixes(batches[member.slot])]
        begins_at = prefixes[0].reach if len(prefixes) == len(lengths) else None
        program = self._find_program(len(laid.ids), lengths, begins_at)
        numbers = self._numbers(active, batches, program)
        states = [prefix.states for prefix in prefixes]
        return Prepared(_key(active, ahead), program, program.rung.lay(laid), numbers, states)

    def _numbers(self, active: Sequence[Member], batches: Mapping[int, np.ndarray], program: Program) -> np.ndarray:
        num_rows, num_labels = program.rung.capacity.all_rows, self._num_labels
        targets, weights = np.zeros((2, num_rows), np.float32)
        labels = np.zeros((num_rows, num_labels), np.float32)
        marks = np.full(program.marks_N2.shape, NO_TARGET, np.float32)
        start = first = 0
        for member in active:
            batch = batches[member.slot]
            stop, last = start + len(batch), first + int(member.train.lengths[batch].sum())
            if not member.run.spec.head.reads_rows:
                own = member.targets.lay(batch)
                marks[first:last, : own.shape[1]] = own
            elif (own := member.targets_of(batch)).ndim == 1:
                targets[start:stop] = own
            else:
                labels[start:stop, : own.shape[1]] = own
            weights[start:stop] = member.weights_of(batch) * self._slot_update.share(member, batches)
            start, first = stop, last
        return np.concatenate([targets, weights, labels.ravel(), marks.ravel()])

    def _by_slot(self, active: Sequence[Member], rates: Mapping[int, float], limits: Mapping[int, float]) -> np.ndarray:
        columns = self._slot_update.columns(active, rates, limits)
        known = np.concatenate([columns, np.zeros((_NUM_BY_SLOT, self._bank.num_slots), np.float32)])
        for member in active:
            known[-_NUM_BY_SLOT:, member.slot] = self._of_head(member)
        return known

    def _of_head(self, member: Member) -> tuple[float, ...]:
        head = member.run.spec.head
        pooling = POOLINGS.index(head.pooling) if head.reads_rows else 0
        rate, has_hidden = member.run.config.train.head_dropout, head.hidden != "none"
        dropout = 0.0 if head.hidden == "pooler" else rate  # BERT drops its pooler's output, not its input
        return KINDS.index(head.kind), pooling, head.num_outputs, dropout, has_hidden, rate, 0.0

    @property
    def _num_labels(self) -> int:
        return self._bank.stacks[head_part.WEIGHT].shape[1]

    def _find_program(self, num_tokens: int, lengths: np.ndarray, begins_at: CacheDepth | None) -> Program:
        """Return the program for a step.

        Rows, the longest row and kinds of heads only grow, so that steps of one size share a program.
        """
        self._longest = max(self._longest, bound_length(lengths))
        num_rows, grown = self._find_rows(len(lengths)), self._grow()
        if grown != self._grown:
            self._programs, self._grown = {}, grown
        capacity = Capacity(self._climb(num_tokens), num_rows, self._bank.num_slots, self._longest)
        key = (capacity, begins_at)
        if key not in self._programs:
            backbone, prefix = self._bank.backbone, None
            rung = BucketBuffers(capacity, backbone.first_position, backbone.pad_id, backbone.device)
            if begins_at is not None:
                shape = (1, capacity.num_tokens, backbone.hidden_size * (1 + begins_at.with_attention))
                prefix = CachedStates(begins_at, torch.zeros(shape, dtype=backbone.dtype, device=backbone.device))
            self._programs[key] = self._make_program(rung, prefix)
        return self._programs[key]

    def _find_rows(self, num_rows: int) -> int:
        """Return the number of rows that a program has room for."""
        self._most_rows = max(self._most_rows, num_rows)
        return self._most_rows

    def _grow(self) -> Hashable:
        """Return the sizes that only grow. When they change, all programs are made again."""
        self._mix = self._mix.with_heads([spec.head for spec in self._bank.specs if spec is not None])
        return self._longest, self._most_rows, self._mix

    def _make_program(self, rung: BucketBuffers, prefix: CachedStates | None) -> Program:
        return Program(rung, prefix, self._mix, self._num_labels, self._slot_update.num_columns)

    def _launch(self, program: Program) -> None:
        """Run a step: the first time it is compiled and run as it is, later as a captured graph, where that pays."""
        layout_key = self._bank.layout_key
        self._bank.drop_generated()
        if program.graph is not None and program.layout_key == layout_key:
            program.graph.replay()
            return
        num_tokens = program.rung.capacity.num_tokens
        with self._compiled():
            if program.layout_key != layout_key:
                what, began = f"{self.doing} steps of up to {num_tokens:,} tokens", time.perf_counter()
                self.emit(CompileStarted(what))
                program.graph = None
                self._compute(program)
                program.layout_key = (
                    layout_key  # not before: a step that ran out of memory has not loaded all its kernels
                )
                self.emit(CompileEnded(what, time.perf_counter() - began))
                return
            if self._is_captured and self._may_capture(program):
                program.graph = self._try_to_capture(program)
            if program.graph is None:
                self._compute(program)
            else:
                program.graph.replay()

    def _compiled(self) -> AbstractContextManager[None]:
        return self._bank.backbone.compiled(BACKEND)

    def _may_capture(self, program: Program) -> bool:
        return program.rung.capacity.num_tokens <= self._most_captured

    def _try_to_capture(self, program: Program) -> Any:
        """Capture the step as a graph; return None if this torch cannot and the step may be launched instead."""
        try:
            return self._recorder.capture(lambda: self._compute(program))
        except RuntimeError as error:
            if is_out_of_memory(error) or not self._may_launch:
                raise
            kind = "a backbone that writes" if self._bank.backbone.is_seq2seq else "fine-tuning"
            self.emit(Notice(f"steps of {kind} cannot be captured here, and are launched ({brief_reason(error)})"))
            self._is_captured = False
            return None

    def _compute(self, program: Program) -> None:
        """Compute the step from tensors alone: nothing here depends on which runs it is for."""
        self._slot_update.drop_grads()
        with self._bank.routed(program.batch.route):
            losses_S = self._losses(program)
            losses_S.sum().backward()
        seen = self._slot_update.advance(self._formula, losses_S.detach(), program.columns_CS)
        program.seen_2S.copy_(torch.stack(seen))

    def _losses(self, program: Program) -> Tensor:
        """Return the loss of every slot [S]."""
        weights = self._bank.weights_of(0)  # a run that trains the backbone's own weights is alone
        hidden_ND = self._bank.backbone.hidden_layers(program.batch, weights)[-1].squeeze(0)
        slots_B = program.rung.parts["row_slots"]
        kinds = Choice(KINDS, program.kinds_S[slots_B], program.mix.kinds)
        found = []
        if program.mix.of_rows:
            logits_BL = self._logits_of_rows(program, hidden_ND, weights)
            given = (program.targets_B, program.labels_BL, program.num_outputs_S[slots_B])
            found.append(batched_row_losses(logits_BL, *given, kinds))
        if program.mix.of_tokens:
            logits_NL = self._apply_heads(program, hidden_ND, "slots", program.rung.tiles)
            rows_N = program.rung.parts["rows"]
            found.append(
                batched_token_losses(logits_NL, program.marks_N2, rows_N, program.num_outputs_S[slots_B], kinds)
            )
        is_of_rows_B = program.kinds_S[slots_B] < len(OF_ROWS)
        losses_B: Tensor = found[0] if len(found) == 1 else torch.where(is_of_rows_B, found[0], found[1])
        return self._add_up(program, losses_B)

    def _add_up(self, program: Program, losses_B: Tensor) -> Tensor:
        """Sum the weighted losses of the first rows by slot [S]; the rows behind them are padding."""
        weights_B, slots_B = program.weights_B[: len(losses_B)], program.rung.parts["row_slots"][: len(losses_B)]
        # Not multiplied by the weight: the loss of a padding row may be NaN.
        losses_B = torch.where(weights_B > 0, losses_B * weights_B, 0.0)
        return losses_B.new_zeros(self._bank.num_slots).index_add(0, slots_B, losses_B)

    def _logits_of_rows(self, program: Program, hidden_ND: Tensor, weights: Mapping[str, Tensor] | None) -> Tensor:
        rung, slots_B = program.rung, program.rung.parts["row_slots"]
        pool = self._bank.backbone.pool_packed
        pooled = {name: partial(pool, hidden_ND, rung, name, weights) for name in program.mix.poolings}
        pooled_BD = Choice(POOLINGS, program.poolings_S[slots_B], program.mix.poolings).among(pooled)
        return self._apply_heads(program, pooled_BD, "row_slots", rung.row_tiles)

    def _apply_heads(self, program: Program, vectors: Tensor, slots: str, tiles: Tiles) -> Tensor:
        """Apply each slot's dropout and head to vectors of rows or tokens; `slots` names the input with their slots."""
        slot_V, stacks = program.rung.parts[slots], self._bank.stacks
        vectors = _dropped(vectors.float(), program.dropout_S[slot_V])
        if not (program.mix.rows_have_hidden if slots == "row_slots" else program.mix.tokens_have_hidden):
            return apply_heads(vectors, stacks, tiles)
        rates_V = program.hidden_dropout_S[slot_V]
        return apply_heads(vectors, stacks, tiles, program.has_hidden_S[slot_V], lambda above: _dropped(above, rates_V))


def _dropped(vectors: Tensor, rates: Tensor) -> Tensor:
    """Return each vector after dropout at its own rate."""
    return vectors * (torch.rand_like(vectors) >= rates.unsqueeze(1)) / (1 - rates.unsqueeze(1))


def _trains_embeddings(bank: Bank) -> bool:
    own = bank.weights_of(0) if bank.is_finetuned(0) else {}
    return any(name.startswith(("embeddings.", "shared.")) for name in own or {})


def _deal(tokens: Mapping[int, int], num_groups: int) -> list[set[int]]:
    """Deal slots into groups of about equally many tokens: the heaviest first, each to the lightest group."""
    loads, groups = [0] * num_groups, [set[int]() for _ in range(num_groups)]
    for slot in sorted(tokens, key=lambda slot: -tokens[slot]):
        lightest = loads.index(min(loads))
        groups[lightest].add(slot)
        loads[lightest] += tokens[slot]
    return groups


def _key(active: Sequence[Member], ahead: int = 0) -> tuple[tuple[str, int, int, int], ...]:
    return tuple(
        (member.run.id, member.slot, member.progress.epoch, member.progress.cursor + ahead) for member in active
    )
