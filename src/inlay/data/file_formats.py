"""The format and the encoding of a file, found from its bytes.

The first bytes tell the format where the name has no suffix, and what a file with a wrong suffix really is. The
encoding of a text file is the one given, or is found by reading the whole file once before its first row: so readers
meet neither binary bytes nor characters that cannot be decoded.
"""

from __future__ import annotations

import codecs
import csv
import re
import zipfile
from typing import NamedTuple

from inlay.archives import open_archive
from inlay.data.data_files import RawFile
from inlay.errors import BadConfig, BadData

_MOST_ENTRIES_BYTES = 1_000_000
"""bytes of a zip's list of entries"""
_GUESSED_BYTES = 1 << 16
_TEXT_SUFFIXES = (".csv", ".tsv", ".tab", ".txt", ".jsonl", ".ndjson", ".json", ".conll", ".iob", ".bio")
_HTML = re.compile(rb"\s*(<!doctype html|<html|<head|<\?xml[^>]*>\s*<!doctype html)", re.IGNORECASE)
# The first bytes of a file -> what it is, and the suffix by which it is read.
_SIGNATURES: tuple[tuple[bytes, str, str], ...] = (
    (b"PAR1", "a Parquet file", ".parquet"),
    (b"\x1f\x8b\x08", "packed with gzip", ".gz"),
    (b"\x28\xb5\x2f\xfd", "packed with zstd", ".zst"),
    (b"BZh", "packed with bzip2", ".bz2"),
    (b"\xfd7zXZ\0", "packed with xz", ".xz"),
)
# The first bytes of a file that nothing here reads -> what it is, and what to do.
_FOREIGN: tuple[tuple[bytes, str, str], ...] = (
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Excel or Word file (.xls, .doc)", "save it as .xlsx or CSV"),
    (b"ARROW1", "an Arrow (Feather) file", "write it as Parquet: `pandas.read_feather(…).to_parquet(…)`"),
    (b"SQLite format 3\0", "a SQLite database", "write the table as CSV"),
    (b"Obj\x01", "an Avro file", "write it as Parquet or JSONL"),
    (b"ORC", "an ORC file", "write it as Parquet"),
    (b"%PDF", "a PDF", "write its texts as rows of a CSV"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first"),
    (b"Rar!", "a RAR archive", "unpack it first"),
    (b"\x80\x04\x95", "a pickle, which is never loaded: it may run code", "write it as Parquet or CSV"),
    (b"\x80\x05\x95", "a pickle, which is never loaded: it may run code", "write it as Parquet or CSV"),
    (b"\x89HDF", "an HDF5 file", "write it as Parquet"),
)
# A name among the first bytes of a zip -> what office program wrote it, and what to do.
_OFFICE = {
    b"word/document": ("a Word document", "write its texts as lines of a .txt, or as rows of a CSV"),
    b"mimetypeapplication/vnd.oasis": ("an OpenDocument file", "save it as .xlsx or CSV"),
    b"xl/workbook.bin": ("a binary Excel workbook (.xlsb)", "save it as .xlsx or CSV"),
}

BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
# Bytes that no text file has: control characters other than tab, line ends, form feed, vertical tab and escape.
CONTROL_BYTES = bytes(set(range(32)) - set(b"\t\n\r\f\v\x1b"))
MOST_CONTROL_SHARE = 0.01
_UNPACK = "give a text file (CSV, TSV, JSONL) or Parquet; unpack a compressed one first"
_HIGH_CONTROLS = bytes(range(0x80, 0xA0))
# Python's encodings of host names and of its own source code, which no data file uses.
_NO_FILE_ENCODINGS = {"undefined", "punycode", "idna", "unicode_escape", "unicode-escape", "raw-unicode-escape"}


def guess_suffix(file: RawFile) -> str:
    """Return the suffix of the format that the first bytes of a file look like."""
    start = file.head(_GUESSED_BYTES)
    found = _find_signature(file, start)
    if found is not None:
        return found[1]
    encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark)), "utf-8")
    text = codecs.getincrementaldecoder(encoding)(errors="replace").decode(start).lstrip()
    if text.startswith("["):
        return ".json"
    if text.startswith("{"):
        # JSON lines have an object in each line; in a document the first object has several lines.
        first, end, rest = text.partition("\n")
        goes_on = bool(end) and not first.rstrip().endswith("}") and not rest.lstrip().startswith("{")
        return ".json" if goes_on or first.strip() in ("{", '{"') else ".jsonl"
    return ".csv" if _looks_quoted(text) else ".txt"


def _looks_quoted(text: str) -> bool:
    """Return whether a text looks like a CSV: its first lines have equally many fields, and more than one."""
    lines = text.splitlines()[:20]
    if len(lines) > 1 and len({line.count("\t") for line in lines[:-1]} - {0}) == 1 and '"' not in lines[0]:
        return False  # a raw table, as .txt is read
    for delimiter in ",;\t":
        rows = [len(row) for row in csv.reader(lines, delimiter=delimiter)]
        if rows and rows[0] > 1 and 2 * rows.count(rows[0]) >= len(rows):
            return True
    return False


def check_content(file: RawFile) -> BadData | None:
    """Return why the first bytes of a file are not what its suffix says, if they are not."""
    start = file.head()
    # 1. formats that are not read at all
    for signature, what, hint in _FOREIGN:
        if start.startswith(signature):
            return BadData(f"this is {what}", hint, path=file.name)
    if start.startswith(b"PK"):
        for part, (what, hint) in _OFFICE.items():
            if part in start:
                return BadData(f"this is {what}", hint, path=file.name)
    # 2. a format that is read, but under another suffix
    found = _find_signature(file, start)
    shown = file.suffix or "no suffix"
    if found is not None and file.suffix not in (found[1], ".xlsx" if found[1] == ".zip" else ""):
        what, suffix = found
        own = file.suffix if file.suffix in _TEXT_SUFFIXES else ".csv"
        named = f"{own}{suffix}" if what.startswith("packed") else suffix
        hint = f"name it with the suffix `{named}`"
        if not what.startswith(("packed", "a zip")):
            hint += f", or use `--format {suffix.removeprefix('.')}`"
        return BadData(f"this is {what}, but its name says `{shown}`", hint, path=file.name)
    # 3. a web page under the suffix of a text file, or text under the suffix of a binary format
    if _HTML.match(start) and file.suffix in _TEXT_SUFFIXES:
        hint = "save the data itself, not the page that shows it (on GitHub: the link `Raw`)"
        return BadData("this is a web page", hint, path=file.name)
    if found is None and file.suffix in (".xlsx", ".parquet") and _is_text(start):
        guessed = guess_suffix(file).removeprefix(".")
        hint = f"name it with the suffix `.{guessed}`, or use `--format {guessed}`"
        return BadData(f"this is text, but its name says `{shown}`", hint, path=file.name)
    return None


def _find_signature(file: RawFile, start: bytes) -> tuple[str, str] | None:
    """Return what the first bytes show a file to be, in words, and its suffix; None if they show nothing."""
    for signature, what, suffix in _SIGNATURES:
        if start.startswith(signature):
            return what, suffix
    if not start.startswith(b"PK\x03\x04"):
        return None
    try:
        with file.open() as raw, open_archive(raw, _MOST_ENTRIES_BYTES) as archive:
            is_workbook = any(name.startswith("xl/") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        is_workbook = False
    return ("an Excel workbook", ".xlsx") if is_workbook else ("a zip archive", ".zip")


def _is_text(start: bytes) -> bool:
    if not start or b"\0" in start or start.startswith((b"PK", b"PAR1")):
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return True


class Encoding(NamedTuple):
    """The encoding of a file, and notes on it for the user."""

    name: str
    notes: tuple[str, ...] = ()


def find_encoding(file: RawFile, encoding: str | None = None) -> Encoding:
    """Check the given encoding, or find it: utf-8 (with or without a byte order mark), utf-16 by its mark, or latin-1.

    A file that is neither is latin-1 where its bytes mean the same in Windows' cp1252, and cp1252 where they are its
    curly quotes and dashes, which latin-1 would read as invisible control characters.
    """
    if encoding is not None:
        return _check_given(file, encoding)
    start = file.head(1 << 16)
    marked = next((name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark)), None)
    trouble = _scan(file, marked or "utf-8")
    if trouble is None:
        return Encoding(marked or "utf-8", (f"{file.title}: read as {marked}",) if marked else ())
    if sum(byte in CONTROL_BYTES for byte in start) > MOST_CONTROL_SHARE * len(start):
        raise BadData(f"a binary file ({trouble[0]} is not text)", _UNPACK, path=file.name, line=trouble[1])
    has_curly = any(len(chunk.translate(None, _HIGH_CONTROLS)) != len(chunk) for chunk in file.chunks())
    name = "cp1252" if has_curly and _scan(file, "cp1252") is None else "latin-1"
    _scan(file, name)  # refuses a file with NUL bytes
    words = "cp1252 (latin-1 with curly quotes)" if name == "cp1252" else "latin-1"
    return Encoding(name, (f"{file.title}: not utf-8 ({trouble[0]}): read as {words}",))


def _check_given(file: RawFile, encoding: str) -> Encoding:
    """Refuse an encoding that does not exist, or that cannot decode the whole file."""
    try:
        "".encode(encoding)
        name = codecs.lookup(encoding).name
    except (LookupError, ValueError):
        name = "undefined"
    if name in _NO_FILE_ENCODINGS:
        raise BadConfig(f"`data.encoding` is `{encoding}`", "it must be a text encoding such as utf-8 or latin-1")
    trouble = _scan(file, encoding)
    if trouble is not None:
        hint = "leave the encoding out to have it found"
        raise BadData(f"wrong encoding: not {encoding} ({trouble[0]})", hint, path=file.name, line=trouble[1])
    is_marked = file.head(3) == codecs.BOM_UTF8
    # A mark read as utf-8 would become an invisible first letter of the first column's name.
    return Encoding("utf-8-sig" if is_marked and name == "utf-8" else encoding)


def _scan(file: RawFile, encoding: str) -> tuple[str, int] | None:
    """Return the first byte that `encoding` cannot decode, in words, and its line; None if there is none.

    A NUL character is a `BadData`, since no text file has one.
    """
    decoder = codecs.getincrementaldecoder(encoding)()
    position, line = 0, 1
    for chunk in file.chunks():
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
            raise BadData("a binary file (it has NUL bytes)", _UNPACK, path=file.name, line=line)
        position += len(chunk)
        line += _count_lines(text)
    return None


def _count_lines(text: str) -> int:
    return text.count("\n") + text.count("\r") - text.count("\r\n")
