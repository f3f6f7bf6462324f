"""`inlay predict`: published versions answering texts, lines and files."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import screen
from inlay.cli.answers import Asked, Engines, Tally, Windows
from inlay.cli.backbone import check_device_name, open_backbone
from inlay.cli.flags import (
    BackboneOption,
    ConfidenceOption,
    DeviceOption,
    JsonOption,
    StoreOption,
    TextOption,
    check_confidence,
    open_store,
)
from inlay.cli.output import Writer, describe_answer, open_rows, say_answer, standard_rows
from inlay.cli.precision import PrecisionOption, check_precision, say_drift
from inlay.cli.screen import Rate


def predict(
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="NAME, NAME@3 or NAME@best")] = None,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="texts to answer")] = None,
    pair: Annotated[
        list[str] | None,
        typer.Option("--pair", metavar="TEXT|COLUMN", help="second text, once per TEXT; with --input its column"),
    ] = None,
    text: TextOption = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help="CSV, TSV, JSONL, Parquet, CoNLL columns or SQuAD JSON, of any length",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="CSV, TSV or JSONL file to write; default: JSON lines on stdout"
        ),
    ] = None,
    min_confidence: ConfidenceOption = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="fail if any row could not be answered, not only if none could")
    ] = False,
    backbone: BackboneOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Answer texts, lines from stdin, or a file of any length.

    A file with a `task` column is answered in mixed batches, each row by its own task; TASK is for rows that name none.
    It is read and written a few thousand rows at a time, and an output file gets its name when it is whole. A row that
    cannot be answered says so in its `error` column; one that is less sure than --min-confidence gets no label. A task
    that finds answers reads the question as TEXT and its context as --pair. On a GPU a long input is compiled for on
    the way, which is said, takes some seconds and is kept for next time. With --json, a line of JSON for every text.
    """
    check_device_name(device)
    check_confidence(min_confidence)
    asked = Asked(task, texts or [], pair or [], file, text)
    asked.check()
    device = check_precision(precision, device)
    kept = open_store(store)
    manifest = None if task is None else kept.manifest(kept.resolve(task))
    engines = Engines(kept, task, lambda name: open_backbone(backbone or name, device), file if asked.is_file else None)
    engines.min_confidence, engines.precision = min_confidence, precision
    windows = asked.read(has_pairs=manifest is not None and bool(manifest.extra.get("pairs")))
    to_file = output is not None and str(output) != "-"
    try:
        if json or asked.is_file or output is not None:
            abstains = min_confidence is not None
            target = open_rows(Path(str(output)), abstains=abstains) if to_file else standard_rows()
            tally = _write_answers(windows, engines, target)
        else:
            tally = _show_answers(windows, engines)
    finally:  # whoever stops half-way has half of the answers, and must know too
        if engines.num_tokens and precision == "int8":
            say_drift(engines.drifts)
    if to_file:
        screen.emit_json({**tally.to_json(), "output": str(output)}) if json else screen.emit(f"wrote {output}")
    tally.settle(strict=strict)


def _show_answers(windows: Windows, engines: Engines) -> Tally:
    """A line for every text: what it is, how sure, and the text."""
    tally = Tally()
    for rows in windows:
        answers = engines.answer(rows)
        tally.add(answers)
        for row, answer in zip(rows, answers, strict=True):
            if answer.error is not None:
                screen.log(f"line {row.line}: {answer.error.message}", "yellow")
                continue
            about = describe_answer(answer)
            sure = f"  {about['probability']:.4f}" if "probability" in about else ""
            screen.emit(f"{say_answer(about)}{sure}  {screen.shorten(row.text, 60)}")
    return tally


def _write_answers(windows: Windows, engines: Engines, target: AbstractContextManager[Writer]) -> Tally:
    """All rows with their answers to one place, window by window, with the rate at the end."""
    tally, began = Tally(), time.perf_counter()
    with target as writer, screen.Meter("predicting") as meter:
        for rows in windows:
            answers = engines.answer(rows)
            tally.add(answers)
            writer.write([row.record or {} for row in rows], answers)
            tally.rate = Rate(tally.num_rows, engines.num_tokens, time.perf_counter() - began - engines.loading_s)
            meter.update(tally.num_rows, str(tally.rate))
    failed = f", {tally.num_failed:,} failed" if tally.num_failed else ""
    if tally.rate is not None:
        screen.log(f"{tally.rate.describe()}{failed}")
    if writer.left_out:
        names = ", ".join(f"`{name}`" for name in writer.left_out)
        screen.log(f"left out, as the first rows do not have them: {names}; a .jsonl output keeps all", "yellow")
    if tally.first is not None:
        screen.log(f"first failure: {tally.first.message}", "yellow")
    return tally
