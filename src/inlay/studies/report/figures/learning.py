"""Learning curves of runs of several tasks: dev scores against steps, a panel for each task and one for their mean.

What a step budget cut short is to be seen here: a line that still rises at its end, a task that one method has learnt
and another has not begun to.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from inlay.studies.judge.bounds import MeanWithError, estimate
from inlay.studies.judge.rows import RowSpec, has_joint_runs, name_column
from inlay.studies.judge.scored import ScoredStudy
from inlay.studies.judge.scores import network_of
from inlay.studies.report.chart import (
    WIDTH,
    Drawing,
    Entry,
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

_COLUMNS = 4
_MOST_TICKS = 4
Curve = dict[float, dict[int, float]]
"""step -> seed -> score, in points"""


def draw_learning(scored: ScoredStudy) -> Drawing | None:
    """Dev scores of the chosen settings against steps; of rows whose tasks are one run, which share the axis."""
    specs = [spec for spec in scored.specs if spec.key in scored.rows and has_joint_runs(spec)]
    curves = {spec.key: read_curves(scored, spec) for spec in specs}
    tasks = [task for task in scored.tasks if any(len(own.get(task, ())) > 1 for own in curves.values())]
    if not tasks:
        return None
    panels = [[task] for task in tasks] + [tasks] * (len(tasks) > 1)
    num_lines = -(-len(panels) // _COLUMNS)
    with paper_style("learning"):
        figure = new_figure(WIDTH, 0.7 + 1.75 * num_lines)
        grid = figure.subplots(num_lines, min(_COLUMNS, len(panels)), squeeze=False).flat
        marks = marks_for([spec.key for spec in specs])
        shown: list[MeanWithError] = []
        for own, axes in zip(panels, grid, strict=False):  # in this order: an axes too many is left for below
            for key, found in curves.items():
                places = mean_places(found, own)
                shown += [value for _, value in places]
                draw_series(axes, places, marks[key])
            title = name_column(own[0], scored.metric(own[0])) if len(own) == 1 else f"mean of {len(own)} tasks"
            axes.set_title(title, fontsize=8)
            _step_axis(axes, {step for found in curves.values() for curve in found.values() for step in curve})
        for axes in grid:
            axes.remove()
        for place in range(0, len(panels), _COLUMNS):
            figure.axes[place].set_ylabel("dev score (points)", fontsize=7.5)
        entries: list[Entry] = [(plain(spec.label), marks[spec.key], False) for spec in specs]
        legend(figure, entries + lone_entries(shown))
        caption = "Dev scores against steps of training, at the chosen settings, ± one s.e.m. over seeds."
        return finish(figure, f"{scored.study.name}-learning", caption + tell_lone(shown))


def read_curves(scored: ScoredStudy, spec: RowSpec) -> dict[str, Curve]:
    """Task -> its curve, of the runs whose scores a row's cells hold and where the curve is in the cell's metric."""
    found: dict[str, Curve] = {}
    for record in spec.records:
        cell = scored.rows[spec.key].get(record.task)
        if cell is None or network_of(record) not in cell.networks or record.metric != cell.metric:
            continue
        steps: int = (record.config.get("joint") or {}).get("steps") or 0
        parts: int = record.config.get("train", {}).get("epochs") or 0
        for epoch, value in record.curve if steps and parts else ():
            if value is not None:
                step = min(epoch * -(-steps // parts), steps)  # the last part may be shorter
                found.setdefault(record.task, {}).setdefault(step, {}).setdefault(record.seed, 100 * value)
    return found


def mean_places(curves: dict[str, Curve], tasks: Sequence[str]) -> list[Place]:
    """The mean over tasks at each step that all of them have, over the seeds that all of them have there."""
    if not set(tasks) <= curves.keys():
        return []
    places = []
    for step in sorted(set.intersection(*(set(curves[task]) for task in tasks))):
        parts = [curves[task][step] for task in tasks]
        seeds = sorted(set.intersection(*map(set, parts)))
        if seeds:
            places.append((step, estimate([sum(part[seed] for part in parts) / len(parts) for seed in seeds])))
    return places


def _step_axis(axes: Any, steps: Collection[float]) -> None:
    """From the first step on, with ticks where scores are, every second of them if they are many."""
    axes.set_xlim(0, 1.06 * max(steps))
    ticks = sorted(steps)[:: -(-len(steps) // _MOST_TICKS)]
    axes.set_xticks(ticks, [f"{step / 1000:.3g}k" if step >= 1000 else f"{step:.3g}" for step in ticks])
    axes.tick_params(labelsize=6.5)
    axes.set_xlabel("steps", fontsize=7)
