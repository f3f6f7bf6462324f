"""What `explain`, `pick` and `drift` share: a version that is asked about rows, and the rows it was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import flags, screen
from inlay.cli.rooms import data, explore, pipeline
from inlay.errors import InlayError
from inlay.store import Store

TrainedOnOption = Annotated[
    str | None,
    typer.Option("--data", metavar="FILE", help="the rows the task was trained on; default: where they lay then"),
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


def read_training_rows(reader: explore.VersionReader, store: Store, source: str | None) -> data.Task:
    """Return the task that a version was trained on; refuse rows that are not those."""
    return explore.find_training_rows(reader.version, reader.manifest, store, source)


def try_training_rows(
    reader: explore.VersionReader, store: Store, source: str | None, without: str
) -> tuple[data.Task | None, str | None]:
    """Return the task that a version was trained on, or None and why it goes on `without` those rows."""
    try:
        return read_training_rows(reader, store, source), None
    except InlayError as error:
        if source is not None:  # a file that was named must be the right one
            raise
        reason = f"{without}: {error.message}"
        screen.log(reason, "yellow")
        if error.hint:
            screen.detail(error.hint)
        return None, reason
