"""Snapshots of a folder on object storage, so that another machine can continue a run.

A snapshot is a list of the folder's files with their digests; the list is written last, and replaced as a whole. So a
restored folder is as it was at one moment, whatever happened to the machine that wrote it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from inlay.errors import StoreDamaged
from inlay.store.files import DRAFT_PREFIX, make_directory, sync_directory
from inlay.store.object_storage import ObjectStorage

_LIST = "list.json"
_READS = 3  # attempts to restore: while files are read, a newer snapshot may replace them


class FolderSnapshots:
    """The snapshots of one folder, under one key. Only the last is kept."""

    def __init__(self, storage: ObjectStorage, prefix: str) -> None:
        self._storage, self._prefix = storage, prefix.rstrip("/")
        self._digests: dict[tuple[str, int, int, int], str] = {}  # path, inode, size and time of a file -> its digest
        self._there: set[str] | None = None  # digests of the files on the storage

    def is_there(self) -> bool:
        """Tell whether there is a snapshot."""
        return self._read_list() is not None

    def save(self, folder: Path) -> None:
        """Save the folder as it is now. No one may write to it meanwhile."""
        paths = (path for path in sorted(folder.rglob("*")) if not path.name.startswith(DRAFT_PREFIX))
        files = {str(path.relative_to(folder)): self._digest_of(path) for path in paths if path.is_file()}
        if self._there is None:
            self._there = set(self._list_digests())
        for name, digest in files.items():
            if digest not in self._there:
                self._storage.put_file(f"{self._prefix}/files/{digest}", folder / name)
                self._there.add(digest)
        content = json.dumps({"format": 1, "files": files}, sort_keys=True).encode()
        self._storage.put(f"{self._prefix}/{_LIST}", content)
        for digest in self._there - set(files.values()):
            self._storage.delete(f"{self._prefix}/files/{digest}")
        self._there = set(files.values())

    def restore(self, folder: Path) -> bool:
        """Create the folder as it was when last saved, whole or not at all; return False if it never was saved.

        StoreDamaged if one of its files is not what was saved.
        """
        draft = folder.with_name(f"{DRAFT_PREFIX}{folder.name}-{os.getpid()}")
        for attempt in range(_READS):
            files = self._read_list()
            if files is None:
                return False
            shutil.rmtree(draft, ignore_errors=True)
            try:
                make_directory(draft)
                for name, digest in files.items():
                    self._storage.get_file(f"{self._prefix}/files/{digest}", draft / name)
                    with (draft / name).open("rb") as file:
                        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                            raise StoreDamaged(
                                f"`{Path(name).name}` of the snapshot `{self._prefix}` is not what was saved"
                            )
                os.rename(draft, folder)
                sync_directory(folder.parent)
                return True
            except FileNotFoundError:
                if attempt + 1 == _READS:
                    raise StoreDamaged(f"a file of the snapshot `{self._prefix}` is missing") from None
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        raise AssertionError

    def drop(self) -> None:
        """Delete the snapshot: its list first, so that no one restores half of it."""
        self._storage.delete(f"{self._prefix}/{_LIST}")
        for digest in self._list_digests():
            self._storage.delete(f"{self._prefix}/files/{digest}")
        self._there = None

    def _read_list(self) -> dict[str, str] | None:
        try:
            content = json.loads(self._storage.get(f"{self._prefix}/{_LIST}"))
            files = {str(name): str(digest) for name, digest in content["files"].items()}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StoreDamaged(f"the list of the snapshot `{self._prefix}` is damaged") from None
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
            raise StoreDamaged(f"the list of the snapshot `{self._prefix}` names a file outside of it")
        return files

    def _list_digests(self) -> list[str]:
        return [each.key.rpartition("/")[2] for each in self._storage.list(f"{self._prefix}/files/")]

    def _digest_of(self, path: Path) -> str:
        """Return the sha256 of a file; an unchanged file is not read again."""
        about = path.stat()
        key = (str(path), about.st_ino, about.st_size, about.st_mtime_ns)
        if key not in self._digests:
            with path.open("rb") as file:
                self._digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._digests[key]
