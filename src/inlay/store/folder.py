"""The files of a store in a folder: their paths, and the lock between processes that write.

docs/store-format.md describes the folders. `bucket.py` has the same methods for object storage.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from inlay.errors import InlayError, StoreDamaged
from inlay.store import format as form
from inlay.store.files import (
    DRAFT_PREFIX,
    is_abandoned,
    locked,
    make_directory,
    sync_directory,
    write_atomically,
    write_once,
)

ELSEWHERE = "choose another store with `--store DIR` or $INLAY_HOME"
_STALE_SECONDS = 3600
_SETTLED_NS = 5_000_000_000  # longer than the resolution of any file system's times


class Unneeded(NamedTuple):
    """A file that no version needs."""

    kind: str
    """`object`, `sidecar` or `draft`"""
    place: str
    num_bytes: int


class FolderFiles:
    """The files under one folder, which is created by the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._listed: tuple[int, list[str]] | None = None  # the tasks' names, and when they last changed

    def is_there(self) -> bool:
        """Return whether anything was ever written."""
        return self.root.exists()

    def place_of_reference(self, name: str, number: int) -> str:
        """Return the path of a version's reference."""
        return f"{self.root}/tasks/{name}/{number}.json"

    def place_of_object(self, digest: str) -> str:
        """Return the path of a version's content."""
        return str(self._object_path(digest))

    def list_names(self) -> list[str]:
        """Return the tasks' names, sorted. A task whose versions were all removed is among them."""
        try:
            changed_ns = os.stat(self.root / "tasks").st_mtime_ns
            if self._listed is not None and self._listed[0] == changed_ns:
                return list(self._listed[1])
            with os.scandir(self.root / "tasks") as entries:
                names = sorted(entry.name for entry in entries if form.is_name(entry.name) and entry.is_dir())
            if time.time_ns() - changed_ns > _SETTLED_NS:  # else a later change might get the same time
                self._listed = (changed_ns, names)
            return list(names)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InlayError(f"cannot read the store `{self.root}`: {error.strerror}", ELSEWHERE) from None

    def list_entries(self, name: str, *, fresh: bool = False) -> list[str]:
        """Return the names of a task's files: `3.json`, or `3.removed`."""
        try:
            return os.listdir(f"{self.root}/tasks/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            message = f"{self.root}/tasks/{name}: cannot be read: {error.strerror}"
            raise StoreDamaged(message, "make the folder readable, or restore it from a copy") from None

    def stamp(self, name: str) -> int | None:
        """Return a number that changes whenever a task's versions may have; None if it is too early to tell."""
        try:
            changed_ns = os.stat(f"{self.root}/tasks/{name}").st_mtime_ns
        except OSError:
            return None
        return changed_ns if time.time_ns() - changed_ns > _SETTLED_NS else None

    def read_reference(self, name: str, number: int) -> bytes:
        """Return a reference's content; FileNotFoundError if there is none."""
        with open(self.place_of_reference(name, number), "rb") as file:
            return file.read()

    def add_reference(self, version: form.Version, content: bytes) -> None:
        """Add a reference to content that was added before; FileExistsError if the number is in use."""
        path = Path(self.place_of_reference(version.name, version.number))
        try:
            make_directory(path.parent)
        except FileExistsError as error:  # a file has the folder's name; that does not mean that the number is in use
            raise NotADirectoryError(error.errno, error.strerror, str(path.parent)) from None
        write_once(path, content)

    def remove_reference(self, name: str, number: int) -> None:
        """Remove a version's reference, so that its number is never used again."""
        path = Path(self.place_of_reference(name, number))
        os.rename(path, path.with_suffix(".removed"))
        sync_directory(path.parent)

    def mark_removed(self, name: str, number: int) -> None:
        """Mark a number as removed, although no version here had it."""
        with suppress(FileExistsError):
            write_once(Path(self.place_of_reference(name, number)).with_suffix(".removed"), b"")

    def find_object(self, digest: str, *, fresh: bool = False) -> Path:
        """Return the file with a version's content, which may be missing or damaged."""
        return self._object_path(digest)

    def add_object(self, digest: str, content: bytes) -> None:
        """Write a version's content."""
        path = self._object_path(digest)
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == digest:
            sync_directory(path.parent)  # its writer may have died before doing so
        else:
            write_atomically(path, content)  # this also repairs a damaged object

    def read_note(self, key: str) -> bytes:
        """Return a sidecar, or the record of a backbone; FileNotFoundError if there is none."""
        return (self.root / key).read_bytes()

    def add_note(self, key: str, content: bytes) -> None:
        """Write a sidecar, unless there is one."""
        with suppress(FileExistsError):
            write_once(self.root / key, content)

    def change_note(self, key: str, content: bytes) -> None:
        """Write the record of a backbone, replacing an earlier one."""
        write_atomically(self.root / key, content)

    @contextmanager
    def turn(self, *, exclusive: bool) -> Iterator[None]:
        """Hold the store's lock: shared to add files, exclusive to remove them."""
        with writing(self.root, ELSEWHERE):
            make_directory(self.root)
            with locked(self.root / "lock", exclusive=exclusive, in_turn=True):
                yield

    def list_unneeded(self, live: Collection[str]) -> list[Unneeded]:
        """Return the files that no version needs, given the digests of all versions.

        The caller must hold the lock exclusively: a new object looks unneeded until its reference is written.
        """
        objects = _named_otherwise((self.root / "objects").glob("??/*.safetensors"), live)
        sidecars = _named_otherwise((self.root / "sidecars").glob("*.json"), live)
        found = {"object": objects, "sidecar": sidecars, "draft": self._stray_drafts()}
        return [Unneeded(kind, str(path), path.stat().st_size) for kind, paths in found.items() for path in paths]

    def delete(self, place: str) -> None:
        """Delete a file that `list_unneeded` returned."""
        Path(place).unlink(missing_ok=True)

    def _object_path(self, digest: str) -> Path:
        return self.root / "objects" / digest[:2] / f"{digest}.safetensors"

    def _stray_drafts(self) -> list[Path]:
        """Return the drafts that crashes left."""
        # Writers to these folders hold the lock, so while we hold it exclusively, no draft has a writer.
        strays = [
            path
            for folder in ("objects", "tasks", "sidecars", "backbones")
            for path in _drafts_under(self.root / folder)
        ]
        # Runs are written without the store's lock, perhaps from another machine. Their writers lock the drafts
        # themselves; those of an older Inlay do not, so a draft must also be old.
        for path in (*_drafts_under(self.root / "runs"), *_drafts_under(self.root / "budgets")):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS and is_abandoned(path):
                    strays.append(path)
        return strays


@contextmanager
def writing(target: Path, hint: str) -> Iterator[None]:
    """Turn an error of the operating system inside the block into one that names what was to be written."""
    try:
        yield
    except OSError as error:
        raise InlayError(f"cannot write `{target}`: {error.strerror or error}", hint) from error


def _named_otherwise(paths: Iterator[Path], live: Collection[str]) -> list[Path]:
    """Return the files named by a digest that no version has; files with other names are not ours."""
    return sorted(path for path in paths if form.is_digest(path.stem) and path.stem not in live)


def _drafts_under(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"{DRAFT_PREFIX}*"))
