"""Readers of files by their suffix: a stream of records, each with the line it stands on.

Text files are read with exact line numbers and in constant memory. The whole file is scanned once before the first row,
to find its encoding and to refuse bytes that no text has, so readers downstream meet neither. A CSV is quoted, and its
delimiter (`,`, `;` or tab) is found from the header. A TSV is raw, as GLUE's are: quotes are letters, unless every cell
of the header is quoted.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from inlay.data.columns import Header
from inlay.data.kinds import KINDS
from inlay.data.squad import is_squad, read_squad
from inlay.errors import BadConfig, BadData, Missing

SKIP_HINT = "mend the row, or leave bad rows out with `--on-bad-row skip`"
Names = tuple[str, ...] | None  # columns of a file without a header
Record = tuple[int, dict[str, Any] | BadData]  # the line, and the cells by column or the row's error
Cells = Iterator[tuple[int, list[str] | BadData]]  # the line, and the cells in order


@dataclass(frozen=True, eq=False)
class Stream:
    """A source while it is read: records one by one, and the findings about it so far."""

    header: Header  # without names where each record brings its own (JSONL)
    records: Iterator[Record]
    notes: tuple[str, ...] = ()


def open_file(
    path: str | Path, encoding: str | None = None, names: Names = None, *, kind: str = "auto", suffix: str | None = None
) -> Stream:
    """A file as a stream of records, read by the reader of its suffix, or of `suffix` where its name has none.

    `names` are those of a file without a header. Plain text of a `tag` task is columns of words, whatever its suffix.
    """
    path = Path(path)
    if not path.is_file():
        raise _missing_file(path)
    reader = READERS.get(suffix or path.suffix.lower())
    if kind in KINDS and KINDS[kind].reads_conll and reader in (None, _open_txt, _open_tsv):
        reader = _open_conll
    if reader is None:
        known = ", ".join(READERS)
        raise BadData(f"unknown file type `{path.suffix}`", f"give it the suffix of its format: {known}", path=path)
    if path.stat().st_size == 0:
        raise BadData("the file is empty", "give a file with rows", path=path)
    if reader in (_open_parquet, _open_xlsx):  # no text
        return reader(path, "", names)
    found = find_encoding(path, encoding)
    stream = reader(path, found.name, names)
    return replace(stream, notes=(*found.notes, *stream.notes))


def _missing_file(path: Path) -> Missing:
    if path.is_dir():
        return Missing(f"`{path}` is a folder, not a file", "name a file in it")
    if path.exists():
        return Missing(
            f"`{path}` is a pipe or a device, not a file",
            "write it to a file first, or use `inlay predict` with lines on stdin",
        )
    near = {item.stem: item.name for item in path.parent.iterdir()} if path.parent.is_dir() else {}
    close = difflib.get_close_matches(path.stem, near, n=1)  # the same suffix alone is not a likeness
    hint = (
        f"did you mean `{path.parent / near[close[0]]}`?"
        if close
        else "give a file, a folder, glue/NAME, extra/NAME or hub:NAME"
    )
    return Missing(f"no file or folder `{path}`", hint)


def _open_csv(path: Path, encoding: str, names: Names) -> Stream:
    csv.field_size_limit(2**31 - 1)  # the default refuses texts over 128 KiB
    # The delimiter that gives the header the most columns; a comma where none does.
    line = _first_line(path, encoding)
    delimiter = max(",;\t", key=lambda delimiter: len(next(csv.reader([line], delimiter=delimiter), [])))
    stream = with_header(path, _split_quoted(path, encoding, delimiter), names)
    if delimiter == ",":
        return stream
    shown = "tab" if delimiter == "\t" else f"`{delimiter}`"
    return replace(stream, notes=(f"{path.name}: delimiter {shown}", *stream.notes))


def _open_tsv(path: Path, encoding: str, names: Names) -> Stream:
    cells = _first_line(path, encoding).split("\t")
    is_quoted = all(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in cells)
    raw = ((number, line.split("\t")) for number, line in _read_lines(path, encoding) if line)
    return with_header(path, _split_quoted(path, encoding, "\t") if is_quoted else raw, names)


def _open_jsonl(path: Path, encoding: str, names: Names) -> Stream:
    return Stream(Header(str(path), (), None), _parse_json(path, encoding))


def _open_json(path: Path, encoding: str, names: Names) -> Stream:
    """SQuAD's own document, or JSON lines."""
    with path.open(encoding=encoding) as file:
        if not is_squad(file.read(4096)):
            return _open_jsonl(path, encoding, names)
        file.seek(0)
        try:
            records = list(read_squad(json.load(file)))
            growth = Growth(path)  # a context is in the file once, and in the rows once for each of its questions
            for record in records:
                growth.add(count_letters(record))
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            reason = f"no SQuAD document: {type(error).__name__}: {error}"
            raise BadData(reason, "write it as SQuAD's own files are, or as JSON lines", path=path) from None
    note = f"{path.name}: SQuAD's format; a line is a question's number"
    return Stream(Header(str(path), (), None), enumerate(records, start=1), (note,))


def _open_conll(path: Path, encoding: str, names: Names) -> Stream:
    """Columns of words: the first is the word, the last its tag, a blank line ends the sentence."""
    return Stream(Header(str(path), (), None), _read_sentences(path, encoding))


def _read_sentences(path: Path, encoding: str) -> Iterator[Record]:
    sentence: list[list[str]] = []
    start, fault = 1, None
    for number, line in itertools.chain(_read_lines(path, encoding), [(0, "")]):
        fields = line.split("\t") if "\t" in line else line.split()
        if line.strip() and fields[0] != "-DOCSTART-":
            if not sentence and re.match(r"# [\w.-]+ = ", line):
                continue  # CoNLL-U says so where a sentence comes from
            start = start if sentence else number
            if fault is None and (len(fields) < 2 or len(fields) != len((sentence or [fields])[0])):
                reason = f"{len(fields)} columns where {max(2, len((sentence or [fields])[0]))} should be"
                hint = f"write word and tag in each line, a blank line after a sentence; {SKIP_HINT}"
                fault = BadData(reason, hint, path=path, line=number)
            if fault is None and " " in fields[-1].strip():
                hint = "a tag is one word, such as B-PER; a table of texts and labels is for `--kind classify`"
                fault = BadData(f"the tag `{fields[-1][:40]}` has spaces in it", hint, path=path, line=number)
            sentence.append(fields)
        elif sentence:
            if fault is None:
                columns = [list(column) for column in zip(*sentence, strict=True)]
                names = ["tokens", *(f"column{number}" for number in range(2, len(columns))), "tags"]
                yield start, {"text": " ".join(columns[0]), **dict(zip(names, columns, strict=True))}
            else:
                yield start, fault
            sentence, fault = [], None


def _open_txt(path: Path, encoding: str, names: Names) -> Stream:
    records = ((number, {"text": line}) for number, line in _read_lines(path, encoding))
    return Stream(Header(str(path), ("text",), None), records)


def _open_parquet(path: Path, encoding: str, names: Names) -> Stream:
    import pyarrow
    from pyarrow import parquet

    unreadable = (pyarrow.ArrowException, OSError, ValueError, OverflowError, NotImplementedError)

    def refuse(error: Exception) -> BadData:
        return BadData(f"no readable Parquet file: {error}", "write it again, or use CSV or JSONL", path=path)

    try:
        file = parquet.ParquetFile(path)
        # Values that repeat are kept once until they are asked for, a few rows at a time.
        leaves = [file.schema.column(index) for index in range(len(file.schema))]
        texts = [leaf.path for leaf in leaves if leaf.logical_type.type == "STRING"]
        file.close()
        file = parquet.ParquetFile(path, read_dictionary=texts)
    except unreadable as error:
        raise refuse(error) from None
    growth = Growth(path)
    groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
    for group in groups:
        growth.check(
            max((group.column(index).total_uncompressed_size for index in range(group.num_columns)), default=0)
        )

    def records() -> Iterator[dict[str, Any]]:
        try:
            with file:
                for batch in file.iter_batches(batch_size=1024):
                    num_rows = max(1, BATCH_BYTES // max(1, batch.nbytes))
                    for start in range(0, len(batch), num_rows):
                        columns = [_unpack(column.slice(start, num_rows)) for column in batch.columns]
                        for record in pyarrow.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist():
                            growth.add(count_letters(record))
                            yield record
        except unreadable as error:
            raise refuse(error) from None

    names = tuple(file.schema_arrow.names)
    check_num_columns(path, names)
    return Stream(Header(str(path), names, None), enumerate(records(), start=1))


def _open_xlsx(path: Path, encoding: str, names: Names) -> Stream:
    from inlay.data.spreadsheets import open_spreadsheet

    return open_spreadsheet(path, names)


def _unpack(column: Any) -> Any:
    return column.dictionary_decode() if hasattr(column, "dictionary_decode") else column


BATCH_BYTES = 64_000_000
"""bytes that rows of a Parquet file become at once at most, if the largest value is in each of them"""
FREE_LETTERS = 100_000_000
"""letters that any file may unpack to"""
MOST_COLUMNS = 10_000
MOST_GROWTH = 100
"""times its own size that a larger file may unpack to"""


class Growth:
    """The size of the rows of a file that says some things once: a few kB may be made to hold many GB."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, 0
        self._most = max(FREE_LETTERS, MOST_GROWTH * path.stat().st_size)

    def add(self, num_letters: int) -> None:
        self._seen += num_letters
        self.check(self._seen)

    def check(self, size: int) -> None:
        """Refuse this many letters or bytes, if the file is too small for them."""
        if size > self._most:
            reason = f"it unpacks to more than {self._most:,} letters, from {self._path.stat().st_size:,} bytes"
            raise BadData(reason, "if they are meant, write the rows as CSV or JSONL", path=self._path)


def count_letters(record: Mapping[str, Any]) -> int:
    """Return the letters of a record's cells, those of lists in them too."""
    return sum(_count_cell(cell) for cell in record.values())


def _count_cell(cell: Any) -> int:
    if isinstance(cell, str | bytes):
        return len(cell)
    if isinstance(cell, list | tuple):
        return sum(map(_count_cell, cell))
    return sum(map(_count_cell, cell.values())) if isinstance(cell, Mapping) else 1


READERS: dict[str, Callable[[Path, str, Names], Stream]] = {
    ".csv": _open_csv,
    ".tsv": _open_tsv,
    ".tab": _open_tsv,
    ".jsonl": _open_jsonl,
    ".ndjson": _open_jsonl,
    ".json": _open_json,
    ".conll": _open_conll,
    ".iob": _open_conll,
    ".bio": _open_conll,
    ".parquet": _open_parquet,
    ".xlsx": _open_xlsx,
    ".txt": _open_txt,
}


def _read_lines(path: Path, encoding: str) -> Iterator[tuple[int, str]]:
    # Lines end with \n or \r\n only: a stray \r or U+2028 inside a text must not shift every later line number.
    with path.open(encoding=encoding, newline="\n") as file:
        for number, line in enumerate(file, 1):
            yield number, line.rstrip("\n").removesuffix("\r")


def _first_line(path: Path, encoding: str) -> str:
    with path.open(encoding=encoding) as file:  # any line end: spreadsheets on old Macs wrote \r alone
        return next((line.rstrip("\n") for line in file if line.strip()), "")


def _split_quoted(path: Path, encoding: str, delimiter: str) -> Cells:
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding=encoding, newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        while True:
            line = reader.line_num + 1  # where the row begins; `line_num` is where the last one ended
            try:
                row = next(reader, None)
            except csv.Error as error:
                if "unexpected end" in str(error):
                    raise _unclosed_quote(path, encoding, delimiter, line) from None
                reason = f"broken quoting: {error}"
                if reader.line_num > line:
                    reason = f"broken quoting in lines {line}–{reader.line_num}: {error}"
                yield line, BadData(reason, f'write " inside a field as ""; {SKIP_HINT}', path=path, line=line)
                continue
            if row is None:
                return
            if row:
                yield line, row


def _unclosed_quote(path: Path, encoding: str, delimiter: str, line: int) -> BadData:
    """The error of a file whose row at `line` has a quote without an end.

    It is the file's and not the row's: how many rows the quote took in is not known, so leaving out one is not enough.
    """
    with path.open(encoding=encoding, newline="") as file:
        reader = csv.reader(itertools.islice(file, line - 1, None), delimiter=delimiter)
        field = next(reader)[-1]
    last = line + reader.line_num - 1
    opened = last - len(re.findall(r"\r\n|\r|\n", field.removesuffix("\n").removesuffix("\r")))
    taken = f": lines {opened}–{last} are all in it" if last > opened else ""
    hint = 'close or remove the quote in this line; write " inside a field as ""'
    return BadData(f"a quoted field never ends{taken}", hint, path=path, line=opened)


def with_header(path: Path, rows: Cells, names: Names) -> Stream:
    """Rows as records: the first names the columns, and every other must have as many fields."""
    line, notes = None, []
    if names is None:
        line, cells = next(rows, (1, []))
        if isinstance(cells, BadData):
            raise cells
        if not cells:
            raise BadData("the file is empty", "give a file with a header and rows", path=path)
        check_num_columns(path, cells, line)
        seen: dict[str, int] = {}
        unique, renamed = [], []
        for cell in map(str.strip, cells):
            seen[cell] = seen.get(cell, 0) + 1
            unique.append(cell if seen[cell] == 1 else f"{cell}.{seen[cell]}")
            if seen[cell] > 1:
                renamed.append(f"`{unique[-1]}`")
        names = tuple(unique)
        if renamed:
            notes.append(f"{path.name}: repeated column names, read as {', '.join(renamed)}")
    return Stream(Header(str(path), names, line), _check_widths(path, rows, names), tuple(notes))


def check_num_columns(path: str | Path, names: Collection[str], line: int | None = None) -> None:
    """Refuse more columns than any table of texts has."""
    if len(names) > MOST_COLUMNS:
        reason = f"{len(names):,} columns, but a table may have {MOST_COLUMNS:,}"
        raise BadData(reason, "keep the columns of the text and its label", path=path, line=line)


def _check_widths(path: Path, rows: Cells, names: tuple[str, ...]) -> Iterator[Record]:
    for line, row in rows:
        if isinstance(row, BadData):
            yield line, row
        elif len(row) != len(names):
            reason = f"ragged row: {len(row)} fields, but there are {len(names)} columns"
            hint = SKIP_HINT
            if path.suffix.lower() != ".csv":
                hint += "; quotes mean nothing in a TSV: if its fields are quoted, name it .csv"
            yield line, BadData(reason, hint, path=path, line=line)
        else:
            yield line, dict(zip(names, row, strict=True))


def _parse_json(path: Path, encoding: str) -> Iterator[Record]:
    for number, line in _read_lines(path, encoding):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # a ValueError alone is a number of thousands of digits
            reason = "JSON nested too deeply" if isinstance(error, RecursionError) else "a number of too many digits"
            if isinstance(error, json.JSONDecodeError):
                near = line[max(0, error.pos - 20) : error.pos + 20].strip()
                reason = f"no JSON: {error.msg.lower()} in column {error.colno}, near `{near}`"
            hint = f"one object in each line; {SKIP_HINT}"
            yield number, BadData(reason, hint, path=path, line=number)
            continue
        if isinstance(record, dict):
            yield number, record
        else:
            kind = "an array" if isinstance(record, list) else f"`{line.strip()[:40]}`"
            reason = f"{kind} where an object should be"
            yield number, BadData(reason, 'write each row as {"text": …, "label": …}', path=path, line=number)


CHUNK_BYTES = 1 << 20
BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
# Bytes no text has: control characters other than tab, line ends, form feed, vertical tab and escape.
CONTROL_BYTES = bytes(set(range(32)) - set(b"\t\n\r\f\v\x1b"))
MOST_CONTROL_SHARE = 0.01


class Encoding(NamedTuple):
    """A file's encoding, and what to tell about it."""

    name: str
    notes: tuple[str, ...] = ()


def find_encoding(path: Path, encoding: str | None = None) -> Encoding:
    """The encoding given, checked, or the one found: utf-8 (with or without a mark), utf-16 by its mark, or latin-1.

    A file that is neither is latin-1 where its bytes mean the same in Windows' cp1252, and cp1252 where they are its
    curly quotes and dashes, which latin-1 would read as invisible control characters.
    """
    if encoding is not None:
        return _check_given(path, encoding)
    with path.open("rb") as file:
        start = file.read(1 << 16)
    marked = next((name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark)), None)
    trouble = _scan(path, marked or "utf-8")
    if trouble is None:
        return Encoding(marked or "utf-8", (f"{path.name}: read as {marked}",) if marked else ())
    if sum(byte in CONTROL_BYTES for byte in start) > MOST_CONTROL_SHARE * len(start):
        raise BadData(f"a binary file ({trouble[0]} is no text)", _UNPACK, path=path, line=trouble[1])
    has_curly = any(len(chunk.translate(None, _HIGH_CONTROLS)) != len(chunk) for chunk in _chunks(path))
    name = "cp1252" if has_curly and _scan(path, "cp1252") is None else "latin-1"
    _scan(path, name)  # refuses a file with NUL bytes
    words = "cp1252 (latin-1 with curly quotes)" if name == "cp1252" else "latin-1"
    return Encoding(name, (f"{path.name}: not utf-8 ({trouble[0]}): read as {words}",))


_UNPACK = "give a text file (CSV, TSV, JSONL) or Parquet; unpack a compressed one first"
_HIGH_CONTROLS = bytes(range(0x80, 0xA0))


# Python's encodings of host names and of its own source code: no file is written in them.
_NO_FILE_ENCODINGS = {"undefined", "punycode", "idna", "unicode_escape", "unicode-escape", "raw-unicode-escape"}


def _check_given(path: Path, encoding: str) -> Encoding:
    try:
        "".encode(encoding)
        name = codecs.lookup(encoding).name
    except (LookupError, ValueError):
        name = "undefined"
    if name in _NO_FILE_ENCODINGS:
        raise BadConfig(f"`data.encoding` is `{encoding}`", "it must be a text encoding such as utf-8 or latin-1")
    trouble = _scan(path, encoding)
    if trouble is not None:
        hint = "leave the encoding out to have it found"
        raise BadData(f"wrong encoding: not {encoding} ({trouble[0]})", hint, path=path, line=trouble[1])
    with path.open("rb") as file:
        is_marked = file.read(3) == codecs.BOM_UTF8
    # A mark read as utf-8 would become an invisible first letter of the first column's name.
    return Encoding("utf-8-sig" if is_marked and name == "utf-8" else encoding)


def _scan(path: Path, encoding: str) -> tuple[str, int] | None:
    """The first byte that `encoding` cannot read, if any, in words, and its line.

    A NUL character is a `BadData`, since no text has one.
    """
    decoder = codecs.getincrementaldecoder(encoding)()
    position, line = 0, 1
    for chunk in _chunks(path):
        held = decoder.getstate()[0]  # the first bytes of a character cut by the chunk's end
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            read = held + chunk
            line += _count_lines(read[: error.start].decode(encoding, errors="replace"))
            place = position - len(held) + error.start
            return f"byte 0x{read[error.start]:02x} at position {place}, line {line}", line
        except UnicodeError as error:  # utf-16 without the mark that it must begin with
            return str(error), line
        if "\0" in text:
            line += _count_lines(text[: text.index("\0")])
            raise BadData("a binary file (it has NUL bytes)", _UNPACK, path=path, line=line)
        position += len(chunk)
        line += _count_lines(text)
    return None


def _count_lines(text: str) -> int:
    return text.count("\n") + text.count("\r") - text.count("\r\n")


def _chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a file piece by piece, and an empty piece to end with."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
    yield b""
