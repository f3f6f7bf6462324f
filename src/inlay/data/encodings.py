"""The encoding of a text file: the one given, or the one found by reading the whole file once before its first row.

So readers downstream meet neither bytes that no text has nor letters that cannot be decoded.
"""

from __future__ import annotations

import codecs
from typing import NamedTuple

from inlay.data.data_files import RawFile
from inlay.errors import BadConfig, BadData

BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
# Bytes no text has: control characters other than tab, line ends, form feed, vertical tab and escape.
CONTROL_BYTES = bytes(set(range(32)) - set(b"\t\n\r\f\v\x1b"))
MOST_CONTROL_SHARE = 0.01


class Encoding(NamedTuple):
    """A file's encoding, and what to tell about it."""

    name: str
    notes: tuple[str, ...] = ()


def find_encoding(file: RawFile, encoding: str | None = None) -> Encoding:
    """The encoding given, checked, or the one found: utf-8 (with or without a mark), utf-16 by its mark, or latin-1.

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
        raise BadData(f"a binary file ({trouble[0]} is no text)", _UNPACK, path=file.name, line=trouble[1])
    has_curly = any(len(chunk.translate(None, _HIGH_CONTROLS)) != len(chunk) for chunk in file.chunks())
    name = "cp1252" if has_curly and _scan(file, "cp1252") is None else "latin-1"
    _scan(file, name)  # refuses a file with NUL bytes
    words = "cp1252 (latin-1 with curly quotes)" if name == "cp1252" else "latin-1"
    return Encoding(name, (f"{file.title}: not utf-8 ({trouble[0]}): read as {words}",))


_UNPACK = "give a text file (CSV, TSV, JSONL) or Parquet; unpack a compressed one first"
_HIGH_CONTROLS = bytes(range(0x80, 0xA0))


# Python's encodings of host names and of its own source code: no file is written in them.
_NO_FILE_ENCODINGS = {"undefined", "punycode", "idna", "unicode_escape", "unicode-escape", "raw-unicode-escape"}


def _check_given(file: RawFile, encoding: str) -> Encoding:
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
    """The first byte that `encoding` cannot read, if any, in words, and its line.

    A NUL character is a `BadData`, since no text has one.
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
