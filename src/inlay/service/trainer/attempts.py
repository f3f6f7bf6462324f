"""The folders of attempts at some work: taken over by the next attempt, kept for other machines, and swept.

Where several machines share a service, every attempt keeps its folder on object storage, under its own number. So an
attempt that lost its lease and goes on all the same disturbs nobody. The next attempt continues from the files of its
own machine or from the kept ones, whichever are later.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from inlay.errors import InlayError, StoreDamaged
from inlay.service.logs import log_event
from inlay.service.state import SharedFiles
from inlay.service.trainer.job_data import TrainerContext
from inlay.store import make_directory

_ATTEMPT = re.compile(r"attempt-([1-9][0-9]*)")


class KeptAttempts:
    """The kept attempts at one piece of work, in the folder `home`. Nothing is kept where only one machine works."""

    def __init__(self, files: SharedFiles, home: Path, token: int) -> None:
        self._files, self._home, self._token = files, home, token
        self._own = files.snapshots(home / f"attempt-{token}")

    def fetch(self, folder: Path, latest_here: int) -> bool:
        """Restore what the latest attempt kept into `folder`, if that attempt is later than `latest_here`.

        Returns whether it did. Damaged files are left alone: then the work begins anew.
        """
        if self._own is None:
            return False
        found = map(_ATTEMPT.fullmatch, self._files.names(self._home, only_shared=True))
        numbers = [int(match[1]) for match in found if match]
        for number in sorted(numbers, reverse=True):
            if number >= self._token:
                continue
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

    def save(self, folder: Path) -> bool:
        """Keep a folder as it is now, and tell whether that worked. If not, the next attempt has more to do."""
        if self._own is None:
            return False
        try:
            self._own.save(folder)
        except InlayError as error:
            log_event("a place could not be kept for other machines", {"error": error.message}, level=30)
            return False
        return True

    def drop(self) -> None:
        """Delete what all attempts have kept, once the work is done."""
        if self._own is not None:
            self._files.remove(self._home)


def take_over(home: Path, folder: Path, kept: KeptAttempts) -> None:
    """Give a cohort's files to this attempt: the folder of the last attempt gets the name of this one.

    An attempt that still writes under the old name writes to files that nobody reads. If the last attempt was on
    another machine, the files that it kept are fetched.
    """
    make_directory(home)
    earlier = {int(path.name.rpartition("-")[2]): path for path in home.glob("attempt-*")}
    latest = max(earlier, default=0)
    if not kept.fetch(folder, latest) and latest:
        os.rename(earlier[latest], folder)
    make_directory(folder)


def sweep_runs(context: TrainerContext, *, only_here: bool = False) -> int:
    """Delete the run folders of cohorts that are done, also those that a stale attempt made again; return how many.

    With `only_here` object storage is left alone.
    """
    folder, files = context.db.paths.runs, context.db.files
    found = [path.name for path in folder.glob("*")] if only_here else files.names(folder)
    names = [name for name in found if name.startswith("cohort_")]  # listed before the open cohorts: none is newer
    alive = context.queue.open_cohorts() if names else set()
    left = [name for name in names if name not in alive]
    for name in left:
        if only_here:
            shutil.rmtree(folder / name, ignore_errors=True)
        else:
            files.remove(folder / name)
    return len(left)
