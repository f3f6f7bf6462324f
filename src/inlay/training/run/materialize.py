"""Turns a trained multi-task run into ordinary tasks: generated and shared weights become each task's own.

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

from inlay.data import Task
from inlay.errors import BadConfig, BadData, Diverged, Missing, UnknownName, WrongBackbone
from inlay.model import Backbone, SlotSpec, make_expander, materialized_method, resolve_method
from inlay.model import head as head_part
from inlay.settings import JointConfig, MethodConfig, RunConfig, read_toml
from inlay.store import Manifest, Store
from inlay.training.run.joint import JointRun, identify_joint
from inlay.training.run.run import (
    DIGEST,
    JOINT_TASKS,
    WEIGHTS,
    Result,
    Run,
    Trained,
    damaged,
    make_part,
    read_fingerprint,
    read_result,
)
from inlay.training.run.start import Start, reads_alike, take_head

_SETTINGS = "config.toml"


def materialize(run: JointRun, result: Result, backbone: Backbone) -> list[Trained]:
    """Return every task of a finished run as an ordinary task, in order: its weights, its scores, its head."""
    if not result.tensors:
        raise Diverged(
            f"run `{run.id}` has no weights to make tasks from: {result.message or result.status}",
            "train it again with a smaller learning rate",
        )
    _check_finite(result)
    origin = {"run": run.id, "method": run.config.method.name, "tasks": [part.name for part in run.parts]}
    return [_put_down(part, origin, result, backbone) for part in run.parts]


def _put_down(part: Run, origin: Mapping[str, Any], result: Result, backbone: Backbone) -> Trained:
    """Turn one task of a finished run into an ordinary task."""
    spec = SlotSpec(materialized_method(part.spec.method), part.spec.head)
    config = dataclasses.replace(part.config, method=spec.method.as_config(), joint=JointConfig())
    run = dataclasses.replace(part, config=config, spec=spec, origin=origin)
    return Trained(run, _own_result(part, result, write_out(part, result.tensors, backbone)))


def write_out(part: Run, tensors: Mapping[str, Tensor], backbone: Backbone) -> dict[str, Tensor]:
    """Return the tensors of a task's ordinary slot, expanded from all tensors the run trained."""
    expander = make_expander(backbone.anatomy, part.spec.method, 1)
    own = Start(dict(tensors)).of(part.name)
    with torch.no_grad():
        written = expander.expand({name: tensor.unsqueeze(0) for name, tensor in own.items()}, (0,))
    whole = own | {name: tensor[0].contiguous() for name, tensor in written.items()}
    wanted = SlotSpec(materialized_method(part.spec.method), part.spec.head).layout(backbone.anatomy)
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
    """Read tasks of a finished run by name as ordinary tasks, from its folder and their own rows alone.

    Refuses other rows or another backbone.
    """
    result = _read_finished(folder)
    run_id, configs, digests = result.run_id, read_parts(folder), _read_digests(folder)
    names = [config.task for config in configs]
    ids = [config.identify(rows, backbone.fingerprint) for config, rows in zip(configs, digests, strict=True)]
    known, lineage = configs[0], read_lineage(folder).lineage
    _check_backbone(folder, known.backbone, backbone)
    if identify_joint(list(zip(names, ids, strict=True)), known.joint, lineage) != run_id:
        raise WrongBackbone(
            f"run `{run_id}` was not trained on backbone `{backbone.name}`, or its settings were changed since",
            f"its settings say `{known.backbone}`: load that backbone, unchanged",
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
        found.append(_put_down(make_part(task, configs[number], backbone, is_trained=True), origin, result, backbone))
    return found


def _read_finished(folder: Path) -> Result:
    """Read the result of a finished run, with its weights."""
    result = read_result(folder)
    if result is None or not result.tensors:
        raise Missing(f"no trained weights in `{folder}`", "give the folder of a run that finished (runs/<id>)")
    _check_finite(result)
    return result


def _check_finite(result: Result) -> None:
    # A diverged run keeps the weights of a better epoch, or none: non-finite weights were changed afterwards.
    for name, tensor in result.tensors.items():
        if not torch.isfinite(tensor).all():
            folder = Path(result.run_id) if result.folder is None else result.folder
            raise damaged(folder / WEIGHTS, f"tensor `{name}` has values that are not finite")


def _check_backbone(folder: Path, name: str, backbone: Backbone) -> None:
    """Refuse another backbone than the run's, as far as its folder says which that was."""
    wanted = read_fingerprint(folder)
    if wanted and wanted != backbone.fingerprint:
        raise WrongBackbone(
            f"run `{folder.name}` was not trained on backbone `{backbone.name}` ({backbone.fingerprint[:12]}), "
            f"but on `{name}` ({wanted[:12]})",
            f"use `--backbone {name}`, or wherever that one lies now",
        )


def _read_digests(folder: Path) -> list[str]:
    """Read the digest of every task's rows, in order."""
    found = [path.with_suffix(DIGEST) for path in _find_parts(folder)]
    if not all(path.is_file() for path in found):
        raise Missing(
            f"the folder of run `{folder.name}` does not say which rows its tasks had: it is from before that was kept",
            "run its `inlay multitask` command again: the run is not trained again, and all its tasks are published",
        )
    return [path.read_text(encoding="utf8").strip() for path in found]


def read_parts(folder: Path) -> list[RunConfig]:
    """Read the settings of every task of a run in order, which include where its rows were."""
    return [read_toml(path) for path in _find_parts(folder)]


def _find_parts(folder: Path) -> list[Path]:
    found = sorted((folder / JOINT_TASKS).glob("*.toml"))
    if not found:
        raise Missing(f"`{folder}` is not a run of several tasks", "give the id of one that `inlay multitask` trained")
    return found


def read_lineage(folder: Path) -> Start:
    """Read what a run started from, without tensors: its weights have them by now."""
    config = read_toml(folder / _SETTINGS)
    return Start() if config.joint.start is None else Start(lineage=({"run": config.joint.start},))


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
    published = _find_published(name, store)
    if published is not None and "joint" in published.extra:
        return _find_origin(name, published, store)
    if folder is not None and folder.is_dir():
        _check_settings(folder)
    if published is not None:
        raise Missing(
            f"task `{name}` came from no run of several tasks",
            "it is an ordinary one already; name a run, or a task, of `inlay multitask`",
        )
    raise UnknownName("run of several tasks", name, find_joint_runs(store.root / "runs"))


def _find_published(name: str, store: Store) -> Manifest | None:
    """Return the manifest of a task, or None if no task has that name; a named version must exist."""
    try:
        return store.manifest(store.resolve(name))
    except UnknownName:
        if "@" in name:
            raise
        return None


def _find_origin(name: str, published: Manifest, store: Store) -> Path:
    """Find the folder of the run that a published task came from."""
    run_id, tasks = published.extra["joint"]["run"], published.extra["joint"]["tasks"]
    folder = store.run_folder(run_id)
    if not folder.is_dir():
        raise Missing(
            f"task `{name}` came from run `{run_id}`, whose folder `{folder}` is gone",
            f"put the folder back, or train the run again: `inlay multitask` with the data of {', '.join(tasks)}",
        )
    _check_settings(folder)
    return folder


def _check_settings(folder: Path) -> None:
    if not (folder / _SETTINGS).is_file():
        raise Missing(
            f"the folder of run `{folder.name}` lacks its {_SETTINGS}: no `{folder / _SETTINGS}`",
            f"restore it from a copy, or delete `{folder}` and train the run again: its `inlay multitask` command",
        )


def find_joint_runs(runs: Path) -> list[str]:
    """Find the multi-task runs with a folder under `runs`: their ids and settings."""
    found = {path.parent.parent for path in runs.glob(f"*/{JOINT_TASKS}/000-*.toml")}
    return sorted(folder.name for folder in found if (folder / _SETTINGS).is_file())


def start_from(folder: Path, config: RunConfig, tasks: Sequence[Task]) -> Start:
    """Return the start of new tasks on a finished run's shared parameters: fresh embeddings, or those of similar tasks.

    The head of a task goes along where the new one's labels are among its own.
    """
    result, source = _read_finished(folder), read_toml(folder / _SETTINGS)
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
        body = {name: tensor for name, tensor in own.items() if not head_part.is_of_head(name)}
        shared |= {f"{new}/{name}": tensor for name, tensor in (body | head).items()}
        if len(body) < len(own):
            why = f"its labels are not those of `{old}`" if is_alike else f"`{old}` read other states of the backbone"
            how = f"as that of `{old}`, label by label" if head else f"fresh: {why}"
            notes.append(f"the head of `{new}` starts {how}")
    return Start(shared, ({"run": folder.name},), tuple(notes), source.backbone, read_fingerprint(folder))


def _check_method(method: MethodConfig, its: MethodConfig, run_id: str) -> None:
    # By name first: the settings of one method are refused by another.
    mine = resolve_method(method).as_config() if method.name == its.name else method
    for item in dataclasses.fields(mine):
        if getattr(mine, item.name) != getattr(its, item.name):
            raise BadConfig(
                f"`method.{item.name}` is `{getattr(mine, item.name)}`, but run `{run_id}` has "
                f"`{getattr(its, item.name)}`",
                "a run that starts from another has its method: leave out the settings of the method",
            )
