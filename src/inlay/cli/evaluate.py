"""`inlay evaluate`: scores a published version on labelled rows, and lists the rows it got wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import flags, screen
from inlay.cli.lazy_packages import pipeline
from inlay.cli.output import open_rows
from inlay.cli.screen import Column, numbers
from inlay.settings import DataConfig
from inlay.store import Store

_MERGE = "read other spellings of a label (case, blanks, punctuation) as that label"
_MOST_LABELS = 20  # most labels for which the confusion matrix is printed


def _column(flag: str, key: str, metavar: str = "COLUMN") -> Any:
    return typer.Option(flag, metavar=metavar, show_default=False, help=flags.config_help(key))


def evaluate(
    task: flags.TaskArgument,
    data: Annotated[
        str,
        typer.Argument(metavar="DATA", help="labelled file, folder, glue/NAME, extra/NAME, hub:NAME, https://…, or -"),
    ],
    format: flags.FormatOption = "auto",
    header: flags.HeaderOption = None,
    text: flags.TextOption = None,
    pair: Annotated[str | None, _column("--pair", "data.pair")] = None,
    label: Annotated[str | None, _column("--label", "data.label")] = None,
    split: Annotated[str | None, _column("--split", "data.split")] = None,
    on_bad_row: Annotated[str, _column("--on-bad-row", "data.on_bad_row", "refuse|skip")] = "refuse",
    merge_labels: Annotated[bool, typer.Option("--merge-labels", help=_MERGE)] = False,
    data_root: Annotated[str | None, _column("--data-root", "data.root", "DIR")] = None,
    errors: Annotated[
        Path | None,
        typer.Option("--errors", metavar="FILE", help="write the wrongly answered rows to a CSV, TSV or JSONL file"),
    ] = None,
    keep_formulas: flags.FormulasOption = False,
    min_confidence: flags.ConfidenceOption = None,
    backbone: flags.BackboneOption = None,
    device: flags.DeviceOption = "auto",
    precision: flags.PrecisionOption = "auto",
    store: flags.StoreOption = None,
    json: flags.JsonOption = False,
) -> None:
    """Score a task on labelled rows.

    Prints metrics with 95% confidence intervals, precision, recall and F1 of every label, the confusion matrix, and how
    well the probabilities are calibrated. With --min-confidence it prints the share of rows that are answered, and the
    scores of those rows alone; with --precision int8 the scores in float32 and int8, and how many answers changed.
    """
    config = DataConfig(
        format=format,
        header=header,
        text=text,
        pair=pair,
        label=label,
        split=split,
        on_bad_row=on_bad_row,
        root=data_root,
        merge_labels=merge_labels,
    )
    how: dict[str, Any] = {"device": device, "precision": precision, "min_confidence": min_confidence}
    found = pipeline.evaluate(task, data, Store(store), config, backbone=backbone, **how)
    if errors is not None:
        mistakes = pipeline.list_mistakes(found.scored)
        with open_rows(errors, keep_formulas=keep_formulas) as writer:
            writer.write_plain(mistakes)
        screen.log(f"wrote {screen.count(len(mistakes), 'mistake')} to {errors}")
    if json:
        screen.emit_json(found.to_json())
        return
    _print_report(found.scored)
    if found.change is not None:
        _print_change(found.change)


def _print_change(change: Mapping[str, Any]) -> None:
    screen.emit()
    rows = [
        [name, screen.score(found["float32"]), screen.score(found["int8"]), f"{found['difference']:+.4f}"]
        for name, found in change["metrics"].items()
    ]
    screen.emit_table(["precision", *numbers("float32", "int8", "difference")], rows)
    changed = f"{change['num_changed']:,} of {screen.count(change['num_rows'], 'row')} changed their answer"
    screen.emit(f"{changed}; the largest change of a logit is {change['largest_logit_change']:.2g}")


def _print_report(judged: pipeline.ScoredVersion) -> None:
    """Print the metrics, then the scores of every label and the confusion matrix, if there are any."""
    report = judged.report
    screen.log()
    for name in sorted(report.metrics, key=lambda name: name != judged.manifest.metric):
        found = report.metrics[name]
        interval = f"95% interval {screen.score(found.low)} to {screen.score(found.high)}"
        if found.low == found.high:  # the bootstrap draws from these rows only, which says nothing about others
            interval = "no interval: all draws of these rows score the same"
        screen.emit(f"{name} {screen.score(found.value)}  ({interval})")
    if report.ece is not None:
        about = " of all rows" if report.coverage is not None else ""
        screen.emit(f"ece {screen.score(report.ece)}  (expected calibration error{about}, 15 bins)")
    if report.coverage is not None:
        screen.emit(f"coverage {screen.score(report.coverage)}  ({screen.count(report.num_rows, 'row')} answered)")
    if report.labels:
        screen.emit()
        cells = [
            [item.label, *map(screen.score, (item.precision, item.recall, item.f1)), screen.count(item.support)]
            for item in report.labels
        ]
        columns = numbers("precision", "recall", "f1", "rows")
        screen.emit_table([Column("label", is_flexible=True), *columns], cells)
    if report.confusion is not None:
        _print_confusion(judged.manifest.labels, report.unseen, report.confusion)


def _print_confusion(labels: tuple[str, ...], unseen: tuple[str, ...], confusion: tuple[tuple[int, ...], ...]) -> None:
    """Print a row for every true label; labels that training never saw have no column, since nothing predicts them."""
    screen.emit()
    if len(labels) > _MOST_LABELS:
        screen.emit(f"the confusion matrix of {len(labels)} labels is only in the output of --json")
        return
    heads = numbers(*(screen.shorten(label, 12) for label in labels))
    true = zip((*labels, *unseen), confusion, strict=True)
    rows = [[label, *map(screen.count, cells[: len(labels)])] for label, cells in true]
    screen.emit_table([Column("true \\ predicted", is_flexible=True), *heads], rows)
