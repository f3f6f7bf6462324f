"""Locks: between threads, taken in the order in which they were asked for; and between processes, on open files.

A lock on a file is Unix's `flock`. Reading a store takes none, so a system without it can answer. Writers are
refused there: without locks two of them would harm each other unnoticed.

`threading.RLock` goes to whichever thread asks first once it is free, nearly always the one that just released it: a
training would keep a request waiting for hundreds of steps.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, get_ident
from typing import IO, Any
from weakref import WeakKeyDictionary

from inlay.errors import Unsupported

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

TRAINING_LOCK = "training.lock"
"""the file in a cohort's folder by which a process claims the runs that it trains"""
_LOOKS, _BETWEEN_LOOKS_S = 4, 0.003
"""how often to look whether a file is claimed: who looks locks it too, but only for an instant"""


def lock_file(file: int | IO[Any], *, is_shared: bool = False, waits: bool = False) -> None:
    """Lock an open file against other processes until it is closed; unless it `waits`, raise BlockingIOError if held.

    A process that dies releases its locks.
    """
    if fcntl is None:
        raise Unsupported(
            f"writing to a store on this system (`{os.name}`), which has no file locks as Unix has them",
            "answer with `inlay predict` here; train on Linux or macOS, or in the Windows Subsystem for Linux",
        )
    fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))


def unlock_file(file: int | IO[Any]) -> None:
    """Release a lock now. Closing is not enough: a child that was forked meanwhile has the file open too."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def claim(path: Path, names: Sequence[str]) -> Iterator[None]:
    """Record in a file, while the block runs, that this process works on the things with these names.

    Several processes may claim the same. Where the file system has no locks, nothing is recorded and no file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
        try:
            lock_file(file, is_shared=True, waits=True)  # a reader has it for an instant
        except (OSError, Unsupported):
            file.close()  # first, as Windows deletes no open file
            with suppress(OSError):
                path.unlink(missing_ok=True)
            yield
            return
        about = {"names": list(names), "host": platform.node(), "process": os.getpid()}
        file.truncate(0)
        file.write(json.dumps(about).encode())
        try:
            yield
        finally:
            with suppress(OSError):
                unlock_file(file)


@dataclass(frozen=True)
class FileClaim:
    """The last claim in a file: the names claimed, and the process and machine that claimed them."""

    names: tuple[str, ...]
    host: str
    process: int
    is_held: bool
    """whether a process has it now"""
    is_sure: bool
    """whether `is_held` can be relied on: locks of another machine may not be seen here"""


def read_claim(path: Path) -> FileClaim | None:
    """Read the last claim in a file, and whether it is still held; None if the file cannot be read."""
    try:
        # NFS locks only files that are open for writing.
        with path.open("r+b" if os.access(path, os.W_OK) else "rb") as file:
            is_held = _is_locked(file)
            about = json.loads(file.read())
        names, host, process = tuple(about["names"]), str(about["host"]), int(about["process"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_sure = is_held or (is_held is not None and host == platform.node())
    return FileClaim(names, host, process, bool(is_held), is_sure)


def _is_locked(file: IO[bytes]) -> bool | None:
    """Tell whether another process claims an open file; None where that cannot be known."""
    for _ in range(_LOOKS):
        try:
            lock_file(file)
        except BlockingIOError:
            time.sleep(_BETWEEN_LOOKS_S)
        except (OSError, Unsupported):
            return None
        else:
            unlock_file(file)
            return False
    return True


class FairLock:
    """A lock that its owner may take again, and that waiting threads get in the order they came."""

    def __init__(self) -> None:
        self._guard = Lock()  # held for a few instructions
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, Lock]] = deque()
        """the threads that wait, each at a gate that is opened when the lock is theirs"""

    def __enter__(self) -> None:
        thread = get_ident()
        if self._owner == thread:  # nobody else can have set it
            self._depth += 1
            return
        with self._guard:
            if self._owner is None:
                self._owner, self._depth = thread, 1
                return
            gate = Lock()
            gate.acquire()
            self._waiting.append((thread, gate))
        try:
            gate.acquire()
        except BaseException:  # Ctrl-C while it waits
            self._withdraw(thread, gate)
            raise

    def __exit__(self, *raised: object) -> None:
        self._depth -= 1
        if not self._depth:
            with self._guard:
                self._hand_on()

    def _hand_on(self) -> None:
        self._owner = None
        if self._waiting:
            self._owner, gate = self._waiting.popleft()
            self._depth = 1
            gate.release()

    def _withdraw(self, thread: int, gate: Lock) -> None:
        with self._guard:
            if (thread, gate) in self._waiting:
                self._waiting.remove((thread, gate))
            else:  # it was handed over just now
                self._hand_on()


_LOCKS: WeakKeyDictionary[Any, FairLock] = WeakKeyDictionary()
_FINDING = Lock()


def lock_of(shared: Any) -> FairLock:
    """Return the lock of an object that is not ours, such as a tokenizer: the same for all who share it."""
    with _FINDING:
        found = _LOCKS.get(shared)
        if found is None:
            found = _LOCKS[shared] = FairLock()
        return found
