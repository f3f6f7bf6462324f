"""The command line: `inlay COMMAND`.

`--help` and the commands that only look things up answer at once: a command's module is imported when it is called,
and torch, transformers and numpy only inside a function that computes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from inlay.cli import screen
from inlay.cli.app import Border, Command, make_typer
from inlay.threads import spin_briefly

_BASELINE = "Score cheap models on a task: TF-IDF, and a linear model on frozen vectors."
_EXPORT = "Write a version as a file for another store, or a folder for another library."
COMMANDS = {
    "train": Command("Train", "Train a task on a frozen backbone and publish it.", takes_several=True),
    "sweep": Command("Train", "Train a grid of settings as one cohort and publish the best.", takes_several=True),
    "multitask": Command("Train", "Train several tasks as one run that shares parameters.", takes_several=True),
    "materialize": Command("Train", "Turn the tasks of a run that shares parameters into ordinary ones."),
    "plan": Command("Train", "Estimate what a run would cost, beside full fine-tuning."),
    "suggest": Command("Train", "Rank the store's tasks as starting points for new data."),
    "baseline": Command("Train", _BASELINE),
    "study": Command("Train", "Reproduce published tables and figures."),
    "presets": Command("Train", "List the presets and what each sets."),
    "stream": Command("Train", "Train every data file that appears in a folder."),
    "predict": Command("Use", "Answer texts, lines from stdin, or a file of any length."),
    "evaluate": Command("Use", "Score a task on labelled rows."),
    "tasks": Command("Keep", "List the tasks and the parameters each adds."),
    "show": Command("Keep", "Show all there is to know of a version."),
    "verify": Command("Keep", "Prove that published versions still stand."),
    "export": Command("Keep", _EXPORT),
    "import": Command("Keep", "Add an exported file, or a folder of AdapterHub or PEFT, to the store."),
    "remove": Command("Keep", "Drop a version, or a task with all its versions."),
    "gc": Command("Keep", "Delete the bytes that no version needs."),
    "backbone": Command("Set up", "List, fetch and describe backbones."),
    "doctor": Command("Set up", "Check the environment, the backbones and the store."),
}


class Root(Border):
    """The group of all commands: `inlay` itself."""

    table = COMMANDS


app = make_typer(cls=Root, no_args_is_help=True)


def _print_version(value: bool) -> None:
    if value:
        screen.emit(f"inlay {screen.own_version()}")
        raise typer.Exit


@app.callback()
def inlay(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error ($INLAY_DEBUG)")] = False,
) -> None:
    """Many text tasks on one frozen transformer: train, keep and use them."""
    if debug:
        os.environ["INLAY_DEBUG"] = "1"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command from the console; ends with SystemExit, as every command does."""
    spin_briefly()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a text in any language must not stop a narrow terminal
    app(args=None if arguments is None else list(arguments), prog_name="inlay")


__all__ = ["app", "main"]
