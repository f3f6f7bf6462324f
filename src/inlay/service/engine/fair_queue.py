"""The queue of rows that wait to be answered, fair to tenants by the work done for them. No torch.

Each tenant has a counter of the work done for it, divided by its weight; the tenant with the least is next (the virtual
token counter of Sheng et al. 2024, "Fairness in Serving Large Language Models"). The counter of a tenant that was idle
is raised to the least of those that wait: unused time is lost. Two bands share in the same way, nineteen to one: bulk
work gets what interactive work leaves, and at least 5%.

What always holds: a row that was added is taken, dropped or parked once; rows that wait or are parked are counted.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from inlay.service.engine.protocol import Band, Caller

BAND_WEIGHTS: dict[Band, float] = {"interactive": 0.95, "bulk": 0.05}
_LEAST_WEIGHT = 1e-3
_MOST_IDLE = 4096  # tenants whose counters are kept while they have no rows


@dataclass(eq=False)
class WaitingRow:
    """A row in the queue. `num_tokens` is its work if it is computed alone; `item` is what will be computed."""

    caller: Caller
    num_tokens: int
    item: Any = None
    ticket: Any = None
    """its request, and its index in it"""
    is_waiting: bool = False


@dataclass(eq=False)
class _Share:
    """One of those that share: a tenant in its band, or a band."""

    weight: float
    served: float = 0.0
    """work done for it, divided by the weight"""
    rows: deque[WaitingRow] = field(default_factory=deque)
    entry: int = -1
    """number of its valid entry in the order; -1 while it has none"""


class _Order:
    """The order of the shares that have rows waiting: the least served first."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, _Share]] = []
        self._numbers = itertools.count()
        self._least = 0.0
        """what the last charged share had been served until then"""

    def enter(self, share: _Share) -> None:
        """Add a share that was idle, with its counter raised to the least of those in the order."""
        first = self.find_first()
        share.served = max(share.served, self._least if first is None else first.served)
        self._put(share)

    def find_first(self) -> _Share | None:
        """Return the share that is next; None if there is none."""
        while self._entries:
            _, number, share = self._entries[0]
            if number == share.entry:
                return share
            heapq.heappop(self._entries)
        return None

    def charge(self, share: _Share, work: float) -> None:
        """Add work to the counter of a share in the order."""
        self._least = max(self._least, share.served)
        share.served += work / share.weight
        self._put(share)

    def leave(self, share: _Share) -> None:
        """Remove a share that has no more rows."""
        share.entry = -1

    def _put(self, share: _Share) -> None:
        share.entry = next(self._numbers)
        heapq.heappush(self._entries, (share.served, share.entry, share))


@dataclass
class _BandQueue:
    share: _Share
    tenants: dict[str, _Share] = field(default_factory=dict)
    order: _Order = field(default_factory=_Order)


@dataclass
class TenantQueue:
    """Counts of the rows and tokens that a tenant has in the queue."""

    num_rows: int = 0
    num_tokens: int = 0


class FairQueue:
    """Rows of many tenants, taken in the order of fairness. It belongs to one thread."""

    def __init__(self) -> None:
        self._bands = {band: _BandQueue(_Share(weight)) for band, weight in BAND_WEIGHTS.items()}
        self._order = _Order()
        self.tenants: dict[str, TenantQueue] = {}
        self.num_rows = 0
        self.num_tokens = 0

    def add(self, rows: Iterable[WaitingRow]) -> None:
        """Add rows at the end of their tenants' queues."""
        for row in rows:
            self._count(row, 1)
            row.is_waiting = True
            self._share_of(row).rows.append(row)
            self._let_in(row)

    def put_back(self, rows: list[WaitingRow]) -> None:
        """Put rows that were parked to the front of their tenants' queues, in order."""
        for row in reversed(rows):
            if row.is_waiting:
                self._share_of(row).rows.appendleft(row)
                self._let_in(row)

    def take(
        self, price: Callable[[WaitingRow], float | None], fits: Callable[[WaitingRow], bool] = lambda row: True
    ) -> WaitingRow | None:
        """Take the next row; None if there is none or it does not fit: no other row overtakes it.

        `price` returns the work of a row, or None if the row was parked: then the next one is tried.
        """
        while (share := self._order.find_first()) is not None:
            band = next(band for band in self._bands.values() if band.share is share)
            tenant = band.order.find_first()
            if tenant is None:
                self._order.leave(share)
                continue
            row = self._pop(tenant)
            if row is None:
                band.order.leave(tenant)
                continue
            if not fits(row):
                tenant.rows.appendleft(row)
                return None
            work = price(row)
            if work is None:
                continue
            self._count(row, -1)
            row.is_waiting = False
            band.order.charge(tenant, work)
            self._order.charge(share, work)
            return row
        return None

    def drop(self, row: WaitingRow) -> bool:
        """Drop a row that nobody waits for; return whether it was still in the queue."""
        if not row.is_waiting:
            return False
        row.is_waiting = False
        self._count(row, -1)
        return True

    def find(self, tenant: str) -> TenantQueue:
        """Return the counts of a tenant's rows in the queue."""
        return self.tenants.get(tenant, TenantQueue())

    def _pop(self, tenant: _Share) -> WaitingRow | None:
        while tenant.rows:
            row = tenant.rows.popleft()
            if row.is_waiting:
                return row
        return None

    def _share_of(self, row: WaitingRow) -> _Share:
        band, caller = self._bands[row.caller.band], row.caller
        share = band.tenants.get(caller.tenant)
        if share is None:
            if len(band.tenants) >= _MOST_IDLE:  # a forgotten tenant starts again with the least served
                band.tenants = {name: known for name, known in band.tenants.items() if known.rows}
            share = band.tenants[caller.tenant] = _Share(caller.weight)
        share.weight = caller.weight if caller.weight > _LEAST_WEIGHT else _LEAST_WEIGHT  # also if it is NaN
        return share

    def _let_in(self, row: WaitingRow) -> None:
        band = self._bands[row.caller.band]
        tenant = band.tenants[row.caller.tenant]
        if tenant.entry < 0:
            band.order.enter(tenant)
        if band.share.entry < 0:
            self._order.enter(band.share)

    def _count(self, row: WaitingRow, sign: int) -> None:
        self.num_rows += sign
        self.num_tokens += sign * row.num_tokens
        tenant = self.tenants.setdefault(row.caller.tenant, TenantQueue())
        tenant.num_rows += sign
        tenant.num_tokens += sign * row.num_tokens
        if not tenant.num_rows:
            del self.tenants[row.caller.tenant]


@dataclass
class _Bucket:
    level: float
    at: float


class TokenBuckets:
    """Token buckets: what each tenant may use now. A bucket holds a minute's tokens, and is refilled all the time."""

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}

    def find_wait_s(self, caller: Caller, num_tokens: float, now: float) -> float:
        """Return how long a tenant must wait before it may use so many tokens; 0 if it may now.

        A request of more than a minute's tokens needs only a full bucket; the debt is paid afterwards.
        """
        if caller.tokens_per_minute is None:
            return 0.0
        if caller.tokens_per_minute <= 0:
            return math.inf
        missing = min(num_tokens, caller.tokens_per_minute) - self._fill(caller, now).level
        return max(0.0, missing * 60 / caller.tokens_per_minute)

    def use(self, caller: Caller, num_tokens: float, now: float) -> None:
        """Take tokens out of a tenant's bucket."""
        if caller.tokens_per_minute is not None:
            self._fill(caller, now).level -= num_tokens

    def _fill(self, caller: Caller, now: float) -> _Bucket:
        assert caller.tokens_per_minute is not None
        most = caller.tokens_per_minute
        bucket = self._buckets.get(caller.tenant)
        if bucket is None:
            if len(self._buckets) >= _MOST_IDLE:  # forget those unused for a minute: they are full again, or nearly
                self._buckets = {name: known for name, known in self._buckets.items() if now - known.at < 60}
            bucket = self._buckets[caller.tenant] = _Bucket(most, now)
        bucket.level = min(most, bucket.level + (now - bucket.at) * most / 60)
        bucket.at = now
        return bucket
