"""The checked rows of a table: texts that are texts, labels that can be read, and a ledger of those that were not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from inlay.data.columns import SIDES, Columns, Fault, as_list, is_missing, name_label, read_text
from inlay.data.kinds import Scheme
from inlay.data.readers import SKIP_HINT
from inlay.data.sources import Table
from inlay.errors import BadData


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows whose texts are good; their labels are still as they were read."""

    path: str
    texts: list[str]
    pairs: list[str] | None
    labels: list[Any] | None  # None: no label column
    lines: list[int]
    sides: list[str] | None = None  # train, dev or test, where a column says so

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Sequence[int]) -> Rows:
        """The rows at these positions."""
        return replace(
            self,
            texts=[self.texts[row] for row in rows],
            pairs=None if self.pairs is None else [self.pairs[row] for row in rows],
            labels=None if self.labels is None else [self.labels[row] for row in rows],
            lines=[self.lines[row] for row in rows],
            sides=None if self.sides is None else [self.sides[row] for row in rows],
        )

    def by_side(self) -> dict[str, Rows]:
        """The rows of each side that has any; all of them train where no column says otherwise."""
        if self.sides is None:
            return {"train": self}
        found = {
            side: [row for row, word in enumerate(self.sides) if word == side] for side in ("train", "dev", "test")
        }
        return {side: self.take(rows) for side, rows in found.items() if rows}

    @property
    def is_labelled(self) -> bool:
        """Whether any row has a label."""
        return self.labels is not None and any(has_label(label) for label in self.labels)


class BadRows:
    """What happens to a bad row: the first is raised, or all are counted and reported."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._skipped: dict[str, list[BadData]] = {}

    def add(self, fault: Fault, path: str, line: int) -> None:
        """Refuse a row, or note that it is left out."""
        hint = SKIP_HINT if fault.hint is None else f"{fault.hint}; or leave bad rows out with `--on-bad-row skip`"
        error = BadData(fault.reason, hint, path=path, line=line)
        if self._policy == "refuse":
            raise error
        self.extend((error,))

    def extend(self, errors: Sequence[BadData]) -> None:
        """Note rows that were left out already."""
        for error in errors:
            self._skipped.setdefault(str(error.path), []).append(error)

    def notes(self) -> list[str]:
        """What was skipped, file by file, with the first few reasons."""
        notes = []
        for path, errors in self._skipped.items():
            errors = sorted(errors, key=lambda error: error.line or 0)
            shown = "; ".join(f"line {error.line}: {error.reason}" for error in errors[:3])
            more = f"; and {len(errors) - 3} more" if len(errors) > 3 else ""
            notes.append(f"skipped {len(errors)} bad row{'s' if len(errors) > 1 else ''} of {path}: {shown}{more}")
        return notes


def has_label(value: Any) -> bool:
    """Whether a label cell holds anything; an empty list does (no label applies)."""
    return as_list(value) is not None or not is_missing(value)


def read_rows(table: Table, columns: Columns, bad: BadRows) -> Rows:
    """The rows of a table with good texts; the others go to `bad`."""
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
            if sides is not None:
                sides[row] = _read_side(sides[row], str(columns.split))
        except Fault as fault:
            bad.add(fault, path, table.lines[row])
        else:
            kept.append(row)
    rows = Rows(path, texts, pairs, labels, table.lines, sides)
    return rows if len(kept) == len(rows) else rows.take(kept)


def is_side(value: Any) -> bool:
    """Whether a cell is one of the words for train, dev and test."""
    return isinstance(value, str) and value.strip().lower() in SIDES


def _read_side(value: Any, column: str) -> str:
    if not is_side(value):
        raise Fault(f"`{value}` in column `{column}` is no side", f"use one of: {', '.join(SIDES)}")
    return SIDES[value.strip().lower()]


def read_targets(rows: Rows, scheme: Scheme, bad: BadRows) -> tuple[Rows, np.ndarray]:
    """The rows with good labels, and their targets; the others go to `bad`."""
    kept, targets = [], []
    for row, value in enumerate(rows.labels or []):
        try:
            targets.append(scheme.read(value))
        except Fault as fault:
            bad.add(fault, rows.path, rows.lines[row])
        else:
            kept.append(row)
    return (rows if len(kept) == len(rows) else rows.take(kept)), scheme.collect(targets)


def drop_single_rows(rows: Rows, bad: BadRows) -> Rows:
    """The rows without those that are alone in their class, where whoever asks leaves out what cannot be judged."""
    names = [name_label(value) if as_list(value) is None and has_label(value) else None for value in rows.labels or []]
    counts = Counter(names)
    kept = []
    for row, name in enumerate(names):
        if name is not None and counts[name] == 1:
            hint = "add rows, merge it into another class, or remove it"
            bad.add(Fault(f"class `{name}` has one row, which cannot be split", hint), rows.path, rows.lines[row])
        else:
            kept.append(row)
    return rows if len(kept) == len(rows) else rows.take(kept)
