"""`inlay materialize`: publishes tasks of a finished multi-task run as ordinary ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from inlay.cli import screen
from inlay.cli.flags import BackboneOption, DeviceOption, JsonOption, StoreOption
from inlay.cli.lazy_packages import data, model, pipeline, training
from inlay.cli.multitask import finish_task, print_report
from inlay.errors import BadConfig, InlayError, Missing, UnknownName
from inlay.settings import RunConfig
from inlay.store import Store

_RUN = typer.Argument(
    metavar="RUN", help="id of a run of `inlay multitask`, or a task that it published (`cola`, `cola@1`)"
)
_PARTS = typer.Argument(metavar="[TASK…]", help="tasks of the run, or TASK=DATA if the rows have moved; default: all")


def materialize(
    run: Annotated[str, _RUN],
    tasks: Annotated[list[str] | None, _PARTS] = None,
    name: Annotated[str | None, typer.Option("--name", help="publish under this name; only with one TASK")] = None,
    backbone: BackboneOption = None,
    device: DeviceOption = "auto",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Turn the tasks of a run that shares parameters into ordinary ones, and publish them.

    The weights that a hypernetwork generates for a task become the task's own. The rows of these tasks are read again,
    for the probes and the test scores; the rows of the run's other tasks are not needed.
    """
    pipeline.check_device_name(device)
    opened = Store(store)
    folder = training.find_run(run, opened)
    chosen = _choose_parts(training.read_parts(folder), tasks or ())
    if name is not None:
        opened.check_name(name)
        if len(chosen) != 1:
            raise BadConfig(f"`--name {name}` for {len(chosen)} tasks", "name one task: `inlay materialize RUN TASK`")
    read = [_load_part(config, folder.name) for config in chosen]
    frozen = _open_backbone(backbone, chosen[0].backbone, device)
    made = training.read_materialized(folder, read, frozen)
    if name is not None:
        (item,) = made
        renamed = dataclasses.replace(item.run, task=dataclasses.replace(item.run.task, name=name))
        made = [dataclasses.replace(item, run=renamed)]
    published = [finish_task(item, frozen, opened, publish=True) for item in made]
    report: dict[str, Any] = {"run": folder.name, "folder": str(folder), "tasks": published}
    screen.emit_json(report) if json else print_report(report)


def _choose_parts(configs: Sequence[RunConfig], wanted: Sequence[str]) -> list[RunConfig]:
    """Return the settings of the wanted tasks of a run, each once, with its new data if `TASK=DATA` names it."""
    known = {config.task: config for config in configs}
    found = {} if wanted else known
    for item in wanted:
        name, _, source = item.partition("=")
        if name not in known:
            raise UnknownName("task of the run", name, known)
        rows = known[name].data
        found[name] = dataclasses.replace(known[name], data=dataclasses.replace(rows, source=source or rows.source))
    return list(found.values())


def _load_part(config: RunConfig, run_id: str) -> data.Task:
    """Read the data of one task of the run; errors name the task."""
    try:
        return pipeline.load_task(config)
    except InlayError as error:
        same = error.of(config.task)
        # Training decided which rows to leave out; read with other settings, the rows would not be the run's.
        if "--on-bad-row" in (error.hint or ""):
            same.hint = (
                "the run was trained on rows without this fault: restore the data, or say where it is now with "
                f"`inlay materialize {run_id} {config.task}=DATA`"
            )
        raise same from None


def _open_backbone(asked: str | None, known: str, device: str) -> model.Backbone:
    """Open the backbone that was asked for, or the one in the run's settings."""
    try:
        return pipeline.open_backbone(asked or known, device)
    except Missing as error:
        if asked is None and "--device" not in error.message:
            error.hint = f"if it has moved, say where with `--backbone FOLDER`; otherwise {error.hint}"
        raise
