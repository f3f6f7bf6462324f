"""The report on a trained task as data: its rows, scores with intervals, wrong answers and costs.

The page (`report_page.py`) and the model card (`model_card.py`) are written from it. It is computed by answering the
dev rows, and the test rows if there are some, with the version's own tensors, exactly as when it is served. A brief
report (`run_reports.py`) has only what training wrote, and answers nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import Unsupported
from inlay.reports.evaluations import Evaluation, choose_rows, describe_outputs, describe_version, evaluate_rows
from inlay.reports.version_reports import list_errors, list_unsure, make_report, score_rows
from inlay.store import Manifest, Store, Version, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from inlay.data import Report, Split, Task
    from inlay.model import Backbone

MOST_ERRORS = 50
"""most wrong rows that a report shows"""
MOST_UNSURE = 20
_MOST_POINTS = 400  # of a plot of numbers


@dataclass(frozen=True)
class TrainingFacts:
    """Facts about a version that only its training knows; any of them may be missing."""

    notes: tuple[str, ...] = ()
    history: tuple[Mapping[str, Any], ...] = ()
    """a line for each epoch, as `metrics.jsonl` has them"""
    best_epoch: int | None = None
    status: str = ""
    seconds: float | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class SideFacts:
    """The rows of one side (train, dev, test): their number, the length of their texts, the counts of labels."""

    side: str
    path: str
    num_rows: int
    median_words: int
    long_words: int
    """number of words that 95% of the texts do not exceed"""
    labels: Mapping[str, int]


@dataclass(frozen=True)
class SideScores:
    """The scores of one side, with intervals from `num_judged` rows, which are drawn evenly if there are more."""

    side: str
    num_rows: int
    num_judged: int
    metrics: Mapping[str, tuple[float | None, float | None, float | None]]
    """metric -> the score, and the ends of its 95% interval"""


@dataclass(frozen=True)
class SideDetails:
    """The answers to the rows of one side: summed up, and, if rows may be shown, single rows."""

    side: str
    about: Mapping[str, Any]
    """scores of labels, confusion and calibration, as `make_report` gives them"""
    errors: tuple[Mapping[str, Any], ...]
    num_errors: int
    """number of rows it got wrong; for numbers, of all rows"""
    unsure: tuple[Mapping[str, Any], ...]
    points: tuple[tuple[float, float], ...]
    """target and answer of some rows, if the task's answers are numbers"""


@dataclass(frozen=True)
class TaskReport:
    """A report on a trained task. `to_html` is the page, `to_markdown` the model card, `to_json` all of it as data.

    >>> found = inlay.report("mood", data=task, progress=False)
    >>> found
    TaskReport(mood@1: accuracy ... on ... dev rows)
    >>> found.to_html()[:15], "# mood@1" in found.to_markdown()
    ('<!doctype html>', True)
    """

    reference: str
    name: str
    made_at: str
    kind: str
    labels: tuple[str, ...]
    metric: str
    has_pairs: bool
    digest: str
    """digest of the version's content; "" if it was not published"""
    size_bytes: int | None
    backbone: Mapping[str, Any]
    method: Mapping[str, Any]
    settings: Mapping[str, Any]
    num_parameters: int
    data_digest: str
    sides: tuple[SideFacts, ...]
    scores: tuple[SideScores, ...]
    details: tuple[SideDetails, ...]
    """first of the test rows, if there are some, then of the dev rows; none in a brief report"""
    training: TrainingFacts = field(default_factory=TrainingFacts)
    shows_rows: bool = True
    """whether the report has texts of rows"""
    left_out: str = ""
    """why a brief report has no details, and how to get them"""

    def __repr__(self) -> str:
        main = self.main_scores
        value = main.metrics.get(self.metric, (None,))[0]
        said = "no score" if value is None else f"{self.metric} {value:.4f}"
        return f"TaskReport({self.reference}: {said} on {main.num_judged:,} {main.side} rows)"

    @property
    def main_scores(self) -> SideScores:
        """The scores on the test rows if there are some, else on the dev rows."""
        return next((each for each in self.scores if each.side == "test"), self.scores[0])

    @property
    def main(self) -> SideDetails | None:
        """The details on the same side as `main_scores`; None in a brief report."""
        return self.details[0] if self.details else None

    def to_json(self) -> dict[str, Any]:
        """Return the report as data: `inlay report --json` prints it."""
        return dataclasses.asdict(self)

    def to_html(self) -> str:
        """Return the report as one HTML page that needs no other file."""
        from inlay.reports.report_page import draw_report

        return draw_report(self)

    def to_markdown(self) -> str:
        """Return the model card. It never has the texts of rows."""
        from inlay.reports.model_card import write_card

        return write_card(self)

    def _repr_html_(self) -> str:
        from inlay.notebook import show_metrics

        scores = {
            each.side: {name: found[0] or math.nan for name, found in each.metrics.items()} for each in self.scores
        }
        wrong = {f"wrong {each.side} rows": each.num_errors for each in self.details}
        return show_metrics(self.reference, {"kind": self.kind, **wrong}, scores)


@dataclass(frozen=True)
class TrainedTensors:
    """A manifest with its tensors and their backbone; with the version, if it was published."""

    manifest: Manifest
    tensors: Mapping[str, Tensor]
    backbone: Backbone
    version: Version | None = None
    size_bytes: int | None = None


def report_on(
    trained: TrainedTensors, task: Task, facts: TrainingFacts = TrainingFacts(), *, shows_rows: bool = True
) -> TaskReport:
    """Return the report on trained tensors, judged by the dev and test rows of their task."""
    manifest, version = trained.manifest, trained.version
    if not len(task.dev):
        raise Unsupported(f"task `{task.name}` has no dev rows to report on", "give some with `--data FILE`")
    scores: list[SideScores] = []
    details: list[SideDetails] = []
    for side, rows in (("dev", task.dev), ("test", task.test)):
        if rows is not None and rows.targets is not None and len(rows):
            evaluation, scored = _judge(trained, rows)
            scores.append(_score_side(side, len(rows), evaluation, scored, manifest.metrics.get(side, {})))
            details.insert(0, _detail_side(side, evaluation, scored, shows_rows=shows_rows))
    return TaskReport(
        reference=task.name if version is None else version.reference,
        name=task.name if version is None else version.name,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        kind=manifest.kind,
        labels=manifest.labels,
        metric=manifest.metric,
        has_pairs=task.train.pairs is not None,
        digest="" if version is None else version.digest,
        size_bytes=trained.size_bytes,
        backbone={name: manifest.backbone.get(name) for name in ("name", "fingerprint", "num_parameters")},
        method=manifest.method,
        settings=manifest.config,
        num_parameters=manifest.num_parameters,
        data_digest=manifest.data_digest,
        sides=describe_sides(task),
        scores=tuple(scores),
        details=tuple(details),
        training=facts,
        shows_rows=shows_rows,
    )


def _detail_side(side: str, evaluation: Evaluation, scored: Report, *, shows_rows: bool) -> SideDetails:
    from inlay.data import KINDS

    errors = list_errors(evaluation)
    step = max(1, -(-len(evaluation.rows) // _MOST_POINTS))
    is_number = KINDS[evaluation.kind].is_number
    return SideDetails(
        side=side,
        about=make_report(evaluation, scored),
        errors=tuple(errors[:MOST_ERRORS]) if shows_rows else (),
        num_errors=len(errors),
        unsure=tuple(list_unsure(evaluation, MOST_UNSURE)) if shows_rows else (),
        points=tuple((row.target, row.given) for row in evaluation.rows[::step]) if is_number else (),
    )


def _judge(trained: TrainedTensors, rows: Split) -> tuple[Evaluation, Report]:
    """Answer rows (as many as an evaluation keeps) and score the answers."""
    from inlay.serving import find_reading, read_slot
    from inlay.training import judge_split

    manifest, backbone = trained.manifest, trained.backbone
    chosen = choose_rows(rows, len(manifest.labels))
    spec = read_slot(manifest, backbone)
    found = judge_split(spec, trained.tensors, backbone, chosen, find_reading(manifest))
    answers = describe_outputs(found, chosen, manifest.labels)
    number = 0 if trained.version is None else trained.version.number
    evaluation = evaluate_rows(describe_version(number, manifest), chosen, answers)
    return dataclasses.replace(evaluation, num_dev=len(rows)), score_rows(evaluation)


def _score_side(
    side: str, num_rows: int, evaluation: Evaluation, scored: Report, known: Mapping[str, float]
) -> SideScores:
    """Return a side's scores: those that the version knows, of all rows, with intervals from the judged rows."""
    metrics: dict[str, tuple[float | None, float | None, float | None]] = {
        name: (known.get(name, found.value), found.low, found.high) for name, found in scored.metrics.items()
    }
    if (error := known.get("ece")) is not None:
        metrics["ece"] = (error, None, None)
    finite = {
        name: tuple(value if value is not None and math.isfinite(value) else None for value in values)
        for name, values in metrics.items()
    }
    first = sorted(finite, key=lambda name: name != evaluation.metric)
    return SideScores(side, num_rows, len(evaluation.rows), {name: finite[name] for name in first})  # type: ignore[misc]


def describe_sides(task: Task) -> tuple[SideFacts, ...]:
    """Return the facts on the rows of each side."""
    import numpy as np

    from inlay.data import KINDS

    form, found = KINDS[task.kind].targets, []
    for side, rows in (("train", task.train), ("dev", task.dev), ("test", task.test)):
        if rows is None:
            continue
        words = np.array([sum(len(text.split()) for text in texts) for texts in rows.rows()] or [0])
        labels = (*task.labels, *rows.unseen)
        counts = {}
        if form.has_labels and rows.targets is not None:
            counts = dict(zip(labels, map(int, form.count_labels(rows.targets, len(labels))), strict=True))
        long = int(np.quantile(words, 0.95))
        found.append(SideFacts(side, rows.path, len(rows), int(np.median(words)), long, counts))
    return tuple(found)


def report_version(
    store: Store, version: Version, task: Task, backbone: Backbone, *, shows_rows: bool = True
) -> TaskReport:
    """Return the report on a published version and the task it was trained on."""
    loaded = store.load(version)
    size_bytes = next((info.size_bytes for info in store.versions(version.name) if info.version == version), None)
    trained = TrainedTensors(loaded.manifest, loaded.tensors, backbone, version, size_bytes)
    facts = _read_training_facts(store, version, loaded.manifest, task.notes)
    return report_on(trained, task, facts, shows_rows=shows_rows)


def _read_training_facts(store: Store, version: Version, manifest: Manifest, notes: Sequence[str]) -> TrainingFacts:
    """Read the facts about a version's training from its sidecar, and from its run's folder if that is still there."""
    sidecar = store.sidecar(version) or {}
    seconds, peak = sidecar.get("seconds"), sidecar.get("peak_memory_bytes")
    facts = TrainingFacts(tuple(notes), seconds=seconds, peak_memory_bytes=peak)
    if "joint" in manifest.extra:  # the run's history is of all its tasks together
        return facts
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((store.run_folder(manifest.run_id) / "result.json").read_text(encoding="utf8"))
        history = tuple(line for line in content["history"] if isinstance(line["dev"], dict))
        known: dict[str, Any] = {"best_epoch": int(content["best_epoch"]), "status": str(content["status"])}
        facts = dataclasses.replace(facts, history=history, **known)
    return facts


def write_reports(report: TaskReport, page: Path | None, card: Path | None) -> None:
    """Write a report as a page and as a model card, each atomically; None skips one of them."""
    if page is not None:
        write_atomically(page, report.to_html().encode("utf8", "replace"))
    if card is not None:
        write_atomically(card, report.to_markdown().encode("utf8", "replace"))
