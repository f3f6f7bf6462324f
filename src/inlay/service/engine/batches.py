"""The next batch: rows are taken from the queue while the last batch runs, as many as fit the target time.

A batch holds its versions in their slots. A row whose version is not hot (in a slot) is parked while the version is
loaded, and then comes back to the front of its tenant's queue. So no batch waits for a disk.

What always holds: a version in a batch is held until `release`; a version that was loaded for parked rows is held until
one of them is in a batch, or none of them waits any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from inlay.errors import InlayError
from inlay.service.engine.fair_queue import FairQueue, WaitingRow
from inlay.serving import EncodedRequest, HotVersion, HotVersions, Resolved

_KEPT = 0.9  # weight of earlier batches in the measured speed, after each batch
_LEAST_SHARE = 0.25  # of the target time: shorter batches measure the fixed costs of a pass, not the work in it


@dataclass(eq=False)
class PreparedBatch:
    """Rows to be answered together, and their versions in their slots."""

    rows: list[WaitingRow] = field(default_factory=list)
    states: dict[str, HotVersion | InlayError] = field(default_factory=dict)
    work: float = 0.0
    """tokens that go through all layers; rows that share a text count less"""
    _keys: set[Hashable] = field(default_factory=set)

    def find_work(self, item: EncodedRequest) -> float:
        """Return the work that a request would add to the batch."""
        is_shared = (item.checked.scope, item.tokens.keys) in self._keys
        return item.tokens.num_tokens * (1 - item.checked.share if is_shared else 1)

    def count_work(self, item: EncodedRequest) -> float:
        """Add the work of a request to the batch, and return it."""
        work = self.find_work(item)
        self.work += work
        if item.checked.share:
            self._keys.add((item.checked.scope, item.tokens.keys))
        return work

    def has_room(self, item: EncodedRequest, budget: float) -> bool:
        """Return whether a request may join the batch.

        A row whose text is already in the batch may join a full batch if it adds no work. If it adds some, it may join
        while the batch costs at most two such rows: on a slow machine one row alone fills a batch.
        """
        work = self.find_work(item)
        if work == item.tokens.num_tokens:
            return self.work < budget
        return work == 0 or self.work + work <= max(budget, 2 * item.tokens.num_tokens)


class BatchFormer:
    """Fills the next batch. `take` and `release` are called by the compute thread, everything else by the event loop's.

    `find_budget` returns the work that a batch may have. `want` is called with a version that is not hot and a tenant
    that waits for it; a call of `arrived` or `failed` must follow.
    """

    def __init__(
        self,
        queue: FairQueue,
        hot: HotVersions,
        find_budget: Callable[[], float],
        want: Callable[[Resolved, str], None],
    ) -> None:
        self._queue, self._hot = queue, hot
        self._find_budget, self._want = find_budget, want
        self._next = PreparedBatch()
        self._changed = threading.Condition()  # guards the next batch
        self._is_closed = False
        self._parked: dict[str, list[WaitingRow]] = {}
        self._claimed: dict[str, list[WaitingRow]] = {}

    @property
    def is_empty(self) -> bool:
        """Return whether there is no row in the queue or in the next batch."""
        return not self._queue.num_rows and not self._next.rows

    def fill(self) -> None:
        """Take rows into the next batch until it is full or no row is ready."""
        budget = self._find_budget()
        with self._changed:
            had_rows = bool(self._next.rows)
            batch = self._next
            while (row := self._queue.take(self._price, lambda row: batch.has_room(row.item, budget))) is not None:
                batch.rows.append(row)
            if self._next.rows and not had_rows:
                self._changed.notify()
        for digest in [digest for digest, rows in self._claimed.items() if not any(row.is_waiting for row in rows)]:
            self._unclaim(digest)

    def take(self) -> PreparedBatch | None:
        """Wait for the next batch and return it; None once closed. A call of `fill` should follow."""
        with self._changed:
            while not self._next.rows and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            batch, self._next = self._next, PreparedBatch()
        return batch

    def release(self, batch: PreparedBatch) -> None:
        """Stop holding the versions of a batch that was computed."""
        self._hot.release(batch.states)

    def arrived(self, digest: str) -> None:
        """Put the rows that waited for a version back into the queue. It is hot now, and held for them."""
        rows = [row for row in self._parked.pop(digest, []) if row.is_waiting]
        if not rows:
            self._hot.release([digest])
            return
        self._claimed[digest] = rows
        self._queue.put_back(rows)
        self.fill()

    def failed(self, digest: str) -> list[WaitingRow]:
        """Drop the rows that waited for a version that cannot be loaded, and return them."""
        return [row for row in self._parked.pop(digest, []) if self._queue.drop(row)]

    def close(self) -> list[WaitingRow]:
        """End `take`, and return the rows of the next batch, which will not be computed."""
        with self._changed:
            self._is_closed = True
            batch, self._next = self._next, PreparedBatch()
            self._changed.notify_all()
        self.release(batch)
        for digest in list(self._claimed):
            self._unclaim(digest)
        return batch.rows

    def _price(self, row: WaitingRow) -> float | None:
        """Return the work that a row adds to the next batch, and hold its version; park the row if that is not hot."""
        item: EncodedRequest = row.item
        batch, digest = self._next, item.digest
        if digest not in batch.states:
            hot = self._hot.hold_hot(digest)
            if hot is None:
                self._park(row, item)
                return None
            batch.states[digest] = hot
            self._unclaim(digest)
        return batch.count_work(item)

    def _park(self, row: WaitingRow, item: EncodedRequest) -> None:
        others = self._parked.setdefault(item.digest, [])
        others.append(row)
        if len(others) == 1:
            self._unclaim(item.digest)
            self._want(item.checked.found, row.caller.tenant)

    def _unclaim(self, digest: str) -> None:
        if self._claimed.pop(digest, None) is not None:
            self._hot.release([digest])


class WorkRate:
    """The work done in a second, as measured by recent batches: per second of the clock, and per second of computing.

    They differ if other processes use the same cores. The budget of a batch goes by the time of computing: batches that
    shrank with the share of a core would cost more for each row, and everybody would wait longer.
    """

    def __init__(self, per_s: float, target_s: float) -> None:
        self._work, self._seconds, self._busy_s = per_s, 1.0, 1.0
        self._target_s = target_s

    @property
    def per_s(self) -> float:
        """Return the work that is done in a second."""
        return self._work / self._seconds

    @property
    def budget(self) -> float:
        """Return the work that fits the target time of computing."""
        return self._work / self._busy_s * self._target_s

    def learn(self, work: float, seconds: float, busy_s: float) -> None:
        """Take a batch into account, which took `busy_s` of computing.

        A short batch mostly shows the fixed costs of a pass, so it counts only if it was faster than before.
        """
        is_short = busy_s < _LEAST_SHARE * self._target_s
        if busy_s <= 0 or (is_short and work / busy_s < self._work / self._busy_s):
            return
        self._work = _KEPT * self._work + work
        self._seconds = _KEPT * self._seconds + max(seconds, busy_s)
        self._busy_s = _KEPT * self._busy_s + busy_s
