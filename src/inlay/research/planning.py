"""From a study to its work: which runs there are, which of them train together, in which order, at what cost.

Everything that can be refused is refused here, before the first run: data that is missing, a setting that the backbone
cannot take, a run that does not fit in the memory. The most valuable work comes first: one seed of everything in the
order of the study's file, then the next seed, so that a study that is cut short has whole tables of fewer seeds. A
cohort takes its other seeds along; where time is short they are what it leaves out.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inlay.config import RunConfig, digest
from inlay.data import Task, load_task
from inlay.errors import Missing, OutOfMemory, UnknownName
from inlay.research.arms import ARM_KINDS
from inlay.research.study import Arm, Study
from inlay.research.toy import make_toy_task
from inlay.training import Run, make_run
from inlay.training.fit import structure_of

if TYPE_CHECKING:
    from inlay.model import Backbone

# Stacks are as wide as the widest slot: above this size a cohort of its own is cheaper than padding the others to it.
_PADDED_TO = 64


@dataclass(frozen=True, eq=False)
class Item:
    """What becomes one record: an arm's setting on a task with a seed. A sequence has a record for each task."""

    id: str
    arm: Arm
    task: str
    seed: int
    axes: Mapping[str, Any]
    config: RunConfig
    run: Run | None = None
    """what is trained, unless the arm's kind is another"""

    @property
    def cost(self) -> float:
        """Roughly the tokens it reads in training: characters of its texts over four, cut, times epochs."""
        if self.run is None:
            return 0.0
        train, most = self.run.task.train, self.run.max_length
        seconds = train.pairs or [""] * len(train)
        whole = sum(min(2 + (len(a) + len(b)) // 4, most) for a, b in zip(train.texts, seconds, strict=True))
        return float(whole * self.run.config.train.epochs)


@dataclass(frozen=True, eq=False)
class Unit:
    """Work that is done at once: runs that train together, or one piece of another kind."""

    kind: str
    items: tuple[Item, ...]

    @property
    def is_solo(self) -> bool:
        """Whether it trains a copy of the backbone's weights, alone."""
        return any(item.run is not None and item.run.spec.is_solo for item in self.items)

    @property
    def cost(self) -> float:
        """Of its runs, each once: arms may share them."""
        return sum(item.cost for item in {item.id: item for item in self.items}.values())

    @property
    def num_runs(self) -> int:
        """Each once, however many arms it stands in."""
        return len({item.id for item in self.items})

    def take(self, items: Iterable[Item]) -> Unit:
        """The same work with some of its items only."""
        return dataclasses.replace(self, items=tuple(items))

    def describe(self) -> str:
        """Its arms and tasks in a few words."""
        arms = list(dict.fromkeys(item.arm.name for item in self.items))
        tasks = list(dict.fromkeys(item.task for item in self.items))
        first = ", ".join(arms[:3]) + (f" … {arms[-1]}" if len(arms) > 3 else "")
        where = tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"
        seeds = sorted({item.seed for item in self.items})
        which = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
        return f"{first} on {where}, {which}"


@dataclass(frozen=True, eq=False)
class Plan:
    """All work of a study on one backbone, the most valuable first."""

    study: Study
    tasks: Mapping[str, Task]
    units: tuple[Unit, ...]
    left_out: tuple[str, ...]
    """what the study has and this plan has not, and why"""

    @property
    def items(self) -> list[Item]:
        return [item for unit in self.units for item in unit.items]


def load_tasks(study: Study, root: str | None, *, skip_missing: bool = False) -> tuple[dict[str, Task], dict[str, str]]:
    """The tasks of a study by name, and why those that are not at hand are not.

    Refuses a study whose data is missing, naming all of it, unless it may be skipped; and one that has none at all.
    """
    root = root or os.environ.get("INLAY_DATA")
    tasks, missing = {}, {}
    for name in study.tasks:
        config = study.data_config(name, root)
        try:
            tasks[name] = make_toy_task(name, config) if study.is_toy else load_task(config, name)
        except (Missing, UnknownName) as error:
            missing[name] = error.message
    if missing and not (skip_missing and tasks):
        reasons = "; ".join(f"`{name}`: {reason}" for name, reason in missing.items())
        hint = (
            "give the folder of the data with `--data-root DIR` or $INLAY_DATA"
            if not tasks
            else "put it there, or leave its columns out with `--skip-missing`"
        )
        raise Missing(f"study `{study.name}` lacks {len(missing)} of {len(study.tasks)} data sets: {reasons}", hint)
    return tasks, missing


def plan_study(study: Study, backbone: Backbone, tasks: Mapping[str, Task], missing: Mapping[str, str]) -> Plan:
    """Make every run of a study, put together those that train together, and order them."""
    num_layers = backbone.anatomy.num_layers
    too_deep = [arm.name for arm in study.arms.values() if arm.min_layers > num_layers]
    left_out = [f"{name}: {reason}" for name, reason in missing.items()]
    if too_deep:
        left_out.append(f"{', '.join(too_deep)}: {backbone.name} has {num_layers} layers")
    items = [
        item
        for arm in study.arms.values()
        if arm.name not in too_deep
        for seed in range(arm.seeds)
        for item in _make_items(study, arm, seed, backbone, tasks)
    ]
    _refuse_too_large(items, backbone)
    return Plan(study, tasks, tuple(_pack(items)), tuple(left_out))


def _make_items(study: Study, arm: Arm, seed: int, backbone: Backbone, tasks: Mapping[str, Task]) -> list[Item]:
    chosen = [task for task in arm.tasks if task in tasks]
    kind = ARM_KINDS[arm.kind]
    if kind.spans_tasks:
        chosen, whole = chosen[:1], [tasks[name].digest for name in chosen]
    items = []
    for name in chosen:
        per_task = None if kind.spans_tasks else study.per_task.get(name)
        for point in arm.points(per_task):
            config = dataclasses.replace(
                point.config,
                task=name,
                train=dataclasses.replace(point.config.train, seed=seed),
                data=study.data_config(name, None),
            )
            if kind.is_trained:
                run = make_run(tasks[name], config, backbone)
                items.append(Item(run.id, arm, name, seed, point.axes, run.config, run))
                continue
            data = whole if kind.spans_tasks else tasks[name].digest
            settings = [arm.kind, dataclasses.asdict(config.method), dataclasses.asdict(config.train), data]
            fingerprint = backbone.fingerprint if kind.spans_tasks else ""
            items.append(Item(digest([*settings, fingerprint])[:16], arm, name, seed, point.axes, config))
    return items


def _pack(items: Sequence[Item]) -> list[Unit]:
    """Items as units of work: seed by seed, and within a seed in the order of the arms.

    What can share a cohort is one unit, with all its seeds, where its first seed would be: more of it costs little.
    """
    groups: dict[tuple[Any, ...], list[Item]] = {}
    for item in sorted(items, key=lambda item: item.seed):
        if item.run is None:
            key: tuple[Any, ...] = (item.arm.kind, item.id)
        else:
            key = ("runs", structure_of(item.run), max(_PADDED_TO, item.config.method.size or 0))
        groups.setdefault(key, []).append(item)
    return [Unit(key[0], tuple(group)) for key, group in groups.items()]


def _refuse_too_large(items: Sequence[Item], backbone: Backbone) -> None:
    """Refuse a run whose parameters alone, in training, are more than the memory that is free."""
    from inlay.training.memory import available_bytes, count_slot_bytes, describe_bytes

    free = available_bytes(backbone.device)
    if free is None:
        return
    seen = set()
    for item in items:
        if item.run is None or (structure := (item.arm.name, item.config.method)) in seen:
            continue
        seen.add(structure)
        needed = count_slot_bytes([item.run], backbone)
        if needed > free:
            raise OutOfMemory(
                f"a run of arm `{item.arm.name}` takes {describe_bytes(needed)} for its parameters in training, and "
                f"{describe_bytes(free)} are free on `{backbone.device}`",
                "leave it out (`--arms` names those to run), or take a smaller `--backbone`",
            )


@dataclass(frozen=True)
class Estimate:
    """What a unit will take, from a few measured steps of one of its kind."""

    seconds: float
    memory_bytes: int
    """of the slots in training, with their optimizer, and the passes of the measured steps"""
    num_slots: int


# Runs together -> times the rows per second of one run alone, as measured on an H200 (DESIGN.md); a CPU gains nothing.
_GAIN = {"cuda": {1: 1.0, 8: 2.6, 32: 3.1}, "cpu": {1: 1.0}}


def estimate_units(units: Sequence[Unit], backbone: Backbone) -> list[Estimate]:
    """Time and memory of each unit: steps of the cheapest run are measured, the others follow by their texts.

    Work that trains nothing in cohorts (a baseline, a sequence) is not counted.
    """
    from inlay.training.memory import MAX_COHORT, available_bytes, choose_slots, count_slot_bytes
    from inlay.training.plan import make_plan

    runs = [item for unit in units for item in unit.items if item.run is not None]
    if not runs:
        return [Estimate(0.0, 0, 0) for _ in units]
    cheapest = min(runs, key=lambda item: (item.run is not None and item.run.spec.is_solo, item.cost))
    assert cheapest.run is not None
    made = make_plan(cheapest.run, backbone)
    costs = {False: made.inlay, True: made.full if not cheapest.run.spec.is_solo else made.inlay}
    estimates = []
    for unit in units:
        trained = [item.run for item in unit.items if item.run is not None]
        if not trained:
            estimates.append(Estimate(0.0, 0, 0))
            continue
        slot_bytes = count_slot_bytes(trained, backbone)
        num_slots = choose_slots(min(MAX_COHORT, unit.num_runs), slot_bytes, available_bytes(backbone.device))
        gain = max(value for size, value in _GAIN[backbone.device.type].items() if size <= max(1, num_slots))
        measured = costs[unit.is_solo]
        seconds = unit.cost * measured.seconds / max(cheapest.cost, 1.0) / gain
        estimates.append(Estimate(seconds, num_slots * slot_bytes + measured.peak_memory_bytes, num_slots))
    return estimates
