"""`inlay report`: writes an HTML report and a model card on a task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import flags, screen
from inlay.cli.lazy_packages import reports
from inlay.cli.trained_on import (
    DataFormatOption,
    DataHeaderOption,
    TrainedOnOption,
    open_version,
    read_training_rows,
)
from inlay.errors import InlayError, Missing
from inlay.settings import DataConfig


def report(
    task: flags.TaskArgument,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="where to write the report; default: TASK-report.html")
    ] = None,
    card: Annotated[
        Path | None, typer.Option("--card", metavar="FILE", help="where to write the model card; default: TASK-card.md")
    ] = None,
    rows: Annotated[
        bool, typer.Option("--rows/--no-rows", help="show the rows it got wrong, and the least certain ones")
    ] = True,
    data: TrainedOnOption = None,
    format: DataFormatOption = "auto",
    header: DataHeaderOption = None,
    backbone: flags.BackboneOption = None,
    device: flags.DeviceOption = "auto",
    store: flags.StoreOption = None,
    json: flags.JsonOption = False,
) -> None:
    """Write a report and a model card on a task: scores, mistakes, cost, how to use it.

    The dev rows, and the test rows if there are any, are answered again. The report has scores with 95% intervals, the
    confusion matrix, scores of each label, calibration, the learning curve, the rows it got wrong and the least certain
    ones. It is one self-contained HTML page; the card is Markdown and never has rows. With --json only the files that
    are named are written. `inlay train` writes both into the run's folder.
    """
    columns = DataConfig(format=format, header=header)
    kept, reader = open_version(task, store, backbone, device)
    try:
        trained_on = read_training_rows(reader, kept, data, columns)
    except InlayError as error:
        written = kept.run_folder(reader.manifest.run_id) / "report.html"
        if data is None and written.is_file():
            raise Missing(error.message, f"{error.hint}; the report written after training is `{written}`") from None
        raise
    with screen.working("answering the dev and test rows"):
        found = reports.report_version(kept, reader.version, trained_on, reader.backbone, shows_rows=rows)
    if not json:
        html, card = html or Path(f"{found.name}-report.html"), card or Path(f"{found.name}-card.md")
    for path in filter(None, (html, card)):
        if not path.parent.is_dir():
            raise Missing(f"no folder `{path.parent}`", "create it first, or choose another path")
    reports.write_reports(found, html, card)
    if json:
        screen.emit_json(found.to_json())
        return
    main = found.main_scores
    value, low, high = main.metrics[found.metric]
    interval = "" if low is None else f"  (95% interval {screen.score(low)} to {screen.score(high)})"
    screen.emit(f"{main.side} {found.metric} {screen.score(value)}{interval}")
    screen.emit_pairs({"page": html, "card": card})
