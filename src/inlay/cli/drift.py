"""`inlay drift`: tells whether new rows look like those a task was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from inlay.cli import flags, lazy_packages, screen
from inlay.cli.lazy_packages import explore
from inlay.cli.screen import Column, numbers
from inlay.cli.trained_on import PairColumnOption, TrainedOnOption, find_joined, open_version, read_training_rows
from inlay.settings import DataConfig

_MOST_READ = 5_000
_MOST_LABELS = 12
STATUS = {"alike": 0, "slightly different": 20, "clearly different": 21}
"""verdict -> exit status"""
_VERDICTS = {
    "alike": "the new rows look like those `{}` was trained on",
    "slightly different": "the new rows look slightly different from those `{}` was trained on: check its answers",
    "clearly different": "the new rows look clearly different from those `{}` was trained on: label some, then train",
}


def drift(
    task: flags.TaskArgument,
    new: Annotated[str, typer.Argument(metavar="NEW", help="file of new rows, labelled or not; - for stdin, or a URL")],
    format: flags.FormatOption = "auto",
    header: flags.HeaderOption = None,
    text: flags.TextOption = None,
    pair: PairColumnOption = None,
    data: TrainedOnOption = None,
    backbone: flags.BackboneOption = None,
    device: flags.DeviceOption = "auto",
    store: flags.StoreOption = None,
    json: flags.JsonOption = False,
) -> None:
    """Tell whether new rows look like those a task was trained on.

    A classifier on the plain backbone's vectors tries to tell new rows from training rows. Its AUC is 0.5 if it cannot,
    and 1 if it always can. Also compares how often the task gives each answer, how long texts are and how many of their
    tokens the backbone does not know, and shows the new rows most unlike any training row. Exit status: 0 if alike, 20
    if slightly different (AUC from 0.6), 21 if clearly different (from 0.75). The training rows are read from their
    file.
    """
    columns = DataConfig(format=format, header=header, text=text, pair=pair)
    rows, num_rows = explore.draw_rows(new, columns, most=_MOST_READ, joined=find_joined(task, store))
    kept, reader = open_version(task, store, backbone, device)
    train = read_training_rows(reader, kept, data).train
    with screen.Meter("comparing") as meter:
        split = explore.split_of(rows, lazy_packages.data.hide_secrets(new))
        found = explore.find_drift(reader, split, train, on_rows=lambda number: meter.advance(number, "rows"))
    status = STATUS[found.verdict]
    if json:
        screen.emit_json({**found.to_json(), "num_rows": num_rows, "exit_status": status})
    else:
        _put(found)
    raise typer.Exit(status)


def _put(found: explore.DriftReport) -> None:
    screen.emit(_VERDICTS[found.verdict].format(found.reference), "bold")
    screen.emit()
    low, high = found.interval
    interval = f"95% interval {low:.3f} to {high:.3f}, p-value {found.p:.3f}"
    pairs = {
        "told apart": f"AUC {found.auc:.3f} ({interval}); 0.5 means alike",
        "compared": f"{screen.count(found.num_new, 'new row')} with {screen.count(found.num_train, 'training row')}",
    }
    if found.num_repeated:
        pairs["left out"] = f"{screen.count(found.num_repeated, 'new row')} with the text of another"
    if found.share_known:
        pairs["known"] = f"{found.share_known:.1%} of the new texts are training texts"
    screen.emit_pairs(pairs)
    _print_shifts("answer", found.labels)
    _print_shifts("texts", found.texts)
    if found.odd:
        screen.emit()
        cells = [[f"{row.cosine:.3f}", str(row.line), row.answer, row.text] for row in found.odd]
        heads = [*numbers("nearest", "line"), Column("answer", is_flexible=True)]
        screen.emit_table([*heads, Column("most unlike any training row", is_flexible=True)], cells)


def _print_shifts(title: str, shifts: Sequence[explore.Shift]) -> None:
    """Print the shifts as a table; if there are many, only the most significant ones."""
    if not shifts:
        return
    shown = shifts
    if len(shifts) > _MOST_LABELS:
        shown = sorted(shifts, key=lambda shift: 1.0 if shift.p is None else shift.p)[:_MOST_LABELS]
        title = f"{title} ({_MOST_LABELS} of {len(shifts)})"
    screen.emit()
    cells = [
        [shift.name, f"{shift.train:.3g}", f"{shift.new:.3g}", "-" if shift.p is None else f"{shift.p:.2g}"]
        for shift in shown
    ]
    screen.emit_table([Column(title, is_flexible=True), *numbers("training", "new", "p")], cells)
