"""The files of a store on object storage (S3, Google, Azure, or a folder as `file://`), through obstore.

Object storage has no locks. These rules replace them:

- A reference is created only if its key does not exist (conditional creation), so a number is given once.
- Removing a version adds `<N>.removed`, and only then deletes `<N>.json`. A writer that listed the task before, and so
  takes the number again, finds the `.removed` and takes the next number.
- Content gets a new key each time it is published, `objects/ab/<digest>/<random>.safetensors`. `gc` deletes keys older
  than a day that no version needs, by the storage's own clock. A writer refers to content only within half a day of its
  own upload. So a key that a writer is about to refer to is never deleted.

What was read is kept in a folder of this machine; content is compared with its digest when it is read again.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path

from inlay.errors import InlayError, StoreUnreachable
from inlay.store import format as form
from inlay.store.files import DRAFT_PREFIX, write_atomically
from inlay.store.folder import Unneeded
from inlay.store.format import Version
from inlay.store.object_storage import ObjectStorage

_KEPT_S = 24 * 3600.0  # how long content that no version needs is kept: longer than publishing ever takes
_REMEMBERED_S = 1.0  # how long a list of a task's versions is used again
_READERS = 16  # references fetched at a time
_OBJECT_KEY = re.compile(r"objects/[0-9a-f]{2}/([0-9a-f]{64})/[0-9a-f]{16}\.safetensors")
_ENTRY_KEY = re.compile(r"tasks/([^/]+)/([^/]+)")


def local_folder(address: str) -> Path:
    """Return the folder of this machine for the runs of a store on object storage, and for what was read from it."""
    home = os.environ.get("INLAY_LOCAL") or "~/.inlay"
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", address.partition("://")[2]).strip("-")[:40]
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    return Path(home).expanduser() / "remote" / f"{name}-{digest}"


class BucketFiles:
    """The files under one address. The first request is made on first use."""

    def __init__(self, address: str, root: Path) -> None:
        self.address, self._cache = address, root / "cache"
        self.storage = ObjectStorage(address)
        self._entries: dict[str, tuple[float, list[str]]] = {}  # task -> when its files were listed, and their names
        self._uploaded: dict[str, float] = {}  # digest -> when this process uploaded it
        self._last_upload = "", b""

    def is_there(self) -> bool:
        """Return whether anything may have been written."""
        return True

    def place_of_reference(self, name: str, number: int) -> str:
        """Return the address of a version's reference."""
        return f"{self.address}/{_reference_key(name, number)}"

    def place_of_object(self, digest: str) -> str:
        """Return the address of a version's content."""
        return f"{self.address}/objects/{digest[:2]}/{digest}"

    def list_names(self) -> list[str]:
        """Return the tasks' names, sorted, and fetch their references, many at a time."""
        found: dict[str, list[str]] = {}
        for key in self._keys("tasks/"):
            if (match := _ENTRY_KEY.fullmatch(key)) and form.is_name(match[1]):
                found.setdefault(match[1], []).append(match[2])
        now = time.monotonic()
        self._entries.update({name: (now, entries) for name, entries in found.items()})
        missing = [
            (name, int(entry.removesuffix(".json")))
            for name, entries in found.items()
            for entry in entries
            if entry.removesuffix(".json").isdigit() and f"{entry.removesuffix('.json')}.removed" not in entries
            if not (self._cache / _reference_key(name, int(entry.removesuffix(".json")))).is_file()
        ]

        def fetch(item: tuple[str, int]) -> None:
            with suppress(FileNotFoundError, InlayError):  # reading it later raises the error again
                self.read_reference(*item)

        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(fetch, missing))
        return sorted(found)

    def list_entries(self, name: str, *, fresh: bool = False) -> list[str]:
        """Return the names of a task's files: `3.json`, or `3.removed`. `fresh` lists them again in any case."""
        listed, entries = self._entries.get(name, (-_REMEMBERED_S, []))
        if not fresh and time.monotonic() - listed < _REMEMBERED_S:
            return list(entries)
        entries = [key.rpartition("/")[2] for key in self._keys(f"tasks/{name}/")]
        self._entries[name] = (time.monotonic(), entries)
        return list(entries)

    def stamp(self, name: str) -> int | None:
        """Return a number that changes every second: a new version may be noticed a second late."""
        return int(time.monotonic() / _REMEMBERED_S)

    def read_reference(self, name: str, number: int) -> bytes:
        """Return a reference's content; FileNotFoundError if there is none."""
        key = _reference_key(name, number)
        with suppress(FileNotFoundError):
            return (self._cache / key).read_bytes()
        content = self.storage.get(key)
        write_atomically(self._cache / key, content)
        return content

    def add_reference(self, version: Version, content: bytes) -> None:
        """Add a reference to content that was added before; FileExistsError if the number is, or was, in use."""
        self.storage.prove_conditions()
        name, number = version.name, version.number
        if time.monotonic() - self._uploaded[version.digest] > _KEPT_S / 2:
            hours = f"{_KEPT_S / 7200:.0f} hours"
            raise StoreUnreachable(f"publishing `{name}` took longer than {hours}", "run the same command again")
        self._entries.pop(name, None)
        self.storage.put_new(_reference_key(name, number), content)
        if f"{number}.removed" in [key.rpartition("/")[2] for key in self._keys(f"tasks/{name}/{number}.")]:
            raise FileExistsError(self.place_of_reference(name, number))
        if not self._keys(f"{_object_prefix(version.digest)}/"):  # another task with this content was erased meanwhile
            self.add_object(*self._last_upload)

    def remove_reference(self, name: str, number: int) -> None:
        """Remove a version's reference, so that its number is never used again."""
        self.mark_removed(name, number)
        self.delete(self.place_of_reference(name, number))

    def mark_removed(self, name: str, number: int) -> None:
        """Mark a number as removed, whether a version has it or not."""
        self._entries.pop(name, None)
        self.storage.put(_reference_key(name, number).removesuffix(".json") + ".removed", b"")

    def find_object(self, digest: str, *, fresh: bool = False) -> Path:
        """Return a file of this machine with a version's content; FileNotFoundError if the storage has none.

        Of several keys the first whose content has the right digest is taken. If none has, damaged content is returned:
        the caller compares digests. `fresh` ignores the copy on this machine.
        """
        path = self._kept_object(digest)
        if not fresh and path.is_file() and _sha256(path.read_bytes()) == digest:
            return path
        content = None
        for key in self._keys(f"{_object_prefix(digest)}/"):
            with suppress(FileNotFoundError):  # deleted since; `gc` keeps one of the keys
                content = self.storage.get(key)
                if _sha256(content) == digest:
                    write_atomically(path, content)
                    return path
        if content is None:
            raise FileNotFoundError(self.place_of_object(digest))
        damaged = path.with_suffix(".damaged")
        write_atomically(damaged, content)
        return damaged

    def add_object(self, digest: str, content: bytes) -> None:
        """Write a version's content under a new key."""
        self.storage.prove_conditions()
        self._uploaded[digest] = time.monotonic()
        self._last_upload = digest, content
        self.storage.put(f"{_object_prefix(digest)}/{secrets.token_hex(8)}.safetensors", content)
        write_atomically(self._kept_object(digest), content)

    def erase_object(self, digest: str, list_live: Callable[[], Collection[str]]) -> None:
        """Delete content at once, without the day that `gc` waits; restore it if a version needs it meanwhile.

        A writer that publishes the same content looks for it after adding its reference, so one of the two restores it.
        """
        content = None
        with suppress(FileNotFoundError):
            content = self.find_object(digest).read_bytes()
        for key in (*self._keys(f"{_object_prefix(digest)}/"), f"sidecars/{digest}.json"):
            self.delete(f"{self.address}/{key}")
        if content is not None and digest in list_live():
            self.add_object(digest, content)

    def forget_gone(self, live: Collection[str]) -> int:
        """Delete the copies on this machine of versions that are gone; return the number of files."""
        keys = set(self._keys("tasks/"))
        num_deleted = 0
        for path in list(self._cache.rglob("*")):
            if not path.is_file():
                continue
            if path.suffix == ".safetensors":
                is_needed = path.stem in live
            else:
                is_needed = path.name.startswith(DRAFT_PREFIX) or path.relative_to(self._cache).as_posix() in keys
            if not is_needed:
                path.unlink(missing_ok=True)
                num_deleted += 1
        return num_deleted

    def read_note(self, key: str) -> bytes:
        """Return a sidecar, or the record of a backbone; FileNotFoundError if there is none."""
        return self.storage.get(key)

    def add_note(self, key: str, content: bytes) -> None:
        """Write a sidecar, unless there is one."""
        with suppress(FileExistsError):
            self.storage.put_new(key, content)

    def change_note(self, key: str, content: bytes) -> None:
        """Write the record of a backbone, replacing an earlier one."""
        self.storage.put(key, content)

    @contextmanager
    def turn(self, *, exclusive: bool) -> Iterator[None]:
        """Do nothing: there are no locks, and none are needed."""
        yield

    def list_unneeded(self, live: Collection[str]) -> list[Unneeded]:
        """Return what no version needs and is a day old. Of several keys with the same needed content one is needed."""
        now = self._read_clock()
        old = timedelta(seconds=_KEPT_S)
        unneeded: list[Unneeded] = []
        newest: dict[str, str] = {}
        for each in sorted(self.storage.list("objects/"), key=lambda each: each.changed, reverse=True):
            match = _OBJECT_KEY.fullmatch(each.key)
            if not match or (match[1] in live and newest.setdefault(match[1], each.key) == each.key):
                continue
            if now - each.changed > old:
                unneeded.append(Unneeded("object", f"{self.address}/{each.key}", each.num_bytes))
        for each in self.storage.list("sidecars/"):
            digest = each.key.removeprefix("sidecars/").removesuffix(".json")
            if form.is_digest(digest) and digest not in live and now - each.changed > old:
                unneeded.append(Unneeded("sidecar", f"{self.address}/{each.key}", each.num_bytes))
        return sorted(unneeded)

    def delete(self, place: str) -> None:
        """Delete a key that `list_unneeded` returned."""
        key = place.removeprefix(f"{self.address}/")
        self.storage.delete(key)
        (self._cache / key).unlink(missing_ok=True)
        if match := _OBJECT_KEY.fullmatch(key):
            self._kept_object(match[1]).unlink(missing_ok=True)  # fetched again if another key has the same content

    def _kept_object(self, digest: str) -> Path:
        return self._cache / "objects" / digest[:2] / f"{digest}.safetensors"

    def _keys(self, prefix: str) -> list[str]:
        return [each.key for each in self.storage.list(prefix)]

    def _read_clock(self) -> datetime:
        """Return the storage's time; this machine's clock may be wrong."""
        self.storage.put("clock", b"")
        return next(each.changed for each in self.storage.list("clock") if each.key == "clock")


def _object_prefix(digest: str) -> str:
    return f"objects/{digest[:2]}/{digest}"


def _reference_key(name: str, number: int) -> str:
    return f"tasks/{name}/{number}.json"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
