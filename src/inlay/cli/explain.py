"""`inlay explain`: shows the words that moved an answer, and the training rows nearest to the text."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import flags, screen
from inlay.cli.lazy_packages import explore
from inlay.cli.screen import Column, numbers
from inlay.cli.trained_on import (
    DataFormatOption,
    DataHeaderOption,
    TrainedOnOption,
    open_version,
    try_training_rows,
)
from inlay.serving import answer_words
from inlay.settings import DataConfig
from inlay.store import write_atomically

_MOST_LISTED = 12
_LEAST_SHOWN = 0.1  # share of the largest effect below which a word gets no colour


def explain(
    task: flags.TaskArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="the text to answer")],
    pair: Annotated[str | None, typer.Option("--pair", metavar="TEXT", help="the second text")] = None,
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="occlusion|gradients",
            help="leave out each word in turn, or use integrated gradients",
        ),
    ] = "occlusion",
    label: Annotated[
        str | None, typer.Option("--label", metavar="NAME", help="explain this label; default: the answer's")
    ] = None,
    nearest: Annotated[
        int, typer.Option("--nearest", metavar="N", min=0, help="nearest training rows to show; 0 shows none")
    ] = 3,
    data: TrainedOnOption = None,
    format: DataFormatOption = "auto",
    header: DataHeaderOption = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="also write the explanation as an HTML page")
    ] = None,
    backbone: flags.BackboneOption = None,
    device: flags.DeviceOption = "auto",
    store: flags.StoreOption = None,
    json: flags.JsonOption = False,
) -> None:
    """Show which words moved an answer, and the training rows nearest to it.

    Explains the evidence for the answer's label, in log-odds, or the number that is the answer. With occlusion, a
    word's effect is how much the evidence falls without it. With gradients, integrated through the task's slot, the
    effects of all words add up to the change from a text of masked words. Both are checked: without the top words the
    evidence must fall further than without random ones. The nearest training rows are read from the file that the task
    was trained on, if it is still there.
    """
    columns = DataConfig(format=format, header=header)
    kept, reader = open_version(task, store, backbone, device)
    found = explore.explain_answer(reader, text, pair, by=by, label=label)
    if nearest:
        trained, reason = try_training_rows(reader, kept, data, "no nearest training rows", columns)
        if trained is None:
            found = dataclasses.replace(found, notes=(*found.notes, str(reason)))
        else:
            row = reader.make_split([text], None if pair is None else [pair])
            with screen.Meter("reading the training rows", len(trained.train)) as meter:
                near = explore.find_nearest(
                    reader, row, trained, nearest, lambda number: meter.advance(number, "training rows")
                )
            found = dataclasses.replace(found, nearest=near)
    if html is not None:
        write_atomically(html, explore.draw_explanation(found).encode())
        screen.log(f"wrote {html}")
    if json:
        screen.emit_json(found.to_json())
    else:
        _put(found)


def _put(found: explore.Explanation) -> None:
    """Print the answer, the text with its words coloured, a table of words, the checks and the nearest rows."""
    about = found.answer
    sure = f", probability {about['probability']:.4f}" if "probability" in about else ""
    screen.emit(f"{found.reference}: {screen.in_line(answer_words(about))}{sure}", "bold")
    what = "the answer" if found.label is None else f"log-odds of `{found.label}`: {found.evidence:+.3f}"
    screen.emit(f"{what}, by {found.by}")
    screen.emit()
    _print_coloured(found)
    screen.emit()
    top = sorted(found.words, key=lambda word: -abs(word.change))[:_MOST_LISTED]
    rows = [[word.text, f"{word.change:+.3f}", "-" if word.without is None else f"{word.without:+.3f}"] for word in top]
    if rows:
        screen.emit_table([Column("word", is_flexible=True), *numbers("moves it by", "without it")], rows)
        screen.emit()
    screen.emit_pairs(_describe_checks(found))
    if found.nearest:
        screen.emit()
        cells = [
            [f"{row.cosine:.3f}", _show_label(row.label), str(row.line), " ⇥ ".join(filter(None, (row.text, row.pair)))]
            for row in found.nearest
        ]
        screen.emit_table(
            [*numbers("cosine"), "label", *numbers("line"), Column("training row", is_flexible=True)], cells
        )
    for note in found.notes:
        screen.detail(note)


def _describe_checks(found: explore.Explanation) -> dict[str, str]:
    pairs = {}
    if found.completeness is not None:
        parts = found.completeness
        says = "complete" if parts.holds else "NOT complete"
        pairs["parts"] = (
            f"add up to {parts.total:+.3f}; from the masked text it moves by {parts.change:+.3f} "
            f"({says}, {parts.num_points} points)"
        )
    if found.deletion is not None:
        gone = found.deletion
        pairs["check"] = (
            f"without its top {screen.count(gone.num_words, 'word')} it falls by {gone.top:.3f}, to "
            f"`{gone.answer}`; without as many random ones by {gone.random:.3f}"
        )
    return pairs


def _print_coloured(found: explore.Explanation) -> None:
    """Print the text: green words speak for the answer, red ones against it; the stronger, the brighter."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    largest = max((abs(word.change) for word in found.words), default=0.0) or 1.0
    for side, whole in (("text", found.text), ("pair", found.pair)):
        if whole is None:
            continue
        line, last = Text(), 0
        for word in (item for item in found.words if item.side == side):
            line.append(screen.in_line(whole[last : word.start]))
            line.append(screen.in_line(whole[word.start : word.end]), _style(word.change / largest))
            last = word.end
        line.append(screen.in_line(whole[last:]))
        console.print(line)


def _style(share: float) -> str:
    """Return a rich style for a word by its share of the largest effect."""
    if abs(share) < _LEAST_SHOWN:
        return ""
    strength = int(40 + 110 * abs(share))
    return f"white on rgb(0,{strength},40)" if share > 0 else f"white on rgb({strength},20,30)"


def _show_label(label: Any) -> str:
    if isinstance(label, list):
        return "|".join(label)
    return f"{label:g}" if isinstance(label, float) else str(label)
