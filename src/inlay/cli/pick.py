"""`inlay pick`: picks rows of an unlabelled file that are worth labelling."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import flags, screen
from inlay.cli.lazy_packages import explore
from inlay.cli.output import open_rows, rename_added
from inlay.cli.screen import Column, numbers
from inlay.cli.trained_on import PairColumnOption, TrainedOnOption, find_joined, open_version, try_training_rows
from inlay.settings import DataConfig

_MOST_READ = 20_000
_ADDED = ("answer", "doubt", "distance")


def pick(
    pool: Annotated[str, typer.Argument(metavar="POOL", help="file of rows without labels, - for stdin, or a URL")],
    task: Annotated[str, typer.Option("--task", metavar="TASK", help="the task: NAME, NAME@3 or NAME@best")],
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, help="rows to pick")] = 20,
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="margin|entropy",
            help="measure of doubt: margin between the two best labels, or entropy of all",
        ),
    ] = "margin",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="CSV, TSV, JSONL, Parquet or .xlsx file to write"),
    ] = None,
    most: Annotated[
        int,
        typer.Option(
            "--most",
            metavar="N",
            min=1,
            help="most rows of the file to look at; of a longer file they are drawn evenly",
        ),
    ] = _MOST_READ,
    format: flags.FormatOption = "auto",
    header: flags.HeaderOption = None,
    text: flags.TextOption = None,
    pair: PairColumnOption = None,
    data: TrainedOnOption = None,
    keep_formulas: flags.FormulasOption = False,
    backbone: flags.BackboneOption = None,
    device: flags.DeviceOption = "auto",
    store: flags.StoreOption = None,
    json: flags.JsonOption = False,
) -> None:
    """Pick rows of an unlabelled file that are worth labelling.

    A row is worth labelling if the task is unsure of its answer, and if it differs from the other picked rows and from
    the training rows. So near duplicates are not picked twice. If answers have no probability, such as numbers, only
    the difference counts.
    """
    columns = DataConfig(format=format, header=header, text=text, pair=pair)
    rows, num_rows = explore.draw_rows(pool, columns, most=most, joined=find_joined(task, store))
    kept, reader = open_version(task, store, backbone, device)
    trained, _ = try_training_rows(reader, kept, data, "picked rows may resemble training rows")
    with screen.Meter("reading") as meter:
        settings = explore.PickSettings(count, by, lambda number: meter.advance(number, "rows"))
        found = explore.pick_rows(reader, rows, settings, None if trained is None else trained.train)
    if output is not None:
        with open_rows(output, keep_formulas=keep_formulas) as writer:
            writer.write_plain([_record(row) for row in found.rows])
        screen.log(f"wrote {screen.count(len(found.rows), 'row')} to {output}")
    if json:
        screen.emit_json({**found.to_json(), "num_rows": num_rows, "output": None if output is None else str(output)})
        return
    cells = [
        [str(row.line), row.answer, "-" if row.doubt is None else f"{row.doubt:.3f}", f"{row.distance:.3f}", row.text]
        for row in found.rows
    ]
    heads = [*numbers("line"), Column("answer", is_flexible=True), *numbers("doubt", "distance")]
    screen.emit_table([*heads, Column("text", is_flexible=True)], cells)
    screen.emit()
    screen.emit_pairs(_describe(found, num_rows, count))


def _record(row: explore.PickedRow) -> dict[str, object]:
    """Return a row's own columns and the added ones."""
    own = dict(row.record)
    values = (row.answer, "" if row.doubt is None else f"{row.doubt:.6f}", f"{row.distance:.6f}")
    return own | dict(zip(rename_added(list(own), _ADDED), values, strict=True))


def _describe(found: explore.PickedRows, num_rows: int, count: int) -> dict[str, str]:
    drawn = "" if found.num_pool == num_rows else f" of {num_rows:,}, drawn evenly"
    pairs = {"looked at": f"{screen.count(found.num_pool, 'row')}{drawn}"}
    if found.num_known:
        pairs["left out"] = f"{screen.count(found.num_known, 'row')} whose text occurs twice or is labelled already"
    if found.measure is None:
        pairs["picked by"] = "difference alone: these answers have no probability"
    if len(found.rows) < count:
        few = "1 row differs" if len(found.rows) == 1 else f"{len(found.rows)} rows differ"
        pairs["fewer"] = f"only {few} from each other and from the training rows"
    return pairs
