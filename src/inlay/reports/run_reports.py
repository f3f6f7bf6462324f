"""Reports and model cards in the folders of runs: whole ones of what is published, brief ones of all others.

A whole report answers the dev and test rows once more. A brief one has only what training wrote: it takes milliseconds,
and the test rows of a run that was not chosen stay unlooked at. A brief report never replaces another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.reports.joint_report import JointReport, JointRow
from inlay.reports.task_report import (
    SideFacts,
    SideScores,
    TaskReport,
    TrainedTensors,
    TrainingFacts,
    describe_sides,
    report_on,
    write_reports,
)
from inlay.store import Version, write_atomically

if TYPE_CHECKING:
    from inlay.data import Task
    from inlay.model import Backbone
    from inlay.training import AnyRun, JointRun, PreparedRun, Result, Run, Trained

PAGE, CARD = "report.html", "card.md"
_BRIEF = "This page has only what training wrote: no row was answered again for it."
UNCHOSEN = f"{_BRIEF} `inlay train` with these settings reads the run back and writes the whole report."
OF_A_FOLD = f"{_BRIEF} The run is a fold of a cross-validation, whose scores are in the report of the run itself."
OF_A_CANDIDATE = f"{_BRIEF} The run is a candidate of a time budget, which may have ended it early."
OF_A_SHARE = f"{_BRIEF} The run is trained on a share of the rows, for a learning curve."


def write_run_report(
    prepared: PreparedRun,
    result: Result,
    version: Version | None,
    notes: Sequence[str],
    test: dict[str, float] | None = None,
    *,
    page: Path | None = None,
) -> Path:
    """Write the report on a trained run, published or not, and its model card; return where the page lies.

    Where the version must not keep rows (`probes`), the report has none either. `test` has the scores of test rows,
    where they are known. `page` is another place than the run's folder; the card lies beside it under its name.
    """
    from inlay.training import make_manifest

    run, store, size_bytes = prepared.run, prepared.store, None
    if version is None:
        manifest = make_manifest(run, result, prepared.backbone, probes="none", test=test)
    else:
        manifest = store.manifest(version)
        infos = store.versions(version.name)
        size_bytes = next((info.size_bytes for info in infos if info.version == version), None)
    trained = TrainedTensors(manifest, result.tensors, prepared.backbone, version, size_bytes)
    report = report_on(trained, run.task, _list_facts(result, notes), shows_rows=prepared.probes == "rows")
    card = prepared.runs_folder / result.run_id / CARD if page is None else page.with_suffix(".md")
    page = page or card.with_name(PAGE)
    write_reports(report, page, card)
    return page


def write_brief_reports(
    runs: Sequence[AnyRun], results: Sequence[Result], backbone: Backbone, folder: Path, left_out: str = UNCHOSEN
) -> None:
    """Write a brief report into the folder of each of these runs that has none, and a model card.

    `folder` has a folder for each run. `left_out` says why details are missing, and how to get them.
    """
    from inlay.training import Run

    found = {result.run_id: result for result in results}
    described: dict[Task, tuple[SideFacts, ...]] = {}
    for run in {run.id: run for run in runs}.values():
        page = folder / run.id / PAGE
        if page.is_file() or not page.parent.is_dir():
            continue
        if isinstance(run, Run):
            sides = described.setdefault(run.task, ()) or describe_sides(run.task)
            described[run.task] = sides
            write_reports(_report_briefly(run, found[run.id], backbone, sides, left_out), page, page.with_name(CARD))
        else:
            _write_overview(_sum_up(run, found[run.id], backbone), page)


def _report_briefly(
    run: Run, result: Result, backbone: Backbone, sides: tuple[SideFacts, ...], left_out: str
) -> TaskReport:
    task, metrics = run.task, dict(result.dev_metrics)
    names = sorted(metrics, key=lambda name: name != task.metric)
    scores = SideScores("dev", len(task.dev), len(task.dev), {name: (metrics[name], None, None) for name in names})
    return TaskReport(
        reference=task.name,
        name=task.name,
        made_at=_now(),
        kind=task.kind,
        labels=task.labels,
        metric=task.metric,
        has_pairs=task.train.pairs is not None,
        digest="",
        size_bytes=None,
        backbone=_describe_backbone(backbone),
        method=dataclasses.asdict(run.spec.method),
        settings=dataclasses.asdict(run.config.train),
        num_parameters=run.spec.count_parameters(backbone.anatomy),
        data_digest=task.digest,
        sides=sides,
        scores=(scores,),
        details=(),
        training=_list_facts(result, [*task.notes, *run.start.notes, *run.notes, *filter(None, [result.message])]),
        shows_rows=False,
        left_out=left_out,
    )


def _list_facts(result: Result, notes: Sequence[str]) -> TrainingFacts:
    known = (result.best_epoch, result.status, result.seconds, result.peak_memory_bytes)
    return TrainingFacts(tuple(notes), tuple(result.history), *known)


def _describe_backbone(backbone: Backbone) -> dict[str, Any]:
    return {"name": backbone.name, "fingerprint": backbone.fingerprint, "num_parameters": backbone.num_parameters}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class PublishedPart:
    """One task of a run of several, read back: what it was trained to, its version if any, and its test scores."""

    trained: Trained
    version: Version | None
    test: dict[str, float] | None


def write_joint_report(run: JointRun, result: Result, parts: Sequence[PublishedPart], prepared: PreparedRun) -> Path:
    """Write the report on a run of several tasks: a page and a card of each task, and a page that leads to them.

    `prepared` has the backbone and the store; its own run is not looked at.
    """
    from inlay.training import JOINT_TASKS

    folder, links = prepared.runs_folder / run.id, dict[str, tuple[str, str]]()
    for number, part in enumerate(parts):
        name = part.trained.run.name
        page = folder / JOINT_TASKS / f"{number:03}-{name}.html"
        own = dataclasses.replace(prepared, run=part.trained.run)
        notes = [*part.trained.run.task.notes, *part.trained.run.notes]
        write_run_report(own, part.trained.result, part.version, notes, part.test, page=page)
        links[name] = (f"{JOINT_TASKS}/{page.name}", "" if part.version is None else part.version.reference)
    tests = {part.trained.run.name: part.test or {} for part in parts}
    _write_overview(_sum_up(run, result, prepared.backbone, tests, links), folder / PAGE)
    return folder / PAGE


def _sum_up(
    run: JointRun,
    result: Result,
    backbone: Backbone,
    tests: Mapping[str, Mapping[str, float]] = {},
    links: Mapping[str, tuple[str, str]] = {},
) -> JointReport:
    """Return the report on a run of several tasks, with the test scores and the page of each, where there are some."""
    rows = []
    for part in run.parts:
        task, (link, reference) = part.task, links.get(part.name, ("", ""))
        score = result.dev_metrics.get(f"{part.name}/{task.metric}")
        test = tests.get(part.name, {}).get(task.metric)
        rows.append(JointRow(part.name, task.kind, task.metric, len(task.train), score, test, reference, link))
    return JointReport(
        run_id=run.id,
        made_at=_now(),
        backbone=backbone.name,
        method=run.config.method.name,
        rows=tuple(rows),
        best_epoch=result.best_epoch,
        status=result.status,
        seconds=result.seconds,
        settings=dataclasses.asdict(run.config.train),
    )


def _write_overview(report: JointReport, page: Path) -> None:
    write_atomically(page, report.to_html().encode("utf8", "replace"))
    write_atomically(page.with_name(CARD), report.to_markdown().encode("utf8", "replace"))
