"""What `explain`, `pick`, `drift` and `report` share: opening a version, and finding the rows it was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import screen
from inlay.cli.lazy_packages import data, explore, pipeline
from inlay.errors import BadConfig, InlayError
from inlay.settings import DATA_FORMATS, DataConfig
from inlay.store import Store

TrainedOnOption = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="FILE", help="the rows the task was trained on; default: the file they were read from"
    ),
]
DataFormatOption = Annotated[
    str,
    typer.Option(
        "--format", metavar="|".join(DATA_FORMATS), help="format of --data; auto: as in training, or from its suffix"
    ),
]
DataHeaderOption = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        help="whether the first row of --data names the columns; default: as in training",
        show_default=False,
    ),
]
PairColumnOption = Annotated[
    str | None, typer.Option("--pair", metavar="COLUMN", help="column of the second text; default: recognised by name")
]


def find_joined(task: str, store: Path | None) -> str | None:
    """Return the text columns that a task was trained on, if it was trained on several that were joined."""
    kept = Store(store)
    joined: str | None = kept.manifest(kept.resolve(task)).extra.get("joined_text")
    return joined


def open_version(
    task: str, store: Path | None, backbone: str | None, device: str
) -> tuple[Store, explore.VersionReader]:
    """Return the store, and a reader for a version in it."""
    pipeline.check_device_name(device)
    kept = Store(store)
    version = kept.resolve(task)
    frozen = pipeline.open_stored(backbone, kept.manifest(version).backbone["name"], kept, device)
    return kept, explore.VersionReader(version, frozen, kept)


def read_training_rows(
    reader: explore.VersionReader, store: Store, source: str | None, columns: DataConfig = DataConfig()
) -> data.Task:
    """Return the task that a version was trained on; refuse rows that differ from those.

    `columns` says the format of `source` and whether it has a header, if these are not as in training.
    """
    known: dict[str, Any] = {"format": columns.format, "header": columns.header}
    if source is None and known != {"format": "auto", "header": None}:
        raise BadConfig("`--format` or `--header` without `--data`", "they say how the file given by `--data` is read")
    return explore.find_training_rows(reader.version, reader.manifest, store, source, **known)


def try_training_rows(
    reader: explore.VersionReader, store: Store, source: str | None, without: str, columns: DataConfig = DataConfig()
) -> tuple[data.Task | None, str | None]:
    """Return the task that a version was trained on, or None and the reason; `without` says what is then missing."""
    try:
        return read_training_rows(reader, store, source, columns), None
    except BadConfig:
        raise
    except InlayError as error:
        if source is not None:  # a file that was named must be the right one
            raise
        reason = f"{without}: {error.message}"
        screen.log(reason, "yellow")
        if error.hint:
            screen.detail(error.hint)
        return None, reason
