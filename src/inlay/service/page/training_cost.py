"""A rough estimate of how long a training takes: as long as earlier jobs of this tenant for their rows, or usual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inlay.errors import InlayError
from inlay.reports import duration
from inlay.service.page.rendering import read_time
from inlay.service.state import QUEUED, RUNNING, Workspace

_USUAL_S = 0.045
"""seconds a row takes from reading to live, on two cores, with the default backbone and number of epochs"""
_START_S = 10.0
_NEAR = 0.6, 1.7
_NUM_JOBS, _FEWEST_ROWS = 5, 200
_MINUTE = 60


def estimate_cost(workspace: Workspace, num_rows: int, epochs: int | None) -> dict[str, Any]:
    """Return how long a job of so many rows will take, in words, and how many jobs wait before it."""
    open_jobs = [job for job in list_open_jobs(workspace) if job["kind"] == "train"]
    recent = workspace.jobs(state="succeeded", limit=_NUM_JOBS).to_json()["items"]
    paces = sorted(pace for job in recent if (pace := _find_pace(workspace, job)))
    pace = paces[len(paces) // 2] if paces else _USUAL_S
    rounds = 1.0 if epochs is None else epochs / _usual_epochs()
    seconds = _START_S + num_rows * pace * rounds
    return {"words": _say_span(seconds), "seconds": seconds, "waiting": len(open_jobs)}


def list_open_jobs(workspace: Workspace) -> list[dict[str, Any]]:
    """Return the jobs that run or wait, in the order in which they will be done."""
    found = [job for state in (RUNNING, QUEUED) for job in reversed(workspace.jobs(state=state).items)]
    return [job.to_json() for job in found]


def _usual_epochs() -> int:
    from inlay.settings import TrainConfig

    return TrainConfig().num_epochs


def _find_pace(workspace: Workspace, job: Mapping[str, Any]) -> float | None:
    """Return the seconds that a row of a finished job took with the usual epochs; None for a job that tells little."""
    if job["kind"] != "train" or not job["dataset"] or not job["started_at"] or not job["ended_at"]:
        return None
    try:
        num_rows = workspace.dataset(job["dataset"]).to_json()["num_rows"]
    except InlayError:  # the dataset was deleted
        return None
    if num_rows < _FEWEST_ROWS:
        return None
    seconds = (read_time(job["ended_at"]) - read_time(job["started_at"])).total_seconds()
    epochs = job["settings"].get("epochs")
    rounds = 1.0 if epochs is None else epochs / _usual_epochs()
    return max(0.0, seconds - _START_S) / num_rows / rounds


def _say_span(seconds: float) -> str:
    """Write a length of time as a range around it."""
    low, high = (factor * seconds for factor in _NEAR)
    if high < _MINUTE:
        return "less than a minute"
    if low < _MINUTE:
        return f"up to {duration(high)}"
    first, second = duration(low), duration(high)
    if first.split()[-1].rstrip("s") == second.split()[-1].rstrip("s"):
        return f"{first.split()[0]} to {second}"
    return f"{first} to {second}"
