"""The list of commands: finding them by name, their help, and errors as messages and exit statuses.

A command's module is imported when the command is called, so `--help` imports none of them.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from inlay.cli import screen
from inlay.errors import NONE_YET, BadConfig, DiskFull, InlayError, UnknownName
from inlay.processes import current_process
from inlay.threads import spin_briefly

STOPPED = 130  # the exit status that shells report for a program ended by Ctrl-C
_UsageError: Any = typer.BadParameter.__base__  # click's; newer versions of typer bring their own copy of click

_NO_COMMAND = "NoArgsIsHelpError"  # click's error for a group without a command; `typer` does not export it
_OPTIONS_FOLLOW = "options follow the command, as in `inlay tasks --store DIR`; `inlay --help` lists the commands"


class Command(NamedTuple):
    """A command's group in the list, and its line there, which is the first line of its docstring."""

    panel: str
    summary: str
    takes_several: bool = False
    """whether it may run in several processes, started by `torchrun`"""


_BASELINE = "Score cheap models on a task: TF-IDF, and a linear model on frozen vectors."
_EXPORT = "Write a version as a file for another store, or a folder for another library."
COMMANDS = {
    "train": Command("Train", "Train a task on a frozen backbone and publish it.", takes_several=True),
    "sweep": Command("Train", "Train a grid of settings as one cohort and publish the best.", takes_several=True),
    "multitask": Command("Train", "Train several tasks as one run that shares parameters.", takes_several=True),
    "materialize": Command("Train", "Turn the tasks of a run that shares parameters into ordinary ones."),
    "plan": Command("Train", "Estimate the cost of a run, compared with full fine-tuning."),
    "suggest": Command("Train", "Rank the store's tasks as starting points for new data."),
    "baseline": Command("Train", _BASELINE),
    "learn-curve": Command("Train", "Forecast the gain from more rows, by training on parts of the rows."),
    "pick": Command("Train", "Pick rows of an unlabelled file that are worth labelling."),
    "study": Command("Train", "Reproduce published tables and figures."),
    "presets": Command("Train", "List the presets and what each sets."),
    "stream": Command("Train", "Train every data file that appears in a folder."),
    "predict": Command("Use", "Answer texts, lines from stdin, or a file of any length."),
    "evaluate": Command("Use", "Score a task on labelled rows."),
    "explain": Command("Use", "Show which words moved an answer, and the training rows nearest to it."),
    "report": Command("Use", "Write a report and a model card on a task: scores, mistakes, cost, how to use it."),
    "drift": Command("Use", "Tell whether new rows look like those a task was trained on."),
    "serve": Command("Serve", "Serve the tasks of a store over HTTP, and train new ones."),
    "tenant": Command("Serve", "Add, list, limit and remove the tenants of a service."),
    "key": Command("Serve", "Make, list and revoke the keys that requests need."),
    "tasks": Command("Keep", "List the tasks and the parameters each adds."),
    "show": Command("Keep", "Show everything that is known about a version."),
    "verify": Command("Keep", "Prove that published versions still answer as they did."),
    "export": Command("Keep", _EXPORT),
    "import": Command("Keep", "Add an exported file, or a folder of AdapterHub or PEFT, to the store."),
    "remove": Command("Keep", "Remove a version, or a task with all its versions."),
    "runs": Command("Keep", "List, compare and delete runs."),
    "gc": Command("Keep", "Delete the files that no version needs."),
    "store": Command("Keep", "Copy stores, also to and from object storage."),
    "backbone": Command("Set up", "List, fetch and describe backbones."),
    "doctor": Command("Set up", "Check the environment, the backbones and the store."),
}


# typer's name of a value's type -> the word for it in `--help`
_VALUES = {"str": "TEXT", "int": "N", "int range": "N", "float": "NUMBER", "float range": "NUMBER", "path": "PATH"}
_TYPE = re.compile(r" <((?:[^<>\[\]]|\[[^\]]*\])+)>$")


class GroupedCommand(TyperCommand):
    """A command whose help lists its options by heading, and names their values in plain words."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line: `TASK DATA`, not `{TASK} {DATA}` as typer writes them."""
        return [re.sub(r"^\{(.+)\}", r"\1", piece).replace("…...", "…") for piece in super().collect_usage_pieces(ctx)]

    def describe(self, parameter: Any, ctx: Any) -> tuple[str, tuple[str, str]] | None:
        """Return the heading of an argument or option, its words, and its help; None if it is hidden."""
        record = parameter.get_help_record(ctx)
        if record is None:
            return None
        is_argument = parameter.param_type_name == "argument"
        kind = _TYPE.search(record[0])
        value = "" if kind is None or is_argument else f" {_VALUES.get(kind[1], 'VALUE')}"
        heading = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
        text = re.sub(r"(\d+)<=x<=(\d+)", r"\1 to \2", record[1].replace("x>=", "at least "))
        return heading, (_TYPE.sub("", record[0]) + value, text)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options, a section for each heading."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for heading, record in filter(None, (self.describe(parameter, ctx) for parameter in self.get_params(ctx))):
            sections.setdefault(heading, []).append(record)
        usual_last = sections.pop("Options", None)
        for heading, records in {**sections, **({"Options": usual_last} if usual_last else {})}.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=32)


class Commands(TyperGroup):
    """The group of all commands; it also prints their errors as messages."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command with its summary only, without importing its module."""
        if cmd_name not in COMMANDS:
            close = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            hint = f"did you mean `inlay {close[0]}`?" if close else "`inlay --help` lists the commands"
            raise BadConfig(f"no command named `{cmd_name}`", hint)
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name].summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the name of the called command, the command with its options, and its arguments."""
        if ctx.resilient_parsing and args[0] not in COMMANDS:  # a shell completes a line with an unknown command
            return None, None, args
        self.get_command(ctx, args[0])
        size = current_process().size
        if size > 1 and not COMMANDS[args[0]].takes_several:
            raise BadConfig(f"`{args[0]}` runs in one process, not in {size}", "run it without `torchrun`")
        return args[0], load_command(args[0]), args[1:]

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the options before the command; print an error in them as a message, as `invoke` does."""
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            if type(error).__name__ == _NO_COMMAND:
                raise
            screen.print_error(BadConfig(_describe_usage(error), _OPTIONS_FOLLOW), as_json="--json" in args)
            raise typer.Exit(BadConfig.exit_status) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands, a section for each group."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, entry in COMMANDS.items():
            sections.setdefault(entry.panel, []).append((name, entry.summary))
        width = max(map(len, COMMANDS))
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in records])

    def invoke(self, ctx: Any) -> Any:
        """Run the called command; print an error as a message and exit with its status."""
        try:
            return super().invoke(ctx)
        except (InlayError, OSError) as error:
            # If the reader of a pipe went away (`| head`), typer exits quietly.
            if os.environ.get("INLAY_DEBUG") or isinstance(error, BrokenPipeError):
                raise
            refusal = _describe_os_error(error) if isinstance(error, OSError) else error
        except _UsageError as error:
            where = error.ctx.command_path if error.ctx is not None else "inlay"
            if type(error).__name__ == _NO_COMMAND:  # its message is the help
                screen.log(error.format_message())
                raise typer.Exit(BadConfig.exit_status) from None
            refusal = BadConfig(_describe_usage(error), f"see `{where} --help`")
        except KeyboardInterrupt as stop:
            screen.log()
            screen.log(str(stop) or "stopped", "yellow")
            raise typer.Exit(STOPPED) from None
        refusal.hint = _hint_of(refusal, ctx.meta.get("inlay.store"))
        screen.print_error(refusal, as_json=ctx.meta.get("inlay.json", False))
        raise typer.Exit(refusal.exit_status)


def _hint_of(error: InlayError, folder: Path | None) -> str | None:
    """Return an error's hint: its commands repeat the `--store` that was given, and an empty store is named."""
    if isinstance(error, UnknownName) and error.kind == "task" and error.hint == NONE_YET:
        from inlay.store import Store

        return f"there are no tasks in {Store(folder).place} yet; `--store DIR` names another store"
    return error.hint and screen.repeat_store(error.hint, folder)


def _describe_usage(error: Any) -> str:
    """Describe a wrong option or argument; pydantic's message on a wrong type lacks the value, so it is added."""
    text = error.format_message()
    faults = getattr(error.__cause__ or error.__context__, "errors", None)
    if faults is not None and "Input should be" in text:
        text = text.replace("Input should be", f"`{faults()[0]['input']}` should be").partition(", unable to")[0]
    return str(text[:1].lower() + text[1:].rstrip("."))


def _describe_os_error(error: OSError) -> InlayError:
    where = "" if error.filename is None else f"`{screen.shorten(os.fsdecode(error.filename), 200)}`: "
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"{where}{error.strerror}", "free some space, or use another disk, and run the same command again"
        )
    hint = "check that the file exists and that you have access to it; `inlay --debug …` shows where it happened"
    return InlayError(f"{where}{error.strerror or error}", hint)


def load_command(name: str) -> Any:
    """Import the module that has the name of a command, and return the command with its options."""
    function = f"{name}_" if iskeyword(name) else name.replace("-", "_")
    module = import_module(f"inlay.cli.{function}")
    group = getattr(module, "app", None)
    if group is None:
        found = getattr(module, function)
        # One line for each paragraph of the docstring: the terminal's width decides where lines end.
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in found.__doc__.split("\n\n"))
        group = make_typer()
        group.command(name, help=text)(found)
    command = typer.main.get_command(group)
    command.name = name
    return command


class _Typer(typer.Typer):
    """A Typer whose commands are `GroupedCommand`s."""

    def command(self, name: str | None = None, **settings: Any) -> Any:
        """Return the decorator of a command."""
        return super().command(name, **{"cls": GroupedCommand, **settings})


def make_typer(**settings: Any) -> typer.Typer:
    """Return a Typer with our defaults: plain help, no completion script, Python's own tracebacks."""
    return _Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        **{"add_completion": False, **settings},
    )


app = make_typer(cls=Commands, no_args_is_help=True, add_completion=True)


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
    """Run a command from the console; always ends with SystemExit."""
    spin_briefly()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # any text must be printable, whatever the terminal's encoding
    app(args=None if arguments is None else list(arguments), prog_name="inlay")
