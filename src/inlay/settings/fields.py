"""A setting: a field with the line that `--help` prints for it, and the checks of its value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import field
from typing import Any

from inlay.errors import BadConfig

_SAME = object()


def setting(
    default: Any, text: str, choices: Iterable[str] = (), *, is_later: bool = False, before: Any = _SAME
) -> Any:
    """Return a config field with the line `--help` prints for it, and the values it may take.

    A field that `is_later` was added after run ids existed. At its default it is left out of the id, so that old ids
    stay valid. `before` is the value that all runs had until then, if that is not the default: it is left out too.
    """
    known = {"help": text, "choices": tuple(choices), "is_later": is_later}
    return field(default=default, metadata={**known, "before": default if before is _SAME else before})


def require(holds: bool, name: str, value: Any, wanted: str) -> None:
    """Refuse a value unless the condition holds, and say what it must be."""
    if not holds:
        raise BadConfig(f"`{name}` is `{value}`", f"it must be {wanted}")


def check_at_least(config: Any, section: str, least: int, *names: str, kind: str = "whole number") -> None:
    """Refuse values below `least`; a field that is None by default may be None."""
    for name in names:
        value = getattr(config, name)
        is_open = value is None and getattr(type(config), name) is None
        require(is_open or value >= least, f"{section}.{name}", value, f"a {kind} of at least {least}")


def check_below_one(config: Any, section: str, *names: str) -> None:
    """Refuse shares that are not from 0 to below 1; a field that is None by default may be None."""
    for name in names:
        value = getattr(config, name)
        is_open = value is None and getattr(type(config), name) is None
        require(is_open or 0 <= value < 1, f"{section}.{name}", value, "at least 0 and below 1")


def check_values(config: Any, section: str) -> None:
    """Refuse a value that is not one of its field's choices, and a number that is not finite: no run can keep it."""
    for item in dataclasses.fields(config):
        choices, value = item.metadata.get("choices"), getattr(config, item.name)
        is_finite = not isinstance(value, float) or math.isfinite(value)
        require(is_finite, f"{section}.{item.name}", value, "a finite number")
        if choices and value not in choices:
            raise BadConfig(f"`{section}.{item.name}` is `{value}`", f"it must be one of: {', '.join(choices)}")
