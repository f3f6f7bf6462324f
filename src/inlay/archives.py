"""Zip files from outside: whatever is wrong with one is one kind of error, and its list of entries has a bound.

The list lies at the end of the file, 50 bytes for an entry, and becomes 1 kB of memory for each: a file of 50 MB that
holds nothing else would take a GB and most of a minute.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_UNREADABLE = (
    *(RuntimeError, EOFError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError),
    *(MemoryError, struct.error, zlib.error),
)
"""errors that Python's reader raises for bytes that are no zip file; some of them by chance"""
_END_BYTES = 70_000  # the end of a zip: its comment and where the list is


@contextmanager
def open_archive(content: Path | BinaryIO, most_bytes: int) -> Iterator[zipfile.ZipFile]:
    """Open a zip file, by its path or already open; whatever is unreadable in it is a `BadZipFile` inside the block.

    A list of entries longer than `most_bytes` is one too.
    """
    try:
        raw: Any = io.FileIO(content) if isinstance(content, Path) else content
        with raw, _Bounded(raw) as file:
            file.most_bytes = max(most_bytes, _END_BYTES)
            with zipfile.ZipFile(file) as archive:  # reads the list, in one piece
                file.most_bytes = None
                yield archive
    except _UNREADABLE as error:
        raise zipfile.BadZipFile(str(error) or type(error).__name__) from None


class _Bounded(io.BufferedReader):
    """A file that refuses reads of more than `most_bytes` at once; None: no bound."""

    most_bytes: int | None = None

    def read(self, size: int | None = -1, /) -> bytes:
        if self.most_bytes is not None and size is not None and size > self.most_bytes:
            raise zipfile.BadZipFile(f"its list of entries is {size:,} bytes long")
        return super().read(size)
