"""Runs of several tasks: a slot for each, parameters that they share, one schedule, one choice of the best epoch.

A `JointRun` is to `fit` what a `Run` is; each of its `parts` is an ordinary run's task with its own rows and head. An
epoch is as many steps as the rows of all tasks need, or the part of
`joint.steps` between two scores; which tasks and rows a step sees follows from seed and step (`data/sampling.py`).

What always holds: a task's own parameters move only in steps that have rows of it, and dev rows are never trained on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from inlay.data import MEAN, METRICS, Task, keep_places
from inlay.errors import BadConfig, WrongBackbone
from inlay.model import JOINT_METHODS, Anatomy, Backbone, SlotSpec, TensorSpec, find_head, find_method
from inlay.settings import DataConfig, JointConfig, RunConfig, TrainConfig, digest, settled
from inlay.training.run.run import Run, make_part
from inlay.training.run.start import Start


@dataclass(frozen=True, eq=False)
class JointRun:
    """Several tasks and resolved settings on one backbone. Make it with `make_joint_run`."""

    name: str
    parts: tuple[Run, ...]
    config: RunConfig
    start: Start = field(default_factory=Start)

    metric = MEAN

    @cached_property
    def id(self) -> str:
        return identify_joint([(part.name, part.id) for part in self.parts], self.config.joint, self.start.lineage)

    @property
    def spec(self) -> SlotSpec:
        """The slot of the first task: all tasks have one method."""
        return self.parts[0].spec

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @property
    def num_steps(self) -> int:
        return count_joint_steps(self.num_rows, self.config)

    def layout(self, anatomy: Anatomy) -> list[TensorSpec]:
        """List all its tensors: shared ones once, each task's own under the task's name."""
        shared = [item for item in self.spec.layout(anatomy) if item.is_shared]
        return shared + [
            dataclasses.replace(item, name=f"{part.name}/{item.name}")
            for part in self.parts
            for item in part.spec.layout(anatomy)
            if not item.is_shared
        ]


def identify_joint(parts: Sequence[tuple[str, str]], joint: JointConfig, lineage: Sequence[Mapping[str, Any]]) -> str:
    """Return the id of a multi-task run, from each task's name and the id of its part."""
    return digest({"parts": parts, "joint": settled(joint), "start": lineage})[:16]


def count_joint_steps(num_rows: int, config: RunConfig) -> int:
    """Return the steps of a run over so many rows (or windows) of all its tasks together."""
    return config.joint.steps or -(-num_rows // config.train.batch_size) * config.train.num_epochs


def make_joint_run(
    tasks: Sequence[Task],
    config: RunConfig,
    backbone: Backbone,
    name: str = "joint",
    *,
    start: Start = Start(),
    data: Sequence[DataConfig] = (),
) -> JointRun:
    """Resolve every `auto` of `config` for these tasks and the backbone, and check that they go together.

    `data` says of every task where its rows were, so that the finished run can find them again.
    """
    _check_tasks(tasks, config)
    _check_train(config.train)
    _check_backbone(start, backbone)
    # Record what is done: rows are drawn from all rows of a task, on padded backbones too.
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, bucket=1))
    sources = [keep_places(source) for source in data or [config.data] * len(tasks)]
    parts = tuple(
        make_part(task, dataclasses.replace(config, data=source, train=_train_of(task, tasks, config.train)), backbone)
        for task, source in zip(tasks, sources, strict=True)
    )
    # Settings that suit one kind of task stay that task's: given as asked, they are resolved the same way again.
    train = dataclasses.replace(parts[0].config.train, **{each: getattr(config.train, each) for each in _BY_TASK})
    resolved = dataclasses.replace(parts[0].config, task=name, data=config.data, train=train)
    if len(tasks) > 1 and config.train.prompt is not None and find_method(config.method.name).shares_all:
        raise BadConfig(
            f"`train.prompt` is `{config.train.prompt}` for all tasks of `{config.method.name}`, which nothing but a "
            "prompt of its own tells apart",
            "leave it out: each task's is then its name and a colon",
        )
    run = JointRun(name, parts, resolved, start)
    if not any(item.is_shared for item in run.layout(backbone.anatomy)):
        method = resolved.method
        raise BadConfig(
            f"with `method.inner_norm` `{method.inner_norm}` and `method.norms` `{method.norms}` the tasks of "
            f"`{method.name}` share nothing, so they cannot be one run",
            "leave one of these settings as it is, or train each task by itself: `inlay train --method houlsby`",
        )
    if config.joint.trained == "task" and all(item.is_shared for item in run.layout(backbone.anatomy)):
        raise BadConfig(
            f"`joint.trained` is `task`, but with `{config.method.name}` on `{backbone.name}` tasks have nothing of "
            "their own",
            "leave out `--trained`, or use another method",
        )
    return run


def _train_of(task: Task, tasks: Sequence[Task], train: TrainConfig) -> TrainConfig:
    """Return the settings of one task; those of generated text go to free-text tasks alone, if there are any."""
    if _is_free_text(task) or not any(map(_is_free_text, tasks)):
        return train
    return dataclasses.replace(train, beams=None, max_answer=None)


def _is_free_text(task: Task) -> bool:
    return find_head(task.kind).reads == "nothing"


_BY_TASK = ("pooling", "max_length", "label_smoothing", "beams", "max_answer", "prompt")


def _check_tasks(tasks: Sequence[Task], config: RunConfig) -> None:
    """Refuse a method of one task, names that cannot be told apart, and metrics that have no mean."""
    if not find_method(config.method.name).is_joint:
        known = ", ".join(JOINT_METHODS)
        raise BadConfig(f"method `{config.method.name}` trains one task at a time", f"of several tasks: {known}")
    if not tasks:
        raise BadConfig("a run of several tasks was given none", "give one task or more")
    names = [task.name for task in tasks]
    twice = next((name for name in names if names.count(name) > 1 or "/" in name), None)
    if twice is not None:
        raise BadConfig(
            f"the tasks of a run are `{', '.join(names)}`", "give each a name of its own, without a slash in it"
        )
    config.joint.check_tasks(names)
    for task in tasks:
        if not METRICS[task.metric].higher_is_better:
            raise BadConfig(
                f"task `{task.name}` has the metric `{task.metric}`, where lower is better: it cannot be averaged with "
                "the others",
                "use a metric where higher is better: `--set data.metric=pearson`",
            )


# Setting of training -> the values allowed in a multi-task run, and the hint for others.
_PLAIN: dict[str, tuple[tuple[object, ...], str]] = {
    "steps": (("epochs",), "leave it out, or say how many steps there are: `--steps N`"),
    "bucket": ((None, 1), "leave it out: rows are drawn from all of a task's, whatever their length"),
    "start": (((),), "start from another run of several tasks: `--from-run RUN`"),
}


def _check_train(train: TrainConfig) -> None:
    for name, (taken, hint) in _PLAIN.items():
        if (value := getattr(train, name)) not in taken:
            shown = ", ".join(value) if isinstance(value, tuple) else value
            raise BadConfig(f"`train.{name}` is `{shown}` for a run of several tasks", hint)


def _check_backbone(start: Start, backbone: Backbone) -> None:
    """Refuse a start that was trained on another backbone: where shapes fit, nothing else would notice."""
    if start.backbone and (start.fingerprint or start.backbone) not in (backbone.fingerprint, backbone.name):
        known = start.fingerprint[:12] or "fingerprint not kept"
        raise WrongBackbone(
            f"cannot start from run `{start.lineage[0]['run']}`: it was trained on the backbone `{start.backbone}` "
            f"({known}), not on `{backbone.name}` ({backbone.fingerprint[:12]})",
            f"use `--backbone {start.backbone}`, or start from a run on `{backbone.name}`",
        )
