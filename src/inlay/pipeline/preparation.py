"""Preparing a run: its rows are read, its backbone is loaded and its open settings are resolved, with notes on each."""

from __future__ import annotations

import dataclasses

from inlay import data, model, terminal, training
from inlay.pipeline.backbones import check_backbone_name, check_device_name, open_backbone
from inlay.settings import MethodConfig, RunConfig
from inlay.store import Store


def prepare(
    config: RunConfig,
    store: Store,
    device: str = "auto",
    name: str | None = None,
    *,
    task: data.Task | None = None,
    backbone: model.Backbone | None = None,
) -> training.PreparedRun:
    """Read the data, load the backbone, resolve every setting, and print notes on what was found.

    A `task` or a `backbone` that is given is used instead.
    """
    store.check_name(name or config.task)
    check_device_name(device)
    model.resolve_method(config.method)  # refuses an unknown name before anything is read
    if backbone is None:
        check_backbone_name(config.backbone)
    task = load_task(config) if task is None else describe_task(task)
    backbone = backbone or open_backbone(config.backbone, device)
    has_copy = model.find_method(config.method.name).is_finetuned
    use = "; a copy of its weights is trained for the task" if has_copy else ", frozen"
    terminal.detail(f"backbone: {backbone.name}, {terminal.count(backbone.num_parameters)} parameters{use}")
    return training.PreparedRun(training.make_run(task, config, backbone, store), backbone, store)


def load_task(config: RunConfig) -> data.Task:
    """Read a task's data, and print notes on what was found."""
    return describe_task(data.load_task(config.data, config.task), f" from {data.hide_secrets(config.data.source)}")


def describe_task(task: data.Task, origin: str = "") -> data.Task:
    """Print the notes on a task's data, and return the task."""
    terminal.log(f"task {task.name}{origin}", "bold")
    for note in task.notes:
        terminal.detail(note)
    return task


def describe_run(run: training.Run, backbone: model.Backbone) -> None:
    """Print how many parameters a run adds, and how it is trained."""
    added = run.spec.count_parameters(backbone.anatomy)
    train, method, head = run.config.train, run.config.method, run.spec.head
    for text in (*run.start.notes, *run.notes):
        terminal.detail(text)
    part = terminal.share(added, backbone.num_parameters)
    usual = dataclasses.asdict(model.resolve_method(MethodConfig(method.name)))
    described = terminal.describe_method(dataclasses.asdict(method), usual)
    terminal.detail(f"method: {described} adds {terminal.count(added)} parameters, {part} of them")
    width = f"windows of at most {run.max_length} tokens" if head.pooling == "tokens" else f"{head.pooling} pooling"
    width += " of each text of a pair (towers)" if head.has_towers else ""
    parts = ["the head begins as a linear probe"] if train.head_start == "probe" else []
    if train.contrast:
        judged = f", judged on {train.contrast_folds} folds" if train.contrast_folds else ""
        parts.append(f"a contrastive start of {terminal.count(train.contrast, 'step')}{judged}")
    if train.num_epochs:
        epochs, steps = terminal.count(train.num_epochs, "epoch"), terminal.count(run.steps_per_epoch, "step")
        parts.append(f"at most {epochs} of {steps}")
    if train.contrast or train.num_epochs:
        parts.append(f"{train.batch_size} rows each, lr {train.lr:g}")
    terminal.detail(f"training: {', '.join(parts)}, {width}, on {backbone.device}")


def name_of(source: str) -> str:
    """Return the name of a task after its data: `mail` for `data/Mail.csv`, `cola` for `glue/cola`."""
    return Store.legal_name(data.name_of_source(source))
