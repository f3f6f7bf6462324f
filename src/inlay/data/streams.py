"""Records of a file while it is read, one by one, each with its line; and limits on what a file may unpack to.

The first row of a table is taken for a header unless something speaks against it: a cell that is repeated below it, a
number above numbers, or a sentence in a file of one column. A name that columns of data sets usually have settles it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from inlay.data.columns import LABEL_NAMES, PAIR_NAMES, SPLIT_NAMES, TEXT_NAMES, Header, read_number
from inlay.data.data_files import RawFile
from inlay.errors import BadData

SKIP_HINT = "fix the row, or leave bad rows out with `--on-bad-row skip`"
Names = tuple[str, ...] | None  # the columns of a file without a header
Record = tuple[int, dict[str, Any] | BadData]  # the line, and the cells by column or the row's error
Cells: TypeAlias = Iterator[tuple[int, list[Any] | BadData]]  # the line, and the cells in order

FREE_LETTERS = 100_000_000
"""characters that any file may unpack to"""
MOST_COLUMNS = 10_000
MOST_GROWTH = 100
"""how many times its own size a larger file may unpack to"""
PEEKED_ROWS = 200
"""rows that are looked at to find a header"""
_OTHER_NAMES = (
    *("task", "id", "index", "idx", "words", "word", "tokens", "tags", "tag", "ner_tags", "spans", "entities"),
    *("answers", "answer", "context", "answer_start", "name", "date", "lang", "language", "source", "author", "user"),
)
KNOWN_NAMES = frozenset(
    (*TEXT_NAMES, *LABEL_NAMES, *SPLIT_NAMES, *_OTHER_NAMES, *(name for pair in PAIR_NAMES for name in pair))
)
_FEWEST_WORDS = 4  # a first row of one column with so many words is a text, not a name
_LONGER = 2  # texts are at least so many times as long as labels


@dataclass(frozen=True)
class ReadOptions:
    """How a file's content is read, as far as the file itself does not show it."""

    encoding: str = ""
    names: Names = None
    """the columns of a file that is known to have no header"""
    has_header: bool | None = None
    """whether the first row names the columns; None: find out"""
    roles: Collection[str] = field(default=())
    """the columns that the user named: a row with one of them is a header"""


@dataclass(frozen=True, eq=False)
class Stream:
    """A source while it is read: records one by one, and notes on what was found so far."""

    header: Header  # without names where each record brings its own (JSONL)
    records: Iterator[Record]
    notes: tuple[str, ...] = ()


class UnpackLimit:
    """The size of what a file unpacks to, and its limit: a few kB may be made to unpack to many GB."""

    def __init__(self, file: RawFile, unit: str = "characters", most: int | None = None) -> None:
        self._file, self._unit, self._seen = file, unit, 0
        own = max(FREE_LETTERS, MOST_GROWTH * file.size_bytes)
        self._most = own if most is None else min(own, most)

    def add(self, number: int) -> None:
        """Count more characters or bytes; refuse too many in all."""
        self._seen += number
        self.check(self._seen)

    def check(self, size: int) -> None:
        """Refuse this many characters or bytes if they are too many for the size of the file."""
        if size > self._most:
            reason = f"it unpacks to more than {self._most:,} {self._unit}, from {self._file.size_bytes:,} bytes"
            raise BadData(reason, "if they are meant, write the rows as CSV or JSONL, unpacked", path=self._file.name)


def count_letters(record: Mapping[str, Any]) -> int:
    """Count the characters of a record's cells, also those of lists in them."""
    return sum(_count_cell(cell) for cell in record.values())


def _count_cell(cell: Any) -> int:
    if isinstance(cell, str | bytes):
        return len(cell)
    if isinstance(cell, list | tuple):
        return sum(map(_count_cell, cell))
    return sum(map(_count_cell, cell.values())) if isinstance(cell, Mapping) else 1


def check_num_columns(path: str | Path, names: Collection[str], line: int | None = None) -> None:
    """Refuse more columns than a table of texts can have."""
    if len(names) > MOST_COLUMNS:
        reason = f"{len(names):,} columns, but a table may have {MOST_COLUMNS:,}"
        raise BadData(reason, "keep the columns of the text and its label", path=path, line=line)


def with_header(file: RawFile, rows: Cells, options: ReadOptions) -> Stream:
    """Turn rows into records: a header names the columns, and each row must have as many fields.

    Without a header the columns get names of ours; without `options.has_header` it is found out whether there is one.
    """
    names, line, notes = options.names, None, []
    if names is None:
        # 1. look at the first rows
        peeked, rows = _peek(rows)
        line, cells = peeked[0] if peeked else (1, [])
        if isinstance(cells, BadData):
            raise cells
        if not cells:
            raise BadData("the file is empty", "give a file with a header and rows", path=file.name)
        check_num_columns(file.name, cells, line)
        others = [list(map(_as_text, row)) for _, row in peeked[1:] if not isinstance(row, BadData)]
        first = list(map(_as_text, cells))
        # 2. name the columns by the first row, unless it holds values
        why = None if options.has_header is not None else find_values(first, others, options.roles)
        if options.has_header is False or why is not None:
            names, line = name_columns(first, others), None
            found = "no header" if why is None else f"no header found ({why})"
            shown = ", ".join(f"`{name}`" for name in names[:5]) + (", …" if len(names) > 5 else "")
            correct = "" if why is None else "; if it has one, use `--header`"
            notes.append(f"{file.title}: {found}; its columns are called {shown}{correct}")
        else:
            next(rows)
            names, renamed = _number_repeated(first)
            if renamed:
                notes.append(f"{file.title}: repeated column names, read as {', '.join(renamed)}")
    return Stream(Header(file.name, names, line), _check_widths(file, rows, names), tuple(notes))


def _peek(rows: Cells) -> tuple[list[tuple[int, list[Any] | BadData]], Cells]:
    """Return the first rows, and all rows. An error while reading the first rows is raised at its place in all rows."""
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


def _number_repeated(cells: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """Number repeated column names; return all names, and those that were changed."""
    seen: dict[str, int] = {}
    unique, renamed = [], []
    for cell in map(str.strip, cells):
        seen[cell] = seen.get(cell, 0) + 1
        unique.append(cell if seen[cell] == 1 else f"{cell}.{seen[cell]}")
        if seen[cell] > 1:
            renamed.append(f"`{unique[-1]}`")
    return tuple(unique), renamed


def _check_widths(file: RawFile, rows: Cells, names: tuple[str, ...]) -> Iterator[Record]:
    """Yield rows as records; one with more or fewer fields than there are columns is an error."""
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


def find_values(first: Sequence[str], rows: Sequence[Sequence[str]], roles: Collection[str] = ()) -> str | None:
    """Return why the first row seems to hold values, not names, in words; None if it does not."""
    cells = [cell.strip() for cell in first]
    if any(cell.lower() in KNOWN_NAMES or cell in roles for cell in cells):
        return None
    if cells == [str(number) for number in range(len(cells))]:  # how pandas writes columns without names
        return None
    columns = [[row[place].strip() for row in rows if len(row) == len(cells)] for place in range(len(cells))]
    for cell, column in zip(cells, columns, strict=True):
        if cell and cell in column:
            return f"`{cell[:30]}` is in the first row and again below it"
    for cell, column in zip(cells, columns, strict=True):
        filled = [value for value in column if value]
        if filled and read_number(cell) is not None and all(read_number(value) is not None for value in filled):
            return f"`{cell[:30]}` in the first row is a number, as are those below it"
    if len(cells) == 1 and len(cells[0].split()) >= _FEWEST_WORDS:
        return "its first row is a text"
    return None


def name_columns(first: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Name the columns of a table without a header: `text` and `label` if one of two is far longer, else by number."""
    if len(first) == 1:
        return ("text",)
    if len(first) == 2:
        table = [first, *(row for row in rows if len(row) == 2)]
        left, right = (sum(len(row[place]) for row in table) for place in (0, 1))
        if max(left, right) >= _LONGER * min(left, right):
            return ("text", "label") if left > right else ("label", "text")
    return tuple(f"column{number}" for number in range(1, len(first) + 1))
