"""`inlay suggest`: ranks the store's tasks as starting points for new data."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import screen
from inlay.cli.flags import DeviceOption, JsonOption, RunFlags, RunOptions, StoreOption, command_options
from inlay.cli.lazy_packages import explore, pipeline
from inlay.cli.screen import Column, numbers
from inlay.errors import Missing
from inlay.settings import split_list
from inlay.store import Store

_FEW_ROWS = 50
"""With fewer rows than this, the score is mostly chance."""


@command_options(RunFlags(panels=("Data",), shared=("data", "task", "backbone", "config", "assignments")))
def suggest(
    run: RunOptions,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=8, help="most rows of the data to use")] = 256,
    among: Annotated[
        str | None,
        typer.Option("--among", metavar="TASK,…", help="rank only these; default: every task on the backbone"),
    ] = None,
    device: DeviceOption = "auto",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Rank the store's tasks as starting points for new data.

    Sends a sample of the rows through every task's adapters and through the plain backbone; nothing is trained. The
    score is that of a ridge regression on the outputs, on held-out rows. Start from the best with `inlay train --from`.
    """
    pipeline.check_device_name(device)
    kept, config = Store(store), run.resolve()
    if not kept.ledger(lambda version, error: None):
        raise Missing(f"no tasks in {kept.place} yet", "train one first: `inlay train mail.csv --task mail`")
    pipeline.check_backbone_name(config.backbone)
    task = pipeline.load_task(config)
    backbone = pipeline.open_backbone(config.backbone, device)
    longest = config.train.max_length or explore.SuggestSettings.max_length
    with screen.Meter("looking") as meter:
        settings = explore.SuggestSettings(rows, longest, lambda number: meter.advance(number, "rows"))
        found = explore.suggest(task, backbone, kept, split_list(among) if among else None, settings)
    if not found.ranked and not found.refused:
        raise Missing(f"no task in {kept.place} was trained on `{backbone.name}`", "name another with `--backbone`")
    if json:
        more = {"next": _next_command(found, run, store), "notes": list(task.notes)}
        screen.emit_json({**dataclasses.asdict(found), **more})
    else:
        screen.log()
        _print_suggestions(found, run, store)


def _print_suggestions(found: explore.Suggestions, run: RunOptions, store: Path | None) -> None:
    scores = numbers(f"probed {found.metric}", "gain", "variance explained")
    cells = [_cells(item, item.reference) for item in found.ranked]
    cells.append(_cells(found.plain, "(the backbone)"))
    screen.emit_table([Column("start", is_flexible=True), "kind", "method", *scores], cells)
    for reference, why in found.refused.items():
        screen.log(f"{reference} cannot be a start: {why}", "yellow")
    if found.num_rows < _FEW_ROWS:
        few = screen.count(found.num_rows, "row")
        screen.log(f"{few} are too few to rank starts reliably: compare with a run without `--from`", "yellow")
    screen.emit()
    screen.emit_pairs({"rows": f"{screen.count(found.num_rows)} used", "next": _next_command(found, run, store)})


def _cells(item: explore.Suggestion, name: str) -> list[str]:
    gain = f"{item.gain:+.4f}" if item.reference else "-"
    return [name, item.kind or "-", item.method or "-", screen.score(item.score), gain, f"{100 * item.fit:.1f}%"]


def _next_command(found: explore.Suggestions, run: RunOptions, store: Path | None) -> str:
    """Return the command to train next: from the best task, or from scratch if none beats the plain backbone."""
    words: list[Any] = ["inlay", "train", *run.words()]
    if found.ranked and found.ranked[0].fit > found.plain.fit:
        words += ["--from", found.ranked[0].reference]
    if store is not None:
        words += ["--store", store]
    return shlex.join(map(str, words))
