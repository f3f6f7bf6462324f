"""The options commands share. Those of a run come from the config's own fields: names, help, types and defaults.

A flag stands for one config key, so `--lr 3e-4` and `--set train.lr=3e-4` mean the same. What decides is, from weak to
strong: the defaults, `--config FILE`, the flags, `--set`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.config import RunConfig, from_tree, read_toml, split_list
from inlay.errors import Missing
from inlay.store import Store

# Panel of `--help` -> the config keys that have a flag of their own there. All others are reached with `--set`.
FLAGS: dict[str, tuple[str, ...]] = {
    "Data": (
        *("data.text", "data.pair", "data.label", "data.kind", "data.labels", "data.metric", "data.dev", "data.test"),
        *("data.split", "data.dev_share", "data.test_share", "data.split_seed", "data.on_bad_row", "data.limit"),
        *("data.encoding", "data.root"),
    ),
    "Method": ("method.name", "method.size"),
    "Training": (
        *("train.lr", "train.epochs", "train.batch_size", "train.max_length", "train.seed", "train.pooling"),
        *("train.patience", "train.class_weights"),
    ),
}
_FIELDS = {name: name for name in ("data", "task", "backbone", "config")} | {"set_": "assignments"}
_FLAG_NAMES = {"method.name": "method", "data.root": "data_root"}  # others are called as their field is

StoreOption = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="folder of the store; default: $INLAY_HOME, or ~/.inlay"),
]
BackboneOption = Annotated[
    str | None,
    typer.Option("--backbone", metavar="NAME", help="read this backbone instead of looking for the task's by its name"),
]
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="auto|cpu|cuda", help="where to compute; auto takes a GPU if there is one")
]


TextOption = Annotated[
    str | None, typer.Option("--text", metavar="COLUMN", help="column of the text; default: recognised by name")
]
ConfidenceOption = Annotated[
    float | None,
    typer.Option("--min-confidence", metavar="P", min=0, max=1, help="give no answer less sure than this probability"),
]


def _note_json(context: typer.Context, value: bool) -> bool:
    context.meta["inlay.json"] = value  # shared with the parent context, where errors are printed
    return value


JsonOption = Annotated[bool, typer.Option("--json", callback=_note_json, help="print data as JSON on stdout")]


@dataclass(frozen=True)
class RunOptions:
    """What the command line says about a run."""

    data: str | None
    task: str | None
    backbone: str | None
    config: Path | None
    assignments: Sequence[str] | None
    flags: Mapping[str, Any]
    """config key -> value, for the flags that were given"""

    def resolve(self) -> RunConfig:
        """The run's settings; a task that was not named is called as its data is."""
        if self.config is not None and not self.config.is_file():
            raise Missing(f"no config file `{self.config}`", "see the config.toml of any run folder for an example")
        config = RunConfig() if self.config is None else read_toml(self.config)
        tree = dataclasses.asdict(config)
        for key, value in self.flags.items():
            section, name = key.split(".")
            tree[section][name] = value
        tree["data"]["source"] = self.data or config.data.source
        tree["backbone"] = self.backbone or config.backbone
        config = from_tree(RunConfig, tree).override(self.assignments or ())
        task = self.task or (config.task if config.task != RunConfig().task else _name_of(config.data.source))
        return dataclasses.replace(config, task=task)


def run_options(*, without: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a run, except the flags `without`; it gets them as its first parameter, `run`."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        own = [item for item in inspect.signature(command, eval_str=True).parameters.values() if item.name != "run"]
        keys = {flag_name(key): key for keys in FLAGS.values() for key in keys if flag_name(key) not in without}
        shared = {item.name: item for item in _shared_parameters()}

        @functools.wraps(command)
        def call(**values: Any) -> None:
            flags = {key: _read(key, values.pop(name)) for name, key in keys.items()}
            given = {key: value for key, value in flags.items() if value is not None}
            command(run=RunOptions(**{_FIELDS[name]: values.pop(name) for name in shared}, flags=given), **values)

        made = [_flag_parameter(key, panel) for panel in FLAGS for key in FLAGS[panel] if key in keys.values()]
        call.__signature__ = inspect.Signature([*shared.values(), *made, *own])  # type: ignore[attr-defined]
        call.__annotations__ = {}  # typer would read the command's own instead of the signature's
        return call

    return add


def flag_name(key: str) -> str:
    """The parameter a config key has on the command line: `method` for `method.name`."""
    return _FLAG_NAMES.get(key, key.partition(".")[2])


def config_help(key: str) -> str:
    """The line of a config field, with its default."""
    item = _config_field(key)
    text, default = item.metadata["help"], item.default
    if default in (None, (), "", "auto") or "default" in text:
        return text
    return f"{text}  [default: {default:g}]" if isinstance(default, float) else f"{text}  [default: {default}]"


def open_store(folder: Path | None) -> Store:
    """The store that `--store`, $INLAY_HOME or the default names."""
    return Store(folder)


def _shared_parameters() -> list[inspect.Parameter]:
    data = typer.Argument(metavar="DATA", help="CSV, TSV, JSONL or Parquet file, folder, glue/NAME or hub:NAME")
    made = {
        "data": Annotated[str | None, data],
        "task": Annotated[str | None, typer.Option("--task", help="name of the task; default: the data's")],
        "backbone": Annotated[
            str | None,
            typer.Option("--backbone", metavar="NAME", help="built-in name, folder or hub name  [default: minilm]"),
        ],
        "config": Annotated[
            Path | None, typer.Option("--config", metavar="FILE.toml", help="settings of the run from a file")
        ],
        "set_": Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="any setting, such as train.warmup=0.2; may be repeated"),
        ],
    }
    return [_parameter(name, annotation, None) for name, annotation in made.items()]


def _flag_parameter(key: str, panel: str) -> inspect.Parameter:
    item, name = _config_field(key), flag_name(key)
    kind = _plain_type(key)
    choices = "|".join(item.metadata["choices"]) or {
        "data.labels": "A,B,…",
        "data.dev": "FILE",
        "data.test": "FILE",
    }.get(key)
    option = typer.Option(f"--{name.replace('_', '-')}", help=config_help(key), metavar=choices, rich_help_panel=panel)
    return _parameter(name, Annotated[kind | None, option], None)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def _config_field(key: str) -> dataclasses.Field[Any]:
    section, _, name = key.partition(".")
    return next(item for item in dataclasses.fields(_section(section)) if item.name == name)


@functools.cache
def _section(name: str) -> type[Any]:
    return typing.get_type_hints(RunConfig)[name]


@functools.cache
def _section_hints(name: str) -> dict[str, Any]:
    return typing.get_type_hints(_section(name))


def _plain_type(key: str) -> type[Any]:
    """The type typer reads: a tuple comes as one text with commas, and optional is what every flag is anyway."""
    section, _, name = key.partition(".")
    hint = _section_hints(section)[name]
    options = [option for option in typing.get_args(hint) or (hint,) if option in (int, float, str)]
    return options[0]


def _read(key: str, value: Any) -> Any:
    if key == "data.labels" and value is not None:
        return split_list(value)
    return value


def _name_of(source: str) -> str:
    """What a task is called when nobody named it: `mail` for `data/Mail.csv`, `cola` for `glue/cola`."""
    last = source.removeprefix("hub:").rstrip("/").rpartition("/")[2]
    return Store.legal_name(Path(last).stem)
