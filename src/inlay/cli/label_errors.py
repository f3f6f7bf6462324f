"""Rows that may be labelled wrongly, on the screen and as a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from inlay.cli import screen
from inlay.cli.output import open_rows
from inlay.cli.screen import Column

if TYPE_CHECKING:
    from inlay.data import LabelErrors

LABEL_ERRORS = "label_errors.csv"
"""The file in a run's folder with all of these rows."""
_MOST_SHOWN = 20
_WIDTH = 60  # letters of a text in the table


def put_label_errors(found: LabelErrors, judge: str, file: Path | None = None) -> None:
    """Print the most suspicious rows as a table; `judge` names the model that found them, `file` has all of them."""
    screen.emit()
    rows = screen.count(found.num_rows, "row")
    if found.silence:
        screen.emit(f"wrong labels: nothing can be told: {found.silence}")
        return
    if not found.errors:
        screen.emit(f"wrong labels: none of {rows} looks wrong to {judge}")
        return
    screen.emit(
        f"{screen.count(len(found.errors))} of {rows} may be labelled wrongly: {judge} surely says something else"
    )
    has_files = len({error.path for error in found.errors}) > 1
    columns = [Column("file")] * has_files + [Column("line", is_number=True), Column("given"), Column("likely")]
    columns += [Column("probability", is_number=True), Column("text", is_flexible=True)]
    cells = []
    for error in found.errors[:_MOST_SHOWN]:
        place = [Path(error.path).name] * has_files + [str(error.line)]
        said = [screen.shorten(error.given, 24), screen.shorten(error.likely, 24), screen.score(error.probability)]
        text = error.text if error.pair is None else f"{error.text} / {error.pair}"
        cells.append([*place, *said, screen.shorten(" ".join(text.split()), _WIDTH)])
    screen.emit_table(columns, cells)
    left = len(found.errors) - _MOST_SHOWN
    if left > 0:
        screen.emit(f"and {left:,} more, less suspicious, in {'the output of --json' if file is None else file}")
    elif file is not None:
        screen.emit(f"the same in {file}")


def write_label_errors(found: LabelErrors, path: Path) -> None:
    """Write all of these rows as a CSV file, the most suspicious first."""
    records = [dataclasses.asdict(error) for error in found.errors]
    with open_rows(path) as writer:
        writer.write_plain([{name: own[name] for name in own if own[name] is not None} for own in records])
