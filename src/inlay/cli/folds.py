"""`inlay train --folds K`: the run cross-validated before it is trained and published."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.cli import screen
from inlay.cli.label_errors import LABEL_ERRORS, put_label_errors, write_label_errors
from inlay.cli.train import fit_runs
from inlay.settings import FitSettings

if TYPE_CHECKING:
    from inlay.data import LabelErrors, Task
    from inlay.training import FoldRuns, FoldScores, PreparedRun


@dataclass(frozen=True)
class CrossValidated:
    """A finished cross-validation."""

    planned: FoldRuns
    scores: FoldScores
    label_errors: LabelErrors | None
    """rows that may be labelled wrongly; None for tasks without labels of whole rows"""

    def keep(self, folder: Path) -> dict[str, Any]:
        """Return its part of the report, as data, and write suspicious rows to the run's folder."""
        report: dict[str, Any] = {"folds": {**self.scores.to_json(), "notes": list(self.planned.folds.notes)}}
        if self.label_errors is None:
            return report
        if self.label_errors.errors:
            write_label_errors(self.label_errors, folder / LABEL_ERRORS)
        return {**report, "label_errors": self.label_errors.to_json()}

    def put_label_errors(self, folder: Path) -> None:
        """Print the rows that may be labelled wrongly."""
        if self.label_errors is not None:
            file = folder / LABEL_ERRORS if self.label_errors.errors else None
            put_label_errors(self.label_errors, "the fold that left the row out", file)


def cross_validate(ready: PreparedRun, num_folds: int, settings: FitSettings) -> CrossValidated | None:
    """Train a run for every fold together, and score the rows each left out; None in all processes but the first."""
    from inlay.training import judge_folds, make_fold_runs

    planned = make_fold_runs(ready.run, num_folds, ready.backbone, ready.store)
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
        scores = judge_folds(planned, results, ready.backbone)
    return CrossValidated(planned, scores, _find_label_errors(planned, scores))


def _find_label_errors(planned: FoldRuns, scores: FoldScores) -> LabelErrors | None:
    from inlay.data import find_label_errors

    if scores.probabilities is None:
        return None
    rows, paths = planned.folds.rows.take(scores.positions), planned.folds.paths
    labels = planned.runs[0].task.labels
    return find_label_errors(rows, labels, scores.probabilities, [paths[row] for row in scores.positions])


def describe_report(report: Mapping[str, Any], task: Task) -> str:
    """Describe a cross-validation in a line of the report on the run trained afterwards."""
    scores = f"{describe_mean(report, report['mean'], task.metric)}; {describe_pooled(report, task.metric)}"
    rows = f"{screen.count(len(task.train), 'row')}, with {screen.count(len(task.dev), 'dev row')} to choose its epoch"
    return f"cross-validated ({report['num_folds']} folds): {scores}; the run above was trained on {rows}"


def describe_mean(about: Mapping[str, Any], means: Mapping[str, float], metric: str) -> str:
    """Describe the mean over folds with its standard error; `about` is the version's entry."""
    return f"{metric} {screen.score(means[metric])} ± {screen.score(about['standard_error'][metric])}"


def describe_pooled(about: Mapping[str, Any], metric: str) -> str:
    """Describe the score of all rows left out."""
    found, rows = about["pooled"][metric], screen.count(about["num_rows"], "row")
    span = f"{screen.score(found['low'])} to {screen.score(found['high'])}"
    return f"{screen.score(found['value'])} over all {rows} left out (95% interval {span})"
