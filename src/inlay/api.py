"""The Python library: the rooms' functions with the defaults a script wants, the user's own store above all.

Nothing is computed here; every function hands on to the room that does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay import data as data_room
from inlay import serving, training
from inlay.errors import BadConfig
from inlay.model import Backbone
from inlay.serving import Check
from inlay.settings import (
    DataConfig,
    FitSettings,
    JointConfig,
    MethodConfig,
    RunConfig,
    apply_preset,
    from_tree,
    overlay,
)
from inlay.store import Store, Version
from inlay.training import Emit, JointRun, Result, Run, Start, Trained, ignore

if TYPE_CHECKING:
    import pandas


def load_task(data: str | Path | pandas.DataFrame, *, name: str, **settings: Any) -> data_room.Task:
    """A task from a file, a folder, `glue/NAME`, `extra/NAME`, `hub:NAME` or a DataFrame.

    `settings` are those of `DataConfig`: `text`, `pair`, `label`, `kind`, `dev`, `test_share` …
    """
    if isinstance(data, str | Path):
        return data_room.load_task(from_tree(DataConfig, {"source": str(data), **settings}, "data."), name)
    return data_room.make_task(data, name, from_tree(DataConfig, settings, "data."))


def make_run(
    task: data_room.Task,
    backbone: Backbone,
    config: RunConfig | None = None,
    *,
    preset: str | None = None,
    store: Store | None = None,
    **settings: Any,
) -> Run:
    """A run of `task`, with `settings` of the method and of training by name: `size=64, lr=5e-4, epochs=3` …

    `method` is the method's name, `preset` a published recipe whose settings the others override, and `start` names
    the tasks of `store` to start from, whose method the run then has. An unknown setting is an error that names the
    nearest one.
    """
    store = store or Store()
    tree = _sort_settings(settings)
    if config is None:
        config = training.inherit(tree["train"]["start"], store) if tree["train"].get("start") else RunConfig()
    config = config if preset is None else apply_preset(preset, config)
    return training.make_run(task, overlay(config, tree), backbone, store)


def make_joint_run(
    tasks: Sequence[data_room.Task],
    backbone: Backbone,
    config: RunConfig | None = None,
    *,
    store: Store | None = None,
    **settings: Any,
) -> JointRun:
    """A run of several tasks that share parameters, by default with `hyperformer++`.

    `settings` are those of the method, of training and of `JointConfig` by name: `size=12, batches="mixed", steps=500`
    … `start` names the finished run of `store` that this one goes on from, whose method it then has. Train it with
    `fit`, make its tasks ordinary ones with `materialize`, and publish those.
    """
    store = store or Store()
    tree = _sort_settings(settings, {"joint": JointConfig})
    folder = store.run_folder(tree["joint"]["start"]) if tree["joint"].get("start") else None
    if config is None:
        config = RunConfig(method=MethodConfig("hyperformer++"))
        config = config if folder is None else dataclasses.replace(config, method=training.read_method(folder))
    config = overlay(config, tree)
    start = Start() if folder is None else training.start_from(folder, config, tasks)
    return training.make_joint_run(tasks, config, backbone, start=start)


def _sort_settings(settings: Mapping[str, Any], more: Mapping[str, type] = {}) -> dict[str, dict[str, Any]]:
    """Sort settings by their section: those that no other section knows are of `train`, which refuses unknown ones."""
    sections = {**more, "method": MethodConfig}
    tree: dict[str, dict[str, Any]] = {name: {} for name in (*sections, "train")}
    for key, value in settings.items():
        key = "name" if key == "method" else key
        if key in ("weights", "like") and isinstance(value, Mapping):  # `{"cola": 2}`
            value = [f"{name}={item}" for name, item in value.items()]
        elif key in ("weights", "like") and isinstance(value, str):  # `"cola=2,rte=1"`
            value = value.split(",")
        known = (name for name, kind in sections.items() if key in {item.name for item in dataclasses.fields(kind)})
        tree[next(known, "train")][key] = value
    return tree


def materialize(run: JointRun, result: Result, backbone: Backbone) -> list[Trained]:
    """Every task of a finished run as an ordinary one, in order: `publish(item.run, item.result, backbone)` each."""
    if result.run_id != run.id:
        raise BadConfig(
            f"the result is that of run `{result.run_id}`, not of `{run.id}`",
            "give a run with what `fit` returned for it",
        )
    return training.materialize(run, result, backbone)


def fit(
    runs: Sequence[Run | JointRun],
    backbone: Backbone,
    store: Store | None = None,
    settings: FitSettings | None = None,
    emit: Emit = ignore,
) -> list[Result]:
    """Train runs together, each in its own slot; finished ones are read back, stopped ones go on.

    `emit` is called with every event (`inlay.training.events`): steps, scored epochs, runs that ended.
    """
    folder = (store or Store()).root / "runs"
    return training.fit(runs, backbone, folder, settings or FitSettings(), emit)


def publish(
    run: Run | JointRun,
    result: Result,
    backbone: Backbone,
    store: Store | None = None,
    name: str | None = None,
    *,
    probes: str = "rows",
) -> Version:
    """Add a run's best weights to the store as an immutable version, with probes that prove it later.

    They are a few dev rows, word for word; `probes="hashed"` keeps hashes of them, and `"none"` nothing.
    """
    if isinstance(run, JointRun):
        raise BadConfig(
            f"a run of several tasks (`{', '.join(part.name for part in run.parts)}`) is published task by task",
            "`for item in materialize(run, result, backbone): publish(item.run, item.result, backbone)`",
        )
    return training.publish(run, result, backbone, store or Store(), name, probes=probes)


class Engine(serving.Engine):
    """Answers requests for any mix of the store's tasks on one backbone.

    On a GPU it compiles by itself once it has had enough to answer; `is_compiled=True` does so from the first request
    on, and `is_compiled=False` never.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: Store | None = None,
        *,
        num_slots: int = 64,
        precision: str = "auto",
        is_compiled: bool | None = None,
    ) -> None:
        super().__init__(backbone, store or Store(), num_slots=num_slots, precision=precision, is_compiled=is_compiled)


def verify(backbone: Backbone, store: Store | None = None) -> list[Check]:
    """Prove that every version of the store trained on `backbone` still stands, bit for bit where it can be."""
    store = store or Store()
    damaged: list[Check] = []
    versions = [
        info.version
        for task in store.ledger(lambda version, error: damaged.append(Check(version, problem=str(error))))
        for info in task.versions
        if info.summary.backbone["fingerprint"] == backbone.fingerprint
    ]
    return damaged + serving.verify(versions, backbone, store)
