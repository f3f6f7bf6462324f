"""Locks between threads that are taken in the order in which they were asked for.

`threading.RLock` goes to whoever asks first after it is free, which is nearly always the thread that just gave it back:
a training would keep a request waiting for hundreds of steps.
"""

from __future__ import annotations

from collections import deque
from threading import Lock, get_ident
from typing import Any
from weakref import WeakKeyDictionary


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
    """The lock of an object that is not ours, such as a tokenizer: the same for all who share it."""
    with _FINDING:
        found = _LOCKS.get(shared)
        if found is None:
            found = _LOCKS[shared] = FairLock()
        return found
