"""The cost of a run before it is trained: parameters from shapes, time and memory from a few measured steps."""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inlay.data import epoch_batches, task_shares
from inlay.model import Backbone, collate, infer, make_rows
from inlay.notebook import show_html
from inlay.threads import Threads, generator_lock, own_threads
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.cohort.frozen_cache import FrozenCache, Limits
from inlay.training.cohort.member import Member
from inlay.training.cohort.memory import (
    MAX_COHORT,
    TOKEN_BUDGET,
    available_bytes,
    choose_slots,
    count_slot_bytes,
    find_budget,
    peak_memory_bytes,
)
from inlay.training.run.counts import Totals, count_totals
from inlay.training.run.joint import JointRun
from inlay.training.run.run import AnyRun, Run, count_start_steps
from inlay.training.run.start import Start

_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
_FEW_QUANTILES = (0.25, 0.75)
_ANSWERED = 0.3  # time of answering a row, as a share of training on it, roughly
_FULL_EPOCHS = 10  # epochs of fine-tuning, if a run has none of its own
_DEV_SAMPLE = 128
_FEW_DEV_ROWS = 48
ANSWERED = 1 / 3
"""time of answering a row, as a share of training on it: one forward pass instead of forward and backward"""
_TRAINED_BYTES = 12  # a trained float32's gradient and two moments, besides the value itself


@dataclass(frozen=True)
class Cost:
    """Cost of one way to train the task."""

    trained_parameters: int
    stored_bytes: int
    seconds: float | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class RunPlan:
    """A run's cost beside that of fine-tuning the whole backbone for the same task.

    What needs more than shapes is None until it is measured.
    """

    run_id: str
    parameters_by_part: dict[str, int]
    backbone_parameters: int
    num_train: int
    num_dev: int
    num_steps: int
    """number of steps; before the measurement, as if a row were one window"""
    inlay: Cost
    full: Cost
    frozen_norms: dict[str, str]
    """layer norms that stay frozen, and why"""
    totals: Totals
    """parameters as the papers count them"""
    max_together: int
    """largest number of such runs that would train at a time"""
    truncated_share: float | None = None
    token_budget: int | None = None
    """tokens of a forward pass that fit in the memory that is free now"""

    def _repr_html_(self) -> str:
        rows = [[name, getattr(self.inlay, name), getattr(self.full, name)] for name in vars(self.inlay)]
        facts = {"run": self.run_id, "steps": self.num_steps, "rows": self.num_train}
        return show_html("what it would cost", facts, ["", "this method", "full fine-tuning"], rows)

    @property
    def trained_share(self) -> float:
        return self.inlay.trained_parameters / self.backbone_parameters

    def to_json(self) -> dict[str, Any]:
        """Return the plan as data."""
        return {
            **dataclasses.asdict(self),
            "trained_share": self.trained_share,
            "totals": self.totals.to_json(),
        }


def count_plan(run: Run, backbone: Backbone) -> RunPlan:
    """Count everything that follows from shapes: no step is taken and no text is tokenised."""
    items = run.spec.layout(backbone.anatomy)
    by_part: dict[str, int] = {}
    for item in items:
        by_part[item.part] = by_part.get(item.part, 0) + item.num_parameters
    in_full = backbone.num_parameters + by_part.get("head", 0)
    num_slots = choose_slots(MAX_COHORT, count_slot_bytes([run], backbone), available_bytes(backbone.device))
    return RunPlan(
        run_id=run.id,
        parameters_by_part=by_part,
        backbone_parameters=backbone.num_parameters,
        num_train=len(run.task.train),
        num_dev=len(run.task.dev),
        num_steps=run.num_steps + count_start_steps(run.config.train),
        inlay=Cost(sum(by_part.values()), 4 * sum(math.prod(item.shape) for item in items)),
        full=Cost(in_full, 4 * in_full),
        frozen_norms=dict(backbone.anatomy.frozen_norms),
        totals=count_totals(items, backbone.anatomy, num_backbone=backbone.num_parameters),
        max_together=1 if run.spec.is_finetuned else num_slots,
    )


def make_plan(run: Run, backbone: Backbone, *, checkpointing: bool = False) -> RunPlan:
    """Count, take a few steps on temporary slots, and estimate. Afterwards the backbone is as before."""
    counted = count_plan(run, backbone)
    with _rehearsal(run, backbone, checkpointing=checkpointing) as cohort:
        (member,) = cohort.members[0].parts
        steps = _Steps(member, _QUANTILES, backbone.device)
        with cohort.training():
            epoch_seconds, once_seconds = steps.estimate_epoch(cohort)
        peak = peak_memory_bytes(backbone.device)
        dev_seconds = _measure_dev(cohort, member, _DEV_SAMPLE)
        full_seconds = steps.estimate(_make_full_step(member, backbone))
    epochs = run.config.train.num_epochs
    dev_once_seconds = once_seconds * float(member.dev.lengths.sum() / member.train.lengths.sum())
    upper_seconds = max(0.0, epoch_seconds - once_seconds) + max(0.0, dev_seconds - dev_once_seconds)
    inlay_seconds = once_seconds + dev_once_seconds + epochs * upper_seconds
    if run.config.train.head_start == "probe":  # a pass over the training rows, and one after a contrastive start
        contrast = count_start_steps(run.config.train)
        inlay_seconds += (1 + bool(contrast)) * (_ANSWERED * epoch_seconds + dev_seconds)
        inlay_seconds += contrast * epoch_seconds / member.steps_per_epoch
    full_peak = peak + _TRAINED_BYTES * backbone.num_parameters
    return dataclasses.replace(
        counted,
        num_steps=member.num_steps + count_start_steps(run.config.train),
        truncated_share=member.train.num_truncated / max(1, len(run.task.train)),
        inlay=dataclasses.replace(counted.inlay, seconds=inlay_seconds, peak_memory_bytes=peak),
        full=dataclasses.replace(
            counted.full, seconds=(epochs or _FULL_EPOCHS) * (full_seconds + dev_seconds), peak_memory_bytes=full_peak
        ),
        token_budget=cohort.settings.token_budget,
    )


@contextmanager
def _rehearsal(run: Run, backbone: Backbone, *, checkpointing: bool) -> Iterator[Cohort]:
    """Yield a cohort of a run on temporary slots; afterwards the generators are as before."""
    budget = TOKEN_BUDGET[backbone.device.type]
    settings = CohortSettings(budget, _count_threads(backbone), 1, checkpointing=checkpointing)
    devices = [backbone.device] if backbone.device.type == "cuda" else []
    with (
        generator_lock(backbone.device),
        own_threads(settings.num_threads),
        torch.random.fork_rng(devices=devices),
    ):
        free_bytes = available_bytes(backbone.device)
        cohort = Cohort([run], backbone, settings)
        cohort.use_budget(find_budget(cohort, free_bytes))
        # Without a cache, a step also computes the layers that are otherwise computed once: both can be timed.
        cohort.reuse(FrozenCache(backbone, Path(tempfile.gettempdir()), limits=Limits(0, 0)))
        yield cohort


@dataclass(frozen=True)
class Durations:
    """Seconds that the parts of a run take."""

    setup: float
    """time before the first step: slots, tokens"""
    once: float
    """time of the frozen layers of all texts, if they are cached"""
    epoch: float
    """time of the steps over all training rows, without the cached layers"""
    dev: float
    """time of scoring the dev rows"""
    probe: float
    """time of answering the training rows for the linear probe"""


def measure_durations(run: Run, backbone: Backbone, *, checkpointing: bool = False) -> Durations:
    """Measure the parts of a run with fewer steps than a plan takes, since it costs training time."""
    began = time.perf_counter()
    with _rehearsal(run, backbone, checkpointing=checkpointing) as cohort:
        setup = time.perf_counter() - began
        (member,) = cohort.members[0].parts
        steps = _Steps(member, _FEW_QUANTILES, backbone.device)
        with cohort.training():
            epoch, once = steps.estimate_epoch(cohort)
        dev = _measure_dev(cohort, member, _FEW_DEV_ROWS)
    dev_share = float(member.dev.lengths.sum() / member.train.lengths.sum())
    return Durations(
        setup=setup,
        once=once * (1 + dev_share),
        epoch=max(0.0, epoch - once),
        dev=max(0.0, dev - once * dev_share),
        probe=dev / dev_share,
    )


def _count_threads(backbone: Backbone) -> int:
    """Return the number of threads that training would begin with now."""
    most = torch.get_num_threads()
    return Threads(most).number if backbone.device.type == "cpu" else most


@dataclass(frozen=True)
class StepCost:
    """The cost of a run's steps: seconds per step and per character of its texts, and peak memory."""

    seconds_a_step: float
    seconds_a_character: float
    peak_memory_bytes: int


def measure_step_cost(run: AnyRun, backbone: Backbone, *, checkpointing: bool = False) -> StepCost:
    """Measure the cost of a run's steps, from one or two steps over a few of its rows.

    Only those rows are read, so that it takes a moment for any run. On a CPU time goes with tokens, and beside them
    with the parameters that a step updates: two small steps tell both apart. A GPU is shown a batch.
    """
    sizes, num_warm, num_timed = _MEASURED[backbone.device.type]
    budget = TOKEN_BUDGET[backbone.device.type]
    settings = CohortSettings(budget, _count_threads(backbone), 1, checkpointing=checkpointing)
    with generator_lock(backbone.device), own_threads(settings.num_threads):
        found = [_time_steps(_shrink(run, size, num_warm + num_timed), backbone, settings) for size in sizes]
    (seconds, characters), (less, fewer) = found[-1], found[0]
    slope = (seconds - less) / (characters - fewer) if characters > fewer else 0.0
    if slope <= 0:  # one size only, or noise: assume proportion
        slope = seconds / max(characters, 1.0)
    return StepCost(max(0.0, seconds - slope * characters), slope, peak_memory_bytes(backbone.device))


@dataclass(frozen=True)
class TaskPlan:
    """The plan of one task of a multi-task run."""

    name: str
    kind: str
    metric: str
    num_train: int
    num_dev: int
    drawn_share: float
    """share of the steps (or of their rows, if batches are mixed) over all epochs"""
    own_parameters: int
    """parameters trained for this task alone"""


@dataclass(frozen=True)
class JointPlan:
    """The cost of a multi-task run; time and memory are None until they are measured."""

    run_id: str
    tasks: tuple[TaskPlan, ...]
    shared_parameters: int
    is_shared_frozen: bool
    """whether shared parameters stay as they started"""
    trained_parameters: int
    backbone_parameters: int
    num_steps: int
    batch_size: int
    totals: Totals
    """parameters as the papers count them"""
    seconds: float | None = None
    memory_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as data."""
        return {**dataclasses.asdict(self), "totals": self.totals.to_json()}


def count_joint(run: JointRun, backbone: Backbone) -> JointPlan:
    """Count everything that follows from shapes: no step is taken."""
    is_frozen = run.config.joint.trained == "task"
    items, epochs = run.layout(backbone.anatomy), run.config.train.num_epochs
    shared = sum(item.num_parameters for item in items if item.is_shared)
    own = [sum(item.num_parameters for item in items if item.name.startswith(f"{part.name}/")) for part in run.parts]
    sizes = [part.num_rows for part in run.parts]
    shares = np.mean([task_shares(sizes, run.config.joint, epoch, epochs) for epoch in range(epochs)], axis=0)
    tasks = tuple(
        TaskPlan(part.name, part.task.kind, part.metric, part.num_rows, len(part.task.dev), float(share), number)
        for part, share, number in zip(run.parts, shares, own, strict=True)
    )
    return JointPlan(
        run_id=run.id,
        tasks=tasks,
        shared_parameters=shared,
        is_shared_frozen=is_frozen,
        trained_parameters=sum(own) + (0 if is_frozen else shared),
        backbone_parameters=backbone.num_parameters,
        num_steps=run.num_steps,
        batch_size=run.config.train.batch_size,
        totals=count_totals(
            items,
            backbone.anatomy,
            num_tasks=len(run.parts),
            is_shared_frozen=is_frozen,
            num_backbone=backbone.num_parameters,
        ),
    )


def plan_joint(run: JointRun, backbone: Backbone, *, checkpointing: bool = False) -> JointPlan:
    """Count, measure a step or two, and estimate. The backbone is as before afterwards."""
    counted, epochs = count_joint(run, backbone), run.config.train.num_epochs
    cost = measure_step_cost(run, backbone, checkpointing=checkpointing)
    lengths = [_count_characters(part) / part.num_rows for part in run.parts]
    shares = [task.drawn_share for task in counted.tasks]
    step_characters = counted.batch_size * float(np.dot(shares, lengths))
    dev_characters = sum(len(part.task.dev) * length for part, length in zip(run.parts, lengths, strict=True))
    seconds = run.num_steps * (cost.seconds_a_step + step_characters * cost.seconds_a_character)
    seconds += epochs * dev_characters * cost.seconds_a_character * ANSWERED
    memory_bytes = count_slot_bytes([run], backbone) + cost.peak_memory_bytes
    return dataclasses.replace(counted, seconds=seconds, memory_bytes=memory_bytes)


# Device -> rows of a measured step, warm-up steps, timed steps.
_MEASURED = {"cpu": ((1, 4), 1, 1), "cuda": ((32,), 3, 5)}


def _time_steps(run: AnyRun, backbone: Backbone, settings: CohortSettings) -> tuple[float, float]:
    """Return the seconds of a step, and the characters of its texts."""
    _, num_warm, num_timed = _MEASURED[backbone.device.type]
    with torch.random.fork_rng(devices=[backbone.device] if backbone.device.type == "cuda" else []):
        cohort = Cohort([run], backbone, settings)
        with cohort.training():
            for _ in range(num_warm):
                _timed(cohort.step, backbone.device)
            seconds = sum(_timed(cohort.step, backbone.device) for _ in range(num_timed)) / num_timed
    return seconds, sum(map(_count_characters, run.parts)) / len(run.parts) / (num_warm + num_timed)


def _shrink(run: AnyRun, num_rows: int, num_steps: int) -> AnyRun:
    """Return a copy of the run with few steps over few rows and a fresh start, which changes no step's time."""
    parts = []
    for part in run.parts:
        # A few rows, evenly chosen by length.
        train, dev = part.task.train, part.task.dev
        order = sorted(range(len(train.texts)), key=lambda row: len(train.texts[row]))
        number = min(num_rows, part.config.train.batch_size, len(order))
        chosen = [order[(2 * row + 1) * len(order) // (2 * number)] for row in range(number)]
        task = dataclasses.replace(
            part.task, train=train.take(chosen * num_steps), dev=dev.take(range(min(2, len(dev))))
        )
        settings = dataclasses.replace(part.config.train, batch_size=number, epochs=1)
        config = dataclasses.replace(part.config, train=settings)
        parts.append(dataclasses.replace(part, task=task, config=config, start=Start(), origin={}))
    if not isinstance(run, JointRun):
        return parts[0]
    joint = dataclasses.replace(run.config.joint, steps=num_steps)
    config = dataclasses.replace(run.config, train=parts[0].config.train, joint=joint)
    return dataclasses.replace(run, parts=tuple(parts), config=config, start=Start())


def _count_characters(run: Run) -> int:
    """Count the characters of the training texts, each cut to the length that is read: four to a token."""
    seconds, most = run.task.train.pairs or [""] * run.num_rows, 4 * run.max_length
    most *= 2 if run.spec.head.has_towers else 1
    return sum(min(len(a) + len(b), most) for a, b in zip(run.task.train.texts, seconds, strict=True))


class _Steps:
    """Time per epoch, estimated from steps of several widths: time grows with padded tokens."""

    def __init__(self, member: Member, quantiles: Sequence[float], device: torch.device) -> None:
        train = member.run.config.train
        batches = epoch_batches(member.train.lengths, train.batch_size, train.seed, 0, bucket=train.bucket or 1)
        self._member, self._device = member, device
        self._tokens = np.array([len(batch) * member.train.lengths[batch].max() for batch in batches], dtype=float)
        order = np.argsort(self._tokens, kind="stable")
        self._heaviest = int(order[-1])
        self._sample = sorted({int(order[int(q * (len(order) - 1))]) for q in quantiles})

    def estimate_epoch(self, cohort: Cohort) -> tuple[float, float]:
        """Estimate the seconds of an epoch's steps, and of the frozen layers in them, which training computes once."""
        member, once_seconds = self._member, 0.0
        epoch_seconds = self.estimate(cohort.step)
        if member.is_reusing:
            once_seconds = self.estimate(lambda: member.prefixes(member.next_batch()))
        return epoch_seconds, once_seconds

    def estimate(self, work: Callable[[], Any]) -> float:
        """Estimate the seconds of `work` for all batches of an epoch, from a few; it finds each at the cursor."""
        self._time_at(self._heaviest, work)  # a warm-up step, which also shows the peak memory
        seconds = np.array([self._time_at(cursor, work) for cursor in self._sample])
        tokens = self._tokens[self._sample]
        if len(set(tokens)) < 2:
            return float(seconds.mean() * len(self._tokens))
        slope, base = np.polyfit(tokens, seconds, 1)
        if slope <= 0:  # time grows with the number of steps alone, or noise hides more
            slope, base = 0.0, seconds.mean()
        elif base < 0:  # noise: fall back on proportion
            slope, base = seconds.sum() / tokens.sum(), 0.0
        return float((base + slope * self._tokens).sum())

    def _time_at(self, cursor: int, work: Callable[[], Any]) -> float:
        self._member.progress.cursor, self._member.progress.status = cursor, ""
        return _timed(work, self._device)


def _make_full_step(member: Member, backbone: Backbone) -> Callable[[], None]:
    """Return a function that takes one step of fine-tuning a copy of the whole backbone."""
    with backbone.turn():
        model = copy.deepcopy(backbone.model).train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step() -> None:
        batch = collate(member.rows(member.next_batch()), backbone.pad_id, backbone.device)
        answers = {} if batch.written_BT is None else {"labels": batch.written_BT}
        outputs = model(input_ids=batch.input_ids_BT, attention_mask=batch.mask_BT, **answers)
        (outputs.logits if answers else outputs.last_hidden_state).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _measure_dev(cohort: Cohort, member: Member, most: int) -> float:
    """Estimate the seconds of scoring all dev rows, from an even sample of at most `most`."""
    chosen = np.unique(np.linspace(0, len(member.dev.ids) - 1, min(most, len(member.dev.ids))).astype(int))
    rows = make_rows(map(member.dev.window, chosen.tolist()), member.slot)
    seconds = _timed(lambda: infer(cohort.bank, rows), cohort.backbone.device)
    return seconds * len(member.dev.ids) / len(rows)


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
