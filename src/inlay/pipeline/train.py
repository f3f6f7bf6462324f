"""Train, publish and report: one run (perhaps cross-validated or within a time budget), or a grid of runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inlay import data, explore, reports, terminal, training
from inlay.errors import InlayError
from inlay.notebook import show_html, show_metrics
from inlay.pipeline.progress import fit_runs, write_brief_reports
from inlay.pipeline.time_budget import Budget
from inlay.settings import FitSettings, RunConfig
from inlay.store import Version

if TYPE_CHECKING:
    from inlay.cluster import RaySettings


@dataclass(frozen=True)
class TrainOptions:
    """What the caller wants besides the run's settings."""

    name: str | None = None
    """the name to publish under; default: the task's"""
    publishes: bool = True
    probes: str = "rows"
    folds: int | None = None
    fit: FitSettings = field(default_factory=FitSettings)
    lister: str = ""
    """the call or command that lists rows which may be labelled wrongly, for a note"""
    cluster: RaySettings | None = None
    """where the runs of a sweep are trained, if not here"""
    trackers: tuple[str, ...] = ()
    """where epochs are logged: `tensorboard`, `mlflow`"""
    writes_report: bool = True
    """whether the run's folder gets a report and a model card"""


@dataclass(frozen=True)
class CrossValidated:
    """A finished cross-validation."""

    planned: training.FoldRuns
    scores: training.FoldScores
    label_errors: data.LabelErrors | None
    """rows that may be labelled wrongly; None for tasks without labels of whole rows"""

    def to_json(self) -> dict[str, Any]:
        """Return what it adds to the report on the run that is trained afterwards."""
        report: dict[str, Any] = {"folds": {**self.scores.to_json(), "notes": list(self.planned.folds.notes)}}
        return report if self.label_errors is None else {**report, "label_errors": self.label_errors.to_json()}


@dataclass(frozen=True)
class TrainReport:
    """A trained run, the version it became, and the report on both.

    >>> report = inlay.train(rows, "new", **QUICK)
    >>> report
    TrainReport(new@1: dev accuracy ..., ... s)
    >>> sorted(report.metrics)
    ['dev']
    """

    ready: training.PreparedRun
    result: training.Result
    version: Version | None
    """None where it was not published"""
    about: dict[str, Any]
    """everything that `inlay train --json` prints about it"""
    was_finished: bool = False
    """whether it had been trained before"""
    validated: CrossValidated | None = None
    notes: tuple[str, ...] = ()
    """what training found out about the data"""

    @property
    def run(self) -> training.Run:
        """The run: its task, its resolved settings and its id."""
        return self.ready.run

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """Scores by side (`dev`, `test`) and metric."""
        return self.about["metrics"]

    @property
    def score(self) -> float:
        """The task's own metric on its test rows, or on its dev rows where it has none."""
        return self.metrics.get("test", self.metrics["dev"])[self.about["metric"]]

    @property
    def all_notes(self) -> list[str]:
        """Everything that was noted on the way, from the data on."""
        return [*self.run.task.notes, *self.run.start.notes, *self.run.notes, *self.notes]

    def to_json(self) -> dict[str, Any]:
        """Return the report as data."""
        return {**self.about, "was_finished": self.was_finished, "notes": self.all_notes}

    def __repr__(self) -> str:
        side = "test" if "test" in self.metrics else "dev"
        scored = f"{side} {self.about['metric']} {terminal.score(self.score)}"
        took = terminal.duration(self.result.seconds)
        return f"TrainReport({self.about['reference'] or self.run.name}: {scored}, {took})"

    def _repr_html_(self) -> str:
        facts = {"kind": self.about["kind"], "best epoch": self.result.best_epoch}
        facts |= {"trained": terminal.duration(self.result.seconds), "run": self.result.run_id}
        return show_metrics(self.about["reference"] or f"{self.run.name} (not published)", facts, self.metrics)


@dataclass(frozen=True)
class SweepReport:
    """The runs of a sweep, ranked, and the report on the best one.

    >>> found = inlay.sweep(rows, {"lr": [1e-3, 1e-2]}, "new", **QUICK)
    >>> [item.values["train.lr"] for item in found.ranking.runs]
    [..., ...]
    """

    ranking: explore.Ranking
    best: TrainReport

    def to_json(self) -> dict[str, Any]:
        """Return the report as data: `inlay sweep --json` prints it."""
        return {**dataclasses.asdict(self.ranking), "best": self.best.about}

    def __repr__(self) -> str:
        return f"SweepReport({terminal.count(len(self.ranking.runs), 'run')}, best {self.best!r})"

    def _repr_html_(self) -> str:
        head = [*self.ranking.axes, "seed", f"dev {self.ranking.metric}", "epoch", "status"]
        rows = [
            [*run.values.values(), run.seed, run.dev_metric, run.best_epoch, run.status] for run in self.ranking.runs
        ]
        return show_html(repr(self), {}, head, rows)


def train_and_publish(
    ready: training.PreparedRun, asked: RunConfig, options: TrainOptions, budget: Budget | None = None
) -> TrainReport | None:
    """Train a prepared run and publish it, as wished; None in all of several processes but the first.

    `asked` are the settings before open ones were resolved: a budget tries values for those.
    """
    # 1. train: the folds first, if there are any, then the run or the candidates of a budget
    validated = None
    if options.folds is not None:
        validated = _cross_validate(ready, options.folds, options.fit, writes_reports=options.writes_report)
    if budget is None:
        was_finished = ready.is_finished
        result = fit_runs([ready.run], ready.backbone, ready.runs_folder, options.fit, trackers=options.trackers)[0]
    else:
        ready, result, was_finished = budget.train(
            ready, asked, options.fit, options.trackers, writes_reports=options.writes_report
        )
    if not terminal.is_main_process():  # the first process reports
        return None
    # 2. publish
    report = _finish_run(ready, result, options, None if validated is None else validated.scores)
    # 3. note what was found out about the data
    is_balanced = ready.run.config.train.class_weights == "balanced"
    found = data.describe_unpredicted(ready.run.task, result.unpredicted, is_balanced=is_balanced)
    if validated is None:  # a cross-validation lists the rows that may be labelled wrongly
        suspects = next(iter(result.history), {}).get("suspects", {})
        found += data.describe_suspects(suspects, options.lister)
    for note in found:
        terminal.detail(note)
    about = report.about | ({} if validated is None else validated.to_json())
    known: dict[str, Any] = {"was_finished": was_finished, "validated": validated, "notes": tuple(found)}
    return _add_report(dataclasses.replace(report, about=about, **known), options)


def _cross_validate(
    ready: training.PreparedRun, num_folds: int, settings: FitSettings, *, writes_reports: bool = True
) -> CrossValidated | None:
    """Train a run for every fold together, and score the rows each left out; None in all processes but the first."""
    planned = training.make_fold_runs(ready.run, num_folds, ready.backbone, ready.store)
    for text in planned.folds.notes:
        terminal.detail(text)
    fold = planned.folds.tasks[0]
    assert fold.test is not None
    terminal.detail(
        f"cross-validation: {num_folds} folds trained together, each on about {terminal.count(len(fold.train), 'row')} "
        f"({len(fold.dev)} more choose its epoch) and scored on the {len(fold.test)} it leaves out"
    )
    quiet = dataclasses.replace(settings, draw_curves=False, keep_last=False)
    results = fit_runs(planned.runs, ready.backbone, ready.runs_folder, quiet)
    if not terminal.is_main_process():
        return None
    if writes_reports:
        write_brief_reports(planned.runs, results, ready.backbone, ready.runs_folder, reports.OF_A_FOLD)
    with terminal.working("answering the rows that folds left out"):
        scores = training.judge_folds(planned, results, ready.backbone)
    if scores.probabilities is None:
        return CrossValidated(planned, scores, None)
    rows, paths = planned.folds.rows.take(scores.positions), planned.folds.paths
    sources = [paths[row] for row in scores.positions]
    labels = planned.runs[0].task.labels
    return CrossValidated(planned, scores, data.find_label_errors(rows, labels, scores.probabilities, sources))


def _finish_run(
    ready: training.PreparedRun,
    result: training.Result,
    options: TrainOptions,
    folds: training.FoldScores | None = None,
) -> TrainReport:
    """Publish a trained run, if asked for, and make its report."""
    ready = dataclasses.replace(ready, probes=options.probes)
    training.check_trained(result)
    version = None
    if options.publishes:
        tested = "scoring the test rows and " if ready.run.task.test is not None else ""
        with terminal.working(f"publishing: {tested}answering the probes"):
            version = training.publish_result(ready, result, name=options.name, folds=folds)
    return TrainReport(ready, result, version, training.report_run(ready, result, version))


def sweep_and_publish(
    axes: Mapping[str, Sequence[Any]],
    grid: Sequence[RunConfig],
    options: TrainOptions,
    prepare_first: Callable[[RunConfig], training.PreparedRun],
) -> SweepReport | None:
    """Train every point of a grid as one cohort, rank them, and publish the best; None as for `train_and_publish`.

    `prepare_first` makes the run of the first point; the others have its rows and its backbone.
    """
    ready = prepare_first(grid[0])
    runs = [training.make_run(ready.run.task, config, ready.backbone, ready.store) for config in grid]
    for text in ready.run.start.notes:
        terminal.detail(text)
    num_seeds = len({config.train.seed for config in grid})
    parts = [f"{len(values)} of {key.partition('.')[2]}" for key, values in axes.items() if len(values) > 1]
    product = " × ".join([*parts, terminal.count(num_seeds, "seed")]).replace("of name", "of method")
    terminal.detail(f"sweep: {terminal.count(len(runs), 'run')}: {product}")
    where: dict[str, Any] = {"cluster": options.cluster, "trackers": options.trackers}
    results = fit_runs(runs, ready.backbone, ready.runs_folder, options.fit, **where)
    if not terminal.is_main_process():
        return None
    ranking = explore.rank(runs, results, tuple(axes))
    others = [run for run in runs if run.id != ranking.best.run_id]
    if options.writes_report:
        write_brief_reports(others, results, ready.backbone, ready.runs_folder)
    chosen = dataclasses.replace(ready, run=next(item for item in runs if item.id == ranking.best.run_id))
    best = next(result for result in results if result.run_id == ranking.best.run_id)
    return SweepReport(ranking, _add_report(_finish_run(chosen, best, options), options))


def _add_report(finished: TrainReport, options: TrainOptions) -> TrainReport:
    """Write the report and the model card into the run's folder, if asked for; a failure is only noted."""
    page = None
    if options.writes_report:
        try:
            with terminal.working("writing the report"):
                test = finished.metrics.get("test")
                known = (finished.ready, finished.result, finished.version, finished.all_notes, test)
                page = reports.write_run_report(*known)
        except InlayError as error:
            terminal.detail(f"no report was written: {error.message}")
    return dataclasses.replace(finished, about={**finished.about, "report": None if page is None else str(page)})
