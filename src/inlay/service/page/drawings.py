"""Drawings: numbers as places on a picture. The templates write the SVG; nothing here makes HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.service.page.rendering import percent, plural, show_day, show_number

_SPARK_WIDTH, _SPARK_HEIGHT = 128, 36
_BARS_WIDTH, _BARS_HEIGHT, _BARS_FOOT = 480, 112, 2


@dataclass(frozen=True)
class Spark:
    """A line without axes, and the area under it."""

    line: str
    area: str
    width: int = _SPARK_WIDTH
    height: int = _SPARK_HEIGHT


def draw_spark(values: Sequence[float]) -> Spark | None:
    """Draw how a count went day by day, from 0 to its largest; None if there is nothing to see."""
    if len(values) < 2 or not any(values):
        return None
    most = max(values)
    step = _SPARK_WIDTH / (len(values) - 1)
    room = _SPARK_HEIGHT - 4
    places = [(round(n * step, 1), round(2 + room * (1 - value / most), 1)) for n, value in enumerate(values)]
    line = "M" + "L".join(f"{x} {y}" for x, y in places)
    return Spark(line, f"{line}L{_SPARK_WIDTH} {_SPARK_HEIGHT}L0 {_SPARK_HEIGHT}Z")


@dataclass(frozen=True)
class Bar:
    """A column of a picture of days, and what it says."""

    x: float
    y: float
    width: float
    height: float
    words: str


@dataclass(frozen=True)
class Bars:
    """A picture of days; `words` says the same."""

    bars: tuple[Bar, ...]
    first: str
    words: str
    width: int = _BARS_WIDTH
    height: int = _BARS_HEIGHT
    base: int = _BARS_HEIGHT - _BARS_FOOT


def draw_days(days: Mapping[str, int], noun: str = "row") -> Bars | None:
    """Draw counts by day (oldest first); None if all are 0."""
    most = max(days.values(), default=0)
    if most == 0:
        return None
    base = _BARS_HEIGHT - _BARS_FOOT
    step = _BARS_WIDTH / len(days)
    bars = []
    for number, (day, count) in enumerate(days.items()):
        tall = 0 if count == 0 else max(2, (base - 6) * count / most)
        said = f"{show_day(day)}: {plural(count, noun)}"
        bars.append(Bar(round(number * step + 1, 1), round(base - tall, 1), round(step - 2, 1), round(tall, 1), said))
    words = f"{plural(sum(days.values()), noun)} in {len(days)} days, {show_number(most)} on the busiest"
    return Bars(tuple(bars), show_day(next(iter(days))), words)


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


_WIDE, _MARGIN = 600, 10


def draw_difference(low: float, middle: float, high: float) -> dict[str, float]:
    """Draw a difference with its interval on a line with 0 in the middle: places from left to right."""
    reach = 1.15 * max(abs(low), abs(high), abs(middle), 1e-9)
    half = _WIDE / 2 - _MARGIN

    def place(value: float) -> float:
        return round(_WIDE / 2 + half * value / reach, 1)

    return {"zero": _WIDE / 2, "low": place(low), "middle": place(middle), "high": place(high)}
