"""Reports and model cards in the folders of runs: full ones of published runs, brief ones of all others.

A full report answers the dev and test rows once more. A brief one has only what training wrote: it takes milliseconds,
and does not look at the test rows of a run that was not chosen. A brief report never replaces another report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from inlay.reports.markup import tag
from inlay.reports.model_card import draw_markdown_table, escape_markdown
from inlay.reports.report_page import draw_table, frame_page
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
from inlay.reports.wording import duration, metric_words, plural, show_number, show_score
from inlay.store import Version, write_atomically

if TYPE_CHECKING:
    from inlay.data import Task
    from inlay.model import Backbone
    from inlay.training import AnyRun, JointRun, PreparedRun, Result, Run, Trained

PAGE, CARD = "report.html", "card.md"
_BRIEF = "This page has only what training wrote: no row was answered again for it."
UNCHOSEN = f"{_BRIEF} `inlay train` with these settings reads the run back and writes the full report."
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
    """Write the report on a trained run, published or not, and its model card; return the path of the page.

    If the version must not keep rows (`probes`), the report has none either. `test` are the scores on test rows, if
    they are known. `page` is the path of the page if it is not to be in the run's folder; the card has the same name
    with `.md`.
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
    """Write a brief report and a model card into the folder of each of these runs that has no report.

    `folder` has a folder for each run. `left_out` tells why details are missing, and how to get them.
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
            _write_overview(run, found[run.id], backbone, page)


def _report_briefly(
    run: Run, result: Result, backbone: Backbone, sides: tuple[SideFacts, ...], left_out: str
) -> TaskReport:
    task, metrics = run.task, dict(result.dev_metrics)
    names = sorted(metrics, key=lambda name: name != task.metric)
    scores = SideScores("dev", len(task.dev), len(task.dev), {name: (metrics[name], None, None) for name in names})
    return TaskReport(
        reference=task.name,
        name=task.name,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        kind=task.kind,
        labels=task.labels,
        metric=task.metric,
        has_pairs=task.train.pairs is not None,
        digest="",
        size_bytes=None,
        backbone={name: getattr(backbone, name) for name in ("name", "fingerprint", "num_parameters")},
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


@dataclass(frozen=True)
class PublishedPart:
    """One task of a run of several tasks: the trained task, its version if it has one, and its test scores."""

    trained: Trained
    version: Version | None
    test: dict[str, float] | None


def write_joint_report(run: JointRun, result: Result, parts: Sequence[PublishedPart], prepared: PreparedRun) -> Path:
    """Write the report on a run of several tasks: a page and a card for each task, and a page that links to them.

    Of `prepared`, only the backbone, the store and the settings of reports are used, not its run.
    """
    from inlay.training import JOINT_TASKS

    folder, published = prepared.runs_folder / run.id, dict[str, _Published]()
    for number, part in enumerate(parts):
        name = part.trained.run.name
        page = folder / JOINT_TASKS / f"{number:03}-{name}.html"
        own = dataclasses.replace(prepared, run=part.trained.run)
        notes = [*part.trained.run.task.notes, *part.trained.run.notes]
        write_run_report(own, part.trained.result, part.version, notes, part.test, page=page)
        reference = "" if part.version is None else part.version.reference
        published[name] = (f"{JOINT_TASKS}/{page.name}", reference, part.test or {})
    _write_overview(run, result, prepared.backbone, folder / PAGE, published)
    return folder / PAGE


_Published = tuple[str, str, Mapping[str, float]]
"""a published task of a run: the link to its page, its version, and its test scores"""


def _write_overview(
    run: JointRun, result: Result, backbone: Backbone, page: Path, published: Mapping[str, _Published] = {}
) -> None:
    """Write the page and the model card of a run of several tasks: their scores side by side, with links by name."""
    # 1. the facts, and the lines of both tables
    took = f"trained in {duration(result.seconds)}, the best epoch is {result.best_epoch} ({result.status})"
    about = f"One run of {plural(len(run.parts), 'task')} with {run.config.method.name}"
    facts = f"{about}, on the backbone {backbone.name}; {took}."
    heads = ("Task", "Kind", "Metric", "Training rows", "Dev", "Test", "Version")
    page_lines, card_lines = [], []
    for part in run.parts:
        name, task = part.name, part.task
        link, reference, test = published.get(name, ("", "", {}))
        found = (result.dev_metrics.get(f"{name}/{task.metric}"), test.get(task.metric))
        scores = [show_score(each, task.metric) for each in found]
        num_train = show_number(len(task.train))
        page_lines.append([
            tag("th", {"scope": "row"}, tag("a", {"href": link}, name) if link else name),
            *(tag("td", None, each) for each in (task.kind, metric_words(task.metric))),
            *(tag("td", {"class": "number"}, each) for each in (num_train, *scores)),
            tag("td", None, reference or "–"),
        ])  # fmt: skip
        card_lines.append([name, task.kind, task.metric, num_train, *scores, reference or "–"])
    # 2. the page
    title = " + ".join(part.name for part in run.parts)
    settings = [
        [tag("th", {"scope": "row"}, name), tag("td", None, str(value))]
        for name, value in dataclasses.asdict(run.config.train).items()
        if value is not None
    ]
    sections = [
        tag("header", None, tag("h1", None, title), tag("p", {"class": "soft"}, facts)),
        tag("section", None, tag("h2", None, "Tasks"), draw_table("Tasks", heads, page_lines, num_words=3)),
        tag("section", None, tag("h2", None, "Settings"), draw_table("Settings", ("", ""), settings, num_words=2)),
    ]
    write_atomically(page, frame_page(f"{title}: report", sections).encode("utf8", "replace"))
    # 3. the model card
    parts = [f"# {escape_markdown(title)}", escape_markdown(facts), draw_markdown_table(heads, card_lines)]
    write_atomically(page.with_name(CARD), ("\n\n".join(parts) + "\n").encode("utf8", "replace"))
