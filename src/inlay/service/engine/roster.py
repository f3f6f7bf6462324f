"""The roster: a file with the engines of a service on several machines, which one process keeps up to date.

`service/on_ray/` replaces the file as a whole, and `fleet_client.py` reads it when it has changed. So the processes
that take requests need to know nothing of Ray.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from inlay.service.settings import ROSTER_VARIABLE
from inlay.store import write_atomically

_LOOK_S = 0.05


class Replica(msgspec.Struct, frozen=True, order=True):
    """One of several equal engines: its address, and its name, which stays when the engine is restarted."""

    name: str
    host: str
    port: int


class Roster(msgspec.Struct, frozen=True):
    """The engines that answer now, and what they have in common."""

    revision: int = 0
    token: str = ""
    """what a client must send first on a connection"""
    replicas: tuple[Replica, ...] = ()
    is_crowded: bool = False
    """whether more versions are in use than one engine has slots: then each task has engines of its own"""


_decoder = msgspec.json.Decoder(Roster)


class RosterFile:
    """The roster as it is on the disk of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = Roster()
        self._mark: tuple[int, int] | None = None
        self._looked_at = -_LOOK_S

    def read(self) -> Roster:
        """Return the roster, at most 50 ms old; an empty one while there is no file."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return self._known
        self._looked_at = now
        try:
            found = self._path.stat()
            if self._mark != (mark := (found.st_mtime_ns, found.st_ino)):
                self._known, self._mark = _decoder.decode(self._path.read_bytes()), mark
        except (OSError, msgspec.DecodeError):
            return self._known  # there is no file yet, or it cannot be read: the last one may still be right
        return self._known

    def write(self, roster: Roster) -> None:
        """Replace the roster."""
        write_atomically(self._path, msgspec.json.encode(roster))


def find_roster(variables: Mapping[str, str] = os.environ) -> RosterFile | None:
    """Return the roster that the environment names; None if the service has one engine on this machine."""
    path = variables.get(ROSTER_VARIABLE)
    return None if path is None else RosterFile(Path(path))
