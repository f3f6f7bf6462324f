"""`inlay predict`: published versions answering texts, lines and files."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import screen
from inlay.cli.answers import NUM_SLOTS, Asked, Chunks, Engines, Tally, open_engines
from inlay.cli.backbones import check_device_name
from inlay.cli.options import (
    BackboneOption,
    ConfidenceOption,
    DeviceOption,
    JsonOption,
    StoreOption,
    TextOption,
    check_confidence,
    open_store,
)
from inlay.cli.rows import Writer, describe_answer, open_rows, say_answer, standard_rows


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
    strict: Annotated[bool, typer.Option("--strict", help="fail if any row could not be answered")] = False,
    backbone: BackboneOption = None,
    device: DeviceOption = "auto",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Answer texts, lines from stdin, or a file of any length.

    A file with a `task` column is answered in mixed batches, each row by its own task; TASK is for rows that name none.
    A row that cannot be answered says so in its `error` column; one that is less sure than --min-confidence gets no
    label. A task that finds answers reads the question as TEXT and its context as --pair. With --json, a line of JSON
    for every text.
    """
    check_device_name(device)
    check_confidence(min_confidence)
    asked = Asked(task, texts or [], pair or [], file, text)
    asked.check()
    kept = open_store(store)
    manifest = None if task is None else kept.manifest(kept.resolve(task))
    num_slots, source = (NUM_SLOTS, file) if asked.is_file else (1, None)
    engines = open_engines(kept, task, backbone=backbone, device=device, num_slots=num_slots, file=source)
    engines.min_confidence = min_confidence
    chunks = asked.read(has_pairs=manifest is not None and bool(manifest.extra.get("pairs")))
    to_file = output is not None and str(output) != "-"
    if json or asked.is_file or output is not None:
        abstains = min_confidence is not None
        target = open_rows(Path(str(output)), abstains=abstains) if to_file else standard_rows()
        tally = _write_answers(chunks, engines, target)
    else:
        tally = _show_answers(chunks, engines)
    if to_file:
        screen.put_json({**tally.to_json(), "output": str(output)}) if json else screen.put(f"wrote {output}")
    tally.settle(strict=strict)


def _show_answers(chunks: Chunks, engines: Engines) -> Tally:
    """A line for every text: what it is, how sure, and the text."""
    tally = Tally()
    for rows in chunks:
        answers = engines.answer(rows)
        tally.add(answers)
        for row, answer in zip(rows, answers, strict=True):
            if answer.error is not None:
                screen.say(f"line {row.line}: {answer.error.message}", "yellow")
                continue
            about = describe_answer(answer)
            sure = f"  {about['probability']:.4f}" if "probability" in about else ""
            screen.put(f"{say_answer(about)}{sure}  {screen.shorten(row.text, 60)}")
    return tally


def _write_answers(chunks: Chunks, engines: Engines, target: AbstractContextManager[Writer]) -> Tally:
    """All rows with their answers to one place, chunk by chunk, with the rate at the end."""
    tally, answering_s = Tally(), 0.0
    with target as writer, screen.Meter("predicting") as meter:
        for rows in chunks:
            began = time.perf_counter()
            answers = engines.answer(rows)
            answering_s += time.perf_counter() - began
            seconds = max(answering_s - engines.loading_s, 1e-9)
            tally.add(answers)
            writer.write([row.record or {} for row in rows], answers)
            meter.update(tally.num_rows, f"{tally.num_rows / seconds:,.0f} rows/s")
    failed = f", {tally.num_failed:,} failed" if tally.num_failed else ""
    seconds = max(answering_s - engines.loading_s, 1e-9)
    rate = tally.num_rows / seconds
    screen.say(f"{screen.count(tally.num_rows, 'row')} in {screen.duration(seconds)}, {rate:,.0f} rows/s{failed}")
    if writer.left_out:
        names = ", ".join(f"`{name}`" for name in writer.left_out)
        screen.say(f"left out, as the first rows do not have them: {names}; a .jsonl output keeps all", "yellow")
    if tally.first is not None:
        screen.say(f"first failure: {tally.first.message}", "yellow")
    return tally
