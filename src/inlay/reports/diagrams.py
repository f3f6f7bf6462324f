"""Diagrams as coordinates of points, lines and words; the service's templates and the report of a task draw them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.reports.wording import is_share, metric_words, percent, plural, show_number, show_score

# The frame of every diagram.
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 310, 15, 215
_FEW_ROWS = 10
_CLOSE = 0.03


def draw_calibration(bins: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Draw how often answers were right against how sure they were; None if there are none."""
    filled = [item for item in bins if item["count"]]
    if not filled:
        return None
    total = sum(item["count"] for item in filled)
    points = []
    for item in filled:
        radius = 3 + 7 * math.sqrt(item["count"] / total)
        sure, right = percent(item["confidence"], 0), percent(item["accuracy"], 0)
        place = {"x": _x(item["confidence"]), "y": _y(item["accuracy"]), "r": round(radius, 1)}
        words = f"{plural(item['count'], 'row')}: {sure} sure, {right} right"
        points.append({**place, "words": words, "look": "few" if item["count"] < _FEW_ROWS else ""})
    grid = [{"x": _x(share), "y": _y(share), "words": percent(share, 0)} for share in (0, 0.25, 0.5, 0.75, 1)]
    return {"points": points, "grid": grid, "words": _describe_calibration(filled, total)}


def _x(share: float) -> float:
    return round(_LEFT + (_RIGHT - _LEFT) * share, 1)


def _y(share: float) -> float:
    return round(_BOTTOM - (_BOTTOM - _TOP) * share, 1)


def _describe_calibration(filled: Sequence[Mapping[str, Any]], total: int) -> str:
    """Describe in words whether answers are as sure as they are right."""
    sure = sum(item["confidence"] * item["count"] for item in filled) / total
    right = sum(item["accuracy"] * item["count"] for item in filled) / total
    verdict = "a little too sure" if sure > right else "better than it thinks"
    if abs(sure - right) <= _CLOSE:
        verdict = "as sure as it should be"
    return f"On average it was {percent(sure, 0)} sure, and right in {percent(right, 0)} of the rows: {verdict}."


@dataclass(frozen=True)
class PlotMark:
    """A point of a plot, or a line of its grid, with its words."""

    x: float
    y: float
    words: str
    look: str = ""


@dataclass(frozen=True)
class Plot:
    """A plot of points; `words` describes it, `rows` and `columns` are the lines of its grid."""

    title: str
    words: str
    points: tuple[PlotMark, ...]
    rows: tuple[PlotMark, ...]
    columns: tuple[PlotMark, ...]
    line: str = ""
    """the coordinates of the line through the points, as SVG writes them"""


def draw_epochs(history: Sequence[Mapping[str, Any]], metric: str, best_epoch: int | None) -> list[Plot]:
    """Draw the training loss and the dev score by epoch, each in its own plot if at least two epochs have it."""
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
            _x((epoch - first) / (last - first)),
            _y((value - low) / (high - low)),
            f"epoch {epoch}: {show(value)}",
            "best" if epoch == best else "",
        )
        for epoch, value in known
    )
    rows = tuple(PlotMark(_LEFT, _y(part), show(low + part * (high - low))) for part in (0, 0.5, 1))
    ticks = sorted({first, first + (last - first) // 2, last})
    columns = tuple(PlotMark(_x((epoch - first) / (last - first)), _BOTTOM, str(epoch)) for epoch in ticks)
    words = f"{title}: {show(known[0][1])} after epoch {first}, {show(known[-1][1])} after epoch {last}"
    return Plot(title, words, points, rows, columns, " ".join(f"{mark.x},{mark.y}" for mark in points))


def draw_pairs(pairs: Sequence[tuple[float, float]]) -> Plot | None:
    """Draw the answers against the right numbers, on one scale; None if there are none."""
    if not pairs:
        return None
    low, high = _widen(min(map(min, pairs)), max(map(max, pairs)))
    points = tuple(
        PlotMark(
            _x((target - low) / (high - low)),
            _y((given - low) / (high - low)),
            f"right: {show_number(target)}, answer: {show_number(given)}",
        )
        for target, given in pairs
    )
    grid = [(part, show_score(low + part * (high - low), "")) for part in (0, 0.25, 0.5, 0.75, 1)]
    rows = tuple(PlotMark(_LEFT, _y(part), words) for part, words in grid)
    columns = tuple(PlotMark(_x(part), _BOTTOM, words) for part, words in grid)
    return Plot("", f"Answers over right numbers, of {plural(len(pairs), 'row')}", points, rows, columns)


def _widen(low: float, high: float) -> tuple[float, float]:
    """Return a range a little wider than the given one, and never empty."""
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return low - margin, high + margin
