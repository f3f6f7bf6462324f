"""Requests that the engine is answering: which rows have their answer, and the reply.

What always holds: the first answer or error of a row counts; an error names nothing that is not the caller's own.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from inlay.errors import InlayError, Unanswered
from inlay.service.engine.engine_connections import EngineConnection
from inlay.service.engine.fair_queue import WaitingRow
from inlay.service.engine.intake import Arrival
from inlay.service.engine.protocol import Caller, Predict, Predicted, WireAnswer, WireError, WireRow
from inlay.serving import Answer, describe_answer


@dataclass(eq=False)
class Ticket:
    """A request that is being answered. Only `begin` may be called outside the event loop's thread."""

    question: Predict
    connection: EngineConnection
    arrival: Arrival | None = None
    rows: list[WaitingRow] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    is_open: bool = True
    num_letters: int = 0
    num_tokens: int = 0
    compute_s: float = 0.0
    answers: list[WireAnswer | WireError | None] = field(init=False)
    _num_left: int = field(init=False)
    _began: float = field(default_factory=time.monotonic)
    _started: float | None = None
    """when a batch with one of its rows last began"""
    _computing: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.answers = [None] * len(self.question.rows)
        self._num_left = len(self.answers)

    @property
    def id(self) -> int:
        """The request's id on its connection."""
        return self.question.id

    @property
    def caller(self) -> Caller:
        """The tenant that asks."""
        return self.question.caller

    def begin(self, row: WaitingRow) -> bool:
        """Note that a row is about to be computed; return whether its answer is still wanted. Safe in any thread."""
        index: int = row.ticket[1]
        self._computing.add(index)
        self._started = time.monotonic()
        return self.is_open and self.answers[index] is None

    def is_computing(self, row: WaitingRow) -> bool:
        """Return whether the computation of a row has begun."""
        return row.ticket[1] in self._computing

    def settle(self, index: int, found: Answer | InlayError) -> bool:
        """Store the answer or error of a row; return whether all rows are settled now."""
        if not self.is_open or self.answers[index] is not None:
            return False
        row = self.question.rows[index]
        error = found if isinstance(found, InlayError) else found.error
        if error is not None:
            self.answers[index] = _encode_error(row, error)
        else:
            assert isinstance(found, Answer)
            self.answers[index] = _encode_answer(row, found)
        self._num_left -= 1
        return not self._num_left

    def reply(self) -> Predicted:
        """Return the reply; all rows are settled."""
        now = time.monotonic()
        queue_s = (self._started or now) - self._began
        answers = [answer for answer in self.answers if answer is not None]
        return Predicted(self.id, answers, self.num_tokens, queue_s * 1000, self.compute_s * 1000)


class DeadlinePassed(InlayError):
    """A row that was not answered before the deadline of its request."""

    code = "deadline"
    http_status = 504

    def __init__(self) -> None:
        super().__init__(
            "the deadline passed before the row was answered", "ask again, with fewer rows or a later deadline"
        )


def _encode_error(row: WireRow, error: InlayError) -> WireError:
    """Return an error for the row's caller, with the caller's name of the task in the place of the store's."""
    shown = row.task.partition("@")[0]
    message, hint = error.message, error.hint
    if error.code == "unknown-name":  # its hint would name other tenants' tasks
        hint = "it may have been removed just now; ask again"
    if row.store_name != shown:
        message = message.replace(row.store_name, shown)
        hint = None if hint is None else hint.replace(row.store_name, shown)
    return WireError(error.code, message, hint, error.http_status)


def _encode_answer(row: WireRow, answer: Answer) -> WireAnswer | WireError:
    try:
        about = describe_answer(answer)
        name, _, number = about["version"].rpartition("@")
        about |= {"task": row.task, "version": f"{row.task.partition('@')[0]}@{number}"}
        return WireAnswer(name, int(number), about)
    except Exception as error:  # the border: an answer that cannot be encoded is an error of its row alone
        what = Unanswered(f"no answer: {type(error).__name__}", "ask it alone; if it fails again, please report it")
        return _encode_error(row, what)
