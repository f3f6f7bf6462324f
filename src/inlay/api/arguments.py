"""Reading of the arguments that the library's functions share: rows, settings, a store, a backbone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inlay import pipeline, training
from inlay.data import RowsGiven, Task, load_task
from inlay.errors import Missing
from inlay.model import Backbone
from inlay.settings import DataConfig, RunConfig, apply_preset, from_tree, overlay, split_settings
from inlay.store import Store


def open_store(store: Store | str | Path | None) -> Store:
    """Return the given store, the store in the given folder, or the user's default store."""
    return store if isinstance(store, Store) else Store(store)


def open_backbone(backbone: str | Backbone | None, device: str) -> Backbone:
    """Return the given backbone, loading it if it is a name; by default that of new runs."""
    if isinstance(backbone, Backbone):
        return backbone
    return pipeline.open_once(backbone or RunConfig().backbone, device)


def open_trained_on(task: str, backbone: str | Backbone | None, store: Store, device: str) -> Backbone:
    """Return the given backbone, loading it if it is a name; by default the one the task was trained on."""
    if isinstance(backbone, Backbone):
        return backbone
    named = backbone or pipeline.find_stored(store.manifest(store.resolve(task)).backbone["name"], store)
    return pipeline.open_once(named, device)


def load(
    data: RowsGiven,
    name: str,
    dev: RowsGiven | None = None,
    test: RowsGiven | None = None,
    settings: Mapping[str, Any] = {},
) -> Task:
    """Return the task of a file, another name of data, or rows in memory."""
    tree = dict(settings)
    given = {}
    for side, rows in (("train", data), ("dev", dev), ("test", test)):
        if isinstance(rows, str | Path):
            tree["source" if side == "train" else side] = str(rows)
        elif rows is not None:
            given[side] = rows
    return load_task(from_tree(DataConfig, tree, "data."), name, given)


def find_config(
    data: RowsGiven,
    task: str | None,
    backbone: str | Backbone | None,
    config: RunConfig | None,
    preset: str | None,
    store: Store,
    settings: Mapping[str, Any],
) -> RunConfig:
    """Return the settings of a run as given; those left open are not resolved yet."""
    tree: dict[str, Any] = split_settings(settings)
    if isinstance(data, str | Path):
        tree["data"]["source"] = str(data)
        task = task or pipeline.name_of(str(data))
    if task is None:
        raise Missing("the task has no name", 'rows in memory have no name of their own: give `task="mail"`')
    tree |= {"task": task}
    if backbone is not None:
        tree["backbone"] = backbone if isinstance(backbone, str) else backbone.name
    return lay_settings(tree, config, preset, store)


def lay_settings(tree: dict[str, Any], config: RunConfig | None, preset: str | None, store: Store) -> RunConfig:
    """Return settings that override the preset, which overrides `config` or that of the task the run starts from."""
    if config is None:
        config = training.inherit(tree["train"]["start"], store) if tree["train"].get("start") else RunConfig()
    return overlay(config if preset is None else apply_preset(preset, config), tree)


def prepare(
    config: RunConfig,
    store: Store,
    device: str,
    backbone: str | Backbone | None,
    data: RowsGiven,
    dev: RowsGiven | None,
    test: RowsGiven | None,
) -> training.PreparedRun:
    """Read the rows, open the backbone and resolve every setting."""
    pipeline.check_device_name(device)
    own = {item.name: getattr(config.data, item.name) for item in dataclasses.fields(DataConfig)}
    frozen = backbone if isinstance(backbone, Backbone) else None
    read = load(data, config.task, dev, test, own)
    if frozen is None:
        frozen = pipeline.open_once(config.backbone, device)
    return pipeline.prepare(config, store, device, task=read, backbone=frozen)


def require_report(report: Any) -> Any:
    """Return a report; raise in a process without one, as are all but the first of `torchrun`."""
    if report is None:
        raise Missing("this process has no report: only the first one of `torchrun` has it", "continue only in rank 0")
    return report
