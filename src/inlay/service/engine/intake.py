"""The intake: requests are checked and tokenised in threads, before they join the queue.

Requests take turns by chunks of rows, so that short ones do not wait for a long one. A bad row gets an error of its
own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from inlay.errors import InlayError
from inlay.service.engine.protocol import WireRow
from inlay.serving import CheckedRequest, EncodedRequest, Engine, Request, Resolved, as_error, isolate

NUM_THREADS = 2
_NOT_ENCODED = InlayError("not tokenised yet")
CHUNK_ROWS = 64
CHUNK_LETTERS = 100_000
Taken = EncodedRequest | InlayError
"""a row that is ready for the queue, or its error"""


@dataclass(eq=False)
class Arrival:
    """The rows of a request in the intake."""

    rows: Sequence[WireRow]
    scope: str
    """rows share work only with rows of the same scope"""
    on_done: Callable[[list[Taken]], None]
    is_cancelled: bool = False
    taken: list[Taken] = field(default_factory=list)
    versions: dict[str, Resolved | InlayError] = field(default_factory=dict)
    """the version of each name, found once: it stays the same through a request"""


_Piece = tuple[Arrival, Sequence[WireRow]]


class Intake:
    """Takes requests in the event loop's thread, and calls `on_done` of each there when all its rows are ready."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: deque[Arrival] = deque()
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenise")
        self._num_busy = 0

    def submit(self, arrival: Arrival) -> None:
        """Take a request."""
        self._waiting.append(arrival)
        self._begin()

    def close(self) -> None:
        """Take no more rows from the waiting requests."""
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while self._waiting and self._num_busy < NUM_THREADS:
            pieces = self._pick()
            if pieces:
                self._num_busy += 1
                task = asyncio.get_running_loop().run_in_executor(self._pool, self._read, pieces)
                task.add_done_callback(lambda done, pieces=pieces: self._end(pieces, done))  # type: ignore[misc]

    def _pick(self) -> list[_Piece]:
        """Take the next rows of the waiting requests, for one call of the tokenizer."""
        pieces: list[_Piece] = []
        num_rows = num_letters = 0
        while self._waiting and num_rows < CHUNK_ROWS and num_letters < CHUNK_LETTERS:
            arrival = self._waiting.popleft()
            if arrival.is_cancelled:
                continue
            start = stop = len(arrival.taken)
            while stop < len(arrival.rows) and num_rows < CHUNK_ROWS and num_letters < CHUNK_LETTERS:
                row = arrival.rows[stop]
                num_letters += len(row.text) + len(row.pair or "")
                num_rows, stop = num_rows + 1, stop + 1
            pieces.append((arrival, arrival.rows[start:stop]))
        return pieces

    def _read(self, pieces: Sequence[_Piece]) -> list[list[Taken]]:
        """Check and tokenise rows. Called in a thread."""
        found: list[list[Taken]] = []
        checked: list[CheckedRequest] = []
        places: list[tuple[int, int]] = []
        for number, (arrival, rows) in enumerate(pieces):
            found.append([])
            for row in rows:
                item = self._check(arrival, row)
                if isinstance(item, InlayError):
                    found[-1].append(item)
                    continue
                places.append((number, len(found[-1])))
                found[-1].append(_NOT_ENCODED)
                checked.append(item)
        if checked:
            encoded: list[Taken] = isolate(
                checked, lambda some: list(self._engine.encode(some)), lambda item, error: error
            )
            for (number, place), taken in zip(places, encoded, strict=True):
                found[number][place] = taken
        return found

    def _check(self, arrival: Arrival, row: WireRow) -> CheckedRequest | InlayError:
        try:
            request = Request(f"{row.store_name}@{row.number}", row.text, row.pair, row.min_confidence)
            return self._engine.check(request, arrival.versions, arrival.scope)
        except Exception as error:  # the border: an error that a row causes is its own answer
            return as_error(error)

    def _end(self, pieces: Sequence[_Piece], done: asyncio.Future[list[list[Taken]]]) -> None:
        self._num_busy -= 1
        if done.cancelled():
            return
        failure = done.exception()
        for number, (arrival, rows) in enumerate(pieces):
            arrival.taken += [as_error(RuntimeError())] * len(rows) if failure else done.result()[number]
            if len(arrival.taken) < len(arrival.rows):
                self._waiting.append(arrival)  # behind the others
                continue
            if not arrival.is_cancelled:
                arrival.on_done(arrival.taken)
        self._begin()
