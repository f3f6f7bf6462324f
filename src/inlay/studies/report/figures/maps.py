"""Figures of the ablation, of tasks that arrive one after another, and of the embeddings of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inlay.studies.judge.bounds import MeanWithError
from inlay.studies.judge.row_specs import name_task
from inlay.studies.judge.scored import ScoredStudy, needs_backbone
from inlay.studies.judge.series import Ablation, Step, read_ablations, read_embeddings, read_steps
from inlay.studies.report.chart import (
    INK,
    PALE_INK,
    WIDTH,
    Drawing,
    Entry,
    Mark,
    draw_series,
    finish,
    hold_labels,
    legend,
    lone_entries,
    marks_for,
    new_figure,
    paper_style,
    tell_lone,
)


def draw_ablation(scored: ScoredStudy) -> Drawing | None:
    """Draw the heat-map of spans: y the first, x the last removed layer; colour the relative loss of accuracy."""
    ablations = [item for item in read_ablations(scored.records, scored.study.tasks) if item.spans]
    if not ablations:
        return None
    name = scored.study.name
    with paper_style(name):
        figure = new_figure(WIDTH if len(ablations) > 1 else WIDTH * 0.6, 3.3)
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
        return finish(figure, name, caption)


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
        shade = "white" if value > 0.45 * most else INK
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


def draw_embeddings(scored: ScoredStudy) -> Drawing | None:
    """Draw the embeddings of tasks in their two main directions, a panel per seed; below, what training added."""
    found = read_embeddings(scored)
    if not found:
        return None
    name, has_starts = scored.study.name, all(item.starts is not None for item in found.values())
    with paper_style(name):
        height = WIDTH / max(len(found), 2)
        figure = new_figure(WIDTH, 0.6 + height * (1 + has_starts))
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
        below = (
            " Below: the same of what training added to the draw by chance that each began with, and how far it moved "
            "them, as a share of the draw's length. While that is little, the panels above show the draw."
        )
        return finish(figure, name, caption + below * has_starts)


def _draw_points(axes: Any, tasks: Sequence[str], vectors: Any, title: str) -> None:
    points, share = _flatten(vectors)
    marks = marks_for(tasks)
    for task, (x, y) in zip(tasks, points, strict=True):
        axes.plot(x, y, **marks[task].ours(), linestyle="none", zorder=4)
    axes.margins(0.2)
    hold_labels(axes, [(x, MeanWithError(y), name_task(task)) for task, (x, y) in zip(tasks, points, strict=True)])
    axes.set_title(f"{title} ({100 * share:.0f}% seen)")


def _flatten(vectors: Any) -> tuple[Any, float]:
    """Project onto the two main directions [tasks, 2]; return the share of the variance that they show, too."""
    import numpy

    left, spread, _ = numpy.linalg.svd(vectors - vectors.mean(0), full_matrices=False)
    points = left[:, :2] * spread[:2]
    # A direction's sign is arbitrary: the first task is put at the right and above.
    points = points * numpy.where(points[0] < 0, -1.0, 1.0)
    return points, float((spread[:2] ** 2).sum() / max((spread**2).sum(), 1e-12))


def draw_growth(scored: ScoredStudy) -> Drawing | None:
    """Draw parameters of all tasks together against the number of tasks, as multiples of the backbone."""
    tasks = [task for task in scored.study.tasks if task in scored.tasks]
    lines = growth(scored, tasks)
    if not lines or not tasks:
        return None
    name = scored.study.name
    with paper_style(name):
        figure = new_figure(WIDTH * 0.72, 3.0)
        axes = figure.add_subplot()
        marks = marks_for(list(lines))
        published = []
        for key, totals in lines.items():
            axes.plot(range(1, len(totals) + 1), totals, **marks[key].ours(), linewidth=1.5, zorder=3)
        for table in scored.published.tables:
            for row in table.rows:
                if row.arm in marks and "total ×" in row.printed:
                    published.append((row.printed["tasks"], row.printed["total ×"], marks[row.arm]))
        for x, y, mark in published:
            axes.plot(x, y, **mark.theirs(), zorder=4)
        axes.set_xlabel("tasks so far")
        axes.set_ylabel("parameters in all\n(multiples of the backbone)")
        axes.set_xticks(range(1, max(len(tasks), *(int(x) for x, _, _ in published), 1) + 1))
        axes.set_ylim(bottom=0)
        entries = [(_GROWTH.get(key, scored.label(key)), mark, False) for key, mark in marks.items()]
        entries += [("published, nine tasks (BERT-large)", Mark(PALE_INK, "o"), True)] if published else []
        legend(figure, entries)
        return finish(figure, name, "Parameters of all tasks together against the number of tasks.")


_GROWTH = {"full": "full fine-tuning, a network for each task"}


def growth(scored: ScoredStudy, tasks: Sequence[str]) -> dict[str, list[float]]:
    """Return each row's total parameters after 1, 2, … tasks, as multiples of the backbone.

    Full fine-tuning keeps a whole network for every task, whether or not it was run; a row that shares one network
    between all tasks (which forgets) is left out.
    """
    lines: dict[str, list[float]] = {"full": [float(count) for count in range(1, len(tasks) + 1)]}
    for key, row in scored.rows.items():
        if all(task in row and row[task].share < 95 for task in tasks):
            shares = [row[task].share / 100 for task in tasks]
            kept = float(needs_backbone(scored, key))
            lines[key] = [kept + sum(shares[: count + 1]) for count in range(len(tasks))]
    return lines


def draw_forgetting(scored: ScoredStudy) -> Drawing | None:
    """Draw each task's score after every step: a panel per row, a line per task."""
    found = {spec.key: read_steps(spec.records, scored.study.tasks) for spec in scored.specs if spec.key in scored.rows}
    rows = {key: steps for key, steps in found.items() if len(steps) > 1}
    if not rows:
        return None
    tasks = list(dict.fromkeys(step.task for steps in rows.values() for step in steps))
    name = f"{scored.study.name}-forgetting"
    with paper_style(name):
        figure = new_figure(WIDTH, 3.1)
        panels = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0]
        marks = marks_for([f"task-{task}" for task in tasks])
        by_name = dict(zip(tasks, marks.values(), strict=True))
        for axes, (key, steps) in zip(panels, rows.items(), strict=True):
            _draw_steps(axes, steps, by_name)
            axes.set_title(scored.label(key))
        panels[0].set_ylabel("dev score (points)")
        shown = [value for steps in rows.values() for step in steps for value in step.scores.values()]
        entries: list[Entry] = [(name_task(task), mark, False) for task, mark in by_name.items()]
        legend(figure, entries + lone_entries(shown))
        caption = (
            "Dev score on every task so far after each further task, ± one s.e.m. over seeds; a line begins where its "
            "task was learnt."
        )
        return finish(figure, name, caption + tell_lone(shown))


def _draw_steps(axes: Any, steps: Sequence[Step], marks: dict[str, Mark]) -> None:
    for name, mark in marks.items():
        found = [(number, step.scores.get(name)) for number, step in enumerate(steps)]
        draw_series(axes, [None if value is None else (float(number), value) for number, value in found], mark)
    axes.set_xticks(range(len(steps)), [name_task(step.task) for step in steps], rotation=30, ha="right")
    axes.set_xlabel("after learning")
