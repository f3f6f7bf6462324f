"""Atomic writing of files, and locks between processes.

Everything written here goes to a draft in the target's own folder, is synced, and only then gets its name; the folder
is synced too. A crash leaves at most a stray `.draft-…`, which `Store.gc` deletes. Permissions follow the umask. A full
disk is an error that says how much room was needed; the file that was there before stays.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from inlay.errors import DiskFull, StoreBusy
from inlay.locks import lock_file, unlock_file

DRAFT_PREFIX = ".draft-"
PATIENCE_SECONDS = {True: 120.0, False: 600.0}
"""longest wait for a lock, by whether it is exclusive; publishing shares it, and waits longer for its trained run"""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two attempts to take a lock


def write_atomically(path: Path, content: bytes | Sequence[bytes | memoryview]) -> None:
    """Write `path`, replacing what was there: a reader sees the old bytes or the new ones, never a mixture.

    Content that is too large to be joined in memory is given in parts.
    """
    parts = [content] if isinstance(content, bytes) else content
    write_stream(path, parts, sum(map(len, parts)))


def write_stream(path: Path, pieces: Iterable[bytes | memoryview], num_bytes: int) -> None:
    """Write `path` as `write_atomically` does, from pieces of `num_bytes` in all that are in memory one at a time."""
    with _draft_of(path, pieces, num_bytes) as draft:
        os.replace(draft, path)
    sync_directory(path.parent)


def write_once(path: Path, content: bytes) -> None:
    """Create `path` whole, or raise FileExistsError: of several processes exactly one succeeds."""
    # Not an exclusive open: that takes the name before the bytes are written, and a crash would leave half a file.
    with _draft_of(path, [content], len(content)) as draft:
        os.link(draft, path)
    sync_directory(path.parent)


def is_abandoned(draft: Path) -> bool:
    """Return whether the writer of a draft is gone: a live writer holds a lock on it."""
    with draft.open("rb") as file:
        try:
            lock_file(file, is_shared=True)
        except BlockingIOError:
            return False
    return True


def make_directory(path: Path) -> None:
    """Create a folder and the folders above it, each one synced into its parent."""
    if path.is_dir():
        return
    make_directory(path.parent)
    with telling_full_disk(path, 0):
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Sync a folder, so that names in it survive a power cut; syncing a file alone does not keep its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def telling_full_disk(path: Path, num_bytes: int) -> Iterator[None]:
    """Turn a full disk inside the block into an error that says what `path` needs and how much is free there."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        folder = next(parent for parent in path.absolute().parents if parent.is_dir())
        takes = f"it takes {num_bytes:,} bytes, and " if num_bytes else ""
        left = f"{shutil.disk_usage(folder).free:,} bytes are free there" if error.errno == errno.ENOSPC else ""
        raise DiskFull(
            f"no room on the disk for `{path}`: {takes}{left or 'the quota is used up'}",
            "make room there (`inlay gc` deletes what no version needs) or use another disk, and run the same command "
            "again: nothing half-written is left, and what was finished is kept",
        ) from error


@contextmanager
def locked(path: Path, *, exclusive: bool, in_turn: bool = False) -> Iterator[None]:
    """Hold the lock file `path`, shared with others or exclusively. A process that dies releases it.

    `in_turn` is for a lock that many share: later processes then wait behind one that waits for exclusive use. One
    thread must not take such a lock twice. Waiting too long is an error that names the holders.
    """
    until = time.monotonic() + PATIENCE_SECONDS[exclusive]
    main = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if in_turn:
            turn_path = path.with_name(f"{path.name}.turn")
            turn = os.open(turn_path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                _wait_for(turn, until, (path, turn_path))
                _wait_for(main, until, (path,), is_shared=not exclusive)
            finally:
                _release(turn)
        else:
            _wait_for(main, until, (path,), is_shared=not exclusive)
        yield
    finally:
        _release(main)


def _wait_for(descriptor: int, until: float, paths: Sequence[Path], *, is_shared: bool = False) -> None:
    """Take a lock as soon as it is free; after `until`, raise an error that names the holders of `paths`."""
    pause = _FIRST_PAUSE
    while True:
        try:
            lock_file(descriptor, is_shared=is_shared)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                break
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE, 1.5 * pause)
    held = ", ".join(dict.fromkeys(holder for path in paths for holder in _list_holders(path)))
    raise StoreBusy(
        f"`{paths[0]}` is held by {held or 'another process, perhaps of another machine'}, for longer than a process "
        "waits for it",
        "let that process finish, or end it, and run the same command again: nothing was changed",
    )


def _list_holders(path: Path) -> Iterator[str]:
    """Yield the processes of this machine that hold a lock file, as far as /proc shows them."""
    with suppress(OSError):
        number = str(path.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # for a waiting process the second word is `->`
            if words[1] != "FLOCK" or words[5].rpartition(":")[2] != number:
                continue
            command = ""
            with suppress(OSError):
                command = Path(f"/proc/{words[4]}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            yield f"process {words[4]}" + (f" (`{command.strip()[:100]}`)" if command else "")


def _release(descriptor: int) -> None:
    unlock_file(descriptor)
    os.close(descriptor)


@contextmanager
def _draft_of(path: Path, pieces: Iterable[bytes | memoryview], num_bytes: int) -> Iterator[str]:
    """Write pieces to a draft beside `path`, and sync it; the block gives it its name, else it is deleted."""
    make_directory(path.parent)
    draft = f"{path.parent}/{DRAFT_PREFIX}{os.getpid()}-{os.urandom(8).hex()}"
    with telling_full_disk(path, num_bytes):
        try:
            # Not tempfile, which makes private files: a shared store must stay readable. Here the umask decides.
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
                with suppress(OSError):  # some file systems have no locks
                    lock_file(file, waits=True)  # until it has its name: see `is_abandoned`
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
                try:
                    yield draft
                finally:
                    with suppress(OSError):
                        unlock_file(file)
        finally:
            Path(draft).unlink(missing_ok=True)
