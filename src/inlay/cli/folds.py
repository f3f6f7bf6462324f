"""`inlay train --folds K`: the run cross-validated before it is trained, and rows that may be labelled wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.cli import screen
from inlay.cli.output import open_rows
from inlay.cli.progress import fit_runs
from inlay.cli.rooms import data, training
from inlay.cli.screen import Column, numbers
from inlay.settings import FitSettings

_LABEL_ERRORS = "label_errors.csv"
"""The file in a run's folder with all of these rows."""
_MOST_SHOWN = 20
_WIDTH = 60  # letters of a text in the table


@dataclass(frozen=True)
class CrossValidated:
    """A finished cross-validation."""

    planned: training.FoldRuns
    scores: training.FoldScores
    label_errors: data.LabelErrors | None
    """rows that may be labelled wrongly; None for tasks without labels of whole rows"""

    def keep(self, folder: Path) -> dict[str, Any]:
        """Return its part of the report, as data, and write suspicious rows to the run's folder."""
        report: dict[str, Any] = {"folds": {**self.scores.to_json(), "notes": list(self.planned.folds.notes)}}
        if self.label_errors is None:
            return report
        if self.label_errors.errors:
            records = [dataclasses.asdict(error) for error in self.label_errors.errors]
            with open_rows(folder / _LABEL_ERRORS) as writer:
                writer.write_plain([{name: own[name] for name in own if own[name] is not None} for own in records])
        return {**report, "label_errors": self.label_errors.to_json()}

    def put_label_errors(self, folder: Path) -> None:
        """Print the rows that may be labelled wrongly."""
        if self.label_errors is not None:
            file = folder / _LABEL_ERRORS if self.label_errors.errors else None
            put_label_errors(self.label_errors, "the fold that left the row out", file)


def cross_validate(ready: training.PreparedRun, num_folds: int, settings: FitSettings) -> CrossValidated | None:
    """Train a run for every fold together, and score the rows each left out; None in all processes but the first."""
    planned = training.make_fold_runs(ready.run, num_folds, ready.backbone, ready.store)
    for text in planned.folds.notes:
        screen.detail(text)
    fold = planned.folds.tasks[0]
    assert fold.test is not None
    screen.detail(
        f"cross-validation: {num_folds} folds trained together, each on about {screen.count(len(fold.train), 'row')} "
        f"({len(fold.dev)} more choose its epoch) and scored on the {len(fold.test)} it leaves out"
    )
    quiet = dataclasses.replace(settings, draw_curves=False, keep_last=False)
    results = fit_runs(planned.runs, ready.backbone, ready.runs_folder, quiet)
    if not screen.is_main_process():
        return None
    with screen.working("answering the rows that folds left out"):
        scores = training.judge_folds(planned, results, ready.backbone)
    if scores.probabilities is None:
        return CrossValidated(planned, scores, None)
    rows, paths = planned.folds.rows.take(scores.positions), planned.folds.paths
    sources = [paths[row] for row in scores.positions]
    labels = planned.runs[0].task.labels
    return CrossValidated(planned, scores, data.find_label_errors(rows, labels, scores.probabilities, sources))


def describe_report(report: Mapping[str, Any], task: data.Task) -> str:
    """Describe a cross-validation in a line of the report on the run trained afterwards."""
    scores = f"{describe_mean(report, report['mean'], task.metric)}; {describe_pooled(report, task.metric)}"
    rows = f"{screen.count(len(task.train), 'row')}, with {screen.count(len(task.dev), 'dev row')} to choose its epoch"
    return f"cross-validated ({report['num_folds']} folds): {scores}; the run above was trained on {rows}"


def describe_mean(about: Mapping[str, Any], means: Mapping[str, float], metric: str) -> str:
    """Describe the mean over folds with its standard error; `about` is the version's entry."""
    return f"{metric} {screen.score(means[metric])} ± {screen.score(about['standard_error'].get(metric))}"


def describe_pooled(about: Mapping[str, Any], metric: str) -> str:
    """Describe the score of all rows left out."""
    found = about["pooled"].get(metric, dict.fromkeys(("value", "low", "high")))
    rows = screen.count(about["num_rows"], "row")
    span = f"{screen.score(found['low'])} to {screen.score(found['high'])}"
    return f"{screen.score(found['value'])} over all {rows} left out (95% interval {span})"


def put_label_errors(found: data.LabelErrors, judge: str, file: Path | None = None) -> None:
    """Print the most suspicious rows as a table; `judge` names the model that found them, `file` has all of them."""
    screen.emit()
    rows = screen.count(found.num_rows, "row")
    if found.silence:
        screen.emit(f"wrong labels: nothing can be told: {found.silence}")
        return
    if not found.errors:
        screen.emit(f"wrong labels: none of {rows} looks wrong to {judge}")
        return
    screen.emit(
        f"{screen.count(len(found.errors))} of {rows} may be labelled wrongly: {judge} surely says something else"
    )
    has_files = len({error.path for error in found.errors}) > 1
    places = [Column("file")] * has_files + numbers("line")
    cells = []
    for error in found.errors[:_MOST_SHOWN]:
        place = [Path(error.path).name] * has_files + [str(error.line)]
        said = [screen.shorten(error.given, 24), screen.shorten(error.likely, 24), screen.score(error.probability)]
        text = error.text if error.pair is None else f"{error.text} / {error.pair}"
        cells.append([*place, *said, screen.shorten(text, _WIDTH)])
    screen.emit_table([*places, "given", "likely", *numbers("probability"), Column("text", is_flexible=True)], cells)
    left = len(found.errors) - _MOST_SHOWN
    if left > 0:
        screen.emit(f"and {left:,} more, less suspicious, in {'the output of --json' if file is None else file}")
    elif file is not None:
        screen.emit(f"the same in {file}")
