"""Checks of XML from outside, made before a parser reads it, in one pass and in bounded memory.

A few kB of XML can cost GBs or minutes: a DTD declares texts that are then repeated millions of times, and a parser
that gets a file piece by piece reads a tag again from its start with every piece, until it ends. A workbook needs
neither a DTD nor long tags, and is written in UTF-8 or UTF-16.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from typing import IO, Any
from xml.parsers import expat

PROLOG_BYTES = 1 << 16
"""most bytes until the first tag ends"""
MOST_TOKEN_BYTES = 1 << 20
"""most bytes of a tag, a comment, or whatever else a parser reads as one piece; the text between tags may be longer"""
_ENCODINGS = ("utf-8", "utf8", "utf-16", "us-ascii", "ascii", "iso-8859-1")  # `<` is one in all of them
_TAG = re.compile(rb"""<[^<>"']*(?:"[^"]*"[^<>"']*|'[^']*'[^<>"']*)*>""")
# What begins and ends the pieces that may have a `<` in them, or are no tags. In CDATA a parser reads as in a text.
_PIECES = ((b"<!--", (b"-->",)), (b"<?", (b"?>",)), (b"&", (b";", b"<")))


class UnsafeXML(Exception):
    """XML that is not read, and why."""


def scan_xml(content: IO[bytes]) -> Iterator[bytes]:
    """Yield a part piece by piece, as UTF-8; raise `UnsafeXML` where it is unsafe to parse.

    What a parser would refuse at its start, such as a picture, is yielded unchecked.
    """
    start = content.read(PROLOG_BYTES)
    is_xml = _check_prolog(start)
    # As expat finds it: no XML begins with a zero byte, or has one behind its first letter, unless it is UTF-16.
    encoding = {b"\xfe\xff": "utf-16-be", b"\xff\xfe": "utf-16-le"}.get(start[:2])
    if encoding is None and is_xml and 0 in start[:2]:
        encoding = "utf-16-be" if start[0] == 0 else "utf-16-le"
    decoder = codecs.getincrementaldecoder(encoding)("replace") if encoding is not None and is_xml else None
    checks: list[Any] = [_TagCheck(), *(_PieceCheck(*ends) for ends in _PIECES)] if is_xml else []
    piece = start
    while piece:
        if decoder is not None:
            piece = decoder.decode(piece).encode()
        for check in checks:
            check.add(piece)
        yield piece
        piece = content.read(MOST_TOKEN_BYTES)


def _check_prolog(start: bytes) -> bool:
    """Return whether a part is XML so far: refuse a DTD, other encodings, and a beginning without an end."""
    seen: dict[str, Any] = {}
    parser = expat.ParserCreate()
    parser.XmlDeclHandler = lambda version, encoding, alone: seen.setdefault("encoding", encoding)
    parser.StartDoctypeDeclHandler = lambda *given: seen.setdefault("dtd", True)
    parser.StartElementHandler = lambda name, attributes: seen.setdefault("tag", True)
    fault = None
    for place in range(0, len(start), 4096):
        try:
            parser.Parse(start[place : place + 4096], False)
        except (expat.ExpatError, ValueError, LookupError) as error:
            fault = error
        encoding = seen.get("encoding")
        if encoding is not None and encoding.lower() not in _ENCODINGS:
            raise UnsafeXML(f"a part of it is written in `{encoding[:40]}`, not in UTF-8")
        if "dtd" in seen:
            raise UnsafeXML("it declares a document type (a DTD), which no workbook has")
        if fault is not None or "tag" in seen:
            return "tag" in seen
    if len(start) >= PROLOG_BYTES:
        raise UnsafeXML(f"a part of it has no tag in its first {PROLOG_BYTES:,} bytes")
    return False


class _TagCheck:
    """Refuses a long tag. No `<` is in a tag, but `>` may be, within quotes."""

    def __init__(self) -> None:
        self._open = b""  # the tag that has not ended yet

    def add(self, piece: bytes) -> None:
        text = self._open + piece
        end = text.find(b"<", 1)
        if self._open and (end < 0 or end > MOST_TOKEN_BYTES):
            is_closed = text.startswith((b"<!", b"<?")) or _TAG.match(text, 0, MOST_TOKEN_BYTES) is not None
            if not is_closed and len(text) > MOST_TOKEN_BYTES:
                raise UnsafeXML(f"a tag in it is longer than {MOST_TOKEN_BYTES:,} bytes")
        last = text.rfind(b"<")
        is_open = last >= 0 and not text.startswith((b"<!", b"<?"), last) and _TAG.match(text, last) is None
        self._open = text[last:] if is_open else b""


class _PieceCheck:
    """Refuses a long piece between a mark and the first of others."""

    def __init__(self, opener: bytes, closers: Sequence[bytes]) -> None:
        self._opener, self._closers = opener, closers
        self._overlap = b""  # the end of what came, in which a mark may have begun
        self._num_bytes = 0  # all that came before `_overlap`
        self._opened: int | None = None  # where the first piece without an end begins

    def add(self, piece: bytes) -> None:
        text = self._overlap + piece
        inside = len(self._opener) - 1
        if self._opened is not None:
            start = max(0, self._opened + len(self._opener) - self._num_bytes)
            ends = [text.find(closer, start) for closer in self._closers]
            end = min((end for end in ends if end >= 0), default=-1)
            length = self._num_bytes + (len(text) if end < 0 else end) - self._opened
            if length > MOST_TOKEN_BYTES:
                raise UnsafeXML(f"a piece in it that begins with `{self._opener.decode()}` has no end")
            if end >= 0:
                self._opened = None
        if self._opened is None:
            # The marks may share letters, as in `<!-->`, which begins a comment and does not end it.
            last = max(map(text.rfind, self._closers))
            found = text.find(self._opener, max(0, last - inside))
            self._opened = None if found < 0 else self._num_bytes + found
        kept = min(inside, len(text))
        self._num_bytes += len(text) - kept
        self._overlap = text[len(text) - kept :]
