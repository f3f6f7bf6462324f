"""`inlay store copy`: copies all versions of a store into another, in folders or object storage."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from inlay.cli import screen
from inlay.cli.app import make_typer
from inlay.cli.flags import JsonOption
from inlay.errors import StoreDamaged
from inlay.store import Store, copy_store

app = make_typer(no_args_is_help=True, help="Copy stores, also to and from object storage.")


@app.callback()
def store() -> None:
    """Make `inlay store` a group, although it has only one command."""


@app.command("copy")
def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="a folder, or s3://BUCKET/PREFIX, gs://…, az://…")],
    target: Annotated[str, typer.Argument(metavar="TO", help="where to copy to; what is there already stays")],
    task: Annotated[
        list[str] | None, typer.Option("--task", metavar="NAME", help="only this task; may be repeated")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Copy every version of a store into another, and verify each copy.

    Names, numbers and bytes stay the same. Runs are not copied. A stopped copy continues where it was.
    """
    opened = Store(target)
    with screen.working(f"copying to {opened.place}"):
        report = copy_store(Store(source), opened, task)
    if json:
        screen.emit_json(dataclasses.asdict(report))
    else:
        size = screen.size(report.num_bytes)
        screen.emit(f"copied {screen.count(report.num_versions, 'version')} ({size}); {report.num_there} there already")
    if report.damaged:
        raise StoreDamaged(
            f"not copied: {'; '.join(report.damaged)}",
            "restore them from a copy, or `inlay remove` them, and copy again",
        )
