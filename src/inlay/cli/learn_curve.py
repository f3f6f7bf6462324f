"""`inlay learn-curve`: forecasts the gain from more rows, with a power law through the scores of smaller runs."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import flags, screen
from inlay.cli.lazy_packages import explore, pipeline, reports
from inlay.cli.screen import numbers
from inlay.cli.train import ResumeOption
from inlay.settings import FitSettings
from inlay.store import Store, write_atomically


@flags.command_options(flags.RunFlags(), fit=("max_cohort", *flags.MEMORY))
def learn_curve(
    run: flags.RunOptions,
    effort: FitSettings,
    sizes: Annotated[
        int,
        typer.Option("--sizes", metavar="N", min=4, max=20, help="number of shares of the training rows to train on"),
    ] = 6,
    draws: Annotated[
        int,
        typer.Option("--draws", metavar="N", min=2, max=20, help="runs on each share, each with its own rows and seed"),
    ] = 3,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="draw the curve as .svg or .png")
    ] = None,
    resume: ResumeOption = True,
    device: flags.DeviceOption = "auto",
    store: flags.StoreOption = None,
    json: flags.JsonOption = False,
) -> None:
    """Forecast the gain from more rows, by training on parts of the rows.

    Trains on six shares of the training rows, three runs on each, together as one cohort, and scores all on the same
    dev rows. A power law through the scores forecasts the score with twice and four times as many rows, with an
    interval; if the scores allow no forecast, it says so. Nothing is published. A stopped curve continues where it was.
    """
    if picture is not None:
        explore.check_picture(picture)
    opened = Store(store)
    config = run.resolve(opened)
    pipeline.check_device_name(device)
    task = pipeline.load_task(config)
    listed = ", ".join(f"{size:,}" for size in explore.check_curve(task, sizes))
    backbone = pipeline.open_backbone(config.backbone, device)
    made = explore.make_curve_runs(task, config, backbone, opened, num_sizes=sizes, num_draws=draws)
    screen.detail(f"learning curve: {listed} rows, {draws} runs on each")
    runs = [each for _, _, each in made]
    results = pipeline.fit_runs(runs, backbone, opened.root / "runs", dataclasses.replace(effort, restart=not resume))
    pipeline.write_brief_reports(runs, results, backbone, opened.root / "runs", reports.OF_A_SHARE)
    curve = explore.fit_curve(task, explore.read_points(made, results))
    if picture is not None:
        write_atomically(picture, explore.draw_learning_curve(curve, picture.suffix))
        screen.log(f"wrote {picture}")
    if json:
        screen.emit_json({**curve.to_json(), "picture": None if picture is None else str(picture)})
        return
    screen.log()
    _put(curve)


def _put(curve: explore.LearningCurve) -> None:
    rows = []
    for size in sorted({point.num_rows for point in curve.points}):
        scores = [point.score for point in curve.points if point.num_rows == size]
        deviation = statistics.stdev(scores) if len(scores) > 1 else None
        cells = map(screen.score, (statistics.fmean(scores), deviation, min(scores), max(scores)))
        rows.append([f"{size:,}", *cells])
    heads = numbers("rows", f"mean dev {curve.metric}", "deviation", "least", "most")
    screen.emit_table(heads, rows)
    screen.emit()
    screen.emit(explore.describe_curve(curve), "bold")
    if curve.forecasts and curve.exponent is not None:
        best = curve.floor if not curve.higher_is_better else 1 - (curve.floor or 0.0)
        screen.emit(
            f"The power law tends to {screen.score(best)} as rows^-{curve.exponent:.2f}, on {curve.num_dev:,} dev rows."
        )
