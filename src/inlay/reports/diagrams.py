"""Diagrams: numbers as places on a picture. The service's templates draw them, and the report of a task does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from inlay.reports.wording import percent, plural

# The plot of sureness: the frame it is drawn in.
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 310, 15, 215


def draw_calibration(bins: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Draw how often answers were right against how sure they were; None without any."""
    filled = [item for item in bins if item["count"]]
    if not filled:
        return None
    total = sum(item["count"] for item in filled)
    points = []
    for item in filled:
        radius = 3 + 7 * math.sqrt(item["count"] / total)
        sure, right = percent(item["confidence"], 0), percent(item["accuracy"], 0)
        said = f"{plural(item['count'], 'row')}: {sure} sure, {right} right"
        look = "few" if item["count"] < _FEW_ROWS else ""
        points.append(
            {
                "x": _across(item["confidence"]),
                "y": _up(item["accuracy"]),
                "r": round(radius, 1),
                "words": said,
                "look": look,
            }
        )
    grid = [{"x": _across(share), "y": _up(share), "words": percent(share, 0)} for share in (0, 0.25, 0.5, 0.75, 1)]
    return {"points": points, "grid": grid, "words": _judge_sureness(filled, total)}


def _across(share: float) -> float:
    return round(_LEFT + (_RIGHT - _LEFT) * share, 1)


def _up(share: float) -> float:
    return round(_BOTTOM - (_BOTTOM - _TOP) * share, 1)


_FEW_ROWS = 10
_CLOSE = 0.03


def _judge_sureness(filled: Sequence[Mapping[str, Any]], total: int) -> str:
    """Say in words whether answers are as sure as they are right."""
    sure = sum(item["confidence"] * item["count"] for item in filled) / total
    right = sum(item["accuracy"] * item["count"] for item in filled) / total
    said = f"On average it was {percent(sure, 0)} sure, and right in {percent(right, 0)} of the rows"
    if abs(sure - right) <= _CLOSE:
        return f"{said}: as sure as it should be."
    return f"{said}: a little too sure." if sure > right else f"{said}: better than it thinks."
