"""Drawings: the coordinates of lines and bars. The templates write the SVG; nothing here makes HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inlay.reports import plural, show_number
from inlay.service.page.rendering import show_day

_SPARK_WIDTH, _SPARK_HEIGHT = 128, 36
_BARS_WIDTH, _BARS_HEIGHT, _BARS_FOOT = 480, 112, 2


@dataclass(frozen=True)
class Spark:
    """A sparkline: a line without axes, and the area under it, as SVG paths."""

    line: str
    area: str
    width: int = _SPARK_WIDTH
    height: int = _SPARK_HEIGHT


def draw_spark(values: Sequence[float]) -> Spark | None:
    """Return a sparkline of counts by day, from 0 to the largest; None if all are 0."""
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
    """A bar of one day, and its words."""

    x: float
    y: float
    width: float
    height: float
    words: str


@dataclass(frozen=True)
class Bars:
    """A bar chart of days; `words` says the same for screen readers."""

    bars: tuple[Bar, ...]
    first: str
    words: str
    width: int = _BARS_WIDTH
    height: int = _BARS_HEIGHT
    base: int = _BARS_HEIGHT - _BARS_FOOT


def draw_days(days: Mapping[str, int], noun: str = "row") -> Bars | None:
    """Return a bar chart of counts by day (oldest first); None if all are 0."""
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


_WIDE, _MARGIN = 600, 10


def draw_difference(low: float, middle: float, high: float) -> dict[str, float]:
    """Return the x coordinates of a difference and its interval on a line with 0 in the middle."""
    reach = 1.15 * max(abs(low), abs(high), abs(middle), 1e-9)
    half = _WIDE / 2 - _MARGIN

    def place(value: float) -> float:
        return round(_WIDE / 2 + half * value / reach, 1)

    return {"zero": _WIDE / 2, "low": place(low), "middle": place(middle), "high": place(high)}
