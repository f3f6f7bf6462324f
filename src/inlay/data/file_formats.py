"""The format of a file by its first bytes: to guess what has no name, and to say what a file with a wrong name is."""

from __future__ import annotations

import codecs
import csv
import re
import zipfile
from collections.abc import Iterable

from inlay.archives import open_archive
from inlay.data.data_files import RawFile
from inlay.errors import BadData

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


def list_formats(suffixes: Iterable[str]) -> str:
    """The formats there are, for a hint."""
    return f"{', '.join(suffixes)}, each also packed as .gz, .bz2, .xz, .zst or .zip"


def guess_suffix(file: RawFile) -> str:
    """Return the suffix of the format that the first bytes of a file look like."""
    start = file.head(_GUESSED_BYTES)
    found = _find_signature(file, start)
    if found is not None:
        return found[1]
    text = _decode(start).lstrip()
    if text.startswith("["):
        return ".json"
    if text.startswith("{"):
        return ".json" if text.partition("\n")[0].strip() in ("{", '{"') or is_one_document(text) else ".jsonl"
    return ".csv" if _looks_quoted(text) else ".txt"


def is_one_document(text: str) -> bool:
    """Whether an object goes on over several lines."""
    first, end, rest = text.partition("\n")
    return bool(end) and not first.rstrip().endswith("}") and not rest.lstrip().startswith("{")


def _looks_quoted(text: str) -> bool:
    """Whether lines have fields as a CSV has them: the first ones have equally many, and more than one."""
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
    for signature, what, hint in _FOREIGN:
        if start.startswith(signature):
            return BadData(f"this is {what}", hint, path=file.name)
    if start.startswith(b"PK"):
        for part, (what, hint) in _OFFICE.items():
            if part in start:
                return BadData(f"this is {what}", hint, path=file.name)
    found = _find_signature(file, start)
    shown = file.suffix or "no suffix"
    if found is not None and file.suffix not in (found[1], ".xlsx" if found[1] == ".zip" else ""):
        what, suffix = found
        own = file.suffix if file.suffix in _TEXT_SUFFIXES else ".csv"
        named = f"{own}{suffix}" if what.startswith("packed") else suffix
        hint = f"name it with the suffix `{named}`"
        if not what.startswith(("packed", "a zip")):
            hint += f", or say `--format {suffix.removeprefix('.')}`"
        return BadData(f"this is {what}, but its name says `{shown}`", hint, path=file.name)
    if _HTML.match(start) and file.suffix in _TEXT_SUFFIXES:
        hint = "save the data itself, not the page that shows it (on GitHub: the link `Raw`)"
        return BadData("this is a web page", hint, path=file.name)
    if found is None and file.suffix in (".xlsx", ".parquet") and _is_text(start):
        guessed = guess_suffix(file).removeprefix(".")
        hint = f"name it with the suffix `.{guessed}`, or say `--format {guessed}`"
        return BadData(f"this is text, but its name says `{shown}`", hint, path=file.name)
    return None


def _find_signature(file: RawFile, start: bytes) -> tuple[str, str] | None:
    for signature, what, suffix in _SIGNATURES:
        if start.startswith(signature):
            return what, suffix
    if start.startswith(b"PK\x03\x04"):
        return ("an Excel workbook", ".xlsx") if _is_workbook(file) else ("a zip archive", ".zip")
    return None


def _is_workbook(file: RawFile) -> bool:
    """Whether a zip has the parts of a workbook."""
    try:
        with file.open() as raw, open_archive(raw, _MOST_ENTRIES_BYTES) as archive:
            return any(name.startswith("xl/") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        return False


def _is_text(start: bytes) -> bool:
    if not start or b"\0" in start or start.startswith((b"PK", b"PAR1")):
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return True


def _decode(start: bytes) -> str:
    for mark, encoding in (
        (codecs.BOM_UTF8, "utf-8-sig"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if start.startswith(mark):
            return codecs.getincrementaldecoder(encoding)(errors="replace").decode(start)
    return start.decode("utf-8", errors="replace")
