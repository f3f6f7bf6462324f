"""Printing of cross-validation scores (`inlay train --folds K`) and of rows that may be labelled wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inlay.cli import screen
from inlay.cli.lazy_packages import data
from inlay.cli.output import open_rows
from inlay.cli.screen import Column, numbers

_LABEL_ERRORS = "label_errors.csv"
"""the file in a run's folder with all rows that may be labelled wrongly"""
_MOST_SHOWN = 20
_WIDTH = 60  # letters of a text in the table


def keep_label_errors(found: data.LabelErrors | None, folder: Path) -> Path | None:
    """Write the rows that may be labelled wrongly to the run's folder; return the file, if there are any."""
    if found is None or not found.errors:
        return None
    records = [dataclasses.asdict(error) for error in found.errors]
    with open_rows(folder / _LABEL_ERRORS) as writer:
        writer.write_plain([{name: own[name] for name in own if own[name] is not None} for own in records])
    return folder / _LABEL_ERRORS


def describe_report(report: Mapping[str, Any], task: data.Task) -> str:
    """Describe a cross-validation in one line of the report on the run trained afterwards."""
    scores = f"{describe_mean(report, report['mean'], task.metric)}; {describe_pooled(report, task.metric)}"
    rows = f"{screen.count(len(task.train), 'row')}, with {screen.count(len(task.dev), 'dev row')} to choose its epoch"
    return f"cross-validated ({report['num_folds']} folds): {scores}; the run above was trained on {rows}"


def describe_mean(about: Mapping[str, Any], means: Mapping[str, float], metric: str) -> str:
    """Describe the mean over folds with its standard error; `about` is the version's entry."""
    return f"{metric} {screen.score(means[metric])} ± {screen.score(about['standard_error'].get(metric))}"


def describe_pooled(about: Mapping[str, Any], metric: str) -> str:
    """Describe the score over all left-out rows."""
    found = about["pooled"].get(metric, dict.fromkeys(("value", "low", "high")))
    rows = screen.count(about["num_rows"], "row")
    span = f"{screen.score(found['low'])} to {screen.score(found['high'])}"
    return f"{screen.score(found['value'])} over all {rows} left out (95% interval {span})"


def print_label_errors(found: data.LabelErrors, judge: str, file: Path | None = None) -> None:
    """Print the most suspicious rows as a table; `judge` names the model that found them, `file` has all of them."""
    screen.emit()
    rows = screen.count(found.num_rows, "row")
    if found.silence:
        screen.emit(f"wrong labels: not checked: {found.silence}")
        return
    if not found.errors:
        screen.emit(f"wrong labels: none of {rows} looks wrong to {judge}")
        return
    screen.emit(
        f"{screen.count(len(found.errors))} of {rows} may be labelled wrongly: {judge} confidently gives another label"
    )
    has_files = len({error.path for error in found.errors}) > 1
    places = [Column("file")] * has_files + numbers("line")
    cells = []
    for error in found.errors[:_MOST_SHOWN]:
        place = [Path(error.path).name] * has_files + [str(error.line)]
        labels = [screen.shorten(error.given, 24), screen.shorten(error.likely, 24), screen.score(error.probability)]
        text = error.text if error.pair is None else f"{error.text} / {error.pair}"
        cells.append([*place, *labels, screen.shorten(text, _WIDTH)])
    screen.emit_table([*places, "given", "likely", *numbers("probability"), Column("text", is_flexible=True)], cells)
    left = len(found.errors) - _MOST_SHOWN
    if left > 0:
        screen.emit(f"and {left:,} less suspicious ones in {'the output of --json' if file is None else file}")
    elif file is not None:
        screen.emit(f"also written to {file}")
