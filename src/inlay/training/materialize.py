"""A trained run of several tasks becomes ordinary tasks: what a hypernetwork writes, and what tasks share, is put down.

Afterwards each task is a slot like any other, which store and engine keep and serve without knowing where it came from;
its weights define it. A new task may start where a run of several ended: on what its tasks share, with an embedding of
its own, fresh or that of a task it resembles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from inlay.config import JointConfig, MethodConfig, RunConfig, read_toml
from inlay.data.tasks import Task
from inlay.errors import BadConfig, Diverged, Missing, UnknownName, WrongBackbone
from inlay.model.backbone import Backbone
from inlay.model.expand import Expander
from inlay.model.methods import resolve_method, written_method
from inlay.model.slots import SlotSpec
from inlay.training.joint import JointRun, make_joint_run
from inlay.training.run import JOINT_TASKS, Result, Run, Trained, read_fingerprint, read_result
from inlay.training.start import Start, reads_alike, take_head


def materialize(run: JointRun, result: Result, backbone: Backbone) -> list[Trained]:
    """Every task of a finished run as an ordinary one, in order: its weights, its scores, its head."""
    if not result.tensors:
        raise Diverged(
            f"run `{run.id}` has no weights to put down: {result.message or result.status}",
            "train it again with a smaller learning rate",
        )
    tensors = write_out(run, result.tensors, backbone)
    return [
        Trained(_ordinary(run, part), _own_result(part, result, own))
        for part, own in zip(run.parts, tensors, strict=True)
    ]


def write_out(run: JointRun, tensors: Mapping[str, Tensor], backbone: Backbone) -> list[dict[str, Tensor]]:
    """The tensors of every task's ordinary slot, from all that a run has trained."""
    expander = Expander(backbone.anatomy, resolve_method(run.config.method), 1)
    found = []
    for part in run.parts:
        own = Start(dict(tensors)).of(part.name)
        with torch.no_grad():
            written = expander.expand({name: tensor.unsqueeze(0) for name, tensor in own.items()}, (0,))
        whole = own | {name: tensor[0].contiguous() for name, tensor in written.items()}
        wanted = SlotSpec(written_method(run.config.method), part.spec.head).layout(backbone.anatomy)
        found.append({item.name: whole[item.name].clone() for item in wanted})
    return found


def _ordinary(run: JointRun, part: Run) -> Run:
    method = written_method(run.config.method)
    origin = {"run": run.id, "method": run.config.method.name, "tasks": [each.name for each in run.parts]}
    config = dataclasses.replace(part.config, method=method, joint=JointConfig())
    return dataclasses.replace(part, config=config, spec=SlotSpec(method, part.spec.head), origin=origin)


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


def read_joint(folder: Path, tasks: Sequence[Task], backbone: Backbone) -> tuple[JointRun, Result]:
    """A finished run of several tasks read back; refuses other rows or another backbone."""
    result = read_result(folder)
    if result is None or not result.tensors:
        raise Missing(f"no trained weights in `{folder}`", "give the folder of a run that finished (runs/<id>)")
    config = read_toml(folder / "config.toml")
    run = make_joint_run(tasks, config, backbone, config.task, start=read_lineage(folder))
    if run.id != result.run_id:
        raise WrongBackbone(
            f"run `{result.run_id}` was not trained on these rows with backbone `{backbone.name}`",
            f"its config says `{config.backbone}` and the tasks {', '.join(task.name for task in tasks)}: load them as "
            "then",
        )
    return run, result


def read_parts(folder: Path) -> list[RunConfig]:
    """The settings of every task of a run, which say where its rows were, in order."""
    found = sorted((folder / JOINT_TASKS).glob("*.toml"))
    if not found:
        raise Missing(f"`{folder}` is no run of several tasks", "give the id of one that `inlay multitask` trained")
    return [read_toml(path) for path in found]


def read_lineage(folder: Path) -> Start:
    """Where a run started from: enough to know it again, without the tensors, which are in its weights by now."""
    config = read_toml(folder / "config.toml")
    return Start() if config.joint.start is None else Start(lineage=({"run": config.joint.start},))


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
    for new, old in config.joint.resemblances().items():
        if old not in known:
            raise UnknownName("task of the run", old, known)
        if new not in by_name:
            raise UnknownName("task", new, by_name)
        own = {name: tensor for name, tensor in Start(result.tensors).of(old).items() if name not in shared}
        head = take_head(own, known[old].data, by_name[new]) if reads_alike(config.train, source.train) else {}
        body = {name: tensor for name, tensor in own.items() if not name.startswith("head.")}
        shared |= {f"{new}/{name}": tensor for name, tensor in (body | head).items()}
        if len(body) < len(own):
            how = f"as that of `{old}`, label by label" if head else f"fresh: its labels are not those of `{old}`"
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
