"""The intake: requests are checked and tokenised in threads, before they join the queue.

A request of many rows is done a chunk at a time, in turns with the others, so that a long one keeps no short one
waiting. What is wrong with a row is the row's own error.
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
CHUNK_ROWS = 64
CHUNK_LETTERS = 100_000
Taken = EncodedRequest | InlayError
"""a row that is ready for the queue, or what is wrong with it"""


@dataclass(eq=False)
class Arrival:
    """The rows of a request on their way through the intake."""

    rows: Sequence[WireRow]
    scope: str
    """rows share work only with others of their scope"""
    on_done: Callable[[list[Taken]], None]
    is_cancelled: bool = False
    _taken: list[Taken] = field(default_factory=list)
    _versions: dict[str, Resolved | InlayError] = field(default_factory=dict)
    """a name means one version all through a request"""


_Piece = tuple[Arrival, Sequence[WireRow]]


class Intake:
    """Takes requests in the event loop's thread, and calls each one's `on_done` there when all its rows are ready."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: deque[Arrival] = deque()
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenise")
        self._num_busy = 0
        self.num_requests = 0
        """requests that are in the intake"""

    def submit(self, arrival: Arrival) -> None:
        """Take the rows of a request."""
        self.num_requests += 1
        self._waiting.append(arrival)
        self._begin()

    def close(self) -> None:
        """Begin nothing more."""
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
        """Pick the next rows of the requests that wait, for one call of the tokenizer."""
        pieces: list[_Piece] = []
        num_rows = num_letters = 0
        while self._waiting and num_rows < CHUNK_ROWS and num_letters < CHUNK_LETTERS:
            arrival = self._waiting.popleft()
            if arrival.is_cancelled:
                self.num_requests -= 1
                continue
            start = stop = len(arrival._taken)
            while stop < len(arrival.rows) and num_rows < CHUNK_ROWS and num_letters < CHUNK_LETTERS:
                row = arrival.rows[stop]
                num_letters += len(row.text) + len(row.pair or "")
                num_rows, stop = num_rows + 1, stop + 1
            pieces.append((arrival, arrival.rows[start:stop]))
        return pieces

    def _read(self, pieces: Sequence[_Piece]) -> list[list[Taken]]:
        """Check and tokenise rows; called in a thread."""
        found: list[list[Taken]] = []
        checked: list[CheckedRequest] = []
        places: list[tuple[int, int]] = []
        for number, (arrival, rows) in enumerate(pieces):
            found.append([])
            for row in rows:
                item = self._check(arrival, row)
                found[-1].append(item if isinstance(item, InlayError) else _UNREAD)
                if not isinstance(item, InlayError):
                    places.append((number, len(found[-1]) - 1))
                    checked.append(item)
        if checked:
            encoded: list[Taken] = isolate(checked, lambda some: list(self._engine.encode(some)), _take_error)
            for (number, place), taken in zip(places, encoded, strict=True):
                found[number][place] = taken
        return found

    def _check(self, arrival: Arrival, row: WireRow) -> CheckedRequest | InlayError:
        try:
            request = Request(f"{row.store_name}@{row.number}", row.text, row.pair, row.min_confidence)
            return self._engine.check(request, arrival._versions, arrival.scope)
        except Exception as error:  # the border: whatever a row does to us is its own answer
            return as_error(error)

    def _end(self, pieces: Sequence[_Piece], done: asyncio.Future[list[list[Taken]]]) -> None:
        self._num_busy -= 1
        if done.cancelled():
            return
        failure = done.exception()
        for number, (arrival, rows) in enumerate(pieces):
            arrival._taken += [as_error(RuntimeError())] * len(rows) if failure else done.result()[number]
            if len(arrival._taken) < len(arrival.rows):
                self._waiting.append(arrival)  # behind the others
                continue
            self.num_requests -= 1
            if not arrival.is_cancelled:
                arrival.on_done(arrival._taken)
        self._begin()


def _take_error(item: CheckedRequest, error: InlayError) -> Taken:
    return error


_UNREAD = InlayError("not tokenised yet")
