"""Figures of score against a setting (samples, size, scale of initial values, lowest layer) and against steps.

A line connects planned points, with a gap where one was not run. Learning curves show what a budget of steps cut short:
a line that still rises at its end, or a task that was hardly learnt.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from inlay.studies.judge.bounds import MeanWithError, estimate
from inlay.studies.judge.row_differences import pair
from inlay.studies.judge.row_specs import METRICS, RowSpec, has_joint_runs, name_column, name_task
from inlay.studies.judge.scored_study import ScoredStudy, list_series, mean_tasks, planned_numbers
from inlay.studies.judge.scores import mean_of, network_of
from inlay.studies.report import chart


def _first_series(scored: ScoredStudy) -> tuple[str, dict[float, str]]:
    """Return the first series of a study with its rows by number; empty if there is none."""
    return next(iter(list_series(scored).items()), ("", {}))


def _places(
    scored: ScoredStudy, tasks: Sequence[str], series: str, reference: str | None = None
) -> list[chart.Place | None]:
    """Return a series' points over these tasks, less the reference if given; None for planned rows without runs."""
    places: list[chart.Place | None] = []
    for number, key in planned_numbers(scored, series, tasks).items():
        row = scored.rows.get(key, {})
        if reference is None:
            value = mean_of(row, tasks)
        elif key != reference:
            difference = pair(row, scored.rows[reference], tasks)
            value = difference.estimate if difference else None
        else:
            continue
        places.append(None if value is None else (float(number), value))
    return places


def draw_samples(scored: ScoredStudy) -> chart.Drawing | None:
    """Draw score against number of samples, a line per method: one panel for the mean if every row has all tasks.

    Otherwise each task has a panel: in few-shot transfer, small tasks lack the larger numbers of samples.
    """
    series, tasks = list_series(scored), mean_tasks(scored)
    if not series or not scored.tasks:
        return None
    panels = [tuple(tasks)] if len(tasks) > 1 and tasks == list(scored.tasks) else [(task,) for task in scored.tasks]
    name = scored.study.name
    with chart.paper_style(name):
        figure = chart.new_figure(chart.WIDTH if len(panels) > 1 else chart.WIDTH * 0.72, 2.9)
        marks, has_published = chart.marks_for(list(series)), False
        shown: list[MeanWithError] = []
        for axes, own in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for method, rows in series.items():
                shown += chart.draw_series(axes, _places(scored, own, method), marks[method])
                if len(own) == 1:
                    line = {"linestyle": (0, (1, 2)), "linewidth": 0.9, "zorder": 3}
                    column = scored.column(own[0])
                    has_published |= _draw_printed(axes, scored, rows, column, {**marks[method].theirs(), **line})
            axes.set_xscale("log")
            numbers = sorted({number for rows in series.values() for number in rows})
            axes.set_xticks(numbers, [f"{number:g}" for number in numbers], fontsize=6.5, rotation=45)
            axes.minorticks_off()
            axes.set_xlabel("samples")
            axes.set_title(name_column(own[0], scored.metric(own[0])) if len(own) == 1 else f"mean of {len(own)} tasks")
        figure.axes[0].set_ylabel(f"{scored.split} score (points)")
        labels = {
            method: chart.plain(scored.label(rows[min(rows)]).partition(",")[0]) for method, rows in series.items()
        }
        entries: list[chart.Entry] = [(labels[method], marks[method], False) for method in series]
        chart.legend(figure, entries, shown, hollow="published (T5-base)" if has_published else "")
        caption = "Score against the number of training samples, ± one s.e.m. over seeds, which draw the samples."
        caption += chart.tell_lone(shown)
        return chart.finish(figure, name, caption + (" Hollow: published, on T5-base." if has_published else ""))


def _draw_printed(
    axes: Any, scored: ScoredStudy, rows: Mapping[float, str], column: str, style: Mapping[str, Any]
) -> bool:
    """Draw the published values beside a line; return whether there are any."""
    printed = [(number, scored.published.value(key, column)) for number, key in rows.items()]
    known = [(number, value) for number, value in printed if value is not None]
    if known:
        axes.plot(*zip(*known, strict=True), **style)
    return bool(known)


def draw_sizes(scored: ScoredStudy) -> chart.Drawing | None:
    """Draw scores against adapter sizes: on the left the mean and the published mean, on the right each task."""
    from matplotlib.ticker import FixedLocator, NullLocator

    rows = planned_numbers(scored, "adapters")
    tasks = mean_tasks(scored)
    if not tasks or len(set(rows.values()) & set(scored.rows)) < 2:
        return None
    metric = METRICS.get(scored.metric(tasks[0]), "score")
    name = scored.study.name
    with chart.paper_style(name):
        figure = chart.new_figure(chart.WIDTH, 2.9)
        left, right = figure.subplots(1, 2)
        mark = chart.marks_for(["adapters"])["adapters"]
        means = [mean_of(scored.rows.get(key, {}), tasks) for key in rows.values()]
        shown = chart.draw_series(left, [mean and (size, mean) for size, mean in zip(rows, means, strict=True)], mark)
        line = {"linestyle": ":", "linewidth": 1, "zorder": 4}
        has_published = _draw_printed(left, scored, rows, "mean:accuracy", {**mark.theirs(), **line})
        left.set_ylabel(f"mean {metric} of {len(tasks)} tasks")
        marks = chart.task_marks(tasks)
        for task in tasks:
            cells = [scored.rows[key][task].estimate if key in scored.rows else None for key in rows.values()]
            middle = statistics.fmean(cell.mean for cell in cells if cell)
            beside = [cell and cell._replace(mean=cell.mean - middle) for cell in cells]
            places = [value and (size, value) for size, value in zip(rows, beside, strict=True)]
            shown += chart.draw_series(right, places, marks[task])
        right.axhline(0, color=chart.PALE_INK, linewidth=0.8, zorder=1)
        right.set_ylabel("less the mean over sizes\n(points)")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(list(rows)))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xticklabels([str(int(size)) for size in rows])
            axes.set_xlabel("adapter size m")
            axes.margins(x=0.1)
        entries: list[chart.Entry] = [("mean", mark, False)]
        if has_published:
            entries.append(("mean, published (BERT-large, 8 tasks)", mark, True))
        entries += [(name_task(task), own, False) for task, own in marks.items()]
        chart.legend(figure, entries, shown)
        caption = f"Dev {metric} against adapter size, ± one s.e.m.: the mean over tasks (left) and each task (right)."
        return chart.finish(figure, name, caption + chart.tell_lone(shown))


def draw_init(scored: ScoredStudy) -> chart.Drawing | None:
    """Draw accuracy against the initial scale, a panel per task; all panels span the same number of points."""
    series, rows = _first_series(scored)
    cells = [scored.rows[key] for key in rows.values()]
    tasks = [task for task in scored.tasks if sum(task in row for row in cells) > 1]
    if not tasks:
        return None
    mark = chart.marks_for(["adapters"])["adapters"]
    name = scored.study.name
    with chart.paper_style(name):
        figure = chart.new_figure(chart.WIDTH if len(tasks) > 1 else chart.WIDTH * 0.6, 2.8)
        panels = figure.subplots(1, len(tasks), squeeze=False)[0]
        shown: list[MeanWithError] = []
        for axes, task in zip(panels, tasks, strict=True):
            shown += chart.draw_series(axes, _places(scored, [task], series), mark)
            axes.axvline(1e-2, color=chart.PALE_INK, linewidth=0.9, zorder=1)
            axes.set_xscale("log")
            axes.set_xlabel("standard deviation of the initial values")
            axes.set_title(name_task(task))
        # All panels have the same height, with room for the highest markers; the majority class is drawn if it fits.
        height = max(axes.dataLim.height for axes in panels) or 1.0
        room = 0.07 * height
        height += 2 * room
        for axes, task in zip(panels, tasks, strict=True):
            top = axes.dataLim.y1 + room
            axes.set_ylim(top - height, top)
            found = [row[task].majority for row in cells if task in row]
            majority = next((value for value in found if value is not None), None)
            if majority is not None and majority >= top - height:
                axes.axhline(majority, color=chart.INK, linestyle=":", linewidth=1.1, zorder=1)
        panels[0].set_ylabel("dev accuracy (points)")
        chart.legend(figure, [], shown)
        caption = (
            "Dev accuracy against the standard deviation of the adapters' initial values, ± one s.e.m.; the panels "
            "span the same number of points. Dotted, if in sight: the majority class. Upright: the paper's 1e-2."
        )
        return chart.finish(figure, name, caption + chart.tell_lone(shown))


def draw_layers(scored: ScoredStudy) -> chart.Drawing | None:
    """Draw each task's difference to adapters in all layers, and the mean, against the lowest adapted layer."""
    series, rows = _first_series(scored)
    tasks, reference = mean_tasks(scored), scored.reference
    if not tasks or reference is None or len(rows) < 2:
        return None
    name = scored.study.name
    with chart.paper_style(name):
        figure = chart.new_figure(chart.WIDTH * 0.82, 3.3)
        axes = figure.add_subplot()
        axes.axhline(0, **chart.DASHED, zorder=2)
        lines = [(name_task(task), [task], mark) for task, mark in chart.task_marks(tasks).items()]
        if len(tasks) > 1:
            lines.append((f"mean of {len(tasks)}", tasks, chart.marks_for(["adapters"])["adapters"]))
        shown: list[MeanWithError] = []
        for _, own, mark in lines:
            shown += chart.draw_series(axes, _places(scored, own, series, reference), mark)
        axes.set_xticks([int(number) for number in planned_numbers(scored, series)])
        axes.set_xlabel("lowest layer with adapters")
        axes.set_ylabel(f"{scored.split} score less that of\n{chart.plain(scored.label(reference))} (points)")
        chart.legend(figure, [(label, mark, False) for label, _, mark in lines], shown)
        caption = (
            f"Score against the lowest layer that has adapters, less that of {scored.label(reference)}, paired by "
            "seed, ± one s.e.m.: each task, and their mean."
        )
        return chart.finish(figure, name, caption + chart.tell_lone(shown))


# Score against steps

_COLUMNS, _MOST_TICKS = 4, 4
Curve = dict[float, dict[int, float]]
"""step -> seed -> score, in points"""


def draw_learning(scored: ScoredStudy) -> chart.Drawing | None:
    """Draw dev scores at the chosen settings against steps, for rows whose tasks are one run."""
    specs = [spec for spec in scored.specs if spec.key in scored.rows and has_joint_runs(spec)]
    curves = {spec.key: _read_curves(scored, spec) for spec in specs}
    tasks = [task for task in scored.tasks if any(len(own.get(task, ())) > 1 for own in curves.values())]
    if not tasks:
        return None
    panels = [[task] for task in tasks]
    if len(tasks) > 1:
        panels.append(tasks)
    num_lines = -(-len(panels) // _COLUMNS)
    # The axis begins at 0 and has ticks at scored steps, at some of them if there are many.
    steps = sorted({step for found in curves.values() for curve in found.values() for step in curve})
    ticks = steps[:: -(-len(steps) // _MOST_TICKS)]
    with chart.paper_style("learning"):
        figure = chart.new_figure(chart.WIDTH, 0.7 + 1.75 * num_lines)
        grid = figure.subplots(num_lines, min(_COLUMNS, len(panels)), squeeze=False).flat
        marks = chart.marks_for([spec.key for spec in specs])
        shown: list[MeanWithError] = []
        for own, axes in zip(panels, grid, strict=False):  # panels first, so that `grid` keeps the unused axes
            for key, found in curves.items():
                shown += chart.draw_series(axes, _mean_places(found, own), marks[key])
            title = name_column(own[0], scored.metric(own[0])) if len(own) == 1 else f"mean of {len(own)} tasks"
            axes.set_title(title, fontsize=8)
            axes.set_xlim(0, 1.06 * max(steps))
            axes.set_xticks(ticks, [f"{step / 1000:.3g}k" if step >= 1000 else f"{step:.3g}" for step in ticks])
            axes.tick_params(labelsize=6.5)
            axes.set_xlabel("steps", fontsize=7)
        for axes in grid:
            axes.remove()
        for place in range(0, len(panels), _COLUMNS):
            figure.axes[place].set_ylabel("dev score (points)", fontsize=7.5)
        chart.legend(figure, [(chart.plain(spec.label), marks[spec.key], False) for spec in specs], shown)
        caption = "Dev scores against steps of training, at the chosen settings, ± one s.e.m. over seeds."
        return chart.finish(figure, f"{scored.study.name}-learning", caption + chart.tell_lone(shown))


def _read_curves(scored: ScoredStudy, spec: RowSpec) -> dict[str, Curve]:
    """Read each task's curve from the runs of the row's cells, if it has the cell's metric."""
    found: dict[str, Curve] = {}
    for record in spec.records:
        cell = scored.rows[spec.key].get(record.task)
        if cell is None or network_of(record) not in cell.networks or record.metric != cell.metric:
            continue
        steps: int = (record.config.get("joint") or {}).get("steps") or 0
        epochs: int = record.config.get("train", {}).get("epochs") or 0
        for epoch, value in record.curve if steps and epochs else ():
            if value is not None:
                step = min(epoch * -(-steps // epochs), steps)  # the last epoch may be shorter
                found.setdefault(record.task, {}).setdefault(step, {}).setdefault(record.seed, 100 * value)
    return found


def _mean_places(curves: dict[str, Curve], tasks: Sequence[str]) -> list[chart.Place]:
    """Return the mean over tasks at each step, over the steps and seeds that all tasks have."""
    if not set(tasks) <= curves.keys():
        return []
    places = []
    for step in sorted(set.intersection(*(set(curves[task]) for task in tasks))):
        parts = [curves[task][step] for task in tasks]
        seeds = sorted(set.intersection(*map(set, parts)))
        if seeds:
            places.append((step, estimate([sum(part[seed] for part in parts) / len(parts) for seed in seeds])))
    return places
