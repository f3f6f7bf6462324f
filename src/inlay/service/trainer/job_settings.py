"""The settings that a customer may give a job: a list of the allowed ones. No torch.

None of them is a path, names a backbone or reaches another tenant. A setting that is not in the list is refused with a
hint, first by the web (`check_settings`) and again by the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inlay.errors import BadConfig, find_close
from inlay.settings import DataConfig

METHODS_OFFERED = (
    *("houlsby", "mahabadi", "pfeiffer", "parallel", "lora", "dora", "ia3", "bitfit", "pal", "norms", "head"),
)
"""methods that add parameters to the shared backbone; those that train a copy of it are not for customers"""
MOST_NAME_LETTERS = 500
MOST_LABELS = 10_000
_COLUMNS = ("text", "pair", "label")


@dataclass(frozen=True)
class AllowedSetting:
    """An allowed setting: its key in a run's settings, and the values that it may have."""

    key: str
    """section and name in `RunConfig`; "" for a setting that the trainer itself reads"""
    fits: Callable[[Any], bool]
    wanted: str
    """the allowed values in words, after "it must be" """


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != "" and len(value) <= MOST_NAME_LETTERS


def _is_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and 2 <= len(value) <= MOST_LABELS and all(map(_is_name, value))


def _is_whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _is_number(least: float, most: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and math.isfinite(value) and least <= value <= most


def _one_of(*choices: str) -> tuple[Callable[[Any], bool], str]:
    return lambda value: isinstance(value, str) and value in choices, f"one of: {', '.join(choices)}"


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _list_choices(section: type[Any], name: str) -> tuple[str, ...]:
    return tuple(section.__dataclass_fields__[name].metadata["choices"])


_COLUMN = "the name of a column"
_SWITCH = "true or false"
TRAIN_SETTINGS: dict[str, AllowedSetting] = {
    "kind": AllowedSetting("data.kind", *_one_of(*_list_choices(DataConfig, "kind"))),
    "text": AllowedSetting("data.text", _is_name, _COLUMN),
    "pair": AllowedSetting("data.pair", _is_name, _COLUMN),
    "label": AllowedSetting("data.label", _is_name, _COLUMN),
    "labels": AllowedSetting("data.labels", _is_names, "a list of two labels or more"),
    "metric": AllowedSetting("data.metric", _is_name, "the name of a metric that suits the kind of task"),
    "merge_labels": AllowedSetting("data.merge_labels", _is_flag, _SWITCH),
    "bad_rows": AllowedSetting("data.on_bad_row", *_one_of("refuse", "skip")),
    "dev_share": AllowedSetting("data.dev_share", _is_number(0.01, 0.5), "a share from 0.01 to 0.5"),
    "test_share": AllowedSetting("data.test_share", _is_number(0, 0.5), "a share from 0 to 0.5"),
    "method": AllowedSetting("method.name", *_one_of(*METHODS_OFFERED)),
    "size": AllowedSetting("method.size", _is_whole(1, 1024), "a whole number from 1 to 1024"),
    "epochs": AllowedSetting("train.epochs", _is_whole(1, 200), "a whole number from 1 to 200"),
    "lr": AllowedSetting("train.lr", _is_number(1e-7, 1.0), "a number from 0.0000001 to 1"),
    "seed": AllowedSetting("train.seed", _is_whole(0, 2**31 - 1), "a whole number from 0 to 2147483647"),
    "class_weights": AllowedSetting("train.class_weights", *_one_of("none", "balanced")),
    "max_length": AllowedSetting("train.max_length", _is_whole(4, 512), "a whole number of tokens from 4 to 512"),
    "thresholds": AllowedSetting("train.thresholds", *_one_of("auto", "none", "dev")),
    "from": AllowedSetting("", _is_name, "the name of a task of yours, such as mail or mail@2"),
    "corrections": AllowedSetting("", _is_flag, _SWITCH),
}
BATCH_SETTINGS: dict[str, AllowedSetting] = {
    "version": AllowedSetting("", _is_whole(1, 10**9), "the number of a version"),
    "text": AllowedSetting("data.text", _is_name, _COLUMN),
    "pair": AllowedSetting("data.pair", _is_name, _COLUMN),
    "min_confidence": AllowedSetting("", _is_number(0, 1), "a probability from 0 to 1"),
}


def check_settings(settings: Mapping[str, Any], allowed: Mapping[str, AllowedSetting] = TRAIN_SETTINGS) -> None:
    """Refuse settings that are not allowed, or have a value that is not allowed. None leaves a setting open."""
    for name, value in settings.items():
        if name not in allowed:
            close = find_close(str(name), sorted(allowed), 1)
            hint = f"did you mean `{close[0]}`?" if close else f"allowed settings: {', '.join(allowed)}"
            raise BadConfig(f"`settings.{str(name)[:60]}` is not a setting of such a job", hint)
        if value is not None and not allowed[name].fits(value):
            shown = str(value)
            shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
            raise BadConfig(f"`settings.{name}` is `{shown}`", f"it must be {allowed[name].wanted}")


def make_tree(
    settings: Mapping[str, Any], reading: Mapping[str, Any] | None, allowed: Mapping[str, AllowedSetting]
) -> dict[str, Any]:
    """Return allowed settings as a tree of a run's settings.

    `reading` is how the dataset was found to be read. It applies where the settings name no column and no kind.
    """
    check_settings(settings, allowed)
    given = {name: value for name, value in settings.items() if value is not None}
    own = ("kind", *_COLUMNS)
    if reading and not any(name in given for name in own):
        found = {name: reading.get(name) for name in own if name in allowed}
        given = {name: value for name, value in found.items() if value} | given
    tree: dict[str, Any] = {"data": {}, "method": {}, "train": {}}
    for name, value in given.items():
        section, _, key = allowed[name].key.partition(".")
        if section:
            tree[section][key] = list(value) if isinstance(value, tuple) else value
    return tree
