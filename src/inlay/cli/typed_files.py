"""Conversion of answers to Parquet and .xlsx, whose cells have types, once all rows are there.

Until then the rows are lines of JSON in a draft, whose first line has the column names. So a column gets the type that
all of its cells have; a column with mixed types becomes text, and so does what a format cannot hold. A conversion loses
no answers: half characters are written as escapes, as in text files.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from inlay.errors import BadData, Missing
from inlay.terminal import log

_ROWS_AT_ONCE = 10_000
MOST_SHEET_ROWS = 1_048_575
"""most rows under the header of a sheet"""
MOST_CELL_LETTERS = 32_767
_LARGEST_INTEGER = 2**63
_LARGEST_IN_SHEET = 2**53
"""integers beyond this lose digits in a workbook, whose numbers are floats"""
_NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


def check_converter(suffix: str) -> None:
    """Refuse a format whose library is not installed, before any work is done."""
    if suffix == ".xlsx" and importlib.util.find_spec("openpyxl") is None:
        hint = "pip install 'inlay[xlsx]', or write .csv or .parquet instead"
        raise Missing("the library `openpyxl` is not installed", hint)


def check_length(suffix: str, num_rows: int) -> None:
    """Refuse more rows than a file of this format can have, before the next row costs work."""
    if suffix == ".xlsx" and num_rows > MOST_SHEET_ROWS:
        reason = f"a sheet has at most {MOST_SHEET_ROWS:,} rows under its header"
        raise BadData(reason, "write .csv or .parquet instead")


def text_cell(value: Any) -> str:
    """Return a value as a cell of text."""
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else str(value)


def _read_draft(draft: Path) -> tuple[list[str], Iterator[list[Any]]]:
    def rows() -> Iterator[list[Any]]:
        with draft.open(encoding="utf8") as file:
            next(file, None)
            yield from map(json.loads, file)

    with draft.open(encoding="utf8") as file:
        first = file.readline()
    return (_number_names(json.loads(first)) if first else []), rows()


def _write_half_characters(text: str) -> str:
    """Return a text with its half characters (lone surrogates) written out, such as `\\ud800`."""
    return text if text.isascii() else text.encode("utf8", errors="backslashreplace").decode("utf8")


def _number_names(names: Sequence[str]) -> list[str]:
    """Return names without half characters; one that was there before gets a number."""
    unique: dict[str, None] = {}
    for name in map(_write_half_characters, names):
        free = (f"{name}.{number}" if number > 1 else name for number in itertools.count(1))
        unique[next(each for each in free if each not in unique)] = None
    return list(unique)


def write_parquet(draft: Path, target: Path) -> None:
    """Write a draft as Parquet, each column with the type that all of its cells have."""
    import pyarrow
    from pyarrow import parquet

    types = {
        "bool": pyarrow.bool_(),
        "int": pyarrow.int64(),
        "float": pyarrow.float64(),
        "strings": pyarrow.list_(pyarrow.string()),
        "string": pyarrow.string(),
    }
    names, rows = _read_draft(draft)
    kinds = _find_kinds(rows, len(names))
    schema = pyarrow.schema([(name, types[kind]) for name, kind in zip(names, kinds, strict=True)])
    _, rows = _read_draft(draft)
    with parquet.ParquetWriter(target, schema) as writer:
        while chunk := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            columns = zip(kinds, zip(*chunk, strict=True), strict=True)
            arrays = [
                pyarrow.array([_convert(cell, kind) for cell in cells], type=types[kind]) for kind, cells in columns
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def _find_kinds(rows: Iterator[list[Any]], num_columns: int) -> list[str]:
    """Return the kind of each column: that of all its cells, float for integers and floats, string for other mixes."""
    seen: list[set[str]] = [set() for _ in range(num_columns)]
    for row in rows:
        for kinds, cell in zip(seen, row, strict=True):
            if cell is not None:
                kinds.add(_kind_of(cell))
    found = []
    for kinds in seen:
        if len(kinds) == 1:
            found.append(next(iter(kinds)))
        else:
            found.append("float" if kinds == {"int", "float"} else "string")
    return found


def _kind_of(cell: Any) -> str:
    if isinstance(cell, bool):
        return "bool"
    if isinstance(cell, int):
        return "int" if -_LARGEST_INTEGER <= cell < _LARGEST_INTEGER else "string"
    if isinstance(cell, float):
        return "float"
    return "strings" if isinstance(cell, list) and all(isinstance(item, str) for item in cell) else "string"


def _convert(cell: Any, kind: str) -> Any:
    if cell is None:
        return None
    if kind == "float":
        return float(cell)
    if kind == "strings":
        return [_write_half_characters(item) for item in cell]
    return _write_half_characters(text_cell(cell)) if kind == "string" else cell


def write_workbook(draft: Path, target: Path) -> None:
    """Write a draft as a workbook with one sheet. Every text stays a text: none is run as a formula."""
    import openpyxl
    from openpyxl.cell import WriteOnlyCell

    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("rows")
    num_cut = 0

    def make_cells(values: Sequence[Any]) -> Iterator[Any]:
        nonlocal num_cut
        for value in values:
            if value is None or _is_sheet_number(value):
                yield value
                continue
            text = _NOT_IN_XML.sub("", _write_half_characters(text_cell(value)))
            num_cut += len(text) > MOST_CELL_LETTERS
            cell = WriteOnlyCell(sheet, value=text[:MOST_CELL_LETTERS])
            cell.data_type = "s"  # a text that begins with = would otherwise become a formula
            yield cell

    names, rows = _read_draft(draft)
    sheet.append(list(make_cells(names)))
    for row in rows:
        sheet.append(list(make_cells(row)))
    book.save(target)
    if num_cut:
        log(
            f"{num_cut:,} texts were cut to {MOST_CELL_LETTERS:,} letters, the limit of a cell; .csv keeps them whole",
            "yellow",
        )


def _is_sheet_number(value: Any) -> bool:
    """Return whether a workbook can hold a value as a number or truth value."""
    if isinstance(value, int):
        return abs(value) <= _LARGEST_IN_SHEET
    return isinstance(value, float) and math.isfinite(value)


CONVERTERS: dict[str, Callable[[Path, Path], None]] = {".parquet": write_parquet, ".xlsx": write_workbook}
"""suffix -> the function that converts a draft to this format"""
