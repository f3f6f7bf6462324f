"""Claims: files that tell all processes that share a folder of runs which runs another one is training.

A process claims the runs of a unit before it trains them: it writes their ids to a file of its own under `runs/claims`,
and locks that file until the unit is done. The operating system frees the lock when the process dies. A claim whose
lock is free no longer counts, and other processes take over its runs. To read claims or make one, a process holds
`.lock`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from inlay.locks import lock_file, unlock_file
from inlay.store import locked, make_directory


class Claims:
    """The claims of all processes that train into one folder of runs."""

    def __init__(self, runs: Path) -> None:
        self._folder = runs / "claims"

    @contextlib.contextmanager
    def choosing(self) -> Iterator[set[str]]:
        """Keep other processes from claiming inside the block; yields the runs that are claimed."""
        make_directory(self._folder)
        with locked(self._folder / ".lock", exclusive=True):
            yield {run_id for path in sorted(self._folder.glob("*.json")) for run_id in _read_claim(path)}

    def claim(self, run_ids: Iterable[str]) -> Callable[[], None]:
        """Claim runs until this process dies or calls the returned function.

        Call it inside `choosing`, for unclaimed runs.
        """
        path = self._folder / f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}.json"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)

        def release() -> None:
            path.unlink(missing_ok=True)
            unlock_file(descriptor)
            os.close(descriptor)

        try:
            lock_file(descriptor, waits=True)
            os.write(descriptor, json.dumps(sorted(run_ids)).encode())
            os.fsync(descriptor)  # other hosts must not see an empty claim
        except BaseException:
            release()
            raise
        return release


def _read_claim(path: Path) -> list[str]:
    """Read the runs of a claim; if its process has died, remove the file and return none."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:  # released just now
        return []
    try:
        lock_file(descriptor)
    except BlockingIOError:
        with open(descriptor, "rb", closefd=False) as file:
            return list(json.loads(file.read()))
    else:
        path.unlink(missing_ok=True)
        return []
    finally:
        os.close(descriptor)
