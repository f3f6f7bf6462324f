"""Output of the commands: data goes to stdout, everything else to stderr (`inlay.terminal`).

Tables are laid out here and not by rich, which needs a second for a thousand rows.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from inlay.terminal import (
    Meter,
    Rate,
    count,
    describe_method,
    describe_settings,
    detail,
    duration,
    hang,
    in_line,
    is_main_process,
    is_terminal,
    log,
    log_above,
    name_method,
    paint,
    printable,
    score,
    share,
    shorten,
    size,
    text_width,
    working,
)

if TYPE_CHECKING:
    from inlay.errors import InlayError

__all__ = [
    "Column",
    "Meter",
    "Rate",
    "count",
    "describe_method",
    "describe_settings",
    "detail",
    "duration",
    "emit",
    "emit_json",
    "emit_pairs",
    "emit_table",
    "in_line",
    "is_main_process",
    "is_terminal",
    "log",
    "log_above",
    "name_method",
    "numbers",
    "own_version",
    "paint",
    "print_error",
    "printable",
    "repeat_store",
    "score",
    "share",
    "shorten",
    "size",
    "working",
]


class Column(NamedTuple):
    """A column of a table; a flexible one is cut if the terminal is too narrow."""

    title: str
    is_number: bool = False
    is_flexible: bool = False


def numbers(*titles: str) -> list[Column]:
    """Return columns of numbers, which are aligned on the right."""
    return [Column(title, is_number=True) for title in titles]


def emit(text: str = "", style: str = "") -> None:
    """Print a line of data to stdout."""
    if is_main_process():
        print(paint(printable(text), style, sys.stdout))


def emit_json(value: Any, *, indent: int | None = 2) -> None:
    """Print data as one JSON document to stdout. NaN and infinity become null."""
    is_unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    emit(json.dumps(_plain(value), indent=indent, ensure_ascii=not is_unicode, default=str, allow_nan=False))


_COMMAND = re.compile(r"`inlay (?!presets|baseline|backbone list|study|[a-z]+ --help)([a-z]+(?: [^`]*)?)`")


def repeat_store(text: str, store: Path | None) -> str:
    """Add `--store`, if it was given, to the commands in a text, such as `inlay verify mail`."""
    if store is None:
        return text
    given = f" --store {shlex.quote(str(store))}"
    return _COMMAND.sub(lambda found: found[0] if given in found[0] else f"`inlay {found[1]}{given}`", text)


def print_error(error: InlayError, *, as_json: bool = False) -> None:
    """Print an error and its hint to stderr, with `as_json` as one line of JSON.

    Every process prints its errors: with several, only one may know why the run ended.
    """
    if as_json:
        print(json.dumps({"error": error.to_json()}), file=sys.stderr)
        return
    rank = os.environ.get("RANK", "0")  # kept as text: the error may be that it is not a number
    who = "" if rank == "0" or "WORLD_SIZE" not in os.environ else f"process {rank}: "
    print(f"{who}{paint('error:', 'red', sys.stderr)} {printable(error.message)}", file=sys.stderr)
    if error.hint:
        print(f"{paint('hint:', 'cyan', sys.stderr)} {printable(error.hint)}", file=sys.stderr)


def emit_table(titles: Sequence[Column | str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout, at most as wide as the terminal; without a terminal nothing is cut."""
    columns = [Column(title) if isinstance(title, str) else title for title in titles]
    columns = [column._replace(title=in_line(column.title)) for column in columns]
    rows = [[in_line(cell) for cell in row] for row in rows]
    widths = [
        max([text_width(column.title), *(text_width(row[i]) for row in rows)]) for i, column in enumerate(columns)
    ]
    if is_terminal(sys.stdout):
        widths = _fit(columns, widths, shutil.get_terminal_size().columns)
    emit(_line(columns, widths, [column.title for column in columns]), "bold")
    rule = "─" if (sys.stdout.encoding or "").lower().startswith("utf") else "-"
    emit("  ".join(rule * width for width in widths), "dim")
    emit("\n".join(_line(columns, widths, row) for row in rows))


def emit_pairs(pairs: Mapping[str, Any]) -> None:
    """Print names and values, one pair on each line, with the values aligned."""
    if not is_main_process():
        return
    pairs = {in_line(name): value for name, value in pairs.items()}  # names of metrics come with an imported version
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        indent = f"{name.ljust(width)}  "
        lines = hang(indent, in_line(str(value)), sys.stdout)
        print(paint(indent, "dim", sys.stdout) + lines.removeprefix(indent))


def own_version() -> str:
    """Return the version of Inlay, or a phrase for a checkout that was never installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("inlay")
    except PackageNotFoundError:
        return "of a checkout (not installed)"


def _line(columns: Sequence[Column], widths: Sequence[int], cells: Sequence[str]) -> str:
    parts = []
    for column, width, cell in zip(columns, widths, cells, strict=True):
        cell = cell if text_width(cell) <= width else shorten(cell, width)
        blanks = " " * (width - text_width(cell))
        parts.append(blanks + cell if column.is_number else cell + blanks)
    return "  ".join(parts).rstrip()


def _fit(columns: Sequence[Column], widths: list[int], available: int) -> list[int]:
    """Return widths that fit: the widest flexible columns are narrowed first, but not below eight characters."""
    widths = list(widths)
    flexible = [i for i, column in enumerate(columns) if column.is_flexible]
    excess = sum(widths) + 2 * (len(widths) - 1) - available
    while excess > 0 and flexible:
        widest = max(flexible, key=lambda i: widths[i])
        if widths[widest] <= 8:
            break
        widths[widest] -= 1
        excess -= 1
    return widths


def _plain(value: Any) -> Any:
    """Return data that JSON can hold: NaN and infinity become None, tuples become lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
