"""`inlay remove`: a version, or a task with all its versions, leaves the store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import screen
from inlay.cli.flags import JsonOption, StoreOption, open_store
from inlay.cli.rooms import reports


def remove(
    reference: Annotated[str, typer.Argument(metavar="REF", help="NAME@3 for one version, NAME for all of them")],
    forget: Annotated[
        bool,
        typer.Option(
            "--forget", help="delete its weights, runs, reports and tokenised texts too, at once and for good"
        ),
    ] = False,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Drop a version, or a task with all its versions.

    The bytes stay until `inlay gc`, and the run folders until `inlay gc --runs`. With --forget nothing of a task's
    texts and weights stays: its versions' contents, its run folders with their reports and resume states (those of runs
    on the same file too), and the cache of tokenised texts are deleted. It works for tasks that were removed before.
    Your own files, exports and copies are yours to delete.
    """
    if forget:
        _forget(reference, store, as_json=json)
        return
    removed = open_store(store).remove(reference)
    if json:
        screen.emit_json({"removed": [version.reference for version in removed]})
        return
    for version in removed:
        screen.emit(f"removed {version.reference}")
    screen.log(screen.repeat_store("the bytes stay until `inlay gc`, its runs until `inlay gc --runs`", store), "dim")


def _forget(name: str, store: Path | None, *, as_json: bool) -> None:
    found = reports.forget_task(open_store(store), name)
    if as_json:
        screen.emit_json(found.to_json())
        return
    for reference in found.removed:
        screen.emit(f"removed {reference}")
    runs = f"{screen.count(len(found.runs.runs), 'run folder')} ({screen.size(found.runs.num_bytes)})"
    states = screen.count(found.runs.num_cohorts, "resume state")
    texts = screen.count(found.cached.num_files, "file")
    screen.emit(f"deleted {runs}, {states}, and {texts} of tokenised texts")
    if found.shared:
        shown = ", ".join(found.shared)
        screen.log(f"of the same content, or from the same run, and still there: {shown}", "yellow")
