"""Diagrams: numbers as places on a picture. The service's templates draw them, and the report of a task does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.reports.wording import is_share, metric_words, percent, plural, show_number, show_score

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


@dataclass(frozen=True)
class PlotMark:
    """A place on a picture with its words: a point, or a line of the grid."""

    x: float
    y: float
    words: str
    look: str = ""


@dataclass(frozen=True)
class Plot:
    """A picture of points on two axes; `words` says the same. `rows` and `columns` are the lines of its grid."""

    title: str
    words: str
    points: tuple[PlotMark, ...]
    rows: tuple[PlotMark, ...]
    columns: tuple[PlotMark, ...]
    line: str = ""
    """the points joined, as SVG writes places"""


def draw_epochs(history: Sequence[Mapping[str, Any]], metric: str, best_epoch: int | None) -> list[Plot]:
    """Draw the training loss and the dev score by epoch: each on axes of its own, if two epochs have it."""
    losses = [(line["epoch"], line.get("train_loss")) for line in history]
    scores = [(line["epoch"], line["dev"].get(metric)) for line in history]

    def show_loss(value: float) -> str:
        return f"{value:.3g}"

    def show_dev(value: float) -> str:
        return percent(value, 1) if is_share(metric) else f"{value:.3g}"

    named = ("Training loss", show_loss, losses, None), (f"Dev {metric_words(metric)}", show_dev, scores, best_epoch)
    plots = [_draw_line(title, show, values, best) for title, show, values, best in named]
    return [plot for plot in plots if plot is not None]


def _draw_line(
    title: str, show: Callable[[float], str], values: Sequence[tuple[int, float | None]], best: int | None
) -> Plot | None:
    known = [(epoch, value) for epoch, value in values if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return None
    low, high = _widen(min(value for _, value in known), max(value for _, value in known))
    first, last = known[0][0], known[-1][0]
    points = tuple(
        PlotMark(
            _across((epoch - first) / (last - first)),
            _up((value - low) / (high - low)),
            f"epoch {epoch}: {show(value)}",
            "best" if epoch == best else "",
        )
        for epoch, value in known
    )
    rows = tuple(PlotMark(_LEFT, _up(part), show(low + part * (high - low))) for part in (0, 0.5, 1))
    ticks = sorted({first, first + (last - first) // 2, last})
    columns = tuple(PlotMark(_across((epoch - first) / (last - first)), _BOTTOM, str(epoch)) for epoch in ticks)
    words = f"{title}: {show(known[0][1])} after epoch {first}, {show(known[-1][1])} after epoch {last}"
    return Plot(title, words, points, rows, columns, " ".join(f"{mark.x},{mark.y}" for mark in points))


def draw_pairs(pairs: Sequence[tuple[float, float]]) -> Plot | None:
    """Draw answered numbers over the right ones, on one scale; None without any."""
    if not pairs:
        return None
    low, high = _widen(min(map(min, pairs)), max(map(max, pairs)))
    points = tuple(
        PlotMark(
            _across((target - low) / (high - low)),
            _up((given - low) / (high - low)),
            f"right: {show_number(target)}, answer: {show_number(given)}",
        )
        for target, given in pairs
    )
    grid = [(part, show_score(low + part * (high - low), "")) for part in (0, 0.25, 0.5, 0.75, 1)]
    rows = tuple(PlotMark(_LEFT, _up(part), words) for part, words in grid)
    columns = tuple(PlotMark(_across(part), _BOTTOM, words) for part, words in grid)
    return Plot("", f"Answers over right numbers, of {plural(len(pairs), 'row')}", points, rows, columns)


def _widen(low: float, high: float) -> tuple[float, float]:
    """Return a range a little wider than that of the values, and never empty."""
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return low - margin, high + margin
