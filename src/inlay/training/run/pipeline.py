"""The one way from settings to a version: make a run, train it, publish it, and report the result as data.

`train_and_publish` does all of it for one task. The command line, the stream and others that do something in between
call its steps: `prepare_run`, `fit`, `publish_result`, `report_run`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.data import METRICS, Task, load_task
from inlay.errors import Diverged, UnknownName
from inlay.model import Backbone
from inlay.settings import RunConfig
from inlay.store import Store, Version
from inlay.training.cohort.fit import FitSettings, fit
from inlay.training.cohort.member import PROBE
from inlay.training.evaluate import score_probe, score_split
from inlay.training.events import Emit, RunPublished, ignore
from inlay.training.recipe.cross_validation import FoldScores
from inlay.training.run.publish import publish
from inlay.training.run.run import DIVERGED, Result, Run, Trained, is_finished, make_run, read_probe_head

_TWICE = 2
_LAST = 3  # last epochs that are compared with as many before them
_LEAST = 0.005  # smallest gain worth the time


@dataclass(frozen=True)
class PreparedRun:
    """A run with the backbone and the store it is trained and published on."""

    run: Run
    backbone: Backbone
    store: Store
    own_folder: Path | None = None
    """the parent of its run folder, if that is not the store's `runs/`"""

    @property
    def runs_folder(self) -> Path:
        """The folder that has a folder for each run."""
        return self.own_folder or self.store.run_folder(self.run.id).parent

    @property
    def is_finished(self) -> bool:
        """Whether the run was already trained to its end."""
        return is_finished(self.runs_folder / self.run.id)


@dataclass(frozen=True)
class PublishedRun:
    """A trained run and its published version; None if publishing was not asked for."""

    prepared: PreparedRun
    result: Result
    version: Version | None
    was_finished: bool = False
    """whether it had been trained before, so that its result was read back"""


def train_and_publish(
    config: RunConfig,
    backbone: Backbone,
    store: Store,
    emit: Emit = ignore,
    *,
    task: Task | None = None,
    settings: FitSettings = FitSettings(),
    name: str | None = None,
) -> PublishedRun:
    """Train one task with the settings of `config` and publish its best weights under `name`, or the task's own.

    The rows are read from `config.data`, unless `task` has them. A finished run is read back, a stopped one goes on.
    Raises Diverged where training came to nothing.
    """
    prepared = prepare_run(config, backbone, store, task)
    was_finished = prepared.is_finished
    (result,) = fit([prepared.run], backbone, prepared.runs_folder, settings, emit)
    version = publish_result(prepared, result, emit, name=name)
    return PublishedRun(prepared, result, version, was_finished)


def prepare_run(config: RunConfig, backbone: Backbone, store: Store, task: Task | None = None) -> PreparedRun:
    """Read the rows, unless `task` has them, and resolve every setting of the run."""
    task = task or load_task(config.data, config.task)
    return PreparedRun(make_run(task, config, backbone, store), backbone, store)


def check_trained(result: Result) -> None:
    """Refuse a result that is not worth publishing: the run diverged."""
    if not result.tensors or result.status == DIVERGED:
        raise Diverged(f"run `{result.run_id}` {result.message}", "try a smaller `--lr`, such as a third of it")


def publish_result(
    prepared: PreparedRun,
    result: Result,
    emit: Emit = ignore,
    *,
    name: str | None = None,
    folds: FoldScores | None = None,
) -> Version:
    """Put a run's best weights in the store, with the scores of its cross-validation, if there was one."""
    check_trained(result)
    version = publish(prepared.run, result, prepared.backbone, prepared.store, name, folds=folds)
    emit(RunPublished(prepared.run, version))
    return version


def report_run(published: PublishedRun) -> dict[str, Any]:
    """Return the report on a trained run as data: `inlay train --json` prints it."""
    prepared, result, version = published.prepared, published.result, published.version
    run, store, task = prepared.run, prepared.store, prepared.run.task
    if version is not None:
        metrics = store.manifest(version).metrics
        infos = store.versions(version.name)
    else:
        metrics, infos = {"dev": result.dev_metrics}, []
        if task.test is not None and task.test.targets is not None:
            metrics["test"] = score_split(run, result, prepared.backbone, task.test)
    rising = find_rising(result.history, task.metric, len(task.dev))
    folder = prepared.runs_folder / result.run_id
    curve = folder / "curve.png"  # with many runs, no curve is drawn
    return {
        "task": task.name,
        "reference": None if version is None else version.reference,
        "best": None if version is None else _find_best(store, version),
        "digest": None if version is None else version.digest,
        "size_bytes": next((info.size_bytes for info in infos if info.version == version), None),
        "run": result.run_id,
        "status": result.status,
        "kind": task.kind,
        "labels": list(task.labels),
        "metric": task.metric,
        "metrics": metrics,
        "best_epoch": result.best_epoch,
        "probe": _score_probe(prepared, result, metrics),
        "still_rising": None if rising is None else dataclasses.asdict(rising),
        "num_parameters": run.spec.count_parameters(prepared.backbone.anatomy),
        "backbone_parameters": prepared.backbone.num_parameters,
        "seconds": result.seconds,
        "folder": str(folder),
        "curve": str(curve) if curve.is_file() else None,
    }


def _score_probe(prepared: PreparedRun, result: Result, metrics: Mapping[str, Any]) -> dict[str, float] | None:
    """Return split -> score of the linear probe that the run began with; None for a fresh head."""
    task = prepared.run.task
    first = next(iter(result.history), {})
    if first.get("stage") != PROBE:
        return None
    found = {"dev": first["dev"][task.metric]}
    head = read_probe_head(prepared.runs_folder / result.run_id)
    if head and "test" in metrics and task.test is not None:
        found["test"] = score_probe(prepared.run, head, prepared.backbone, task.test)[task.metric]
    return found


def _find_best(store: Store, version: Version) -> str | None:
    """Return the task's version that is best on these dev rows; None if versions cannot be compared."""
    try:
        return store.resolve(f"{version.name}@best").reference
    except UnknownName:
        return None


@dataclass(frozen=True)
class Rising:
    """The cost of more epochs, for a run that was still getting better when it ended."""

    epochs: int
    """epochs to ask for: twice as many"""
    seconds: float
    """seconds that a run of so many epochs would take"""


def find_rising(history: Sequence[Mapping[str, Any]], metric: str, num_dev: int) -> Rising | None:
    """Return the cost of more epochs if the dev score still rose at the end by more than chance; else None."""
    trained = [line for line in history if not line.get("stage")]
    scores = [line["dev"][metric] for line in trained]
    if len(scores) < _TWICE * _LAST or not all(map(math.isfinite, scores)):
        return None
    sign = 1 if METRICS[metric].higher_is_better else -1
    late, early = (sum(part) / _LAST for part in (scores[-_LAST:], scores[-_TWICE * _LAST : -_LAST]))
    is_number = not 0 <= max(scores, key=abs) <= 1  # an error on the targets' own scale
    least = _LEAST * abs(early) if is_number else max(_LEAST, 0.5 / math.sqrt(num_dev) / math.sqrt(_LAST))
    # The learning rate falls to zero at the end: a run that still gains there has more to gain.
    if sign * (late - early) <= least:
        return None
    began = history[0]["seconds"] if history[0].get("stage") else 0.0
    return Rising(_TWICE * len(trained), began + _TWICE * (trained[-1]["seconds"] - began))


def report_task(item: Trained, backbone: Backbone, store: Store, *, publishes: bool) -> dict[str, Any]:
    """Return the report on one task of a multi-task run as data; with `publishes`, publish it first."""
    reference, test, rows = None, None, item.run.task.test
    if publishes:
        version = publish(item.run, item.result, backbone, store)
        reference, test = version.reference, store.manifest(version).metrics.get("test")
    elif rows is not None and rows.targets is not None:
        test = score_split(item.run, item.result, backbone, rows)
    return {
        "task": item.run.name,
        "metric": item.run.metric,
        "dev": item.result.dev_metrics,
        "test": test,
        "reference": reference,
        "num_parameters": item.spec.count_parameters(backbone.anatomy),
    }
