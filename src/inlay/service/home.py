"""The service's own folder: private, locked by one service at a time, with the state of its processes.

What always holds: folders have mode 0700. A second service on the same folder is refused, but
waits for a moment while the processes of a killed service are still ending.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from inlay.errors import InlayError
from inlay.locks import lock_file
from inlay.service.settings import ServeSettings
from inlay.store import make_directory, telling_full_disk, write_atomically

LOCK_SECONDS = 10.0
"""longest wait for the processes of a service that was killed"""
_PRIVATE = 0o700


class AlreadyServed(InlayError):
    """A folder that another service uses."""

    code = "already-served"
    exit_status = 18
    http_status = 503

    def __init__(self, home: Path, holder: Mapping[str, Any]) -> None:
        where = f" at {holder['address']}" if holder.get("address") else ""
        who = f", process {holder['pid']}" if holder.get("pid") else ""
        super().__init__(
            f"a service already runs on `{home}`{where}{who}", "stop it first, or choose another folder with `--store`"
        )


def prepare_home(settings: ServeSettings) -> None:
    """Make the service's folders, private; refuse one that cannot be written to."""
    try:
        make_directory(settings.home)
        for folder in (settings.folder, settings.run_folder, settings.engine_socket.parent, settings.metrics_folder):
            make_directory(folder)
            _make_private(folder)
        probe = settings.run_folder / f".writable-{os.getpid()}"
        with telling_full_disk(probe, 1):
            probe.write_bytes(b"0")
        probe.unlink()
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise _not_writable(settings.home, error) from error
    except OSError as error:
        if error.errno == 30:  # a read-only file system
            raise _not_writable(settings.home, error) from error
        raise


def _not_writable(home: Path, error: OSError) -> InlayError:
    reason = (error.strerror or str(error)).lower()
    return InlayError(
        f"`{home}` cannot be written to: {reason}",
        "choose another folder with `--store DIR` or $INLAY_HOME, or let this account write there",
    )


def _make_private(folder: Path) -> None:
    if folder.stat().st_uid != os.getuid():  # anybody may have made it in the folder for temporary files
        raise PermissionError(1, "the folder belongs to another account", str(folder))
    folder.chmod(_PRIVATE)


class HomeLock:
    """The lock on a service's folder, held until the supervisor and all processes that inherited it have ended."""

    def __init__(self, settings: ServeSettings, patience_s: float = LOCK_SECONDS) -> None:
        self._path = settings.run_folder / "lock"
        self.descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        until = time.monotonic() + patience_s
        while True:
            try:
                lock_file(self.descriptor)
                break
            except BlockingIOError:
                holder = _read_object(self._path)
                if is_alive(holder.get("pid")) or time.monotonic() > until:
                    os.close(self.descriptor)
                    raise AlreadyServed(settings.home, holder) from None
            time.sleep(0.05)
        self.tell(settings)

    def tell(self, settings: ServeSettings) -> None:
        """Write the process id and the address of this service, for the error of a second service."""
        text = json.dumps({"pid": os.getpid(), "address": settings.address}).encode()
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, text, 0)

    def release(self) -> None:
        """Release the folder; processes that inherited the lock keep it until they end."""
        os.close(self.descriptor)


def is_alive(pid: object) -> bool:
    """Return whether there is a process with this id."""
    if not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's process
        return True
    return True


def write_status(settings: ServeSettings, status: Mapping[str, Any]) -> None:
    """Write the state of the processes, for the operator's page, the metrics and `inlay doctor`."""
    with suppress(OSError, InlayError):  # a full disk must not stop the supervisor
        write_atomically(settings.run_folder / "status.json", json.dumps(status).encode())


def read_status(settings: ServeSettings) -> dict[str, Any]:
    """Return the state of the processes that the supervisor wrote last; empty where no service ever ran.

    `is_running` says whether that supervisor is still alive.
    """
    status = _read_object(settings.run_folder / "status.json")
    return status and status | {"is_running": is_alive(status.get("pid"))}


def write_fleet(settings: ServeSettings, members: Sequence[Mapping[str, Any]]) -> None:
    """Write the list of engines and trainers on a cluster, for the operator."""
    with suppress(OSError, InlayError):
        write_atomically(settings.run_folder / "fleet.json", json.dumps({"members": list(members)}).encode())


def read_fleet(settings: ServeSettings) -> list[dict[str, Any]]:
    """Return the engines and trainers on the cluster, as last written; none without a cluster."""
    found = _read_object(settings.run_folder / "fleet.json") if settings.cluster is not None else {}
    return list(found.get("members", ()))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
