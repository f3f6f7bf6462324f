"""A run: one task trained once, with its settings and its result.

`make_run.py` makes runs, `run_folder.py` reads and writes their folders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from inlay.data import Reading, Task
from inlay.model import SlotSpec
from inlay.notebook import show_metrics
from inlay.settings import RunConfig, TrainConfig
from inlay.training.run.start import Start

if TYPE_CHECKING:
    from inlay.training.run.joint import JointRun

AnyRun: TypeAlias = "Run | JointRun"

FINISHED, STOPPED_EARLY, DIVERGED = "finished", "stopped-early", "diverged"


@dataclass(frozen=True, eq=False)
class Run:
    """A task and resolved settings on one backbone. Make it with `make_run`.

    >>> inlay.make_run(task, backbone, size=8).config.method.size
    8
    """

    task: Task
    config: RunConfig
    spec: SlotSpec
    fingerprint: str
    start: Start = field(default_factory=Start)
    origin: Mapping[str, Any] = field(default_factory=dict)
    """the multi-task run that it was part of: its id, method and tasks"""
    notes: tuple[str, ...] = ()
    """notes for its user on how it reads the backbone"""

    def __repr__(self) -> str:
        return f"Run({self.name}: {describe_config(self.config)}, id {self.id})"

    @cached_property
    def id(self) -> str:
        return self.origin["run"] if self.origin else self.config.identify(self.task.digest, self.fingerprint)

    @property
    def parts(self) -> tuple[Run, ...]:
        """The runs of its tasks; a run of one task has itself."""
        return (self,)

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def metric(self) -> str:
        """The metric its epochs are compared by."""
        return self.task.metric

    @property
    def num_rows(self) -> int:
        """Rows it is trained on in an epoch."""
        return len(self.task.train)

    @property
    def reading(self) -> Reading:
        """The way the task's rows become windows of tokens."""
        head = self.spec.head
        return Reading(head.layout, self.max_length, self.config.train.stride, head.prompt, head.pairs)

    @property
    def max_length(self) -> int:
        """Tokens a text (or a window) is cut to."""
        assert self.config.train.max_length is not None, "make_run resolves it"
        return self.config.train.max_length

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch if every row is one window; `Member` counts the windows of long contexts."""
        return -(-len(self.task.train) // self.config.train.batch_size)

    @property
    def num_steps(self) -> int:
        return count_steps(len(self.task.train), self.config.train)


def describe_config(config: RunConfig) -> str:
    """Describe a run's settings in a few words, for a `repr`."""
    method = config.method.name if config.method.size is None else f"{config.method.name} {config.method.size}"
    return f"{method}, lr {config.train.lr:g}, seed {config.train.seed}"


def count_steps(num_rows: int, train: TrainConfig) -> int:
    """Return the steps of a run over so many rows (or windows), by the rule of `train.steps`."""
    if not train.num_epochs:
        return 0
    if train.steps == "bert":  # batches go on across epochs, so none is smaller than the others
        return max(1, num_rows * train.num_epochs // train.batch_size)
    return -(-num_rows // train.batch_size) * train.num_epochs


def count_fold_steps(train: TrainConfig) -> int:
    """Return the contrastive steps without one of the folds that judge them: fewer, as there are fewer rows."""
    folds = train.contrast_folds or 0
    return -(-(train.contrast or 0) * (folds - 1) // folds) if folds else 0


def count_start_steps(train: TrainConfig) -> int:
    """Return the contrastive steps before training: on all rows, and without each fold that judges them."""
    return (train.contrast or 0) + (train.contrast_folds or 0) * count_fold_steps(train)


@dataclass(frozen=True)
class Result:
    """The result of a run. `tensors` are the best epoch's, at the slot's own size.

    >>> result
    Result(... finished, dev ... at epoch ... of ..., ... s)
    """

    run_id: str
    status: str
    best_epoch: int
    dev_metric: float | None
    """score by the task's metric at the best epoch; None if the run diverged before its first epoch ended"""
    history: list[dict[str, Any]]
    seconds: float
    peak_memory_bytes: int
    message: str = ""
    folder: Path | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        score = "no score" if self.dev_metric is None else f"dev {self.dev_metric:.4f}"
        last = self.history[-1]["epoch"] if self.history else 0
        return (
            f"Result({self.run_id} {self.status}, {score} at epoch {self.best_epoch} of {last}, {self.seconds:.1f} s)"
        )

    def _repr_html_(self) -> str:
        metrics = {f"epoch {line['epoch']}": line.get("dev", {}) for line in self.history}
        return show_metrics(f"run {self.run_id}", {"status": self.status, "best epoch": self.best_epoch}, metrics)

    @property
    def dev_metrics(self) -> dict[str, float]:
        """All dev metrics of the best epoch; empty if no epoch ended."""
        return self._best.get("dev", {})

    @property
    def unpredicted(self) -> tuple[str, ...]:
        """Labels of dev rows that were never predicted at the best epoch."""
        return tuple(self._best.get("unpredicted", ()))

    def spec(self, run: Run) -> SlotSpec:
        """Return the run's slot, with the head settings that were fitted on the dev rows of the best epoch."""
        return dataclasses.replace(run.spec, head=dataclasses.replace(run.spec.head, **self._best.get("head", {})))

    @property
    def _best(self) -> dict[str, Any]:
        return next((line for line in self.history if line["epoch"] == self.best_epoch), {})


@dataclass(frozen=True)
class Trained:
    """A finished run read back, with its result.

    >>> joint = inlay.make_joint_run([task, other], backbone, size=4, steps=2, epochs=1, batch_size=8)
    >>> inlay.materialize(joint, *inlay.fit([joint], backbone), backbone)[0]
    Trained(Run(mood: ...), Result(...))
    """

    run: Run
    result: Result

    def __repr__(self) -> str:
        return f"Trained({self.run!r}, {self.result!r})"

    @property
    def spec(self) -> SlotSpec:
        """The run's slot, with the head settings fitted on dev rows."""
        return self.result.spec(self.run)
