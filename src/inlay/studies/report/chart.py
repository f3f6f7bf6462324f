"""The common style and parts of the figures of studies, and figures rendered as bytes.

Colours are Okabe and Ito's, which colour-blind readers can tell apart, and every series also has its own marker. Our
values are filled, published ones are hollow, and a point of a single seed, which has no error, is pale. Lines have a
gap where a planned point is missing. Legends are outside the axes. The same records give the same bytes.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from inlay.studies.judge.bounds import MeanWithError
from inlay.studies.report.tables import name_count

INK, PALE_INK, GRID = "#26323c", "#7b858c", "#e4e7ea"
ADAPTERS, TUNED, NORMS, PLUM = "#D55E00", "#0072B2", "#009E73", "#CC79A7"
# row key (or the kind before its number) -> colour and marker; other rows take OTHERS in turn
MARKS = {
    "full": (INK, "D"),
    "adapters": (ADAPTERS, "o"),
    "top": (TUNED, "s"),
    "norms": (NORMS, "^"),
    "baseline": (PALE_INK, "X"),
    "none": (ADAPTERS, "o"),
}
OTHERS = (
    ("#56B4E9", "v"),
    (PLUM, "P"),
    (NORMS, "^"),
    ("#E69F00", "h"),
    (TUNED, "s"),
    ("#882255", "<"),
    ("#44AA99", ">"),
    ("#999933", "d"),
)
WIDTH = 6.6
"""inches of a figure across the page"""
DPI = 200
BARS = {"elinewidth": 1.1, "capsize": 2.2, "capthick": 1.1}
"""error bars: ± one standard error, with caps"""
DASHED = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1.1}
"""the line of the reference"""
_SIZES = {"P": 6.5, "X": 6.5, "D": 4.5}
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.edgecolor": PALE_INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "axes.unicode_minus": True,
}


@dataclass(frozen=True)
class Drawing:
    """A finished figure; its files are named `name`."""

    name: str
    caption: str
    svg: bytes
    png: bytes


@dataclass(frozen=True)
class Mark:
    """The colour and marker of a series."""

    colour: str
    shape: str

    @property
    def pale(self) -> tuple[float, ...]:
        """The colour, mixed with white."""
        return tuple(1 - 0.35 * (1 - int(self.colour[place : place + 2], 16) / 255) for place in (1, 3, 5))

    def ours(self) -> dict[str, Any]:
        """Return a filled marker, for our values."""
        return {
            "color": self.colour,
            "marker": self.shape,
            "markersize": _SIZES.get(self.shape, 5),
            "markeredgecolor": "none",
        }

    def lone(self) -> dict[str, Any]:
        """Return a pale marker, for values of one seed."""
        return {**self.ours(), "markerfacecolor": self.pale, "markeredgecolor": self.colour, "markeredgewidth": 0.8}

    def theirs(self) -> dict[str, Any]:
        """Return a hollow marker, for published values."""
        return {
            "color": self.colour,
            "marker": self.shape,
            "markersize": 6,
            "markerfacecolor": "white",
            "markeredgewidth": 1.2,
            "linestyle": "none",
        }


def task_marks(tasks: Sequence[str]) -> dict[str, Mark]:
    """Choose a mark for each task."""
    return dict(zip(tasks, marks_for([f"task-{task}" for task in tasks]).values(), strict=True))


def marks_for(keys: Sequence[str]) -> dict[str, Mark]:
    """Choose a mark for each row; a kind of row in MARKS has the same mark in every figure."""
    free = iter(OTHERS * (1 + len(keys) // len(OTHERS)))
    marks: dict[str, Mark] = {}
    for key in keys:
        known = MARKS.get(key, MARKS.get(key.rpartition("-")[0]))
        taken = {(mark.colour, mark.shape) for mark in marks.values()}
        chosen = known if known and known not in taken else next(mark for mark in free if mark not in taken)
        marks[key] = Mark(*chosen)
    return marks


@contextmanager
def paper_style(name: str) -> Iterator[None]:
    """Set Matplotlib's style for the block; `name` makes the ids inside an SVG unique."""
    import matplotlib  # takes half a second to import

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": f"inlay-{name}"}):
        yield


def finish(figure: Any, name: str, caption: str) -> Drawing:
    """Render the figure as SVG and PNG. Call it inside `paper_style`."""
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.set_layout_engine("none")  # one layout pass is enough; it takes most of the time
    figure.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
    return Drawing(name, caption, svg.getvalue(), png.getvalue())


def new_figure(width: float, height: float) -> Any:
    """Make an empty figure, laid out so that nothing overlaps."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def count_axis(axes: Any) -> None:
    """Make the x axis logarithmic, for trained parameters, labelled as 10k or 1M."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: name_count(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("trained parameters per task")


def error_bar(axes: Any, x: float, y: MeanWithError, mark: Mark, *, across: bool = False) -> None:
    """Draw a point with ± one standard error, vertically or horizontally."""
    place = {"xerr": y.sem} if across else {"yerr": y.sem}
    spot = (y.mean, x) if across else (x, y.mean)
    style = mark.ours() if y.sem is not None else mark.lone()
    axes.errorbar(*spot, **place, **style, linestyle="none", **BARS, zorder=4)


T = TypeVar("T")
Place = tuple[float, MeanWithError]
"""x and y of a point"""


def draw_series(axes: Any, places: Sequence[Place | None], mark: Mark) -> list[MeanWithError]:
    """Draw points with their errors and a line through them, with gaps at missing planned points (None).

    Returns the values that were drawn.
    """
    for part in split_runs(places):
        if len(part) > 1:
            axes.plot([x for x, _ in part], [y.mean for _, y in part], color=mark.colour, linewidth=1.4, zorder=3)
        for x, y in part:
            error_bar(axes, x, y, mark)
    return [place[1] for place in places if place is not None]


def split_runs(items: Iterable[T | None]) -> list[list[T]]:
    """Split items into the parts between missing ones (None)."""
    parts: list[list[T]] = [[]]
    for item in items:
        if item is None:
            parts.append([])
        else:
            parts[-1].append(item)
    return [part for part in parts if part]


def tell_lone(shown: Iterable[MeanWithError]) -> str:
    """Return a sentence for the caption about points of one seed, with a space before it; empty if there are none."""
    lone = [y.sem is None for y in shown]
    if not any(lone):
        return ""
    return f" {'All (pale) are' if all(lone) else 'Pale:'} of one seed, so that no error is known."


def plain(label: str) -> str:
    """Return a row's label for figures: without backticks."""
    return label.replace("`", "")


Entry = tuple[str, Mark | None, bool]
"""a legend's label, its mark and whether it is hollow; no mark: a dashed line"""


def legend(
    figure: Any, entries: Sequence[Entry], shown: Iterable[MeanWithError] = (), *, hollow: str = "", shape: str = "o"
) -> None:
    """Draw a legend below the axes, in as many columns as fit.

    After `entries` comes one for points of a single seed, if any of the values `shown` has no error, and one labelled
    `hollow`, if given.
    """
    from matplotlib.lines import Line2D

    styles: list[tuple[str, dict[str, Any]]] = []
    for label, mark, is_hollow in entries:
        if mark is None:
            styles.append((label, DASHED))
        else:
            styles.append((label, mark.theirs() if is_hollow else {**mark.ours(), "linestyle": "none"}))
    if any(y.sem is None for y in shown):
        styles.append(("one seed, no error", {**Mark(PALE_INK, shape).lone(), "linestyle": "none"}))
    if hollow:
        styles.append((hollow, Mark(PALE_INK, "o").theirs()))
    if styles:
        handles = [Line2D([], [], label=label, **style) for label, style in styles]
        columns = _fit_columns([len(label) for label, _ in styles], figure.get_figwidth())
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, handletextpad=0.4, columnspacing=1.4)


def _fit_columns(lengths: Sequence[int], width: float) -> int:
    """Return the largest number of columns whose widest labels fit side by side; entries fill column by column."""
    for columns in range(len(lengths), 1, -1):
        few, rest = divmod(len(lengths), columns)  # Matplotlib gives the first columns one entry more
        ends = [few * place + min(place, rest) for place in range(columns + 1)]
        widest = [max(lengths[first:last]) for first, last in itertools.pairwise(ends)]
        # An 8 point letter is about 0.07 inches wide; marker and gap take half an inch.
        if sum(0.07 * length + 0.5 for length in widest) <= width:
            return columns
    return 1


def hold_labels(axes: Any, points: Sequence[tuple[float, MeanWithError, str]]) -> None:
    """Write each point's name near it, without covering a point, an error bar or another name.

    If there is room only further off, a thin line connects the name with its point.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(axes.figure)  # only a canvas knows the width of a text
    canvas.draw()
    renderer, frame = canvas.get_renderer(), axes.get_window_extent()
    reach = 4 * axes.figure.dpi / 72
    taken = []
    for x, value, _ in points:
        low, high = (axes.transData.transform((x, value.mean + sign * value.margin)) for sign in (-1, 1))
        taken.append((low[0] - reach, low[1] - reach, high[0] + reach, high[1] + reach))
    for x, value, text in sorted(points, key=lambda point: -point[1].mean):
        tried = []
        for offset in _OFFSETS:
            note = _annotate(axes, (x, value.mean), text, offset)
            box = tuple(note.get_window_extent(renderer).extents)
            note.remove()
            out = max(0.0, frame.x0 - box[0], box[2] - frame.x1, frame.y0 - box[1], box[3] - frame.y1)
            cost = 100 * out
            for other in taken:  # the area that both cover
                wide = min(box[2], other[2]) - max(box[0], other[0])
                high = min(box[3], other[3]) - max(box[1], other[1])
                cost += max(wide, 0.0) * max(high, 0.0)
            tried.append((cost, offset, box))
            if tried[-1][0] == 0:
                break
        _, offset, box = min(tried, key=lambda item: item[0])
        _annotate(axes, (x, value.mean), text, offset, has_line=max(map(abs, offset)) > 10)
        taken.append(box)


def _annotate(
    axes: Any, spot: tuple[float, float], text: str, offset: tuple[float, float], *, has_line: bool = False
) -> Any:
    across = "left" if offset[0] > 0 else "right" if offset[0] < 0 else "center"
    upright = "center" if offset[1] == 0 else "bottom" if offset[1] > 0 else "top"
    line = {"arrowstyle": "-", "color": PALE_INK, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3}
    return axes.annotate(
        text, spot, xytext=offset, textcoords="offset points", ha=across, va=upright, fontsize=7, zorder=5,
        arrowprops=line if has_line else None,
    )  # fmt: skip


# Positions of a name, in points from its point: beside, above and below it, then further off.
_OFFSETS = [
    (across * distance, upright * distance)
    for distance in (6, 12, 18, 26, 36, 48, 62)
    for across, upright in ((1, 0), (-1, 0), (0, 1), (0, -1), (0.8, 0.8), (0.8, -0.8), (-0.8, 0.8), (-0.8, -0.8))
]
