"""The lock between deleting files and backing them up: a backup sees all files that its database speaks of."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inlay.locks import lock_file
from inlay.service.state.places import Places
from inlay.store import locked, make_directory


def _lock_path(places: Places) -> Path:
    make_directory(places.service)
    return places.service / "files.lock"


@contextmanager
def deleting_files(places: Places) -> Iterator[None]:
    """Hold the lock that deleters share: a backup that links files is waited for, for a moment."""
    with locked(_lock_path(places), exclusive=False):
        yield


@contextmanager
def keeping_files(places: Places) -> Iterator[None]:
    """Hold the lock of a backup: no file goes away meanwhile."""
    with locked(_lock_path(places), exclusive=True):
        yield


def removing_file(places: Places, path: Path) -> None:
    """Delete a file that no row knows any more; while a backup is made, leave it to the next sweep."""
    descriptor = os.open(_lock_path(places), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with suppress(BlockingIOError):
            lock_file(descriptor, is_shared=True)
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> int:
    """Delete a file or a folder with all in it; return the number of files. What is not there is no error."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
        return 1
    count = sum(len(files) for _, _, files in os.walk(path))
    with suppress(FileNotFoundError):
        shutil.rmtree(path)
    return count
