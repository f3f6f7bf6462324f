"""Writes docs/commands.md, the reference of all commands, from their options: `python docs/draw_commands.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from inlay.cli import COMMANDS
from inlay.cli.app import load_command

INTRODUCTION = """\
# Command reference

What `inlay COMMAND --help` prints, for every command. `inlay --install-completion` turns on completion with Tab. This \
page is written by `python docs/draw_commands.py` from the code, and a test checks that it is up to date.

Tasks are kept in `~/.inlay`, or where `$INLAY_HOME` or `--store DIR` says. Data goes to stdout and everything else to \
stderr; with `--json` data is JSON. A command that fails exits with a status other than 0, and says what to do.
"""


def main() -> None:
    Path(__file__).with_name("commands.md").write_text(render(), encoding="utf8")


def render() -> str:
    """Return the page as Markdown: a section for each group of commands."""
    panels = dict.fromkeys(entry.panel for entry in COMMANDS.values())
    parts = [INTRODUCTION]
    for panel in panels:
        parts.append(f"## {panel}\n")
        for name, entry in COMMANDS.items():
            if entry.panel == panel:
                parts += _describe(load_command(name), f"inlay {name}", level=3)
    return "\n".join(parts)


def _describe(command: Any, path: str, level: int) -> Iterator[str]:
    """Yield the parts on a command, and on those below it."""
    context = typer.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    yield f"{'#' * level} {path}\n\n```\n{usage}\n```\n\n{_text(command.help or '')}\n"
    rows: dict[str, list[str]] = {}
    for parameter in command.get_params(context):
        record = command.describe(parameter, context) if hasattr(command, "describe") else None
        if record is not None and "--help" not in record[1][0]:
            heading, (words, text) = record
            rows.setdefault(heading, []).append(f"| `{_cell(words)}` | {_cell(text)} |")
    for heading, lines in sorted(rows.items(), key=lambda item: item[0] == "Options"):
        yield "\n".join([f"| {heading.lower()} | |", "|---|---|", *lines, ""])
    for name, below in getattr(command, "commands", {}).items():
        yield from _describe(below, f"{path} {name}", level + 1)


def _text(help_text: str) -> str:
    """Return a docstring's paragraphs, each on one line."""
    return "\n\n".join(" ".join(_cell(paragraph).split()) for paragraph in help_text.split("\n\n"))


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split())).replace("<", "&lt;")


if __name__ == "__main__":
    main()
