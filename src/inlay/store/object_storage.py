"""Object storage (S3, Google, Azure, or a folder as `file://`), used through obstore, with retries and clear errors.

What always holds: a key has its whole content or does not exist; a request that fails for the moment is repeated a few
times, each time after twice the pause; what cannot succeed is an error that says what to do.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from inlay.errors import Missing, StoreUnreachable, Unsupported
from inlay.store.files import write_stream

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

LAYOUT = 1
_LAYOUT_KEY = "layout.json"
_ATTEMPTS, _FIRST_PAUSE_S = 5, 0.2
_NO_RETRIES = {"max_retries": 0}
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")


@dataclass(frozen=True)
class StoredKey:
    """A key, the size of its content, and when it was written, by the storage's clock."""

    key: str
    num_bytes: int
    changed: datetime


class ObjectStorage:
    """The keys under one address. The first request is made on first use."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._opened: ObjectStore | None = None
        self._is_proved = False  # whether conditional creation was seen to work

    def prove_conditions(self) -> None:
        """Refuse storage that overwrites an existing key when it should only create one."""
        if self._is_proved:
            return
        layout = f'{{"layout": {LAYOUT}}}'.encode()
        was_refused = False
        for _ in range(2):  # the first creates the key, unless it exists; the second must be refused
            try:
                self.put_new(_LAYOUT_KEY, layout)
                was_refused = False
            except FileExistsError:
                was_refused = True
        if not was_refused:
            raise StoreUnreachable(
                f"`{self.address}` overwrites an object although it was asked to create it only if there is none",
                "use storage with conditional writes (`If-None-Match: *`), or a folder as the store",
            )
        if (found := self.get(_LAYOUT_KEY)) != layout:
            raise Unsupported(
                f"`{self.address}` has the layout `{found[:50].decode(errors='replace')}`; this Inlay writes {LAYOUT}",
                "use the newer Inlay that wrote it",
            )
        self._is_proved = True

    def list(self, prefix: str) -> list[StoredKey]:
        """Return the keys that begin with a prefix, with sizes and times."""
        # Storage lists whole folders: what follows the last slash is compared here.
        folder = prefix.rpartition("/")[0]

        def ask(storage: ObjectStore) -> list[StoredKey]:
            batches = _obstore().list(storage, prefix=folder or None)
            return [StoredKey(each["path"], each["size"], each["last_modified"]) for batch in batches for each in batch]

        try:
            return [each for each in self._ask(ask, prefix) if each.key.startswith(prefix)]
        except FileNotFoundError:
            raise StoreUnreachable(f"no bucket at `{self.address}`", "create it, or correct the name") from None

    def get(self, key: str) -> bytes:
        """Return the content of a key; FileNotFoundError if it does not exist."""
        return bytes(self._ask(lambda storage: _obstore().get(storage, key).bytes(), key))

    def get_file(self, key: str, path: Path) -> None:
        """Write the content of a key to a file, whole or not at all; FileNotFoundError if it does not exist."""

        def ask(storage: ObjectStore) -> None:
            found = _obstore().get(storage, key)
            write_stream(path, map(bytes, found.stream()), found.meta["size"])

        self._ask(ask, key)

    def has(self, key: str) -> bool:
        """Return whether a key exists."""
        try:
            self._ask(lambda storage: _obstore().head(storage, key), key)
        except FileNotFoundError:
            return False
        return True

    def stream(self, key: str) -> Iterator[bytes]:
        """Yield the content of a key in pieces. A connection that breaks in the middle is not retried."""
        found = self._ask(lambda storage: _obstore().get(storage, key), key)
        yield from map(bytes, found.stream())

    def put(self, key: str, content: bytes) -> None:
        """Write the content of a key, replacing what it had."""
        self._ask(lambda storage: _obstore().put(storage, key, content, use_multipart=False), key)

    def put_file(self, key: str, path: Path) -> None:
        """Write a file to a key; a large file is sent in parts, and the key appears once all are there."""
        self._ask(lambda storage: _obstore().put(storage, key, path), key)

    def put_new(self, key: str, content: bytes) -> None:
        """Create a key; FileExistsError if it exists. After a lost answer, this call itself may have created it."""
        self._ask(lambda storage: _obstore().put(storage, key, content, mode="create", use_multipart=False), key)

    def delete(self, key: str) -> None:
        """Delete a key, if it exists."""
        with suppress(FileNotFoundError):
            self._ask(lambda storage: _obstore().delete(storage, key), key)

    def _ask(self, ask: Callable[[ObjectStore], T], key: str) -> T:
        """Send a request, with retries if it fails for the moment; say what to do if the storage refuses.

        A request whose answer was lost may have been done: every caller must expect a FileExistsError for that reason.
        """
        failures = _obstore().exceptions
        for attempt in range(_ATTEMPTS):
            try:
                return ask(self._open())
            except failures.AlreadyExistsError as error:
                # A 409 may also mean that two requests for the key came at the same time, and this one created
                # nothing; `BlobAlreadyExists` is Azure's word for a key that exists.
                if "status code: 409" not in str(error) or "BlobAlreadyExists" in str(error):
                    raise FileExistsError(f"{self.address}/{key}") from None
                last = error
            except (failures.PermissionDeniedError, failures.UnauthenticatedError) as error:
                hint = "check the credentials (such as AWS_ACCESS_KEY_ID) and what they allow for this bucket"
                raise StoreUnreachable(f"`{self.address}` refuses: {_first_line(error)}", hint) from None
            except (failures.BaseError, FileNotFoundError) as error:
                if _NO_BUCKET.search(str(error)):
                    raise StoreUnreachable(f"no bucket at `{self.address}`", "create it, or correct its name") from None
                if isinstance(error, FileNotFoundError):  # the key does not exist
                    raise
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
                    # `_ask` retries. Without TLS only to an endpoint that the user named.
                    endpoint = os.environ.get("AWS_ENDPOINT_URL", "") or os.environ.get("AWS_ENDPOINT", "")
                    allow_http = endpoint.startswith("http://")
                    options: Any = {"timeout": "60s", "connect_timeout": "5s", "allow_http": allow_http}
                    self._opened = from_url(self.address, client_options=options, retry_config=_NO_RETRIES)
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


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
