"""Spreadsheets (.xlsx) as streams of records: the first sheet that has rows, whose first row names the columns.

A workbook is a packed folder of XML that a few kB may blow up to many GB, or to millions of empty cells, styles and
rows. Its parts are refused by the size they say they have, which unpacking holds them to, and by their number of
elements, which are counted before any is built; its rows and cells are counted again while they are read. Formulas are
not computed: the values are those the last program that saved the file left there.
"""

from __future__ import annotations

import datetime
import itertools
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from xml.etree.ElementTree import ParseError

from inlay.archives import open_archive
from inlay.data.data_files import RawFile
from inlay.data.streams import Cells, Growth, Names, ReadOptions, Stream, with_header
from inlay.errors import BadData, Missing

MOST_SHARED_BYTES = 200_000_000
"""bytes of the texts that all cells share, which are in memory at once"""
FREE_ELEMENTS, MOST_ELEMENTS = 1_500_000, 20_000_000
"""tags that the parts of any workbook may have, and those of one that is large; between them one for each byte of the
file. An element takes a few microseconds and 300 bytes"""
_LETTERS_PER_ROW = 50  # a row, empty or not, costs as much as so many letters
USUAL_COLUMNS = 1000
"""columns that are read at their price: a cell far to the right of them brings all those before it"""
_MOST_ENTRIES_BYTES = 1_000_000  # of the list of parts; a workbook has tens of them
_UNREADABLE = (
    *(zipfile.BadZipFile, ParseError, KeyError, ValueError, TypeError, AttributeError, IndexError, OSError),
    *(NotImplementedError, RuntimeError, EOFError, AssertionError, OverflowError, zlib.error),
)
_HINT = "save it again as .xlsx, or as CSV"


def open_spreadsheet(file: RawFile, options: ReadOptions) -> Stream:
    """A workbook's first sheet with rows as a stream; a line is a row of the sheet."""
    try:
        import openpyxl
    except ImportError:
        raise Missing(
            "the library `openpyxl` is not installed", "pip install 'inlay[xlsx]', or save it as CSV"
        ) from None
    growth = Growth(file)
    _check_parts(file, growth)
    closing = ExitStack()
    content = closing.enter_context(file.open())  # a path would have to end in .xlsx
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of parts that hold no cells: rules, styles, pictures
            book = openpyxl.load_workbook(content, read_only=True, data_only=True, keep_links=False)
        closing.callback(book.close)
        sheets = list(book.worksheets)
    except _UNREADABLE as error:
        closing.close()
        raise _refuse(file, error) from None
    try:
        for sheet in sheets:
            sheet.reset_dimensions()  # what a file says of its own size need not be true
            rows = _read_cells(file, sheet, growth)
            first = next(rows, None)
            if first is not None:
                note = f"{file.title}: sheet `{sheet.title[:40]}` of {len(sheets)}"
                stream = with_header(file, _as_cells(closing, first, rows, options.names), options)
                return replace(stream, notes=(note, *stream.notes)) if len(sheets) > 1 else stream
        raise BadData("the workbook has no rows", "give a file with a header and rows", path=file.name)
    except BadData:
        closing.close()
        raise


def _check_parts(file: RawFile, growth: Growth) -> None:
    try:
        with file.open() as raw, open_archive(raw, _MOST_ENTRIES_BYTES) as archive:
            parts = archive.infolist()
            growth.check(sum(part.file_size for part in parts))
            _check_elements(file, sum(_count_tags(archive, part) for part in parts))
    except _UNREADABLE as error:
        raise _refuse(file, error) from None
    shared = max((part.file_size for part in parts if part.filename.endswith("sharedStrings.xml")), default=0)
    if shared > MOST_SHARED_BYTES:
        raise BadData(f"its cells share {shared:,} bytes of text", "save it as CSV", path=file.name)


def _count_tags(archive: zipfile.ZipFile, part: zipfile.ZipInfo) -> int:
    """Count the tags of a part; those of styles and names take eight times as long as those of cells."""
    is_cells = "sheet" in part.filename or "sharedStrings" in part.filename
    with archive.open(part) as content:
        return (1 if is_cells else 8) * sum(chunk.count(b"<") for chunk in iter(lambda: content.read(1 << 20), b""))


def _check_elements(file: RawFile, num_tags: int) -> None:
    most = min(MOST_ELEMENTS, max(FREE_ELEMENTS, file.size_bytes))
    if num_tags > most:
        raise BadData(f"it has {num_tags:,} tags, more than {most:,}", "save it as CSV", path=file.name)


def _read_cells(file: RawFile, sheet: Any, growth: Growth) -> Iterator[tuple[int, list[Any]]]:
    """Yield the rows that have anything in them, with their numbers."""
    rows = sheet.iter_rows(values_only=True)
    for line in itertools.count(1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of dates that are none
                row = next(rows, None)
        except _UNREADABLE as error:
            raise _refuse(file, error) from None
        if row is None:
            return
        growth.add(_LETTERS_PER_ROW)
        far = max(0, len(row) - USUAL_COLUMNS)
        growth.add(len(row) + 100 * far + sum(len(cell) for cell in row if isinstance(cell, str)))
        cells = [_read_cell(cell) for cell in row]
        while cells and cells[-1] is None:
            cells.pop()
        if cells:
            yield line, cells


def _as_cells(
    closing: ExitStack, first: tuple[int, list[Any]], rows: Iterator[tuple[int, list[Any]]], names: Names
) -> Cells:
    """Yield rows that are as wide as the columns there are; wider ones are left to be refused. Closes what is open."""
    try:
        line, header = first
        width = len(header) if names is None else len(names)
        yield line, _widen(header, width)
        for line, cells in rows:
            yield line, _widen(cells, width)
    finally:
        closing.close()


def _widen(cells: Sequence[Any], width: int) -> list[Any]:
    return [*cells, *[None] * (width - len(cells))]


def _read_cell(cell: Any) -> Any:
    """Return a cell as text, number or truth value; an empty one is None."""
    if isinstance(cell, str):
        return cell if cell.strip() else None
    if isinstance(cell, datetime.datetime | datetime.date | datetime.time):
        return cell.isoformat()
    return cell if cell is None or isinstance(cell, int | float) else str(cell)


def _refuse(file: RawFile, error: Exception) -> BadData:
    words = " ".join(str(error).split())[:100] or type(error).__name__
    return BadData(f"no readable workbook: {words}", _HINT, path=file.name)
