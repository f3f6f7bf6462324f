"""Spreadsheets (.xlsx) as streams of records: the first sheet with rows, whose first row names the columns.

A workbook is a zip of XML files, in which a few kB may unpack to many GB, or to millions of empty cells, styles and
rows. A part is refused if the size that it declares (which unpacking enforces) or its number of tags (counted before
any element is built) is too large, or if its XML is unsafe to parse (`xml_parts`); rows and cells are counted again
while they are read. Formulas are not computed: the
values are those that the last program to save the file left there.
"""

from __future__ import annotations

import datetime
import itertools
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from xml.etree.ElementTree import ParseError

from inlay.archives import open_archive
from inlay.data.data_files import RawFile
from inlay.data.streams import Cells, Names, ReadOptions, Stream, UnpackLimit, with_header
from inlay.data.xml_parts import UnsafeXML, scan_xml
from inlay.errors import BadData, Missing

MOST_SHARED_BYTES = 200_000_000
"""most bytes of the texts that cells share, which are all in memory at once"""
FREE_ELEMENTS, MOST_ELEMENTS = 1_500_000, 20_000_000
"""most tags in the parts of a small workbook, and of any; between them one for each byte of the file. An element takes
a few microseconds and 300 bytes"""
_LETTERS_PER_ROW = 50  # a row, empty or not, counts as so many characters
USUAL_COLUMNS = 1000
"""columns beyond these count a hundred times: a cell far to the right brings all empty cells before it"""
_MOST_ENTRIES_BYTES = 1_000_000  # most bytes of the list of parts; a workbook has tens of parts
_UNREADABLE = (
    *(zipfile.BadZipFile, ParseError, KeyError, ValueError, TypeError, AttributeError, IndexError, OSError),
    *(NotImplementedError, RuntimeError, EOFError, AssertionError, OverflowError, zlib.error),
)
_HINT = "save it again as .xlsx, or as CSV"


def open_spreadsheet(file: RawFile, options: ReadOptions) -> Stream:
    """Open a workbook's first sheet with rows as a stream; a line is a row of the sheet."""
    try:
        import openpyxl
    except ImportError:
        raise Missing(
            "the library `openpyxl` is not installed", "pip install 'inlay[xlsx]', or save it as CSV"
        ) from None
    limit = UnpackLimit(file)
    _check_parts(file, limit)
    closing = ExitStack()
    content = closing.enter_context(file.open())  # a path would have to end in .xlsx
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about parts without cells: rules, styles, pictures
            book = openpyxl.load_workbook(content, read_only=True, data_only=True, keep_links=False)
        closing.callback(book.close)
        sheets = list(book.worksheets)
    except _UNREADABLE as error:
        closing.close()
        raise _refuse(file, error) from None
    try:
        for sheet in sheets:
            sheet.reset_dimensions()  # the size that a file declares may be wrong
            rows = _read_cells(file, sheet, limit)
            first = next(rows, None)
            if first is not None:
                note = f"{file.title}: sheet `{sheet.title[:40]}` of {len(sheets)}"
                stream = with_header(file, _as_cells(closing, first, rows, options.names), options)
                return replace(stream, notes=(note, *stream.notes)) if len(sheets) > 1 else stream
        raise BadData("the workbook has no rows", "give a file with a header and rows", path=file.name)
    except BadData:
        closing.close()
        raise


def _check_parts(file: RawFile, limit: UnpackLimit) -> None:
    """Refuse a workbook whose parts are too large, have too many tags, or are unsafe to parse."""
    num_tags, most = 0, min(MOST_ELEMENTS, max(FREE_ELEMENTS, file.size_bytes))
    try:
        with file.open() as raw, open_archive(raw, _MOST_ENTRIES_BYTES) as archive:
            parts = archive.infolist()
            limit.check(sum(part.file_size for part in parts))
            for part in parts:
                # The elements of styles and names take eight times as long as those of cells.
                is_cells = "sheet" in part.filename or "sharedStrings" in part.filename
                with archive.open(part) as content:
                    for piece in scan_xml(content):
                        num_tags += piece.count(b"<") * (1 if is_cells else 8)
                        if num_tags > most:
                            raise BadData(f"it has more than {most:,} tags", "save it as CSV", path=file.name)
    except UnsafeXML as error:
        raise BadData(f"not a readable workbook: {error}", _HINT, path=file.name) from None
    except _UNREADABLE as error:
        raise _refuse(file, error) from None
    shared = max((part.file_size for part in parts if part.filename.endswith("sharedStrings.xml")), default=0)
    if shared > MOST_SHARED_BYTES:
        raise BadData(f"its cells share {shared:,} bytes of text", "save it as CSV", path=file.name)


def _read_cells(file: RawFile, sheet: Any, limit: UnpackLimit) -> Iterator[tuple[int, list[Any]]]:
    """Yield the rows that have anything in them, with their numbers."""
    rows = sheet.iter_rows(values_only=True)
    for line in itertools.count(1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about cells that are not valid dates
                row = next(rows, None)
        except _UNREADABLE as error:
            raise _refuse(file, error) from None
        if row is None:
            return
        limit.add(_LETTERS_PER_ROW)
        far = max(0, len(row) - USUAL_COLUMNS)
        limit.add(len(row) + 100 * far + sum(len(cell) for cell in row if isinstance(cell, str)))
        cells = [_read_cell(cell) for cell in row]
        while cells and cells[-1] is None:
            cells.pop()
        if cells:
            yield line, cells


def _as_cells(
    closing: ExitStack, first: tuple[int, list[Any]], rows: Iterator[tuple[int, list[Any]]], names: Names
) -> Cells:
    """Yield rows, filled up to the number of columns (wider rows are refused later), and close the file at the end."""
    width = len(first[1]) if names is None else len(names)
    try:
        for line, cells in itertools.chain([first], rows):
            yield line, [*cells, *[None] * (width - len(cells))]
    finally:
        closing.close()


def _read_cell(cell: Any) -> Any:
    """Return a cell as text, number or truth value; an empty one is None."""
    if isinstance(cell, str):
        return cell if cell.strip() else None
    if isinstance(cell, datetime.datetime | datetime.date | datetime.time):
        return cell.isoformat()
    return cell if cell is None or isinstance(cell, int | float) else str(cell)


def _refuse(file: RawFile, error: Exception) -> BadData:
    words = " ".join(str(error).split())[:100] or type(error).__name__
    return BadData(f"not a readable workbook: {words}", _HINT, path=file.name)
