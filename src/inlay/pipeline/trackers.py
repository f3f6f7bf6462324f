"""Trackers: listeners that write the epochs of runs for TensorBoard and MLflow (`--log tensorboard|mlflow`).

They hear the same events as the progress on the screen. What always holds: settings and scores are logged, never a
text; a tracker that fails after training began is said and left alone, since training must not end for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inlay import terminal, training
from inlay.data import hide_secrets
from inlay.errors import BadConfig, InlayError, Missing, UnknownName

_RUN_TAG = "inlay.run"
_MOST_LETTERS = 500  # of a setting's value, by MLflow's rule


def open_trackers(names: Sequence[str], folder: Path) -> list[training.Emit]:
    """Return a listener for each of these trackers; `folder` has a folder for each run."""
    check_trackers(names)
    return [_TRACKERS[name](folder) for name in dict.fromkeys(names)]


def check_trackers(names: Sequence[str], *, on_cluster: bool = False) -> None:
    """Refuse unknown trackers, and those whose library is not installed, before anything is read."""
    for name in names:
        if name not in _TRACKERS:
            raise UnknownName("tracker", name, _TRACKERS)
        _import(name)
    if names and on_cluster:
        raise BadConfig("`--log` with `--on`: events of a cluster's machines do not come here", "leave out one of them")


def _import(name: str) -> Any:
    """Import what a tracker writes through; it is an extra."""
    try:
        if name == "mlflow":
            import mlflow

            return mlflow
        from torch.utils import tensorboard

        return tensorboard
    except ImportError as error:
        missing = error.name or name
        raise Missing(
            f"`--log {name}` needs `{missing}`, which is not installed", f"`pip install 'inlay[{name}]'`"
        ) from None


class TensorBoardTracker:
    """A listener that writes scalars into `tensorboard/` in each run's folder: `tensorboard --logdir STORE/runs`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._writers = folder, dict[str, Any]()

    def __call__(self, event: training.Event) -> None:
        """Write what an epoch came to; close the files of a run that ended."""
        match event:
            case training.EpochEnded(member, record):
                writer = self._writers.get(member.run.id) or self._open(member.run, record)
                for name, value in list_scalars(record).items():
                    writer.add_scalar(name, value, record["step"])
                writer.flush()
            case training.RunEnded(member) if member.run.id in self._writers:
                self._writers.pop(member.run.id).close()

    def _open(self, run: training.AnyRun, record: Mapping[str, Any]) -> Any:
        """Open a run's files; what a stopped run had written after the step it goes on from is not shown."""
        writer_of: Callable[..., Any] = _import("tensorboard").SummaryWriter
        writer = writer_of(log_dir=str(self._folder / run.id / "tensorboard"), purge_step=record["step"])
        settings = "\n".join(f"    {key} = {value}" for key, value in list_settings(run).items())
        writer.add_text("settings", settings, 0)
        self._writers[run.id] = writer
        return writer


class MLflowTracker:
    """A listener that logs runs to MLflow: $MLFLOW_TRACKING_URI, in $MLFLOW_EXPERIMENT_NAME or `inlay`."""

    def __init__(self, folder: Path) -> None:
        self._mlflow = _import("mlflow")
        self._client = self._mlflow.MlflowClient()
        self._runs: dict[str, str] = {}
        self._has_failed = False
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "inlay"
        try:
            found = self._client.get_experiment_by_name(name)
            self._experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        except self._mlflow.MlflowException as error:
            uri = self._mlflow.get_tracking_uri()
            raise InlayError(f"cannot log to MLflow at `{uri}`: {error}", "see $MLFLOW_TRACKING_URI") from None

    def __call__(self, event: training.Event) -> None:
        """Log what an epoch came to; end the run in MLflow when it ends here."""
        if self._has_failed:
            return
        with self._told():
            match event:
                case training.EpochEnded(member, record):
                    run_id = self._runs.get(member.run.id) or self._begin(member.run)
                    for name, value in list_scalars(record).items():
                        self._client.log_metric(run_id, name, value, step=record["step"])
                case training.RunEnded(member) if member.run.id in self._runs:
                    has_diverged = member.progress.status == training.DIVERGED
                    self._client.set_terminated(self._runs.pop(member.run.id), "FAILED" if has_diverged else "FINISHED")

    def _begin(self, run: training.AnyRun) -> str:
        """Begin a run in MLflow, or go on with the one that a stopped training left."""
        found = self._client.search_runs([self._experiment], f"tags.`{_RUN_TAG}` = '{run.id}'", max_results=1)
        if found:
            run_id = str(found[0].info.run_id)
            self._client.update_run(run_id, "RUNNING")
        else:
            made = self._client.create_run(self._experiment, tags={_RUN_TAG: run.id}, run_name=f"{run.name} {run.id}")
            run_id = str(made.info.run_id)
            for key, value in list_settings(run).items():
                self._client.log_param(run_id, key, value[:_MOST_LETTERS])
        self._runs[run.id] = run_id
        return run_id

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except self._mlflow.MlflowException as error:
            self._has_failed = True
            terminal.log(f"no more is logged to MLflow: {error}", "yellow")


_TRACKERS: dict[str, Callable[[Path], training.Emit]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MLflowTracker,
}


def list_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an epoch by name: `dev/accuracy`, `train/loss`; those that are finite."""
    found = {f"dev/{name}": value for name, value in record["dev"].items()}
    found |= {"train/loss": record["train_loss"], "train/seconds": record["seconds"]}
    return {
        name: float(value) for name, value in found.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def list_settings(run: training.AnyRun) -> dict[str, str]:
    """Return a run's settings by key, as texts; of the data only where and what kind it is.

    What follows `?` in a URL is left out: in a signed link it is a secret.
    """
    config = run.config
    found = {
        "task": run.name,
        "backbone": config.backbone,
        "data.source": hide_secrets(config.data.source),
        "data.kind": config.data.kind,
    }
    for section in ("method", "train"):
        values = asdict(getattr(config, section))
        found |= {f"{section}.{key}": str(value) for key, value in values.items() if value is not None}
    return {key: str(value) for key, value in found.items()}
