"""Figures with a number on the x axis: trained parameters, adapter sizes, the scale of the initial values.

A line goes from one planned point to the next: where one of them has not been run, it breaks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from inlay.research.chart import (
    BARS,
    INK,
    PALE_INK,
    WIDTH,
    Drawing,
    Entry,
    Mark,
    Place,
    count_axis,
    draw_series,
    error_bar,
    finish,
    hold_labels,
    legend,
    lone_entries,
    marks_for,
    new_figure,
    paper_style,
    split_runs,
    tell_lone,
)
from inlay.research.lineup import METRICS, Scored, averaged_tasks, mean_tasks, name_column, name_task, read_way
from inlay.research.scores import Cell, Estimate, Row, mean_of

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
    found = [key for key in scored.rows if (way := read_way(key)) is not None and way.kind == kind]
    return sorted(found, key=lambda key: _parameters(scored, key))


def _parameters(scored: Scored, key: str) -> float:
    return statistics.median(cell.trained_parameters for cell in scored.rows[key].values())


def planned_keys(scored: Scored, kind: str, task: str | None = None) -> list[str]:
    """The rows of a kind by their numbers, those that were planned (on a task) and have not been run too."""
    ways = map(read_way, series_keys(scored, kind))
    numbers = {way.number for way in ways if way is not None and way.number is not None}
    for name, arm in scored.study.arms.items():
        way = read_way(name)
        if way is not None and way.kind == kind and (task is None or task in getattr(arm, "tasks", (task,))):
            sizes = getattr(arm, "axes", {}).get("size", ()) if way.number is None else (way.number,)
            numbers |= {int(size) for size in sizes}
    return [kind] * (kind in scored.rows) + [f"{kind}-{number}" for number in sorted(numbers)]


def common_tasks(scored: Scored) -> list[str]:
    """The tasks that curves over tasks are of, the same for all: those that with the rows that have them show the most.

    A row that lacks many tasks would leave few for all others, so it is left out instead; where many rows lack one
    task, it is the task.
    """
    full, known = scored.rows.get(FULL, {}), averaged_tasks(scored)
    held = [
        frozenset(task for task in known if task in scored.rows[key] and task in full) for key in _curve_keys(scored)
    ]
    choices = sorted({one & other for one in held for other in held}, key=lambda tasks: (len(tasks), sorted(tasks)))
    best = max(choices, key=lambda tasks: (len(tasks) * sum(tasks <= own for own in held), len(tasks)), default=())
    return [task for task in known if task in best]


def _curve_keys(scored: Scored) -> list[str]:
    return [key for kind, _ in SERIES for key in series_keys(scored, kind)]


def percentiles(scored: Scored, kind: str, tasks: Sequence[str]) -> list[Band | None]:
    """For each planned row of a kind the 20th, 50th and 80th percentile over tasks, each less full fine-tuning on it.

    None where it has not been run on all of them: with fewer tasks a point would bend the curve by what it lacks.
    """
    import numpy

    full = scored.rows.get(FULL, {})
    bands: list[Band | None] = []
    for key in planned_keys(scored, kind):
        row = scored.rows.get(key, {})
        if not tasks or not all(task in row and task in full for task in tasks):
            bands.append(None)
            continue
        gaps = [row[task].estimate.mean - full[task].estimate.mean for task in tasks]
        low, middle, high = (float(value) for value in numpy.percentile(gaps, (20, 50, 80)))
        bands.append(Band(_parameters(scored, key), low, middle, high, len(gaps)))
    return bands


def draw_percentiles(scored: Scored) -> Drawing | None:
    """The trade-off over all tasks: a line for the median, a band between the 20th and 80th percentile."""
    tasks = common_tasks(scored)
    curves = {kind: split_runs(percentiles(scored, kind, tasks)) for kind, _ in SERIES}
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
            for part in curves[kind]:
                _draw_bands(axes, part, marks[kind])
            entries += [(label, marks[kind], False)] * bool(curves[kind])
        count_axis(axes)
        axes.set_ylabel("difference to full fine-tuning (points)")
        legend(figure, [*entries, ("full fine-tuning", None, False)])
        names = ", ".join(map(name_task, tasks))
        caption = (
            f"Score against trained parameters over {len(tasks)} task{'s' * (len(tasks) > 1)} ({names}), each less "
            "full fine-tuning on the same task: the median, and the band from the 20th to the 80th percentile."
        )
        return finish(figure, name, caption + _tell_left_out(scored, tasks))


def _tell_left_out(scored: Scored, tasks: Sequence[str]) -> str:
    """Rows and tasks that curves over these tasks are without; begins with a space."""
    keys = _curve_keys(scored)
    rows = [_plain(scored.label(key)) for key in keys if not all(task in scored.rows[key] for task in tasks)]
    others = [task for task in averaged_tasks(scored) if task not in tasks and task in scored.rows[FULL]]
    names = [name_task(task) for task in others if any(task in scored.rows[key] for key in keys)]
    text = f" Left out, as they were not run on all of these tasks: {', '.join(rows)}." if rows else ""
    return text + (f" Left out, as rows lack them: {', '.join(names)}." if names else "")


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
        shown = [cell.estimate for kind, _ in SERIES for task in tasks for cell in _cells(scored, kind, task) if cell]
        legend(figure, [*entries, *line, *lone_entries(shown), *hollow])
        caption = "Score against trained parameters, ± one s.e.m. over seeds; the dashed line is full fine-tuning."
        caption += tell_lone(shown)
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
        cells = _cells(scored, kind, task)
        places = [None if cell is None else (cell.trained_parameters, cell.estimate) for cell in cells]
        draw_series(axes, places, marks[kind])
        for key, cell in zip(planned_keys(scored, kind, task), cells, strict=True):
            printed = scored.published.value(key, scored.column(task))
            if cell is not None and printed is not None:
                published.append((cell.trained_parameters, printed, marks[kind]))
    for x, y, mark in published:
        axes.plot(x, y, **mark.theirs(), zorder=5)
    count_axis(axes)
    axes.set_title(name_column(task, scored.metric(task)))
    return bool(published)


def _cells(scored: Scored, kind: str, task: str) -> list[Cell | None]:
    """Those of the planned rows of a kind, None where one has not been run."""
    return [scored.rows.get(key, {}).get(task) for key in planned_keys(scored, kind, task)]


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
        shown: list[Estimate] = []
        for axes, own in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for method, rows in series.items():
                places = _sample_places(scored, own, method, rows)
                shown += [place[1] for place in places if place]
                draw_series(axes, places, marks[method])
                has_published |= _draw_printed(axes, scored, own, rows, marks[method])
            axes.set_xscale("log")
            numbers = sorted({number for rows in series.values() for number in rows})
            axes.set_xticks(numbers, [f"{number:g}" for number in numbers], fontsize=6.5, rotation=45)
            axes.minorticks_off()
            axes.set_xlabel("samples")
            axes.set_title(name_column(own[0], scored.metric(own[0])) if len(own) == 1 else f"mean of {len(own)} tasks")
        figure.axes[0].set_ylabel(f"{scored.split} score (points)")
        labels = {method: _plain(scored.label(rows[min(rows)]).partition(",")[0]) for method, rows in series.items()}
        entries: list[Entry] = [(labels[method], marks[method], False) for method in series]
        entries += lone_entries(shown)
        legend(figure, entries + [("published (T5-base)", Mark(PALE_INK, "o"), True)] * has_published)
        caption = "Score against the number of training samples, ± one s.e.m. over seeds, which draw the samples."
        caption += tell_lone(shown)
        return finish(figure, name, caption + (" Hollow: published, on T5-base." if has_published else ""))


def _sample_places(scored: Scored, tasks: Sequence[str], method: str, rows: Mapping[int, str]) -> list[Place | None]:
    """A method's points over these tasks, None where one was planned and has not been run."""
    numbers = {number for number, key in rows.items() if set(tasks) <= set(scored.rows[key])}
    for name, arm in scored.study.arms.items():
        own, _, number = name.rpartition("-")
        if own == method and number.isdigit() and set(tasks) <= set(getattr(arm, "tasks", ())):
            numbers.add(int(number))
    found = [(number, mean_of(scored.rows.get(rows.get(number, ""), {}), tasks)) for number in sorted(numbers)]
    return [None if mean is None else (float(number), mean) for number, mean in found]


def _draw_printed(axes: Any, scored: Scored, tasks: Sequence[str], rows: Mapping[int, str], mark: Mark) -> bool:
    """What was published beside a method's line; whether there is any."""
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
        shown = [found for _, found, _ in points]
        entries: list[Entry] = [(_FAMILY_NAMES[item], Mark(*_FAMILY[item]), False) for item in families]
        legend(figure, entries + lone_entries(shown))
        labels = {key: _plain(scored.label(key)) for key in scored.rows}
        if is_crowded:
            labels = _number(figure.axes[1], sorted(points, key=lambda point: -point[1].mean), labels)
        hold_labels(axes, [(x, found, labels[key]) for x, found, key in points])
        names = ", ".join(name_task(task) for task in tasks)
        caption = f"Mean score on {names} against trained parameters, ± one s.e.m. over seeds."
        return finish(figure, name, caption + tell_lone(shown))


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
    keys = [key for key in planned_keys(scored, "adapters") if key != "adapters"]
    tasks = mean_tasks(scored)
    if not tasks or len(set(keys) & set(scored.rows)) < 2:
        return None
    sizes = [int(key.rpartition("-")[2]) for key in keys]
    metric = METRICS.get(scored.metric(tasks[0]), "score")
    with paper_style("sizes"):
        figure = new_figure(WIDTH, 2.9)
        left, right = figure.subplots(1, 2)
        mark = marks_for(["adapters"])["adapters"]
        means = [mean_of(scored.rows.get(key, {}), tasks) for key in keys]
        draw_series(left, [mean and (size, mean) for size, mean in zip(sizes, means, strict=True)], mark)
        shown = [mean for mean in means if mean]
        printed = [(size, scored.published.value(key, "mean:accuracy")) for key, size in zip(keys, sizes, strict=True)]
        known = [(size, value) for size, value in printed if value is not None]
        if known:
            left.plot(*zip(*known, strict=True), **{**mark.theirs(), "linestyle": ":"}, linewidth=1, zorder=4)
        left.set_ylabel(f"mean {metric} of {len(tasks)} tasks")
        colours = marks_for([f"task-{task}" for task in tasks])
        for task, own in zip(tasks, colours.values(), strict=True):
            cells = [scored.rows[key][task].estimate if key in scored.rows else None for key in keys]
            middle = statistics.fmean(cell.mean for cell in cells if cell)
            shown += [cell for cell in cells if cell]
            beside = [cell and cell._replace(mean=cell.mean - middle) for cell in cells]
            draw_series(right, [value and (size, value) for size, value in zip(sizes, beside, strict=True)], own)
        right.axhline(0, color=PALE_INK, linewidth=0.8, zorder=1)
        right.set_ylabel("less the mean over sizes\n(points)")
        for axes in (left, right):
            _size_axis(axes, sizes)
        entries: list[Entry] = [("mean", mark, False)]
        entries += [("mean, published (BERT-large, 8 tasks)", mark, True)] if known else []
        entries += [(name_task(task), own, False) for task, own in zip(tasks, colours.values(), strict=True)]
        legend(figure, entries + lone_entries(shown))
        caption = f"Dev {metric} against adapter size, ± one s.e.m.: the mean over tasks (left) and each task (right)."
        return finish(figure, "sizes", caption + tell_lone(shown))


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
        shown: list[Estimate] = []
        for axes, task in zip(panels, tasks, strict=True):
            found = {float(key.partition("-")[2]): scored.rows[key].get(task) for key in keys}
            places: list[Place | None] = []
            for scale in _planned_scales(scored, found):
                cell = found.get(scale)
                places.append(None if cell is None else (scale, cell.estimate))
            shown += [place[1] for place in places if place]
            draw_series(axes, places, mark)
            _init_axis(axes, name_task(task))
        _draw_majorities(panels, [scored.rows[key] for key in keys], tasks)
        panels[0].set_ylabel("dev accuracy (points)")
        legend(figure, lone_entries(shown))
        caption = (
            "Dev accuracy against the standard deviation of the adapters' initial values, ± one s.e.m.; the panels "
            "span the same number of points. Dotted, if in sight: the majority class. Upright: the paper's 1e-2."
        )
        return finish(figure, "init", caption + tell_lone(shown))


def _planned_scales(scored: Scored, found: Iterable[float]) -> list[float]:
    """The scales of the study's grid and those that were run, which may be written a little apart."""
    scales = {f"{scale:g}": scale for scale in found}
    for arm in scored.study.arms.values():
        for scale in getattr(arm, "axes", {}).get("init_std", ()):
            scales.setdefault(f"{scale:g}", float(scale))
    return sorted(scales.values())


def _init_axis(axes: Any, title: str) -> None:
    axes.axvline(1e-2, color=PALE_INK, linewidth=0.9, zorder=1)
    axes.set_xscale("log")
    axes.set_xlabel("standard deviation of the initial values")
    axes.set_title(title)


def _draw_majorities(panels: Sequence[Any], rows: Sequence[Row], tasks: Sequence[str]) -> None:
    """Give all panels the same height, with room for the highest markers; draw the majority class if it is within."""
    height = max(axes.dataLim.height for axes in panels) or 1.0
    room = 0.07 * height
    height += 2 * room
    for axes, task in zip(panels, tasks, strict=True):
        top = axes.dataLim.y1 + room
        axes.set_ylim(top - height, top)
        majority = next((row[task].majority for row in rows if task in row and row[task].majority is not None), None)
        if majority is not None and majority >= top - height:
            axes.axhline(majority, color=INK, linestyle=":", linewidth=1.1, zorder=1)
