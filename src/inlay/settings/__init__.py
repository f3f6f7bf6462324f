"""The settings of a run and of `fit`: every default, the presets, and trees in and out."""

from __future__ import annotations

from inlay.settings.fit_settings import FitSettings
from inlay.settings.joint_config import JointConfig
from inlay.settings.keywords import DataSettings, JointRunSettings, RunSettings, TaskSettings
from inlay.settings.presets import PRESETS, apply_preset, find_preset
from inlay.settings.run_config import (
    DATA_FORMATS,
    KIND_NAMES,
    ONE_CELL_KINDS,
    ONE_LABEL_KINDS,
    DataConfig,
    MethodConfig,
    RunConfig,
    TrainConfig,
    digest,
    leave_out_later,
    overlay,
    read_toml,
    settled,
    split_settings,
)
from inlay.settings.trees import from_tree, read_tree, split_list, write_toml

__all__ = [
    "DATA_FORMATS",
    "KIND_NAMES",
    "ONE_CELL_KINDS",
    "ONE_LABEL_KINDS",
    "PRESETS",
    "DataConfig",
    "DataSettings",
    "FitSettings",
    "JointConfig",
    "JointRunSettings",
    "MethodConfig",
    "RunConfig",
    "RunSettings",
    "TaskSettings",
    "TrainConfig",
    "apply_preset",
    "digest",
    "find_preset",
    "from_tree",
    "leave_out_later",
    "overlay",
    "read_toml",
    "read_tree",
    "settled",
    "split_list",
    "split_settings",
    "write_toml",
]
