"""The number of threads that compute on a CPU: as many as other processes leave cores free.

torch's threads meet after every operation, and the early ones spin until the last one arrives. On an idle machine that
is fastest. Beside a busy process, one of the threads mostly waits for its core, and two threads are then several times
slower than one. So training looks at the machine before it begins and every few seconds after that, and takes the cores
that are left. A user who asks for a number, or sets `OMP_NUM_THREADS`, gets that number.

Threads that sleep at once instead of spinning (`OMP_WAIT_POLICY=passive`) suffer less beside other processes, but on an
idle machine they lose what the second core gains. So the command line lets them spin for a shorter time
(bench/threads.py). torch is not imported before a number is set: its OpenMP library reads the environment when it is
loaded.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from inlay.locks import FairLock

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""environment variables that set the number of torch's threads"""
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
SPINS = "10000"
"""about a tenth of a millisecond; the library's own 300,000 are longer than a time slice of the scheduler"""
_FIRST_SECONDS = 0.3  # the first look takes this long, since the counters tick in hundredths of a second
_AGAIN_SECONDS = 5.0  # between two looks while training; a look costs nothing and covers all the time since the last
_SPARE = 0.3  # the share of the last free core that other processes may take
_SPARE_FOR_MORE = 0.15  # the same before a thread is added, so that the number does not swing to and fro
_IDLE = (3, 4)  # columns of /proc/stat: idle, and waiting for a disk


_SETTING = FairLock()  # held while the number is set, and as long as it must not change
_GENERATORS: dict[tuple[str, int], FairLock] = {}
_FINDING = Lock()


def spin_briefly() -> None:
    """Let the threads of this process spin briefly, unless the user set a time; call it before torch loads."""
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = SPINS


class _Counters(NamedTuple):
    at: float
    idle_s: float
    """idle time of all cores that this process may use, together"""
    own_s: float
    """processor time of this process, in all its threads"""


class Threads:
    """The number of threads of one training, `most` at most: the number asked for, or the number of free cores."""

    def __init__(self, most: int, asked: int | None = None, *, root: Path = Path("/")) -> None:
        self.number, self.note = asked or most, ""
        self._most, self._root, self._changes = most, root, 0
        self._last: _Counters | None = None
        if asked is None and most > 1 and not is_set(os.environ):
            self._quota = find_quota(root)
            self._last = _count(root)
        if self._last is not None:
            time.sleep(_FIRST_SECONDS)
            self.look_again(0.0)

    def look_again(self, after_s: float = _AGAIN_SECONDS) -> bool:
        """Choose the number again, by what other processes took since the last look, and return whether it changed.

        There is no look before `after_s` have passed.
        """
        if self._last is None or time.monotonic() - self._last.at < after_s:
            return False
        before, self._last = self._last, _count(self._root)
        if self._last is None or self._last.at <= before.at:
            return False
        left_s = self._last.idle_s - before.idle_s + self._last.own_s - before.own_s
        free = left_s / (self._last.at - before.at)
        number = choose_number(self.number, self._most, min(free, self._quota))
        if number == self.number:
            return False
        self.number, self._changes = number, self._changes + 1
        self.note = self._describe(free)
        return True

    @property
    def is_news(self) -> bool:
        """Return whether the last change is worth a line: other processes may come and go all day."""
        return self._changes <= 2

    def _describe(self, free: float) -> str:
        if self._quota < min(free, self._most):
            return f"threads: {self.number} of {self._most}: this container may use {self._quota:g} cores"
        busy = max(0.0, self._most - free)
        return f"threads: {self.number} of {self._most}: other processes keep {busy:.1f} cores busy"


def choose_number(present: int, most: int, free: float) -> int:
    """Return as many threads as cores are free, or nearly free; to add threads, a little more must be free."""
    fewer, more = (max(1, min(most, math.floor(free + spare))) for spare in (_SPARE, _SPARE_FOR_MORE))
    return fewer if fewer < present else max(present, more)


def is_set(variables: Mapping[str, str]) -> bool:
    """Return whether the environment sets the number of threads."""
    return any(variables.get(name) for name in VARIABLES)


def find_quota(root: Path = Path("/")) -> float:
    """Return how many cores' worth of time this process's control groups allow; infinity where there is no limit."""
    found = [math.inf]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        path = Path(place.strip("/"))
        for group in (path, *path.parents):
            if not controllers:
                found.append(_divide(*_read(root / "sys/fs/cgroup" / group / "cpu.max").split()[:2]))
            elif "cpu" in controllers.split(","):
                folder = root / "sys/fs/cgroup/cpu" / group
                found.append(_divide(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")))
    return min(found)


def _divide(quota: str = "", period: str = "") -> float:
    """Return quota / period; infinity for `max` and -1, which mean no limit."""
    is_limit = quota.strip().isdigit() and period.strip().isdigit() and int(period) > 0
    return int(quota) / int(period) if is_limit else math.inf


def _count(root: Path) -> _Counters | None:
    """Return what the kernel has counted so far; None where it does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = [line.split() for line in _read(root / "proc/stat").splitlines()]
    idle = [sum(int(line[1 + column]) for column in _IDLE) for line in lines if line and line[0] in mine]
    own = os.times()
    if len(idle) < len(mine):
        return None
    return _Counters(time.monotonic(), sum(idle) / os.sysconf("SC_CLK_TCK"), own.user + own.system)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError):
        return ""


@contextmanager
def own_threads(number: int) -> Iterator[None]:
    """Compute with this many threads inside the block."""
    import torch

    before = torch.get_num_threads()
    set_threads(number)
    try:
        yield
    finally:
        set_threads(before)


def set_threads(number: int) -> None:
    """Compute with this many threads from here on; waits while another thread needs the number it set."""
    import torch

    with _SETTING:
        torch.set_num_threads(number)


def generator_lock(device: Any) -> FairLock:
    """Return the lock of a torch device's random generator. Trainings hold it, so that each draws its own numbers."""
    with _FINDING:  # by name: a generator itself takes no weak reference
        return _GENERATORS.setdefault((device.type, device.index or 0), FairLock())


@contextmanager
def single_thread() -> Iterator[None]:
    """Compute with one thread inside the block, whatever a training beside it asks for."""
    with _SETTING, own_threads(1):
        yield
