"""Records of trained runs: scores with settings, commit, hardware, versions and date."""

from __future__ import annotations

import dataclasses
import platform
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from inlay.data import KINDS, Task
from inlay.errors import Diverged, InlayError
from inlay.model import draw_tensor
from inlay.studies.run.records import DIVERGED, FAILED, FINISHED, Record, short_name
from inlay.studies.spec.arms import ARM_KINDS
from inlay.studies.spec.planning import PlannedRun, StudyPlan
from inlay.training import DIVERGED as RUN_DIVERGED
from inlay.training import JointRun, Result, Run, current_commit, materialize, score_split

if TYPE_CHECKING:
    from inlay.model import Anatomy, Backbone


@dataclass(frozen=True)
class Origin:
    """The commit, hardware and versions in every record of this process."""

    commit: str
    hardware: str
    versions: dict[str, str]

    @classmethod
    def here(cls, backbone: Backbone, commit: str | None = None) -> Origin:
        """Describe this machine, with the libraries in use."""
        names = ("inlay", "torch", "transformers", "numpy")
        known = {"python": platform.python_version(), **{name: _version_of(name) for name in names}}
        return cls(current_commit() if commit is None else commit, _name_hardware(backbone), known)


def has_diverged(result: Result) -> bool:
    """Tell whether a run diverged, so that it must not be compared."""
    return result.status == RUN_DIVERGED or result.dev_metric is None


class Recorder:
    """Makes the records of one plan on one backbone."""

    def __init__(self, plan: StudyPlan, backbone: Backbone, origin: Origin) -> None:
        self.plan, self.backbone, self._origin = plan, backbone, origin

    def record_result(self, item: PlannedRun, result: Result, extra: dict[str, Any]) -> Record:
        """Make the record of a trained run; its test rows are scored here, if it has labelled ones."""
        run, is_lost = item.run, has_diverged(result)
        assert isinstance(run, Run)
        task = run.task
        more = {"best_epoch": result.best_epoch, "steps": run.num_steps, "notes": list_notes(task)}
        return self.record(
            item,
            task,
            trained_parameters=run.spec.count_parameters(self.backbone.anatomy),
            dev=result.dev_metrics,
            test=None if is_lost else self._score_test(run, result),
            status=DIVERGED if is_lost else FINISHED,
            curve=[[line["epoch"], line["dev"][task.metric]] for line in result.history],
            seconds=result.seconds,
            extra={**extra, **more, **({"message": result.message} if result.message else {})},
        )

    def record_joint(self, item: PlannedRun, result: Result, extra: dict[str, Any]) -> list[Record]:
        """Make the records of a multi-task run, one per task; the first has the run's id, the others `<id>-1` …

        A task's trained parameters are its part of the run's: what is shared is divided among all.
        """
        run, is_lost = item.run, has_diverged(result)
        assert isinstance(run, JointRun)
        written = [] if is_lost else materialize(run, result, self.backbone)
        total = sum(spec.num_parameters for spec in run.layout(self.backbone.anatomy))
        about = {"run": run.id, "tasks": list(item.tasks), "parameters": total, "is_copy": run.spec.is_finetuned}
        records = []
        for number, (name, part) in enumerate(zip(item.tasks, run.parts, strict=True)):
            own = written[number] if written else None
            more = {"best_epoch": result.best_epoch, "steps": run.num_steps, "notes": list_notes(part.task)}
            more |= {"joint": about, "embedding": read_embedding(result, part.name)}
            more |= {"embedding_start": draw_embedding(run, part, self.backbone.anatomy)}
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
                extra={**extra, **more, **({"message": result.message} if result.message else {})},
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
        about: dict[str, Any] = {"layers": self.backbone.anatomy.num_layers, **count_rows(task)}
        if item.config.train.pooling == "auto" and ARM_KINDS[item.arm.kind].needs_backbone:
            about["pooling"] = self.backbone.default_pooling  # in a multi-task run each task leaves it open
        known["extra"] = {**about, **known.get("extra", {})}
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
            "majority": find_majority(task),
            "status": FINISHED,
            "curve": [],
            "seconds": 0.0,
            **dataclasses.asdict(self._origin),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "config": self._describe_config(item),
        }
        return Record.from_json(Record(**{**usual, **known}).to_json())

    def _describe_config(self, item: PlannedRun) -> dict[str, Any]:
        """Return the settings of a run without this machine's folders, so that results of several machines merge."""
        written = self.plan.study.data_config(item.task, None)
        places = {name: getattr(written, name) for name in ("source", "dev", "test", "root")}
        data = dataclasses.replace(item.config.data, **places)
        return dataclasses.asdict(dataclasses.replace(item.config, backbone=short_name(self.backbone.name), data=data))


def read_embedding(result: Result, task: str) -> list[float] | None:
    """Return a task's embedding, which the hypernetwork reads; None if there is none."""
    found = result.tensors.get(f"{task}/task.embedding")
    return None if found is None else [round(float(value), 5) for value in found]


def draw_embedding(run: JointRun, part: Run, anatomy: Anatomy) -> list[float] | None:
    """Draw an embedding as it was before training; None if there is none, or it was not drawn."""
    found = next((item for item in part.spec.layout(anatomy) if item.name == "task.embedding"), None)
    if found is None or run.start.lineage:
        return None
    return [round(float(value), 5) for value in draw_tensor(found, run.config.train.seed, part.name)]


def list_notes(task: Task) -> list[str]:
    """List the notes on a task's data, without folder names."""
    return [re.sub(r"(?<!\S)/\S*/", "", note) for note in task.notes]


def count_rows(task: Task) -> dict[str, int]:
    """Count the scored rows: `num_dev`, and `num_test` if test rows have labels."""
    splits = {"num_dev": task.dev, "num_test": task.test}
    return {name: len(rows) for name, rows in splits.items() if rows is not None and rows.targets is not None}


def find_majority(task: Task) -> float | None:
    """Return the dev accuracy of the most frequent training class; None without classes."""
    if not KINDS[task.kind].is_classifier or task.train.targets is None or task.dev.targets is None:
        return None
    most = np.bincount(task.train.targets, minlength=len(task.labels)).argmax()
    return float(np.mean(task.dev.targets == most))


def _name_hardware(backbone: Backbone) -> str:
    if backbone.device.type == "cuda":
        return torch.cuda.get_device_name(backbone.device)
    return name_processor()


def name_processor() -> str:
    """Name the processor, which computes if no GPU does."""
    from inlay.model import canonical_environment

    return canonical_environment()["processor"] or platform.machine()


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # running from a checkout
        return ""
