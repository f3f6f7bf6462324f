"""Usage: rows, tokens and requests by day and task, counted in memory and written once a second.

So are the times when keys were last used. A process that is killed loses at most the last second of both.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, insert, or_, update

from inlay.errors import InlayError
from inlay.service.state import schema
from inlay.service.state.values import day_of

if TYPE_CHECKING:
    from inlay.service.state.database import Database

FLUSH_S = 1.0
_MINUTE = 60.0
_COUNTS = ("rows", "tokens", "requests")
UsageKey = tuple[str, str, str]  # tenant, day, task


@dataclass(frozen=True)
class DayUsage:
    """The rows, tokens and requests of one task on one day (UTC)."""

    day: str
    task: str
    rows: int
    tokens: int
    requests: int

    def to_json(self) -> dict[str, Any]:
        """Return the usage as the API shows it."""
        return vars(self).copy()


class UsageMeter:
    """The counts of one process, which a thread of its own writes."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._guard = threading.Lock()
        self._counts: dict[str, Counter[UsageKey]] = {name: Counter() for name in _COUNTS}
        self._used: dict[str, float] = {}
        self._noted: dict[str, float] = {}  # key -> the minute that was noted last
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, tenant: str, task: str, *, rows: int, tokens: int, requests: int) -> None:
        """Count what was answered just now."""
        key = tenant, day_of(self._db.now()), task
        with self._guard:
            for name, count in zip(_COUNTS, (rows, tokens, requests), strict=True):
                self._counts[name][key] += count
            self._start()

    def note_use(self, key_id: str) -> None:
        """Note that a key was used, to the minute."""
        minute = self._db.now() // _MINUTE * _MINUTE
        if self._noted.get(key_id) == minute:
            return
        with self._guard:
            self._noted[key_id] = self._used[key_id] = minute
            self._start()

    def flush(self) -> None:
        """Write all counts that wait. Those that cannot be written wait for the next time."""
        with self._guard:
            counts, self._counts = self._counts, {name: Counter() for name in _COUNTS}
            used, self._used = self._used, {}
        if not used and not any(counts.values()):
            return
        try:
            self._write(counts, used)
        except BaseException:
            with self._guard:
                for name in _COUNTS:
                    self._counts[name].update(counts[name])
                self._used = used | self._used
            raise

    def close(self) -> None:
        """End the thread, and write all counts that wait."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
        self.flush()

    def _start(self) -> None:
        if self._thread is None and not self._ending.is_set():
            self._thread = threading.Thread(target=self._run, name="inlay-meter", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._ending.wait(FLUSH_S):
            try:
                self.flush()
            except InlayError:  # a full disk or a lock: the counts are kept
                continue

    def _write(self, counts: dict[str, Counter[UsageKey]], used: dict[str, float]) -> None:
        keys = schema.keys
        with self._db.writing() as connection:
            for tenant, day, task in set().union(*counts.values()):
                added = {name: counts[name][tenant, day, task] for name in _COUNTS}
                add_counts(connection, (tenant, day, task), added)
            for key_id, minute in used.items():
                is_later = or_(keys.c.last_used_at.is_(None), keys.c.last_used_at < minute)
                connection.execute(update(keys).where(keys.c.id == key_id, is_later).values(last_used_at=minute))


def add_counts(connection: Connection, key: UsageKey, added: Mapping[str, int]) -> None:
    """Add rows, tokens and requests to the counts of a tenant, day and task."""
    tenant, day, task = key
    row = schema.usage.c
    mine = update(schema.usage).where(row.tenant == tenant, row.day == day, row.task == task)
    more = {name: row[name] + count for name, count in added.items()}
    if connection.execute(mine.values(**more)).rowcount == 0:
        connection.execute(insert(schema.usage).values(tenant=tenant, day=day, task=task, **added))
