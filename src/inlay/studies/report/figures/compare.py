"""The figures of every study, as a paper would print them: the table FIGURES, and figures that compare rows.

A figure is made of what there is: rows or tasks that were not run are not in it, and one that would show nothing is not
drawn at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from inlay.errors import UnknownName
from inlay.studies.judge.bounds import MeanWithError
from inlay.studies.judge.pairs import pair
from inlay.studies.judge.row_specs import group_tasks, name_column, name_task
from inlay.studies.judge.scored import ScoredStudy, mean_tasks
from inlay.studies.report.chart import (
    INK,
    PALE_INK,
    WIDTH,
    Drawing,
    Entry,
    Mark,
    error_bar,
    finish,
    legend,
    lone_entries,
    marks_for,
    new_figure,
    paper_style,
    plain,
    tell_lone,
)
from inlay.studies.report.figures.curves import draw_init, draw_layers, draw_learning, draw_samples, draw_sizes
from inlay.studies.report.figures.maps import draw_ablation, draw_embeddings, draw_forgetting, draw_growth
from inlay.studies.report.figures.tradeoff import draw_panels, draw_percentiles, draw_points

Maker = Callable[[ScoredStudy], "list[Drawing] | Drawing | None"]


def draw_figures(scored: ScoredStudy) -> list[Drawing]:
    """Draw all figures that a study's file names and its records can fill; by default differences to the reference."""
    kinds = scored.study.report.figures or ("differences",)
    found: list[Drawing] = []
    for kind in dict.fromkeys(kinds):
        if kind not in FIGURES:
            raise UnknownName("kind of figure", kind, FIGURES)
        made = FIGURES[kind](scored)
        found += made if isinstance(made, list) else [made] if made else []
    return found


def draw_differences(scored: ScoredStudy) -> list[Drawing]:
    """Draw for each group of tasks the difference of every row to full fine-tuning; published ones are hollow."""
    groups = group_tasks(scored.tasks)
    name = scored.study.name
    made = [
        _draw_differences(scored.narrowed(tasks), f"{name}-{group}" if len(groups) > 1 else name)
        for group, tasks in groups.items()
    ]
    return [drawing for drawing in made if drawing is not None]


def _draw_differences(scored: ScoredStudy, name: str) -> Drawing | None:
    reference = scored.reference
    keys = [key for key in scored.rows if key != reference]
    if reference is None or not keys:
        return None
    lines = _difference_lines(scored, keys, reference)
    step = 0.11 * len(keys) + 0.14
    with paper_style(name):
        figure = new_figure(WIDTH, 1.0 + step * len(lines))
        axes = figure.add_subplot()
        marks = marks_for(keys)
        limits = _limits(lines)
        hollow = False
        for place, (_, ours, published) in enumerate(lines):
            for number, key in enumerate(keys):
                y = place + 0.72 * ((number + 0.5) / len(keys) - 0.5)
                if key in ours:
                    error_bar(axes, y, ours[key], marks[key], across=True)
                if key in published:
                    hollow = True
                    _draw_published(axes, published[key], y, marks[key], limits)
        axes.axvline(0, color=INK, linestyle=(0, (4, 2)), linewidth=1.1, zorder=2)
        axes.set_xlim(*limits)
        _name_lines(axes, [label for label, _, _ in lines], has_mean=len(lines) > 1)
        axes.set_xlabel(f"difference to {plain(scored.label(reference))} (points)")
        shown = [value for _, ours, _ in lines for value in ours.values()]
        entries: list[Entry] = [(plain(scored.label(key)), marks[key], False) for key in keys]
        entries += lone_entries(shown)
        entries += [("published", Mark(PALE_INK, "o"), True)] if hollow else []
        legend(figure, entries)
        caption = (
            f"Differences to {scored.label(reference)} on each task, paired by seed, ± one s.e.m.; below the line the "
            "mean over tasks." + (" Hollow: the published differences, on another backbone." if hollow else "")
        )
        return finish(figure, name, caption + tell_lone(shown))


_Line = tuple[str, dict[str, MeanWithError], dict[str, float]]


def _difference_lines(scored: ScoredStudy, keys: Sequence[str], reference: str) -> list[_Line]:
    """Return a line for each task and one for the mean: label, our value by row, published value by row."""
    lines: list[_Line] = []
    pairs = {key: pair(scored.rows[key], scored.rows[reference], mean_tasks(scored)) for key in keys}
    for task in scored.tasks:
        ours, published = {}, {}
        column = scored.column(task)
        base = scored.published.value(reference, column)
        for key in keys:
            found = pair(scored.rows[key], scored.rows[reference], [task])
            if found is not None:
                ours[key] = found.estimate
            printed = scored.published.value(key, column)
            if printed is not None and base is not None:
                published[key] = printed - base
        lines.append((name_column(task, scored.metric(task)), ours, published))
    means = {key: found.estimate for key, found in pairs.items() if found is not None}
    if len(mean_tasks(scored)) > 1 and means:
        lines.append((f"mean of {len(mean_tasks(scored))}", means, _published_means(scored, keys, reference)))
    return lines


def _published_means(scored: ScoredStudy, keys: Sequence[str], reference: str) -> dict[str, float]:
    """Return published mean differences to the reference by row, from the first table with all tasks of ours."""
    columns = [scored.column(task) for task in mean_tasks(scored)]
    found: dict[str, float] = {}
    for key in keys:
        for table in scored.published.tables:
            mean, base = table.mean(key, columns), table.mean(reference, columns)
            if mean is not None and base is not None:
                found.setdefault(key, mean - base)
    return found


def _limits(lines: Sequence[_Line]) -> tuple[float, float]:
    """Choose the limits of the axis: all our values with errors, and published values not far outside."""
    ours = [value for _, found, _ in lines for item in found.values() for value in _ends(item)]
    low, high = min([*ours, -1.0]), max([*ours, 1.0])
    reach = max(high - low, 2.0)
    near = [value for _, _, found in lines for value in found.values() if low - reach / 3 <= value <= high + reach / 3]
    low, high = min([low, *near]), max([high, *near])
    return low - 0.06 * (high - low), high + 0.06 * (high - low)


def _ends(item: MeanWithError) -> tuple[float, float]:
    return item.mean - item.margin, item.mean + item.margin


def _draw_published(axes: Any, value: float, y: float, mark: Mark, limits: tuple[float, float]) -> None:
    """Draw a hollow marker; a value outside the axis is drawn at the edge with its number."""
    low, high = limits
    if low <= value <= high:
        axes.plot(value, y, **mark.theirs(), zorder=3)
        return
    is_right = value > high
    edge = high - 0.015 * (high - low) if is_right else low + 0.015 * (high - low)
    axes.plot(edge, y, **{**mark.theirs(), "marker": ">" if is_right else "<"}, zorder=3)
    text = f"{value:+.1f}".replace("-", "−")
    axes.annotate(
        text,
        (edge, y),
        xytext=(-7 if is_right else 7, 0),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="center",
        fontsize=7,
        color=mark.colour,
    )


def _name_lines(axes: Any, labels: Sequence[str], *, has_mean: bool) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    for place in range(1, len(labels)):
        is_mean = has_mean and place == len(labels) - 1 and labels[-1].startswith("mean")
        axes.axhline(place - 0.5, color=PALE_INK if is_mean else "#eef0f2", linewidth=0.9 if is_mean else 0.7, zorder=1)


def draw_less_reference(scored: ScoredStudy) -> Drawing | None:
    """Draw each extension's difference to the plain adapter: the mean with its error, and the tasks as small points."""
    reference = scored.reference
    keys = [key for key in scored.rows if key != reference]
    found = {key: pair(scored.rows[key], scored.rows[reference], mean_tasks(scored)) for key in keys if reference}
    shown = {key: paired for key, paired in found.items() if paired is not None}
    if not shown or reference is None:
        return None
    name = scored.study.name
    with paper_style(name):
        figure = new_figure(WIDTH * 0.9, 0.9 + 0.29 * len(shown))
        axes = figure.add_subplot()
        mark, small = marks_for(["adapters"])["adapters"], dict(zip(scored.tasks, _SMALL * 4, strict=False))
        for place, paired in enumerate(shown.values()):
            for task, item in paired.by_task.items():
                axes.plot(item.mean, place, small[task], color=PALE_INK, markersize=4, alpha=0.75, zorder=3)
            error_bar(axes, place, paired.estimate, mark, across=True)
        axes.axvline(0, color=INK, linestyle=(0, (4, 2)), linewidth=1.1, zorder=2)
        _name_lines(axes, [plain(scored.label(key)) for key in shown], has_mean=False)
        axes.set_xlabel(f"difference to {plain(scored.label(reference))} (points)")
        entries: list[Entry] = [("mean over tasks ± s.e.m.", mark, False)]
        entries += [(name_task(task), Mark(PALE_INK, small[task]), False) for task in mean_tasks(scored)]
        means = [paired.estimate for paired in shown.values()]
        legend(figure, entries + lone_entries(means))
        caption = (
            f"Each row less {scored.label(reference)}, paired by task and seed: mean over tasks ± one s.e.m., and each "
            "task."
        )
        return finish(figure, name, caption + tell_lone(means))


_SMALL = ("v", "s", "^", "D", "P", "X", "<", ">")


def draw_bars(scored: ScoredStudy) -> Drawing | None:
    """Draw bars of each row on each task, with published ones hollow beside them."""
    keys = list(scored.rows)
    if not keys:
        return None
    name = scored.study.name
    marks = marks_for(keys)
    with paper_style(name):
        figure = new_figure(WIDTH * 0.8, 3.0)
        axes = figure.add_subplot()
        width, values, shown = 0.8 / (2 * len(keys)), [], []
        for place, task in enumerate(scored.tasks):
            for number, key in enumerate(keys):
                x = place + (2 * number + 0.5) * width - 0.4
                cell = scored.rows[key].get(task)
                printed = scored.published.value(key, scored.column(task))
                if cell is not None:
                    values.append(cell.estimate.mean)
                    shown.append(cell.estimate)
                    _bar(axes, x, cell.estimate, width, marks[key], is_hollow=False)
                if printed is not None:
                    values.append(printed)
                    _bar(axes, x + width, MeanWithError(printed), width, marks[key], is_hollow=True)
        axes.set_xticks(range(len(scored.tasks)), [name_column(task, scored.metric(task)) for task in scored.tasks])
        axes.grid(visible=False, axis="x")
        axes.tick_params(axis="x", length=0)
        bottom = max(0.0, 5 * ((min(values) - 5) // 5))
        axes.set_ylim(bottom, max(values) + 0.12 * (max(values) - bottom))
        axes.set_ylabel(f"dev score (points,\naxis from {bottom:g})")
        entries: list[Entry] = []
        for key in keys:
            entries.append((plain(scored.label(key)), Mark(marks[key].colour, "s"), False))
            entries.append((f"{plain(scored.label(key))}, published", Mark(marks[key].colour, "s"), True))
        legend(figure, entries + lone_entries(shown, "s"))
        caption = "Ours, ± one s.e.m. over seeds, beside the published scores (hollow; one run each)."
        return finish(figure, name, caption + tell_lone(shown))


def _bar(axes: Any, x: float, value: MeanWithError, width: float, mark: Mark, *, is_hollow: bool) -> None:
    face = "white" if is_hollow else mark.colour if value.sem is not None else mark.pale
    axes.bar(x, value.mean, width * 0.9, facecolor=face, edgecolor=mark.colour, linewidth=1.2, zorder=3)
    if value.sem:
        axes.errorbar(x, value.mean, yerr=value.sem, color=INK, elinewidth=1.1, capsize=3, zorder=4)
    axes.annotate(
        f"{value.mean:.1f}", (x, value.mean + value.margin), xytext=(0, 2), textcoords="offset points", ha="center",
        fontsize=7.5, zorder=5,
    )  # fmt: skip


# kind of figure -> the function that draws it; a study's file names kinds
FIGURES: dict[str, Maker] = {
    "differences": draw_differences,
    "less-reference": draw_less_reference,
    "bars": draw_bars,
    "percentiles": draw_percentiles,
    "panels": draw_panels,
    "points": draw_points,
    "samples": draw_samples,
    "by-size": draw_sizes,
    "by-scale": draw_init,
    "by-layer": draw_layers,
    "spans": draw_ablation,
    "growth": draw_growth,
    "forgetting": draw_forgetting,
    "task-embeddings": draw_embeddings,
    "learning": draw_learning,
}
