"""Runs of several tasks: a slot for each, shared parameters, one schedule, one choice of the best epoch.

A `JointRun` is to `fit` what a `Run` is; each of its `parts` is an ordinary run's task with its own rows and head. An
epoch is as many steps as the rows of all tasks need, or the part of `joint.steps` between two scores; which tasks and
rows a step sees follows from seed and step (`data/sampling.py`).

What always holds: a task's own parameters move only in steps that have rows of it, and dev rows are never trained on.

A finished run is materialised: generated and shared weights become each task's own. Afterwards each task is an
ordinary slot, defined by its weights; store and engine need not know where it came from. A new task may start where a
run of several ended: on the parameters its tasks share, with an embedding of its own, fresh or that of a similar task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inlay.data import MEAN, METRICS, Task, use_whole_paths
from inlay.errors import BadConfig, BadData, Diverged, Missing, UnknownName, WrongBackbone
from inlay.model import (
    JOINT_METHODS,
    Anatomy,
    Backbone,
    SlotSpec,
    TensorSpec,
    find_head,
    find_method,
    make_expander,
    materialized_method,
    resolve_method,
)
from inlay.model import head as head_part
from inlay.settings import DataConfig, JointConfig, MethodConfig, RunConfig, digest, read_toml, settled
from inlay.store import Store
from inlay.training.run.make_run import make_part
from inlay.training.run.run import Result, Run, Trained, describe_config
from inlay.training.run.run_folder import DIGEST, JOINT_TASKS, WEIGHTS, damaged, read_fingerprint, read_finished
from inlay.training.run.start import Start, reads_alike, take_head

_SETTINGS = "config.toml"


@dataclass(frozen=True, eq=False)
class JointRun:
    """Several tasks and resolved settings on one backbone. Make it with `make_joint_run`.

    >>> [part.name for part in inlay.make_joint_run([task, other], backbone, size=4).parts]
    ['mood', 'other']
    """

    name: str
    parts: tuple[Run, ...]
    config: RunConfig
    start: Start = field(default_factory=Start)

    metric = MEAN

    def __repr__(self) -> str:
        names = " + ".join(part.name for part in self.parts)
        return f"JointRun({names}: {describe_config(self.config)}, id {self.id})"

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

    `data` has the data settings of every task, so that the finished run can find its rows again.
    """
    _check_tasks(tasks, config)
    for setting, (taken, hint) in _ALLOWED_SETTINGS.items():
        if (value := getattr(config.train, setting)) not in taken:
            shown = ", ".join(value) if isinstance(value, tuple) else value
            raise BadConfig(f"`train.{setting}` is `{shown}` for a run of several tasks", hint)
    _check_backbone(start, backbone)
    # Rows are drawn from all rows of a task, on padded backbones too: the recorded setting must say so.
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, bucket=1))
    sources = [use_whole_paths(source) for source in data or [config.data] * len(tasks)]
    # Settings of generated text go to free-text tasks alone, if there are any.
    are_free = [find_head(task.kind).reads == "nothing" for task in tasks]
    others = dataclasses.replace(config.train, beams=None, max_answer=None)
    parts = tuple(
        make_part(
            task,
            dataclasses.replace(config, data=source, train=config.train if is_free or not any(are_free) else others),
            backbone,
        )
        for task, source, is_free in zip(tasks, sources, are_free, strict=True)
    )
    # Settings resolved for one kind of task must not become the run's: it keeps them as they were asked for.
    train = dataclasses.replace(
        parts[0].config.train, **{each: getattr(config.train, each) for each in _RESOLVED_BY_TASK}
    )
    resolved = dataclasses.replace(parts[0].config, task=name, data=config.data, train=train)
    if len(tasks) > 1 and config.train.prompt is not None and find_method(config.method.name).shares_all:
        raise BadConfig(
            f"`train.prompt` is `{config.train.prompt}` for all tasks of `{config.method.name}`, which cannot be told "
            "apart without prompts of their own",
            "leave it out: each task's prompt is then its name and a colon",
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


_RESOLVED_BY_TASK = ("pooling", "max_length", "label_smoothing", "beams", "max_answer", "prompt")


def _check_tasks(tasks: Sequence[Task], config: RunConfig) -> None:
    """Refuse a method of one task, names that cannot be told apart, and metrics that have no mean."""
    if not find_method(config.method.name).is_joint:
        hint = f"methods for several tasks: {', '.join(JOINT_METHODS)}"
        raise BadConfig(f"method `{config.method.name}` trains one task at a time", hint)
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
_ALLOWED_SETTINGS: dict[str, tuple[tuple[object, ...], str]] = {
    "steps": (("epochs",), "leave it out, or say how many steps there are: `--steps N`"),
    "bucket": ((None, 1), "leave it out: rows are drawn from all of a task's, whatever their length"),
    "start": (((),), "start from another run of several tasks: `--from-run RUN`"),
}


def _check_backbone(start: Start, backbone: Backbone) -> None:
    """Refuse a start that was trained on another backbone: where shapes fit, nothing else would notice."""
    if start.backbone and (start.fingerprint or start.backbone) not in (backbone.fingerprint, backbone.name):
        known = start.fingerprint[:12] or "fingerprint not kept"
        raise WrongBackbone(
            f"cannot start from run `{start.lineage[0]['run']}`: it was trained on the backbone `{start.backbone}` "
            f"({known}), not on `{backbone.name}` ({backbone.fingerprint[:12]})",
            f"use `--backbone {start.backbone}`, or start from a run on `{backbone.name}`",
        )


def materialize(run: JointRun, result: Result, backbone: Backbone) -> list[Trained]:
    """Return every task of a finished run as an ordinary task, in order: its weights, its scores, its head."""
    if not result.tensors:
        raise Diverged(
            f"run `{run.id}` has no weights to make tasks from: {result.message or result.status}",
            "train it again with a smaller learning rate",
        )
    _check_finite(result)
    origin = {"run": run.id, "method": run.config.method.name, "tasks": [part.name for part in run.parts]}
    return [_materialize_task(part, origin, result, backbone) for part in run.parts]


def _materialize_task(part: Run, origin: Mapping[str, Any], result: Result, backbone: Backbone) -> Trained:
    """Turn one task of a finished run into an ordinary task: its own weights, scores and fitted head."""
    own = f"{part.name}/"
    history = [
        {
            **line,
            "dev": {name.removeprefix(own): value for name, value in line["dev"].items() if name.startswith(own)},
            "head": line["head"].get(part.name, {}),
        }
        for line in result.history
    ]
    best = next((line["dev"][part.metric] for line in history if line["epoch"] == result.best_epoch), None)
    tensors = expand_slot(part, result.tensors, backbone)
    spec = SlotSpec(materialized_method(part.spec.method), part.spec.head)
    config = dataclasses.replace(part.config, method=spec.method.as_config(), joint=JointConfig())
    run = dataclasses.replace(part, config=config, spec=spec, origin=origin)
    return Trained(run, dataclasses.replace(result, history=history, dev_metric=best, tensors=tensors))


def expand_slot(part: Run, tensors: Mapping[str, Tensor], backbone: Backbone) -> dict[str, Tensor]:
    """Return the tensors of a task's ordinary slot, expanded from all tensors the run trained."""
    expander = make_expander(backbone.anatomy, part.spec.method, 1)
    own = Start(dict(tensors)).of(part.name)
    with torch.no_grad():
        written = expander.expand({name: tensor.unsqueeze(0) for name, tensor in own.items()}, (0,))
    whole = own | {name: tensor[0].contiguous() for name, tensor in written.items()}
    wanted = SlotSpec(materialized_method(part.spec.method), part.spec.head).layout(backbone.anatomy)
    return {item.name: whole[item.name].clone() for item in wanted}


def read_materialized(folder: Path, tasks: Sequence[Task], backbone: Backbone) -> list[Trained]:
    """Read tasks of a finished run by name as ordinary tasks, from its folder and their own rows alone.

    Refuses other rows or another backbone.
    """
    # 1. Read the settings of every task, and the digest of its rows.
    result, configs = read_finished(folder), read_parts(folder)
    _check_finite(result)
    run_id, names, known = result.run_id, [config.task for config in configs], configs[0]
    paths = [path.with_suffix(DIGEST) for path in _find_parts(folder)]
    if not all(path.is_file() for path in paths):
        raise Missing(
            f"the folder of run `{folder.name}` does not say which rows its tasks had: an older Inlay wrote it",
            "run its `inlay multitask` command again: the run is not trained again, and all its tasks are published",
        )
    digests = [path.read_text(encoding="utf8").strip() for path in paths]
    # 2. Refuse another backbone than the run's, as far as its folder says which that was, and changed settings.
    wanted = read_fingerprint(folder)
    if wanted and wanted != backbone.fingerprint:
        raise WrongBackbone(
            f"run `{folder.name}` was not trained on backbone `{backbone.name}` ({backbone.fingerprint[:12]}), "
            f"but on `{known.backbone}` ({wanted[:12]})",
            f"use `--backbone {known.backbone}`, or the folder where that backbone is now",
        )
    ids = [config.identify(rows, backbone.fingerprint) for config, rows in zip(configs, digests, strict=True)]
    started = read_toml(folder / _SETTINGS).joint.start
    lineage = () if started is None else ({"run": started},)
    if identify_joint(list(zip(names, ids, strict=True)), known.joint, lineage) != run_id:
        raise WrongBackbone(
            f"run `{run_id}` was not trained on backbone `{backbone.name}`, or its settings were changed since",
            f"its settings say `{known.backbone}`: load that backbone, unchanged",
        )
    # 3. Turn the tasks asked for into ordinary ones.
    origin = {"run": run_id, "method": known.method.name, "tasks": names}
    found = []
    for task in tasks:
        if task.name not in names:
            raise UnknownName("task of the run", task.name, names)
        number = names.index(task.name)
        if task.digest != digests[number]:
            raise BadData(
                f"task `{task.name}`: its rows are not those that run `{run_id}` was trained on",
                f"they were read from `{configs[number].data.source}`; if they are elsewhere now, write "
                f"`inlay materialize {run_id} {task.name}=DATA`",
            )
        found.append(
            _materialize_task(make_part(task, configs[number], backbone, is_trained=True), origin, result, backbone)
        )
    return found


def _check_finite(result: Result) -> None:
    # A diverged run keeps the weights of a better epoch, or none: non-finite weights were changed afterwards.
    for name, tensor in result.tensors.items():
        if not torch.isfinite(tensor).all():
            folder = Path(result.run_id) if result.folder is None else result.folder
            raise damaged(folder / WEIGHTS, f"tensor `{name}` has values that are not finite")


def read_parts(folder: Path) -> list[RunConfig]:
    """Read the settings of every task of a run in order, which include where its rows were."""
    return [read_toml(path) for path in _find_parts(folder)]


def _find_parts(folder: Path) -> list[Path]:
    found = sorted((folder / JOINT_TASKS).glob("*.toml"))
    if not found:
        raise Missing(f"`{folder}` is not a run of several tasks", "give the id of one that `inlay multitask` trained")
    return found


def read_method(folder: Path) -> MethodConfig:
    """Return the method of a finished multi-task run. A run started from it inherits it."""
    if not folder.is_dir():
        raise UnknownName("run of several tasks", folder.name, find_joint_runs(folder.parent))
    _check_settings(folder)
    return read_toml(folder / _SETTINGS).method


def find_run(name: str, store: Store) -> Path:
    """Find the folder of a multi-task run by its id or by a task published from it: `cola`, `cola@1`."""
    folder = None if "@" in name else store.run_folder(name)
    if folder is not None and (folder / _SETTINGS).is_file():
        return folder
    published = None
    try:
        published = store.manifest(store.resolve(name))
    except UnknownName:
        if "@" in name:  # a named version must exist
            raise
    if published is not None and "joint" in published.extra:
        run_id, tasks = published.extra["joint"]["run"], published.extra["joint"]["tasks"]
        folder = store.run_folder(run_id)
        if not folder.is_dir():
            raise Missing(
                f"task `{name}` came from run `{run_id}`, whose folder `{folder}` is gone",
                f"put the folder back, or train the run again: `inlay multitask` with the data of {', '.join(tasks)}",
            )
        _check_settings(folder)
        return folder
    if folder is not None and folder.is_dir():
        _check_settings(folder)
    if published is not None:
        raise Missing(
            f"task `{name}` came from no run of several tasks",
            "it is an ordinary one already; name a run, or a task, of `inlay multitask`",
        )
    raise UnknownName("run of several tasks", name, find_joint_runs(store.root / "runs"))


def _check_settings(folder: Path) -> None:
    if not (folder / _SETTINGS).is_file():
        raise Missing(
            f"the folder of run `{folder.name}` lacks its {_SETTINGS}: no `{folder / _SETTINGS}`",
            f"restore it from a copy, or delete `{folder}` and run its `inlay multitask` command again",
        )


def find_joint_runs(runs: Path) -> list[str]:
    """Find the multi-task runs with a folder under `runs`: their ids and settings."""
    found = {path.parent.parent for path in runs.glob(f"*/{JOINT_TASKS}/000-*.toml")}
    return sorted(folder.name for folder in found if (folder / _SETTINGS).is_file())


def start_from(folder: Path, config: RunConfig, tasks: Sequence[Task]) -> Start:
    """Return the start of new tasks on a finished run's shared parameters: fresh embeddings, or those of similar tasks.

    The head of a similar task is taken over if the new task's labels are among its labels.
    """
    # 1. Refuse another method. By name first: the settings of one method are refused by another.
    result, source = read_finished(folder), read_toml(folder / _SETTINGS)
    _check_finite(result)
    its = source.method
    mine = resolve_method(config.method).as_config() if config.method.name == its.name else config.method
    for item in dataclasses.fields(mine):
        if getattr(mine, item.name) != getattr(its, item.name):
            raise BadConfig(
                f"`method.{item.name}` is `{getattr(mine, item.name)}`, but run `{folder.name}` has "
                f"`{getattr(its, item.name)}`",
                "a run that starts from another has its method: leave out the settings of the method",
            )
    # 2. Collect what its tasks share, and the own parameters of tasks that new ones resemble.
    shared = {name: tensor for name, tensor in result.tensors.items() if "/" not in name}
    # Not by their tensors: tasks that share every weight of a backbone that writes have none of their own.
    known, by_name = {part.task: part for part in read_parts(folder)}, {task.name: task for task in tasks}
    notes = [f"starts from what the tasks of run `{folder.name}` share"]
    is_alike = reads_alike(config.train, source.train)
    for new, old in config.joint.resemblances().items():
        if old not in known:
            raise UnknownName("task of the run", old, known)
        if new not in by_name:
            raise UnknownName("task", new, by_name)
        own = {name: tensor for name, tensor in Start(result.tensors).of(old).items() if name not in shared}
        head = take_head(own, known[old].data, by_name[new]) if is_alike else {}
        body = {name: tensor for name, tensor in own.items() if not head_part.is_of_head(name)}
        shared |= {f"{new}/{name}": tensor for name, tensor in (body | head).items()}
        if len(body) < len(own):
            why = f"its labels are not those of `{old}`" if is_alike else f"`{old}` read other states of the backbone"
            how = f"as that of `{old}`, label by label" if head else f"fresh: {why}"
            notes.append(f"the head of `{new}` starts {how}")
    return Start(shared, ({"run": folder.name},), tuple(notes), source.backbone, read_fingerprint(folder))
