"""Files that are whole or absent, whatever happens to the process or the machine.

Everything written here goes to a draft in the target's own folder, is synced, and only then gets its name; the folder
is synced too. A crash leaves at most a stray `.draft-…`, which `Store.gc` clears. Permissions follow the umask.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DRAFT_PREFIX = ".draft-"


def write_atomically(path: Path, content: bytes | Callable[[Path], None]) -> None:
    """Write `path`, replacing what was there: a reader sees the old bytes or the new, never a mixture.

    Content too large to be in memory twice is given as a function that writes to the path it gets.
    """
    with _draft_of(path, content) as draft:
        os.replace(draft, path)
    sync_directory(path.parent)


def write_once(path: Path, content: bytes) -> None:
    """Create `path` whole, or raise FileExistsError: of several processes exactly one succeeds."""
    # Not an exclusive open: that claims the name before the bytes are there, and a crash between leaves half a file.
    with _draft_of(path, content) as draft:
        os.link(draft, path)
    sync_directory(path.parent)


def make_directory(path: Path) -> None:
    """Create a folder and the folders above it, each one synced into its parent."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a folder survive a power cut; syncing a file alone does not keep its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, *, exclusive: bool) -> Iterator[None]:
    """Hold the lock file `path`, shared with others or exclusively. A process that dies releases it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: a child forked meanwhile has it open too
        os.close(descriptor)


@contextmanager
def _draft_of(path: Path, content: bytes | Callable[[Path], None]) -> Iterator[str]:
    make_directory(path.parent)
    draft = f"{path.parent}/{DRAFT_PREFIX}{os.getpid()}-{os.urandom(8).hex()}"
    try:
        if isinstance(content, bytes):
            # Not tempfile: it makes private files, and a shared store must stay readable. Here the umask decides.
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
                file.write(content)
        else:
            content(Path(draft))
        with open(draft, "r+b") as file:
            os.fsync(file.fileno())
        yield draft
    finally:
        Path(draft).unlink(missing_ok=True)
