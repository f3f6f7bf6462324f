"""`inlay predict` and `inlay evaluate`: published versions answering texts and files, and being judged."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import screen
from inlay.cli.answers import NUM_SLOTS, Asked, Chunks, Engines, Tally, open_engines
from inlay.cli.backbones import check_device_name, open_backbone
from inlay.cli.options import BackboneOption, DeviceOption, JsonOption, StoreOption, config_help, open_store
from inlay.cli.rows import Writer, describe_answer, open_rows, show_label, standard_rows
from inlay.cli.screen import Column

if TYPE_CHECKING:
    from torch import Tensor

    from inlay.data import Split
    from inlay.data.metrics import Report
    from inlay.model import SlotSpec
    from inlay.model.heads import Outcome
    from inlay.store import Manifest, Store, Version

_MOST_LABELS = 20  # of a confusion matrix on the screen

TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help="NAME, NAME@3 or NAME@best")]
TextOption = Annotated[str | None, typer.Option("--text", metavar="COLUMN", help=config_help("data.text"))]
PairOption = Annotated[str | None, typer.Option("--pair", metavar="COLUMN", help=config_help("data.pair"))]
LabelOption = Annotated[str | None, typer.Option("--label", metavar="COLUMN", help=config_help("data.label"))]


def predict(
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="NAME, NAME@3 or NAME@best")] = None,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="texts to answer")] = None,
    pair: Annotated[
        list[str] | None,
        typer.Option("--pair", metavar="TEXT|COLUMN", help="second text, once per TEXT; with --input its column"),
    ] = None,
    text: TextOption = None,
    file: Annotated[
        Path | None, typer.Option("--input", metavar="FILE", help="CSV, TSV, JSONL or Parquet file of any length")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="CSV, TSV or JSONL file to write; default: JSON lines on stdout"),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="fail if any row could not be answered")] = False,
    backbone: BackboneOption = None,
    device: DeviceOption = "auto",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Answer texts, lines from stdin, or a file of any length.

    A file with a `task` column is answered in mixed batches, each row by its own task; TASK is for rows that name none.
    A row that cannot be answered says so in its `error` column. With --json, a line of JSON for every text.
    """
    check_device_name(device)
    asked = Asked(task, texts or [], pair or [], file, text)
    asked.check()
    kept = open_store(store)
    manifest = None if task is None else kept.manifest(kept.resolve(task))
    num_slots, source = (NUM_SLOTS, file) if asked.is_file else (1, None)
    engines = open_engines(kept, task, backbone=backbone, device=device, num_slots=num_slots, file=source)
    chunks = asked.read(has_pairs=manifest is not None and bool(manifest.extra.get("pairs")))
    to_file = output is not None and str(output) != "-"
    if json or asked.is_file or output is not None:
        tally = _write_answers(chunks, engines, open_rows(Path(str(output))) if to_file else standard_rows())
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
            screen.put(f"{show_label(about)}{sure}  {screen.shorten(row.text, 60)}")
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


@dataclass(frozen=True)
class Judged:
    """A version's outputs on labelled rows, and what they are worth."""

    version: Version
    manifest: Manifest
    split: Split
    logits: list[Tensor]
    spec: SlotSpec
    report: Report


def evaluate(
    task: TaskArgument,
    data: Annotated[str, typer.Argument(metavar="DATA", help="labelled file, folder, glue/NAME or hub:NAME")],
    text: TextOption = None,
    pair: PairOption = None,
    label: LabelOption = None,
    split: Annotated[str | None, typer.Option("--split", metavar="COLUMN", help=config_help("data.split"))] = None,
    on_bad_row: Annotated[
        str,
        typer.Option("--on-bad-row", metavar="refuse|skip", show_default=False, help=config_help("data.on_bad_row")),
    ] = "refuse",
    data_root: Annotated[str | None, typer.Option("--data-root", metavar="DIR", help=config_help("data.root"))] = None,
    errors: Annotated[
        Path | None, typer.Option("--errors", metavar="FILE", help="write the rows it got wrong as CSV, TSV or JSONL")
    ] = None,
    backbone: BackboneOption = None,
    device: DeviceOption = "auto",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Judge a task on labelled rows.

    Metrics with 95% confidence intervals, precision, recall and F1 of every label, and the confusion matrix.
    """
    from inlay.config import DataConfig
    from inlay.data import read_split

    check_device_name(device)
    kept = open_store(store)
    version = kept.resolve(task)
    manifest = kept.manifest(version)
    config = DataConfig(text=text, pair=pair, label=label, split=split, on_bad_row=on_bad_row, root=data_root)
    rows = read_split(data, manifest.labels, manifest.kind, config)
    _check_pairs(manifest, rows, version)
    for note in rows.notes:
        screen.note(note)
    judged = _judge(kept, version, rows, backbone=backbone, device=device)
    if errors is not None:
        num_wrong = _write_mistakes(judged, errors)
        screen.say(f"wrote {screen.count(num_wrong, 'mistake')} to {errors}")
    if json:
        about = {"task": version.name, "version": version.reference, "metric": manifest.metric}
        screen.put_json({**about, **judged.report.to_json(), "notes": list(rows.notes)})
    else:
        _put_report(judged)


def _check_pairs(manifest: Manifest, rows: Split, version: Version) -> None:
    from inlay.errors import BadData

    wants = bool(manifest.extra.get("pairs"))
    if wants != (rows.pairs is not None):
        has, needs = ("single texts", "pairs") if wants else ("pairs", "single texts")
        hint = "name the second text's column with `--pair`" if wants else "name the text's column with `--text`"
        raise BadData(f"the rows are {has}, but `{version.reference}` reads {needs}", hint, path=rows.path)


def _judge(store: Store, version: Version, rows: Split, *, backbone: str | None, device: str) -> Judged:
    loaded = store.load(version)
    frozen = open_backbone(backbone or loaded.manifest.backbone["name"], device)
    from inlay.data.metrics import evaluate_report
    from inlay.model import SlotSpec
    from inlay.serving.engine import check_backbone
    from inlay.training.evaluate import predict_split, read_outputs

    manifest = loaded.manifest
    check_backbone(version, manifest, frozen)
    spec = SlotSpec.from_stored(manifest.method, manifest.head)
    done = 0
    with screen.Meter("evaluating", len(rows)) as meter:

        def on_batch(num_rows: int) -> None:
            nonlocal done
            done += num_rows
            meter.update(done)

        logits = predict_split(spec, loaded.tensors, frozen, rows, manifest.max_length, on_batch)
    assert rows.targets is not None
    outputs = read_outputs(spec.head, logits)
    report = evaluate_report(manifest.kind, manifest.labels, rows.targets, outputs)
    return Judged(version, manifest, rows, logits, spec, report)


def _put_report(judged: Judged) -> None:
    report, labels = judged.report, judged.manifest.labels
    screen.say()
    names = sorted(report.metrics, key=lambda name: name != judged.manifest.metric)
    for name in names:
        found = report.metrics[name]
        low, high = screen.score(found.low), screen.score(found.high)
        screen.put(f"{name} {screen.score(found.value)}  (95% interval {low} to {high})")
    if report.labels:
        screen.put()
        numbers = [Column(title, is_number=True) for title in ("precision", "recall", "f1", "rows")]
        cells = [
            [item.label, *map(screen.score, (item.precision, item.recall, item.f1)), screen.count(item.support)]
            for item in report.labels
        ]
        screen.put_table([Column("label", is_flexible=True), *numbers], cells)
    if report.confusion is not None:
        _put_confusion(labels, report.confusion)


def _put_confusion(labels: tuple[str, ...], confusion: tuple[tuple[int, ...], ...]) -> None:
    screen.put()
    if len(labels) > _MOST_LABELS:
        screen.put(f"the confusion matrix of {len(labels)} labels is in the output of --json")
        return
    heads = [Column("true \\ predicted", is_flexible=True)]
    heads += [Column(screen.shorten(label, 12), is_number=True) for label in labels]
    rows = [[label, *map(screen.count, cells)] for label, cells in zip(labels, confusion, strict=True)]
    screen.put_table(heads, rows)


def _write_mistakes(judged: Judged, path: Path) -> int:
    """The rows the version got wrong, in their order; of a regression every row, the worst first."""
    from inlay.model.heads import find_head

    head, rows = find_head(judged.manifest.kind), judged.split
    found: list[tuple[float, dict[str, Any]]] = []
    for position, logits in enumerate(judged.logits):
        outcome = head.answer(logits, judged.spec.head, judged.manifest.labels)
        mistake = _describe_mistake(judged, position, outcome)
        if mistake is not None:
            pair = {} if rows.pairs is None else {"pair": rows.pairs[position]}
            row = {"line": rows.lines[position], "text": rows.texts[position], **pair, **mistake}
            is_number = outcome.value is not None
            found.append((-abs(mistake["predicted"] - mistake["label"]) if is_number else position, row))
    with open_rows(path) as writer:
        writer.write_plain([row for _, row in sorted(found, key=lambda item: item[0])])
    return len(found)


def _describe_mistake(judged: Judged, position: int, outcome: Outcome) -> dict[str, Any] | None:
    """What a row should have got and what it got, or None where that is the same."""
    labels, targets = judged.manifest.labels, judged.split.targets
    assert targets is not None
    if outcome.value is not None:
        return {"label": float(targets[position]), "predicted": outcome.value}
    if outcome.labels is not None:
        true = tuple(label for label, applies in zip(labels, targets[position], strict=True) if applies)
        return None if true == outcome.labels else {"label": "|".join(true), "predicted": "|".join(outcome.labels)}
    true_label, probabilities = labels[int(targets[position])], outcome.probabilities or {}
    if outcome.label is None or outcome.label == true_label:
        return None
    return {"label": true_label, "predicted": outcome.label, "probability": probabilities[outcome.label]}
