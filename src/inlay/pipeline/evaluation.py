"""A published version's answers to labelled rows, and the scores they get."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay import data, model, serving, terminal, training
from inlay.errors import BadConfig, BadData, InlayError, NotFinite
from inlay.notebook import show_html
from inlay.pipeline.backbones import check_backbone_name, check_device_name, device_for_precision, open_stored
from inlay.settings import DataConfig
from inlay.store import HASHED, Manifest, Store, Version

_MANY = 0.5
"""share of a version's probes from which rows are taken to be those that it was trained on"""


@dataclass(frozen=True)
class ScoredVersion:
    """The outputs of a version on labelled rows, and the scores they get."""

    version: Version
    manifest: Manifest
    split: data.Split
    outcomes: list[model.Outcome]
    report: data.Report
    found: training.SplitOutputs
    rate: terminal.Rate


@dataclass(frozen=True)
class EvaluationReport:
    """The scores of a version on labelled rows; `change` says what int8 changed, if it was asked for.

    >>> report = inlay.evaluate("mood", rows, progress=False)
    >>> report
    EvaluationReport(mood@1: accuracy ... on 40 rows)
    >>> [sorted(mistake) for mistake in report.mistakes][:1]
    [...]
    """

    scored: ScoredVersion
    change: dict[str, Any] | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The scores by metric; `scored.report` has their intervals, and those of every label."""
        return {name: found.value for name, found in self.scored.report.metrics.items()}

    @property
    def mistakes(self) -> list[dict[str, Any]]:
        """The rows it got wrong, in their order; for numbers every row, the worst first."""
        return list_mistakes(self.scored)

    def __repr__(self) -> str:
        metric, rows = self.scored.manifest.metric, terminal.count(len(self.scored.split), "row")
        score = terminal.score(self.metrics[metric])
        return f"EvaluationReport({self.scored.version.reference}: {metric} {score} on {rows})"

    def _repr_html_(self) -> str:
        metrics = self.scored.report.metrics
        rows = [[name, found.value, found.low, found.high] for name, found in metrics.items()]
        return show_html(repr(self), {}, ["metric", "value", "95% from", "to"], rows)

    def to_json(self) -> dict[str, Any]:
        """Return the evaluation as data: `inlay evaluate --json` prints it."""
        scored = self.scored
        about = {"task": scored.version.name, "version": scored.version.reference, "metric": scored.manifest.metric}
        about |= scored.rate.to_json() | ({} if self.change is None else {"int8": self.change})
        return {**about, **scored.report.to_json(), "notes": list(scored.split.notes)}


def evaluate(
    task: str,
    rows: data.RowsGiven,
    store: Store,
    config: DataConfig,
    *,
    backbone: str | model.Backbone | None = None,
    device: str = "auto",
    precision: str = "auto",
    min_confidence: float | None = None,
) -> EvaluationReport:
    """Score a task on labelled rows.

    With precision `int8` they are answered in int8 too, and both are compared. Rows answered with less than
    `min_confidence` are left out of the scores.
    """
    # 1. check the arguments before anything is loaded
    check_device_name(device)
    if not isinstance(backbone, model.Backbone):
        check_backbone_name(backbone)
    serving.check_confidence(min_confidence)
    device = device_for_precision(precision, device)
    version = store.resolve(task)
    manifest = store.manifest(version)
    if precision == "int8":
        model.check_spec(model.SlotSpec.from_stored(manifest.method, manifest.head))
    # 2. read the rows
    merge = config.merge_labels or bool(manifest.extra.get("merge_labels"))
    split = _read_rows(rows, dataclasses.replace(config, merge_labels=merge), version, manifest)
    serving.check_confidence(min_confidence, manifest.kind)
    # 3. score them, in int8 too if that is asked for
    if not isinstance(backbone, model.Backbone):
        backbone = open_stored(backbone, manifest.backbone["name"], store, device)
    scored = _score_version(store, version, manifest, split, backbone)
    if scored.found.num_lost:
        lost = terminal.count(scored.found.num_lost, "word")
        terminal.detail(f"{lost} beyond {manifest.max_length} tokens count as outside any entity")
    terminal.log(scored.rate.describe())
    change = None
    if precision == "int8":
        plain, scored = scored, _score_version(store, version, manifest, split, model.quantize(backbone))
        terminal.log(f"int8: {scored.rate.describe()}")
        change = _compare(plain, scored)
    return EvaluationReport(scored if min_confidence is None else _leave_out_unsure(scored, min_confidence), change)


def _read_rows(source: data.RowsGiven, config: DataConfig, version: Version, manifest: Manifest) -> data.Split:
    """Read labelled rows; refuse single texts for a task that reads pairs, and the other way round."""
    joined = manifest.extra.get("joined_text")
    has_columns = isinstance(source, str | Path) or hasattr(source, "columns")
    takes_joined = config.text is None and joined is not None and has_columns
    try:
        own = dataclasses.replace(config, text=joined) if takes_joined else config
        rows = data.read_split(source, manifest.labels, manifest.kind, own)
    except BadData as error:
        if takes_joined and "no column named" in error.message:
            why = f"the task was trained on `{joined}` joined; name another column with `--text`"
            error.hint = "; ".join(filter(None, (why, error.hint)))
        raise
    wants = bool(manifest.extra.get("pairs"))
    if wants != (rows.pairs is not None):
        has, needs = ("single texts", "pairs") if wants else ("pairs", "single texts")
        hint = "name the second text's column with `--pair`" if wants else "name the text's column with `--text`"
        raise BadData(f"the rows are {has}, but `{version.reference}` reads {needs}", hint, path=rows.path)
    if manifest.share_of_probes_in(set(itertools.zip_longest(rows.texts, rows.pairs or ()))) > _MANY:
        note = f"most dev rows of `{version.reference}` are among these: the scores are too good for rows it never saw"
        rows = dataclasses.replace(rows, notes=(*rows.notes, note))
    for note in rows.notes:
        terminal.detail(note)
    return rows


def read_probe_rows(
    store: Store, versions: Sequence[Version], rows: data.RowsGiven, config: DataConfig
) -> list[serving.ProbeRow]:
    """Read rows as each version with hashed probes reads them, to find the rows of its probes among them."""
    found: dict[serving.ProbeRow, None] = {}
    for version in versions:
        try:
            manifest = store.manifest(version)
        except InlayError:
            continue  # its check will say so
        if manifest.extra.get(HASHED):
            merges = dataclasses.replace(config, merge_labels=bool(manifest.extra.get("merge_labels")))
            split = data.read_split(rows, manifest.labels, manifest.kind, merges)
            pairs: Sequence[str | None] = split.pairs or [None] * len(split)
            found |= dict.fromkeys(zip(split.texts, pairs, strict=True))
    return list(found)


def list_mistakes(judged: ScoredVersion) -> list[dict[str, Any]]:
    """Return the rows that a version got wrong, in their order; for numbers every row, the worst first."""
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
    return [row for _, row in sorted(found, key=lambda item: item[0])]


def _score_version(
    store: Store, version: Version, manifest: Manifest, rows: data.Split, frozen: model.Backbone
) -> ScoredVersion:
    """Answer every row by a version, and score the answers."""
    serving.check_backbone(version, manifest, frozen)
    tensors = store.load(version, manifest=manifest).tensors
    spec = serving.read_slot(manifest, frozen)
    model.check_slot(spec, frozen)
    judge_split = training.judge_split  # imports the module now: that takes a second, which must not count in the rate
    done = 0
    began = time.perf_counter()
    with terminal.Meter("evaluating", len(rows)) as meter:

        def on_batch(num_rows: int) -> None:
            nonlocal done
            done += num_rows
            meter.update(min(done, len(rows)), f"{done / (time.perf_counter() - began):,.0f} rows/s")

        found = judge_split(spec, tensors, frozen, rows, serving.find_reading(manifest), on_batch)
    rate = terminal.Rate(len(rows), found.num_tokens, time.perf_counter() - began)
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
    """Return the evaluation of the rows answered with enough confidence, and their share as its coverage."""
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
