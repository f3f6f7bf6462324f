"""The checked rows of a table with plain columns: texts and labels are read, and bad rows are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from inlay.data.columns import (
    SIDES,
    Columns,
    Fault,
    as_list,
    find_fault,
    is_missing,
    name_label,
    read_text,
)
from inlay.data.kinds import Scheme
from inlay.data.sources import Table
from inlay.data.streams import SKIP_HINT
from inlay.errors import BadData

MOST_CELLS = 250_000_000
"""most cells of a table of label sets, 0 or 1 for every row and label: 1 GB"""
FREE_CELLS, CELLS_PER_LETTER = 50_000_000, 10
"""cells that any table of label sets may have, and the limit for each character of its texts beyond that"""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows whose texts are good; their labels are still as they were read."""

    path: str
    texts: list[str]
    pairs: list[str] | None
    labels: list[Any] | None  # None: no label column
    lines: list[int]
    sides: list[str] | None = None  # train, dev or test, if a column says so

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Sequence[int]) -> Rows:
        """Return the rows at these positions."""
        return replace(
            self,
            texts=[self.texts[row] for row in rows],
            pairs=None if self.pairs is None else [self.pairs[row] for row in rows],
            labels=None if self.labels is None else [self.labels[row] for row in rows],
            lines=[self.lines[row] for row in rows],
            sides=None if self.sides is None else [self.sides[row] for row in rows],
        )

    def by_side(self) -> dict[str, Rows]:
        """Return the rows of each side that has any; without a column of sides, all rows train."""
        if self.sides is None:
            return {"train": self}
        return {
            side: self.take([row for row, own in enumerate(self.sides) if own == side])
            for side in ("train", "dev", "test")
            if side in self.sides
        }

    @property
    def is_labelled(self) -> bool:
        """Whether any row has a label."""
        return self.labels is not None and any(has_label(label) for label in self.labels)


class BadRows:
    """The bad rows of a task: the first is raised, or all are counted and reported, by the policy."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._skipped: dict[str, list[BadData]] = {}

    def add(self, fault: Fault, path: str, line: int) -> None:
        """Refuse a row, or record that it is left out."""
        hint = SKIP_HINT if fault.hint is None else f"{fault.hint}; or leave bad rows out with `--on-bad-row skip`"
        error = BadData(fault.reason, hint, path=path, line=line)
        if self._policy == "refuse":
            raise error
        self.extend((error,))

    def extend(self, errors: Sequence[BadData]) -> None:
        """Record rows that were left out already."""
        for error in errors:
            self._skipped.setdefault(str(error.path), []).append(error)

    def notes(self) -> list[str]:
        """Describe what was skipped, file by file, with the first few reasons."""
        notes = []
        for path, errors in self._skipped.items():
            errors = sorted(errors, key=lambda error: error.line or 0)
            shown = "; ".join(f"line {error.line}: {error.reason}" for error in errors[:3])
            more = f"; and {len(errors) - 3} more" if len(errors) > 3 else ""
            notes.append(f"skipped {len(errors)} bad row{'s' if len(errors) > 1 else ''} of {path}: {shown}{more}")
        return notes


def has_label(value: Any) -> bool:
    """Return whether a label cell has a value; an empty list is one, which means that no label applies."""
    return as_list(value) is not None or not is_missing(value)


def read_rows(table: Table, columns: Columns, bad: BadRows) -> Rows:
    """Return the rows of a table with good texts; the others go to `bad`."""
    bad.extend(table.faults)
    path = table.header.path
    texts = table.column(columns.text)
    pairs = None if columns.pair is None else table.column(columns.pair)
    labels = None if columns.label is None else table.column(columns.label)
    sides = None if columns.split is None else table.column(columns.split)
    kept: list[int] = []
    for row in range(len(texts)):
        try:
            texts[row] = read_text(texts[row], columns.text)
            if pairs is not None:
                pairs[row] = read_text(pairs[row], str(columns.pair))
            if labels is not None:
                _check_label(labels[row], str(columns.label))
            if sides is not None:
                if not is_side(sides[row]):
                    reason = f"`{sides[row]}` in column `{columns.split}` is not a side"
                    raise Fault(reason, f"use one of: {', '.join(SIDES)}")
                sides[row] = SIDES[sides[row].strip().lower()]
        except Fault as fault:
            bad.add(fault, path, table.lines[row])
        else:
            kept.append(row)
    return Rows(path, texts, pairs, labels, table.lines, sides).take(kept)


def _check_label(cell: Any, column: str) -> None:
    """Refuse a label that cannot be written to a file."""
    if isinstance(cell, str):
        fault = find_fault(cell)
        if fault is not None:
            raise Fault(f"{fault.reason} in column `{column}`", fault.hint)
    for item in as_list(cell) or ():
        _check_label(item, column)


def is_side(value: Any) -> bool:
    """Return whether a cell is one of the words for train, dev and test."""
    return isinstance(value, str) and value.strip().lower() in SIDES


def read_targets(rows: Rows, scheme: Scheme, bad: BadRows) -> tuple[Rows, np.ndarray]:
    """Return the rows with good labels, and their targets; the others go to `bad`."""
    if scheme.targets.num_dims == 2:
        _check_num_cells(rows, scheme)
    kept, targets = [], []
    for row, value in enumerate(rows.labels or []):
        try:
            targets.append(scheme.read(value))
        except Fault as fault:
            bad.add(fault, rows.path, rows.lines[row])
        else:
            kept.append(row)
    return rows.take(kept), scheme.collect(targets)


def _check_num_cells(rows: Rows, scheme: Scheme) -> None:
    """Refuse label sets whose table would take far more memory than the file they come from."""
    num_letters = sum(map(len, rows.texts)) + sum(map(len, rows.pairs or ()))
    most = min(MOST_CELLS, max(FREE_CELLS, CELLS_PER_LETTER * num_letters))
    if len(rows) * len(scheme.labels) > most:
        reason = f"{len(rows):,} rows with {len(scheme.labels):,} labels are a table of more than {most:,} cells"
        raise BadData(reason, "keep the labels that matter, or take fewer rows", path=rows.path)


def drop_single_rows(rows: Rows, bad: BadRows) -> Rows:
    """Drop rows that are alone in their class, and add them to `bad`."""
    names = [name_label(value) if as_list(value) is None and has_label(value) else None for value in rows.labels or []]
    counts = Counter(names)
    kept = []
    for row, name in enumerate(names):
        if name is not None and counts[name] == 1:
            hint = "add rows, merge it into another class, or remove it"
            bad.add(Fault(f"class `{name}` has one row, which cannot be split", hint), rows.path, rows.lines[row])
        else:
            kept.append(row)
    return rows.take(kept)
