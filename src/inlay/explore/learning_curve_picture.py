"""The picture of a learning curve: scores by rows, the law with its 90% band, and the forecast."""

from __future__ import annotations

import io
from pathlib import Path

from inlay.errors import BadConfig
from inlay.explore.learning_curve import NOTHING, LearningCurve

_SUFFIXES = (".svg", ".png")
_BLUE, _RED, _GREY = "#1f4e79", "#c0504d", "#8a8f98"


def check_picture(path: Path) -> None:
    """Refuse a picture that is neither SVG nor PNG."""
    if path.suffix.lower() not in _SUFFIXES:
        raise BadConfig(f"`{path}` does not end in .svg or .png", "name the picture .svg or .png")


def draw_learning_curve(curve: LearningCurve, suffix: str = ".svg") -> bytes:
    """Draw a curve as SVG or PNG."""
    import matplotlib
    from matplotlib.figure import Figure  # half a second to import
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    with matplotlib.rc_context({"font.size": 10, "svg.hashsalt": "inlay", "svg.fonttype": "path"}):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.add_subplot()
        sizes = sorted({point.num_rows for point in curve.points})
        forecasts = curve.forecasts
        if curve.band and curve.verdict != NOTHING:
            rows, low, middle, high = zip(*curve.band, strict=True)
            axes.fill_between(rows, low, high, color=_BLUE, alpha=0.12, linewidth=0, label="90% of the fits")
            axes.plot(rows, middle, color=_BLUE, linewidth=1.5, label="fitted law")
        axes.plot(
            *([point.num_rows for point in curve.points], [point.score for point in curve.points]),
            *("o",), color=_BLUE, markersize=4.5, alpha=0.7, label="a run on a share of the rows",
        )  # fmt: skip
        if forecasts:
            scores = [item.score for item in forecasts]
            ends = [[item.score - item.low for item in forecasts], [item.high - item.score for item in forecasts]]
            axes.errorbar(
                *([item.num_rows for item in forecasts], scores, ends),
                fmt="D", color=_RED, markersize=5, capsize=3, label="forecast, 90%",
            )  # fmt: skip
        axes.axvline(curve.num_train, color=_GREY, linewidth=0.8, linestyle="--")
        axes.annotate(
            "all rows", (curve.num_train, 0.02), xycoords=("data", "axes fraction"), xytext=(-4, 0),
            textcoords="offset points", rotation=90, ha="right", va="bottom", color=_GREY, fontsize=9,
        )  # fmt: skip
        axes.set_xscale("log")
        axes.set_xticks([*sizes, *(item.num_rows for item in forecasts)])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("training rows")
        axes.set_ylabel(f"dev {curve.metric}")
        axes.set_title(f"{curve.task}: would more rows help?", loc="left")
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
        buffer = io.BytesIO()
        kind = suffix.lower().lstrip(".")
        figure.savefig(buffer, format=kind, dpi=130, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()
