"""The figures of studies, as a paper would print them: the table FIGURES, and all figures that are not curves.

Rows or tasks that were not run are left out of a figure, and a figure that would show nothing is not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from inlay.errors import UnknownName
from inlay.studies.judge.bounds import MeanWithError
from inlay.studies.judge.extra_data import Ablation, read_ablations, read_embeddings, read_steps
from inlay.studies.judge.row_differences import pair
from inlay.studies.judge.row_specs import group_tasks, name_column, name_task
from inlay.studies.judge.scored_study import ScoredStudy, mean_tasks, needs_backbone
from inlay.studies.report import chart
from inlay.studies.report.curves import draw_init, draw_layers, draw_learning, draw_samples, draw_sizes
from inlay.studies.report.tradeoff import draw_panels, draw_percentiles, draw_points


def draw_figures(scored: ScoredStudy) -> list[chart.Drawing]:
    """Draw the figures that a study's file names and its records can fill; by default differences to the reference."""
    kinds = scored.study.report.figures or ("differences",)
    found: list[chart.Drawing] = []
    for kind in dict.fromkeys(kinds):
        if kind not in FIGURES:
            raise UnknownName("kind of figure", kind, FIGURES)
        made = FIGURES[kind](scored)
        if isinstance(made, list):
            found += made
        elif made is not None:
            found.append(made)
    return found


# Rows compared


def draw_differences(scored: ScoredStudy) -> list[chart.Drawing]:
    """Draw for each group of tasks the difference of every row to full fine-tuning; published ones are hollow."""
    drawings = []
    groups = group_tasks(scored.tasks)
    for group, tasks in groups.items():
        name = f"{scored.study.name}-{group}" if len(groups) > 1 else scored.study.name
        drawing = _draw_differences(scored.narrowed(tasks), name)
        if drawing is not None:
            drawings.append(drawing)
    return drawings


def _draw_differences(scored: ScoredStudy, name: str) -> chart.Drawing | None:
    reference = scored.reference
    keys = [key for key in scored.rows if key != reference]
    if reference is None or not keys:
        return None
    lines = difference_lines(scored, keys, reference)
    step = 0.11 * len(keys) + 0.14
    with chart.paper_style(name):
        figure = chart.new_figure(chart.WIDTH, 1.0 + step * len(lines))
        axes = figure.add_subplot()
        marks = chart.marks_for(keys)
        limits = _limits(lines)
        for place, (_, ours, published) in enumerate(lines):
            for number, key in enumerate(keys):
                y = place + 0.72 * ((number + 0.5) / len(keys) - 0.5)
                if key in ours:
                    chart.error_bar(axes, y, ours[key], marks[key], across=True)
                if key in published:
                    _draw_published(axes, published[key], y, marks[key], limits)
        axes.axvline(0, **chart.DASHED, zorder=2)
        axes.set_xlim(*limits)
        _name_lines(axes, [label for label, _, _ in lines], has_mean=len(lines) > 1)
        axes.set_xlabel(f"difference to {chart.plain(scored.label(reference))} (points)")
        shown = [value for _, ours, _ in lines for value in ours.values()]
        has_published = any(published for _, _, published in lines)
        entries: list[chart.Entry] = [(chart.plain(scored.label(key)), marks[key], False) for key in keys]
        chart.legend(figure, entries, shown, hollow="published" if has_published else "")
        caption = (
            f"Differences to {scored.label(reference)} on each task, paired by seed, ± one s.e.m.; below the line the "
            "mean over tasks." + (" Hollow: the published differences, on another backbone." if has_published else "")
        )
        return chart.finish(figure, name, caption + chart.tell_lone(shown))


DifferenceLine = tuple[str, dict[str, MeanWithError], dict[str, float]]
"""label, our value by row, published value by row"""


def difference_lines(scored: ScoredStudy, keys: Sequence[str], reference: str) -> list[DifferenceLine]:
    """Return a line for each task and one for the mean."""
    # 1. a line for each task
    rows, printed = scored.rows, scored.published
    lines: list[DifferenceLine] = []
    for task in scored.tasks:
        column = scored.column(task)
        gaps = {key: pair(rows[key], rows[reference], [task]) for key in keys}
        ours = {key: gap.estimate for key, gap in gaps.items() if gap is not None}
        base = printed.value(reference, column)
        values = {key: printed.value(key, column) for key in keys if base is not None}
        published = {key: value - (base or 0.0) for key, value in values.items() if value is not None}
        lines.append((name_column(task, scored.metric(task)), ours, published))
    # 2. the mean; the published one is from the first table with all our tasks
    tasks = mean_tasks(scored)
    gaps = {key: pair(rows[key], rows[reference], tasks) for key in keys}
    means = {key: gap.estimate for key, gap in gaps.items() if gap is not None}
    if len(tasks) > 1 and means:
        columns = [scored.column(task) for task in tasks]
        published = {}
        for key in keys:
            found = [(table.mean(key, columns), table.mean(reference, columns)) for table in printed.tables]
            both = [mean - base for mean, base in found if mean is not None and base is not None]
            published |= {key: both[0]} if both else {}
        lines.append((f"mean of {len(tasks)}", means, published))
    return lines


def _limits(lines: Sequence[DifferenceLine]) -> tuple[float, float]:
    """Choose the limits of the axis: all our values with their errors, and published values not far outside."""
    values = [item for _, found, _ in lines for item in found.values()]
    low = min([*(item.mean - item.margin for item in values), -1.0])
    high = max([*(item.mean + item.margin for item in values), 1.0])
    reach = max(high - low, 2.0)
    near = [value for _, _, found in lines for value in found.values() if low - reach / 3 <= value <= high + reach / 3]
    low, high = min([low, *near]), max([high, *near])
    return low - 0.06 * (high - low), high + 0.06 * (high - low)


def _draw_published(axes: Any, value: float, y: float, mark: chart.Mark, limits: tuple[float, float]) -> None:
    """Draw a hollow marker; a value outside the axis is drawn at the edge with its number."""
    low, high = limits
    if low <= value <= high:
        axes.plot(value, y, **mark.theirs(), zorder=3)
        return
    is_right = value > high
    edge = high - 0.015 * (high - low) if is_right else low + 0.015 * (high - low)
    axes.plot(edge, y, **{**mark.theirs(), "marker": ">" if is_right else "<"}, zorder=3)
    across = {"xytext": (-7, 0), "ha": "right"} if is_right else {"xytext": (7, 0), "ha": "left"}
    text = f"{value:+.1f}".replace("-", "−")
    axes.annotate(text, (edge, y), **across, textcoords="offset points", va="center", fontsize=7, color=mark.colour)


def _name_lines(axes: Any, labels: Sequence[str], *, has_mean: bool) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    for place in range(1, len(labels)):
        is_mean = has_mean and place == len(labels) - 1 and labels[-1].startswith("mean")
        axes.axhline(
            place - 0.5, color=chart.PALE_INK if is_mean else "#eef0f2", linewidth=0.9 if is_mean else 0.7, zorder=1
        )


_SMALL = ("v", "s", "^", "D", "P", "X", "<", ">")


def draw_less_reference(scored: ScoredStudy) -> chart.Drawing | None:
    """Draw each extension's difference to the plain adapter: the mean with its error, and the tasks as small points."""
    reference = scored.reference
    keys = [key for key in scored.rows if key != reference]
    found = {key: pair(scored.rows[key], scored.rows[reference], mean_tasks(scored)) for key in keys if reference}
    shown = {key: paired for key, paired in found.items() if paired is not None}
    if not shown or reference is None:
        return None
    name = scored.study.name
    with chart.paper_style(name):
        figure = chart.new_figure(chart.WIDTH * 0.9, 0.9 + 0.29 * len(shown))
        axes = figure.add_subplot()
        mark, small = chart.marks_for(["adapters"])["adapters"], dict(zip(scored.tasks, _SMALL * 4, strict=False))
        for place, paired in enumerate(shown.values()):
            for task, item in paired.by_task.items():
                axes.plot(item.mean, place, small[task], color=chart.PALE_INK, markersize=4, alpha=0.75, zorder=3)
            chart.error_bar(axes, place, paired.estimate, mark, across=True)
        axes.axvline(0, **chart.DASHED, zorder=2)
        _name_lines(axes, [chart.plain(scored.label(key)) for key in shown], has_mean=False)
        axes.set_xlabel(f"difference to {chart.plain(scored.label(reference))} (points)")
        entries: list[chart.Entry] = [("mean over tasks ± s.e.m.", mark, False)]
        entries += [(name_task(task), chart.Mark(chart.PALE_INK, small[task]), False) for task in mean_tasks(scored)]
        means = [paired.estimate for paired in shown.values()]
        chart.legend(figure, entries, means)
        caption = (
            f"Each row less {scored.label(reference)}, paired by task and seed: mean over tasks ± one s.e.m., and each "
            "task."
        )
        return chart.finish(figure, name, caption + chart.tell_lone(means))


def draw_bars(scored: ScoredStudy) -> chart.Drawing | None:
    """Draw a bar for each row on each task, with the published value as a hollow bar beside it."""
    if not scored.rows:
        return None
    name = scored.study.name
    marks = chart.marks_for(list(scored.rows))
    with chart.paper_style(name):
        figure = chart.new_figure(chart.WIDTH * 0.8, 3.0)
        axes = figure.add_subplot()
        width, values, shown = 0.8 / (2 * len(marks)), [], []
        for place, task in enumerate(scored.tasks):
            for number, (key, mark) in enumerate(marks.items()):
                x = place + (2 * number + 0.5) * width - 0.4
                cell = scored.rows[key].get(task)
                printed = scored.published.value(key, scored.column(task))
                if cell is not None:
                    values.append(cell.estimate.mean)
                    shown.append(cell.estimate)
                    face = mark.pale if cell.estimate.sem is None else mark.colour
                    _draw_bar(axes, x, cell.estimate, width, mark, face)
                if printed is not None:
                    values.append(printed)
                    _draw_bar(axes, x + width, MeanWithError(printed), width, mark, "white")
        axes.set_xticks(range(len(scored.tasks)), [name_column(task, scored.metric(task)) for task in scored.tasks])
        axes.grid(visible=False, axis="x")
        axes.tick_params(axis="x", length=0)
        bottom = max(0.0, 5 * ((min(values) - 5) // 5))
        axes.set_ylim(bottom, max(values) + 0.12 * (max(values) - bottom))
        axes.set_ylabel(f"dev score (points,\naxis from {bottom:g})")
        entries: list[chart.Entry] = []
        for key, mark in marks.items():
            entries.append((chart.plain(scored.label(key)), chart.Mark(mark.colour, "s"), False))
            entries.append((f"{chart.plain(scored.label(key))}, published", chart.Mark(mark.colour, "s"), True))
        chart.legend(figure, entries, shown, shape="s")
        caption = "Ours, ± one s.e.m. over seeds, beside the published scores (hollow; one run each)."
        return chart.finish(figure, name, caption + chart.tell_lone(shown))


def _draw_bar(axes: Any, x: float, value: MeanWithError, width: float, mark: chart.Mark, face: Any) -> None:
    axes.bar(x, value.mean, width * 0.9, facecolor=face, edgecolor=mark.colour, linewidth=1.2, zorder=3)
    if value.sem:
        axes.errorbar(x, value.mean, yerr=value.sem, color=chart.INK, elinewidth=1.1, capsize=3, zorder=4)
    text, spot = f"{value.mean:.1f}", (x, value.mean + value.margin)
    axes.annotate(text, spot, xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7.5, zorder=5)


# Figures of the extra data of records


def draw_ablation(scored: ScoredStudy) -> chart.Drawing | None:
    """Draw the heat-map of spans: y is the first, x the last removed layer, colour the relative loss of accuracy."""
    ablations = [item for item in read_ablations(scored.records, scored.study.tasks) if item.spans]
    if not ablations:
        return None
    name = scored.study.name
    with chart.paper_style(name):
        figure = chart.new_figure(chart.WIDTH if len(ablations) > 1 else chart.WIDTH * 0.6, 3.3)
        panels = figure.subplots(1, len(ablations), squeeze=False)[0]
        # One scale for all panels, so that colours can be compared.
        most = max(item.relative(*span) for item in ablations for span in item.spans)
        for axes, item in zip(panels, ablations, strict=True):
            image = draw_spans(axes, item, most)
        bar = figure.colorbar(image, ax=list(panels), shrink=0.85, aspect=25, pad=0.02)
        bar.set_label("relative decrease in dev accuracy (%)")
        bar.outline.set_visible(False)
        caption = (
            "Relative decrease in dev accuracy (%) when the trained adapters of layers y to x are removed, without "
            "retraining. The diagonal: single layers; the top right corner: all adapters removed."
        )
        return chart.finish(figure, name, caption)


def draw_spans(axes: Any, item: Ablation, most: float) -> Any:
    """Draw one task's heat-map, coloured up to `most` percent; returns the image."""
    import numpy

    size = item.num_layers
    values = numpy.full((size, size), numpy.nan)
    for first, last in item.spans:
        values[first, last] = item.relative(first, last)
    image = axes.imshow(values, cmap="viridis_r", vmin=0, vmax=max(most, 1.0))
    for first, last in item.spans if size <= 12 else ():
        value = values[first, last]
        shade = "white" if value > 0.45 * most else chart.INK
        text = f"{value:.0f}" if abs(value) >= 9.95 else f"{value:.1f}".replace("-0.0", "0.0").replace("-", "−")
        axes.text(last, first, text, ha="center", va="center", fontsize=5.2, color=shade)
    axes.grid(visible=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_xticks(range(size), range(size), fontsize=7)
    axes.set_yticks(range(size), range(size), fontsize=7)
    axes.tick_params(length=0)
    axes.set_xlabel("last ablated layer")
    axes.set_ylabel("first ablated layer")
    axes.set_title(name_task(item.task))
    return image


def draw_embeddings(scored: ScoredStudy) -> chart.Drawing | None:
    """Draw the embeddings of tasks along their two main directions, a panel per seed; below, what training added."""
    found = read_embeddings(scored)
    if not found:
        return None
    name, has_starts = scored.study.name, all(item.starts is not None for item in found.values())
    with chart.paper_style(name):
        height = chart.WIDTH / max(len(found), 2)
        figure = chart.new_figure(chart.WIDTH, 0.6 + height * (1 + has_starts))
        panels = figure.subplots(1 + has_starts, len(found), squeeze=False)
        for column, (seed, item) in enumerate(found.items()):
            _draw_points(panels[0, column], item.tasks, item.vectors, f"seed {seed}")
            if has_starts:
                moved = f"moved by {100 * (item.movement or 0.0):.0f}%"
                _draw_points(panels[1, column], item.tasks, item.vectors - item.starts, moved)
        caption = (
            "The learnt embeddings of tasks along their two main directions (principal components), for each seed, and "
            "the share of their spread that is seen."
        )
        if has_starts:
            caption += (
                " Below: the same of what training added to the draw by chance that each began with, and how far it "
                "moved them, as a share of the draw's length. While that is little, the panels above show the draw."
            )
        return chart.finish(figure, name, caption)


def _draw_points(axes: Any, tasks: Sequence[str], vectors: Any, title: str) -> None:
    """Draw vectors along their two main directions, with the share of the variance that these show."""
    import numpy

    left, spread, _ = numpy.linalg.svd(vectors - vectors.mean(0), full_matrices=False)
    points = left[:, :2] * spread[:2]
    # A direction's sign is arbitrary, so choose it such that the first task is on the right and at the top.
    points = points * numpy.where(points[0] < 0, -1.0, 1.0)
    share = float((spread[:2] ** 2).sum() / max((spread**2).sum(), 1e-12))
    marks = chart.marks_for(tasks)
    for task, (x, y) in zip(tasks, points, strict=True):
        axes.plot(x, y, **marks[task].ours(), linestyle="none", zorder=4)
    axes.margins(0.2)
    chart.hold_labels(
        axes, [(x, MeanWithError(y), name_task(task)) for task, (x, y) in zip(tasks, points, strict=True)]
    )
    axes.set_title(f"{title} ({100 * share:.0f}% seen)")


def draw_growth(scored: ScoredStudy) -> chart.Drawing | None:
    """Draw the parameters of all tasks together against the number of tasks, as multiples of the backbone."""
    tasks = [task for task in scored.study.tasks if task in scored.tasks]
    lines = growth(scored, tasks)
    if not lines or not tasks:
        return None
    name = scored.study.name
    with chart.paper_style(name):
        figure = chart.new_figure(chart.WIDTH * 0.72, 3.0)
        axes = figure.add_subplot()
        marks = chart.marks_for(list(lines))
        for key, totals in lines.items():
            axes.plot(range(1, len(totals) + 1), totals, **marks[key].ours(), linewidth=1.5, zorder=3)
        most = len(tasks)
        printed = [row for table in scored.published.tables for row in table.rows if "total ×" in row.printed]
        published = [row for row in printed if row.arm in marks]
        for row in published:
            axes.plot(row.printed["tasks"], row.printed["total ×"], **marks[row.arm].theirs(), zorder=4)
            most = max(most, int(row.printed["tasks"]))
        axes.set_xlabel("tasks so far")
        axes.set_ylabel("parameters in all\n(multiples of the backbone)")
        axes.set_xticks(range(1, most + 1))
        axes.set_ylim(bottom=0)
        names = {"full": "full fine-tuning, a network for each task"}
        entries: list[chart.Entry] = [(names.get(key, scored.label(key)), mark, False) for key, mark in marks.items()]
        chart.legend(figure, entries, hollow="published, nine tasks (BERT-large)" if published else "")
        return chart.finish(figure, name, "Parameters of all tasks together against the number of tasks.")


def growth(scored: ScoredStudy, tasks: Sequence[str]) -> dict[str, list[float]]:
    """Return each row's total parameters after 1, 2, … tasks, as multiples of the backbone.

    Full fine-tuning keeps a whole network for every task, and is listed whether or not it was run. A row that trains
    one network for all tasks (which forgets) is left out.
    """
    lines: dict[str, list[float]] = {"full": [float(count) for count in range(1, len(tasks) + 1)]}
    for key, row in scored.rows.items():
        if all(task in row and row[task].share < 95 for task in tasks):
            shares = [row[task].share / 100 for task in tasks]
            kept = float(needs_backbone(scored, key))
            lines[key] = [kept + sum(shares[: count + 1]) for count in range(len(tasks))]
    return lines


def draw_forgetting(scored: ScoredStudy) -> chart.Drawing | None:
    """Draw each task's score after every step: a panel per row, a line per task."""
    found = {spec.key: read_steps(spec.records, scored.study.tasks) for spec in scored.specs if spec.key in scored.rows}
    rows = {key: steps for key, steps in found.items() if len(steps) > 1}
    if not rows:
        return None
    marks = chart.task_marks(list(dict.fromkeys(step.task for steps in rows.values() for step in steps)))
    name = f"{scored.study.name}-forgetting"
    with chart.paper_style(name):
        figure = chart.new_figure(chart.WIDTH, 3.1)
        panels = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0]
        shown: list[MeanWithError] = []
        for axes, (key, steps) in zip(panels, rows.items(), strict=True):
            for task, mark in marks.items():
                scores = [(number, step.scores.get(task)) for number, step in enumerate(steps)]
                places = [None if value is None else (float(number), value) for number, value in scores]
                shown += chart.draw_series(axes, places, mark)
            axes.set_xticks(range(len(steps)), [name_task(step.task) for step in steps], rotation=30, ha="right")
            axes.set_xlabel("after learning")
            axes.set_title(scored.label(key))
        panels[0].set_ylabel("dev score (points)")
        chart.legend(figure, [(name_task(task), mark, False) for task, mark in marks.items()], shown)
        caption = (
            "Dev score on every task so far after each further task, ± one s.e.m. over seeds; a line begins where its "
            "task was learnt."
        )
        return chart.finish(figure, name, caption + chart.tell_lone(shown))


# kind of figure -> the function that draws it; a study's file names kinds
FIGURES: dict[str, Callable[[ScoredStudy], list[chart.Drawing] | chart.Drawing | None]] = {
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
