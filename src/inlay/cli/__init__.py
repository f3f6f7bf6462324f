"""The command line: `inlay COMMAND`. Every module here imports torch, transformers and numpy only inside a command.

`--help` and the commands that only look things up must answer at once, and importing torch takes seconds.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from inlay.cli import backbones, keep, screen, train, use
from inlay.errors import InlayError

STOPPED = 130  # what shells report of a program that Ctrl-C ended
_UsageError: Any = typer.BadParameter.__base__  # click's own; newer typers carry a click of their own


class Border(TyperGroup):
    """Where errors become words and exit statuses."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except InlayError as error:
            if os.environ.get("INLAY_DEBUG"):
                traceback.print_exc()
            screen.complain(error, as_json=ctx.meta.get("inlay.json", False))
            raise typer.Exit(error.exit_status) from None
        except KeyboardInterrupt as stop:
            screen.say()
            screen.say(str(stop) or "stopped", "yellow")
            raise typer.Exit(STOPPED) from None
        except _UsageError as error:
            where = error.ctx.command_path if error.ctx is not None else "inlay"
            text = error.format_message()
            refusal = InlayError(text[:1].lower() + text[1:].rstrip("."), f"see `{where} --help`")
            screen.complain(refusal, as_json=ctx.meta.get("inlay.json", False))
            raise typer.Exit(error.exit_code) from None


app = typer.Typer(
    cls=Border,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        screen.put(f"inlay {version('inlay')}")
        raise typer.Exit


def _set_debug(value: bool) -> None:
    if value:
        os.environ["INLAY_DEBUG"] = "1"


@app.callback()
def inlay(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", callback=_set_debug, help="show the traceback of an error ($INLAY_DEBUG)")
    ] = False,
) -> None:
    """Many text tasks on one frozen transformer: train, keep and use them."""


def stream(context: typer.Context) -> None:
    """Train every data file that appears in a folder, and prove that all earlier tasks stand."""


_COMMANDS = {
    "Train": {"train": train.train, "sweep": train.sweep, "plan": train.plan},
    "Use": {"predict": use.predict, "evaluate": use.evaluate},
    "Keep": {
        "tasks": keep.tasks,
        "show": keep.show,
        "verify": keep.verify,
        "export": keep.export,
        "import": keep.import_,
        "remove": keep.remove,
        "gc": keep.gc,
    },
    "Set up": {"doctor": backbones.doctor},
}
for _panel, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_panel)(_command)
app.add_typer(backbones.app, name="backbone", rich_help_panel="Set up")


def main(arguments: Sequence[str] | None = None) -> None:
    """The console entry point; ends with SystemExit, as every command does."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a text in any language must not stop a narrow terminal
    app(args=None if arguments is None else list(arguments), prog_name="inlay")


__all__ = ["app", "main"]
