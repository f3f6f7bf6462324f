"""`inlay import`: adds a file that `inlay export` wrote, or another library's folder, to the store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import screen
from inlay.cli.flags import JsonOption, StoreOption
from inlay.cli.lazy_packages import exchange, pipeline
from inlay.errors import BadConfig
from inlay.settings import split_list
from inlay.store import Store


def import_(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="a file that `inlay export` wrote, or a folder of AdapterHub or PEFT")
    ],
    name: Annotated[str | None, typer.Option("--name", help="name for the task here; default: its own name")] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            "--backbone",
            metavar="NAME",
            help="backbone it was trained on; default: the one it names, if known",
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option("--labels", metavar="A,B", help="labels of a folder's task, in order; default: those it names"),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help="a folder's kind of task: classify, multilabel, regress")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", min=4, help="tokens a text is cut to; default: 128")
    ] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Add an exported file, or a folder of AdapterHub or PEFT, to the store."""
    kept = Store(store)
    if not path.is_dir():
        for option, value in (("--max-length", max_length), ("--labels", labels), ("--kind", kind)):
            if value is not None:
                raise BadConfig(f"`{option}` is for folders; a file contains it", f"leave out `{option}`")
        version = exchange.import_file(
            path, name, kept, lambda stored: pipeline.open_stored(backbone, stored, kept, "cpu")
        )
        notes: tuple[str, ...] = ()
    else:
        options = exchange.ImportOptions(name, None if labels is None else split_list(labels), kind, max_length)
        opened = pipeline.open_stored(backbone, "" if backbone else exchange.named_backbone(path), kept, "cpu")
        imported = exchange.import_folder(path, opened, kept, options)
        version, notes = imported.version, (f"made by {imported.library} for {imported.base}", *imported.notes)
    if json:
        screen.emit_json({"version": version.reference, "digest": version.digest, "notes": list(notes)})
        return
    for note in notes:
        screen.log(f"note: {note}", "dim")
    screen.emit(f"imported {version.reference}")
    screen.emit(screen.repeat_store(f"check it with: `inlay verify {version.reference}`", store))
