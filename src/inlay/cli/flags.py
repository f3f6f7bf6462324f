"""The options that commands share. A run's options come from the config's fields: names, help, types and defaults.

A flag stands for one config key, so `--lr 3e-4` and `--set train.lr=3e-4` mean the same. Settings override each other
in this order, from weakest to strongest: the defaults, the method of the task that `--from` names, `--config FILE` (a
preset that it names comes before its other settings), `--preset`, the flags, `--set`. Where several tasks are trained
as one run, `data.NAME.KEY` (with `--set`, or as `[data.NAME]` in the file) is a setting of one task's rows, and
overrides those of all tasks.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli.lazy_packages import data, pipeline, training
from inlay.errors import BadConfig, InlayError, Missing, UnknownName
from inlay.processes import check_shared
from inlay.settings import DATA_FORMATS, PRESETS, FitSettings, RunConfig, apply_preset, overlay, read_tree, split_list
from inlay.store import Store

# Panel of `--help` -> the config keys that have a flag there. All others are set with `--set`.
FLAGS: dict[str, tuple[str, ...]] = {
    "Data": (
        *("data.format", "data.header"),
        *("data.text", "data.pair", "data.label", "data.kind", "data.labels", "data.metric", "data.dev", "data.test"),
        *("data.split", "data.dev_share", "data.test_share", "data.split_seed", "data.on_bad_row", "data.limit"),
        *("data.encoding", "data.root"),
    ),
    "Method": ("method.name", "method.size"),
    "Training": (
        *("train.lr", "train.epochs", "train.batch_size", "train.max_length", "train.seed", "train.pooling"),
        *("train.patience", "train.class_weights", "train.start"),
    ),
}
USUAL = tuple(FLAGS)
# Panels of the commands that train several tasks as one run, without the flags that only make sense for one task.
_OF_ONE_TASK = ("data.labels", "data.dev", "data.test")
FLAGS |= {
    "Rows": tuple(key for key in FLAGS["Data"] if key not in _OF_ONE_TASK),
    "Tasks": (
        *("joint.sampling", "joint.temperature", "joint.batches", "joint.weights", "joint.steps"),
        *("joint.start", "joint.like", "joint.trained"),
    ),
}
# Config key -> its parameter, and its option, if these are not named after the field.
_FLAG_NAMES = {"method.name": "method", "data.root": "data_root", "joint.start": "from_run"}
_FLAGS = {"train.start": "--from", "joint.start": "--from-run"}
_MORE_HELP = {"method.size": "; not for ia3, bitfit, norms, head, full, top"}
_METAVARS = {"data.labels": "A,B,…", "data.dev": "FILE", "data.test": "FILE", "train.start": "TASK[,TASK…]"}

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZES = {"prefix_bytes": "--reuse-memory", "prefix_file_bytes": "--reuse-disk"}


def _option(kind: Any, *words: str, **settings: Any) -> Any:
    return Annotated[kind, typer.Option(*words, **settings)]


FILES = "CSV, TSV, JSON, Parquet, .xlsx or .txt file, compressed or not, CoNLL columns, SQuAD JSON"
_DATA = typer.Argument(
    metavar="DATA", help=f"{FILES}, folder, glue/NAME, extra/NAME, hub:NAME, https://…, or - for stdin"
)
_BACKBONES = "built-in name, folder or hub name  [default: minilm]"
_RECIPES = f"all settings of a published recipe: {', '.join(PRESETS)}"
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="any setting, such as train.warmup=0.2; may be repeated"),
]
# Options of a run that do not stand for one config key -> their types; all are None by default.
_SHARED: dict[str, Any] = {
    "data": Annotated[str | None, _DATA],
    "task": _option(str | None, "--task", help="name of the task; default: named after the data"),
    "backbone": _option(str | None, "--backbone", metavar="NAME", help=_BACKBONES),
    "preset": _option(str | None, "--preset", metavar="NAME", help=_RECIPES),
    "config": _option(Path | None, "--config", metavar="FILE.toml", help="file with settings of the run"),
    "assignments": SetOption,
}
SHARED = tuple(_SHARED)

# Field of FitSettings -> its flag; the defaults are the fields' own.
_FIT_FLAGS: dict[str, Any] = {
    "max_cohort": _option(
        int | None,
        "--max-cohort",
        metavar="N",
        min=1,
        help="most runs trained together; default: as many as fit in memory, up to 32",
    ),
    "token_budget": _option(
        int | None,
        "--token-budget",
        metavar="N",
        min=1,
        help="most tokens of a forward pass; default: as many as fit in memory",
    ),
    "reuse_prefix": _option(
        bool,
        "--reuse/--no-reuse",
        help="compute the frozen layers below the lowest trained one once per text, and keep their outputs",
    ),
    "prefix_bytes": _option(
        str | None,
        _SIZES["prefix_bytes"],
        metavar="SIZE",
        help="memory for what --reuse keeps, such as 2GB (on a GPU as much host memory too); default: a quarter of the "
        "free memory",
    ),
    "prefix_file_bytes": _option(
        str | None,
        _SIZES["prefix_file_bytes"],
        metavar="SIZE",
        help="disk space for what exceeds that, in a temporary file; 0: none; default: half of the free space",
    ),
    "checkpointing": _option(
        bool,
        "--checkpointing",
        help="recompute activations in the backward pass: far less memory, but slower, and steps are not compiled",
    ),
    "threads": _option(
        int | None,
        "--threads",
        metavar="N",
        min=1,
        help="CPU threads to compute with; default: $OMP_NUM_THREADS, or one per core that is free",
    ),
    "spread": _option(
        str,
        "--spread",
        metavar="auto|cohorts|rows",
        help="what torchrun's processes divide: cohorts (whole runs) or rows (of every batch); auto: rows for few runs",
    ),
}
REUSE = ("reuse_prefix", *_SIZES)
MEMORY = ("token_budget", *REUSE, "checkpointing", "threads")


def _note_store(context: typer.Context, value: Path | None) -> Path | None:
    context.meta["inlay.store"] = value  # in the parent context too, so that hints can repeat it
    return value


TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help="NAME, NAME@3 or NAME@best")]
StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="DIR",
        callback=_note_store,
        help="folder of the store, or s3://…; default: $INLAY_HOME, or ~/.inlay",
    ),
]
BackboneOption = Annotated[
    str | None,
    typer.Option("--backbone", metavar="NAME", help="load this backbone; default: the one the task was trained on"),
]
OnOption = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="WHERE",
        rich_help_panel="Cluster",
        help="train on a Ray cluster: `ray`, or `ray://HOST:10001`",
    ),
]
RayCpusOption = Annotated[
    float, typer.Option("--ray-cpus", metavar="N", rich_help_panel="Cluster", help="CPU cores for each group of runs")
]
RayGpusOption = Annotated[
    float,
    typer.Option(
        "--ray-gpus", metavar="N", rich_help_panel="Cluster", help="GPUs for each group; with 0.5 two groups share one"
    ),
]
LogOption = Annotated[
    list[str] | None,
    typer.Option("--log", metavar="tensorboard|mlflow", help="also log every epoch there; may be repeated"),
]
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="auto|cpu|cuda", help="where to compute; auto uses a GPU if there is one")
]
FormatOption = Annotated[
    str, typer.Option("--format", metavar="|".join(DATA_FORMATS), help="format of the file; auto: from its suffix")
]
HeaderOption = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        help="whether the first row names the columns; default: detected, with a note",
        show_default=False,
    ),
]
TextOption = Annotated[
    str | None,
    typer.Option(
        "--text", metavar="COLUMN", help="column of the text, or several to join; default: recognised by name"
    ),
]
ConfidenceOption = Annotated[
    float | None,
    typer.Option("--min-confidence", metavar="P", help="withhold answers less probable than this, from 0 to 1"),
]
FormulasOption = Annotated[
    bool,
    typer.Option(
        "--keep-formulas",
        help="write cells of CSV and TSV as they are, even if a spreadsheet would run them as formulas",
    ),
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="auto|int8",
        help="int8 is faster on a CPU, but answers drift; the drift is measured and printed",
    ),
]


def _note_json(context: typer.Context, value: bool) -> bool:
    context.meta["inlay.json"] = value  # in the parent context too, where errors are printed
    return value


JsonOption = Annotated[bool, typer.Option("--json", callback=_note_json, help="print data as JSON on stdout")]


@dataclass(frozen=True)
class RunOptions:
    """The options of a run as the command line gives them."""

    data: str | None = None
    task: str | None = None
    backbone: str | None = None
    preset: str | None = None
    config: Path | None = None
    assignments: Sequence[str] | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    """config key -> value, for the flags that were given"""
    tasks: Sequence[str] = ()
    """the tasks of a multi-task run, whose rows may have their own settings"""

    def resolve(self, store: Store | None = None, base: RunConfig = RunConfig()) -> RunConfig:
        """Return the run's settings, which override `base`; a task without a name is named after its data.

        A run that starts from a task of `store` has that task's method, unless other options say otherwise.
        """
        config = self._lay(base)
        if config.train.start and store is not None:
            inherited = training.inherit(config.train.start, store)
            config = self._lay(inherited)
            training.check_method(config.method, inherited.method, config.train.start[0])
        task = self.task or (config.task if config.task != RunConfig().task else pipeline.name_of(config.data.source))
        return dataclasses.replace(config, task=task)

    def resolve_rows(self, config: RunConfig, task: str) -> RunConfig:
        """Return the settings of a multi-task run, overridden by those of one task's own rows."""
        tables = {} if self.config is None else _take_own(read_tree(self.config))
        given = [pair for item in self.assignments or () if (pair := _split_own(item))]
        for name in (*tables, *(name for name, _ in given)):
            if name not in self.tasks:
                raise UnknownName("task", name, self.tasks)
        try:
            own = overlay(config, {"data": tables.get(task, {})})
            own = own.override(f"data.{setting}" for name, setting in given if name == task)
        except InlayError as error:
            raise error.of(task) from None
        if own.data.source != config.data.source:
            place = data.hide_secrets(own.data.source)
            raise BadConfig(
                f"`data.{task}.source` is `{place}`",
                f"give the data as an argument: `{task}={place}`",
            )
        return own

    def words(self) -> list[str]:
        """Return the data and the options as they were given, to print a command that uses them."""
        words = [data.hide_secrets(self.data)] if self.data else []
        for option in ("task", "backbone", "preset", "config"):
            if getattr(self, option) is not None:
                words += [f"--{option}", str(getattr(self, option))]
        for key, value in self.flags.items():
            if isinstance(value, bool):
                words.append(option_name(key) if value else f"--no-{option_name(key).removeprefix('--')}")
            else:
                words += [option_name(key), ",".join(value) if isinstance(value, tuple) else str(value)]
        return words + [word for assignment in self.assignments or () for word in ("--set", assignment)]

    def _lay(self, config: RunConfig) -> RunConfig:
        """Return `config` overridden by everything that was given, from weakest to strongest."""
        if self.config is not None:
            if not self.config.is_file():
                hint = "see the config.toml of any run folder for an example"
                raise Missing(f"no config file `{self.config}`", hint)
            settings = read_tree(self.config)
            if self.tasks:
                _take_own(settings)
            preset = settings.pop("preset", None)
            config = overlay(config if preset is None else apply_preset(str(preset), config), settings)
        if self.preset is not None:
            config = apply_preset(self.preset, config)
        tree: dict[str, Any] = {"backbone": self.backbone or config.backbone, "data": {}}
        if self.data:
            tree["data"]["source"] = self.data
        for key, value in self.flags.items():
            section, name = key.split(".")
            tree.setdefault(section, {})[name] = value
        assignments = [item for item in self.assignments or () if not (self.tasks and _split_own(item))]
        return overlay(config, tree).override(assignments)


def _split_own(assignment: str) -> tuple[str, str] | None:
    """Split `data.NAME.KEY=VALUE`, a setting of one task's rows, into NAME and `KEY=VALUE`; None for other settings."""
    key, equals, value = assignment.partition("=")
    section, _, rest = key.strip().partition(".")
    task, dot, setting = rest.rpartition(".")
    return (task, f"{setting}{equals}{value}") if section == "data" and dot else None


def _take_own(tree: dict[str, Any]) -> dict[str, Any]:
    """Remove the tables of single tasks, `[data.NAME]`, from a file's settings, and return them."""
    data = tree.get("data")
    own = {name: value for name, value in data.items() if isinstance(value, dict)} if isinstance(data, dict) else {}
    for name in own:
        del tree["data"][name]
    return own


@dataclass(frozen=True)
class RunFlags:
    """The options of a run that a command takes."""

    panels: Sequence[str] = USUAL
    """the panels of `FLAGS` whose flags it has"""
    without: Sequence[str] = ()
    """the flags of these panels that it does not have"""
    shared: Sequence[str] = SHARED
    """the options that do not belong to a panel"""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """config key -> the default to show, if the command's differs from the config's"""

    def keys(self) -> dict[str, str]:
        """Return the config key of each flag, by the name of its parameter."""
        keys = {flag_name(key): key for panel in self.panels for key in FLAGS[panel]}
        return {name: key for name, key in keys.items() if name not in self.without}

    def parameters(self) -> list[inspect.Parameter]:
        """Return the parameters that typer reads."""
        parameters = [_parameter(name, _SHARED[name], None) for name in SHARED if name in self.shared]
        for panel in self.panels:
            for key in FLAGS[panel]:
                if flag_name(key) not in self.without:
                    text = config_help(key, self.defaults.get(key))
                    parameters.append(_parameter(flag_name(key), _flag_type(key, panel, text), None))
        return parameters

    def take(self, values: dict[str, Any]) -> RunOptions:
        """Remove the values of these options from what typer read, and return them."""
        given = {}
        for name, key in self.keys().items():
            value = values.pop(name)
            if value is not None:
                is_list = typing.get_origin(_find_field(key)[1]) is tuple
                given[key] = split_list(value) if is_list else value
        return RunOptions(**{name: values.pop(name) for name in self.shared}, flags=given)


def command_options(
    run: RunFlags | None = None, fit: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a run, as its parameter `run`, and flags of `FitSettings`, as its `effort`.

    The command's own parameters follow those of the run; the flags of `fit` come just before `--device`, as in most
    commands it begins the last group. Invalid settings are refused before the command is called.
    """

    def add(command: Callable[..., None]) -> Callable[..., None]:
        named = inspect.signature(command, eval_str=True).parameters.values()
        own = [item for item in named if item.name not in ("run", "effort")]
        place = next((index for index, item in enumerate(own) if item.name == "device"), len(own))
        fit_parameters = [_parameter(name, _FIT_FLAGS[name], getattr(FitSettings, name)) for name in fit]
        run_parameters = [] if run is None else run.parameters()

        @functools.wraps(command)
        def call(**values: Any) -> None:
            made: dict[str, Any] = {}
            if fit:
                made["effort"] = _read_fit({name: values.pop(name) for name in fit}, command.__name__)
            if run is not None:
                made["run"] = run.take(values)
            command(**made, **values)

        parameters = [*run_parameters, *own[:place], *fit_parameters, *own[place:]]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {}  # typer would read the command's own instead of the signature's
        return call

    return add


def flag_name(key: str) -> str:
    """Return the parameter of a config key on the command line: `method` for `method.name`."""
    return _FLAG_NAMES.get(key, key.partition(".")[2])


def option_name(key: str) -> str:
    """Return the option of a config key: `--method` for `method.name`."""
    return _FLAGS.get(key, f"--{flag_name(key).replace('_', '-')}")


def config_help(key: str, default: Any = None) -> str:
    """Return the help line of a config field, with its default or the given one."""
    item, _ = _find_field(key)
    text, default = item.metadata["help"] + _MORE_HELP.get(key, ""), default or item.default
    if default in (None, (), "", "auto") or "default" in text:
        return text
    return f"{text}  [default: {default:g}]" if isinstance(default, float) else f"{text}  [default: {default}]"


_hints_of = functools.cache(typing.get_type_hints)


def _find_field(key: str) -> tuple[dataclasses.Field[Any], Any]:
    """Return the config field of a key, and its type."""
    section, _, name = key.partition(".")
    kind = _hints_of(RunConfig)[section]
    return next(item for item in dataclasses.fields(kind) if item.name == name), _hints_of(kind)[name]


def _flag_type(key: str, panel: str, text: str) -> Any:
    """Return the annotation of a flag for typer: every flag is optional, and a list is one text with commas."""
    item, hint = _find_field(key)
    kind = next(option for option in (bool, int, float, str) if option in (typing.get_args(hint) or (hint,)))
    metavar = "|".join(item.metadata["choices"]) or _METAVARS.get(key)
    name = option_name(key)
    words = f"{name}/--no-{name.removeprefix('--')}" if kind is bool else name
    return _option(kind | None, words, help=text, metavar=metavar, rich_help_panel=panel)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def _read_fit(given: dict[str, Any], command: str) -> FitSettings:
    for name, option in _SIZES.items():
        if given.get(name) is not None:
            if not given["reuse_prefix"]:
                raise BadConfig(
                    f"`{option} {given[name]}` with `--no-reuse`, which keeps nothing", "leave out one of them"
                )
            given[name] = parse_size(given[name], option)
    settings = FitSettings(**given)
    check_shared(settings.spread, command)
    return settings


def parse_size(text: str, option: str) -> int:
    """Return the bytes of `2GB`, `500m`, `1.5GiB`, or of a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise BadConfig(f"`{option} {text}` is not a size", f"write `{option} 2GB`, `500MB`, or 0 for nothing")
    return int(float(match[1]) * _UNITS[match[2]])


def changes(settings: FitSettings) -> dict[str, Any]:
    """Return the fields whose value is not the default."""
    values = {item.name: getattr(settings, item.name) for item in dataclasses.fields(settings)}
    return {name: value for name, value in values.items() if value != getattr(FitSettings, name)}
