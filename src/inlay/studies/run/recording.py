"""Makes the records of trained runs: scores with settings, commit, hardware, versions and date."""

from __future__ import annotations

import dataclasses
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inlay.data import KINDS, Task
from inlay.errors import Diverged, InlayError
from inlay.model import canonical_environment, draw_tensor
from inlay.studies.run.records import DIVERGED, FAILED, FINISHED, Record, short_name
from inlay.studies.spec.planning import PlannedRun, StudyPlan
from inlay.studies.spec.study import ARM_KINDS
from inlay.training import DIVERGED as RUN_DIVERGED
from inlay.training import AnyRun, JointRun, Result, Run, current_commit, materialize, score_split


def has_diverged(result: Result) -> bool:
    """Tell whether a run diverged; such runs are not compared."""
    return result.status == RUN_DIVERGED or result.dev_metric is None


class Recorder:
    """Makes the records of one plan."""

    def __init__(self, plan: StudyPlan, commit: str | None = None) -> None:
        self.plan, self.backbone = plan, plan.backbone
        on_gpu = self.backbone.device.type == "cuda"
        self._origin: dict[str, Any] = {
            "commit": current_commit() if commit is None else commit,
            "hardware": torch.cuda.get_device_name(self.backbone.device) if on_gpu else name_processor(),
            "versions": {"python": platform.python_version()},
        }
        for package in ("inlay", "torch", "transformers", "numpy"):
            try:
                self._origin["versions"][package] = version(package)
            except PackageNotFoundError:  # running from a checkout
                self._origin["versions"][package] = ""

    def record_result(self, item: PlannedRun, result: Result, extra: dict[str, Any]) -> Record:
        """Make the record of a trained run; its test rows are scored here, if it has labelled ones."""
        run, is_lost = item.run, has_diverged(result)
        assert isinstance(run, Run)
        task = run.task
        return self.record(
            item,
            task,
            trained_parameters=run.spec.count_parameters(self.backbone.anatomy),
            dev=result.dev_metrics,
            test=None if is_lost else self._score_test(run, result),
            status=DIVERGED if is_lost else FINISHED,
            curve=[[line["epoch"], line["dev"][task.metric]] for line in result.history],
            seconds=result.seconds,
            extra={**extra, **_describe_training(run, result, task)},
        )

    def record_joint(self, item: PlannedRun, result: Result, extra: dict[str, Any]) -> list[Record]:
        """Make the records of a multi-task run, one per task; the first has the run's id, the others `<id>-1` …

        A task's trained parameters are its part of the run's: shared ones are divided equally among all tasks.
        """
        run, is_lost = item.run, has_diverged(result)
        assert isinstance(run, JointRun)
        anatomy = self.backbone.anatomy
        written = [] if is_lost else materialize(run, result, self.backbone)
        total = sum(spec.num_parameters for spec in run.layout(anatomy))
        about = {"run": run.id, "tasks": list(item.tasks), "parameters": total, "is_copy": run.spec.is_finetuned}
        records = []
        for number, (name, part) in enumerate(zip(item.tasks, run.parts, strict=True)):
            own = written[number] if written else None
            more: dict[str, Any] = {"joint": about, "embedding": None, "embedding_start": None}
            # The task's embedding, which the hypernetwork reads: trained, and as it was initialised.
            if (found := result.tensors.get(f"{part.name}/task.embedding")) is not None:
                more["embedding"] = _rounded(found)
            drawn = next((item for item in part.spec.layout(anatomy) if item.name == "task.embedding"), None)
            if drawn is not None and not run.start.lineage:
                more["embedding_start"] = _rounded(draw_tensor(drawn, run.config.train.seed, part.name))
            curve = [[line["epoch"], line["dev"][f"{part.name}/{part.metric}"]] for line in result.history]
            record = self.record(
                item,
                dataclasses.replace(part.task, name=name),
                id=f"{item.id}-{number}" if number else item.id,
                trained_parameters=round(total / len(run.parts)),
                dev=own.result.dev_metrics if own else {},
                test=self._score_test(own.run, own.result) if own else None,
                status=DIVERGED if is_lost else FINISHED,
                curve=curve,
                seconds=result.seconds / len(run.parts),
                extra={**extra, **more, **_describe_training(run, result, part.task)},
            )
            records.append(record)
        return records

    def _score_test(self, run: Run, result: Result) -> dict[str, float] | None:
        test = run.task.test
        if test is None or test.targets is None:
            return None
        return score_split(run, result, self.backbone, test)

    def record_failure(self, item: PlannedRun, error: InlayError) -> Record:
        """Make the record of a failed item; it is tried again in the next session."""
        status = DIVERGED if isinstance(error, Diverged) else FAILED
        return self.record(item, self.plan.tasks[item.task], status=status, extra={"message": error.message})

    def record(self, item: PlannedRun, task: Task, **known: Any) -> Record:
        """Make a record from the fields in `known`, and the rest from the plan."""
        about: dict[str, Any] = {"layers": self.backbone.anatomy.num_layers}
        for name, rows in (("num_dev", task.dev), ("num_test", task.test)):
            if rows is not None and rows.targets is not None:
                about[name] = len(rows)
        if item.config.train.pooling == "auto" and ARM_KINDS[item.arm.kind].needs_backbone:
            about["pooling"] = self.backbone.default_pooling  # the setting `auto` stands for it
        known["extra"] = {**about, **known.get("extra", {})}
        # Leave out this machine's folders, so that results of several machines can be merged.
        written = self.plan.study.data_config(item.task, None)
        places = {name: getattr(written, name) for name in ("source", "dev", "test", "root")}
        data = dataclasses.replace(item.config.data, **places)
        config = dataclasses.replace(item.config, backbone=short_name(self.backbone.name), data=data)
        usual = {
            "id": item.id,
            "study": self.plan.study.name,
            "arm": item.arm.name,
            "task": task.name,
            "backbone": short_name(self.backbone.name),
            "fingerprint": self.backbone.fingerprint,
            "profile": self.plan.study.profile,
            "seed": item.seed,
            "axes": dict(item.axes),
            "trained_parameters": 0,
            "backbone_parameters": self.backbone.num_parameters,
            "num_train": len(task.train),
            "metric": task.metric,
            "dev": {},
            "test": None,
            "majority": _find_majority(task),
            "status": FINISHED,
            "curve": [],
            "seconds": 0.0,
            **self._origin,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "config": dataclasses.asdict(config),
        }
        return Record.from_json(Record(**{**usual, **known}).to_json())


def _describe_training(run: AnyRun, result: Result, task: Task) -> dict[str, Any]:
    about = {"best_epoch": result.best_epoch, "steps": run.num_steps, "notes": list_notes(task)}
    return {**about, "message": result.message} if result.message else about


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 5) for value in values]


def list_notes(task: Task) -> list[str]:
    """List the notes on a task's data, with paths cut to file names."""
    return [re.sub(r"(?<!\S)/\S*/", "", note) for note in task.notes]


def _find_majority(task: Task) -> float | None:
    """Return the dev accuracy of the most frequent training class."""
    if not KINDS[task.kind].is_classifier or task.train.targets is None or task.dev.targets is None:
        return None
    most = np.bincount(task.train.targets, minlength=len(task.labels)).argmax()
    return float(np.mean(task.dev.targets == most))


def name_processor() -> str:
    """Name the processor, which computes if no GPU does."""
    return canonical_environment()["processor"] or platform.machine()
