"""Figures of score against trained parameters: over all tasks, for each task, and with every method as a named point.

A line connects planned points, with a gap where one was not run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from inlay.studies.judge.bounds import MeanWithError
from inlay.studies.judge.row_specs import name_column, name_task
from inlay.studies.judge.scored_study import (
    ScoredStudy,
    averaged_tasks,
    mean_tasks,
    median_parameters,
    needs_backbone,
    planned_keys,
    series_keys,
)
from inlay.studies.judge.scores import Cell, mean_of
from inlay.studies.report import chart

FULL = "full"
# The series drawn against parameters: kind -> label.
SERIES = {"adapters": "adapters, by size", "top": "top layers, by number", "norms": "layer norms only"}


class Band(NamedTuple):
    """A point of a curve: the difference to full fine-tuning, at three percentiles over tasks."""

    parameters: float
    low: float
    middle: float
    high: float
    num_tasks: int


def _curve_keys(scored: ScoredStudy) -> list[str]:
    return [key for kind in SERIES for key in series_keys(scored, kind)]


def common_tasks(scored: ScoredStudy) -> list[str]:
    """Choose the common tasks of all curves, such that tasks times rows with all of them is largest.

    So a row that lacks many tasks is left out, rather than all those tasks; a task that many rows lack is left out,
    rather than all those rows.
    """
    full, known = scored.rows.get(FULL, {}), averaged_tasks(scored)
    held = [
        frozenset(task for task in known if task in scored.rows[key] and task in full) for key in _curve_keys(scored)
    ]
    choices = sorted({one & other for one in held for other in held}, key=lambda tasks: (len(tasks), sorted(tasks)))
    best = max(choices, key=lambda tasks: (len(tasks) * sum(tasks <= own for own in held), len(tasks)), default=())
    return [task for task in known if task in best]


def percentiles(scored: ScoredStudy, kind: str, tasks: Sequence[str]) -> list[Band | None]:
    """Return the 20th, 50th and 80th percentile over tasks of each planned row's difference to full fine-tuning.

    None for a row that was not run on all of them: a point over fewer tasks would distort the curve.
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
        bands.append(Band(median_parameters(scored, key), low, middle, high, len(gaps)))
    return bands


def draw_percentiles(scored: ScoredStudy) -> chart.Drawing | None:
    """Draw the trade-off over all tasks: a line for the median, a band between the 20th and 80th percentile."""
    tasks = common_tasks(scored)
    curves = {kind: chart.split_runs(percentiles(scored, kind, tasks)) for kind in SERIES}
    if not any(curves.values()):
        return None
    name = scored.study.name
    with chart.paper_style(name):
        figure = chart.new_figure(chart.WIDTH * 0.82, 3.3)
        axes = figure.add_subplot()
        axes.axhline(0, **chart.DASHED, zorder=2)
        marks = chart.marks_for(list(SERIES))
        for kind, parts in curves.items():
            for part in parts:
                _draw_bands(axes, part, marks[kind])
        chart.count_axis(axes)
        axes.set_ylabel("difference to full fine-tuning (points)")
        entries: list[chart.Entry] = [(label, marks[kind], False) for kind, label in SERIES.items() if curves[kind]]
        chart.legend(figure, [*entries, ("full fine-tuning", None, False)])
        names = ", ".join(map(name_task, tasks))
        caption = (
            f"Score against trained parameters over {len(tasks)} task{'s' * (len(tasks) > 1)} ({names}), each less "
            "full fine-tuning on the same task: the median, and the band from the 20th to the 80th percentile."
        )
        # Name the rows and tasks that these curves leave out.
        keys = _curve_keys(scored)
        rows = [chart.plain(scored.label(key)) for key in keys if not all(task in scored.rows[key] for task in tasks)]
        if rows:
            caption += f" Left out, as they were not run on all of these tasks: {', '.join(rows)}."
        others = [task for task in averaged_tasks(scored) if task not in tasks and task in scored.rows[FULL]]
        lacked = [name_task(task) for task in others if any(task in scored.rows[key] for key in keys)]
        if lacked:
            caption += f" Left out, as rows lack them: {', '.join(lacked)}."
        return chart.finish(figure, name, caption)


def _draw_bands(axes: Any, bands: Sequence[Band], mark: chart.Mark) -> None:
    x = [band.parameters for band in bands]
    middle = [band.middle for band in bands]
    if len(bands) == 1:
        reach = [[middle[0] - bands[0].low], [bands[0].high - middle[0]]]
        axes.errorbar(x, middle, yerr=reach, **mark.ours(), linestyle="none", **chart.BARS, zorder=4)
        return
    low, high = [band.low for band in bands], [band.high for band in bands]
    axes.fill_between(x, low, high, color=mark.colour, alpha=0.16, linewidth=0, zorder=2)
    axes.plot(x, middle, **mark.ours(), linewidth=1.6, zorder=4)


def draw_panels(scored: ScoredStudy) -> chart.Drawing | None:
    """Draw a panel for each task: score against trained parameters, ± s.e.m., with full fine-tuning as a line."""
    tasks = [task for task in scored.tasks if sum(task in row for row in scored.rows.values()) > 1]
    if not tasks:
        return None
    is_alone = len(scored.study.report.figures) < 2
    name = scored.study.name if is_alone else f"{scored.study.name}-tasks"
    columns = min(len(tasks), 3)
    lines = -(-len(tasks) // columns)
    with chart.paper_style(name):
        width = chart.WIDTH if columns > 1 else chart.WIDTH * 0.72
        figure = chart.new_figure(width, 0.55 + 2.15 * lines if columns > 1 else 3.2)
        grid = figure.subplots(lines, columns, squeeze=False)
        shown: list[MeanWithError] = []
        has_published = False
        for axes, task in zip(grid.flat, tasks, strict=False):
            has_published |= _draw_panel(axes, scored, task, shown)
        for axes in list(grid.flat)[len(tasks) :]:
            axes.axis("off")
        for axes in grid[:, 0]:
            axes.set_ylabel(f"{scored.split} score (points)")
        for axes in list(grid.flat)[: max(len(tasks) - columns, 0)]:
            axes.set_xlabel("")
        marks = chart.marks_for(list(SERIES))
        entries: list[chart.Entry] = [
            (label, marks[kind], False) for kind, label in SERIES.items() if series_keys(scored, kind)
        ]
        if FULL in scored.rows:
            entries.append(("full fine-tuning ± s.e.m.", None, False))
        chart.legend(figure, entries, shown, hollow="published (another backbone)" if has_published else "")
        caption = "Score against trained parameters, ± one s.e.m. over seeds; the dashed line is full fine-tuning."
        caption += chart.tell_lone(shown)
        if has_published:
            caption += " Hollow: published values, at the parameters of the same method here."
        return chart.finish(figure, name, caption)


def _draw_panel(axes: Any, scored: ScoredStudy, task: str, shown: list[MeanWithError]) -> bool:
    """Draw one task's panel and add its values to `shown`; return whether it has published values."""
    marks = chart.marks_for(list(SERIES))
    published: list[tuple[float, float, chart.Mark]] = []
    full = scored.rows.get(FULL, {}).get(task)
    value = scored.published.value(FULL, scored.column(task))
    if full is not None:
        found = full.estimate
        axes.axhline(found.mean, **chart.DASHED, zorder=2)
        axes.axhspan(
            found.mean - found.margin, found.mean + found.margin, color=chart.INK, alpha=0.08, linewidth=0, zorder=1
        )
        if value is not None:
            published.append((full.trained_parameters, value, chart.Mark(chart.INK, "D")))
    for kind in SERIES:
        keys = planned_keys(scored, kind, task)
        cells: list[Cell | None] = [scored.rows.get(key, {}).get(task) for key in keys]
        places = [None if cell is None else (cell.trained_parameters, cell.estimate) for cell in cells]
        shown += chart.draw_series(axes, places, marks[kind])
        for key, cell in zip(keys, cells, strict=True):
            printed = scored.published.value(key, scored.column(task))
            if cell is not None and printed is not None:
                published.append((cell.trained_parameters, printed, marks[kind]))
    for x, y, mark in published:
        axes.plot(x, y, **mark.theirs(), zorder=5)
    chart.count_axis(axes)
    axes.set_title(name_column(task, scored.metric(task)))
    return bool(published)


MOST_NAMES = 14
"""most points that are labelled by name; more points get numbers, and a list of names beside them"""
# family of methods -> its label, colour and marker
FAMILIES = {
    "adapter": ("adapters and their variants", chart.Mark("#D55E00", "o")),
    "tuned": ("fine-tuning, whole or top", chart.Mark("#0072B2", "s")),
    "small": ("other small parts", chart.Mark("#009E73", "^")),
    "frozen": ("frozen features", chart.Mark("#CC79A7", "P")),
    "baseline": ("no transformer", chart.Mark(chart.PALE_INK, "X")),
}
# family -> its methods; all other methods are variants of adapters
_METHODS = {"tuned": ("full", "top"), "small": ("lora", "ia3", "bitfit", "norms"), "frozen": ("head",)}


def _family(scored: ScoredStudy, key: str) -> str:
    """Return the family of a row, by the method of its runs."""
    if not needs_backbone(scored, key):
        return "baseline"
    spec = next(spec for spec in scored.specs if spec.key == key)
    method = spec.records[0].config.get("method", {}).get("name", "")
    return next((family for family, methods in _METHODS.items() if method in methods), "adapter")


def draw_points(scored: ScoredStudy) -> chart.Drawing | None:
    """Draw every row as a named point: mean score over the tasks that all rows have, against trained parameters."""
    tasks = mean_tasks(scored)
    if not tasks or len(scored.rows) < 2:
        return None
    name = scored.study.name
    with chart.paper_style(name):
        figure = chart.new_figure(chart.WIDTH, 4.1)
        is_crowded = len(scored.rows) > MOST_NAMES
        axes = figure.subplots(1, 2, width_ratios=(2.1, 1))[0] if is_crowded else figure.add_subplot()
        points = []
        families = {key: FAMILIES[_family(scored, key)] for key in scored.rows}
        for key, row in scored.rows.items():
            found = mean_of(row, tasks)
            assert found is not None
            x = statistics.fmean(row[task].trained_parameters for task in tasks)
            chart.error_bar(axes, x, found, families[key][1])
            points.append((x, found, key))
        chart.count_axis(axes)
        axes.margins(x=0.12, y=0.1)
        axes.set_ylabel(f"mean {scored.split} score of {len(tasks)} tasks (points)")
        shown = [found for _, found, _ in points]
        chart.legend(figure, [(label, mark, False) for label, mark in dict.fromkeys(families.values())], shown)
        labels = {key: chart.plain(scored.label(key)) for key in scored.rows}
        if is_crowded:
            colours = {key: mark.colour for key, (_, mark) in families.items()}
            labels = _number(figure.axes[1], sorted(points, key=lambda point: -point[1].mean), labels, colours)
        chart.hold_labels(axes, [(x, found, labels[key]) for x, found, key in points])
        names = ", ".join(name_task(task) for task in tasks)
        caption = f"Mean score on {names} against trained parameters, ± one s.e.m. over seeds."
        return chart.finish(figure, name, caption + chart.tell_lone(shown))


def _number(
    axes: Any, points: Sequence[tuple[float, MeanWithError, str]], names: Mapping[str, str], colours: Mapping[str, str]
) -> dict[str, str]:
    """List the rows in axes of their own, the best first; return each row's number as its label."""
    axes.axis("off")
    style = {"va": "center", "fontsize": 7, "transform": axes.transAxes}
    for place, (_, found, key) in enumerate(points):
        y = 1 - (place + 0.5) / len(points)
        axes.text(0.09, y, str(place + 1), ha="right", color=colours[key], **style)
        axes.text(0.13, y, f"{names[key]}  {found.mean:.1f}", ha="left", **style)
    return {key: str(place + 1) for place, (_, _, key) in enumerate(points)}
