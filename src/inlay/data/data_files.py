"""Files to read (on the disk, on stdin or at a URL) as bytes that can be read from the start many times.

What is not a plain file on the disk (stdin, a download, the content of a packed file) is spooled: kept in memory while
it is small, and else in a temporary file without a name, so that a crash leaves nothing behind.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import io
import re
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from inlay.errors import BadData, DiskFull, Missing

STDIN = "-"
"""the name that stands for stdin"""
URL_SCHEMES = ("http://", "https://")
CHUNK_BYTES = 1 << 20
_MEMORY_BYTES = 32 << 20
"""bytes of a spool that are kept in memory"""
MOST_STDIN_BYTES = 16 << 30
_KEPT = "address"  # before the digest of a URL that is kept without its secrets


@dataclass(frozen=True, eq=False)
class RawFile:
    """A file that readers can open as often as they need."""

    name: str
    """the file as messages name it"""
    suffix: str
    """the suffix of its format, in lower case; empty if its name has none"""
    content: Path | Spool
    size_bytes: int
    """size as it came, still packed; the limit of what it may unpack to is a multiple of it"""
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name without folders, for notes."""
        return self.name.rpartition("/")[2] or self.name

    @property
    def handle(self) -> Path | BinaryIO:
        """The path of a file on the disk, or a reader: for libraries that take either."""
        return self.content if isinstance(self.content, Path) else self.content.open()

    def open(self) -> BinaryIO:
        """Open the bytes from the start."""
        return self.content.open("rb") if isinstance(self.content, Path) else self.content.open()

    def open_text(self, encoding: str, newline: str | None = None) -> IO[str]:
        """Open the bytes as text."""
        return io.TextIOWrapper(self.open(), encoding=encoding, newline=newline)

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes piece by piece, and an empty piece at the end."""
        with self.open() as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
        yield b""

    def head(self, num_bytes: int = 4096) -> bytes:
        """Return the first bytes."""
        with self.open() as file:
            return file.read(num_bytes)


class Spool:
    """Bytes from elsewhere, written once and then read by any number of readers."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_MEMORY_BYTES)  # noqa: SIM115
        self._lock = threading.Lock()
        self.size_bytes = 0
        weakref.finalize(self, self._file.close)

    def write(self, piece: bytes) -> None:
        """Add bytes; a full disk is a `DiskFull`."""
        try:
            self._file.write(piece)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            hint = "make room there, or name another folder in $TMPDIR"
            raise DiskFull(f"no room in `{tempfile.gettempdir()}` to unpack or keep the data", hint) from None
        self.size_bytes += len(piece)

    def open(self) -> BinaryIO:
        """Open a reader with its own position."""
        return io.BufferedReader(_SpoolReader(self))

    def read_at(self, place: int, num_bytes: int) -> bytes:
        """Read bytes at a position; other threads may read at the same time."""
        with self._lock:
            self._file.seek(place)
            return self._file.read(num_bytes)


class _SpoolReader(io.RawIOBase):
    def __init__(self, spool: Spool) -> None:
        self._spool, self._place = spool, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._spool.size_bytes}[whence]
        if start + offset < 0:
            raise ValueError(f"no place {start + offset}")
        self._place = start + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        piece = self._spool.read_at(self._place, len(buffer))
        buffer[: len(piece)] = piece
        self._place += len(piece)
        return len(piece)


def is_url(place: str | Path) -> bool:
    """Return whether data is named by the address of a web server."""
    return str(place).lower().startswith(URL_SCHEMES)


def hide_secrets(place: str) -> str:
    """Return data's name as it may be shown: of a URL, without user name, password and what follows `?`."""
    if not is_url(place):
        return place
    return re.split("[?#]", _hide_user(place), maxsplit=1)[0]


def _hide_user(url: str) -> str:
    """Return a URL without the name and password before its host."""
    scheme, _, rest = url.partition("://")
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    if re.fullmatch(r"[^@\[]*:[^@]*[^@\d][^@]*", host):  # no port: a password with `/` or `?` in it, not `%2F`
        return f"{scheme}://{rest.rpartition('@')[2]}"
    return f"{scheme}://{host.rpartition('@')[2]}{rest[len(host) :]}"


def keep_address(url: str) -> str:
    """Return a URL as it is kept on disk: without its secrets, and with a short digest that tells it from others.

    The digest covers the URL without user name and password, as those could be guessed from it; what gives access
    after `?` is too long for that. It follows `#`, which is never sent to a server.
    """
    shown = hide_secrets(url)
    if url == shown or re.fullmatch(rf"{re.escape(shown)}#{_KEPT}-[0-9a-f]{{8}}", url):
        return url
    return f"{shown}#{_KEPT}-{hashlib.sha256(_hide_user(url).encode()).hexdigest()[:8]}"


def find_file(place: str | Path, download: Callable[[str], RawFile]) -> RawFile:
    """Return the file at a place: a path, `-` for stdin, or a URL, which `download` fetches."""
    if str(place) == STDIN:
        return _read_stdin()
    if is_url(place):
        return download(str(place))
    if "://" in str(place):
        scheme = str(place).partition("://")[0][:20]
        raise Missing(f"no way to read `{scheme}://`", "give a file, or a URL that begins with https:// or http://")
    return local_file(Path(place))


def local_file(path: Path) -> RawFile:
    """Return a file on the disk; what is not there, or is not a file, is a `Missing`."""
    if path.is_file():
        return RawFile(str(path), path.suffix.lower(), path, path.stat().st_size)
    if path.is_dir():
        raise Missing(f"`{path}` is a folder, not a file", "name a file in it")
    if path.exists():
        hint = "write it to a file first, or pipe it in and name `-`"
        raise Missing(f"`{path}` is a pipe or a device, not a file", hint)
    hint = "give a file, a folder, glue/NAME, extra/NAME, hub:NAME, a URL, or - for stdin"
    near = {item.stem: item.name for item in path.parent.iterdir()} if path.parent.is_dir() else {}
    close = difflib.get_close_matches(path.stem, near, n=1)  # stems: two names with one suffix are not alike for that
    if close:
        hint = f"did you mean `{path.parent / near[close[0]]}`?"
    raise Missing(f"no file or folder `{path}`", hint)


_kept_stdin: tuple[IO[str], RawFile] | None = None


def _read_stdin() -> RawFile:
    """Spool stdin; a second reading in this process gets the same bytes."""
    global _kept_stdin
    if _kept_stdin is not None and _kept_stdin[0] is sys.stdin:
        return _kept_stdin[1]
    hint = "pipe a file in, as in `zcat mail.csv.gz | inlay train - --task mail`, or name the file"
    if sys.stdin is None or sys.stdin.isatty():
        raise Missing("`-` is stdin, and nothing is piped into it", hint)
    spool = Spool()
    while piece := sys.stdin.buffer.read(CHUNK_BYTES):
        spool.write(piece)
        if spool.size_bytes > MOST_STDIN_BYTES:
            raise BadData(f"more than {MOST_STDIN_BYTES:,} bytes came", "write them to a file first", path="stdin")
    if not spool.size_bytes:
        hint = f"check that the command before the `|` prints rows; {hint}"
        raise BadData("nothing came on stdin", hint, path="stdin")
    file = RawFile("stdin", "", spool, spool.size_bytes)
    _kept_stdin = (sys.stdin, file)
    return file
