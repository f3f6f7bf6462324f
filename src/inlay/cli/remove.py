"""`inlay remove`: removes a version, or a task with all its versions, from the store."""

from __future__ import annotations

from typing import Annotated

import typer

from inlay.cli import screen
from inlay.cli.flags import JsonOption, StoreOption
from inlay.cli.lazy_packages import reports
from inlay.store import Store


def remove(
    reference: Annotated[str, typer.Argument(metavar="REF", help="NAME@3 for one version, NAME for all of them")],
    forget: Annotated[
        bool,
        typer.Option(
            "--forget", help="also delete its weights, runs, reports and tokenised texts, at once and for good"
        ),
    ] = False,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Remove a version, or a task with all its versions.

    The files stay until `inlay gc`, and the run folders until `inlay gc --runs`. With --forget, all texts and weights
    of a task are deleted: its versions' contents, its run folders with reports and resume states (also those of other
    runs on the same file), and the cache of tokenised texts. This works for tasks that were removed before, too. Your
    own files, exports and copies are not deleted.
    """
    kept = Store(store)
    if forget:
        _print_forgotten(reports.forget_task(kept, reference), as_json=json)
        return
    removed = kept.remove(reference)
    if json:
        screen.emit_json({"removed": [version.reference for version in removed]})
        return
    for version in removed:
        screen.emit(f"removed {version.reference}")
    screen.log(screen.repeat_store("the files stay until `inlay gc`, its runs until `inlay gc --runs`", store), "dim")


def _print_forgotten(found: reports.ForgottenTask, *, as_json: bool) -> None:
    """Print what was deleted of a task."""
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
        screen.log(f"with the same content, or from the same run, and still there: {shown}", "yellow")
