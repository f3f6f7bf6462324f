"""Answers as rows of a file: the input's own columns, then what the task says. CSV, TSV, JSONL, Parquet or .xlsx.

A file is written as a draft beside its target and renamed when it is complete. If the user stops the program, the
completed windows are kept as `NAME.partial.SUFFIX`. In a table, one column holds the answer: the label, the labels
(joined with `|`), the number, the entities or the text. JSONL keeps these apart and has every probability.

A spreadsheet runs a cell that begins like a formula, whoever wrote it. So in CSV and TSV such a cell gets a `'` first.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from inlay.cli.screen import printable
from inlay.cli.typed_files import CONVERTERS, check_converter, check_length, text_cell
from inlay.errors import BadConfig, BadData, InlayError
from inlay.serving import AnswerLike, answer_cell, describe_answer
from inlay.store import telling_full_disk

Record = Mapping[str, Any]
# A formula begins with one of these, or with a wide, small or raised form of one.
_FORMULA_STARTS = "=+-@−"
# Letters that show nothing, beside blanks, controls, formats and marks.
_BLANK_LETTERS = "\u115f\u1160\u2800\u3164\uffa0"
# What some spreadsheets remove from the beginning of a cell, beside letters that show nothing: in our TSV quotes are
# plain characters.
_REMOVED = {".csv": "", ".tsv": '"'}
_NUMBER = re.compile(r"[+\-−]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
FREE_CELLS, MOST_BLANKS = 10_000_000, 20
"""cells that any table of answers may have, and the limit for each cell of the input beyond that"""
_ADDED = ("label", "probability", "error")
SUFFIXES = (".csv", ".tsv", ".jsonl", *CONVERTERS)


class Writer:
    """Writes answers to one stream, in the format of a suffix.

    A table's columns are those of its first window; `left_out` names later ones (the lines of JSONL may differ).
    `settled` has the number of rows in complete windows, and the byte where these end.
    """

    def __init__(self, stream: TextIO, suffix: str, *, abstains: bool = False, keep_formulas: bool = False) -> None:
        self._stream, self._suffix = stream, suffix
        self._removed = None if keep_formulas else _REMOVED.get(suffix)
        self._added = (*_ADDED, "abstained") if abstains else _ADDED
        self._columns: tuple[str, ...] | None = None
        self._known: set[str] = set()  # the same
        self.left_out: dict[str, None] = {}
        self.settled = (0, 0)
        self._num_lines = 0
        self._num_cells = self._num_given = 0  # of the table, and of the records in it

    def write(self, records: Sequence[Record], answers: Sequence[AnswerLike]) -> None:
        """Write a window of rows and flush it, so that a reader of the stream has it at once."""
        if self._suffix == ".jsonl":
            for record, answer in zip(records, answers, strict=True):
                self._write_line(_beside(record, describe_answer(answer)))
        else:
            self._write_cells(records, answers)
        self._stream.flush()
        end_bytes = self._stream.tell() if self._stream.seekable() else 0
        # Both numbers in one assignment: Ctrl-C may come between any two lines.
        self.settled = (self.settled[0] + len(records), end_bytes)

    def _write_cells(self, records: Sequence[Record], answers: Sequence[AnswerLike]) -> None:
        if self._columns is None:
            self._columns = tuple(dict.fromkeys(name for record in records for name in record))
            self._known = set(self._columns)
            self._put([*self._columns, *rename_added(self._columns, self._added)])
        self._count_cells(records, self._columns)
        for record, answer in zip(records, answers, strict=True):
            cells = _cells(answer, is_typed=self._suffix in CONVERTERS)
            self._put([*(record.get(name) for name in self._columns), *cells[: len(self._added)]])
            if not record.keys() <= self._known:
                self.left_out |= dict.fromkeys(name for name in record if name not in self._known)

    def _count_cells(self, records: Sequence[Record], columns: Sequence[str]) -> None:
        """Refuse a table that is nearly all blanks: rows of JSONL may each have keys of their own."""
        self._num_cells += len(records) * len(columns)
        self._num_given += sum(map(len, records))
        if self._num_cells > max(FREE_CELLS, MOST_BLANKS * self._num_given):
            reason = f"a table of these rows has {len(columns):,} columns, nearly all of them blank"
            raise BadData(reason, "write .jsonl instead, or leave out the columns that few rows have")

    def write_plain(self, records: Sequence[Record]) -> None:
        """Write all records, without answers."""
        if self._suffix == ".jsonl":
            for record in records:
                self._write_line(record)
            return
        columns = tuple(dict.fromkeys(name for record in records for name in record))
        self._put(columns)
        for record in records:
            self._put([record.get(name) for name in columns])

    def _write_line(self, record: Record | Sequence[Any]) -> None:
        self._stream.write(printable(json.dumps(record, ensure_ascii=False, default=str)) + "\n")

    def _put(self, values: Sequence[Any]) -> None:
        if self._suffix in CONVERTERS:
            self._num_lines += 1
            check_length(self._suffix, self._num_lines - 1)
            self._write_line(values)
            return
        cells = [self._tame(text_cell(value)) for value in values]
        if self._suffix == ".csv":
            # Python's writer leaves what only other readers split at unquoted: a lone carriage return, and `;`.
            if any(letter in cell for cell in cells for letter in "\r;\t"):
                csv.writer(self._stream, lineterminator="\n", quoting=csv.QUOTE_ALL).writerow(cells)
            else:
                csv.writer(self._stream, lineterminator="\n").writerow(cells)
        else:  # a TSV is raw, as GLUE's are: it has no quotes, so a cell cannot hold a tab or a line end
            self._stream.write("\t".join(" ".join(cell.splitlines()).replace("\t", " ") for cell in cells) + "\n")

    def _tame(self, cell: str) -> str:
        """Return a cell that no spreadsheet runs; a plain number such as -1.5 is none."""
        if self._removed is None or not begins_formula(cell, self._removed) or _NUMBER.fullmatch(cell):
            return cell
        return f"'{cell}"


def begins_formula(cell: str, removed: str = "") -> bool:
    """Return whether a spreadsheet may run a cell, because of its first letter that can be seen.

    A byte order mark or a zero-width space in front of a `=` is removed by some, as are the letters of `removed`. A tab
    or a line end may begin another cell.
    """
    for letter in cell:
        if letter in "\t\r\n":
            return True
        if letter in removed or letter in _BLANK_LETTERS or letter.isspace() or not letter.isprintable():
            continue
        if unicodedata.category(letter).startswith("M"):
            continue
        return unicodedata.normalize("NFKC", letter)[0] in _FORMULA_STARTS
    return False


def rename_added(columns: Sequence[str], added: Sequence[str]) -> list[str]:
    """Return the names of added columns; a name that the input has already becomes `predicted_…`."""
    names = []
    for name in added:
        while name in columns:  # the input may be the output of an earlier call
            name = f"predicted_{name}"
        names.append(name)
    return names


@contextmanager
def open_rows(target: Path, *, abstains: bool = False, keep_formulas: bool = False) -> Iterator[Writer]:
    """Open a writer to a file that appears only if the block ends without an error.

    After Ctrl-C the rows answered so far are kept as `NAME.partial.SUFFIX`. `abstains` adds a column that says which
    answers were withheld; `keep_formulas` leaves cells as they are. Half characters are written as escapes.
    """
    suffix = target.suffix.lower()
    if suffix not in SUFFIXES:
        known = ", ".join(SUFFIXES)
        raise BadConfig(f"`{target}` does not end in one of {known}", "give the output file one of these endings")
    if suffix in CONVERTERS:
        check_converter(suffix)
    draft = target.with_name(f".draft-{os.getpid()}-{target.name}")
    try:
        stream = draft.open("w", encoding="utf8", errors="backslashreplace", newline="")
    except OSError as error:
        raise InlayError(f"cannot write `{target}`: {error.strerror}", "choose another path") from None
    writer = Writer(stream, suffix, abstains=abstains, keep_formulas=keep_formulas)
    try:
        with telling_full_disk(target, 0), stream:
            yield writer
        with telling_full_disk(target, 0):
            _give_name(draft, target, suffix)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_keep_partial(writer, draft, target)) from None
    finally:
        draft.unlink(missing_ok=True)


def _keep_partial(writer: Writer, draft: Path, target: Path) -> str:
    """Keep the complete windows of a draft under a name that says it is partial; return a message about it."""
    num_rows, end_bytes = writer.settled
    if not num_rows:
        return f"stopped before any row was answered; {target} was not written"
    partial = target.with_suffix(f".partial{target.suffix}")
    os.truncate(draft, end_bytes)
    _give_name(draft, partial, target.suffix.lower())
    return f"stopped: the first {num_rows:,} rows are in {partial}, and {target} was not written"


def _give_name(draft: Path, target: Path, suffix: str) -> None:
    """Rename a draft to its target; for Parquet and .xlsx, convert it first."""
    if suffix not in CONVERTERS:
        os.replace(draft, target)
        return
    made = draft.with_name(f"{draft.name}.made")
    try:
        CONVERTERS[suffix](draft, made)
        os.replace(made, target)
    finally:
        made.unlink(missing_ok=True)


@contextmanager
def standard_rows() -> Iterator[Writer]:
    """Open a writer of JSON lines to stdout."""
    writer = Writer(sys.stdout, ".jsonl")
    try:
        yield writer
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped: the first {writer.settled[0]:,} rows were answered") from None


def _beside(record: Record, about: Record) -> dict[str, Any]:
    """Return a record with its answer added. `task` is not renamed: in both it is the task that was asked."""
    names = dict(zip(about, rename_added([name for name in record if name != "task"], list(about)), strict=True))
    return {**record, **{names[name]: value for name, value in about.items()}}


def _cells(answer: AnswerLike, *, is_typed: bool) -> list[Any]:
    """Return the added cells: answer, probability, error, abstained. Unless `is_typed`, they are texts."""
    if answer.error is not None:
        return [None, None, str(answer.error.message), None]
    about = describe_answer(answer)
    probability, abstained = about.get("probability"), bool(about.get("abstained"))
    if is_typed:
        return [about["value"] if "value" in about else answer_cell(about), probability, None, abstained]
    return [answer_cell(about), None if probability is None else f"{probability:.6f}", None, str(abstained).lower()]
