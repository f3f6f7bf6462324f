"""`POST /v1/predict`, and the asking of the engine that all routes and pages with answers share.

What always holds: if another version answered than the one that was asked, its answer is never shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from inlay.errors import BadData, InlayError
from inlay.service.engine import Caller, Predicted, WireError, WireRow
from inlay.service.engine.protocol import Band
from inlay.service.state import OverLimit, ResolvedTask, Workspace
from inlay.service.web.app_state import AppState
from inlay.service.web.identity import Identity
from inlay.service.web.problems import FieldFault, Secrets, bad_fields, describe_error, make_problem_body
from inlay.service.web.request_context import ClientGone, RequestContext, read_json

T = TypeVar("T")
_UNWATCHED_S = 0.1
"""seconds that an answer may take before the connection is watched for a client that leaves"""
MOST_ANSWERS_A_ROW = 16
"""a request to several tasks may have this many times its limit of rows as answers"""
TaskName = Annotated[
    str, msgspec.Meta(min_length=1, max_length=200, description="A task's name, or a version such as `mail@3`.")
]
Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
Milliseconds = Annotated[float, msgspec.Meta(ge=1, le=600_000)]


class PredictRow(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A text, the second text of a pair if there is one, and what is not as for the other rows."""

    text: str
    pair: str | None = None
    task: TaskName | None = None
    min_confidence: Probability | None = None


class PredictRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Rows and who is to answer them: `task`, or `tasks` for several answers to each row."""

    rows: list[str | PredictRow]
    task: TaskName | None = None
    tasks: Annotated[list[TaskName], msgspec.Meta(min_length=1, max_length=1024)] | Literal["*"] | None = None
    min_confidence: Probability | None = None
    deadline_ms: Milliseconds | None = None
    band: Band = "interactive"


class UsedUp(msgspec.Struct):
    """The rows and tokens that an answer took."""

    rows: int
    tokens: int


class RowAnswer(msgspec.Struct, omit_defaults=True):
    """A task's answer to a row, with the fields of its kind; or `error`."""

    task: str
    version: str | None = None
    label: str | None = None
    labels: list[str] | None = None
    value: float | None = None
    answer: str | None = None
    entities: list[dict[str, Any]] | None = None
    words: list[dict[str, Any]] | None = None
    nbest: list[dict[str, Any]] | None = None
    start: int | None = None
    end: int | None = None
    probability: float | None = None
    probabilities: dict[str, float] | None = None
    abstained: bool | None = None
    error: dict[str, Any] | None = None


class PredictAnswer(msgspec.Struct):
    """The answers in the order of the rows; with `tasks`, a list for each row in the order of the tasks."""

    answers: list[RowAnswer | list[RowAnswer]]
    usage: UsedUp


_decoder = msgspec.json.Decoder(PredictRequest)


async def predict(state: AppState, identity: Identity, body: bytes, receive: Any, context: RequestContext) -> bytes:
    """Have each row answered by `task`, by all of `tasks`, or by the task that the row names; one batch takes any mix.

    A row that cannot be answered has its `error` in its place, and the others are answered. With `tasks` the answers
    of a row are a list. `deadline_ms` drops rows that nobody waits for any more; `band` `bulk` lets others go first.
    """
    request = read_json(body, _decoder)
    workspace = identity.workspace
    names = _find_tasks(state, identity, request)
    num_answers = len(request.rows) * max(1, len(names))
    context.num_rows = num_answers
    check_num_rows(workspace, len(request.rows), num_answers)
    if request.task is not None:
        workspace.resolve(request.task)  # one name for all rows: if it is unknown, the request is refused
    for name in names:
        workspace.resolve(name)
    if request.tasks is None:
        rows = [_read_row(row, number, request) for number, row in enumerate(request.rows)]
    else:
        rows = [_read_row(row, number, request, name) for number, row in enumerate(request.rows) for name in names]
    question = EngineQuestion(rows, request.band, request.deadline_ms)
    found, num_tokens = await ask_engine(state, identity, question, receive, context.request_id)
    answers: list[Any] = found
    if request.tasks is not None:
        width = len(names)
        answers = [found[start * width : (start + 1) * width] for start in range(len(request.rows))]
    return msgspec.json.encode({"answers": answers, "usage": {"rows": num_answers, "tokens": num_tokens}})


def _find_tasks(state: AppState, identity: Identity, request: PredictRequest) -> tuple[str, ...]:
    """Return the tasks that answer every row; none if each row is for one task."""
    if request.tasks is None:
        return ()
    if request.task is not None:
        raise bad_fields([FieldFault("tasks", "`task` and `tasks` exclude each other")])
    if request.tasks != "*":
        return tuple(request.tasks)
    names = state.live_names.find(identity.workspace)
    if not names:
        raise BadData("no task can answer yet", "`POST /v1/jobs` trains one")
    return names


def _read_row(row: str | PredictRow, number: int, request: PredictRequest, name: str | None = None) -> TaskRow:
    if isinstance(row, str):
        task = name or request.task
        if task is not None:
            return TaskRow(task, row, None, request.min_confidence)
        raise bad_fields([FieldFault(f"rows[{number}]", "it names no task: give `task`, or one in each row")])
    if name is not None and row.task is not None:
        raise bad_fields([FieldFault(f"rows[{number}].task", "`tasks` says who answers: leave it out")])
    task = name or row.task or request.task
    if task is None:
        raise bad_fields([FieldFault(f"rows[{number}].task", "it is missing, and there is no `task` for all")])
    least = request.min_confidence if row.min_confidence is None else row.min_confidence
    return TaskRow(task, row.text, row.pair, least)


# Asking the engine


@dataclass(frozen=True)
class TaskRow:
    """A text for a task, by the name that the caller gave it."""

    task: str
    text: str
    pair: str | None = None
    min_confidence: float | None = None


@dataclass(frozen=True)
class EngineQuestion:
    """Rows, and the settings that apply to all of them."""

    rows: Sequence[TaskRow]
    band: Band = "interactive"
    deadline_ms: float | None = None


def check_num_rows(workspace: Workspace, num_rows: int, num_answers: int) -> None:
    """Refuse more rows, or more answers to them, than the tenant may ask for in one request."""
    most = workspace.tenant.limits.rows_per_request
    if most is not None and num_rows > most:
        raise OverLimit("rows_per_request", num_rows, most)
    if most is not None and num_answers > MOST_ANSWERS_A_ROW * most:
        raise OverLimit("rows_per_request", num_answers, MOST_ANSWERS_A_ROW * most)


async def ask_engine(
    state: AppState, identity: Identity, question: EngineQuestion, receive: Any, request_id: str
) -> tuple[list[dict[str, Any]], int]:
    """Return an answer or a problem for every row, and the number of tokens."""
    workspace, tenant = identity.workspace, identity.tenant
    secrets = Secrets(state.settings.home, tenant.prefix)
    # 1. find the version of each task name, once; a name that is unknown is a problem of its rows
    versions: dict[str, ResolvedTask | dict[str, Any]] = {}
    rows: list[WireRow] = []
    for row in question.rows:
        version = versions.get(row.task)
        if version is None:
            try:
                version = workspace.resolve(row.task)
            except InlayError as error:
                version = describe_error(error, secrets)
            versions[row.task] = version
        if isinstance(version, ResolvedTask):
            rows.append(WireRow(row.task, version.store_name, version.number, row.text, row.pair, row.min_confidence))
    # 2. the engine answers, as long as the client waits
    predicted = Predicted(0, [], 0, 0.0, 0.0)
    if rows:
        caller = Caller(tenant.name, tenant.weight, tenant.limits.tokens_per_minute, question.band)
        asking = state.engine.predict(caller, rows, deadline_ms=question.deadline_ms, request_id=request_id)
        predicted = await _while_client_waits(asking, receive)
    # 3. compare the version of each answer with the one that was asked
    pairs = iter(zip(rows, predicted.answers, strict=True))
    answers: list[dict[str, Any]] = []
    for row in question.rows:
        version = versions[row.task]
        if isinstance(version, dict):
            state.counters.add_fault(version["code"])
            answers.append({"task": row.task, "error": version})
            continue
        wire, answer = next(pairs)
        if isinstance(answer, WireError):
            state.counters.add_fault(answer.code)
            problem = make_problem_body(answer.code, answer.status, answer.message, answer.hint, secrets)
            answers.append({"task": row.task, "error": problem})
        elif (answer.store_name, answer.number) != (wire.store_name, wire.number):
            state.counters.add_mismatch()
            message = "another version than the one that was asked has answered"
            answers.append({"task": row.task, "error": make_problem_body("wrong-version", 500, message, "ask again")})
        else:
            answers.append(answer.answer)
    if rows:
        _count(state, workspace, question.band, rows, predicted)
    return answers, predicted.num_tokens


def _count(state: AppState, workspace: Workspace, band: Band, rows: Sequence[WireRow], predicted: Predicted) -> None:
    """Add to the counters and to the tenant's usage, by task."""
    state.counters.add_rows(band, len(rows), predicted.num_tokens)
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


async def _while_client_waits(work: Coroutine[Any, Any, T], receive: Any) -> T:
    """Return what `work` returns; cancel it when the client has closed the connection."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait((task,), timeout=_UNWATCHED_S)
        if done:
            return task.result()
        watcher = asyncio.ensure_future(until_gone())
        try:
            await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watcher.cancel()
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
