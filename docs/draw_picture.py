"""Draws the README's picture: rows of several tasks, routed through one frozen backbone with a bank of slots set in.

    python docs/draw_picture.py            # writes docs/picture.svg
    python docs/draw_picture.py FILE.png   # the same, in the format of the suffix

Everything is placed by hand on a canvas of WIDTH by HEIGHT units, y downwards. The texts and answers are examples.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, PathPatch
from matplotlib.path import Path as Curve

WIDTH, HEIGHT = 1200, 508
PAPER, INK, PALE_INK = "#fbf9f4", "#26323c", "#7b858c"
SLAB, SLAB_EDGE, RECESS = "#2c3a46", "#1f2a33", "#3d4d5a"
SLOTS = {"spam": "#e3a12f", "mood": "#2f9c8c", "desk": "#cf5a44", "match": "#6a78c4"}
HEAD_LABELS = {"spam": 2, "mood": 3, "desk": 5, "match": 1}


class Line(NamedTuple):
    """A row of the batch."""

    task: str
    text: str
    answer: str


BATCH = (
    Line("desk", "My invoice is wrong", "billing"),
    Line("spam", "WINNER!! Call for your prize", "spam"),
    Line("mood", "Well made, and it lasts", "good"),
    Line("spam", "Home by eight. Bread?", "ham"),
    Line("match", "A dog runs · An animal moves", "4.2"),
    Line("mood", "Broke on the second day", "bad"),
    Line("desk", "I cannot log in", "support"),
)

ROW_TOP, ROW_STEP, ROW_HEIGHT = 106, 47, 34
TEXT_LEFT, TEXT_RIGHT = 34, 292
LANE_TOP, LANE_STEP = 126, 66
FIRST_SLAB, SLAB_STEP, SLAB_WIDTH, NUM_SLABS = 436, 66, 50, 6
SLAB_TOP, SLAB_BOTTOM = 88, 428
HEAD_X, ANSWER_LEFT, ANSWER_RIGHT = 884, 1040, 1166


def main(path: Path) -> None:
    """Write the picture; the same script and matplotlib give the same bytes."""
    matplotlib.rcParams.update({"svg.hashsalt": "inlay", "font.family": "DejaVu Sans", "svg.fonttype": "path"})
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=200, facecolor="none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.axis("off")
    box(axes, (1, 1, WIDTH - 2, HEIGHT - 2), PAPER, radius=18, edge="#e7e2d6", order=0)
    draw_slabs(axes)
    for row, line in enumerate(BATCH):
        draw_row(axes, row, line)
    draw_heads(axes)
    draw_words(axes)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def row_y(row: int) -> float:
    return ROW_TOP + ROW_STEP * row


def lane_y(task: str) -> float:
    return LANE_TOP + LANE_STEP * list(SLOTS).index(task)


def thread_y(row: int) -> float:
    """Where a row runs inside its slot's lane: rows of one task side by side."""
    task = BATCH[row].task
    mates = [index for index, line in enumerate(BATCH) if line.task == task]
    return lane_y(task) + 13 * (mates.index(row) - (len(mates) - 1) / 2)


def draw_slabs(axes: Axes) -> None:
    """The frozen blocks, each with two recesses per slot: Houlsby's two places. The last slot is free."""
    free = LANE_TOP + LANE_STEP * len(SLOTS)
    for number in range(NUM_SLABS):
        left = FIRST_SLAB + SLAB_STEP * number
        box(axes, (left, SLAB_TOP, SLAB_WIDTH, SLAB_BOTTOM - SLAB_TOP), SLAB, radius=8, edge=SLAB_EDGE, order=2)
        for place in (8, 28):
            for task, colour in SLOTS.items():
                tile(axes, left + place, lane_y(task), colour)
            box(axes, (left + place, free - 17, 14, 34), RECESS, radius=3.5, edge="#566773", order=5, dashed=True)


def tile(axes: Axes, left: float, middle: float, colour: str) -> None:
    """An adapter set into its recess, with a light upper edge."""
    box(axes, (left - 1.5, middle - 18.5, 17, 37), SLAB_EDGE, radius=4.5, order=5)
    box(axes, (left, middle - 17, 14, 34), colour, radius=3.5, order=6)
    axes.plot([left + 3.5, left + 10.5], [middle - 14.6] * 2, color="white", alpha=0.55, linewidth=1.1, zorder=7)


def draw_row(axes: Axes, row: int, line: Line) -> None:
    """A text, its thread through the backbone, and its answer."""
    colour, y, inside = SLOTS[line.task], row_y(row), thread_y(row)
    last = FIRST_SLAB + SLAB_STEP * (NUM_SLABS - 1) + SLAB_WIDTH
    box(axes, (TEXT_LEFT, y - ROW_HEIGHT / 2, TEXT_RIGHT - TEXT_LEFT, ROW_HEIGHT), "white", edge="#e2dccd", order=6)
    box(axes, (TEXT_LEFT, y - ROW_HEIGHT / 2, 58, ROW_HEIGHT), colour, order=7)
    axes.text(TEXT_LEFT + 29, y, line.task, color="white", size=8.4, weight="bold", ha="center", va="center", zorder=8)
    axes.text(TEXT_LEFT + 68, y, line.text, color=INK, size=8.6, va="center", zorder=8)
    thread(axes, (TEXT_RIGHT, y), (FIRST_SLAB, inside), colour)
    axes.plot([FIRST_SLAB, last], [inside] * 2, color=colour, linewidth=2.6, zorder=3, alpha=0.95)
    axes.plot([last, HEAD_X], [inside] * 2, color=colour, linewidth=2.6, zorder=3)
    thread(axes, (HEAD_X, inside), (ANSWER_LEFT, y), colour)
    box(axes, (ANSWER_LEFT, y - ROW_HEIGHT / 2, ANSWER_RIGHT - ANSWER_LEFT, ROW_HEIGHT), "white", edge=colour, order=6)
    middle = (ANSWER_LEFT + ANSWER_RIGHT) / 2
    axes.text(middle, y, line.answer, color=INK, size=9.4, weight="bold", ha="center", va="center", zorder=8)


def draw_heads(axes: Axes) -> None:
    """Each task's head, with as many outputs as it has labels."""
    for task, colour in SLOTS.items():
        y, num_labels = lane_y(task), HEAD_LABELS[task]
        box(axes, (HEAD_X - 15, y - 25, 30, 50), "white", radius=8, edge=colour, order=5, line=1.8)
        for label in range(num_labels):
            axes.add_patch(Circle((HEAD_X, y + 8.6 * (label - (num_labels - 1) / 2)), 3.1, color=colour, zorder=6))
    y = LANE_TOP + LANE_STEP * len(SLOTS)
    box(axes, (HEAD_X - 15, y - 25, 30, 50), "none", radius=8, edge="#b9b4a6", order=5, dashed=True)


def draw_words(axes: Axes) -> None:
    last = FIRST_SLAB + SLAB_STEP * (NUM_SLABS - 1) + SLAB_WIDTH
    titles = {
        (TEXT_LEFT + TEXT_RIGHT) / 2: "a mixed batch",
        (TEXT_RIGHT + FIRST_SLAB) / 2: "route",
        (FIRST_SLAB + last) / 2: "one frozen backbone",
        HEAD_X: "heads",
        (ANSWER_LEFT + ANSWER_RIGHT) / 2: "answers",
    }
    for x, title in titles.items():
        axes.text(x, 46, title, color=INK, size=12.5, weight="bold", ha="center", va="center")
    notes = {
        (TEXT_LEFT + TEXT_RIGHT) / 2: "each row names its task",
        (TEXT_RIGHT + FIRST_SLAB) / 2: "sorted by slot",
        (FIRST_SLAB + last) / 2: "a bank of slots: each task's own adapters and norms",
        HEAD_X: "of any width",
        (ANSWER_LEFT + ANSWER_RIGHT) / 2: "in the order asked",
    }
    for x, note in notes.items():
        axes.text(x, HEIGHT - 44, note, color=PALE_INK, size=9, ha="center", va="center")
    free = LANE_TOP + LANE_STEP * len(SLOTS)
    axes.text(FIRST_SLAB - 14, free, "a free slot", color=PALE_INK, size=8.6, style="italic", ha="right", va="center")


def thread(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """A smooth line that leaves and arrives level."""
    bend = 0.55 * (end[0] - start[0])
    points = [start, (start[0] + bend, start[1]), (end[0] - bend, end[1]), end]
    curve = Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
    axes.add_patch(PathPatch(curve, facecolor="none", edgecolor=colour, linewidth=2.6, capstyle="round", zorder=3))


def box(
    axes: Axes,
    place: tuple[float, float, float, float],
    fill: str,
    *,
    radius: float = 7,
    edge: str = "none",
    order: int = 1,
    line: float = 1.0,
    dashed: bool = False,
) -> None:
    """A rectangle (left, top, width, height) with round corners."""
    left, top, width, height = place
    style = f"round,pad=0,rounding_size={radius}"
    patch = FancyBboxPatch((left, top), width, height, boxstyle=style, facecolor=fill, edgecolor=edge, zorder=order)
    patch.set(linewidth=line, linestyle=(0, (2.5, 2.5)) if dashed else "solid")
    axes.add_patch(patch)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("picture.svg"))
