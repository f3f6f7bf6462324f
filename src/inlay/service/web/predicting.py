"""`POST /v1/predict`: rows for one task, for several tasks, or each row for the task that it names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from inlay.errors import BadData
from inlay.service.engine.protocol import Band
from inlay.service.web.app_state import AppState
from inlay.service.web.asking import Asked, RowAsked, ask, check_num_rows
from inlay.service.web.identity import Identity
from inlay.service.web.json_bodies import read_json
from inlay.service.web.problems import FieldFault, bad_fields
from inlay.service.web.visits import Visit

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


async def predict(state: AppState, identity: Identity, body: bytes, receive: Any, visit: Visit) -> bytes:
    """Have each row answered by `task`, by all of `tasks`, or by the task that the row names; one batch takes any mix.

    A row that cannot be answered has its `error` in its place, and the others are answered. With `tasks` the answers
    of a row are a list. `deadline_ms` drops rows that nobody waits for any more; `band` `bulk` lets others go first.
    """
    request = read_json(body, _decoder)
    workspace = identity.workspace
    names = _find_tasks(state, identity, request)
    num_answers = len(request.rows) * max(1, len(names))
    visit.num_rows = num_answers
    check_num_rows(workspace, len(request.rows), num_answers)
    if request.task is not None:
        workspace.resolve(request.task)  # one name for all rows: unknown, it is the request that is wrong
    for name in names:
        workspace.resolve(name)
    if request.tasks is None:
        rows = [_read_row(row, number, request) for number, row in enumerate(request.rows)]
    else:
        rows = [_read_row(row, number, request, name) for number, row in enumerate(request.rows) for name in names]
    asked = Asked(rows, request.band, request.deadline_ms)
    answered = await ask(state, identity, asked, receive, visit.request_id)
    answers: list[Any] = answered.answers
    if request.tasks is not None:
        width = len(names)
        answers = [answers[start * width : (start + 1) * width] for start in range(len(request.rows))]
    return msgspec.json.encode({"answers": answers, "usage": {"rows": num_answers, "tokens": answered.num_tokens}})


def _find_tasks(state: AppState, identity: Identity, request: PredictRequest) -> tuple[str, ...]:
    """Return the tasks that answer every row; none where each row is for one task."""
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


def _read_row(row: str | PredictRow, number: int, request: PredictRequest, name: str | None = None) -> RowAsked:
    if isinstance(row, str):
        task = name or request.task
        if task is not None:
            return RowAsked(task, row, None, request.min_confidence)
        raise bad_fields([FieldFault(f"rows[{number}]", "it names no task: give `task`, or one in each row")])
    if name is not None and row.task is not None:
        raise bad_fields([FieldFault(f"rows[{number}].task", "`tasks` says who answers: leave it out")])
    task = name or row.task or request.task
    if task is None:
        raise bad_fields([FieldFault(f"rows[{number}].task", "it is missing, and there is no `task` for all")])
    least = request.min_confidence if row.min_confidence is None else row.min_confidence
    return RowAsked(task, row.text, row.pair, least)
