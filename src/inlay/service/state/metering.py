"""What is counted in memory and written once a second: usage, and when keys were last used.

A process that is killed loses at most the last second of it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sqlalchemy import Connection, insert, or_, update

from inlay.errors import InlayError
from inlay.service.state import schema
from inlay.service.state.timestamps import day_of

if TYPE_CHECKING:
    from inlay.service.state.database import Database

FLUSH_S = 1.0
_MINUTE = 60.0
_COUNTS = ("rows", "tokens", "requests")
Place = tuple[str, str, str]  # tenant, day, task


class UsageMeter:
    """Counts of a process that wait to be written by a thread of their own."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._guard = threading.Lock()
        self._counts: dict[str, Counter[Place]] = {name: Counter() for name in _COUNTS}
        self._used: dict[str, float] = {}
        self._told: dict[str, float] = {}  # key -> the minute that was noted last
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, place: Place, *, rows: int, tokens: int, requests: int) -> None:
        """Count what was answered; `place` is the tenant, the day and the task."""
        with self._guard:
            for name, count in zip(_COUNTS, (rows, tokens, requests), strict=True):
                self._counts[name][place] += count
            self._start()

    def note_use(self, key_id: str) -> None:
        """Note that a key was used, to the minute."""
        minute = self._db.now() // _MINUTE * _MINUTE
        if self._told.get(key_id) == minute:
            return
        with self._guard:
            self._told[key_id] = self._used[key_id] = minute
            self._start()

    def flush(self) -> None:
        """Write all that waits. What cannot be written goes on waiting."""
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
        """Write all that waits, and end the thread."""
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
            except InlayError:  # a full disk or a lock: what waits is kept
                continue

    def _write(self, counts: dict[str, Counter[Place]], used: dict[str, float]) -> None:
        keys = schema.keys
        with self._db.writing() as connection:
            for tenant, day, task in set().union(*counts.values()):
                added = {name: counts[name][tenant, day, task] for name in _COUNTS}
                add_counts(connection, (tenant, day, task), added)
            for key_id, minute in used.items():
                is_later = or_(keys.c.last_used_at.is_(None), keys.c.last_used_at < minute)
                connection.execute(update(keys).where(keys.c.id == key_id, is_later).values(last_used_at=minute))

    def today(self, tenant: str, task: str) -> Place:
        """Return where usage of now is counted."""
        return tenant, day_of(self._db.now()), task


def add_counts(connection: Connection, place: Place, added: Mapping[str, int]) -> None:
    """Add rows, tokens and requests to those of a tenant, day and task."""
    tenant, day, task = place
    row = schema.usage.c
    mine = update(schema.usage).where(row.tenant == tenant, row.day == day, row.task == task)
    more = {name: row[name] + count for name, count in added.items()}
    if connection.execute(mine.values(**more)).rowcount == 0:
        connection.execute(insert(schema.usage).values(tenant=tenant, day=day, task=task, **added))
