"""Answers as rows of a file: the input's own columns, then what the task says. CSV, TSV, JSONL, Parquet or .xlsx.

A file is written to a draft beside it and gets its name when it is whole. If the user stops the program, the windows
that were written whole stay, under a name that says so. In a table, one column holds what the task found: the label,
the labels (joined with `|`), the number, the entities or the text. JSONL keeps these apart and has every probability.

A spreadsheet runs a cell that begins like a formula, whoever wrote it. In CSV and TSV such a cell begins with `'`.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from inlay.cli.screen import printable
from inlay.cli.typed_files import CONVERTERS, check_converter, check_length, text_cell
from inlay.errors import BadConfig, InlayError
from inlay.serving import Answer, answer_cell, describe_answer
from inlay.store import telling_full_disk

Record = Mapping[str, Any]
# The beginning of a formula, wide letters too: some spreadsheets skip blanks before it. A TSV has no quotes of its own,
# so a spreadsheet takes off those of a cell.
_FORMULA = {
    ".csv": re.compile(r"\s*[=+\-@＝＋－＠]|[\t\r\n]"),
    ".tsv": re.compile(r'["\s]*[=+\-@＝＋－＠]|"*[\t\r\n]'),
}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_ADDED = ("label", "probability", "error")
SUFFIXES = (".csv", ".tsv", ".jsonl", *CONVERTERS)


class Writer:
    """Writes answers to one stream, in the format of a suffix.

    A table's columns are those of its first window; `left_out` names columns that came later (JSON lines may differ).
    `settled` has the number of rows in windows that were written whole, and the byte where they end.
    """

    def __init__(self, stream: TextIO, suffix: str, *, abstains: bool = False, keep_formulas: bool = False) -> None:
        self._stream, self._suffix = stream, suffix
        self._formula = None if keep_formulas else _FORMULA.get(suffix)
        self._added = (*_ADDED, "abstained") if abstains else _ADDED
        self._columns: tuple[str, ...] | None = None
        self.left_out: dict[str, None] = {}
        self.settled = (0, 0)
        self._num_lines = 0

    def write(self, records: Sequence[Record], answers: Sequence[Answer]) -> None:
        """Write a window of rows and flush it, so that a reader of the stream has it at once."""
        if self._suffix == ".jsonl":
            for record, answer in zip(records, answers, strict=True):
                self._put_line(_beside(record, describe_answer(answer)))
        else:
            self._write_cells(records, answers)
        self._stream.flush()
        end_bytes = self._stream.tell() if self._stream.seekable() else 0
        # Both numbers in one assignment: Ctrl-C may come between any two lines.
        self.settled = (self.settled[0] + len(records), end_bytes)

    def _write_cells(self, records: Sequence[Record], answers: Sequence[Answer]) -> None:
        if self._columns is None:
            self._columns = tuple(dict.fromkeys(name for record in records for name in record))
            self._put([*self._columns, *rename_added(self._columns, self._added)])
        for record, answer in zip(records, answers, strict=True):
            cells = _cells(answer) if self._suffix not in CONVERTERS else _typed_cells(answer)
            self._put([*(record.get(name) for name in self._columns), *cells[: len(self._added)]])
            if not record.keys() <= set(self._columns):
                self.left_out |= dict.fromkeys(name for name in record if name not in self._columns)

    def write_plain(self, records: Sequence[Record]) -> None:
        """Write records as they are, all at once."""
        if self._suffix == ".jsonl":
            for record in records:
                self._put_line(record)
            return
        columns = tuple(dict.fromkeys(name for record in records for name in record))
        self._put(columns)
        for record in records:
            self._put([record.get(name) for name in columns])

    def _put_line(self, record: Record | Sequence[Any]) -> None:
        self._stream.write(printable(json.dumps(record, ensure_ascii=False, default=str)) + "\n")

    def _put(self, values: Sequence[Any]) -> None:
        if self._suffix in CONVERTERS:
            self._num_lines += 1
            check_length(self._suffix, self._num_lines - 1)
            self._put_line(values)
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
        if self._formula is None or self._formula.match(cell) is None or _NUMBER.fullmatch(cell):
            return cell
        return f"'{cell}"


def rename_added(columns: Sequence[str], added: Sequence[str]) -> list[str]:
    """Return the names of added columns; a name that the input has too becomes `predicted_…`, so nothing is lost."""
    names = []
    for name in added:
        while name in columns:  # the input may be answers of an earlier time
            name = f"predicted_{name}"
        names.append(name)
    return names


@contextmanager
def open_rows(target: Path, *, abstains: bool = False, keep_formulas: bool = False) -> Iterator[Writer]:
    """Open a writer to a file that appears when the block ends without an error, and not otherwise.

    After Ctrl-C the rows answered so far are kept as `NAME.partial.SUFFIX`. `abstains` adds a column that says which
    rows were not sure enough to be answered; `keep_formulas` leaves cells as they are. Half a character is written out.
    """
    suffix = target.suffix.lower()
    if suffix not in SUFFIXES:
        known = ", ".join(SUFFIXES)
        raise BadConfig(f"`{target}` does not end in one of {known}", "name the output by its format")
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
    """Rename a draft, cut to its whole windows, so that its name says it is partial; return words for what was kept."""
    num_rows, end_bytes = writer.settled
    if not num_rows:
        return f"stopped before any row was answered: {target} was not written"
    partial = target.with_suffix(f".partial{target.suffix}")
    os.truncate(draft, end_bytes)
    _give_name(draft, partial, target.suffix.lower())
    return f"stopped: the first {num_rows:,} rows are in {partial}, and {target} was not written"


def _give_name(draft: Path, target: Path, suffix: str) -> None:
    """Give a draft its name; one of a typed format becomes such a file first, beside it."""
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
    """Return a record with its answer beside it. `task` is not renamed: both mean the task that was asked."""
    names = dict(zip(about, rename_added([name for name in record if name != "task"], list(about)), strict=True))
    return {**record, **{names[name]: value for name, value in about.items()}}


def _cells(answer: Answer) -> list[str]:
    if answer.error is not None:
        return ["", "", str(answer.error.message), ""]
    about = describe_answer(answer)
    probability = f"{about['probability']:.6f}" if "probability" in about else ""
    return [answer_cell(about), probability, "", str(bool(about.get("abstained"))).lower()]


def _typed_cells(answer: Answer) -> list[Any]:
    """Return what `_cells` says, with numbers and truth values as such, and None for nothing."""
    if answer.error is not None:
        return [None, None, str(answer.error.message), None]
    about = describe_answer(answer)
    found = about["value"] if "value" in about else answer_cell(about)
    return [found, about.get("probability"), None, bool(about.get("abstained"))]
