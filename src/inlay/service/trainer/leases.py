"""The lease of a cohort during the work on it: a thread sends heartbeats, and the work checks that it still holds.

What always holds: once the lease may be over, `check` raises, whatever the time of day is set to. The lease is measured
by a clock that goes on while the process is stopped, from before the last heartbeat was sent. So a process that was
stopped and wakes up finds that its lease is over before it does anything else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.service.logs import log_event, log_failure
from inlay.service.state import HEARTBEAT_S, LEASE_S, JobCohort, JobQueue, StaleLease
from inlay.store import Manifest, Store, Version

if TYPE_CHECKING:
    from torch import Tensor

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # also goes on while the machine sleeps
_MARGIN = 0.6  # the share of a lease that is relied upon


def read_clock() -> float:
    """Return seconds of a clock that only goes forward, and goes on while this process is stopped."""
    return time.clock_gettime(_CLOCK)


class FencedStore(Store):
    """A store that asks, right before it adds a version, whether the cohort is still held."""

    def __init__(self, store: Store, lease: Lease) -> None:
        vars(self).update(vars(store))  # they share their caches: either sees at once what the other published
        self._lease = lease

    def publish(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        manifest: Manifest,
        sidecar: Mapping[str, Any] | None = None,
    ) -> Version:
        """Add one immutable version; StaleLease if the lease is lost."""
        self._lease.confirm()
        return super().publish(name, tensors, manifest, sidecar)


class Lease:
    """The hold on a cohort, for a `with` block. `cancelled` has the ids of its jobs that are to be cancelled."""

    def __init__(
        self, queue: JobQueue, cohort: JobCohort, *, heartbeat_s: float = HEARTBEAT_S, lease_s: float = LEASE_S
    ) -> None:
        self._queue, self.cohort = queue, cohort
        self._heartbeat_s, self._trusted_s = heartbeat_s, _MARGIN * lease_s
        self.cancelled: frozenset[str] = frozenset(job.id for job in cohort.jobs if job.cancel_requested)
        self._is_lost = self._is_done = False
        self._seen_at = read_clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def finish(self) -> None:
        """End the heartbeats: all jobs of the cohort have ended, and the database has closed it."""
        self._is_done = True
        self._ended.set()

    def check(self) -> None:
        """Raise StaleLease if the cohort may be another trainer's by now. Takes a microsecond."""
        if self._is_done:
            return
        if self._is_lost or read_clock() - self._seen_at > self._trusted_s:
            raise StaleLease(self.cohort.id, self.cohort.token)

    def confirm(self) -> None:
        """Ask the database whether the cohort is still held; raise StaleLease if not. Before something is published."""
        self.check()
        self._renew()
        self.check()

    def _renew(self) -> None:
        began = read_clock()
        answer = self._queue.heartbeat(self.cohort)
        if answer.is_held:
            self._seen_at, self.cancelled = began, self.cancelled | frozenset(answer.cancelled)
        else:
            self._is_lost = True

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat_s) and not self._is_lost:
            try:
                self._renew()
            except InlayError as error:  # perhaps a full disk: the next heartbeat may succeed
                log_event("a heartbeat failed", {"cohort": self.cohort.id, "code": error.code}, level=30)
            except Exception:
                log_failure("a heartbeat failed", {"cohort": self.cohort.id})
        if self._is_lost and not self._is_done:
            log_event("the lease is lost", {"cohort": self.cohort.id, "attempt": self.cohort.token}, level=30)
