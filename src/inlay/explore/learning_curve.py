"""Learning curves: runs on shares of the training rows, scored on the same dev rows, and a power law fitted to them.

They tell whether more rows would help. The error on dev rows falls as floor + scale · rows^-exponent (Hestness et al.
2017), where the error is one minus the score, or the score itself if lower is better. For each exponent of a grid, the
best floor and scale that are not below zero are known in closed form. A bootstrap gives the uncertainty of the
forecast: the residuals are drawn again at random, and everything is fitted again.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from inlay.data import KINDS, METRICS, Task
from inlay.errors import BadConfig, BadData, Diverged
from inlay.explore.even_samples import order_evenly
from inlay.notebook import show_html
from inlay.settings import RunConfig

if TYPE_CHECKING:
    from inlay.model import Backbone
    from inlay.store import Store
    from inlay.training import Result, Run

FEWEST_SIZES, FEWEST_ROWS = 4, 16
_FEWEST_EACH = 4  # the smallest share has at least this many rows per label on average
_SMALLEST_SHARE = 32  # the smallest share is at least one 32nd of the rows
_EXPONENTS = np.linspace(0.05, 2.0, 40)
_DRAWS, _BAND = 1000, 40
_INTERVAL = (0.05, 0.95)
_AHEAD = (2, 4)
LITTLE = 0.005
"""a gain below this is hardly worth the labelling, as a share of the largest possible score, or of the current error"""
_TOO_WIDE = 0.05  # an interval wider than this (in the same unit) that includes no gain at all allows no forecast
_SUFFIXES = (".svg", ".png")  # of pictures
_BLUE, _RED, _GREY = "#1f4e79", "#c0504d", "#8a8f98"
HELPS, MAY_HELP, HARDLY, NOTHING = "helps", "may help", "hardly", "nothing"


@dataclass(frozen=True)
class CurvePoint:
    """A run on a share of the rows."""

    num_rows: int
    draw: int
    score: float
    run_id: str


@dataclass(frozen=True)
class Forecast:
    """The score expected with more rows, and its gain over the current fitted score, each with a 90% interval."""

    num_rows: int
    score: float
    low: float
    high: float
    gain: float
    """above 0 is better, also for metrics where lower is better"""
    gain_low: float
    gain_high: float


@dataclass(frozen=True)
class LearningCurve:
    """The scores of the shares, the law fitted to them, and its forecast."""

    task: str
    metric: str
    higher_is_better: bool
    num_train: int
    num_dev: int
    points: tuple[CurvePoint, ...]
    verdict: str
    """`helps`, `may help` or `hardly`; `nothing` if the scores allow no forecast"""
    reason: str
    """why there is no forecast; "" if there is one"""
    floor: float | None
    scale: float | None
    exponent: float | None
    forecasts: tuple[Forecast, ...] = ()
    band: tuple[tuple[float, float, float, float], ...] = ()
    """(rows, low, fitted and high score) of some points, for the picture"""

    def to_json(self) -> dict[str, Any]:
        """Return the curve as data."""
        return {**asdict(self), "sentence": describe_curve(self)}

    def __repr__(self) -> str:
        return f"LearningCurve({self.task}: {describe_curve(self)})"

    def _repr_html_(self) -> str:
        sizes = sorted({point.num_rows for point in self.points})
        scores = [[point.score for point in self.points if point.num_rows == size] for size in sizes]
        rows: list[list[Any]] = [
            [size, sum(own) / len(own), "measured"] for size, own in zip(sizes, scores, strict=True)
        ]
        rows += [[item.num_rows, item.score, f"forecast, {item.low:.4f} to {item.high:.4f}"] for item in self.forecasts]
        return show_html(f"{self.task}: {describe_curve(self)}", {}, ["rows", f"dev {self.metric}", ""], rows)


def check_curve(task: Task, num_sizes: int) -> list[int]:
    """Return the sizes of the shares, smallest first; refuse data with too few rows for a curve."""
    if num_sizes < FEWEST_SIZES:
        raise BadConfig(f"{num_sizes} sizes are too few for a curve", f"use {FEWEST_SIZES} at least")
    num_rows = len(task.train)
    smallest = max(FEWEST_ROWS, _FEWEST_EACH * len(task.labels), num_rows // _SMALLEST_SHARE)
    sizes = sorted({round(size) for size in np.geomspace(min(smallest, num_rows), num_rows, num_sizes)})
    if len(sizes) < FEWEST_SIZES or smallest * 4 > num_rows:
        raise BadData(
            f"{num_rows} training rows are too few for a learning curve",
            f"this task needs {4 * smallest}: with so few, more rows nearly always help",
        )
    return sizes


def make_curve_runs(
    task: Task, config: RunConfig, backbone: Backbone, store: Store, *, num_sizes: int = 6, num_draws: int = 3
) -> list[tuple[int, int, Run]]:
    """Return a run for each draw and each share of the rows, as (rows, draw, run); shares of one draw are nested."""
    from inlay.training import make_run

    assert task.train.targets is not None
    strata = np.asarray(KINDS[task.kind].targets.find_strata(task.train.targets))

    made = []
    for draw in range(num_draws):
        seed = config.train.seed + draw
        own = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
        drawn = np.random.default_rng(seed % 2**63).permutation(len(task.train))
        order = order_evenly(drawn, strata[drawn])
        for size in check_curve(task, num_sizes):
            part = task
            if size < len(task.train):
                rows = task.train.take(np.sort(order[:size]))
                part = task.with_sides({"train": rows}, f"training on {size} of {len(task.train)} rows")
            made.append((size, draw, make_run(part, own, backbone, store)))
    return made


def read_points(made: Sequence[tuple[int, int, Run]], results: Sequence[Result]) -> list[CurvePoint]:
    """Return the scores of the runs that did not diverge; raise `Diverged` if all did."""
    found = {result.run_id: result for result in results}
    points = []
    for size, draw, run in made:
        result = found[run.id]
        if result.status != "diverged" and result.dev_metric is not None and math.isfinite(result.dev_metric):
            points.append(CurvePoint(size, draw, float(result.dev_metric), run.id))
    if not points:
        raise Diverged(f"all {len(made)} runs diverged", "try a smaller `--lr`")
    return points


def fit_curve(task: Task, points: Sequence[CurvePoint]) -> LearningCurve:
    """Fit the law to the scores of shares, and forecast the score with twice and four times the rows."""
    metric, sizes = METRICS[task.metric], sorted({point.num_rows for point in points})
    plain = LearningCurve(
        task=task.name,
        metric=task.metric,
        higher_is_better=metric.higher_is_better,
        num_train=len(task.train),
        num_dev=len(task.dev),
        points=tuple(points),
        verdict=NOTHING,
        reason="",
        floor=None,
        scale=None,
        exponent=None,
    )
    if len(sizes) < FEWEST_SIZES:
        return dataclasses.replace(plain, reason=f"only {len(sizes)} sizes have a score; it needs {FEWEST_SIZES}")
    rows = np.array([point.num_rows for point in points], dtype=np.float64)
    scores = np.array([point.score for point in points])
    errors = 1 - scores if metric.higher_is_better else scores
    # 1. fit the law, and a thousand laws to bootstrapped errors
    law = _fit(rows, errors[None])
    fitted = _predict(law, rows)[0]
    residuals = (errors - fitted) * math.sqrt(len(rows) / max(1, len(rows) - 3))
    drawn = np.random.default_rng(0).choice(residuals, (_DRAWS, len(rows)))
    laws = _fit(rows, fitted + drawn)
    # 2. forecast the score with more rows
    unit = 1.0 if metric.higher_is_better else max(float(errors[rows == rows.max()].mean()), 1e-12)
    ahead = np.array([len(task.train), *(times * len(task.train) for times in _AHEAD)], dtype=np.float64)
    best, draws = _predict(law, ahead)[0], _predict(laws, ahead)
    gains, spread = best[0] - best, np.quantile(draws[:, :1] - draws, _INTERVAL, axis=0)
    ends = np.quantile(draws, _INTERVAL, axis=0)

    def as_score(error: Any) -> Any:
        return 1 - error if metric.higher_is_better else error

    forecasts = []
    for at in range(1, len(ahead)):
        low, high = sorted(float(as_score(end)) for end in ends[:, at])
        sides = float(gains[at]), float(spread[0, at]), float(spread[1, at])
        forecasts.append(Forecast(int(ahead[at]), float(as_score(best[at])), low, high, *sides))
    verdict, reason = _judge(forecasts[0], unit, errors, rows)
    # 3. the law with its interval, for the picture
    line = np.geomspace(rows.min(), ahead[-1], _BAND)
    edges = np.sort(as_score(np.quantile(_predict(laws, line), _INTERVAL, axis=0)), axis=0)
    band = np.stack([line, edges[0], as_score(_predict(law, line)[0]), edges[1]], axis=1)
    floor, scale, exponent = (float(part[0]) for part in law)
    return dataclasses.replace(
        plain,
        verdict=verdict,
        reason=reason,
        floor=floor,
        scale=scale,
        exponent=exponent,
        forecasts=() if verdict == NOTHING else tuple(forecasts),
        band=tuple((rows, low, middle, high) for rows, low, middle, high in band.tolist()),
    )


def _judge(first: Forecast, unit: float, errors: np.ndarray, rows: np.ndarray) -> tuple[str, str]:
    """Return the verdict on twice the rows, and the reason if there is no forecast."""
    width = max(first.gain_high - first.gain_low, first.high - first.low)
    if width / unit > _TOO_WIDE and first.gain_low / unit < LITTLE:
        spread = np.mean([np.std(errors[rows == size]) for size in np.unique(rows)])
        return NOTHING, f"the scores of one size scatter by {spread:.3f}, too much to see where they go"
    if first.gain_high / unit < LITTLE:
        return HARDLY, ""
    return (HELPS if first.gain_low > 0 and first.gain / unit >= LITTLE else MAY_HELP), ""


Law = tuple[np.ndarray, np.ndarray, np.ndarray]
"""floor, scale and exponent [draws] each"""


def _fit(rows_N: np.ndarray, errors_BN: np.ndarray) -> Law:
    """Fit floor + scale · rows^-exponent to each draw of errors, by least squares."""
    least_B = np.full(len(errors_BN), np.inf)
    found = [np.zeros(len(errors_BN)) for _ in range(3)]
    means_B = errors_BN.mean(1)
    for exponent in _EXPONENTS:
        x_N = rows_N**-exponent
        centred_N = x_N - x_N.mean()
        scale_B = np.maximum(errors_BN @ centred_N / (centred_N @ centred_N), 0)
        floor_B = means_B - scale_B * x_N.mean()
        without_B = np.maximum(errors_BN @ x_N / (x_N @ x_N), 0)  # the scale where the floor would be below zero
        scale_B, floor_B = np.where(floor_B < 0, without_B, scale_B), np.maximum(floor_B, 0)
        lost_B = ((errors_BN - floor_B[:, None] - scale_B[:, None] * x_N) ** 2).sum(1)
        better_B = lost_B < least_B
        least_B = np.minimum(lost_B, least_B)
        for part_B, new in zip(found, (floor_B, scale_B, exponent), strict=True):
            part_B[:] = np.where(better_B, new, part_B)
    return found[0], found[1], found[2]


def _predict(law: Law, rows_N: np.ndarray) -> np.ndarray:
    """Return the errors that laws predict [draws, N]."""
    floor_B, scale_B, exponent_B = law
    return np.asarray(floor_B[:, None] + scale_B[:, None] * rows_N ** -exponent_B[:, None])


def describe_curve(curve: LearningCurve) -> str:
    """Describe the curve's forecast in a sentence."""
    if curve.verdict == NOTHING:
        return f"no forecast: {curve.reason}"
    twice, four = curve.forecasts
    begin = {HELPS: "More rows would help", MAY_HELP: "More rows may help", HARDLY: "More rows would hardly help"}
    return (
        f"{begin[curve.verdict]}: with {twice.num_rows:,} rows, twice as many, dev {curve.metric} is expected at "
        f"{_say(twice)}, with {four.num_rows:,} at {_say(four)}."
    )


def _say(forecast: Forecast) -> str:
    change = "the same as now" if abs(forecast.gain) < 5e-5 else f"{abs(forecast.gain):.4f} better than now"
    return f"{forecast.score:.4f} ({forecast.low:.4f} to {forecast.high:.4f}; {change})"


def check_picture(path: Path) -> None:
    """Refuse a file name that ends neither in .svg nor in .png."""
    if path.suffix.lower() not in _SUFFIXES:
        raise BadConfig(f"`{path}` does not end in .svg or .png", "name the picture .svg or .png")


def draw_learning_curve(curve: LearningCurve, suffix: str = ".svg") -> bytes:
    """Draw a curve as SVG or PNG: the scores by rows, the law with its 90% band, and the forecast."""
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
