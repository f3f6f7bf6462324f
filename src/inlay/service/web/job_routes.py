"""`/v1/jobs` and `/v1/batches`: jobs are submitted, followed and cancelled; batches give their output."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import Header, Query, Request, Response
from starlette.responses import FileResponse, StreamingResponse

from inlay.errors import InlayError
from inlay.service.state import BATCH, RUNNING, SUCCEEDED, TRAIN, Conflict, Job, JobRequest
from inlay.service.state.paging import cut_page, read_cursor
from inlay.service.trainer.job_settings import check_settings
from inlay.service.views import submit_batch, submit_training
from inlay.service.web.bodies import BatchBody, JobBody
from inlay.service.web.dataset_routes import Cursor, Limit
from inlay.service.web.guard import CreatedReply, CurrentCall, RouteCall, answer_once, make_router, needs
from inlay.service.web.problems import FieldFault, RequestRefused, bad_fields
from inlay.service.web.shapes import JobEventShape, JobShape, JobState, ListShape

router = make_router("jobs")
STREAM = "text/event-stream"
_POLL_S = 0.25
_HEARTBEAT_S = 15.0
_LONGEST_STREAM_S = 3600.0
MOST_STREAMS = 64
"""open streams of events that one tenant may have"""
After = Annotated[int, Query(ge=0, le=2**53, description="Only events after the one with this id.")]


@router.post(
    "/v1/jobs", status_code=202, response_model=JobShape, openapi_extra=needs("train"), summary="Train a version"
)
def submit_job(here: CurrentCall, body: JobBody) -> Response:
    """Queue a training. `GET /v1/jobs/{job}/events` tells how it goes.

    With `corrections`, the task is trained again on the rows of its live version, as feedback has corrected them.
    """
    if body.corrections == (body.dataset is not None):
        raise bad_fields([FieldFault("dataset", "give `dataset`, or `corrections`: true")])
    settings = body.settings.model_dump(exclude_none=True, by_alias=True)
    check_settings(settings)
    request = JobRequest(TRAIN, body.task, body.dataset, settings, body.publish, body.priority)

    def make(call: Any) -> CreatedReply:
        return _made(submit_training(here.workspace, request, call, corrections=body.corrections))

    return answer_once(here, make, lambda job_id: _made(here.workspace.job(job_id)))


@router.post(
    "/v1/batches",
    status_code=202,
    response_model=JobShape,
    openapi_extra=needs("predict"),
    summary="Answer a dataset in the background",
)
def submit_batch_job(here: CurrentCall, body: BatchBody) -> Response:
    """Queue a dataset to be answered, behind everybody's requests. `GET /v1/batches/{job}/output` has the answers."""
    settings = body.model_dump(include={"text", "pair", "min_confidence"}, exclude_none=True)

    def make(call: Any) -> CreatedReply:
        workspace = here.workspace
        return _made(submit_batch(workspace, body.task, body.dataset, settings, priority=body.priority, call=call))

    return answer_once(here, make, lambda job_id: _made(here.workspace.job(job_id)))


def _made(job: Job) -> CreatedReply:
    return CreatedReply(job.to_json(), 202, {"location": f"/v1/jobs/{job.id}"})


@router.get("/v1/jobs", response_model=ListShape[JobShape])
def list_jobs(
    here: CurrentCall,
    task: Annotated[str | None, Query(max_length=200)] = None,
    state: JobState | None = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Any:
    """List the jobs, newest first."""
    return here.workspace.jobs(task=task, state=state, limit=limit, cursor=cursor).to_json()


@router.get("/v1/jobs/{job}", response_model=JobShape)
def get_job(here: CurrentCall, job: str) -> Any:
    """Return a job as it stands."""
    return here.workspace.job(job).to_json()


@router.post("/v1/jobs/{job}/cancel", status_code=202, response_model=JobShape, openapi_extra=needs("train"))
def cancel_job(here: CurrentCall, job: str) -> Any:
    """Cancel a job: at once if it is queued, within seconds if it runs. One that has ended stays as it is."""
    return here.workspace.cancel(job).to_json()


@router.get(
    "/v1/jobs/{job}/events",
    response_model=ListShape[JobEventShape],
    responses={200: {"content": {STREAM: {"schema": {"type": "string"}}}}},
    summary="Follow a job",
)
async def list_events(
    request: Request,
    here: CurrentCall,
    job: str,
    after: After = 0,
    limit: Limit = 200,
    cursor: Cursor = None,
    last_event_id: Annotated[str | None, Header(description="The event that a stream was left at.")] = None,
) -> Any:
    """Return what happened to a job, oldest first; with `Accept: text/event-stream`, as it happens.

    A stream ends with the event `end` when the job has ended. A client that was cut off goes on by `Last-Event-ID`.
    """
    if STREAM in request.headers.get("accept", ""):
        start = int(last_event_id) if last_event_id is not None and last_event_id.isdigit() else after
        await asyncio.to_thread(here.workspace.job, job)
        return _stream(here, job, min(start, 2**53))
    start = read_cursor("events", cursor, int) or after

    def read() -> dict[str, Any]:
        found = here.workspace.events(job, start, min(limit + 1, 200))
        page = cut_page("events", found, limit, lambda event: event.id)
        if limit == len(found) == 200:  # the most that one read returns: there may be more
            page = cut_page("events", [*found, found[-1]], limit, lambda event: event.id)
        return page.to_json()

    return await asyncio.to_thread(read)


def _stream(here: RouteCall, job_id: str, after: int) -> Response:
    if here.state.streams[here.workspace.name] >= MOST_STREAMS:
        reason = f"{MOST_STREAMS} streams of events are open"
        raise RequestRefused(reason, "close one, or ask without a stream", code="too-many-streams", status=429)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_counted(here, _follow(here, job_id, after)), media_type=STREAM, headers=headers)


async def _counted(here: RouteCall, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield events, and count the stream while it is open."""
    streams, tenant = here.state.streams, here.workspace.name
    streams[tenant] += 1
    try:
        async for event in events:
            yield event
    finally:
        streams[tenant] -= 1
        if not streams[tenant]:
            del streams[tenant]


async def _follow(here: RouteCall, job_id: str, after: int) -> AsyncIterator[bytes]:
    """Yield the events of a job as they happen, as server-sent events."""
    workspace, state = here.workspace, here.state
    ends_at = time.monotonic() + _LONGEST_STREAM_S
    spoke_at = 0.0
    while time.monotonic() < ends_at and not state.is_draining:
        try:
            # The job is read first: if it has ended, the events that are read next are complete.
            job = await asyncio.to_thread(workspace.job, job_id)
            events = await asyncio.to_thread(workspace.events, job_id, after, 200)
        except InlayError:  # it was erased just now
            return
        for event in events:
            after = event.id
            data = msgspec.json.encode(event.to_json())
            yield f"id: {event.id}\nevent: {event.kind}\ndata: ".encode() + data + b"\n\n"
        if events:
            spoke_at = time.monotonic()
        elif job.has_ended:
            yield b"event: end\ndata: " + msgspec.json.encode({"state": job.state}) + b"\n\n"
            return
        elif time.monotonic() - spoke_at > _HEARTBEAT_S:
            spoke_at = time.monotonic()
            yield b": still here\n\n"
        if len(events) < 200:
            await asyncio.sleep(_POLL_S if job.state == RUNNING else 2 * _POLL_S)


@router.get(
    "/v1/batches/{job}/output",
    response_class=FileResponse,
    responses={200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}}},
    summary="The answers of a batch",
)
def get_output(here: CurrentCall, job: str) -> Response:
    """Return the answers of a batch as JSON lines, in the order of the dataset's rows."""
    workspace = here.workspace
    found, files = workspace.job(job), workspace.db.files
    if found.kind != BATCH:
        raise Conflict(f"job `{job}` is not a batch", "`GET /v1/jobs` lists the jobs with their kinds")
    path = workspace.db.paths.batch(workspace.name, job)
    if found.state != SUCCEEDED or not files.has(path):
        raise Conflict(f"job `{job}` is {found.state}: there is no output", "wait until it has succeeded")
    if not files.is_shared:
        return FileResponse(path, media_type="application/jsonl", filename=path.name)
    headers = {"content-disposition": f'attachment; filename="{path.name}"'}
    return StreamingResponse(files.stream(path), media_type="application/jsonl", headers=headers)
