"""Plans the runs of a study: which runs there are, their settings, and roughly their cost.

Whatever cannot be done is refused here, before the first run: missing data, a setting that the backbone does not
support, a run that does not fit in the memory. `run/session.py` decides what trains together and in which order.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from inlay.data import Split, Task, cut_task, load_task, take_sample, task_shares
from inlay.errors import Missing, OutOfMemory, UnknownName
from inlay.model import find_method
from inlay.settings import DataConfig, RunConfig, digest
from inlay.studies.spec.study import ARM_KINDS, Arm, Point, Study, bare_name
from inlay.studies.spec.toy import make_toy_task
from inlay.training import ANSWERED, AnyRun, JointRun, Run, Start, make_joint_run, make_run

if TYPE_CHECKING:
    from inlay.model import Backbone

_USUAL_LENGTH = 128


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A run that a study asks for: an arm's setting on a task with a seed.

    A run of several tasks, together or in sequence, has a record for each task.
    """

    id: str
    study: str
    arm: Arm
    task: str
    """the task, or the first of several"""
    seed: int
    axes: Mapping[str, Any]
    config: RunConfig
    run: AnyRun | None = None
    """the run to train; None for other kinds of arms"""
    tasks: tuple[str, ...] = ()
    """the tasks of a multi-task run, as the study names them"""
    source: JointRun | None = None
    """the run of another study whose weights it starts from"""
    sequence: tuple[Task, ...] = ()
    """the tasks of a sequence, in order"""

    @property
    def key(self) -> tuple[str, str, str]:
        """The key that tells the items of several plans apart."""
        return (self.study, self.id, self.arm.name)

    @property
    def all_tasks(self) -> tuple[str, ...]:
        """All tasks it is trained on, as the study names them."""
        return self.tasks or tuple(task.name for task in self.sequence) or (self.task,)

    @property
    def tier(self) -> int:
        """The priority: 0 for the first seed with the arm's first, best-known learning rate; later ones are higher."""
        rates = list(self.arm.axes.get("lr", ()))
        return self.seed + (rates.index(self.axes["lr"]) if self.axes.get("lr") in rates else 0)

    @property
    def is_finetuned(self) -> bool:
        """Whether it trains a copy of the backbone's weights."""
        return ARM_KINDS[self.arm.kind].needs_backbone and find_method(self.config.method.name).is_finetuned

    @property
    def _trained_tasks(self) -> tuple[Task, ...]:
        return (self.run.task,) if isinstance(self.run, Run) else self.sequence

    @property
    def num_samples(self) -> int:
        """Number of training rows, counted as often as they are read."""
        if isinstance(self.run, JointRun):
            return self.run.config.train.batch_size * self.run.num_steps
        return sum(len(task.train) for task in self._trained_tasks) * self.config.train.num_epochs

    @cached_property
    def cost(self) -> float:
        """Rough number of tokens it reads in training: characters divided by four, cut, times epochs or steps.

        Dev rows are read once an epoch, and count by the time of answering relative to training (ANSWERED).
        """
        epochs = self.config.train.num_epochs
        if isinstance(self.run, JointRun):
            parts, config = self.run.parts, self.run.config
            shares = task_shares([len(part.task.train) for part in parts], config.joint)
            lengths = [_count_tokens(part.task.train, part.max_length) / part.num_rows for part in parts]
            length = sum(share * each for share, each in zip(shares, lengths, strict=True))
            dev = sum(_count_tokens(part.task.dev, part.max_length) for part in parts)
            return float(length * self.num_samples + ANSWERED * epochs * dev)
        most = self.run.max_length if self.run is not None else self.config.train.max_length or _USUAL_LENGTH
        read = sum(
            _count_tokens(task.train, most) + ANSWERED * _count_tokens(task.dev, most) for task in self._trained_tasks
        )
        return float(read * epochs)


@functools.lru_cache(maxsize=512)
def _count_tokens(split: Split, most: int) -> int:
    seconds = split.pairs or [""] * len(split)
    return sum(min(2 + (len(a) + len(b)) // 4, most) for a, b in zip(split.texts, seconds, strict=True))


@dataclass(frozen=True, eq=False)
class StudyPlan:
    """All runs of a study on one backbone."""

    study: Study
    backbone: Backbone
    tasks: Mapping[str, Task]
    items: tuple[PlannedRun, ...]
    left_out: tuple[str, ...]
    """parts of the study that the plan leaves out, with the reason"""


def load_tasks(
    study: Study, root: str | None, *, skip_missing: bool = False, known: dict[Any, Task] | None = None
) -> tuple[dict[str, Task], dict[str, str]]:
    """Load the tasks of a study by name; return them and the reasons for those that are missing.

    Tasks of studies that it starts from are named `STUDY:TASK`. A study with missing data is refused, with a list of
    all of it, unless `skip_missing` is set and there is some data. `known` has tasks that other studies have loaded;
    newly loaded ones are added to it.
    """
    # 1. the study's own tasks, then those of the studies it starts from
    root, known = find_root(root), {} if known is None else known
    tasks, missing = {}, {}
    for owner, prefix in [(study, ""), *((source, f"{name}:") for name, source in study.sources.items())]:
        for name in owner.tasks:
            config = owner.data_config(name, root)
            try:
                if (key := (name, config, owner.is_toy)) not in known:
                    known[key] = make_toy_task(name, config) if owner.is_toy else load_task(config, name)
                tasks[prefix + name] = cut_task(known[key], owner.most_rows)
            except (Missing, UnknownName) as error:
                missing[prefix + name] = error.message
    # 2. refuse missing data, all of it in one message
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
    """Return the absolute folder of the data sets: the one given, or $INLAY_DATA."""
    given = root or os.environ.get("INLAY_DATA")
    return None if given is None else os.path.abspath(given)


def plan_study(
    study: Study,
    backbone: Backbone,
    tasks: Mapping[str, Task],
    missing: Mapping[str, str],
    *,
    root: str | None = None,
) -> StudyPlan:
    """Make every run of a study.

    `root` is the folder in which `load_tasks` found the tasks, as a run stores the path of its rows.
    """
    # 1. list what is left out, and why
    num_layers = backbone.anatomy.num_layers
    too_deep = [arm.name for arm in study.arms.values() if arm.min_layers > num_layers]
    left_out = [f"{name}: {reason}" for name, reason in missing.items()]
    if too_deep:
        left_out.append(f"{', '.join(too_deep)}: {backbone.name} has {num_layers} layers")
    maker = _Maker(study, backbone, tasks, find_root(root))
    too_small: dict[str, list[str]] = {}
    for arm in study.arms.values():
        for task in arm.tasks:
            if task in tasks and maker.is_too_small(arm, task):
                too_small.setdefault(task, []).append(arm.name)
    for task, arms in too_small.items():
        left_out.append(f"{', '.join(arms)} on {task}: it has {len(tasks[task].train):,} training rows")
    # 2. every arm with every seed
    items = [
        item
        for arm in study.arms.values()
        if arm.name not in too_deep
        for seed in range(arm.seeds)
        for item in maker.make(arm, seed)
    ]
    _refuse_too_large(items, backbone)
    return StudyPlan(study, backbone, tasks, tuple(items), tuple(left_out))


class _Maker:
    """Makes the items of a study."""

    def __init__(self, study: Study, backbone: Backbone, tasks: Mapping[str, Task], root: str | None) -> None:
        self._study, self._backbone, self._tasks, self._root = study, backbone, tasks, root
        self._samples: dict[tuple[str, int, int], Task] = {}
        self._sources: dict[str, JointRun] = {}

    def make(self, arm: Arm, seed: int) -> list[PlannedRun]:
        """Make all items of an arm with one seed."""
        kind = ARM_KINDS[arm.kind]
        chosen = [task for task in arm.tasks if task in self._tasks and not self.is_too_small(arm, task)]
        if kind.spans_tasks:
            return [self._make(arm, seed, chosen, point) for point in arm.points() if chosen]
        points = [(task, point) for task in chosen for point in arm.points(self._study.per_task.get(task))]
        return [self._make(arm, seed, [task], point) for task, point in points]

    def is_too_small(self, arm: Arm, task: str) -> bool:
        """Tell whether a task has fewer rows than an arm's sample needs."""
        return arm.kind == "single" and arm.sample is not None and len(self._tasks[task].train) < arm.sample

    def _find_data(self, task: str, sample: int | None = None, seed: int = 0) -> DataConfig:
        """Return the data settings by which a run finds a task's rows again; generated rows have no folder."""
        config = self._study.data_config(task, None if self._study.is_toy else self._root)
        most = self._study.most_rows
        most_dev, most_test = most.get("dev", config.most_dev), most.get("test", config.most_test)
        config = dataclasses.replace(config, most_dev=most_dev, most_test=most_test)
        return config if sample is None else dataclasses.replace(config, sample=sample, sample_seed=seed)

    def _make(self, arm: Arm, seed: int, names: Sequence[str], point: Point) -> PlannedRun:
        # 1. the settings of this task and seed
        kind, name = ARM_KINDS[arm.kind], names[0]
        config = dataclasses.replace(
            point.config,
            task=name,
            train=dataclasses.replace(point.config.train, seed=seed),
            data=self._find_data(name),
        )
        # 2. runs that are trained
        if kind.is_joint:
            return self._join(arm, config, names, point)
        if kind.is_trained:
            run = make_run(self._tasks[name], config, self._backbone)
            return PlannedRun(run.id, self._study.name, arm, name, seed, point.axes, run.config, run)
        # 3. baselines and sequences, with an id made of settings and data
        content: list[Any] = [arm.kind, dataclasses.asdict(config.method), dataclasses.asdict(config.train)]
        sequence = tuple(self._tasks[each] for each in names) if kind.spans_tasks else ()
        if kind.spans_tasks:
            content += [[task.digest for task in sequence], self._backbone.fingerprint]
        else:
            content += [self._tasks[name].digest, ""]
        run_id = digest(content)[:16]
        return PlannedRun(run_id, self._study.name, arm, name, seed, point.axes, config, sequence=sequence)

    def _join(self, arm: Arm, config: RunConfig, names: Sequence[str], point: Point) -> PlannedRun:
        """Make a multi-task run, or a run of one task by the same rules, and find the run it starts from, if any."""
        seed = config.train.seed
        source = self._find_source(arm.source) if arm.source else None
        if source is not None:
            like = tuple(f"{bare_name(name)}={self._study.like[name]}" for name in names if name in self._study.like)
            config = dataclasses.replace(config, joint=dataclasses.replace(config.joint, start=source.id, like=like))
        tasks = [self._sample(name, arm.sample, seed) for name in names]
        data = [self._find_data(name, arm.sample, seed) for name in names]
        start = Start() if source is None else Start(lineage=({"run": source.id},))
        run = make_joint_run(tasks, config, self._backbone, start=start, data=data)
        about = (run.id, self._study.name, arm, names[0], seed, point.axes)
        return PlannedRun(*about, run.config, run, tasks=tuple(names), source=source)

    def _sample(self, name: str, num_rows: int | None, seed: int) -> Task:
        """Return a task with its name in multi-task runs, and a sample of its rows."""
        key = (name, num_rows or 0, seed if num_rows else 0)
        if key not in self._samples:
            task = self._tasks[name]
            sampled = task if num_rows is None else take_sample(task, num_rows, seed)
            self._samples[key] = dataclasses.replace(sampled, name=bare_name(name))
        return self._samples[key]

    def _find_source(self, source: str) -> JointRun:
        """Find the run that `STUDY/ARM` names: its first setting, with the first seed."""
        if source not in self._sources:
            name, _, arm = source.partition("/")
            study = self._study.sources[name]
            own = {task: self._tasks[f"{name}:{task}"] for task in study.tasks if f"{name}:{task}" in self._tasks}
            run = _Maker(study, self._backbone, own, self._root).make(study.arms[arm], 0)[0].run
            assert isinstance(run, JointRun)
            self._sources[source] = run
        return self._sources[source]


def _refuse_too_large(items: Sequence[PlannedRun], backbone: Backbone) -> None:
    """Refuse a run whose parameters alone, in training, exceed the free memory."""
    from inlay.training import available_bytes, count_slot_bytes, describe_bytes

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
