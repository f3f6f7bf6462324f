"""Figures with a number on the x axis: trained parameters, adapter sizes, the scale of the initial values."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from inlay.research.chart import (
    BARS,
    INK,
    PALE_INK,
    WIDTH,
    Drawing,
    Entry,
    Mark,
    count_axis,
    error_bar,
    finish,
    hold_labels,
    legend,
    marks_for,
    new_figure,
    paper_style,
)
from inlay.research.lineup import METRICS, Scored, mean_tasks, name_column, name_task
from inlay.research.scores import Estimate, Row, mean_of

FULL = "full"
# The series of a figure against parameters: kind, label.
SERIES = (("adapters", "adapters, by size"), ("top", "top layers, by number"), ("norms", "layer norms only"))


class Band(NamedTuple):
    """A point of a curve over tasks: the differences to full fine-tuning at three percentiles."""

    parameters: float
    low: float
    middle: float
    high: float
    num_tasks: int


def series_keys(scored: Scored, kind: str) -> list[str]:
    """The rows of a kind, fewest parameters first."""
    found = [key for key in scored.rows if key == kind or key.rpartition("-")[0] == kind]
    return sorted(found, key=lambda key: _parameters(scored, key))


def _parameters(scored: Scored, key: str) -> float:
    return statistics.median(cell.trained_parameters for cell in scored.rows[key].values())


def percentiles(scored: Scored, kind: str) -> list[Band]:
    """For each row of a kind the 20th, 50th and 80th percentile over tasks of its score less full fine-tuning's.

    Points that have fewer tasks than others of the kind would bend the curve by what they lack: they are left out.
    """
    import numpy

    full = scored.rows.get(FULL, {})
    bands = []
    for key in series_keys(scored, kind):
        row = scored.rows[key]
        gaps = [row[task].estimate.mean - full[task].estimate.mean for task in row if task in full]
        if gaps:
            low, middle, high = (float(value) for value in numpy.percentile(gaps, (20, 50, 80)))
            bands.append(Band(_parameters(scored, key), low, middle, high, len(gaps)))
    most = max((band.num_tasks for band in bands), default=0)
    return [band for band in bands if band.num_tasks == most]


def draw_percentiles(scored: Scored) -> Drawing | None:
    """The trade-off over all tasks: a line for the median, a band between the 20th and 80th percentile."""
    curves = {kind: percentiles(scored, kind) for kind, _ in SERIES}
    if not any(curves.values()):
        return None
    name = "tradeoff"
    with paper_style(name):
        figure = new_figure(WIDTH * 0.82, 3.3)
        axes = figure.add_subplot()
        axes.axhline(0, color=INK, linestyle=(0, (4, 2)), linewidth=1.1, zorder=2)
        marks = marks_for([kind for kind, _ in SERIES])
        entries: list[Entry] = []
        for kind, label in SERIES:
            if curves[kind]:
                _draw_bands(axes, curves[kind], marks[kind])
                entries.append((label, marks[kind], False))
        count_axis(axes)
        axes.set_ylabel("difference to full fine-tuning (points)")
        legend(figure, [*entries, ("full fine-tuning", None, False)])
        tasks = max(band.num_tasks for bands in curves.values() for band in bands)
        caption = (
            f"Score against trained parameters over {tasks} tasks, each less full fine-tuning on the same task: the "
            "median, and the band from the 20th to the 80th percentile."
        )
        return finish(figure, name, caption)


def _draw_bands(axes: Any, bands: Sequence[Band], mark: Mark) -> None:
    x = [band.parameters for band in bands]
    middle = [band.middle for band in bands]
    if len(bands) == 1:
        reach = [[middle[0] - bands[0].low], [bands[0].high - middle[0]]]
        axes.errorbar(x, middle, yerr=reach, **mark.ours(), linestyle="none", **BARS, zorder=4)
        return
    low, high = [band.low for band in bands], [band.high for band in bands]
    axes.fill_between(x, low, high, color=mark.colour, alpha=0.16, linewidth=0, zorder=2)
    axes.plot(x, middle, **mark.ours(), linewidth=1.6, zorder=4)


def draw_panels(scored: Scored) -> Drawing | None:
    """One panel for each task: score against trained parameters, ± s.e.m., full fine-tuning as a line."""
    tasks = [task for task in scored.tasks if sum(task in row for row in scored.rows.values()) > 1]
    if not tasks:
        return None
    name = scored.study.name if scored.study.name == "squad" else f"{scored.study.name}-tasks"
    columns = min(len(tasks), 3)
    lines = -(-len(tasks) // columns)
    with paper_style(name):
        width = WIDTH if columns > 1 else WIDTH * 0.72
        figure = new_figure(width, 0.55 + 2.15 * lines if columns > 1 else 3.2)
        grid = figure.subplots(lines, columns, squeeze=False)
        has_published = False
        for axes, task in zip(grid.flat, tasks, strict=False):
            has_published |= _draw_panel(axes, scored, task)
        for axes in list(grid.flat)[len(tasks) :]:
            axes.axis("off")
        for axes in grid[:, 0]:
            axes.set_ylabel(f"{scored.split} score (points)")
        for axes in list(grid.flat)[: max(len(tasks) - columns, 0)]:
            axes.set_xlabel("")
        marks = marks_for([kind for kind, _ in SERIES])
        entries = [(label, marks[kind], False) for kind, label in SERIES if series_keys(scored, kind)]
        line = [("full fine-tuning ± s.e.m.", None, False)] if FULL in scored.rows else []
        hollow = [("published (another backbone)", Mark(PALE_INK, "o"), True)] if has_published else []
        legend(figure, [*entries, *line, *hollow])
        caption = "Score against trained parameters, ± one s.e.m. over seeds; the dashed line is full fine-tuning."
        if has_published:
            caption += " Hollow: published values, at the parameters of the same method here."
        return finish(figure, name, caption)


def _draw_panel(axes: Any, scored: Scored, task: str) -> bool:
    """Returns whether published values stand in it."""
    marks = marks_for([kind for kind, _ in SERIES])
    published: list[tuple[float, float, Mark]] = []
    full = scored.rows.get(FULL, {}).get(task)
    value = scored.published.value(FULL, scored.column(task))
    if full is not None:
        found = full.estimate
        axes.axhline(found.mean, color=INK, linestyle=(0, (4, 2)), linewidth=1.1, zorder=2)
        axes.axhspan(found.mean - found.margin, found.mean + found.margin, color=INK, alpha=0.08, linewidth=0, zorder=1)
        if value is not None:
            published.append((full.trained_parameters, value, Mark(INK, "D")))
    for kind, _ in SERIES:
        cells = [(key, scored.rows[key][task]) for key in series_keys(scored, kind) if task in scored.rows[key]]
        places = [(cell.trained_parameters, cell.estimate) for _, cell in cells]
        _draw_series(axes, places, marks[kind])
        for key, cell in cells:
            printed = scored.published.value(key, scored.column(task))
            if printed is not None:
                published.append((cell.trained_parameters, printed, marks[kind]))
    for x, y, mark in published:
        axes.plot(x, y, **mark.theirs(), zorder=5)
    count_axis(axes)
    axes.set_title(name_column(task, scored.metric(task)))
    return bool(published)


def _draw_series(axes: Any, places: Sequence[tuple[float, Estimate]], mark: Mark) -> None:
    if len(places) > 1:
        axes.plot([x for x, _ in places], [y.mean for _, y in places], color=mark.colour, linewidth=1.3, zorder=3)
    for x, y in places:
        error_bar(axes, x, y, mark)


def list_samples(scored: Scored) -> dict[str, dict[int, str]]:
    """Method -> number of samples -> its row: of rows called `METHOD-NUMBER`, numbers in order."""
    found: dict[str, dict[int, str]] = {}
    for key in scored.rows:
        method, _, number = key.rpartition("-")
        if method and number.isdigit():
            found.setdefault(method, {})[int(number)] = key
    return {method: dict(sorted(rows.items())) for method, rows in found.items()}


def draw_samples(scored: Scored) -> Drawing | None:
    """Score against the number of samples, a line for each method: a panel for each task, or one for their mean.

    Where every row has all tasks their mean is shown; a row of few-shot transfer has those tasks that have the rows.
    """
    series, tasks = list_samples(scored), mean_tasks(scored)
    if not series or not scored.tasks:
        return None
    panels = [tuple(tasks)] if len(tasks) > 1 and tasks == list(scored.tasks) else [(task,) for task in scored.tasks]
    name = scored.study.name
    with paper_style(name):
        figure = new_figure(WIDTH if len(panels) > 1 else WIDTH * 0.72, 2.9)
        marks, has_published = marks_for(list(series)), False
        for axes, own in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for method, rows in series.items():
                has_published |= _draw_samples(axes, scored, own, rows, marks[method])
            axes.set_xscale("log")
            numbers = sorted({number for rows in series.values() for number in rows})
            axes.set_xticks(numbers, [f"{number:g}" for number in numbers], fontsize=6.5, rotation=45)
            axes.minorticks_off()
            axes.set_xlabel("samples")
            axes.set_title(name_column(own[0], scored.metric(own[0])) if len(own) == 1 else f"mean of {len(own)} tasks")
        figure.axes[0].set_ylabel(f"{scored.split} score (points)")
        labels = {method: _plain(scored.label(rows[min(rows)]).partition(",")[0]) for method, rows in series.items()}
        entries: list[Entry] = [(labels[method], marks[method], False) for method in series]
        legend(figure, entries + [("published (T5-base)", Mark(PALE_INK, "o"), True)] * has_published)
        caption = "Score against the number of training samples, ± one s.e.m. over seeds, which draw the samples."
        return finish(figure, name, caption + (" Hollow: published, on T5-base." if has_published else ""))


def _draw_samples(axes: Any, scored: Scored, tasks: Sequence[str], rows: Mapping[int, str], mark: Mark) -> bool:
    """A method's line over these tasks; whether published values stand beside it."""
    places = [(number, mean_of(scored.rows[key], tasks)) for number, key in rows.items()]
    _draw_series(axes, [(float(number), found) for number, found in places if found is not None], mark)
    printed = [
        (number, scored.published.value(key, scored.column(tasks[0])))
        for number, key in rows.items()
        if len(tasks) == 1
    ]
    known = [(number, value) for number, value in printed if value is not None]
    if known:
        axes.plot(*zip(*known, strict=True), **{**mark.theirs(), "linestyle": (0, (1, 2)), "linewidth": 0.9}, zorder=3)
    return bool(known)


def draw_methods(scored: Scored) -> Drawing | None:
    """Every row as a named point: mean score over the tasks that all have, against trained parameters."""
    tasks = mean_tasks(scored)
    if not tasks or len(scored.rows) < 2:
        return None
    name = scored.study.name
    with paper_style(name):
        figure = new_figure(WIDTH, 4.1)
        is_crowded = len(scored.rows) > MOST_NAMES
        axes = figure.subplots(1, 2, width_ratios=(2.1, 1))[0] if is_crowded else figure.add_subplot()
        points = []
        for key, row in scored.rows.items():
            found = mean_of(row, tasks)
            assert found is not None
            x = statistics.fmean(row[task].trained_parameters for task in tasks)
            error_bar(axes, x, found, Mark(*_FAMILY[_family(key)]))
            points.append((x, found, key))
        count_axis(axes)
        axes.margins(x=0.12, y=0.1)
        axes.set_ylabel(f"mean {scored.split} score of {len(tasks)} tasks (points)")
        families = dict.fromkeys(_family(key) for key in scored.rows)
        legend(figure, [(_FAMILY_NAMES[item], Mark(*_FAMILY[item]), False) for item in families])
        labels = {key: _plain(scored.label(key)) for key in scored.rows}
        if is_crowded:
            labels = _number(figure.axes[1], sorted(points, key=lambda point: -point[1].mean), labels)
        hold_labels(axes, [(x, found, labels[key]) for x, found, key in points])
        names = ", ".join(name_task(task) for task in tasks)
        return finish(figure, name, f"Mean score on {names} against trained parameters, ± one s.e.m. over seeds.")


MOST_NAMES = 14
"""points that have their names beside them; where there are more, numbers and a list"""


def _number(axes: Any, points: Sequence[tuple[float, Estimate, str]], names: Mapping[str, str]) -> dict[str, str]:
    """List the rows, the best first, in axes of their own; returns each row's number as its label."""
    axes.axis("off")
    for place, (_, found, key) in enumerate(points):
        y = 1 - (place + 0.5) / len(points)
        colour = _FAMILY[_family(key)][0]
        axes.text(0.09, y, str(place + 1), ha="right", va="center", fontsize=7, color=colour, transform=axes.transAxes)
        text = f"{names[key]}  {found.mean:.1f}"
        axes.text(0.13, y, text, ha="left", va="center", fontsize=7, transform=axes.transAxes)
    return {key: str(place + 1) for place, (_, _, key) in enumerate(points)}


def _plain(label: str) -> str:
    return label.replace("`", "")


_FAMILY = {
    "adapter": ("#D55E00", "o"),
    "tuned": ("#0072B2", "s"),
    "small": ("#009E73", "^"),
    "features": ("#CC79A7", "P"),
    "baseline": (PALE_INK, "X"),
}
_FAMILY_NAMES = {
    "adapter": "adapters and their variants",
    "tuned": "fine-tuning, whole or top",
    "small": "other small parts",
    "features": "frozen features",
    "baseline": "no transformer",
}
_PREFIXES = {
    "tuned": ("full", "top"),
    "small": ("lora", "ia3", "bitfit", "norms"),
    "features": ("head", "feature"),
    "baseline": ("baseline", "tf"),
}


def _family(key: str) -> str:
    return next((name for name, starts in _PREFIXES.items() if key.startswith(starts)), "adapter")


def draw_sizes(scored: Scored) -> Drawing | None:
    """Adapter sizes: the mean beside the published one, and each task beside its own mean."""
    keys = series_keys(scored, "adapters")
    tasks = mean_tasks(scored)
    if not tasks or len(keys) < 2:
        return None
    sizes = [int(key.rpartition("-")[2]) for key in keys]
    metric = METRICS.get(scored.metric(tasks[0]), "score")
    with paper_style("sizes"):
        figure = new_figure(WIDTH, 2.9)
        left, right = figure.subplots(1, 2)
        mark = marks_for(["adapters"])["adapters"]
        means = [mean_of(scored.rows[key], tasks) for key in keys]
        _draw_series(left, [(size, mean) for size, mean in zip(sizes, means, strict=True) if mean], mark)
        printed = [(size, scored.published.value(key, "mean:accuracy")) for key, size in zip(keys, sizes, strict=True)]
        shown = [(size, value) for size, value in printed if value is not None]
        if shown:
            left.plot(*zip(*shown, strict=True), **{**mark.theirs(), "linestyle": ":"}, linewidth=1, zorder=4)
        left.set_ylabel(f"mean {metric} of {len(tasks)} tasks")
        colours = marks_for([f"task-{task}" for task in tasks])
        for task, own in zip(tasks, colours.values(), strict=True):
            cells = [scored.rows[key][task].estimate for key in keys]
            middle = statistics.fmean(cell.mean for cell in cells)
            _draw_series(right, [(s, Estimate(c.mean - middle, c.sem)) for s, c in zip(sizes, cells, strict=True)], own)
        right.axhline(0, color=PALE_INK, linewidth=0.8, zorder=1)
        right.set_ylabel("less the mean over sizes (points)")
        for axes in (left, right):
            _size_axis(axes, sizes)
        entries: list[Entry] = [("mean", mark, False)]
        entries += [("mean, published (BERT-large, 8 tasks)", mark, True)] if shown else []
        entries += [(name_task(task), own, False) for task, own in zip(tasks, colours.values(), strict=True)]
        legend(figure, entries)
        caption = f"Dev {metric} against adapter size, ± one s.e.m.: the mean over tasks (left) and each task (right)."
        return finish(figure, "sizes", caption)


def _size_axis(axes: Any, sizes: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(sizes)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(size) for size in sizes])
    axes.set_xlabel("adapter size m")
    axes.margins(x=0.1)


def draw_init(scored: Scored) -> Drawing | None:
    """Accuracy against the scale of the initial values, a panel for each task, all of one height in points."""
    keys = [key for key in scored.rows if key.startswith("init-")]
    tasks = [task for task in scored.tasks if sum(task in scored.rows[key] for key in keys) > 1]
    if not tasks:
        return None
    mark = marks_for(["adapters"])["adapters"]
    with paper_style("init"):
        figure = new_figure(WIDTH if len(tasks) > 1 else WIDTH * 0.6, 2.8)
        panels = figure.subplots(1, len(tasks), squeeze=False)[0]
        for axes, task in zip(panels, tasks, strict=True):
            cells = [(float(key.partition("-")[2]), scored.rows[key][task]) for key in keys if task in scored.rows[key]]
            _draw_series(axes, [(scale, cell.estimate) for scale, cell in cells], mark)
            _init_axis(axes, name_task(task))
        _draw_majorities(panels, [scored.rows[key] for key in keys], tasks)
        panels[0].set_ylabel("dev accuracy (points)")
        caption = (
            "Dev accuracy against the standard deviation of the adapters' initial values, ± one s.e.m.; the panels "
            "span the same number of points. Dotted, if in sight: the majority class. Upright: the paper's 1e-2."
        )
        return finish(figure, "init", caption)


def _init_axis(axes: Any, title: str) -> None:
    axes.axvline(1e-2, color=PALE_INK, linewidth=0.9, zorder=1)
    axes.set_xscale("log")
    axes.set_xlabel("standard deviation of the initial values")
    axes.set_title(title)


def _draw_majorities(panels: Sequence[Any], rows: Sequence[Row], tasks: Sequence[str]) -> None:
    """Give all panels the same height, and draw the majority class where it lies within."""
    height = max(axes.get_ylim()[1] - axes.get_ylim()[0] for axes in panels)
    for axes, task in zip(panels, tasks, strict=True):
        top = axes.get_ylim()[1]
        axes.set_ylim(top - height, top)
        majority = next((row[task].majority for row in rows if task in row and row[task].majority is not None), None)
        if majority is not None and majority >= top - height:
            axes.axhline(majority, color=INK, linestyle=":", linewidth=1.1, zorder=1)
