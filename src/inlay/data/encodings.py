"""Which encoding a text file has. The whole file is scanned, in constant memory, before its first row is read."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from inlay.errors import BadConfig, BadData

CHUNK_BYTES = 1 << 20
BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
# Bytes no text has: control characters other than tab, line ends, form feed, vertical tab and escape.
CONTROL_BYTES = bytes(set(range(32)) - set(b"\t\n\r\f\v\x1b"))
MOST_CONTROL_SHARE = 0.01


class Encoding(NamedTuple):
    """A file's encoding, and what to tell about it."""

    name: str
    notes: tuple[str, ...] = ()


class Undecodable(NamedTuple):
    """The first byte that is not of the encoding tried."""

    byte: int
    position: int
    line: int

    def __str__(self) -> str:
        return f"byte 0x{self.byte:02x} at position {self.position}, line {self.line}"


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
    trouble = scan(path, marked or "utf-8")
    if trouble is None:
        return Encoding(marked or "utf-8", (f"{path.name}: read as {marked}",) if marked else ())
    if sum(byte in CONTROL_BYTES for byte in start) > MOST_CONTROL_SHARE * len(start):
        raise BadData(f"a binary file ({trouble} is no text)", _UNPACK, path=path, line=trouble.line)
    has_curly = any(len(chunk.translate(None, _HIGH_CONTROLS)) != len(chunk) for chunk in _chunks(path))
    name = "cp1252" if has_curly and scan(path, "cp1252") is None else "latin-1"
    scan(path, name)  # refuses a file with NUL bytes
    words = "cp1252 (latin-1 with curly quotes)" if name == "cp1252" else "latin-1"
    return Encoding(name, (f"{path.name}: not utf-8 ({trouble}): read as {words}",))


_UNPACK = "give a text file (CSV, TSV, JSONL) or Parquet; unpack a compressed one first"
_HIGH_CONTROLS = bytes(range(0x80, 0xA0))


def _check_given(path: Path, encoding: str) -> Encoding:
    try:
        "".encode(encoding)
    except LookupError:
        raise BadConfig(
            f"`data.encoding` is `{encoding}`", "it must be a text encoding such as utf-8 or latin-1"
        ) from None
    trouble = scan(path, encoding)
    if trouble is not None:
        hint = "leave the encoding out to have it found"
        raise BadData(f"wrong encoding: not {encoding} ({trouble})", hint, path=path, line=trouble.line)
    with path.open("rb") as file:
        is_marked = file.read(3) == codecs.BOM_UTF8
    # A mark read as utf-8 would become an invisible first letter of the first column's name.
    return Encoding("utf-8-sig" if is_marked and codecs.lookup(encoding).name == "utf-8" else encoding)


def scan(path: Path, encoding: str) -> Undecodable | None:
    """The first byte that `encoding` cannot read, if any; a NUL character is a `BadData`, since no text has one."""
    decoder = codecs.getincrementaldecoder(encoding)()
    position, line = 0, 1
    for chunk in _chunks(path):
        held = decoder.getstate()[0]  # the first bytes of a character cut by the chunk's end
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            where = error.start
            read = held + chunk
            return Undecodable(
                read[where],
                position - len(held) + where,
                line + _count_lines(read[:where].decode(encoding, errors="replace")),
            )
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
