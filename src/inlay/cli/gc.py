"""`inlay gc`: deletes the files that no version needs and, on request, the caches."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from inlay.caches import CompiledCache, open_compiled
from inlay.cli import screen
from inlay.cli.flags import JsonOption, StoreOption
from inlay.cli.lazy_packages import data, reports
from inlay.store import Store


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only show what would be deleted")] = False,
    cache: Annotated[
        bool, typer.Option("--cache", help="also empty the caches of tokenised texts and compiled programs")
    ] = False,
    runs: Annotated[
        bool, typer.Option("--runs", help="also delete the folders of runs that no version was published from")
    ] = False,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Delete the files that no version needs.

    Tokenised texts and compiled programs are kept outside the store, in two caches limited to $INLAY_CACHE_BYTES each.
    The cache of texts never exceeds its limit; that of programs is cut to it when a process begins to compile. --cache
    empties both, except for programs used within the last hour, which a process may still be writing.

    --runs deletes the weights, scores and reports of runs that no version was published from, such as those of removed
    tasks and of sweeps. Stopped runs that can be continued stay; `inlay runs delete` deletes those too.
    """
    caches: dict[str, data.ArrayCache | CompiledCache]
    caches = {"tokenised texts": data.open_tokens(), "compiled programs": open_compiled()}
    opened = Store(store)
    report = opened.gc(dry_run=dry_run)
    unneeded, resumable = reports.list_unneeded_runs(opened) if runs else ([], [])
    deleted = reports.DeletedRuns(tuple(entry.id for entry in unneeded), sum(entry.num_bytes for entry in unneeded))
    if not dry_run:
        deleted = reports.delete_runs(opened, unneeded)
    before = {what: each.usage().num_files for what, each in caches.items()}
    held = {what: each.clear(dry_run=dry_run) if cache else each.usage() for what, each in caches.items()}
    spared = {what: max(0, before[what] - usage.num_files) for what, usage in held.items()}
    if json:
        cached = [
            {"folder": str(caches[what].folder), **vars(usage), "is_chosen": cache, "num_spared": spared[what]}
            for what, usage in held.items()
        ]
        paths = [str(path) for path in report.paths]
        about = {"paths": paths, "cache": cached[0], "compiled": cached[1], "runs": dataclasses.asdict(deleted)}
        screen.emit_json({**dataclasses.asdict(report), **about})
        return
    for path in (*report.paths, *(entry.folder for entry in unneeded)) if dry_run else ():
        screen.emit(str(path))
    verb = "would delete" if dry_run else "deleted"
    many = screen.count(report.num_objects, "object")
    rest = screen.count(report.num_sidecars + report.num_drafts, "other file")
    screen.emit(f"{verb} {many} and {rest}: {screen.size(report.freed_bytes)}")
    if runs:
        screen.emit(f"{verb} {screen.count(len(deleted.runs), 'run folder')}: {screen.size(deleted.num_bytes)}")
        if resumable:
            stopped = f"kept {screen.count(len(resumable), 'unfinished run')} that can be continued; delete them with"
            screen.log(screen.repeat_store(f"{stopped} `inlay runs delete`", store), "dim")
    for what, usage in held.items():
        files = screen.count(usage.num_files, "file")
        text = f"{files} of {what} in {caches[what].folder}: {screen.size(usage.num_bytes)}"
        if cache:
            screen.emit(f"{verb} {text}")
            if spared[what]:
                many = screen.count(spared[what], "file")
                screen.log(
                    f"kept {many} of {what} used within the last hour: a process may still be writing them", "dim"
                )
        elif usage.num_files:
            screen.log(screen.repeat_store(f"kept {text}; delete them with `inlay gc --cache`", store), "dim")
