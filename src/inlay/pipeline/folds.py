"""Cross-validation: a run for each fold, all trained together, and rows that may be labelled wrongly."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from inlay import data, reports, terminal, training
from inlay.pipeline.brief_reports import write_briefly
from inlay.pipeline.progress import fit_runs
from inlay.settings import FitSettings


@dataclass(frozen=True)
class CrossValidated:
    """A finished cross-validation."""

    planned: training.FoldRuns
    scores: training.FoldScores
    label_errors: data.LabelErrors | None
    """rows that may be labelled wrongly; None for tasks without labels of whole rows"""

    def to_json(self) -> dict[str, Any]:
        """Return its part of the report on the run that is trained afterwards, as data."""
        report: dict[str, Any] = {"folds": {**self.scores.to_json(), "notes": list(self.planned.folds.notes)}}
        return report if self.label_errors is None else {**report, "label_errors": self.label_errors.to_json()}


def cross_validate(
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
        write_briefly(planned.runs, results, ready.backbone, ready.runs_folder, reports.OF_A_FOLD)
    with terminal.working("answering the rows that folds left out"):
        scores = training.judge_folds(planned, results, ready.backbone)
    if scores.probabilities is None:
        return CrossValidated(planned, scores, None)
    rows, paths = planned.folds.rows.take(scores.positions), planned.folds.paths
    sources = [paths[row] for row in scores.positions]
    labels = planned.runs[0].task.labels
    return CrossValidated(planned, scores, data.find_label_errors(rows, labels, scores.probabilities, sources))
