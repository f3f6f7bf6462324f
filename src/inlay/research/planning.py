"""From a study to its work: which runs there are, which of them train together, in which order, at what cost.

Everything that can be refused is refused here, before the first run: data that is missing, a setting that the backbone
cannot take, a run that does not fit in the memory. The most valuable work comes first: one seed of everything in the
order of the study's file, then the next seed, so that a study that is cut short has whole tables of fewer seeds. A
cohort takes its other seeds along; where time is short they are what it leaves out.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from inlay.config import DataConfig, RunConfig, digest
from inlay.data import Task, load_task
from inlay.data.sampling import task_shares
from inlay.data.tasks import cut_task, take_sample
from inlay.errors import Missing, OutOfMemory, UnknownName
from inlay.research.arms import ARM_KINDS
from inlay.research.study import Arm, Point, Study
from inlay.research.toy import make_toy_task
from inlay.training import Run, make_run
from inlay.training.fit import structure_of
from inlay.training.joint import AnyRun, JointRun, make_joint_run
from inlay.training.start import Start

if TYPE_CHECKING:
    from inlay.model import Backbone

# Stacks are as wide as the widest slot: above this size a cohort of its own is cheaper than padding the others to it.
_PADDED_TO = 64


@dataclass(frozen=True, eq=False)
class Item:
    """What becomes one record: an arm's setting on a task with a seed. A sequence, or a run of several tasks, has a
    record for each task."""

    id: str
    arm: Arm
    task: str
    """the first one, where there are several"""
    seed: int
    axes: Mapping[str, Any]
    config: RunConfig
    run: AnyRun | None = None
    """what is trained, unless the arm's kind is another"""
    tasks: tuple[str, ...] = ()
    """of a run of several tasks, as the study names them"""
    source: JointRun | None = None
    """the run of another study whose weights it goes on from"""

    @cached_property
    def cost(self) -> float:
        """Roughly the tokens it reads in training: characters of its texts over four, cut, times epochs or steps."""
        if self.run is None:
            return 0.0
        if isinstance(self.run, JointRun):
            parts, config = self.run.parts, self.run.config
            shares = task_shares([len(part.task.train) for part in parts], config.joint)
            length = sum(share * _count_tokens(part) / part.num_rows for share, part in zip(shares, parts, strict=True))
            return float(length * config.train.batch_size * self.run.num_steps)
        return float(_count_tokens(self.run) * self.run.config.train.epochs)


def _count_tokens(run: Run) -> int:
    train, most = run.task.train, run.max_length
    seconds = train.pairs or [""] * len(train)
    return sum(min(2 + (len(a) + len(b)) // 4, most) for a, b in zip(train.texts, seconds, strict=True))


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
        tasks = list(dict.fromkeys(task for item in self.items for task in item.tasks or (item.task,)))
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

    Those of studies that it goes on from are there as `STUDY:TASK`. Refuses a study whose data is missing, naming all
    of it, unless it may be skipped; and one that has none at all.
    """
    root = find_root(root)
    tasks, missing = {}, {}
    for owner, prefix in [(study, ""), *((source, f"{name}:") for name, source in study.sources.items())]:
        for name in owner.tasks:
            config = owner.data_config(name, root)
            try:
                found = make_toy_task(name, config) if owner.is_toy else load_task(config, name)
                tasks[prefix + name] = cut_task(found, owner.most_rows)
            except (Missing, UnknownName) as error:
                missing[prefix + name] = error.message
    if missing and not (skip_missing and tasks):
        reasons = "; ".join(f"`{name}`: {reason}" for name, reason in missing.items())
        hint = (
            "give the folder of the data with `--data-root DIR` or $INLAY_DATA"
            if not tasks
            else "put it there, or leave its columns out with `--skip-missing`"
        )
        num_tasks = len(tasks) + len(missing)
        raise Missing(f"study `{study.name}` lacks {len(missing)} of {num_tasks} data sets: {reasons}", hint)
    return tasks, missing


def find_root(root: str | None) -> str | None:
    """The folder of the data sets, whole: that given, or $INLAY_DATA."""
    given = root or os.environ.get("INLAY_DATA")
    return None if given is None else os.path.abspath(given)


def plan_study(
    study: Study,
    backbone: Backbone,
    tasks: Mapping[str, Task],
    missing: Mapping[str, str],
    *,
    root: str | None = None,
) -> Plan:
    """Make every run of a study, put together those that train together, and order them.

    `root` is where `load_tasks` found the tasks: a run keeps where its rows are.
    """
    num_layers = backbone.anatomy.num_layers
    too_deep = [arm.name for arm in study.arms.values() if arm.min_layers > num_layers]
    left_out = [f"{name}: {reason}" for name, reason in missing.items()]
    if too_deep:
        left_out.append(f"{', '.join(too_deep)}: {backbone.name} has {num_layers} layers")
    maker = _Maker(study, backbone, tasks, find_root(root))
    left_out += maker.list_too_small()
    items = [
        item
        for arm in study.arms.values()
        if arm.name not in too_deep
        for seed in range(arm.seeds)
        for item in maker.make(arm, seed)
    ]
    _refuse_too_large(items, backbone)
    return Plan(study, tasks, tuple(_pack(items)), tuple(left_out))


class _Maker:
    """Makes the items of a study."""

    def __init__(self, study: Study, backbone: Backbone, tasks: Mapping[str, Task], root: str | None) -> None:
        self._study, self._backbone, self._tasks, self._root = study, backbone, tasks, root
        self._samples: dict[tuple[str, int, int], Task] = {}
        self._sources: dict[str, JointRun] = {}

    def make(self, arm: Arm, seed: int) -> list[Item]:
        """All items of an arm with one seed."""
        kind = ARM_KINDS[arm.kind]
        chosen = [task for task in arm.tasks if task in self._tasks and not self._is_too_small(arm, task)]
        if kind.spans_tasks:
            return [self._make(arm, seed, chosen, point) for point in arm.points() if chosen]
        points = [(task, point) for task in chosen for point in arm.points(self._study.per_task.get(task))]
        return [self._make(arm, seed, [task], point) for task, point in points]

    def list_too_small(self) -> list[str]:
        """The tasks that have fewer rows than an arm of them takes samples, in words."""
        found: dict[str, list[str]] = {}
        for arm in self._study.arms.values():
            for task in arm.tasks:
                if task in self._tasks and self._is_too_small(arm, task):
                    found.setdefault(task, []).append(arm.name)
        return [
            f"{', '.join(arms)} on {task}: it has {len(self._tasks[task].train):,} training rows"
            for task, arms in found.items()
        ]

    def _is_too_small(self, arm: Arm, task: str) -> bool:
        return arm.kind == "single" and arm.sample is not None and len(self._tasks[task].train) < arm.sample

    def _find_data(self, task: str, sample: int | None = None, seed: int = 0) -> DataConfig:
        """Where a run finds a task's rows again, and which of them; made-up ones are nowhere."""
        config = self._study.data_config(task, None if self._study.is_toy else self._root)
        most = self._study.most_rows
        config = dataclasses.replace(config, most_dev=most.get("dev"), most_test=most.get("test"))
        return config if sample is None else dataclasses.replace(config, sample=sample, sample_seed=seed)

    def _make(self, arm: Arm, seed: int, names: Sequence[str], point: Point) -> Item:
        kind, name = ARM_KINDS[arm.kind], names[0]
        config = dataclasses.replace(
            point.config,
            task=name,
            train=dataclasses.replace(point.config.train, seed=seed),
            data=self._find_data(name),
        )
        if kind.is_joint:
            return self._join(arm, config, names, point)
        if kind.is_trained:
            run = make_run(self._tasks[name], config, self._backbone)
            return Item(run.id, arm, name, seed, point.axes, run.config, run)
        data = [self._tasks[each].digest for each in names] if kind.spans_tasks else self._tasks[name].digest
        settings = [arm.kind, dataclasses.asdict(config.method), dataclasses.asdict(config.train), data]
        fingerprint = self._backbone.fingerprint if kind.spans_tasks else ""
        return Item(digest([*settings, fingerprint])[:16], arm, name, seed, point.axes, config)

    def _join(self, arm: Arm, config: RunConfig, names: Sequence[str], point: Point) -> Item:
        """A run of several tasks, or of one by the same rules; where it goes on from another, that one too."""
        seed = config.train.seed
        source = self._find_source(arm.source) if arm.source else None
        if source is not None:
            like = tuple(f"{shorten(name)}={self._study.like[name]}" for name in names if name in self._study.like)
            config = dataclasses.replace(config, joint=dataclasses.replace(config.joint, start=source.id, like=like))
        tasks = [self._sample(name, arm.sample, seed) for name in names]
        data = [self._find_data(name, arm.sample, seed) for name in names]
        start = Start() if source is None else Start(lineage=({"run": source.id},))
        run = make_joint_run(tasks, config, self._backbone, start=start, data=data)
        return Item(run.id, arm, names[0], seed, point.axes, run.config, run, tuple(names), source)

    def _sample(self, name: str, num_rows: int | None, seed: int) -> Task:
        """A task under the name it has in runs of several, with so many of its rows."""
        key = (name, num_rows or 0, seed if num_rows else 0)
        if key not in self._samples:
            task = self._tasks[name]
            sampled = task if num_rows is None else take_sample(task, num_rows, seed)
            self._samples[key] = dataclasses.replace(sampled, name=shorten(name))
        return self._samples[key]

    def _find_source(self, source: str) -> JointRun:
        """The run that `STUDY/ARM` is: its first setting, with the first seed."""
        if source not in self._sources:
            name, _, arm = source.partition("/")
            study = self._study.sources[name]
            own = {
                key.removeprefix(f"{name}:"): task for key, task in self._tasks.items() if key.startswith(f"{name}:")
            }
            found = _Maker(study, self._backbone, own, self._root).make(study.arms[arm], 0)
            assert isinstance(found[0].run, JointRun)
            self._sources[source] = found[0].run
        return self._sources[source]


def shorten(task: str) -> str:
    """The name of a study's task in a run of several, where it names tensors: without the set it is of."""
    return task.rpartition("/")[2]


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

    measure = _Measure(units, backbone)
    estimates = []
    for unit in units:
        trained = [item.run for item in unit.items if item.run is not None]
        if not trained:
            estimates.append(Estimate(0.0, 0, 0))
            continue
        slot_bytes = count_slot_bytes(trained, backbone)
        num_slots = choose_slots(min(MAX_COHORT, unit.num_runs), slot_bytes, available_bytes(backbone.device))
        known = _GAIN[backbone.device.type]
        gain = float(np.interp(math.log(max(1, num_slots)), [math.log(size) for size in known], list(known.values())))
        rate, peak = measure.of(unit)
        estimates.append(Estimate(unit.cost * rate / gain, num_slots * slot_bytes + peak, num_slots))
    return estimates


class _Measure:
    """Seconds per unit of cost, and memory, from a few steps of the cheapest run of a kind; each kind once."""

    def __init__(self, units: Sequence[Unit], backbone: Backbone) -> None:
        self._items = [item for unit in units for item in unit.items if item.run is not None]
        self._backbone = backbone
        self._known: dict[tuple[bool, bool], tuple[float, int]] = {}

    def of(self, unit: Unit) -> tuple[float, int]:
        """What a unit's runs take."""
        is_joint = isinstance(unit.items[0].run, JointRun)
        key = (is_joint, unit.is_solo)
        if key not in self._known:
            self._known |= self._measure_joint(unit) if is_joint else self._measure_runs()
        return self._known[key]

    def _measure_runs(self) -> dict[tuple[bool, bool], tuple[float, int]]:
        from inlay.training.plan import make_plan

        runs = [item for item in self._items if isinstance(item.run, Run)]
        cheapest = min(runs, key=lambda item: (item.run is not None and item.run.spec.is_solo, item.cost))
        assert isinstance(cheapest.run, Run)
        made = make_plan(cheapest.run, self._backbone)
        costs = {False: made.inlay, True: made.full if not cheapest.run.spec.is_solo else made.inlay}
        return {
            (False, is_solo): (cost.seconds / max(cheapest.cost, 1.0), cost.peak_memory_bytes)
            for is_solo, cost in costs.items()
        }

    def _measure_joint(self, unit: Unit) -> dict[tuple[bool, bool], tuple[float, int]]:
        from inlay.training.plan import measure_joint

        item = min(unit.items, key=lambda item: item.cost)
        assert isinstance(item.run, JointRun)
        seconds, peak_bytes = measure_joint(item.run, self._backbone)
        return {(True, unit.is_solo): (seconds / max(item.cost, 1.0), peak_bytes)}
