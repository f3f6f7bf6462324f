"""Admission to the queue, by a tenant's tokens a minute, its share of the queue, and the length of the whole queue.

Status 429 is a limit of the tenant, 503 a limit of the service; both say when to try again. Requests are refused by
their number of tokens, whether they have one text or many. What always holds: a request that is refused early has cost
no work; a tenant without rows in the queue may add one request of any size while the queue is not full.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from inlay.service.engine.batches import WorkRate
from inlay.service.engine.fair_queue import FairQueue, TokenBuckets, WaitingRow
from inlay.service.engine.intake import Taken
from inlay.service.engine.protocol import Predict, Refused, TenantLoad
from inlay.service.engine.tickets import Ticket
from inlay.serving import EncodedRequest

MOST_LETTERS = 64_000_000
"""letters of all texts in the process at one time, which bounds its memory"""
_MOST_COUNTED = 10_000  # tenants whose counters are kept
_SOON_S = 1.0


@dataclass
class _Counts:
    num_rows: int = 0
    num_tokens: int = 0
    num_refused: int = 0
    num_letters: int = 0
    """letters of its texts in the process now"""


class Admission:
    """Admits requests to the queue, or refuses them, and counts what each tenant uses."""

    def __init__(self, queue: FairQueue, rate: WorkRate, most_s: float) -> None:
        self._queue, self._rate, self._most_s = queue, rate, most_s
        self._buckets = TokenBuckets()
        self._counts: dict[str, _Counts] = {}
        self._num_letters = 0
        self.num_rows = 0
        self.num_tokens = 0

    @property
    def queue_s(self) -> float:
        """The time that it would take to answer all rows in the queue."""
        return self._queue.num_tokens / self._rate.per_s

    def refuse_early(self, question: Predict, *, is_draining: bool) -> Refused | None:
        """Refuse a request before it is tokenised, if no number of tokens would be accepted."""
        if is_draining:
            return Refused(question.id, "draining", "the service is stopping", "try again in a moment", 503, _SOON_S)
        refused = self._find_refusal(question, 1, _count_letters(question))
        if refused is not None:
            self._count(question.caller.tenant).num_refused += 1
        return refused

    def enter(self, ticket: Ticket) -> None:
        """Count the texts of an accepted request."""
        ticket.num_letters = _count_letters(ticket.question)
        self._num_letters += ticket.num_letters
        self._count(ticket.caller.tenant).num_letters += ticket.num_letters

    def leave(self, ticket: Ticket, *, is_refused: bool) -> None:
        """Stop counting the texts of a request that has ended."""
        self._num_letters -= ticket.num_letters
        counts = self._count(ticket.caller.tenant)
        counts.num_letters -= ticket.num_letters
        counts.num_refused += is_refused

    def admit(self, ticket: Ticket, taken: Sequence[Taken]) -> Refused | None:
        """Admit the tokenised rows of a request and charge its tenant, or return the refusal."""
        num_tokens = sum(item.tokens.num_tokens for item in taken if isinstance(item, EncodedRequest))
        refused = self._find_refusal(ticket.question, num_tokens, 0)
        if refused is None:
            ticket.num_tokens = num_tokens
            self._buckets.use(ticket.caller, num_tokens, time.monotonic())
        return refused

    def count(self, rows: Sequence[WaitingRow]) -> None:
        """Count rows that were answered."""
        for row in rows:
            counts = self._count(row.caller.tenant)
            counts.num_rows += 1
            counts.num_tokens += row.num_tokens
            self.num_rows += 1
            self.num_tokens += row.num_tokens

    def describe(self) -> dict[str, TenantLoad]:
        """Return the counters of every tenant."""
        found = {}
        for name, counts in self._counts.items():
            waiting = self._queue.find(name)
            counted = (counts.num_rows, counts.num_tokens, counts.num_refused)
            found[name] = TenantLoad(*counted, waiting.num_rows, waiting.num_tokens)
        return found

    def _find_refusal(self, question: Predict, num_tokens: int, num_letters: int) -> Refused | None:
        caller, queue = question.caller, self._queue
        # 1. the tenant's tokens of this minute
        wait_s = self._buckets.find_wait_s(caller, num_tokens, time.monotonic())
        if wait_s > 0:
            message = f"the tokens of this minute are used up ({caller.tokens_per_minute:,.0f} a minute)"
            return _refuse(question, "tokens-per-minute", message, 429, wait_s)
        # 2. the tenant's half of the queue
        own, most = queue.find(caller.tenant).num_tokens, self._most_s * self._rate.per_s
        letters = self._count(caller.tenant).num_letters
        if (own and own + num_tokens > most / 2) or (letters and letters + num_letters > MOST_LETTERS / 2):
            wait_s = (own + num_tokens - most / 2) / self._rate.per_s
            return _refuse(question, "tenant-queue-full", "too many of your rows are waiting", 429, wait_s)
        # 3. the queue
        has_room = queue.num_tokens + (num_tokens if own else 0) <= most
        if not has_room or self._num_letters + num_letters > MOST_LETTERS:
            wait_s = (queue.num_tokens + num_tokens - most) / self._rate.per_s
            return _refuse(question, "queue-full", "the service has more to answer than it can", 503, wait_s)
        return None

    def _count(self, tenant: str) -> _Counts:
        counts = self._counts.get(tenant)
        if counts is None:
            if len(self._counts) >= _MOST_COUNTED:
                self._counts = {name: known for name, known in self._counts.items() if known.num_letters}
            counts = self._counts[tenant] = _Counts()
        return counts


def _count_letters(question: Predict) -> int:
    """Return the letters of all texts of a request."""
    return sum(len(row.text) + len(row.pair or "") for row in question.rows)


def _refuse(question: Predict, code: str, message: str, status: int, wait_s: float) -> Refused:
    retry_after_s = max(_SOON_S, wait_s) if math.isfinite(wait_s) else None
    hint = "send fewer rows" if retry_after_s is None else f"try again in {math.ceil(retry_after_s)} s"
    return Refused(question.id, code, message, hint, status, retry_after_s)
