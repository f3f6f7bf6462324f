"""The checked rows of a table: its shape is turned into plain columns, texts and labels are read, bad rows counted.

Tables with other columns than a text and a label (words with tags, texts with spans, questions with contexts) are
recognised by their columns, and turned into the plain columns `text`, `pair` and `label`. So everything that follows
(bad rows, splits, notes, digests) is the same for every kind of task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from inlay.data.columns import (
    SIDES,
    Columns,
    Fault,
    as_list,
    by_number,
    find_fault,
    find_name,
    is_missing,
    list_columns,
    name_label,
    read_text,
)
from inlay.data.kinds import KINDS, Scheme, find_kind
from inlay.data.sources import Table
from inlay.data.squad import read_answers
from inlay.data.streams import SKIP_HINT
from inlay.data.tags import Tagged, join_words, split_words, tag_words, to_iob2
from inlay.errors import BadData
from inlay.settings import DataConfig

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


_WORDS = ("tokens", "words")
_TAGS = ("tags", "ner_tags", "labels", "ner", "tag", "pos_tags", "label")
_SPANS = ("spans", "entities")
_ANSWERS = ("answers", "answer")
_STARTS = ("answer_start", "start")

Cells = tuple[Any, ...]
_ABSENT = object()


@dataclass(frozen=True)
class RowShape:
    """An entry of the table: which columns make a shape, and how a row's cells become text, pair and label."""

    roles: Mapping[str, Sequence[str]]
    """role -> the names that its column may have; for text, pair and label the settings may give another name"""
    convert: Callable[..., Cells]
    """counts of changes to report, and cells by role -> text, pair, label"""
    listed: str
    """the role whose cells are lists; it distinguishes this shape from others with columns of the same names"""
    optional: tuple[str, ...] = ()
    """roles that may be missing; if one is there, the table has this shape"""
    has_objects: bool = False
    """whether those lists hold objects; in a column with another name, lists of texts are labels"""


def _convert_tags(counts: Counter[str], text: Any, label: Any = None) -> Cells:
    tokens, tags = _as_words(text, "words"), None if label is None else _as_words(label, "tags")
    joined, words = join_words(tokens)
    if tags is None:
        return joined, None, None
    if len(tags) != len(tokens):
        raise Fault(f"{len(tokens)} words, but {len(tags)} tags", "give every word one tag")
    tags, was_changed = to_iob2(tags)
    counts["sentences whose tags were not IOB2 (IOB1, IOBES or BILOU) were converted to it"] += was_changed
    return joined, None, _place(words, tags)


def _convert_spans(counts: Counter[str], text: Any, label: Any = None) -> Cells:
    if not isinstance(text, str):
        raise Fault("the text is not a text", 'write {"text": "…", "spans": [{"start": 0, "end": 4, "label": "PER"}]}')
    if label is None:
        return text, None, None
    try:
        spans = sorted((int(span["start"]), int(span["end"]), str(span["label"])) for span in label)
    except (TypeError, KeyError, ValueError, OverflowError):
        raise Fault("a span lacks start, end or label", 'write {"start": 0, "end": 4, "label": "PER"}') from None
    for start, end, _ in spans:
        if not 0 <= start < end <= len(text) or not text[start:end].strip():
            raise Fault(f"the span {start} to {end} is not in its text", f"the text has {len(text)} characters")
    words = split_words(text)
    try:
        tags, num_widened = tag_words(words, spans)
    except ValueError as error:
        raise Fault(str(error), "spans must not overlap") from None
    counts["spans that begin or end inside a word were widened to whole words"] += num_widened
    return text, None, _place(words, tags)


def _convert_question(counts: Counter[str], text: Any, pair: Any, label: Any = _ABSENT, start: Any = None) -> Cells:
    if label is _ABSENT:
        return text, pair, None
    try:
        golds, was_searched = read_answers(label, start, pair if isinstance(pair, str) else "")
    except ValueError as error:
        raise Fault(str(error), "an answer is a part of its context, letter for letter") from None
    except (TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise Fault("the answers cannot be read", 'write [{"text": "…", "answer_start": 12}]') from None
    counts["answers without a place were taken where they first stand in the context"] += was_searched
    return text, pair, golds


SHAPES = {
    "words": RowShape({"text": _WORDS, "label": _TAGS}, _convert_tags, listed="text"),
    "spans": RowShape(
        {"text": ("text", "sentence"), "label": _SPANS}, _convert_spans, listed="label", has_objects=True
    ),
    "questions": RowShape(
        {"text": ("question",), "pair": ("context",), "label": _ANSWERS, "start": _STARTS},
        _convert_question,
        listed="label",
        optional=("start",),
    ),
}
"""The shapes of tables, by the name that `Kind.shapes` uses."""


def shape_table(table: Table, config: DataConfig, *, labelled: bool = True) -> Table:
    """Turn a table with the shape of a kind of task into plain columns; return any other table as it is."""
    config = by_number(config, table.header.names)
    kinds = KINDS if config.kind == "auto" else {config.kind: find_kind(config.kind)}
    candidates = [(name, SHAPES[shape]) for name, kind in kinds.items() for shape in kind.shapes]
    for kind, shape in candidates:
        places = _find_places(shape, table, config, labelled=labelled)
        if places is not None and _is_told(shape, table, places, has_rivals=len(candidates) > 1):
            return replace(_convert(table, shape, places, config), kind=kind, has_pairs="pair" in shape.roles)
    if config.kind == "auto" or not candidates:
        return table
    wanted = " or ".join(
        ", ".join(f"`{names[0]}`" for role, names in shape.roles.items() if role not in shape.optional)
        for _, shape in candidates
    )
    hint = f"it needs {wanted}; {list_columns(table.header)}"
    raise BadData(f"no columns of a `{config.kind}` task", hint, path=table.header.path, line=table.header.line)


def _find_places(shape: RowShape, table: Table, config: DataConfig, *, labelled: bool) -> dict[str, str] | None:
    """Return the column of each role; None if the table lacks a column of this shape."""
    places = {}
    for role, names in shape.roles.items():
        given = getattr(config, role, None)
        found = given if given in table.header.names else find_name(table.header.names, names)
        if found is not None:
            places[role] = found
        elif role not in shape.optional and (labelled or role != "label"):
            return None
    return places


def _is_told(shape: RowShape, table: Table, places: Mapping[str, str], *, has_rivals: bool) -> bool:
    """Return whether columns with these names are really of this shape, and not a text and its label."""
    if not has_rivals or any(role in places for role in shape.optional) or shape.listed not in places:
        return True
    cells = table.column(places[shape.listed])[:100]
    if shape.has_objects and places[shape.listed].lower() not in shape.roles[shape.listed]:
        return any(isinstance(item, Mapping) for cell in cells for item in as_list(cell) or ())
    return any(as_list(cell) is not None or isinstance(cell, Mapping) for cell in cells)


def _convert(table: Table, shape: RowShape, places: Mapping[str, str], config: DataConfig) -> Table:
    """Turn a table of this shape into plain columns; bad rows are refused or left out."""
    counts = Counter[str]()
    columns = {role: table.column(name) for role, name in places.items()}
    others = [name for name in table.header.names if name not in places.values() and name == (config.split or "split")]
    rows, lines, faults = [], [], list(table.faults)
    for row, line in enumerate(table.lines):
        try:
            cells = shape.convert(counts, **{role: column[row] for role, column in columns.items()})
        except Fault as fault:
            error = BadData(fault.reason, f"{fault.hint}; {SKIP_HINT}", path=table.header.path, line=line)
            if config.on_bad_row == "refuse":
                raise error from None
            faults.append(error)
            continue
        rows.append([*cells, *(table.rows[row][table.header.names.index(name)] for name in others)])
        lines.append(line)
    if not rows:
        raise BadData("no usable rows", "see what is wrong with them by `--on-bad-row refuse`", path=table.header.path)
    header = table.header._replace(names=("text", "pair", "label", *others))
    shown = "columns: " + ", ".join(f"{role} `{name}`" for role, name in places.items())
    notes = (*table.notes, shown, *(f"{number:,} {what}" for what, number in counts.items() if number))
    return replace(table, header=header, rows=rows, lines=lines, faults=tuple(faults), notes=notes)


def _as_words(cell: Any, what: str) -> list[str]:
    items = as_list(cell)
    if items is None or not all(isinstance(item, str) for item in items):
        raise Fault(f"the {what} are not a list of texts", 'write {"tokens": ["In", "Oslo"], "tags": ["O", "B-LOC"]}')
    if what == "words" and not all(item.strip() for item in items):
        raise Fault("a word is empty", "remove it and its tag")
    return items


def _place(words: Iterable[tuple[int, int]], tags: Iterable[str]) -> list[Tagged]:
    return [(start, end, tag) for (start, end), tag in zip(words, tags, strict=True)]
