"""The service's files below its home: there alone, or, for a service of several machines, on object storage.

A file's key on object storage is its path below the home. There nothing of a customer stays on a machine: a file is
sent when it is whole and deleted here, and whoever reads it gets a copy for as long as that takes.
What always holds: a file that `keep` or `write` has returned from is whole, and every machine sees it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from inlay.service.state.file_lock import remove_tree, removing_file
from inlay.service.state.places import Places
from inlay.store import FolderSnapshots, ObjectStorage, write_atomically


class SharedFiles:
    """The files of one service. Paths are those below the home of this machine, wherever the bytes lie."""

    def __init__(self, places: Places, storage: ObjectStorage | None = None) -> None:
        self._places, self._storage = places, storage

    @property
    def is_shared(self) -> bool:
        """Tell whether files lie on object storage."""
        return self._storage is not None

    def keep(self, path: Path) -> None:
        """Hand over a file that is whole and synced: from now on every machine sees it."""
        if self._storage is not None:
            self._storage.put_file(self._key(path), path)
            path.unlink()

    @contextmanager
    def reading(self, path: Path) -> Iterator[Path]:
        """Give a file to read, of the same name, for the time of the block; FileNotFoundError if there is none."""
        if self._storage is None:
            yield path
            return
        folder = self._places.run / "fetched" / f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            self._storage.get_file(self._key(path), folder / path.name)
            yield folder / path.name
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def read(self, path: Path) -> bytes:
        """Return the content of a file; FileNotFoundError if there is none."""
        return path.read_bytes() if self._storage is None else self._storage.get(self._key(path))

    def write(self, path: Path, content: bytes) -> None:
        """Write a file, whole, in place of what was there."""
        if self._storage is None:
            write_atomically(path, content)
        else:
            self._storage.put(self._key(path), content)

    def has(self, path: Path) -> bool:
        """Tell whether there is a file."""
        return path.is_file() if self._storage is None else self._storage.has(self._key(path))

    def stream(self, path: Path) -> Iterator[bytes]:
        """Yield the content of a file in pieces."""
        if self._storage is not None:
            yield from self._storage.stream(self._key(path))
            return
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                yield piece

    def names(self, folder: Path, *, only_shared: bool = False) -> dict[str, float]:
        """Return the files and folders right below a folder, each with the time (since 1970) of its last change."""
        found: dict[str, float] = {}
        with suppress(FileNotFoundError, NotADirectoryError):
            for path in () if only_shared else folder.iterdir():
                with suppress(OSError):
                    found[path.name] = path.stat().st_mtime
        if self._storage is not None:
            prefix = f"{self._key(folder)}/"
            for each in self._storage.list(prefix):
                name = each.key.removeprefix(prefix).partition("/")[0]
                found[name] = max(found.get(name, 0.0), each.changed.timestamp())
        return dict(sorted(found.items()))

    def remove(self, path: Path) -> int:
        """Delete a file or a folder with all in it, here and for all machines; return the number of files."""
        number = remove_tree(path) if path.exists() or path.is_symlink() else 0
        if self._storage is not None:
            key = self._key(path)
            keys = [each.key for each in self._storage.list(f"{key}/")]
            keys += [key] if self._storage.has(key) else []
            for each in keys:
                self._storage.delete(each)
            number += len(keys)
        return number

    def drop(self, path: Path) -> None:
        """Delete a file that no row knows any more; while a backup is made, leave it to the next sweep."""
        if self._storage is None:
            removing_file(self._places, path)
        else:
            self._storage.delete(self._key(path))

    def evaluations(self, tenant: str, task: str) -> SharedFolder:
        """Return the folder with what a task's versions answered on their dev rows."""
        return SharedFolder(self, self._places.evaluations(tenant, task))

    def snapshots(self, path: Path) -> FolderSnapshots | None:
        """Return the snapshots of a folder of this machine; None where no other machine needs them."""
        return None if self._storage is None else FolderSnapshots(self._storage, self._key(path))

    def sweep_fetched(self) -> int:
        """Delete the copies that processes had for reading and did not delete, because they were killed."""
        left = [path for path in (self._places.run / "fetched").glob("*-*") if not _is_alive(path.name)]
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        return len(left)

    def _key(self, path: Path) -> str:
        return path.relative_to(self._places.home).as_posix()


@dataclass(frozen=True)
class SharedFolder:
    """A folder of small files that are read and written whole."""

    files: SharedFiles
    path: Path

    def read(self, name: str) -> bytes:
        """Return the content of a file; FileNotFoundError if there is none."""
        return self.files.read(self.path / name)

    def write(self, name: str, content: bytes) -> None:
        """Write a file, whole, in place of what was there."""
        self.files.write(self.path / name, content)


def _is_alive(name: str) -> bool:
    """Tell whether the process whose id begins a name is there."""
    pid = name.partition("-")[0]
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True
