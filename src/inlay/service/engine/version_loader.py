"""The loading of versions for rows that wait for them, in threads of its own.

Tenants take turns, so that one that asks for a hundred cold tasks does not delay the others. A version that could not
be loaded is not tried again at once, so that requests for it do not keep the disk busy.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from inlay.errors import InlayError
from inlay.service.logs import log_event
from inlay.serving import HotVersions, Resolved, as_error

NUM_THREADS = 2  # so that one slow version does not delay all others
_RETRY_AFTER_S = 2.0  # until a version that failed is tried again
_MOST_FAILURES = 1000


class VersionLoader:
    """Loads versions in threads; everything else happens in the event loop's thread.

    `arrived` is called with the digest of a version that is in a slot now and held there; `failed` with the digest of
    one that cannot be loaded, and the error.
    """

    def __init__(
        self, hot: HotVersions, arrived: Callable[[str], None], failed: Callable[[str, InlayError], None]
    ) -> None:
        self._hot, self._arrived, self._failed = hot, arrived, failed
        self._wanted: OrderedDict[str, deque[Resolved]] = OrderedDict()  # by tenant; the next one is first
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="load")
        self._num_loading = 0
        self._failures: dict[str, tuple[float, InlayError]] = {}
        self.num_failed = 0

    def want(self, found: Resolved, tenant: str) -> None:
        """Load a version that rows of a tenant wait for; `arrived` or `failed` will be called."""
        digest = found.version.digest
        at, error = self._failures.get(digest, (0.0, None))
        if error is not None and time.monotonic() - at < _RETRY_AFTER_S:
            asyncio.get_running_loop().call_soon(self._failed, digest, error)
            return
        self._wanted.setdefault(tenant, deque()).append(found)
        self._begin()

    def close(self) -> None:
        """Begin no more loads. Those that run may finish."""
        self._wanted.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while self._wanted and self._num_loading < NUM_THREADS:
            tenant, versions = self._wanted.popitem(last=False)
            found = versions.popleft()
            if versions:
                self._wanted[tenant] = versions  # at the end: the other tenants come first
            self._num_loading += 1
            loop = asyncio.get_running_loop()
            task = loop.run_in_executor(self._pool, self._load, found)
            task.add_done_callback(lambda done, found=found: self._end(found, done))  # type: ignore[misc]

    def _load(self, found: Resolved) -> InlayError | None:
        began = time.monotonic()
        try:
            self._hot.hold(found)
        except Exception as error:  # the border: the rows that wait for this version get the error
            return as_error(error)
        log_event("loaded", {"version": found.version.reference, "seconds": round(time.monotonic() - began, 3)})
        return None

    def _end(self, found: Resolved, done: asyncio.Future[InlayError | None]) -> None:
        self._num_loading -= 1
        digest = found.version.digest
        error = None if done.cancelled() else done.result()
        if error is None:
            self._failures.pop(digest, None)
            self._arrived(digest)
        else:
            self.num_failed += 1
            log_event("cannot be loaded", {"version": found.version.reference, "code": error.code}, level=30)
            if len(self._failures) >= _MOST_FAILURES:
                self._failures.clear()
            self._failures[digest] = time.monotonic(), error
            self._failed(digest, error)
        self._begin()
