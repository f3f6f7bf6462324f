"""Rows on their way to the engine and back: names become versions, and every answer is held against what was asked.

What always holds: an answer that another version gave than the one that was asked is never shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from inlay.errors import InlayError
from inlay.service.engine import Predicted, WireError, WireRow
from inlay.service.engine.protocol import Band
from inlay.service.state import OverLimit, ResolvedTask, Workspace
from inlay.service.web.app_state import AppState, make_caller
from inlay.service.web.identity import Identity
from inlay.service.web.problems import Secrets, describe_error, describe_words
from inlay.service.web.visits import ClientGone

T = TypeVar("T")
_UNWATCHED_S = 0.1
"""time that an answer may take before anybody looks whether its client still waits"""
MOST_ANSWERS_A_ROW = 16
"""a request may have this many times its limit of rows as answers, where it asks several tasks"""


@dataclass(frozen=True)
class RowAsked:
    """A text for a task, by the name that the caller gave it."""

    task: str
    text: str
    pair: str | None = None
    min_confidence: float | None = None


@dataclass(frozen=True)
class Asked:
    """Rows with what goes for all of them."""

    rows: Sequence[RowAsked]
    band: Band = "interactive"
    deadline_ms: float | None = None


@dataclass(frozen=True)
class Answered:
    """An answer or a problem for every row, and the tokens they took."""

    answers: list[dict[str, Any]]
    num_tokens: int


def check_num_rows(workspace: Workspace, num_rows: int, num_answers: int) -> None:
    """Refuse more rows, or more answers to them, than the tenant may ask for at once."""
    most = workspace.tenant.limits.rows_per_request
    if most is not None and num_rows > most:
        raise OverLimit("rows_per_request", num_rows, most)
    if most is not None and num_answers > MOST_ANSWERS_A_ROW * most:
        raise OverLimit("rows_per_request", num_answers, MOST_ANSWERS_A_ROW * most)


async def ask(state: AppState, identity: Identity, asked: Asked, receive: Any, request_id: str) -> Answered:
    """Have rows answered; a row whose task is unknown gets its problem, and the others are answered."""
    workspace = identity.workspace
    secrets = Secrets(state.settings.home, identity.tenant.prefix)
    # 1. names become versions, once for all rows of a name
    versions: dict[str, ResolvedTask | dict[str, Any]] = {}
    rows: list[WireRow] = []
    for row in asked.rows:
        version = versions.get(row.task)
        if version is None:
            version = versions[row.task] = _resolve(workspace, row.task, secrets)
        if isinstance(version, ResolvedTask):
            rows.append(WireRow(row.task, version.store_name, version.number, row.text, row.pair, row.min_confidence))
    # 2. the engine answers, as long as the client waits
    predicted = Predicted(0, [], 0, 0.0, 0.0)
    if rows:
        caller = make_caller(identity.tenant, asked.band)
        asking = state.engine.predict(caller, rows, deadline_ms=asked.deadline_ms, request_id=request_id)
        predicted = await while_client_waits(asking, receive)
    # 3. every answer is held against its row
    answers = _collect(state, asked.rows, versions, rows, predicted, secrets)
    _count(state, workspace, asked, rows, predicted)
    return Answered(answers, predicted.num_tokens)


def _resolve(workspace: Workspace, task: str, secrets: Secrets) -> ResolvedTask | dict[str, Any]:
    try:
        return workspace.resolve(task)
    except InlayError as error:
        return describe_error(error, secrets)


def _collect(
    state: AppState,
    asked: Sequence[RowAsked],
    versions: dict[str, ResolvedTask | dict[str, Any]],
    rows: Sequence[WireRow],
    predicted: Predicted,
    secrets: Secrets,
) -> list[dict[str, Any]]:
    found = iter(zip(rows, predicted.answers, strict=True))
    answers: list[dict[str, Any]] = []
    for row in asked:
        version = versions[row.task]
        if isinstance(version, dict):
            state.counters.add_fault(version["code"])
            answers.append({"task": row.task, "error": version})
            continue
        wire, answer = next(found)
        if isinstance(answer, WireError):
            state.counters.add_fault(answer.code)
            problem = describe_words(answer.code, answer.status, answer.message, answer.hint, secrets)
            answers.append({"task": row.task, "error": problem})
        elif (answer.store_name, answer.number) != (wire.store_name, wire.number):
            state.counters.add_mismatch()
            answers.append({"task": row.task, "error": _wrong_version()})
        else:
            answers.append(answer.answer)
    return answers


def _wrong_version() -> dict[str, Any]:
    return describe_words("wrong-version", 500, "another version than the one that was asked has answered", "ask again")


def _count(state: AppState, workspace: Workspace, asked: Asked, rows: Sequence[WireRow], predicted: Predicted) -> None:
    """Add to the counters and to the tenant's usage, by task."""
    if not rows:
        return
    state.counters.add_rows(asked.band, len(rows), predicted.num_tokens)
    first = rows[0].store_name
    prefix = len(workspace.tenant.prefix)
    if all(row.store_name == first for row in rows):
        workspace.add_usage(first[prefix:], rows=len(rows), tokens=predicted.num_tokens)
        return
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.store_name] = counts.get(row.store_name, 0) + 1
    for store_name, count in counts.items():
        tokens = round(predicted.num_tokens * count / len(rows))
        workspace.add_usage(store_name[prefix:], rows=count, tokens=tokens)


async def while_client_waits(work: Coroutine[Any, Any, T], receive: Any) -> T:
    """Return what `work` returns; cancel it when the client has closed the connection."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait((task,), timeout=_UNWATCHED_S)
        if done:
            return task.result()
        watcher = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watcher.cancel()
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()


async def _until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
