"""`inlay remove`: a version, or a task with all its versions, leaves the store."""

from __future__ import annotations

from typing import Annotated

import typer

from inlay.cli import screen
from inlay.cli.flags import JsonOption, StoreOption, open_store


def remove(
    reference: Annotated[str, typer.Argument(metavar="REF", help="NAME@3 for one version, NAME for all of them")],
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Drop a version, or a task with all its versions.

    The bytes stay until `inlay gc`.
    """
    removed = open_store(store).remove(reference)
    if json:
        screen.emit_json({"removed": [version.reference for version in removed]})
        return
    for version in removed:
        screen.emit(f"removed {version.reference}")
    screen.log("the bytes stay until: inlay gc", "dim")
