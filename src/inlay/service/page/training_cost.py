"""What training will cost, roughly: as long as earlier jobs of this tenant took for their rows, or a usual figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.reports import duration
from inlay.service.page.rendering import read_time

if TYPE_CHECKING:
    from inlay.service.page.desk import Desk

_USUAL_S = 0.045
"""seconds a row takes from reading to live, two cores, the default backbone and rounds"""
_START_S = 10.0
_NEAR = 0.6, 1.7
_NUM_JOBS, _FEWEST_ROWS = 5, 200
_MINUTE = 60


def estimate_cost(desk: Desk, num_rows: int, epochs: int | None) -> dict[str, Any]:
    """Return how long a job of so many rows will take, in words, and how many jobs wait before it."""
    open_jobs = [job for job in desk.open_jobs() if job["kind"] == "train"]
    seconds = _START_S + num_rows * _seconds_a_row(desk) * (1.0 if epochs is None else epochs / _usual_epochs())
    return {"words": _say_span(seconds), "seconds": seconds, "waiting": len(open_jobs)}


def _usual_epochs() -> int:
    from inlay.settings import TrainConfig

    return TrainConfig().num_epochs


def _seconds_a_row(desk: Desk) -> float:
    """Return what a row of the latest finished jobs took, with the usual rounds; the usual figure without any."""
    found = [pace for job in desk.jobs(state="succeeded", limit=_NUM_JOBS)["items"] if (pace := _pace_of(desk, job))]
    return sorted(found)[len(found) // 2] if found else _USUAL_S


def _pace_of(desk: Desk, job: Mapping[str, Any]) -> float | None:
    if job["kind"] != "train" or not job["dataset"] or not job["started_at"] or not job["ended_at"]:
        return None
    try:
        num_rows = desk.dataset(job["dataset"])["num_rows"]
    except InlayError:  # deleted meanwhile
        return None
    if num_rows < _FEWEST_ROWS:
        return None
    seconds = (read_time(job["ended_at"]) - read_time(job["started_at"])).total_seconds()
    epochs = job["settings"].get("epochs")
    rounds = 1.0 if epochs is None else epochs / _usual_epochs()
    return max(0.0, seconds - _START_S) / num_rows / rounds


def _say_span(seconds: float) -> str:
    """Say a length of time as the span that it lies in."""
    low, high = (factor * seconds for factor in _NEAR)
    if high < _MINUTE:
        return "less than a minute"
    if low < _MINUTE:
        return f"up to {duration(high)}"
    first, second = duration(low), duration(high)
    if first.split()[-1].rstrip("s") == second.split()[-1].rstrip("s"):
        return f"{first.split()[0]} to {second}"
    return f"{first} to {second}"
