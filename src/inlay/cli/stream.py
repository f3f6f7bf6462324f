"""`inlay stream DIR`: trains the data files that appear in a folder, and checks that earlier tasks are unchanged."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli import flags, screen
from inlay.cli.lazy_packages import pipeline
from inlay.cli.train import ReportOption
from inlay.errors import BadConfig, Missing
from inlay.settings import FitSettings
from inlay.store import Store

if TYPE_CHECKING:
    from inlay.stream import StreamEvent

_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_STYLES = {"published": "green", "stands": "green", "known": "yellow", "aside": "red", "fallen": "red", "epoch": "dim"}


def parse_duration(text: str, option: str) -> float:
    """Return the seconds of `2s`, `500ms`, `1.5m`, `1h`, or of a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise BadConfig(f"`{option} {text}` is not a duration", f"write `{option} 2s`, `500ms` or `1m`")
    return float(match[1]) * _UNITS[match[2]]


@flags.command_options(fit=("max_cohort", *flags.MEMORY))
def stream(
    effort: FitSettings,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder to watch for data files")],
    together: Annotated[
        bool, typer.Option("--together/--one-by-one", help="train files that arrive together as one cohort")
    ] = True,
    once: Annotated[
        bool, typer.Option("--once", help="train the files that are there and exit, instead of watching the folder")
    ] = False,
    settle: Annotated[
        str, typer.Option("--settle", metavar="TIME", help="how long a file must stay unchanged before it is read")
    ] = "2s",
    every: Annotated[str, typer.Option("--every", metavar="TIME", help="how often to look for new files")] = "5s",
    method: Annotated[str | None, typer.Option("--method", help=flags.config_help("method.name"))] = None,
    size: Annotated[int | None, typer.Option("--size", help=flags.config_help("method.size"))] = None,
    lr: Annotated[float | None, typer.Option("--lr", help=flags.config_help("train.lr"))] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help=flags.config_help("train.epochs"))] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE.toml", help="settings for files without their own")
    ] = None,
    assignments: flags.SetOption = None,
    backbone: Annotated[
        str | None,
        typer.Option("--backbone", metavar="NAME", help="built-in name, folder or hub name [default: minilm]"),
    ] = None,
    report: ReportOption = True,
    device: flags.DeviceOption = "auto",
    store: flags.StoreOption = None,
    json: flags.JsonOption = False,
) -> None:
    """Train every data file that appears in a folder, publish it, and check that earlier tasks are unchanged.

    A task is named after its file. Settings for one file go into NAME.toml beside it, which must be there first; they
    say how its rows are read and trained, and nothing else. Files outside DIR are not read. A file that cannot be used
    is moved to DIR/bad, with its error beside it. After a kill, the same command continues; the same content is never
    trained twice. Ctrl-C ends it. With --json every event is a JSON line on stdout.
    """
    named = {"method.name": method, "method.size": size, "train.lr": lr, "train.epochs": epochs}
    given = {key: value for key, value in named.items() if value is not None}
    kept = Store(store)
    settings = flags.RunOptions(backbone=backbone, config=config, assignments=assignments, flags=given).resolve(kept)
    settle_s, every_s = parse_duration(settle, "--settle"), parse_duration(every, "--every")
    pipeline.check_device_name(device)
    if not folder.is_dir():
        raise Missing(f"no folder `{folder}`", f"create it with `mkdir {folder}`, then put data files into it")
    loaded = pipeline.open_backbone(settings.backbone, device)

    from inlay.stream import StreamSettings, watch_folder

    watch = StreamSettings(
        together=together, settle_s=settle_s, every_s=every_s, once=once, fit=effort, writes_reports=report
    )
    result = watch_folder(folder, loaded, kept, settings, watch, lambda event: _show(event, as_json=json))
    if once and result.is_interrupted:
        raise KeyboardInterrupt("not finished; the same command continues where it stopped")
    if not json:
        parts = [screen.count(len(result.published), "version") + " published"]
        parts += [f"{screen.count(len(result.aside), 'file')} moved aside"] if result.aside else []
        screen.emit(", ".join(parts))


def _show(event: StreamEvent, *, as_json: bool) -> None:
    screen.log(event.message, _STYLES.get(event.kind, ""))
    for note in event.details.get("notes", ()):
        screen.log(f"  {note}", "dim")
    if as_json:
        screen.emit_json(event.to_json(), indent=None)
        sys.stdout.flush()  # a reader of the pipe must not wait for a full buffer
