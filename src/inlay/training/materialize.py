"""A trained run of several tasks becomes ordinary tasks: what a hypernetwork writes, and what tasks share, is put down.

Afterwards each task is a slot like any other, which store and engine keep and serve without knowing where it came from;
its weights define it. A new task may start where a run of several ended: on what its tasks share, with an embedding of
its own, fresh or that of a task it resembles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inlay.config import JointConfig, MethodConfig, RunConfig, read_toml
from inlay.data.tasks import Task
from inlay.errors import BadConfig, BadData, Diverged, Missing, UnknownName, WrongBackbone
from inlay.model.backbone import Backbone
from inlay.model.expand import Expander
from inlay.model.methods import resolve_method, written_method
from inlay.model.slots import SlotSpec
from inlay.training.joint import JointRun, identify_joint
from inlay.training.run import (
    DIGEST,
    JOINT_TASKS,
    Result,
    Run,
    Trained,
    make_part,
    read_fingerprint,
    read_result,
)
from inlay.training.start import Start, reads_alike, take_head


def materialize(run: JointRun, result: Result, backbone: Backbone) -> list[Trained]:
    """Every task of a finished run as an ordinary one, in order: its weights, its scores, its head."""
    if not result.tensors:
        raise Diverged(
            f"run `{run.id}` has no weights to put down: {result.message or result.status}",
            "train it again with a smaller learning rate",
        )
    origin = {"run": run.id, "method": run.config.method.name, "tasks": [part.name for part in run.parts]}
    return [_put_down(part, origin, result, backbone) for part in run.parts]


def _put_down(part: Run, origin: Mapping[str, Any], result: Result, backbone: Backbone) -> Trained:
    """A task of a finished run as an ordinary one."""
    spec = SlotSpec(written_method(part.config.method), part.spec.head)
    config = dataclasses.replace(part.config, method=spec.method, joint=JointConfig())
    run = dataclasses.replace(part, config=config, spec=spec, origin=origin)
    return Trained(run, _own_result(part, result, write_out(part, result.tensors, backbone)))


def write_out(part: Run, tensors: Mapping[str, Tensor], backbone: Backbone) -> dict[str, Tensor]:
    """The tensors of a task's ordinary slot, from all that the run has trained."""
    expander = Expander(backbone.anatomy, resolve_method(part.config.method), 1)
    own = Start(dict(tensors)).of(part.name)
    with torch.no_grad():
        written = expander.expand({name: tensor.unsqueeze(0) for name, tensor in own.items()}, (0,))
    whole = own | {name: tensor[0].contiguous() for name, tensor in written.items()}
    wanted = SlotSpec(written_method(part.config.method), part.spec.head).layout(backbone.anatomy)
    return {item.name: whole[item.name].clone() for item in wanted}


def _own_result(part: Run, result: Result, tensors: dict[str, Tensor]) -> Result:
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
    return dataclasses.replace(result, history=history, dev_metric=best, tensors=tensors)


def read_materialized(folder: Path, tasks: Sequence[Task], backbone: Backbone) -> list[Trained]:
    """Tasks of a finished run, by their names, as ordinary ones: from its folder and their own rows alone.

    Refuses other rows or another backbone.
    """
    result = read_result(folder)
    if result is None or not result.tensors:
        raise Missing(f"no trained weights in `{folder}`", "give the folder of a run that finished (runs/<id>)")
    run_id, configs, digests = result.run_id, read_parts(folder), _read_digests(folder)
    names = [config.task for config in configs]
    ids = [config.identify(rows, backbone.fingerprint) for config, rows in zip(configs, digests, strict=True)]
    known, lineage = configs[0], read_lineage(folder).lineage
    if identify_joint(list(zip(names, ids, strict=True)), known.joint, lineage) != run_id:
        raise WrongBackbone(
            f"run `{run_id}` was not trained on backbone `{backbone.name}`, or its settings were changed since",
            f"its settings say `{known.backbone}`: load that one as it was then",
        )
    origin = {"run": run_id, "method": known.method.name, "tasks": names}
    found = []
    for task in tasks:
        if task.name not in names:
            raise UnknownName("task of the run", task.name, names)
        number = names.index(task.name)
        if task.digest != digests[number]:
            raise BadData(
                f"task `{task.name}`: its rows are not those that run `{run_id}` was trained on",
                f"they were read from `{configs[number].data.source}`; where they are now, say as "
                f"`inlay materialize {run_id} {task.name}=DATA`",
            )
        found.append(_put_down(make_part(task, configs[number], backbone), origin, result, backbone))
    return found


def _read_digests(folder: Path) -> list[str]:
    """Of the rows of every task of a run, in order."""
    found = [path.with_suffix(DIGEST) for path in _find_parts(folder)]
    if not all(path.is_file() for path in found):
        raise Missing(
            f"the folder of run `{folder.name}` does not say which rows its tasks had: it is from before that was kept",
            "run its `inlay multitask` command again: the run is not trained again, and all its tasks are published",
        )
    return [path.read_text(encoding="utf8").strip() for path in found]


def read_parts(folder: Path) -> list[RunConfig]:
    """The settings of every task of a run, which say where its rows were, in order."""
    return [read_toml(path) for path in _find_parts(folder)]


def _find_parts(folder: Path) -> list[Path]:
    found = sorted((folder / JOINT_TASKS).glob("*.toml"))
    if not found:
        raise Missing(f"`{folder}` is no run of several tasks", "give the id of one that `inlay multitask` trained")
    return found


def read_lineage(folder: Path) -> Start:
    """Where a run started from: enough to know it again, without the tensors, which are in its weights by now."""
    config = read_toml(folder / "config.toml")
    return Start() if config.joint.start is None else Start(lineage=({"run": config.joint.start},))


def read_method(folder: Path) -> MethodConfig:
    """That of a run of several tasks, which a run that starts from it has."""
    if not (folder / "config.toml").is_file():
        raise UnknownName("run of several tasks", folder.name, find_joint_runs(folder.parent))
    return read_toml(folder / "config.toml").method


def find_joint_runs(runs: Path) -> list[str]:
    """The ids of the runs of several tasks that have a folder there."""
    return sorted(path.parent.parent.name for path in runs.glob(f"*/{JOINT_TASKS}/000-*.toml"))


def start_from(folder: Path, config: RunConfig, tasks: Sequence[Task]) -> Start:
    """What new tasks begin with on what a finished run's tasks share: fresh embeddings, or those they resemble.

    The head of a task goes along where the new one's labels are among its own.
    """
    result, source = read_result(folder), read_toml(folder / "config.toml")
    if result is None or not result.tensors:
        raise Missing(f"no trained weights in `{folder}`", "give a run that finished")
    _check_method(config.method, source.method, folder.name)
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
        body = {name: tensor for name, tensor in own.items() if not name.startswith("head.")}
        shared |= {f"{new}/{name}": tensor for name, tensor in (body | head).items()}
        if len(body) < len(own):
            why = f"its labels are not those of `{old}`" if is_alike else f"`{old}` read other states of the backbone"
            how = f"as that of `{old}`, label by label" if head else f"fresh: {why}"
            notes.append(f"the head of `{new}` starts {how}")
    return Start(shared, ({"run": folder.name},), tuple(notes), source.backbone, read_fingerprint(folder))


def _check_method(method: MethodConfig, its: MethodConfig, run_id: str) -> None:
    # By name first: the settings of one method are refused by another.
    mine = resolve_method(method) if method.name == its.name else method
    for item in dataclasses.fields(mine):
        if getattr(mine, item.name) != getattr(its, item.name):
            raise BadConfig(
                f"`method.{item.name}` is `{getattr(mine, item.name)}`, but run `{run_id}` has "
                f"`{getattr(its, item.name)}`",
                "a run that starts from another has its method: leave out the settings of the method",
            )
