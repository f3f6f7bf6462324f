"""The roster: the engines that answer for a service on several machines, as a file that one process keeps up to date.

Who keeps it (`service/on_ray/`) replaces the file whole; who asks (`fleet_client.py`) reads it when it has changed. So
no process that takes requests needs to know what places and restarts engines.
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
    """One of several engines that answer the same: its name, which stays when it is started again, and its address."""

    name: str
    host: str
    port: int


class Roster(msgspec.Struct, frozen=True):
    """The engines that answer now, and what they have in common."""

    revision: int = 0
    token: str = ""
    """what an engine wants to be told first"""
    replicas: tuple[Replica, ...] = ()
    is_crowded: bool = False
    """whether more versions are asked for than one engine has slots: then each task has its own engines"""


_decoder = msgspec.json.Decoder(Roster)


class RosterFile:
    """The roster as it is on the disk of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = Roster()
        self._mark: tuple[int, int] | None = None
        self._looked_at = -_LOOK_S

    def read(self) -> Roster:
        """Return the roster, at most some hundredths of a second old; an empty one before there is any."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return self._known
        self._looked_at = now
        try:
            found = self._path.stat()
            if self._mark != (mark := (found.st_mtime_ns, found.st_ino)):
                self._known, self._mark = _decoder.decode(self._path.read_bytes()), mark
        except (OSError, msgspec.DecodeError):
            return self._known  # it is being made, or the disk is gone: what was known may still hold
        return self._known

    def write(self, roster: Roster) -> None:
        """Replace the roster."""
        write_atomically(self._path, msgspec.json.encode(roster))


def find_roster(variables: Mapping[str, str] = os.environ) -> RosterFile | None:
    """Return the roster that this process was told of; None where one engine is on this machine."""
    path = variables.get(ROSTER_VARIABLE)
    return None if path is None else RosterFile(Path(path))
