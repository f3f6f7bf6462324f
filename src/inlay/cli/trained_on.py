"""What `explain`, `pick` and `drift` share: a version that is asked about rows, and the rows it was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import flags, screen
from inlay.cli.rooms import data, explore, pipeline
from inlay.errors import BadConfig, InlayError
from inlay.settings import DATA_FORMATS, DataConfig
from inlay.store import Store

TrainedOnOption = Annotated[
    str | None,
    typer.Option("--data", metavar="FILE", help="the rows the task was trained on; default: where they lay then"),
]
DataFormatOption = Annotated[
    str,
    typer.Option(
        "--format", metavar="|".join(DATA_FORMATS), help="format of --data; auto: as in training, or by suffix"
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


def open_version(
    task: str, store: Path | None, backbone: str | None, device: str
) -> tuple[Store, explore.VersionReader]:
    """Return the store, and a version of it that can be asked about rows."""
    pipeline.check_device_name(device)
    kept = flags.open_store(store)
    version = kept.resolve(task)
    frozen = pipeline.open_stored(backbone, kept.manifest(version).backbone["name"], kept, device)
    return kept, explore.VersionReader(version, frozen, kept)


def read_training_rows(
    reader: explore.VersionReader, store: Store, source: str | None, columns: DataConfig = DataConfig()
) -> data.Task:
    """Return the task that a version was trained on; refuse rows that are not those.

    `columns` says the format of `source`, and whether it has a header, where it is not as in training.
    """
    known: dict[str, Any] = {"format": columns.format, "header": columns.header}
    if source is None and known != {"format": "auto", "header": None}:
        raise BadConfig("`--format` or `--header` without `--data`", "they say how the file of `--data` is read")
    return explore.find_training_rows(reader.version, reader.manifest, store, source, **known)


def try_training_rows(
    reader: explore.VersionReader, store: Store, source: str | None, without: str, columns: DataConfig = DataConfig()
) -> tuple[data.Task | None, str | None]:
    """Return the task that a version was trained on, or None and why it goes on `without` those rows."""
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
