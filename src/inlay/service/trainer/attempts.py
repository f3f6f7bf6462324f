"""Attempts at some work, kept on object storage for the next one, which may be another machine's.

Every attempt keeps its folder under its own number, so one that lost its lease and goes on all the same disturbs
nobody. The next attempt goes on from its own machine's files or from those that were kept, whichever are later.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from inlay.errors import InlayError, StoreDamaged
from inlay.service.logs import log_event
from inlay.service.state import SharedFiles

_ATTEMPT = re.compile(r"attempt-([1-9][0-9]*)")


class KeptAttempts:
    """The attempts at one piece of work, in the folder `home`. On one machine they need not be kept elsewhere."""

    def __init__(self, files: SharedFiles, home: Path, token: int) -> None:
        self._files, self._home, self._token = files, home, token
        self._own = files.snapshots(home / f"attempt-{token}")

    def fetch(self, folder: Path, latest_here: int) -> bool:
        """Make `folder` what the latest attempt kept, unless that of number `latest_here` was this machine's or later.

        Tells whether it did. Files that are damaged are left alone: the work begins anew.
        """
        if self._own is None:
            return False
        for number in sorted(self._numbers(), reverse=True):
            if number <= latest_here:
                return False
            kept = self._files.snapshots(self._home / f"attempt-{number}")
            try:
                if kept is not None and kept.is_there():
                    shutil.rmtree(folder, ignore_errors=True)
                    return kept.restore(folder)
            except StoreDamaged as error:
                log_event("what an attempt kept is damaged", {"attempt": number, "error": error.message}, level=30)
        return False

    def save(self, folder: Path) -> None:
        """Keep a folder as it is now. Work goes on if that fails; then the next attempt has more to do."""
        if self._own is not None:
            try:
                self._own.save(folder)
            except InlayError as error:
                log_event("a place could not be kept for other machines", {"error": error.message}, level=30)

    def drop(self) -> None:
        """Delete what all attempts have kept: the work is done."""
        if self._own is not None:
            self._files.remove(self._home)

    def _numbers(self) -> list[int]:
        found = map(_ATTEMPT.fullmatch, self._files.names(self._home, only_shared=True))
        return [number for match in found if match and (number := int(match[1])) < self._token]
