"""A fleet of replicas as discrete events: rows arrive, are placed, queue, wait for their version, and are answered.

A replica works as the engine's process does (`inlay.service.engine`): rows wait in one queue, a batch takes as many as
can be computed in the target time, a row whose version is in no slot is parked while two threads load versions, and the
version used longest ago leaves. Left out: tenants (there is one), rows of several windows, and texts that share work.

What always holds: every row is answered once; equal seeds give equal results.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fleet_cell import PLACEMENTS, Cell, find_homes, hash_pairs

DEPTH = 8  # replicas at most to which a task's rows go when others are down or busy, beside those it is given
PATIENCE_BATCHES = 0.5  # `bounded` leaves a task's own replica when as many rows are there as fill so much of a batch
BOUND = 1.25  # … and it has so many times the mean of all
ROOM = 2.0  # `replicated` and `helped` give a task so many times its share of all replicas, as `placement.py` does
MOST_BUSY, FREE_ROWS = (
    2.0,
    32,
)  # `helped` leaves replicas with so many times the rows of the mean, and more than so many
LATE_S, LATE_SHARE = 2.0, 0.002  # a fleet is overloaded if so many rows are left so long after the last one came
SPREAD = ("replicated", "helped")
_BATCH_DONE, _LOADED, _FAIL, _DETECT, _RECOVER, _PUBLISH, _REMOVE = range(7)


@dataclass(eq=False, slots=True)
class Replica:
    """One engine: its queue, its slots and what it is doing."""

    number: int
    queue: deque[int]
    hot: OrderedDict[int, None] = field(default_factory=OrderedDict)
    parked: dict[int, list[int]] = field(default_factory=dict)
    wanted: deque[int] = field(default_factory=deque)
    batch: list[int] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    lost: list[int] = field(default_factory=list)
    """rows sent to it while it was down and nobody knew"""
    num_open: int = 0
    num_loading: int = 0
    life: int = 0
    owed_s: float = 0.0
    busy_s: float = 0.0
    is_up: bool = True
    is_busy: bool = False
    is_known_down: bool = False


class Fleet:
    """One run of one cell."""

    def __init__(self, cell: Cell, orders: Sequence[Sequence[int]] | None = None) -> None:
        """Draw what will happen. `orders` has the replicas of every task in its order, if not by our own hash."""
        if cell.placement not in PLACEMENTS:
            raise ValueError(f"no placement named `{cell.placement}`")
        if cell.placement == "pull" and cell.num_tasks > cell.num_slots:
            raise ValueError("`pull` is for tasks that fit the slots: a row that is parked comes back to all")
        self.cell, self._budget = cell, cell.find_budget()
        self._draw = random.Random(cell.seed)
        shared: deque[int] = deque()
        self._is_shared = cell.placement == "pull"
        self.replicas = [Replica(number, shared if self._is_shared else deque()) for number in range(cell.num_replicas)]
        self._up = list(self.replicas)
        self._idle = set(range(cell.num_replicas)) if self._is_shared else set()
        self._events: list[tuple[float, int, int, int, int, Any]] = []
        self._num_events = 0
        self._open = 0
        self._is_hashed = cell.placement in ("rendezvous", "bounded", *SPREAD)
        self._num_usual = min(cell.num_tasks, 2 * cell.num_slots * cell.num_replicas)
        self._has_orders = orders is not None
        self._orders: dict[int, list[int]] = {task: list(order) for task, order in enumerate(orders or ())}
        self._draw_rows()
        self._version_of = list(range(cell.num_tasks))  # by task; a publication gives it a new number
        self._task_of_new: list[int] = []
        self._publishing: dict[int, tuple[int, float]] = {}  # new version -> replicas that still load it, began
        self.publish_s: list[float] = []
        self.num_hits = self.num_loads = self.num_retried = self.num_failures = self.num_batches = 0
        self._find_choices()
        self._fill_slots()

    # What is drawn before anything happens.

    def _draw_rows(self) -> None:
        """Draw arrivals (Poisson), tasks (Zipf), lengths, and the randomness of each row's placement."""
        cell, draw = self.cell, np.random.default_rng(self.cell.seed)
        self.arrivals = np.cumsum(draw.exponential(1 / cell.rows_per_s, cell.num_rows))
        weights = np.arange(1, cell.num_tasks + 1, dtype=np.float64) ** -cell.zipf
        self.popularity = weights / weights.sum()
        self._below = np.cumsum(self.popularity)
        self.tasks = np.searchsorted(self._below, draw.random(cell.num_rows)).clip(0, cell.num_tasks - 1)
        self.tokens: list[int] = np.asarray(cell.lengths)[draw.integers(len(cell.lengths), size=cell.num_rows)].tolist()
        self._first: list[float] = draw.random(cell.num_rows).tolist()
        self._second: list[float] = draw.random(cell.num_rows).tolist()
        self._keys = [-1] * cell.num_rows  # the version that a row asks for, once it has arrived
        self._seen = bytearray(cell.num_rows)  # whether a batch has looked at it before
        self.done = np.full(cell.num_rows, np.nan)

    def _find_choices(self) -> None:
        """Work out the replicas of every task that is asked, in its order, and how many of them it may use."""
        cell = self.cell
        if not self._is_hashed:
            return
        # The busiest tasks too, as their replicas' slots are filled with them before the first row.
        asked = np.union1d(self.tasks, np.arange(self._num_usual))
        homes = np.empty(cell.num_tasks, dtype=np.int32)
        if self._has_orders:
            homes[:] = [self._orders[task][0] for task in range(cell.num_tasks)]
        else:
            homes[asked] = find_homes(asked, cell.num_replicas)
        mean = sum(cell.lengths) / len(cell.lengths)
        spreads = np.ones(cell.num_tasks, dtype=np.int32)
        if cell.placement in SPREAD:
            wanted = np.ceil(ROOM * self.popularity * cell.num_replicas)
            spreads = np.clip(wanted, 1, cell.num_replicas).astype(np.int32)
        self._all_homes, self._all_spreads = homes, spreads
        self._homes: list[int] = homes[self.tasks].tolist()
        self._spreads: list[int] = spreads[self.tasks].tolist()
        self._patience = PATIENCE_BATCHES * self._budget / mean

    def use_spreads(self, spreads: list[int]) -> None:
        """Give each row, in the order of arrival, so many of its task's replicas, as whoever asks counted by then."""
        self._spreads = spreads

    def _fill_slots(self) -> None:
        """Put each replica's busiest tasks into its slots, the least busy as the one used longest ago."""
        cell = self.cell
        if not self._is_hashed:
            usual = range(min(cell.num_slots, cell.num_tasks) - 1, -1, -1)
            for replica in self.replicas:
                replica.hot = OrderedDict.fromkeys(usual)
            return
        found: list[list[int]] = [[] for _ in self.replicas]
        for task in range(self._num_usual):
            spread = int(self._all_spreads[task])
            for number in [int(self._all_homes[task])] if spread == 1 else self._order_of(task)[:spread]:
                if len(found[number]) < cell.num_slots:
                    found[number].append(task)
        for replica, tasks in zip(self.replicas, found, strict=True):
            replica.hot = OrderedDict.fromkeys(reversed(tasks))

    # The run.

    def run(self) -> Fleet:
        """Let everything happen until the last row is answered."""
        self._plan_faults()
        times, events, row, count = self.arrivals.tolist(), self._events, 0, self.cell.num_rows
        tasks = self.tasks.tolist()
        handle = {
            _BATCH_DONE: self._end_batch,
            _LOADED: self._end_load,
            _FAIL: self._fail,
            _DETECT: self._detect,
            _RECOVER: self._recover,
            _PUBLISH: self._publish,
            _REMOVE: self._remove,
        }
        while row < count or self._open:
            if row < count and (not events or times[row] <= events[0][0]):
                self._keys[row] = self._version_of[tasks[row]]
                self._open += 1
                self._place(row, times[row])
                row += 1
            else:
                now, _, kind, number, life, what = heapq.heappop(events)
                handle[kind](now, self.replicas[number], life, what)
        return self

    def _at(self, when: float, kind: int, replica: Replica, what: Any = None) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, kind, replica.number, replica.life, what))

    def _plan_faults(self) -> None:
        """Draw when replicas fail, and when versions are published and removed, while rows arrive."""
        cell, draw = self.cell, np.random.default_rng([self.cell.seed, 1])
        ends = float(self.arrivals[-1])
        for kind, per_s in (
            (_FAIL, cell.failures_per_hour / 3600 * cell.num_replicas),
            (_PUBLISH, cell.publishes_per_s),
            (_REMOVE, cell.removals_per_s),
        ):
            for when in np.sort(draw.uniform(0, ends, draw.poisson(per_s * ends))).tolist():
                task = int(np.searchsorted(self._below, draw.random()))  # tasks that are asked more change more often
                self._at(
                    when, kind, self.replicas[int(draw.integers(cell.num_replicas))], min(task, cell.num_tasks - 1)
                )

    # Placement.

    def _place(self, row: int, now: float) -> None:
        """Send a row to a replica; it is lost there, until somebody notices, if the replica is down."""
        if self._is_shared:
            self.replicas[0].queue.append(row)
            if self._idle:
                self._begin_batch(self.replicas[self._idle.pop()], now)
            return
        replica = self._choose(row)
        replica.num_open += 1
        if not replica.is_up:
            replica.lost.append(row)
            return
        replica.queue.append(row)
        if not replica.is_busy:
            self._begin_batch(replica, now)

    def _choose(self, row: int) -> Replica:
        up, placement = self._up, self.cell.placement
        if placement == "random":
            return up[int(self._first[row] * len(up))]
        if placement == "two-choices":
            return self._less_busy(row, up)
        home = self.replicas[self._homes[row]]
        if placement == "rendezvous":
            return self._follow(row)[0] if home.is_known_down else home
        if placement in SPREAD:
            spread = self._spreads[row]
            chosen = home
            if spread > 1 or home.is_known_down:
                chosen = self._less_busy(row, self._follow(row)[:spread])
            return self._find_help(row, chosen) if placement == "helped" else chosen
        most = max(self._patience, BOUND * self._open / len(up))
        if home.num_open <= most and not home.is_known_down:
            return home
        other = next((replica for replica in self._follow(row) if replica.num_open <= most), None)
        return other or self._less_busy(row, up)

    def _find_help(self, row: int, chosen: Replica) -> Replica:
        """Return another replica of the task, or the next in its order, if the chosen one is far busier than most."""
        most = max(FREE_ROWS, MOST_BUSY * self._open / len(self._up))
        if chosen.num_open <= most:
            return chosen
        order = self._follow(row)
        own = sorted(order[: self._spreads[row]], key=lambda replica: replica.num_open)
        others = [*own, *order[self._spreads[row] :]]
        return next((replica for replica in others if replica.num_open <= most), chosen)

    def _follow(self, row: int) -> list[Replica]:
        """Return the replicas that a row may go to and that are not known to be down, in its task's order."""
        order = self._order_of(int(self.tasks[row]))[: max(DEPTH, self._spreads[row])]
        found = [self.replicas[number] for number in order]
        return [replica for replica in found if not replica.is_known_down] or [self._draw.choice(self._up)]

    def _order_of(self, task: int) -> list[int]:
        """Return the replicas in a task's order; worked out when it is first needed."""
        order = self._orders.get(task)
        if order is None:
            hashes = hash_pairs(np.array([task]), self.cell.num_replicas)[0]
            order = self._orders[task] = np.argsort(hashes, kind="stable")[::-1].tolist()
        return order

    def _less_busy(self, row: int, some: list[Replica]) -> Replica:
        """Return the less busy of two of them, drawn without putting back."""
        count = len(some)
        if count == 1:
            return some[0]
        first = int(self._first[row] * count)
        second = int(self._second[row] * (count - 1))
        one, other = some[first], some[second + (second >= first)]
        return one if one.num_open <= other.num_open else other

    # Batches.

    def _begin_batch(self, replica: Replica, now: float) -> None:
        """Take rows until the batch is full; those whose version is in no slot are parked."""
        queue, hot, keys, tokens = replica.queue, replica.hot, self._keys, self.tokens
        batch: list[int] = []
        held: set[int] = set()
        work, budget, most_rows = 0, self._budget, self.cell.most_rows
        while queue and work < budget and len(batch) < most_rows:
            row = queue.popleft()
            key = keys[row]
            if key not in held:
                if key not in hot:
                    self._park(replica, row, key, now)
                    continue
                hot.move_to_end(key)
                held.add(key)
            if not self._seen[row]:
                self._seen[row] = 1
                self.num_hits += 1
            batch.append(row)
            work += tokens[row]
        replica.batch, replica.held = batch, held
        if not batch:
            replica.is_busy = False
            if self._is_shared:
                self._idle.add(replica.number)
            return
        replica.is_busy = True
        seconds = self._stretch(self.cell.times.batch_s(len(batch), work, len(held))) + replica.owed_s
        replica.owed_s = 0.0
        replica.busy_s += seconds
        self.num_batches += 1
        self._at(now + seconds, _BATCH_DONE, replica)

    def _stretch(self, seconds: float) -> float:
        cell = self.cell
        if cell.service == "exponential":
            return seconds * self._draw.expovariate(1.0)
        return seconds * self._draw.choice(cell.spread) if cell.service == "spread" else seconds

    def _end_batch(self, now: float, replica: Replica, life: int, what: Any) -> None:
        if life != replica.life:
            return
        ends = now + self.cell.times.outside_s
        done = self.done
        for row in replica.batch:
            done[row] = ends
        replica.num_open -= len(replica.batch)
        self._open -= len(replica.batch)
        self._begin_batch(replica, now)

    # Versions.

    def _park(self, replica: Replica, row: int, key: int, now: float) -> None:
        self._seen[row] = 1
        others = replica.parked.setdefault(key, [])
        others.append(row)
        if len(others) == 1:
            self._want(replica, key, now)

    def _want(self, replica: Replica, key: int, now: float) -> None:
        replica.wanted.append(key)
        self._begin_loads(replica, now)

    def _begin_loads(self, replica: Replica, now: float) -> None:
        while replica.wanted and replica.num_loading < self.cell.num_loaders:
            replica.num_loading += 1
            self.num_loads += 1
            seconds = self._stretch(self.cell.times.load_s) + self.cell.far_s
            self._at(now + seconds, _LOADED, replica, replica.wanted.popleft())

    def _end_load(self, now: float, replica: Replica, life: int, key: int) -> None:
        if life != replica.life:
            return
        replica.num_loading -= 1
        hot = replica.hot
        while key not in hot and len(hot) >= self.cell.num_slots:
            oldest = next((other for other in hot if other not in replica.held), None)
            if oldest is None:  # all are in the batch: wait for its end, as the engine does
                replica.num_loading += 1
                self._at(now + self.cell.times.pass_s, _LOADED, replica, key)
                return
            del hot[oldest]
        hot[key] = None
        hot.move_to_end(key)
        replica.owed_s += self.cell.times.load_busy_s
        replica.queue.extendleft(reversed(replica.parked.pop(key, ())))
        self._note_published(key, now)
        self._begin_loads(replica, now)
        if not replica.is_busy:
            self._idle.discard(replica.number)
            self._begin_batch(replica, now)

    # What goes wrong, and what changes.

    def _fail(self, now: float, replica: Replica, life: int, what: Any) -> None:
        """End a replica: what it had in hand is lost until somebody notices, its slots are empty when it is back."""
        if not replica.is_up or sum(other.is_up for other in self.replicas) == 1:
            return
        self.num_failures += 1
        replica.is_up = replica.is_busy = False
        replica.life += 1
        replica.lost = [*replica.batch, *(row for rows in replica.parked.values() for row in rows)]
        if self._is_shared:
            self._idle.discard(replica.number)
        else:
            replica.lost += replica.queue
            replica.queue.clear()
        for key in [*replica.parked, *replica.wanted]:
            self._note_published(key, now)
        replica.batch, replica.num_loading, replica.owed_s = [], 0, 0.0
        for emptied in (replica.hot, replica.parked, replica.wanted, replica.held):
            emptied.clear()
        self._at(now + self.cell.detect_s, _DETECT, replica)
        self._at(now + max(self.cell.detect_s, self.cell.restart_s), _RECOVER, replica)

    def _detect(self, now: float, replica: Replica, life: int, what: Any) -> None:
        """Stop sending rows to a replica that is down, and send those it had elsewhere."""
        replica.is_known_down = True
        self._up = [other for other in self._up if other is not replica]
        rows, replica.lost, replica.num_open = replica.lost, [], 0
        self.num_retried += len(rows)
        for row in rows:
            self._place(row, now)

    def _recover(self, now: float, replica: Replica, life: int, what: Any) -> None:
        replica.is_up, replica.is_known_down = True, False
        self._up.append(replica)
        if self._is_shared:
            self._begin_batch(replica, now)

    def _publish(self, now: float, replica: Replica, life: int, task: int) -> None:
        """Publish a version of a task: it is loaded where the old one is in a slot, and then goes live."""
        key = self.cell.num_tasks + len(self._task_of_new)
        self._task_of_new.append(task)
        where = [other for other in self.replicas if other.is_up and self._version_of[task] in other.hot]
        if not where:
            self._version_of[task] = key
            self.publish_s.append(0.0)
            return
        self._publishing[key] = (len(where), now)
        for other in where:
            self._want(other, key, now)

    def _note_published(self, key: int, now: float) -> None:
        if key not in self._publishing:
            return
        left, began = self._publishing[key]
        self._publishing[key] = (left - 1, began)
        if left == 1:
            del self._publishing[key]
            self._version_of[self._task_of_new[key - self.cell.num_tasks]] = key
            self.publish_s.append(now - began)

    def _remove(self, now: float, replica: Replica, life: int, task: int) -> None:
        """Erase a task: its slots are emptied. Who asks for the name then asks for a new task, loaded anew."""
        old = self._version_of[task]
        self._version_of[task] = self.cell.num_tasks + len(self._task_of_new)
        self._task_of_new.append(task)
        for other in self.replicas:
            if old not in other.held:
                other.hot.pop(old, None)

    # What came out.

    def summarise(self, warm_share: float = 0.2) -> dict[str, Any]:
        """Return latencies of the rows after the first ones, and what the replicas did."""
        cell = self.cell
        start = int(cell.num_rows * warm_share)
        ms = 1000 * (self.done[start:] - self.arrivals[start:])
        seconds = float(self.arrivals[-1])
        late = np.mean(self.done > seconds + LATE_S)
        busy = np.array([replica.busy_s for replica in self.replicas]) / max(seconds, float(self.done.max()))
        found = dict(zip(("p50_ms", "p90_ms", "p99_ms", "p999_ms"), np.percentile(ms, (50, 90, 99, 99.9)), strict=True))
        return {name: round(float(value), 2) for name, value in found.items()} | {
            "mean_ms": round(float(ms.mean()), 3),
            "hit_rate": round(self.num_hits / cell.num_rows, 4),
            "loads_per_row": round(self.num_loads / cell.num_rows, 4),
            "rows_per_batch": round(cell.num_rows / max(1, self.num_batches), 2),
            "busy": round(float(busy.mean()), 4),
            "busiest": round(float(busy.max()), 4),
            "is_overloaded": bool(late > LATE_SHARE),
            "num_failures": self.num_failures,
            "retried_share": round(self.num_retried / cell.num_rows, 6),
            "publish_p99_ms": round(1000 * float(np.percentile(self.publish_s, 99)), 1) if self.publish_s else None,
            "simulated_s": round(seconds, 1),
        }
