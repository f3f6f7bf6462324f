"""`inlay evaluate`: scores of a published version on labelled rows, and the rows it got wrong."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay import serving
from inlay.cli import flags, screen
from inlay.cli.backbone import check_device_name, open_stored
from inlay.cli.output import open_rows
from inlay.cli.rooms import data, model, training
from inlay.cli.screen import Column, Rate, numbers
from inlay.errors import BadConfig, BadData, NotFinite
from inlay.settings import DataConfig
from inlay.store import Manifest, Store, Version

_MERGE = "read spellings of a known label (case, blanks, punctuation) as that label"
_MOST_LABELS = 20  # most labels of a confusion matrix on the screen


def _column(flag: str, key: str, metavar: str = "COLUMN") -> Any:
    return typer.Option(flag, metavar=metavar, show_default=False, help=flags.config_help(key))


@dataclass(frozen=True)
class ScoredVersion:
    """The outputs of a version on labelled rows, and the scores they get."""

    version: Version
    manifest: Manifest
    split: data.Split
    outcomes: list[model.Outcome]
    report: data.Report
    found: training.SplitOutputs
    rate: Rate


def evaluate(
    task: flags.TaskArgument,
    data: Annotated[str, typer.Argument(metavar="DATA", help="labelled file, folder, glue/NAME, extra/NAME, hub:NAME")],
    text: flags.TextOption = None,
    pair: Annotated[str | None, _column("--pair", "data.pair")] = None,
    label: Annotated[str | None, _column("--label", "data.label")] = None,
    split: Annotated[str | None, _column("--split", "data.split")] = None,
    on_bad_row: Annotated[str, _column("--on-bad-row", "data.on_bad_row", "refuse|skip")] = "refuse",
    merge_labels: Annotated[bool, typer.Option("--merge-labels", help=_MERGE)] = False,
    data_root: Annotated[str | None, _column("--data-root", "data.root", "DIR")] = None,
    errors: Annotated[
        Path | None, typer.Option("--errors", metavar="FILE", help="write the rows it got wrong as CSV, TSV or JSONL")
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
    well the probabilities are calibrated. With --min-confidence, the share of rows that are answered, and the scores of
    those rows alone. With --precision int8, the scores in float32 and int8 side by side, and how many answers changed.
    """
    # 1. refuse what cannot be, before anything is loaded
    check_device_name(device)
    serving.check_confidence(min_confidence)
    device = flags.check_precision(precision, device)
    kept = flags.open_store(store)
    version = kept.resolve(task)
    manifest = kept.manifest(version)
    if precision == "int8":
        model.check_spec(model.SlotSpec.from_stored(manifest.method, manifest.head))
    # 2. read the rows
    merge = merge_labels or bool(manifest.extra.get("merge_labels"))
    config = DataConfig(
        text=text, pair=pair, label=label, split=split, on_bad_row=on_bad_row, root=data_root, merge_labels=merge
    )
    rows = _read_rows(data, config, version, manifest)
    serving.check_confidence(min_confidence, manifest.kind)
    # 3. score them, in int8 too if that is asked for
    frozen = open_stored(backbone, manifest.backbone["name"], kept, device)
    found = _evaluate(kept, version, manifest, rows, frozen)
    if found.found.num_lost:
        lost = screen.count(found.found.num_lost, "word")
        screen.detail(f"{lost} beyond {manifest.max_length} tokens count as outside any entity")
    screen.log(found.rate.describe())
    change = None
    if precision == "int8":
        plain, found = found, _evaluate(kept, version, manifest, rows, model.quantize(frozen))
        screen.log(f"int8: {found.rate.describe()}")
        change = _compare(plain, found)
    # 4. tell
    if min_confidence is not None:
        found = _leave_out_unsure(found, min_confidence)
    if errors is not None:
        num_wrong = _write_mistakes(found, errors, keep_formulas=keep_formulas)
        screen.log(f"wrote {screen.count(num_wrong, 'mistake')} to {errors}")
    if json:
        about = {"task": version.name, "version": version.reference, "metric": manifest.metric}
        about |= found.rate.to_json() | ({} if change is None else {"int8": change})
        screen.emit_json({**about, **found.report.to_json(), "notes": list(found.split.notes)})
        return
    _put_report(found)
    if change is not None:
        _put_change(change)


def _read_rows(source: str, config: DataConfig, version: Version, manifest: Manifest) -> data.Split:
    """Read labelled rows; refuse single texts for a task that reads pairs, and the other way round."""
    rows = data.read_split(source, manifest.labels, manifest.kind, config)
    wants = bool(manifest.extra.get("pairs"))
    if wants != (rows.pairs is not None):
        has, needs = ("single texts", "pairs") if wants else ("pairs", "single texts")
        hint = "name the second text's column with `--pair`" if wants else "name the text's column with `--text`"
        raise BadData(f"the rows are {has}, but `{version.reference}` reads {needs}", hint, path=rows.path)
    for note in rows.notes:
        screen.detail(note)
    return rows


def _evaluate(
    store: Store, version: Version, manifest: Manifest, rows: data.Split, frozen: model.Backbone
) -> ScoredVersion:
    serving.check_backbone(version, manifest, frozen)
    tensors = store.load(version, manifest=manifest).tensors
    spec = serving.read_slot(manifest, frozen)
    model.check_slot(spec, frozen)
    judge_split = training.judge_split  # imported now: that takes a second, which is no part of the rate
    done = 0
    began = time.perf_counter()
    with screen.Meter("evaluating", len(rows)) as meter:

        def on_batch(num_rows: int) -> None:
            nonlocal done
            done += num_rows
            meter.update(min(done, len(rows)), f"{done / (time.perf_counter() - began):,.0f} rows/s")

        found = judge_split(spec, tensors, frozen, rows, serving.find_reading(manifest), on_batch)
    rate = Rate(len(rows), found.num_tokens, time.perf_counter() - began)
    outcomes = _read_outcomes(version, manifest, found, rows)
    report = dataclasses.replace(_make_report(manifest, rows, found), ece=found.ece)
    return ScoredVersion(version, manifest, rows, outcomes, report, found, rate)


def _read_outcomes(
    version: Version, manifest: Manifest, found: training.SplitOutputs, rows: data.Split
) -> list[model.Outcome]:
    """Return the answer to every row; refuse a version some of whose answers are not finite."""
    outcomes = training.read_outcomes(found, manifest.labels)
    lost = [row for row, outcome in enumerate(outcomes) if outcome is None]
    if lost:
        raise NotFinite(
            f"the outputs of `{version.reference}` are not finite for {len(lost):,} of {len(rows):,} rows, "
            f"the first on line {rows.lines[lost[0]]}",
            f"check it with `inlay verify {version.reference}`, or train the task again with a smaller `--lr`",
        )
    return [outcome for outcome in outcomes if outcome is not None]


def _make_report(manifest: Manifest, rows: data.Split, found: training.SplitOutputs) -> data.Report:
    assert rows.targets is not None
    predictions = found.predictions(manifest.labels)
    return data.evaluate_report(manifest.kind, manifest.labels, rows.targets, predictions, unseen=rows.unseen)


def _leave_out_unsure(found: ScoredVersion, min_confidence: float) -> ScoredVersion:
    """Return the evaluation of the rows that are sure enough to be answered, with their share."""
    head = model.find_head(found.manifest.kind)
    outcomes = [head.abstain(outcome, min_confidence) for outcome in found.outcomes]
    sure = [row for row, outcome in enumerate(outcomes) if not outcome.abstained]
    if not sure:
        raise BadConfig(f"no row is as sure as {min_confidence:g}", "give a smaller `--min-confidence`")
    rows = found.split.take(sure)
    outputs = found.found.take(sure)
    report = _make_report(found.manifest, rows, outputs)
    report = dataclasses.replace(report, ece=found.report.ece, coverage=len(sure) / len(outcomes))
    answered = [outcomes[row] for row in sure]
    return dataclasses.replace(found, split=rows, outcomes=answered, report=report, found=outputs)


def _compare(plain: ScoredVersion, int8: ScoredVersion) -> dict[str, Any]:
    """Return what int8 changed: every metric before and after, the number of changed answers, the seconds."""
    metrics = {}
    for name, before in plain.report.metrics.items():
        after = int8.report.metrics[name].value
        metrics[name] = {"float32": before.value, "int8": after, "difference": after - before.value}
    outputs = zip(plain.found.outputs, int8.found.outputs, strict=True)
    return {
        "metrics": metrics,
        "num_changed": sum(map(serving.is_changed, plain.outcomes, int8.outcomes)),
        "num_rows": len(plain.outcomes),
        "largest_logit_change": max(float((a.flat - b.flat).abs().max()) for a, b in outputs),
        "seconds": {"float32": plain.rate.seconds, "int8": int8.rate.seconds},
    }


def _put_change(change: Mapping[str, Any]) -> None:
    screen.emit()
    rows = [
        [name, screen.score(found["float32"]), screen.score(found["int8"]), f"{found['difference']:+.4f}"]
        for name, found in change["metrics"].items()
    ]
    screen.emit_table(["precision", *numbers("float32", "int8", "difference")], rows)
    changed = f"{change['num_changed']:,} of {screen.count(change['num_rows'], 'row')} changed their answer"
    screen.emit(f"{changed}; the largest change of a logit is {change['largest_logit_change']:.2g}")


def _put_report(judged: ScoredVersion) -> None:
    """Print the metrics, then the scores of every label and the confusion matrix, where there are any."""
    report = judged.report
    screen.log()
    for name in sorted(report.metrics, key=lambda name: name != judged.manifest.metric):
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
        cells = [
            [item.label, *map(screen.score, (item.precision, item.recall, item.f1)), screen.count(item.support)]
            for item in report.labels
        ]
        columns = numbers("precision", "recall", "f1", "rows")
        screen.emit_table([Column("label", is_flexible=True), *columns], cells)
    if report.confusion is not None:
        _put_confusion(judged.manifest.labels, report.unseen, report.confusion)


def _put_confusion(labels: tuple[str, ...], unseen: tuple[str, ...], confusion: tuple[tuple[int, ...], ...]) -> None:
    """Print a row for every true label; labels that training never saw have no column, since nothing predicts them."""
    screen.emit()
    if len(labels) > _MOST_LABELS:
        screen.emit(f"the confusion matrix of {len(labels)} labels is in the output of --json")
        return
    heads = numbers(*(screen.shorten(label, 12) for label in labels))
    true = zip((*labels, *unseen), confusion, strict=True)
    rows = [[label, *map(screen.count, cells[: len(labels)])] for label, cells in true]
    screen.emit_table([Column("true \\ predicted", is_flexible=True), *heads], rows)


def _write_mistakes(judged: ScoredVersion, path: Path, *, keep_formulas: bool) -> int:
    """Write the rows the version got wrong, in their order; for numbers every row, the worst first."""
    rows = judged.split
    labels = (*judged.manifest.labels, *rows.unseen)
    assert rows.targets is not None
    mistakes = data.KINDS[judged.manifest.kind].find_mistakes(judged.outcomes, rows.targets, labels, rows.texts)
    found: list[tuple[float, dict[str, Any]]] = []
    for position, (outcome, mistake) in enumerate(zip(judged.outcomes, mistakes, strict=True)):
        if mistake is not None:
            pair = {} if rows.pairs is None else {"pair": rows.pairs[position]}
            row = {"line": rows.lines[position], "text": rows.texts[position], **pair, **mistake}
            is_number = outcome.value is not None
            found.append((-abs(mistake["predicted"] - mistake["label"]) if is_number else position, row))
    with open_rows(path, keep_formulas=keep_formulas) as writer:
        writer.write_plain([row for _, row in sorted(found, key=lambda item: item[0])])
    return len(found)
