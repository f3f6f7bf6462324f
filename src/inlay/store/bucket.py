"""The files of a store on object storage (S3, Google, Azure, or a folder as `file://`), through obstore.

Object storage has no locks. What takes their place:

- A reference is created only if nothing has its key (conditional creation), so a number is given once.
- Removing a version adds `<N>.removed`, and only then deletes `<N>.json`. A writer that takes the number after all,
  because it listed the task long ago, sees the `.removed` and takes the next one.
- Content lies under a new key each time it is published, `objects/ab/<digest>/<random>.safetensors`. `gc` deletes keys
  older than a day that no version needs, by the storage's own clock. A writer refers to content only within half a day
  of its own upload. So no key that a writer is about to refer to is ever deleted.

Everything that was read is kept in a folder of this machine and compared with its digest: it cannot change.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from inlay.errors import InlayError, Missing, StoreUnreachable, Unsupported
from inlay.store import format as form
from inlay.store.files import write_atomically
from inlay.store.folder import Unneeded
from inlay.store.format import Version

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

LAYOUT = 1
_LAYOUT_KEY = "layout.json"
_KEPT_S = 24 * 3600.0  # how long content that no version needs is kept: longer than any writer takes
_REMEMBERED_S = 1.0  # how long a list of a task's versions is believed
_ATTEMPTS, _FIRST_PAUSE_S = 5, 0.2
_NO_RETRIES = {"max_retries": 0}
_READERS = 16  # references fetched at a time
_OBJECT_KEY = re.compile(r"objects/[0-9a-f]{2}/([0-9a-f]{64})/[0-9a-f]{16}\.safetensors")
_ENTRY_KEY = re.compile(r"tasks/([^/]+)/([^/]+)")


def local_folder(address: str) -> Path:
    """Return the folder of this machine for the runs of a store elsewhere, and for what was read of it."""
    home = os.environ.get("INLAY_LOCAL") or "~/.inlay"
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", address.partition("://")[2]).strip("-")[:40]
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    return Path(home).expanduser() / "remote" / f"{name}-{digest}"


class BucketFiles:
    """The files under one address. Nothing is asked of the storage before the first use."""

    def __init__(self, address: str, root: Path) -> None:
        self.address, self._cache = address, root / "cache"
        self._opened: ObjectStore | None = None
        self._is_proved = False  # that the storage creates conditionally
        self._entries: dict[str, tuple[float, list[str]]] = {}  # of a task, and when they were listed
        self._uploaded: dict[str, float] = {}  # digest -> when this process uploaded it

    def is_there(self) -> bool:
        """Tell whether anything may have been written."""
        return True

    def place_of_reference(self, name: str, number: int) -> str:
        """Return where the reference of a version lies."""
        return f"{self.address}/{_reference_key(name, number)}"

    def place_of_object(self, digest: str) -> str:
        """Return where a version's content lies."""
        return f"{self.address}/objects/{digest[:2]}/{digest}"

    def list_names(self) -> list[str]:
        """Return the tasks' names, sorted, and fetch what their references say, many at a time."""
        found: dict[str, list[str]] = {}
        for key, *_ in self._list("tasks/"):
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
        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(lambda item: self._fetch_quietly(*item), missing))
        return sorted(found)

    def list_entries(self, name: str) -> list[str]:
        """Return the names of a task's files: `3.json`, or `3.removed`."""
        listed, entries = self._entries.get(name, (-_REMEMBERED_S, []))
        if time.monotonic() - listed < _REMEMBERED_S:
            return list(entries)
        entries = [key.rpartition("/")[2] for key, *_ in self._list(f"tasks/{name}/")]
        self._entries[name] = (time.monotonic(), entries)
        return list(entries)

    def stamp(self, name: str) -> int | None:
        """Return a number that changes every second: a new version may be noticed that much later."""
        return int(time.monotonic() / _REMEMBERED_S)

    def read_reference(self, name: str, number: int) -> bytes:
        """Return a reference's content; FileNotFoundError if there is none."""
        key = _reference_key(name, number)
        with suppress(FileNotFoundError):
            return (self._cache / key).read_bytes()
        content = self._get(key)
        write_atomically(self._cache / key, content)
        return content

    def add_reference(self, version: Version, content: bytes) -> None:
        """Give a number to a version whose content was added; FileExistsError if another has it, or had it."""
        self._prove_conditions()
        name, number = version.name, version.number
        if time.monotonic() - self._uploaded[version.digest] > _KEPT_S / 2:
            hours = f"{_KEPT_S / 7200:.0f} hours"
            raise StoreUnreachable(f"publishing `{name}` took longer than {hours}", "run the same command again")
        self._entries.pop(name, None)
        self._put_new(_reference_key(name, number), content)
        if f"{number}.removed" in [key.rpartition("/")[2] for key, *_ in self._list(f"tasks/{name}/{number}.")]:
            raise FileExistsError(self.place_of_reference(name, number))

    def retire_reference(self, name: str, number: int) -> None:
        """Make a version's number one that was removed."""
        self.spend_number(name, number)
        self.delete(self.place_of_reference(name, number))

    def spend_number(self, name: str, number: int) -> None:
        """Make a number one that was removed, whether a version has it or not."""
        self._entries.pop(name, None)
        self._put(_reference_key(name, number).removesuffix(".json") + ".removed", b"")

    def find_object(self, digest: str, *, fresh: bool = False) -> Path:
        """Return a file of this machine with a version's content; FileNotFoundError if the storage has none.

        Of several keys the first whose content has the digest is taken. Content that has another is returned as it is:
        whoever reads it compares. `fresh` ignores what is kept here.
        """
        path = self._kept_object(digest)
        if not fresh and path.is_file() and _sha256(path.read_bytes()) == digest:
            return path
        content = None
        for key, *_ in self._list(f"objects/{digest[:2]}/{digest}/"):
            with suppress(FileNotFoundError):  # deleted since: `gc` keeps one of them
                content = self._get(key)
                if _sha256(content) == digest:
                    write_atomically(path, content)
                    return path
        if content is None:
            raise FileNotFoundError(self.place_of_object(digest))
        damaged = path.with_suffix(".damaged")
        write_atomically(damaged, content)
        return damaged

    def add_object(self, digest: str, content: bytes) -> None:
        """Keep a version's content, under a key of its own."""
        self._prove_conditions()
        self._uploaded[digest] = time.monotonic()
        self._put(f"objects/{digest[:2]}/{digest}/{secrets.token_hex(8)}.safetensors", content)
        write_atomically(self._kept_object(digest), content)

    def read_note(self, key: str) -> bytes:
        """Return a sidecar or what is known of a backbone; FileNotFoundError if there is none."""
        return self._get(key)

    def add_note(self, key: str, content: bytes) -> None:
        """Keep a sidecar, unless there is one."""
        with suppress(FileExistsError):
            self._put_new(key, content)

    def change_note(self, key: str, content: bytes) -> None:
        """Keep what is known of a backbone, in place of what was known."""
        self._put(key, content)

    @contextmanager
    def turn(self, *, exclusive: bool) -> Iterator[None]:
        """Do nothing: there are no locks, and none are needed."""
        yield

    def list_unneeded(self, live: Collection[str]) -> list[Unneeded]:
        """Return what no version needs and is a day old, and all but the newest key of what some version needs."""
        now = self._read_clock()
        old = timedelta(seconds=_KEPT_S)
        unneeded: list[Unneeded] = []
        newest: dict[str, str] = {}
        for key, size, changed in sorted(self._list("objects/"), key=lambda item: item[2], reverse=True):
            match = _OBJECT_KEY.fullmatch(key)
            if match and (match[1] not in live or newest.setdefault(match[1], key) != key) and now - changed > old:
                unneeded.append(Unneeded("object", f"{self.address}/{key}", size))
        for key, size, changed in self._list("sidecars/"):
            digest = key.removeprefix("sidecars/").removesuffix(".json")
            if form.is_digest(digest) and digest not in live and now - changed > old:
                unneeded.append(Unneeded("sidecar", f"{self.address}/{key}", size))
        return sorted(unneeded)

    def delete(self, place: str) -> None:
        """Delete a key that `list_unneeded` returned."""
        key = place.removeprefix(f"{self.address}/")
        with suppress(FileNotFoundError):
            self._ask(lambda storage: _obstore().delete(storage, key), key)
        (self._cache / key).unlink(missing_ok=True)
        if match := _OBJECT_KEY.fullmatch(key):
            self._kept_object(match[1]).unlink(missing_ok=True)  # fetched again, if another key has it

    def _kept_object(self, digest: str) -> Path:
        return self._cache / "objects" / digest[:2] / f"{digest}.safetensors"

    def _fetch_quietly(self, name: str, number: int) -> None:
        with suppress(FileNotFoundError, InlayError):  # whoever reads it will hear
            self.read_reference(name, number)

    def _read_clock(self) -> datetime:
        """Return the storage's time: that of this machine may be wrong."""
        self._put("clock", b"")
        return next(changed for key, _, changed in self._list("clock") if key == "clock")

    def _prove_conditions(self) -> None:
        """Refuse storage that overwrites what is there when asked to create only, before anything depends on it."""
        if self._is_proved:
            return
        layout = f'{{"layout": {LAYOUT}}}'.encode()
        for _ in range(2):  # the first creates it, unless another did; the second must be refused
            try:
                self._put_new(_LAYOUT_KEY, layout)
            except FileExistsError:
                self._is_proved = True
        if not self._is_proved:
            raise StoreUnreachable(
                f"`{self.address}` overwrites an object although it was asked to create it only if there is none",
                "use storage with conditional writes (`If-None-Match: *`), or a folder as the store",
            )
        if (found := self._get(_LAYOUT_KEY)) != layout:
            raise Unsupported(
                f"`{self.address}` has the layout `{found[:50].decode(errors='replace')}`; this Inlay writes {LAYOUT}",
                "use the newer Inlay that wrote it",
            )

    def _list(self, prefix: str) -> list[tuple[str, int, datetime]]:
        """Return the keys below a prefix, with sizes and times."""
        # Storage lists whole steps of a path: what follows the last slash is compared here.
        folder = prefix.rpartition("/")[0]

        def ask(storage: ObjectStore) -> list[tuple[str, int, datetime]]:
            batches = _obstore().list(storage, prefix=folder or None)
            return [(each["path"], each["size"], each["last_modified"]) for batch in batches for each in batch]

        try:
            return [each for each in self._ask(ask, prefix) if each[0].startswith(prefix)]
        except FileNotFoundError:
            raise StoreUnreachable(
                f"there is no bucket at `{self.address}`", "create it, or correct the name"
            ) from None

    def _get(self, key: str) -> bytes:
        return bytes(self._ask(lambda storage: _obstore().get(storage, key).bytes(), key))

    def _put(self, key: str, content: bytes) -> None:
        self._ask(lambda storage: _obstore().put(storage, key, content, use_multipart=False), key)

    def _put_new(self, key: str, content: bytes) -> None:
        self._ask(lambda storage: _obstore().put(storage, key, content, mode="create", use_multipart=False), key)

    def _ask(self, ask: Callable[[ObjectStore], T], key: str) -> T:
        """Ask the storage, again after a pause where it fails for the moment; say what to do where it refuses.

        A request whose answer was lost may have been done: every caller takes "it is there already" for that, too.
        """
        failures = _obstore().exceptions
        for attempt in range(_ATTEMPTS):
            try:
                return ask(self._open())
            except failures.AlreadyExistsError:
                raise FileExistsError(f"{self.address}/{key}") from None
            except (failures.PermissionDeniedError, failures.UnauthenticatedError) as error:
                hint = "check the credentials (such as AWS_ACCESS_KEY_ID) and what they allow for this bucket"
                raise StoreUnreachable(f"`{self.address}` refuses: {_first_line(error)}", hint) from None
            except failures.BaseError as error:  # a key that is not there is Python's own FileNotFoundError
                if re.search("NoSuchBucket|ContainerNotFound", str(error)):
                    raise StoreUnreachable(f"no bucket at `{self.address}`", "create it, or correct its name") from None
                last = error
            if attempt + 1 < _ATTEMPTS:
                time.sleep(_FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1.5))
        raise StoreUnreachable(
            f"`{self.address}/{key}`: no answer after {_ATTEMPTS} attempts: {_first_line(last)}",
            "check the address, the endpoint (such as AWS_ENDPOINT_URL) and the network; nothing half-written is left",
        ) from None

    def _open(self) -> ObjectStore:
        if self._opened is None:
            from_url, failures = _obstore().store.from_url, _obstore().exceptions
            try:
                if self.address.startswith("file:"):
                    self._opened = from_url(self.address, mkdir=True)
                else:
                    # Failures of a moment are tried again here, by one rule for all of them.
                    self._opened = from_url(self.address, client_options=_client_options(), retry_config=_NO_RETRIES)
            except (failures.BaseError, ValueError) as error:
                raise StoreUnreachable(
                    f"cannot open `{self.address}`: {_first_line(error)}",
                    "write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://ACCOUNT/CONTAINER/PREFIX or file:///FOLDER",
                ) from None
        return self._opened


def _obstore() -> ModuleType:
    try:
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise Missing(
            "stores on object storage need obstore, which is not installed", "`pip install 'inlay[s3]'`"
        ) from None
    return obstore


def _client_options() -> dict[str, Any]:
    """Return how long to wait, and whether an endpoint without TLS was named by the user."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "") or os.environ.get("AWS_ENDPOINT", "")
    return {"timeout": "60s", "connect_timeout": "5s", "allow_http": endpoint.startswith("http://")}


def _reference_key(name: str, number: int) -> str:
    return f"tasks/{name}/{number}.json"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
