"""Trackers: listeners that write the epochs of runs for TensorBoard and MLflow (`--log tensorboard|mlflow`).

They get the same events as the progress on the screen. What always holds: settings and scores are logged, never a
text; a tracker that fails during training is reported once and then ignored, since training must not end because of it.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inlay import terminal, training
from inlay.data import hide_secrets
from inlay.errors import BadConfig, InlayError, Missing, UnknownName

_RUN_TAG = "inlay.run"
_MOST_LETTERS = 500  # of a setting's value, by MLflow's rule
_MOST_SAID = 300  # letters of an error
# MLflow's own are 7 and 120: four minutes in which a training would stand still because a server is gone.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


def open_trackers(names: Sequence[str], folder: Path) -> list[training.Emit]:
    """Return a listener for each of these trackers; `folder` has a folder for each run."""
    check_trackers(names)
    return [_Guarded(name, _TRACKERS[name](folder)) for name in dict.fromkeys(names)]


def check_trackers(names: Sequence[str], *, on_cluster: bool = False) -> None:
    """Refuse unknown trackers, and those whose library is not installed, before anything is read."""
    for name in names:
        if name not in _TRACKERS:
            raise UnknownName("tracker", name, _TRACKERS)
        _import(name)
    if names and on_cluster:
        raise BadConfig(
            "`--log` cannot be used with `--on`: events of the cluster's machines do not arrive here",
            "leave out one of them",
        )


def _import(name: str) -> Any:
    """Import the library that a tracker writes through, which is an extra."""
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


class _Guarded:
    """A tracker whose first failure is reported, and which is ignored from then on."""

    def __init__(self, name: str, tracker: training.Emit) -> None:
        self._name, self._tracker, self._has_failed = name, tracker, False

    def __call__(self, event: training.Event) -> None:
        """Hand an event on, unless the tracker failed before."""
        if self._has_failed:
            return
        try:
            self._tracker(event)
        except Exception as error:  # a border to other people's code: disks, servers, their own faults
            self._has_failed = True
            said = f"no more is logged to {self._name}: {_describe(error)}; training goes on without it"
            terminal.log(said, "yellow")


def _describe(error: Exception) -> str:
    """Return an error's message as one line, without the passwords and tokens of URLs."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return terminal.shorten(mask_urls(text), _MOST_SAID)


def mask_urls(text: str) -> str:
    """Remove passwords and query strings from the URLs in a text."""
    hidden = re.sub(r"(\w+://)[^\s'\"`]*@", r"\1***@", text)
    return re.sub(r"(\w+://[^\s?'\"`]*)\?[^\s'\"`]*", r"\1", hidden)


class TensorBoardTracker:
    """A listener that writes scalars into `tensorboard/` in each run's folder: `tensorboard --logdir STORE/runs`.

    Each epoch is appended and closed at once, not by TensorBoard's own thread: an error is raised where it happens.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, dict[str, Path]()

    def __call__(self, event: training.Event) -> None:
        """Write the scores of an epoch."""
        if not isinstance(event, training.EpochEnded):
            return
        from torch.utils.tensorboard import summary

        run, record = event.member.run, event.record
        file = self._files.get(run.id) or self._begin(run, record["step"])
        scalars = [summary.scalar(name, value) for name, value in list_scalars(record).items()]
        _append_events(file, [{"step": record["step"], "summary": scalar} for scalar in scalars])

    def _begin(self, run: training.AnyRun, step: int) -> Path:
        """Begin a run's file, and hide what an earlier, stopped training wrote from this step on."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from torch.utils.tensorboard import summary

        file = self._folder / run.id / "tensorboard" / f"events.out.tfevents.{time.time_ns()}"
        file.parent.mkdir(parents=True, exist_ok=True)
        settings = "\n".join(f"    {key} = {value}" for key, value in list_settings(run).items())
        start = SessionLog(status=SessionLog.START)
        first: list[dict[str, Any]] = [{"file_version": "brain.Event:2"}, {"step": step, "session_log": start}]
        _append_events(file, [*first, {"step": 0, "summary": summary.text("settings", settings)}])
        self._files[run.id] = file
        return file


def _append_events(file: Path, events: Sequence[Mapping[str, Any]]) -> None:
    """Append events to a file of TensorBoard, each with the time of now."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    with file.open("ab") as opened:
        records = RecordWriter(opened)
        for event in events:
            records.write(Event(wall_time=time.time(), **event).SerializeToString())


class MLflowTracker:
    """A listener that logs runs to MLflow: $MLFLOW_TRACKING_URI, in $MLFLOW_EXPERIMENT_NAME or `inlay`."""

    def __init__(self, folder: Path) -> None:
        mlflow = _import("mlflow")
        for variable, value in _PATIENCE.items():
            os.environ.setdefault(variable, value)
        self._runs: dict[str, str] = {}
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "inlay"
        try:
            self._client = mlflow.MlflowClient()
            found = self._client.get_experiment_by_name(name)
            self._experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        except Exception as error:  # of MLflow, of its database, of its HTTP client
            where = mask_urls(str(mlflow.get_tracking_uri()))
            raise InlayError(
                f"cannot log to MLflow at `{where}`: {_describe(error)}",
                "see $MLFLOW_TRACKING_URI, or leave out `--log mlflow`",
            ) from None

    def __call__(self, event: training.Event) -> None:
        """Log the scores of an epoch; end the run in MLflow when it ends here."""
        match event:
            case training.EpochEnded(member, record):
                run_id = self._runs.get(member.run.id) or self._begin(member.run)
                for name, value in list_scalars(record).items():
                    self._client.log_metric(run_id, name, value, step=record["step"])
            case training.RunEnded(member) if member.run.id in self._runs:
                has_diverged = member.progress.status == training.DIVERGED
                self._client.set_terminated(self._runs.pop(member.run.id), "FAILED" if has_diverged else "FINISHED")

    def _begin(self, run: training.AnyRun) -> str:
        """Begin a run in MLflow, or continue the one that a stopped training left."""
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


_TRACKERS: dict[str, Callable[[Path], training.Emit]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MLflowTracker,
}


def list_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of an epoch by name: `dev/accuracy`, `train/loss`."""
    found = {f"dev/{name}": value for name, value in record["dev"].items()}
    found |= {"train/loss": record["train_loss"], "train/seconds": record["seconds"]}
    return {
        name: float(value) for name, value in found.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def list_settings(run: training.AnyRun) -> dict[str, str]:
    """Return a run's settings by key, as texts; of the data settings only the source and the kind.

    Query strings of URLs are left out: in a signed link they are secret.
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
