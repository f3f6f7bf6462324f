"""The service's files: where they lie, how they are deleted, and how several machines share them.

All lie below the home. A service of several machines keeps them on object storage instead, where a file's key is its
path below the home. Then no customer's file stays on a machine: a file is sent when it is whole and deleted here, and
a reader gets a copy for as long as it reads.
What always holds: a file that `keep` or `write` has returned from is whole, and every machine sees it. A backup sees
every file that its copy of the database names, because deleting and backing up exclude each other.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from inlay.locks import lock_file
from inlay.service.home import is_alive
from inlay.store import FolderSnapshots, ObjectStorage, locked, make_directory, write_atomically

PARTS = ".parts"


@dataclass(frozen=True)
class ServicePaths:
    """The paths of a service's files and folders; `home` is the store's root."""

    home: Path

    @property
    def service(self) -> Path:
        """The folder of all the service's own files."""
        return self.home / "service"

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.service / "service.db"

    @property
    def postgres_note(self) -> Path:
        """The file that says that the database is Postgres, and its address."""
        return self.service / "postgres"

    @property
    def run(self) -> Path:
        """The folder of sockets and locks of the running service."""
        return self.service / "run"

    @property
    def runs(self) -> Path:
        """The folder with the run folders of all cohorts."""
        return self.service / "runs"

    def datasets(self, tenant: str) -> Path:
        """Return the folder of a tenant's uploads."""
        return self.service / "datasets" / tenant

    def evaluations(self, tenant: str, task: str) -> Path:
        """Return the folder with the answers of a task's versions to their dev rows."""
        return self.service / "evaluations" / tenant / task

    def batch(self, tenant: str, job: str) -> Path:
        """Return the file with the answers of an offline batch."""
        return self.service / "batches" / tenant / f"{job}.jsonl"

    def batch_parts(self, tenant: str, job: str) -> Path:
        """Return the folder with the answers so far of an unfinished offline batch."""
        return self.batch(tenant, job).with_suffix(PARTS)


@contextmanager
def deleting_files(paths: ServicePaths) -> Iterator[None]:
    """Hold the lock for deleting files, which several processes share. A backup may hold it for a moment."""
    with locked(_make_lock(paths), exclusive=False):
        yield


@contextmanager
def keeping_files(paths: ServicePaths) -> Iterator[None]:
    """Hold the lock of a backup: no file is deleted meanwhile."""
    with locked(_make_lock(paths), exclusive=True):
        yield


def _make_lock(paths: ServicePaths) -> Path:
    make_directory(paths.service)
    return paths.service / "files.lock"


def remove_tree(path: Path) -> int:
    """Delete a file or a folder with all in it; return the number of files. It may be missing."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
        return 1
    count = sum(len(files) for _, _, files in os.walk(path))
    with suppress(FileNotFoundError):
        shutil.rmtree(path)
    return count


class SharedFiles:
    """The files of one service. Paths are always those below this machine's home, wherever the bytes lie."""

    def __init__(self, paths: ServicePaths, storage: ObjectStorage | None = None) -> None:
        self._paths, self._storage = paths, storage

    @property
    def is_shared(self) -> bool:
        """Return whether files lie on object storage."""
        return self._storage is not None

    def keep(self, path: Path) -> None:
        """Take over a file that is whole and synced: from now on every machine sees it."""
        if self._storage is not None:
            self._storage.put_file(self._key(path), path)
            path.unlink()

    @contextmanager
    def reading(self, path: Path) -> Iterator[Path]:
        """Give a file to read inside the block, under the same name; FileNotFoundError if there is none."""
        if self._storage is None:
            yield path
            return
        folder = self._paths.run / "fetched" / f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            self._storage.get_file(self._key(path), folder / path.name)
            yield folder / path.name
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def read(self, path: Path) -> bytes:
        """Return the content of a file; FileNotFoundError if there is none."""
        return path.read_bytes() if self._storage is None else self._storage.get(self._key(path))

    def write(self, path: Path, content: bytes) -> None:
        """Write or replace a file; it appears whole."""
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
        """Delete a file that no row names any more; during a backup, leave it to the next sweep."""
        if self._storage is not None:
            self._storage.delete(self._key(path))
            return
        descriptor = os.open(_make_lock(self._paths), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with suppress(BlockingIOError):
                lock_file(descriptor, is_shared=True)
                path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def evaluations(self, tenant: str, task: str) -> SharedFolder:
        """Return the folder with the answers of a task's versions to their dev rows."""
        return SharedFolder(self, self._paths.evaluations(tenant, task))

    def snapshots(self, path: Path) -> FolderSnapshots | None:
        """Return the store of snapshots of a folder; None where no other machine needs them."""
        return None if self._storage is None else FolderSnapshots(self._storage, self._key(path))

    def sweep_fetched(self) -> int:
        """Delete the copies for reading that killed processes left behind; return how many."""
        left = []
        for path in (self._paths.run / "fetched").glob("*-*"):
            pid = path.name.partition("-")[0]
            if not (pid.isdigit() and is_alive(int(pid))):
                left.append(path)
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        return len(left)

    def _key(self, path: Path) -> str:
        return path.relative_to(self._paths.home).as_posix()


@dataclass(frozen=True)
class SharedFolder:
    """A folder of small files that are read and written whole."""

    files: SharedFiles
    path: Path

    def read(self, name: str) -> bytes:
        """Return the content of a file; FileNotFoundError if there is none."""
        return self.files.read(self.path / name)

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a file; it appears whole."""
        self.files.write(self.path / name, content)
