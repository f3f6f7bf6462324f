"""Obstacles: parts of a version that a format cannot express, found all at once and told in one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.errors import Unsupported
from inlay.model import ResolvedMethod


@dataclass(frozen=True)
class Obstacle:
    """Something a format has no place for."""

    reason: str
    options: str | None = None
    """options of `inlay train` that avoid it; None where none do"""


def find_settings(method: ResolvedMethod, needs: Mapping[str, tuple[Any, str]]) -> list[Obstacle]:
    """The settings of a method that are not as a format needs them: setting -> value, reason."""
    return [
        Obstacle(f"{reason}; this task has `{name}` `{getattr(method, name)}`", f"--set method.{name}={value}")
        for name, (value, reason) in needs.items()
        if getattr(method, name) != value
    ]


def refuse(obstacles: Sequence[Obstacle], *, presets: Sequence[str] = (), formats: Sequence[str] = ()) -> None:
    """Refuse with every reason at once; the hint has the options, presets and formats that avoid them all."""
    if not obstacles:
        return
    first, *more = [obstacle.reason for obstacle in obstacles]
    message = f"{first}; and {len(more)} more: {'; '.join(more)}" if more else first
    options = [obstacle.options for obstacle in obstacles]
    known = dict.fromkeys(option for option in options if option is not None)
    recipes = [*([" ".join(known)] if None not in options else []), *(f"--preset {preset}" for preset in presets)]
    ways = [_join("train it with", recipes), _join("use", [f"--format {name}" for name in formats])]
    raise Unsupported(message, ", or ".join(way for way in ways if way))


def _join(verb: str, options: Sequence[str]) -> str:
    return f"{verb} {' or '.join(f'`{option}`' for option in options)}" if options else ""
