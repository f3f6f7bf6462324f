"""`inlay runs list|compare|delete`: the runs of a store, published or not."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from inlay.cli import screen
from inlay.cli.app import make_typer
from inlay.cli.flags import JsonOption, StoreOption
from inlay.cli.lazy_packages import reports
from inlay.cli.screen import Column, numbers
from inlay.errors import BadConfig
from inlay.store import Store

app = make_typer(no_args_is_help=True, help="List, compare and delete runs.")
IdsArgument = Annotated[list[str], typer.Argument(metavar="RUN…", help="ids of runs, or their first letters")]


@app.command("list")
def list_(
    task: Annotated[str | None, typer.Option("--task", help="only runs of this task")] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """List the runs, newest first: task, settings, dev score, status, size, and the versions published from them."""
    found = [entry for entry in reports.list_runs(Store(store)) if task is None or task in entry.tasks]
    if json:
        screen.emit_json({"runs": [entry.to_json() for entry in found]})
        return
    if not found:
        screen.log("no runs yet" if task is None else f"no runs of the task `{task}`", "dim")
        return
    rows = [_describe(entry) for entry in found]
    heads: list[Column | str] = [
        "run",
        Column("task", is_flexible=True),
        "method",
        *numbers("lr", "seed", "dev", "epoch", "size"),
    ]
    screen.emit_table([*heads, "changed", "status", Column("version", is_flexible=True)], rows)
    total = screen.size(sum(entry.num_bytes for entry in found))
    screen.log(f"{screen.count(len(found), 'run')}, {total} in {Store(store).root}", "dim")


def _describe(entry: reports.RunEntry) -> list[str]:
    method = screen.name_method(entry.settings.get("method.name"), entry.settings.get("method.size"))
    rate = entry.settings.get("train.lr")
    return [
        *(entry.id, ", ".join(entry.tasks), method),
        *("-" if rate is None else f"{rate:g}", str(entry.settings.get("train.seed"))),
        *(screen.score(entry.dev_metric), "-" if entry.best_epoch is None else str(entry.best_epoch)),
        *(screen.size(entry.num_bytes), datetime.fromtimestamp(entry.changed_at).strftime("%Y-%m-%d %H:%M")),
        *(entry.status, ", ".join(entry.versions) or "-"),
    ]


@app.command("compare")
def compare(ids: IdsArgument, store: StoreOption = None, json: JsonOption = False) -> None:
    """Show runs side by side: their scores, and the settings in which they differ."""
    found = reports.find_runs(reports.list_runs(Store(store)), ids)
    if len(found) < 2:
        raise BadConfig("one run cannot be compared", "give the ids of two or more")
    differences = reports.compare_runs(found)
    if json:
        screen.emit_json({"runs": [entry.to_json() for entry in found], "differences": differences})
        return
    known = {
        "task": [", ".join(entry.tasks) for entry in found],
        "dev score": [f"{entry.metric} {screen.score(entry.dev_metric)}" for entry in found],
        "best epoch": ["-" if entry.best_epoch is None else str(entry.best_epoch) for entry in found],
        "trained": ["-" if entry.seconds is None else screen.duration(entry.seconds) for entry in found],
        "status": [entry.status for entry in found],
        "version": [", ".join(entry.versions) or "-" for entry in found],
    }
    shown = {key: ["-" if value is None else str(value) for value in values] for key, values in differences.items()}
    heads: list[Column | str] = ["", *(Column(entry.id, is_flexible=True) for entry in found)]
    screen.emit_table(heads, [[key, *values] for key, values in (known | shown).items()])


@app.command("delete")
def delete(
    ids: IdsArgument,
    force: Annotated[bool, typer.Option("--force", help="also delete runs that versions were published from")] = False,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Delete runs: weights, scores, reports and resume states.

    Versions need no run to answer, but `explain`, `pick`, `drift` and `report` find the training rows through it, and
    without it the same command trains again. So runs that versions were published from are only deleted with --force.
    Runs that may be training now are never deleted.
    """
    kept = Store(store)
    found = reports.find_runs(reports.list_runs(kept), ids)
    used = next((entry for entry in found if entry.versions), None)
    if used is not None and not force:
        raise BadConfig(f"run `{used.id}` was published as {', '.join(used.versions)}", "delete it with `--force`")
    deleted = reports.delete_runs(kept, found)
    if json:
        screen.emit_json({"runs": list(deleted.runs), "num_bytes": deleted.num_bytes})
        return
    for run_id in deleted.runs:
        screen.emit(f"deleted run {run_id}")
    screen.emit(f"freed {screen.size(deleted.num_bytes)}")
