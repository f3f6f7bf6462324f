"""A cohort: runs trained together, a slot for each of their tasks, in one loop with one backbone forward per step.

Each run keeps its own data order, learning rate, schedule, size, early stop and step count, so that it ends as if it
had been trained alone. A run that ends or diverges leaves the loop; the others go on, and where runs wait, the next one
enters the slot. Everything that decides the next step is in the resume state: killed at any moment, the loop goes on
from the last state and, on a CPU with as many threads as before, ends with the same weights to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inlay.errors import BadConfig, OutOfMemory
from inlay.model import (
    TOKEN_BUDGET,
    Backbone,
    Bank,
    CacheDepth,
    find_family,
    first_layer,
    has_frozen_attention,
    is_out_of_memory,
)
from inlay.settings import digest
from inlay.training.cohort.frozen_cache import FrozenCache
from inlay.training.cohort.member import (
    CONTRAST,
    FOLD,
    PROBE,
    AnyMember,
    Encoder,
    JointMember,
    Member,
    Progress,
    close_epoch,
    close_fold,
    has_diverged,
    loss_limit,
    rate_of,
)
from inlay.training.cohort.memory import brief_reason, release_memory
from inlay.training.cohort.parallel import World
from inlay.training.evaluate import score_dev
from inlay.training.events import Emit, ignore
from inlay.training.recipe.head_start import fit_head, left_out_loss, read_vectors
from inlay.training.recipe.recipe import MOST_STRENGTH, choose_blend
from inlay.training.run.joint import JointRun
from inlay.training.run.run import AnyRun, Run
from inlay.training.step.compiled import CompiledStepper, can_compile
from inlay.training.step.eager import Rows, Stepper
from inlay.training.step.optimizer import JointUpdate, SlotOptimizer, SlotUpdate
from inlay.training.step.seq2seq import Seq2SeqStepper

_ANSWERED = 4  # tokens of a dev pass in those of a training pass: it keeps nothing for a backward pass


@dataclass(frozen=True)
class CohortSettings:
    """Settings of a cohort, not of a run. They are on disk before the first step, so that a resume takes the same."""

    token_budget: int
    """tokens of one forward pass at most, with padding; a step that needs more accumulates gradients over several"""
    num_threads: int
    """threads of the last step; a resumed cohort may use another number"""
    save_every: int
    """steps between resume states"""
    num_slots: int | None = None
    """runs in training at a time; None: all of them"""
    checkpointing: bool = False
    """blocks are computed again in the backward pass instead of keeping their activations"""


def longest_first(runs: Iterable[AnyRun]) -> list[AnyRun]:
    """Return the runs in the order they get slots: the longest first, equally long ones as given."""
    return sorted(runs, key=lambda run: -run.num_steps)


@dataclass(frozen=True)
class Parked:
    """The saved state of a run that began and then lost its slot."""

    run: AnyRun
    progress: Progress
    num_steps: list[int]
    """optimizer steps of every slot, and of the parameters they share"""
    rows: dict[str, Tensor]
    """its row of the bank's values and of both moments, by name"""
    best_tensors: dict[str, Tensor] = field(default_factory=dict)


class Queue:
    """The runs that wait for a slot, the longest first; one that lost its slot comes before all others."""

    def __init__(self, runs: Sequence[AnyRun]) -> None:
        self.runs = list(runs)
        self.num_begun = 0
        self.parked: list[Parked] = []
        self.passed: set[str] = set()
        """ids of runs that were trained elsewhere; such a run does not begin here"""

    @property
    def waiting(self) -> list[AnyRun]:
        """The unfinished runs without a slot, in the order they will get one."""
        fresh = [run for run in self.runs[self.num_begun :] if run.id not in self.passed]
        return [parked.run for parked in self.parked] + fresh

    def take(self) -> AnyRun | Parked | None:
        """Take the next run out of the queue; None if nobody waits."""
        if self.parked:
            return self.parked.pop(0)
        while self.num_begun < len(self.runs):
            self.num_begun += 1
            if self.runs[self.num_begun - 1].id not in self.passed:
                return self.runs[self.num_begun - 1]
        return None


class Cohort:
    """The bank, optimizer and members of runs trained together, perhaps ended.

    `members[g]` has slot g; where runs own several slots, all of a cohort own as many, and `members[g]` has the g-th of
    those groups.
    """

    def __init__(
        self,
        runs: Sequence[AnyRun],
        backbone: Backbone,
        settings: CohortSettings,
        emit: Emit = ignore,
        *,
        world: World | None = None,
    ) -> None:
        self.backbone, self.settings, self.queue = backbone, settings, Queue(runs)
        self._world = world or World()
        self._cache: FrozenCache | None = None
        self._most_answered = TOKEN_BUDGET[backbone.device.type]
        num_tasks = len(runs[0].parts)
        num_seats = min(settings.num_slots or len(runs), len(runs))
        # 1. A bank with room for the largest of all runs, those that wait included: no shape ever changes.
        self.bank = Bank(backbone, num_seats * num_tasks, trainable=True, slots_per_run=num_tasks)
        parts = [part for run in runs for part in run.parts]
        for part in parts:
            self.bank.reserve(part.spec)
        self._encoder = Encoder(backbone, emit)
        for part in parts:
            _check_budget(part, self._encoder, settings.token_budget)
        # 2. One optimizer over the slots' own parameters, one over what the slots of a run share.
        self.flat = self.bank.flatten()
        self.optimizer = SlotOptimizer(self.flat, [part.config.train for part in parts[: self.bank.num_slots]])
        self.shared: SlotOptimizer | None = None
        """the optimizer of the parameters that the slots of a run share"""
        if self.bank.has_shared:
            self.shared = SlotOptimizer(self.bank.flatten(shared=True), [run.config.train for run in runs[:num_seats]])
        if self.shared is None:
            self.slot_update = SlotUpdate(self.optimizer)
        else:
            self.slot_update = JointUpdate(self.optimizer, self.shared, self._world)
        self.num_steps = 0
        self.seconds = 0.0
        self.left_steps = 0
        """steps of ended runs whose slots other runs have now"""
        # 3. The first runs enter the slots.
        self.members: list[AnyMember] = []
        for seat in range(num_seats):
            entering = self.queue.take()
            assert isinstance(entering, Run | JointRun)
            self.members.append(self._enter(seat, entering))
        # 4. Steps: compiled where that is possible, else eager.
        is_compiled = can_compile(self.bank, [part for member in self.members for part in member.parts])
        self.stepper = Stepper(self.bank, self.slot_update, settings.token_budget, self._world)
        # A program contains the optimizer: gradients cannot be exchanged between processes before it.
        if is_compiled and not settings.checkpointing and self._world.process.size == 1:
            kind = Seq2SeqStepper if backbone.is_seq2seq else CompiledStepper
            compiled = kind(self.bank, self.slot_update, settings.token_budget)
            compiled.expect([part.spec.head for part in parts])
            self.stepper = compiled
        self.stepper.emit = emit

    @property
    def active(self) -> list[AnyMember]:
        return [member for member in self.members if member.is_active]

    @property
    def num_seats(self) -> int:
        """Runs in training at a time."""
        return self.bank.num_slots // self.bank.slots_per_run

    @property
    def first_layer(self) -> int:
        """The lowest layer anything is trained in."""
        return first_layer(self.backbone.anatomy, self.members[0].run.spec.method)

    @property
    def cache_depth(self) -> CacheDepth:
        """The depth below which nothing is trained; on packed rows it includes the next attention."""
        config, backbone = self.members[0].run.config, self.backbone
        if not find_family(backbone.anatomy.family).reuses:
            return CacheDepth(0)
        is_frozen = backbone.packs and has_frozen_attention(backbone.anatomy, self.members[0].run.spec.method)
        return CacheDepth(self.first_layer, is_frozen and not config.train.attention_dropout)

    @contextmanager
    def training(self, *, keeps_all: bool = False) -> Iterator[None]:
        """Put the backbone in training mode: dropout as the runs say, none below the lowest trained layer.

        With `keeps_all` nothing is computed again in the backward pass, whatever the settings say.
        """
        train, lowest = self.members[0].run.config.train, self.first_layer
        is_checkpointed = self.settings.checkpointing and not keeps_all
        recomputed = self.backbone.checkpointed(lowest) if is_checkpointed else nullcontext()
        with self.backbone.training(train.dropout, lowest, attention_dropout=train.attention_dropout), recomputed:
            yield

    def reuse(self, cache: FrozenCache) -> None:
        """Cache the states below the lowest trained layer, for these runs and those that enter later."""
        self._cache = cache
        for member in self.active:
            for part in member.parts:
                part.reuse(cache, self.cache_depth)

    def refill(self) -> list[AnyMember]:
        """Give the slots of ended runs to waiting runs; return the runs that entered."""
        entered = []
        for seat, member in enumerate(self.members):
            if not member.is_active and (entering := self.queue.take()) is not None:
                self.left_steps += member.steps_taken
                self.members[seat] = self._enter(seat, entering)
                entered.append(self.members[seat])
                if isinstance(entering, Run) and entering.spec.is_finetuned:  # as if alone: own random numbers and peak
                    seed_for([entering])
                    if self.backbone.device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats(self.backbone.device)
        if entered:
            seated = [member.run for member in self.members]
            self._encoder.keep([part for run in (*seated, *self.queue.waiting) for part in run.parts])
        return entered

    def seat(self, parked: Sequence[Parked]) -> None:
        """Put runs that had begun into the slots, in order; the runs beyond the last slot wait."""
        for seat, entering in enumerate(parked[: self.num_seats]):
            self.members[seat] = self._enter(seat, entering)
        self.queue.parked = list(parked[self.num_seats :])

    def _enter(self, seat: int, entering: AnyRun | Parked) -> AnyMember:
        """Initialise the slots of a run, and return the member that trains them."""
        run = entering.run if isinstance(entering, Parked) else entering
        parts = []
        for slot, part in enumerate(run.parts, start=seat * self.bank.slots_per_run):
            self.bank.initialise(slot, part.spec, run.config.train.seed, part.name if isinstance(run, JointRun) else "")
            if start := run.start.of(part.name):
                self.bank.put(slot, part.spec, {**self.bank.read(slot), **start})
            self.optimizer.reset(slot, part.config.train)
            parts.append(Member(part, slot, self._encoder))
        if self.shared is not None:
            self.shared.reset(seat, run.config.train)
        member = JointMember(run, parts) if isinstance(run, JointRun) else parts[0]
        member.progress.began = self.seconds
        if isinstance(entering, Parked):
            member.best_tensors = entering.best_tensors
            for each in (member, *parts):
                each.progress = entering.progress
            self._set_counts(seat, entering.num_steps)
            with torch.no_grad():
                for name, stored_GP in self.stored.items():
                    stored_GP[seat] = entering.rows[name].to(stored_GP)
        if self._cache is not None and member.is_active:
            for part_member in parts:
                part_member.reuse(self._cache, self.cache_depth)
        return member

    @property
    def stored(self) -> dict[str, Tensor]:
        """All tensors that training changes, a row per run, by name."""
        found = {"values": self.flat.values_SP, "first": self.optimizer.first_SP, "second": self.optimizer.second_SP}
        if self.shared is not None:
            shared = self.shared
            found |= {"shared": shared.values_SP, "shared_first": shared.first_SP, "shared_second": shared.second_SP}
        return {name: tensor.view(self.num_seats, -1) for name, tensor in found.items()}

    def counts(self, seat: int) -> list[int]:
        """Return the optimizer steps of each slot of a run, and of the parameters its slots share."""
        first = seat * self.bank.slots_per_run
        own = self.optimizer.num_steps[first : first + self.bank.slots_per_run]
        return own if self.shared is None else [*own, self.shared.num_steps[seat]]

    def _set_counts(self, seat: int, counts: Sequence[int]) -> None:
        first = seat * self.bank.slots_per_run
        self.optimizer.num_steps[first : first + self.bank.slots_per_run] = counts[: self.bank.slots_per_run]
        if self.shared is not None:
            self.shared.num_steps[seat] = counts[-1]

    def use_budget(self, token_budget: int) -> None:
        """Limit forward passes to so many tokens from here on, but to no fewer than any member needs."""
        fewest = max(part.fewest_tokens for member in self.members for part in member.parts)
        self.stepper.token_budget = max(fewest, token_budget)
        self.settings = replace(self.settings, token_budget=self.stepper.token_budget)

    def halve_budget(self) -> bool:
        """Halve the tokens of a forward pass; return False if they cannot be fewer."""
        before = self.stepper.token_budget
        # Start from the largest step there is: a budget larger than that would take several halvings to matter.
        most = sum(max(part.most_tokens for part in member.parts) for member in self.active)
        self.use_budget(min(before, most) // 2)
        return self.stepper.token_budget < before

    @property
    def answer_budget(self) -> int:
        """Tokens of a forward pass over dev rows at most."""
        return min(_ANSWERED * self.stepper.token_budget, self._most_answered)

    def halve_answers(self) -> bool:
        """Halve the tokens of a forward pass over dev rows; return False at the length of one row."""
        before = self.answer_budget
        longest = max(int(part.dev.lengths.max()) for member in self.active for part in member.parts)
        self._most_answered = max(longest, before // 2)
        return self._most_answered < before

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Restore after the block what its passes change: gradients, random generators, running statistics."""
        undo = self._snapshot()
        try:
            yield
        finally:
            undo()

    def _snapshot(self) -> Callable[[], None]:
        """Note the state that passes change; return a function that restores it and drops the gradients."""
        is_cuda, device = self.backbone.device.type == "cuda", self.backbone.device
        drawn = (torch.get_rng_state(), torch.cuda.get_rng_state(device) if is_cuda else None)
        running = {name: stack.detach().clone() for name, stack in self.bank.stacks.items() if ".running_" in name}
        counts = [self.counts(seat) for seat in range(self.num_seats)]

        def undo() -> None:
            self.slot_update.drop_grads()
            for seat, own in enumerate(counts):
                self._set_counts(seat, own)
            torch.set_rng_state(drawn[0])
            if drawn[1] is not None:
                torch.cuda.set_rng_state(drawn[1], device)
            with torch.no_grad():
                for name, stack in running.items():
                    self.bank.stacks[name].copy_(stack)

        return undo

    def attempt(self, work: Callable[[], Any]) -> Any:
        """Call `work` and return its result; if memory runs out, restore everything and raise OutOfMemory.

        Once moments have moved, or other processes have its gradients, nothing can be restored: the error itself is
        raised, and training must resume from the last state on disk.
        """
        undo, version = self._snapshot(), self._version
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or self._version != version:
                raise
            reason = brief_reason(error)
        # Outside the handler, whose traceback would keep the activations of the failed pass alive.
        undo()
        release_memory(self.backbone.device)
        raise OutOfMemory(reason)

    @property
    def _version(self) -> int:
        """A number that grows when an optimizer step has moved moments, or other processes got gradients."""
        shared = 0 if self.shared is None else self.shared.first_SP._version
        return self.optimizer.first_SP._version + shared + self.stepper.num_moved + self._world.num_sums

    def step(self) -> int:
        """Take one step of every active run; return the number of rows seen.

        If memory runs out for the gradients, OutOfMemory is raised and no run has moved; if an earlier program of the
        step has moved some runs, the error itself is raised.
        """
        active = self.active
        parts, batches = self._next_rows()
        rates = {part.slot: rate_of(member) for member in active for part in member.parts}
        limits = {part.slot: loss_limit(member) for member in active for part in member.parts}
        with self.backbone.turn():
            seen = self.attempt(lambda: self.stepper.step(parts, batches, rates, limits, self._look_ahead))
        for member in active:
            progress = member.progress
            found = next(seen[part.slot] for part in member.parts if part.slot in seen)
            if has_diverged(member, found, limits[member.slot]):
                continue
            if not progress.stage:
                progress.step += 1
            progress.cursor += 1
            progress.loss_sum += found.loss
            progress.losses.append(round(found.loss, 5))
        self.num_steps += 1
        return sum(len(batch) for batch in batches.values())

    def _next_rows(self, ahead: int = 0) -> Rows:
        batches = {slot: rows for member in self.active for slot, rows in member.next_batches(ahead).items()}
        return [part for member in self.active for part in member.parts if part.slot in batches], batches

    def _look_ahead(self) -> Rows | None:
        if any(member.progress.cursor + 1 >= member.steps_of_epoch for member in self.active):
            return None
        return self._next_rows(ahead=1)

    @property
    def is_unscored(self) -> bool:
        """Whether a run was stopped at the end of an epoch before the epoch was scored."""
        return any(member.progress.cursor == member.steps_of_epoch for member in self.active)

    def finish_epochs(
        self, check_stop: Callable[[], None] | None = None, *, is_late: bool = False
    ) -> list[tuple[AnyMember, dict[str, Any]]]:
        """Score the runs that just ended an epoch, in one pass; keep the best weights; end the runs that are done.

        Contrastive steps without a fold of rows are judged on that fold, and are no epoch.
        `check_stop` is called while dev rows are answered; if it raises, nothing has changed. If it `is_late`, epochs
        that have begun end here too.
        """
        ended: list[AnyMember] = [
            member
            for member in self.active
            if member.progress.cursor == member.steps_of_epoch or (is_late and member.progress.cursor)
        ]
        if not ended:
            return []
        folded = [member for member in ended if isinstance(member, Member) and member.progress.stage == FOLD]
        ended = [member for member in ended if member not in folded]
        for member in ended:
            if member.progress.stage and not member.progress.is_fitted:
                self.attempt(partial(self._fit_head, member))
                member.progress.is_fitted = True
        rows = [row for member in ended for part in member.parts for row in part.dev_rows()]
        budget = self.answer_budget
        logits = iter(
            self.attempt(lambda: self._world.infer(self.bank, rows, token_budget=budget, check_stop=check_stop))
        )
        for judged in folded:  # what follows cannot fail, so no run ends before an error
            if judged.progress.cursor == judged.steps_of_epoch:
                self.attempt(partial(self._judge_fold, judged))
            else:
                judged.progress.cursor = 0  # time is up, and an unfinished start says nothing
        records = []
        for member in ended:
            verdicts = [score_dev(part.run, part.dev, [next(logits) for _ in part.dev.ids]) for part in member.parts]
            verdict = member.judge(verdicts) if isinstance(member, JointMember) else verdicts[0]
            records.append((member, close_epoch(member, verdict, self.seconds, self.bank)))
        return records

    def _fit_head(self, member: AnyMember) -> None:
        """Replace a run's head by the linear model fitted to its slot's outputs, and reset its optimizer state.

        After a contrastive start, only a part of its change is kept.
        """
        for part in member.parts:
            slot, spec, progress = part.slot, part.run.spec, part.progress
            before = self.bank.read(slot)
            folds, most = part.num_folds if progress.stage == PROBE else 0, math.inf
            if progress.stage == CONTRAST:
                self._blend(part)
                most = MOST_STRENGTH if part.num_folds else most
            try:
                fitted = fit_head(self.bank, part, self.answer_budget, num_folds=folds, most_strength=most)
            except (RuntimeError, MemoryError):  # memory ran out: a retry begins with the same state
                self.bank.put(slot, spec, before)
                raise
            progress.probe_score = fitted.score
            if folds:
                progress.fold_losses = {PROBE: self._agree(fitted.left_out_loss)}
            self.bank.put(slot, spec, {**self.bank.read(slot), **fitted.tensors})
            if progress.stage == PROBE:  # after training the slot has seen the labels that it would judge
                progress.suspects = fitted.suspects
            self.optimizer.reset(part.slot, part.run.config.train)
        self._world.spread(list(self.stored.values()))  # the last bit may decide between two strengths

    def _judge_fold(self, member: Member) -> None:
        """Score a contrastive start on the fold that it left out, and put the slot back to where it began."""
        slot, run = member.slot, member.run
        before, start = self.bank.read(slot), self._blend(member)
        try:
            vectors = read_vectors(self.bank, member, np.arange(len(member.train)), self.answer_budget)
        except (RuntimeError, MemoryError):  # memory ran out: a retry begins with the same state
            self.bank.put(slot, run.spec, before)
            raise
        inside, outside = member.split_fold()
        loss = left_out_loss(run.task, vectors, inside, outside, most_strength=MOST_STRENGTH)
        close_fold(member, self._agree(loss))
        goes_on = member.progress.stage in (FOLD, CONTRAST)
        self.bank.put(slot, run.spec, start if goes_on else member.best_tensors or start)
        self.optimizer.reset(slot, run.config.train)
        self._world.spread(list(self.stored.values()))

    def _blend(self, member: Member) -> dict[str, Tensor]:
        """Leave only a part of what a contrastive start changed in a slot; return the slot's first values."""
        run = member.run
        share = run.config.train.blend or choose_blend(member.progress.probe_score)
        fresh = Bank(self.backbone, 1)
        fresh.initialise(0, run.spec, run.config.train.seed)
        start = fresh.read(0) | run.start.of(run.name)
        ends = self.bank.read(member.slot)
        self.bank.put(member.slot, run.spec, {name: torch.lerp(start[name], end, share) for name, end in ends.items()})
        return start

    def _agree(self, value: float) -> float:
        """Return the value that the first of several processes has: the last bit may decide."""
        shared = torch.tensor([value], dtype=torch.float64, device=self.backbone.device)
        self._world.spread([shared])
        return float(shared)


def seed_for(runs: Sequence[AnyRun]) -> None:
    """Seed the random numbers of training by the ids of the runs that train together, or of one that trains alone."""
    torch.manual_seed(int(digest([run.id for run in runs])[:12], 16))


def _check_budget(run: Run, encoder: Encoder, token_budget: int) -> None:
    if run.config.method.inner_norm != "batch":
        return
    most = run.config.train.batch_size * int(encoder.encode(run, "train").lengths.max())
    if most > token_budget:
        raise BadConfig(
            f"batch norm sees a run's batch whole, up to {most:,} tokens, but the token budget is {token_budget:,}",
            "use a larger `--token-budget`, a smaller `--batch-size`, or `--set method.inner_norm=layer`",
        )
