"""Figures of score against a setting: the number of samples, the adapters' size, the scale of their initial values.

A line goes from one planned point to the next: where one of them has not been run, it breaks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from inlay.studies.judge.bounds import Estimate
from inlay.studies.judge.rows import METRICS, Scored, mean_tasks, name_column, name_task
from inlay.studies.judge.scores import Row, mean_of
from inlay.studies.judge.series import list_samples, planned_keys
from inlay.studies.report.chart import (
    INK,
    PALE_INK,
    WIDTH,
    Drawing,
    Entry,
    Mark,
    Place,
    draw_series,
    finish,
    legend,
    lone_entries,
    marks_for,
    new_figure,
    paper_style,
    plain,
    tell_lone,
)


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
        labels = {method: plain(scored.label(rows[min(rows)]).partition(",")[0]) for method, rows in series.items()}
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
