"""Packed data files (.gz, .bz2, .xz, .zst, and .zip with one file in it), unpacked into a spool.

A few kB may unpack to many GB. What a file unpacks to is counted while it is read, and refused at a limit that depends
on the file's own size; the sizes that a file declares are not trusted.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from inlay.archives import open_archive
from inlay.data.data_files import CHUNK_BYTES, RawFile, Spool
from inlay.data.streams import UnpackLimit
from inlay.errors import BadData

_MOST_ENTRIES_BYTES = 1_000_000
"""most bytes of a zip's list of files"""
_MOST_XZ_MEMORY = 256 << 20
_UNREADABLE = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, MemoryError)


def _open_zst(raw: BinaryIO) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")


class _XzReader:
    """A reader of .xz files. Unlike Python's own, it limits the memory that a file may ask for."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._unpacker = lzma.LZMADecompressor(memlimit=_MOST_XZ_MEMORY)

    def read(self, num_bytes: int) -> bytes:
        while True:
            if self._unpacker.eof:
                rest = self._unpacker.unused_data.lstrip(b"\0")  # zeros may fill the space between streams
                while not rest:
                    if not (more := self._raw.read(1 << 16)):
                        return b""
                    rest = more.lstrip(b"\0")
                self._unpacker = lzma.LZMADecompressor(memlimit=_MOST_XZ_MEMORY)
                piece = self._unpacker.decompress(rest, num_bytes)
            else:
                packed = self._raw.read(1 << 16) if self._unpacker.needs_input else b""
                if self._unpacker.needs_input and not packed:
                    raise EOFError("it ends early")
                piece = self._unpacker.decompress(packed, num_bytes)
            if piece:
                return piece


_OPENERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lambda raw: _XzReader(raw),
    ".zst": _open_zst,
}
PACKINGS = (*_OPENERS, ".zip")
"""suffixes of packed files"""


def strip_packing(name: str) -> str:
    """Return a file's name without the suffix of its packing: `mail.csv` for `mail.csv.gz`."""
    packing = next((suffix for suffix in PACKINGS if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(packing)]


def unpack(file: RawFile, packing: str | None = None, most_bytes: int | None = None) -> RawFile:
    """Unpack a file; `packing` is the suffix of its packing where its own suffix does not say it.

    Refuses content of more than `most_bytes`, or of more than the file's own size allows.
    """
    packing = packing or file.suffix
    if packing == ".zip":
        inside = _unpack_zip(file, most_bytes)
    else:
        try:
            with file.open() as raw:
                spool = _spool(file, _OPENERS[packing](raw), most_bytes)
        except _UNREADABLE as error:
            raise _refuse(file, packing, error) from None
        inner_name = file.name[: -len(packing)] if file.name.lower().endswith(packing) else file.name
        inside = replace(file, suffix=PurePosixPath(inner_name).suffix.lower(), content=spool)
    if inside.suffix in PACKINGS:
        raise BadData("a packed file inside a packed file", "unpack it once yourself", path=file.name)
    if inside.suffix == ".tar" or file.name.lower().endswith((".tgz", ".tbz")):
        raise BadData("it holds a tar archive, which may have many files", "unpack it and name one", path=file.name)
    return inside


def _unpack_zip(file: RawFile, most_bytes: int | None) -> RawFile:
    try:
        with file.open() as raw, open_archive(raw, _MOST_ENTRIES_BYTES) as archive:
            members = [item for item in archive.infolist() if not _is_aside(item)]
            if not members:
                raise BadData("the zip has no file in it", "give one with a data file", path=file.name)
            if len(members) > 1:
                names = [repr(item.filename[:60])[1:-1] for item in members[:5]]
                shown = ", ".join(f"`{name}`" for name in names) + (", …" if len(members) > 5 else "")
                hint = "unpack it and name one of them, or the folder if they are train, dev and test"
                raise BadData(f"the zip has {len(members):,} files: {shown}", hint, path=file.name)
            with archive.open(members[0]) as content:
                spool = _spool(file, content, most_bytes)
    except (*_UNREADABLE, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise _refuse(file, ".zip", error) from None
    inside = PurePosixPath(members[0].filename)
    shown = inside.name.encode("utf8", "replace").decode()[:80]
    notes = (*file.notes, f"{file.title}: holds `{shown}`")
    return replace(file, suffix=inside.suffix.lower(), content=spool, notes=notes)


def _is_aside(item: zipfile.ZipInfo) -> bool:
    """Return whether an entry is not a file of the user: a folder, or what macOS and Windows add."""
    path = PurePosixPath(item.filename)
    return item.is_dir() or path.name in (".DS_Store", "Thumbs.db") or "__MACOSX" in path.parts


def _spool(file: RawFile, content: Any, most_bytes: int | None) -> Spool:
    limit, spool = UnpackLimit(file, "bytes", most_bytes), Spool()
    while piece := content.read(CHUNK_BYTES):
        limit.add(len(piece))
        spool.write(piece)
    return spool


def _refuse(file: RawFile, packing: str, error: Exception) -> BadData:
    words = " ".join(str(error).split())[:100] or type(error).__name__
    hint = f"pack it again, or name it without `{packing}` if it is not packed"
    return BadData(f"not a readable {packing} file: {words}", hint, path=file.name)
