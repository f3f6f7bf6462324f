"""Cross-validation of a run: the same training for every fold, judged on the rows that the fold left out.

The runs of the folds have the settings that the run itself was resolved to, so that nothing but rows differs, and are
trained as one cohort by `fit`. What a fold answered to the rows it left out is kept in its folder (`left_out.json`);
its weights, which nobody will use, are dropped then.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inlay.data import KINDS, Folds, Report, as_probabilities, evaluate_report, make_folds, score_all
from inlay.errors import Diverged
from inlay.model import Backbone
from inlay.store import Store, write_atomically
from inlay.training.evaluate import judge_split
from inlay.training.run.checked_files import seal, unseal
from inlay.training.run.make_run import make_run
from inlay.training.run.run import Result, Run
from inlay.training.run.run_folder import PROBE_HEAD, WEIGHTS, damaged

LEFT_OUT = "left_out.json"
"""The file in a fold's folder with the fold's outputs for the rows it left out."""


@dataclass(frozen=True, eq=False)
class FoldRuns:
    """The runs of a cross-validation, and the rows that they leave out."""

    folds: Folds
    runs: list[Run]


@dataclass(frozen=True)
class FoldScore:
    """The score of one fold on the rows it left out."""

    run_id: str
    num_train: int
    num_dev: int
    num_rows: int
    best_epoch: int
    metrics: dict[str, float]


@dataclass(frozen=True, eq=False)
class FoldScores:
    """The scores of a cross-validation."""

    metric: str
    seed: int
    folds: list[FoldScore]
    pooled: Report
    """scores of all rows left out, each answered by the fold that left it out"""
    probabilities: np.ndarray | None
    """of each label, for these rows [n, L], each fold calibrated on what it left out: its dev rows are few, and a fold
    that is too sure would have the last word. None for kinds that have none."""
    positions: np.ndarray
    """positions of these rows among all that were pooled"""

    @property
    def means(self) -> dict[str, float]:
        """Metric -> mean over folds."""
        return {name: float(np.mean(values)) for name, values in self._by_metric.items()}

    @property
    def errors(self) -> dict[str, float]:
        """Metric -> standard error of the mean, as if folds were independent; they share training rows, so that the
        true one is somewhat larger (Bengio & Grandvalet 2004)."""
        root = math.sqrt(len(self.folds))
        return {name: float(np.std(values, ddof=1) / root) for name, values in self._by_metric.items()}

    @property
    def _by_metric(self) -> dict[str, list[float]]:
        """Metric -> the scores of all folds."""
        return {name: [fold.metrics[name] for fold in self.folds] for name in self.folds[0].metrics}

    def to_manifest(self) -> dict[str, Any]:
        """Return what a version keeps besides the means: numbers of folds and rows, and the standard errors."""
        return {
            "num_folds": len(self.folds),
            "num_rows": self.pooled.num_rows,
            "seed": self.seed,
            "standard_error": self.errors,
            "pooled": {name: dataclasses.asdict(found) for name, found in self.pooled.metrics.items()},
        }

    def to_json(self) -> dict[str, Any]:
        """Return the scores as data."""
        about = {"metric": self.metric, "mean": self.means, **self.to_manifest()}
        runs = [dataclasses.asdict(fold) for fold in self.folds]
        return {**about, "runs": runs, "report": self.pooled.to_json()}


def make_fold_runs(run: Run, num_folds: int, backbone: Backbone, store: Store | None = None) -> FoldRuns:
    """Make the runs that cross-validate `run`; rows are dealt out by the seed of its split."""
    folds = make_folds(run.task, num_folds, run.config.data.split_seed)
    return FoldRuns(folds, [make_run(task, run.config, backbone, store) for task in folds.tasks])


def judge_folds(planned: FoldRuns, results: Sequence[Result], backbone: Backbone) -> FoldScores:
    """Score every fold on the rows it left out, and all of them together; drops the weights of the folds.

    Refuses a cross-validation in which a fold diverged: the scores of the others would be too good.
    """
    scores, outputs, probabilities = [], [], []
    for run, result in zip(planned.runs, results, strict=True):
        answers = _answer_left_out(run, result, backbone)  # in the form metrics take
        task, left = run.task, run.task.test
        assert left is not None
        assert left.targets is not None
        metrics = score_all(task.kind, task.labels, left.targets, answers)
        sizes = (len(task.train), len(task.dev), len(left))
        scores.append(FoldScore(run.id, *sizes, result.best_epoch, metrics))
        outputs.append(answers)
        if KINDS[task.kind].finds_label_errors:
            probabilities.append(as_probabilities(answers, left.targets))
    task, positions = planned.runs[0].task, np.concatenate(planned.folds.left_out)
    targets = planned.folds.rows.targets
    assert targets is not None
    all_outputs: Any = [output for own in outputs for output in own]
    if isinstance(outputs[0], np.ndarray):
        all_outputs = np.concatenate(outputs)
    pooled = evaluate_report(task.kind, task.labels, targets[positions], all_outputs)
    return FoldScores(
        metric=task.metric,
        seed=planned.folds.seed,
        folds=scores,
        pooled=pooled,
        probabilities=np.concatenate(probabilities) if probabilities else None,
        positions=positions,
    )


def _answer_left_out(run: Run, result: Result, backbone: Backbone) -> Any:
    """Return a finished fold's answers to the rows it left out, computed once and kept; then drop its weights."""
    assert result.folder is not None, "`fit` reads results from their folders"
    path = result.folder / LEFT_OUT
    if not path.is_file():
        if not result.tensors or result.status == "diverged":
            raise Diverged(f"run `{run.id}`, one of the folds, {result.message}", "try a smaller `--lr`")
        assert run.task.test is not None
        judged = judge_split(result.spec(run), result.tensors, backbone, run.task.test, run.reading)
        outputs = judged.predictions(run.task.labels)
        if any(output is None for output in outputs):
            raise Diverged(f"run `{run.id}`, one of the folds, has outputs that are not finite", "try a smaller `--lr`")
        plain = outputs.tolist() if isinstance(outputs, np.ndarray) else outputs
        write_atomically(path, seal({"digest": run.task.digest, "outputs": plain}))
    for name in (WEIGHTS, PROBE_HEAD):
        (result.folder / name).unlink(missing_ok=True)
    return _read_answers(path, run)


def _read_answers(path: Path, run: Run) -> Any:
    """Read a fold's answers to the rows it left out; refuse those to other rows."""
    try:
        content = unseal(path.read_bytes())
        outputs = content["outputs"]
        is_own = content["digest"] == run.task.digest and len(outputs) == len(run.task.test or [])
    except (ValueError, KeyError, TypeError):
        raise damaged(path, "not what a fold writes") from None
    if not is_own:
        raise damaged(path, "it is about other rows")
    is_numbers = KINDS[run.task.kind].decide is not None
    return np.asarray(outputs, dtype=np.float64) if is_numbers else outputs
