"""Records of a file while it is read, one by one, each with its line, and bounds on what a file may become."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from inlay.data.columns import Header
from inlay.data.data_files import RawFile
from inlay.data.headers import PEEKED_ROWS, find_values, name_columns
from inlay.errors import BadData

SKIP_HINT = "mend the row, or leave bad rows out with `--on-bad-row skip`"
Names = tuple[str, ...] | None  # columns of a file without a header
Record = tuple[int, dict[str, Any] | BadData]  # the line, and the cells by column or the row's error
Cells: TypeAlias = Iterator[tuple[int, list[Any] | BadData]]  # the line, and the cells in order

FREE_LETTERS = 100_000_000
"""letters that any file may unpack to"""
MOST_COLUMNS = 10_000
MOST_GROWTH = 100
"""times its own size that a larger file may unpack to"""


@dataclass(frozen=True)
class ReadOptions:
    """The way a file's content is read, where it does not say so itself."""

    encoding: str = ""
    names: Names = None
    """the columns of a file that is known to have no header"""
    has_header: bool | None = None
    """whether the first row names the columns; None: find out"""
    roles: Collection[str] = field(default=())
    """the columns that were named: a row that has one of them is a header"""


@dataclass(frozen=True, eq=False)
class Stream:
    """A source while it is read: records one by one, and the findings about it so far."""

    header: Header  # without names where each record brings its own (JSONL)
    records: Iterator[Record]
    notes: tuple[str, ...] = ()


class Growth:
    """The size of what a file unpacks to: a few kB may be made to hold many GB."""

    def __init__(self, file: RawFile, unit: str = "letters", most: int | None = None) -> None:
        self._file, self._unit, self._seen = file, unit, 0
        own = max(FREE_LETTERS, MOST_GROWTH * file.size_bytes)
        self._most = own if most is None else min(own, most)

    def add(self, number: int) -> None:
        self._seen += number
        self.check(self._seen)

    def check(self, size: int) -> None:
        """Refuse this many letters or bytes, if the file is too small for them."""
        if size > self._most:
            reason = f"it unpacks to more than {self._most:,} {self._unit}, from {self._file.size_bytes:,} bytes"
            raise BadData(reason, "if they are meant, write the rows as CSV or JSONL, unpacked", path=self._file.name)


def count_letters(record: Mapping[str, Any]) -> int:
    """Return the letters of a record's cells, those of lists in them too."""
    return sum(_count_cell(cell) for cell in record.values())


def _count_cell(cell: Any) -> int:
    if isinstance(cell, str | bytes):
        return len(cell)
    if isinstance(cell, list | tuple):
        return sum(map(_count_cell, cell))
    return sum(map(_count_cell, cell.values())) if isinstance(cell, Mapping) else 1


def check_num_columns(path: str | Path, names: Collection[str], line: int | None = None) -> None:
    """Refuse more columns than any table of texts has."""
    if len(names) > MOST_COLUMNS:
        reason = f"{len(names):,} columns, but a table may have {MOST_COLUMNS:,}"
        raise BadData(reason, "keep the columns of the text and its label", path=path, line=line)


def with_header(file: RawFile, rows: Cells, options: ReadOptions) -> Stream:
    """Rows as records: the first names the columns if it is a header, and each must have as many fields."""
    names, line, notes = options.names, None, []
    if names is None:
        peeked, rows = _peek(rows)
        line, cells = peeked[0] if peeked else (1, [])
        if isinstance(cells, BadData):
            raise cells
        if not cells:
            raise BadData("the file is empty", "give a file with a header and rows", path=file.name)
        check_num_columns(file.name, cells, line)
        others = [list(map(_as_text, row)) for _, row in peeked[1:] if not isinstance(row, BadData)]
        first = list(map(_as_text, cells))
        why = None if options.has_header else find_values(first, others, options.roles)
        if options.has_header is False or (options.has_header is None and why is not None):
            names, line = name_columns(first, others), None
            notes.append(_describe_no_header(file, names, why if options.has_header is None else None))
        else:
            next(rows)
            names, renamed = _number_repeated(first)
            if renamed:
                notes.append(f"{file.title}: repeated column names, read as {', '.join(renamed)}")
    return Stream(Header(file.name, names, line), _check_widths(file, rows, names), tuple(notes))


def _peek(rows: Cells) -> tuple[list[tuple[int, list[Any] | BadData]], Cells]:
    """Return the first rows, and all rows. An error that stops the reading comes where it stands among them."""
    peeked: list[tuple[int, list[Any] | BadData]] = []
    stopped: BadData | None = None
    try:
        peeked += itertools.islice(rows, PEEKED_ROWS)
    except BadData as error:
        if not peeked:
            raise
        stopped = error.with_traceback(None)  # its frames would keep the file open

    def again() -> Cells:
        yield from peeked
        if stopped is not None:
            raise stopped
        yield from rows

    return peeked, again()


def _as_text(cell: Any) -> str:
    return "" if cell is None else str(cell)


def _describe_no_header(file: RawFile, names: tuple[str, ...], why: str | None) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:5]) + (", …" if len(names) > 5 else "")
    if why is None:
        return f"{file.title}: no header; its columns are called {shown}"
    return f"{file.title}: no header found ({why}); its columns are called {shown}; if it has one, say `--header`"


def _number_repeated(cells: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return column names that are all different, and those that were changed for it."""
    seen: dict[str, int] = {}
    unique, renamed = [], []
    for cell in map(str.strip, cells):
        seen[cell] = seen.get(cell, 0) + 1
        unique.append(cell if seen[cell] == 1 else f"{cell}.{seen[cell]}")
        if seen[cell] > 1:
            renamed.append(f"`{unique[-1]}`")
    return tuple(unique), renamed


def _check_widths(file: RawFile, rows: Cells, names: tuple[str, ...]) -> Iterator[Record]:
    for line, row in rows:
        if isinstance(row, BadData):
            yield line, row
        elif len(row) != len(names):
            reason = f"ragged row: {len(row)} fields, but there are {len(names)} columns"
            hint = SKIP_HINT
            if file.suffix != ".csv":
                hint += "; quotes mean nothing in a TSV: if its fields are quoted, name it .csv"
            yield line, BadData(reason, hint, path=file.name, line=line)
        else:
            yield line, dict(zip(names, row, strict=True))
