"""`inlay evaluate`: a published version judged on labelled rows, and the rows it got wrong."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import screen
from inlay.cli.backbone import check_device_name, open_backbone
from inlay.cli.flags import (
    BackboneOption,
    ConfidenceOption,
    DeviceOption,
    JsonOption,
    StoreOption,
    TextOption,
    check_confidence,
    config_help,
    open_store,
)
from inlay.cli.output import open_rows
from inlay.cli.precision import PrecisionOption, check_int8_task, check_precision, compare, put_change
from inlay.cli.screen import Column, Rate

if TYPE_CHECKING:
    from inlay.data import Split
    from inlay.data.metrics import Report
    from inlay.model import Backbone
    from inlay.model.heads.heads import Outcome
    from inlay.store import Manifest, Store, Version
    from inlay.training.evaluate import SplitOutputs as Found

_MOST_LABELS = 20  # of a confusion matrix on the screen

TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help="NAME, NAME@3 or NAME@best")]
PairOption = Annotated[str | None, typer.Option("--pair", metavar="COLUMN", help=config_help("data.pair"))]
LabelOption = Annotated[str | None, typer.Option("--label", metavar="COLUMN", help=config_help("data.label"))]


@dataclass(frozen=True)
class Judged:
    """A version's outputs on labelled rows, and what they are worth."""

    version: Version
    manifest: Manifest
    split: Split
    outcomes: list[Outcome]
    report: Report
    found: Found
    rate: Rate
    frozen: Backbone
    """the backbone it was judged on"""
    plain: Judged | None = None
    """the same in the backbone's own precision, where this is another"""


def evaluate(
    task: TaskArgument,
    data: Annotated[str, typer.Argument(metavar="DATA", help="labelled file, folder, glue/NAME, extra/NAME, hub:NAME")],
    text: TextOption = None,
    pair: PairOption = None,
    label: LabelOption = None,
    split: Annotated[str | None, typer.Option("--split", metavar="COLUMN", help=config_help("data.split"))] = None,
    on_bad_row: Annotated[
        str,
        typer.Option("--on-bad-row", metavar="refuse|skip", show_default=False, help=config_help("data.on_bad_row")),
    ] = "refuse",
    merge_labels: Annotated[
        bool,
        typer.Option(
            "--merge-labels", help="read spellings of a known label (case, blanks, punctuation) as that label"
        ),
    ] = False,
    data_root: Annotated[str | None, typer.Option("--data-root", metavar="DIR", help=config_help("data.root"))] = None,
    errors: Annotated[
        Path | None, typer.Option("--errors", metavar="FILE", help="write the rows it got wrong as CSV, TSV or JSONL")
    ] = None,
    min_confidence: ConfidenceOption = None,
    backbone: BackboneOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Judge a task on labelled rows.

    Metrics with 95% confidence intervals, precision, recall and F1 of every label, the confusion matrix, and how honest
    the probabilities are. With --min-confidence, the share of rows that are answered, and all this on those alone. With
    --precision int8, the scores in float32 and in int8 side by side, and how many answers changed.
    """
    from inlay.data import read_split
    from inlay.settings.run_config import DataConfig

    check_device_name(device)
    check_confidence(min_confidence)
    device = check_precision(precision, device)
    kept = open_store(store)
    version = kept.resolve(task)
    manifest = kept.manifest(version)
    if precision == "int8":
        check_int8_task(manifest)
    merge = merge_labels or bool(manifest.extra.get("merge_labels"))
    config = DataConfig(
        text=text, pair=pair, label=label, split=split, on_bad_row=on_bad_row, root=data_root, merge_labels=merge
    )
    rows = read_split(data, manifest.labels, manifest.kind, config)
    _check_pairs(manifest, rows, version)
    for note in rows.notes:
        screen.detail(note)
    if min_confidence is not None:
        from inlay.serving import engine

        engine.check_confidence(manifest.kind, min_confidence)
    judged = _judge(kept, version, rows, open_backbone(backbone or manifest.backbone["name"], device))
    if judged.found.num_lost:
        lost = screen.count(judged.found.num_lost, "word")
        screen.detail(f"{lost} beyond {manifest.max_length} tokens, taken as outside")
    screen.log(judged.rate.describe())
    if precision == "int8":
        judged = _judge_int8(kept, judged)
        screen.log(f"int8: {judged.rate.describe()}")
    change = None if judged.plain is None else compare(judged.plain, judged)
    if min_confidence is not None:
        judged = _leave_out_unsure(judged, min_confidence)
    if errors is not None:
        num_wrong = _write_mistakes(judged, errors)
        screen.log(f"wrote {screen.count(num_wrong, 'mistake')} to {errors}")
    if json:
        about = {"task": version.name, "version": version.reference, "metric": manifest.metric}
        about |= judged.rate.to_json() | ({} if change is None else {"int8": change})
        screen.emit_json({**about, **judged.report.to_json(), "notes": list(rows.notes)})
    else:
        _put_report(judged)
        if change is not None:
            put_change(change)


def _check_pairs(manifest: Manifest, rows: Split, version: Version) -> None:
    from inlay.errors import BadData

    wants = bool(manifest.extra.get("pairs"))
    if wants != (rows.pairs is not None):
        has, needs = ("single texts", "pairs") if wants else ("pairs", "single texts")
        hint = "name the second text's column with `--pair`" if wants else "name the text's column with `--text`"
        raise BadData(f"the rows are {has}, but `{version.reference}` reads {needs}", hint, path=rows.path)


def _judge(store: Store, version: Version, rows: Split, frozen: Backbone) -> Judged:
    from inlay.model import SlotSpec
    from inlay.model.backbone.int8 import check_slot
    from inlay.model.heads.heads import find_head
    from inlay.serving.engine import check_backbone, find_reading
    from inlay.training.evaluate import judge_split

    loaded = store.load(version)
    manifest = loaded.manifest
    check_backbone(version, manifest, frozen)
    spec = SlotSpec.from_stored(manifest.method, manifest.head)
    check_slot(spec, frozen)
    done, began = 0, time.perf_counter()
    with screen.Meter("evaluating", len(rows)) as meter:

        def on_batch(num_rows: int) -> None:
            nonlocal done
            done += num_rows
            meter.update(min(done, len(rows)), f"{done / (time.perf_counter() - began):,.0f} rows/s")

        found = judge_split(spec, loaded.tensors, frozen, rows, find_reading(manifest), on_batch)
    _check_finite(version, found, rows)
    rate = Rate(len(rows), found.num_tokens, time.perf_counter() - began)
    answer = find_head(manifest.kind).answer
    outcomes = [answer(output, spec.head, manifest.labels) for output in found.outputs]
    report = _report(manifest, rows, found.predictions(manifest.labels))
    return Judged(version, manifest, rows, outcomes, dataclasses.replace(report, ece=found.ece), found, rate, frozen)


def _check_finite(version: Version, found: Found, rows: Split) -> None:
    """Refuse to judge by rows whose outputs are NaN or infinite."""
    from inlay.errors import NotFinite

    lost = [row for row, output in enumerate(found.outputs) if not output.is_finite]
    if lost:
        raise NotFinite(
            f"the outputs of `{version.reference}` are not finite for {len(lost):,} of {len(rows):,} rows, "
            f"the first on line {rows.lines[lost[0]]}",
            f"check it with `inlay verify {version.reference}`, or train the task again with a smaller `--lr`",
        )


def _judge_int8(store: Store, plain: Judged) -> Judged:
    """The same version and rows in int8, beside what they were."""
    from inlay.model.backbone.int8 import quantize

    judged = _judge(store, plain.version, plain.split, quantize(plain.frozen))
    return dataclasses.replace(judged, plain=plain)


def _report(manifest: Manifest, rows: Split, predictions: Any) -> Report:
    from inlay.data.metrics import evaluate_report

    assert rows.targets is not None
    return evaluate_report(manifest.kind, manifest.labels, rows.targets, predictions, unseen=rows.unseen)


def _leave_out_unsure(judged: Judged, min_confidence: float) -> Judged:
    """The same on the rows that are sure enough to be answered, with their share."""
    from inlay.errors import BadConfig
    from inlay.model.heads.heads import find_head

    head = find_head(judged.manifest.kind)
    outcomes = [head.abstain(outcome, min_confidence) for outcome in judged.outcomes]
    kept = [row for row, outcome in enumerate(outcomes) if not outcome.abstained]
    if not kept:
        raise BadConfig(f"no row is as sure as {min_confidence:g}", "give a smaller `--min-confidence`")
    rows, found = judged.split.take(kept), judged.found.take(kept)
    report = _report(judged.manifest, rows, found.predictions(judged.manifest.labels))
    report = dataclasses.replace(report, ece=judged.report.ece, coverage=len(kept) / len(outcomes))
    return dataclasses.replace(judged, split=rows, outcomes=[outcomes[row] for row in kept], report=report, found=found)


def _put_report(judged: Judged) -> None:
    report = judged.report
    screen.log()
    names = sorted(report.metrics, key=lambda name: name != judged.manifest.metric)
    for name in names:
        found = report.metrics[name]
        low, high = screen.score(found.low), screen.score(found.high)
        screen.emit(f"{name} {screen.score(found.value)}  (95% interval {low} to {high})")
    if report.ece is not None:
        about = " of all rows" if report.coverage is not None else ""
        screen.emit(f"ece {screen.score(report.ece)}  (expected calibration error{about}, 15 bins)")
    if report.coverage is not None:
        screen.emit(f"coverage {screen.score(report.coverage)}  ({screen.count(report.num_rows, 'row')} answered)")
    if report.labels:
        screen.emit()
        numbers = [Column(title, is_number=True) for title in ("precision", "recall", "f1", "rows")]
        cells = [
            [item.label, *map(screen.score, (item.precision, item.recall, item.f1)), screen.count(item.support)]
            for item in report.labels
        ]
        screen.emit_table([Column("label", is_flexible=True), *numbers], cells)
    if report.confusion is not None:
        _put_confusion(judged.manifest.labels, report.unseen, report.confusion)


def _put_confusion(labels: tuple[str, ...], unseen: tuple[str, ...], confusion: tuple[tuple[int, ...], ...]) -> None:
    """A row for every true label; labels that training never saw have no column, since nothing predicts them."""
    screen.emit()
    if len(labels) > _MOST_LABELS:
        screen.emit(f"the confusion matrix of {len(labels)} labels is in the output of --json")
        return
    heads = [Column("true \\ predicted", is_flexible=True)]
    heads += [Column(screen.shorten(label, 12), is_number=True) for label in labels]
    true = zip((*labels, *unseen), confusion, strict=True)
    rows = [[label, *map(screen.count, cells[: len(labels)])] for label, cells in true]
    screen.emit_table(heads, rows)


def _write_mistakes(judged: Judged, path: Path) -> int:
    """Write the rows the version got wrong, in their order; of a regression every row, the worst first."""
    from inlay.data.kinds import KINDS

    rows = judged.split
    labels = (*judged.manifest.labels, *rows.unseen)
    assert rows.targets is not None
    mistakes = KINDS[judged.manifest.kind].find_mistakes(judged.outcomes, rows.targets, labels, rows.texts)
    found: list[tuple[float, dict[str, Any]]] = []
    for position, (outcome, mistake) in enumerate(zip(judged.outcomes, mistakes, strict=True)):
        if mistake is not None:
            pair = {} if rows.pairs is None else {"pair": rows.pairs[position]}
            row = {"line": rows.lines[position], "text": rows.texts[position], **pair, **mistake}
            is_number = outcome.value is not None
            found.append((-abs(mistake["predicted"] - mistake["label"]) if is_number else position, row))
    with open_rows(path) as writer:
        writer.write_plain([row for _, row in sorted(found, key=lambda item: item[0])])
    return len(found)
