"""Answers to rows by a published version: from the engine's process, in its bulk band, or from here if it is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from inlay.errors import Unanswered
from inlay.model import Backbone
from inlay.service.engine import Caller, EngineRefused, SyncAnswering, VersionLoaded, WireAnswer, WireRow
from inlay.serving import Engine, Request, describe_answer
from inlay.store import Store

CHUNK_ROWS = 256
"""rows sent to the engine at once"""
PATIENCE_S = 120.0
"""longest wait for an engine that is full or gone; then rows are answered here"""
LOAD_PATIENCE_S = 15.0
"""longest wait for the engine to load a version; then it goes live without being loaded"""
_FEWEST_S, _MOST_S = 0.2, 10.0  # between two attempts
_UNAVAILABLE = 503
_NUM_SLOTS = 4

TextRow = tuple[str, str | None]
"""a text, and the second text if the task reads pairs"""


class Answerer:
    """Answers rows by a version of the store. Safe to use from several threads."""

    def __init__(
        self, backbone: Backbone, store: Store, client: SyncAnswering | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        self._backbone, self._store, self.client = backbone, store, client
        self._patience_s = patience_s
        self._engine: Engine | None = None
        self.num_tokens = 0
        """tokens answered so far"""
        self._asking = threading.Lock()  # the client takes one request at a time

    def load(self, version: tuple[str, int], check: Callable[[], None] = lambda: None) -> VersionLoaded | None:
        """Load a version into the engine, which answers its probes; None without an engine. May raise EngineRefused."""
        until = time.monotonic() + min(LOAD_PATIENCE_S, self._patience_s)
        while self.client is not None:
            try:
                with self._asking:
                    return self.client.load(*version)
            except EngineRefused as refusal:
                if refusal.http_status != _UNAVAILABLE:
                    raise
                if time.monotonic() >= until:
                    break
                time.sleep(min(1.0, refusal.retry_after_s or _FEWEST_S))
                check()
        return None

    def answer(
        self,
        caller: Caller,
        version: tuple[str, int],
        rows: Sequence[TextRow],
        check: Callable[[], None] = lambda: None,
        min_confidence: float | None = None,
    ) -> list[dict[str, Any]]:
        """Return a described answer to each row, or its `error`; `version` is a name in the store and a number.

        `check` is called before each chunk, and may raise.
        """
        answers: list[dict[str, Any]] = []
        for start in range(0, len(rows), CHUNK_ROWS):
            check()
            chunk = rows[start : start + CHUNK_ROWS]
            found = self._ask(caller, version, chunk, check, min_confidence) if self.client is not None else None
            answers += self._answer_here(version, chunk, min_confidence) if found is None else found
        return answers

    def _ask(
        self,
        caller: Caller,
        version: tuple[str, int],
        rows: Sequence[TextRow],
        check: Callable[[], None],
        min_confidence: float | None,
    ) -> list[dict[str, Any]] | None:
        """Ask the engine, and ask again while it is full or gone; None if it stays so."""
        assert self.client is not None
        name, number = version
        wired = [WireRow(name, name, number, text, pair, min_confidence) for text, pair in rows]
        until, pause_s = time.monotonic() + self._patience_s, _FEWEST_S
        while True:
            try:
                with self._asking:
                    predicted = self.client.predict(caller, wired)
                break
            except EngineRefused as refusal:
                if refusal.retry_after_s is None:
                    raise
                # 429 is the tenant's own limit, which is free again after a while.
                if refusal.http_status != 429 and time.monotonic() >= until:
                    return None
                time.sleep(min(_MOST_S, max(pause_s, refusal.retry_after_s)))
                pause_s = min(_MOST_S, 2 * pause_s)
                check()
        self.num_tokens += predicted.num_tokens
        found: list[dict[str, Any]] = []
        for answer in predicted.answers:
            if isinstance(answer, WireAnswer):
                if (answer.store_name, answer.number) != version:
                    raise Unanswered("the engine answered with another version than asked for", "report this fault")
                found.append(answer.answer)
            else:
                said = {"code": answer.code, "status": answer.status, "message": answer.message, "hint": answer.hint}
                found.append({"error": said})
        return found

    def _answer_here(
        self, version: tuple[str, int], rows: Sequence[TextRow], min_confidence: float | None
    ) -> list[dict[str, Any]]:
        if self._engine is None:
            self._engine = Engine(self._backbone, self._store, num_slots=_NUM_SLOTS, is_compiled=False)
        reference = f"{version[0]}@{version[1]}"
        requests = [Request(reference, text, pair, min_confidence) for text, pair in rows]
        before = self._engine.num_tokens
        answers = self._engine.predict(requests)
        self.num_tokens += self._engine.num_tokens - before
        found = []
        for answer in answers:
            about = describe_answer(answer)
            if answer.error is not None:
                about = {"error": {**answer.error.to_json(), "status": answer.error.http_status}}
            found.append(about)
        return found
