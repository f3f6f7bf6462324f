"""The service's database: SQLite in WAL mode, opened by many processes and threads at once.

What always holds: whoever changes anything holds the one writer's lock from the beginning of the transaction
(BEGIN IMMEDIATE), and what is acknowledged is on the disk (synchronous=FULL). Opening brings the schema up to date.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection

from inlay.service.state.places import Places


class Database:
    """The database of one service. Safe to share between threads; every process opens its own."""

    def __init__(self, places: Places, clock: Callable[[], float] = time.time) -> None:
        self.places = places
        self._clock = clock

    @classmethod
    def open(cls, home: Path | str, *, clock: Callable[[], float] = time.time) -> Database:
        """Open the database below a store's root, made or brought up to date if need be.

        A newer schema is refused. Several processes may open at once.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Write what is waiting to be written (usage, last use of keys) and close all connections."""
        raise NotImplementedError

    def now(self) -> float:
        """Return the time, in seconds since 1970. All times of the service come from here."""
        return self._clock()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Give a connection that sees one state of the database, whatever others write."""
        raise NotImplementedError
        yield

    @contextmanager
    def writing(self, *, is_hot: bool = False) -> Iterator[Connection]:
        """Give a connection in a transaction of its own: all of it is kept, or, after an error, nothing.

        `is_hot` says that keys, tenants, tasks or aliases change, which the hot route keeps in memory.
        """
        raise NotImplementedError
        yield

    def revision(self) -> int:
        """Return a number that changes whenever keys, tenants, tasks or aliases may have. Takes microseconds."""
        raise NotImplementedError

    def probe(self) -> None:
        """Prove that the database can be written: for readiness."""
        raise NotImplementedError

    def checkpoint(self) -> bool:
        """Bring the write-ahead log into the database and empty it; False if readers kept it from it."""
        raise NotImplementedError

    def free_bytes(self) -> int:
        """Return the room that is left on the disk of the database."""
        raise NotImplementedError
