"""The options of how training goes about it: the fields of `FitSettings` that have a flag, checked before any work."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

from inlay.errors import BadConfig
from inlay.processes import check_shared
from inlay.settings.fit_settings import FitSettings

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZES = {"prefix_bytes": "--reuse-memory", "prefix_file_bytes": "--reuse-disk"}


def _option(kind: Any, *words: str, **settings: Any) -> Any:
    return Annotated[kind, typer.Option(*words, **settings)]


# Field of FitSettings -> its flag; the defaults are the fields' own.
_FLAGS: dict[str, Any] = {
    "max_cohort": _option(
        int | None,
        "--max-cohort",
        metavar="N",
        min=1,
        help="runs trained at a time; default: what fits in memory, 32 at most",
    ),
    "token_budget": _option(
        int | None, "--token-budget", metavar="N", min=1, help="tokens of a forward pass; default: what fits in memory"
    ),
    "reuse_prefix": _option(
        bool, "--reuse/--no-reuse", help="compute layers below the lowest trained one once per text, and keep that"
    ),
    "prefix_bytes": _option(
        str | None,
        _SIZES["prefix_bytes"],
        metavar="SIZE",
        help="memory for what --reuse keeps, on a GPU as much of the host's too, such as 2GB; default: a quarter of "
        "what is free",
    ),
    "prefix_file_bytes": _option(
        str | None,
        _SIZES["prefix_file_bytes"],
        metavar="SIZE",
        help="disk for what exceeds that, in a file that is gone at the end; 0: none; default: half of what is free",
    ),
    "checkpointing": _option(
        bool,
        "--checkpointing",
        help="compute activations again in the backward pass: far less memory, but slower, and steps are not compiled",
    ),
    "threads": _option(
        int | None,
        "--threads",
        metavar="N",
        min=1,
        help="threads that compute on a CPU; default: $OMP_NUM_THREADS, or as many as other processes leave cores",
    ),
    "spread": _option(
        str,
        "--spread",
        metavar="auto|cohorts|rows",
        help="what the processes of torchrun share: whole runs, or rows of every batch; auto: rows if runs are too few",
    ),
}
REUSE = ("reuse_prefix", *_SIZES)
MEMORY = ("token_budget", *REUSE, "checkpointing", "threads")


def fit_options(*fields: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of these fields, as its parameter `effort`, a `FitSettings`; the other flags follow.

    What cannot be is refused before the command is called.
    """

    def add(command: Callable[..., None]) -> Callable[..., None]:
        named = inspect.signature(command, eval_str=True).parameters
        own = [item for item in named.values() if item.name != "effort"]
        # Before those that most commands share, which come last everywhere.
        place = next(index for index, item in enumerate(own) if item.name == "device")
        flags = [inspect.Parameter(name, _KIND, default=_default(name), annotation=_FLAGS[name]) for name in fields]

        @functools.wraps(command)
        def call(**values: Any) -> None:
            given = {name: values.pop(name) for name in fields}
            command(effort=_read(given, command.__name__), **values)

        call.__signature__ = inspect.Signature([*own[:place], *flags, *own[place:]])  # type: ignore[attr-defined]
        call.__annotations__ = {}  # typer would read the command's own instead of the signature's
        return call

    return add


_KIND = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _default(name: str) -> Any:
    return getattr(FitSettings, name)


def _read(given: dict[str, Any], command: str) -> FitSettings:
    for name, option in _SIZES.items():
        if given.get(name) is not None:
            if not given["reuse_prefix"]:
                raise BadConfig(f"`{option} {given[name]}` with `--no-reuse`, which keeps nothing", "leave out one")
            given[name] = parse_size(given[name], option)
    settings = FitSettings(**given)
    check_shared(settings.spread, command)
    return settings


def parse_size(text: str, option: str) -> int:
    """Bytes of `2GB`, `500m`, `1.5GiB`, or of a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise BadConfig(f"`{option} {text}` is no size", f"write `{option} 2GB`, `500MB`, or 0 for nothing")
    return int(float(match[1]) * _UNITS[match[2]])


def changes(settings: FitSettings) -> dict[str, Any]:
    """The fields that are not as they are by default."""
    values = {item.name: getattr(settings, item.name) for item in dataclasses.fields(settings)}
    return {name: value for name, value in values.items() if value != _default(name)}
