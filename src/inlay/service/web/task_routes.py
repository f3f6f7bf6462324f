"""`/v1/tasks`: tasks, their versions and reports, which version is live, and feedback on answers."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Path, Query, Request, Response

from inlay.service.page.suggesting import suggest_rows
from inlay.service.state import Alias, Correction, Job
from inlay.service.views import (
    describe_comparison,
    describe_errors,
    describe_report,
    describe_task,
    describe_tasks,
    find_version,
    go_live,
    suggest_from,
)
from inlay.service.web.bodies import MOST_NUMBER, AliasBody, FeedbackBody, PolicyBody
from inlay.service.web.dataset_routes import Cursor, Limit
from inlay.service.web.guard import CreatedReply, CurrentCall, answer_once, make_router, needs, read_if_match
from inlay.service.web.shapes import (
    AliasMoveShape,
    AliasShape,
    FeedbackShape,
    JobShape,
    ListShape,
    SuggestionShape,
    TaskShape,
    VersionShape,
)

router = make_router("tasks")
Number = Annotated[int, Path(ge=1, le=MOST_NUMBER)]
Versions = Annotated[int, Query(ge=1, le=MOST_NUMBER)]
LabelFilter = Annotated[str | None, Query(max_length=1000)]
_IF_MATCH: dict[str, Any] = {
    "parameters": [
        {
            "name": "If-Match",
            "in": "header",
            "required": False,
            "schema": {"type": "string"},
            "description": "The `etag` you looked at: if it has changed since, nothing is done (412).",
        }
    ]
}
_ETAG = {"headers": {"ETag": {"schema": {"type": "string"}}}}


@router.get("/v1/tasks", response_model=ListShape[TaskShape])
def list_tasks(here: CurrentCall, limit: Limit = 50, cursor: Cursor = None) -> Any:
    """List the tasks by name."""
    return describe_tasks(here.workspace, limit, cursor)


@router.get("/v1/tasks/{task}", response_model=TaskShape, responses={200: _ETAG})
def get_task(here: CurrentCall, response: Response, task: str) -> Any:
    """Return a task."""
    found = describe_task(here.workspace, task)
    response.headers["etag"] = found["etag"]
    return found


@router.patch(
    "/v1/tasks/{task}",
    response_model=TaskShape,
    responses={200: _ETAG},
    openapi_extra={**needs("train"), **_IF_MATCH},
    summary="Say when new versions go live",
)
def set_policy(here: CurrentCall, request: Request, response: Response, task: str, body: PolicyBody) -> Any:
    """Say when versions trained from now on go live: `always`, `if-better` on the same rows, or `never`."""
    found = here.workspace.set_policy(task, body.policy, if_match=read_if_match(request))
    response.headers["etag"] = found.etag
    return describe_task(here.workspace, task)


@router.delete(
    "/v1/tasks/{task}",
    status_code=202,
    response_model=JobShape,
    openapi_extra=needs("admin"),
    summary="Erase a task",
)
def erase_task(here: CurrentCall, task: str) -> Response:
    """Erase a task with its versions, runs, answers and corrections. It is gone at once; a job erases the bytes."""
    workspace = here.workspace

    def made(job: Job) -> CreatedReply:
        return CreatedReply(job.to_json(), 202, {"location": f"/v1/jobs/{job.id}"})

    def make(call: Any) -> CreatedReply:
        return made(workspace.erase_task(task, call))

    return answer_once(here, make, lambda job_id: made(workspace.job(job_id)))


@router.get("/v1/tasks/{task}/versions", response_model=ListShape[VersionShape])
def list_versions(here: CurrentCall, task: str) -> Any:
    """List a task's versions, oldest first."""
    return {"items": [row.to_json() for row in here.workspace.versions(task)], "next_cursor": None}


@router.get("/v1/tasks/{task}/versions/{version}", response_model=VersionShape)
def get_version(here: CurrentCall, task: str, version: Number) -> Any:
    """Return a version."""
    return find_version(here.workspace, task, version).row.to_json()


@router.get("/v1/tasks/{task}/versions/{version}/report", openapi_extra=needs("train"))
def get_report(here: CurrentCall, task: str, version: Number) -> dict[str, Any]:
    """Return how good a version is on its dev rows: intervals, scores of labels, confusion and calibration."""
    return describe_report(here.workspace, task, version)


@router.get("/v1/tasks/{task}/versions/{version}/errors", openapi_extra=needs("train"))
def list_errors_of_version(
    here: CurrentCall,
    task: str,
    version: Number,
    expected: LabelFilter = None,
    answer: LabelFilter = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """List the dev rows that a version got wrong, the surest first."""
    place = find_version(here.workspace, task, version)
    return describe_errors(here.workspace, place, {"expected": expected, "answer": answer}, limit, cursor)


@router.get("/v1/tasks/{task}/compare", openapi_extra=needs("train"), summary="Compare two versions")
async def compare_versions(here: CurrentCall, task: str, a: Versions, b: Versions) -> dict[str, Any]:
    """Compare two versions on the same rows: the paired difference with its interval, a test, and what changed."""
    return await describe_comparison(here.workspace, here.state.engine, task, (a, b))


@router.get(
    "/v1/tasks/{task}/suggestions",
    response_model=ListShape[SuggestionShape],
    openapi_extra=needs("train"),
    summary="Rows worth labelling",
)
async def list_suggestions(
    here: CurrentCall,
    task: str,
    dataset: Annotated[str | None, Query(max_length=100, description="Rows to choose from, labelled or not.")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 20,
) -> Any:
    """List the rows whose labels would teach the task most: those that the live version is least sure of.

    They are rows of `dataset`; without one, dev rows of the live version, and those it is surely wrong about.
    """
    if dataset is None:
        found = await asyncio.to_thread(suggest_rows, here.workspace, task, limit)
    else:
        found = await suggest_from(here.workspace, here.state.engine, task, dataset, limit)
    return {"items": found, "next_cursor": None}


@router.get("/v1/tasks/{task}/aliases/live", response_model=AliasShape, responses={200: _ETAG})
def get_live(here: CurrentCall, response: Response, task: str) -> Any:
    """Return which version answers, and since when."""
    alias = here.workspace.alias(task)
    if alias is None:
        number = here.workspace.resolve(
            task
        ).number  # published into this store without the service: the newest one answers
        response.headers["etag"] = '"0"'
        moved_at = str(find_version(here.workspace, task, number).row.to_json()["published_at"])
        moved = {"moved_at": moved_at, "moved_by": "store", "reason": "the newest version"}
        return {"alias": "live", "version": number, "etag": '"0"', **moved}
    response.headers["etag"] = alias.etag
    return alias.to_json()


@router.put(
    "/v1/tasks/{task}/aliases/live",
    response_model=AliasShape,
    responses={200: _ETAG},
    openapi_extra={**needs("train"), **_IF_MATCH},
    summary="Make a version live, or roll back",
)
async def put_live(here: CurrentCall, request: Request, response: Response, task: str, body: AliasBody) -> Any:
    """Make a version the one that answers. It is loaded and proved first; then the alias moves in one step."""
    if_match = read_if_match(request)
    alias: Alias = await go_live(
        here.workspace, here.state.engine, task, body.version, if_match=if_match, reason=body.reason
    )
    response.headers["etag"] = alias.etag
    return alias.to_json()


@router.get("/v1/tasks/{task}/aliases/live/history", response_model=ListShape[AliasMoveShape])
def list_history(here: CurrentCall, task: str) -> Any:
    """List the moves of `live`, newest first."""
    return {"items": [move.to_json() for move in here.workspace.history(task)], "next_cursor": None}


@router.post(
    "/v1/tasks/{task}/feedback",
    status_code=201,
    response_model=ListShape[FeedbackShape],
    openapi_extra=needs("train"),
    summary="Correct answers",
)
def add_feedback(here: CurrentCall, task: str, body: FeedbackBody) -> Response:
    """Keep corrections of answers: `POST /v1/jobs` with `corrections` trains the task again with them."""
    workspace = here.workspace
    items = [Correction(item.text, item.label, item.pair, item.answered, item.version) for item in body.items]

    def make(call: Any) -> CreatedReply:
        kept = workspace.add_feedback(task, items, call)
        return CreatedReply({"items": [item.to_json() for item in kept], "next_cursor": None})

    def show(subject: str) -> CreatedReply:
        page = workspace.feedback(subject.removeprefix("task:"), min(len(items), 200))
        return CreatedReply({"items": [item.to_json() for item in reversed(page.items)], "next_cursor": None})

    return answer_once(here, make, show)


@router.get("/v1/tasks/{task}/feedback", response_model=ListShape[FeedbackShape], openapi_extra=needs("train"))
def list_feedback(here: CurrentCall, task: str, limit: Limit = 50, cursor: Cursor = None) -> Any:
    """List the corrections of a task's answers, newest first."""
    return here.workspace.feedback(task, limit, cursor).to_json()
