"""`/v1/datasets`: uploads are streamed to the disk, inspected, and kept with what was found in them."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import Query, Request, Response

from inlay.service.state import FORMATS, Dataset, DatasetDraft, Workspace
from inlay.service.web.app_state import AppState
from inlay.service.web.bodies import ReadingBody
from inlay.service.web.guard import CreatedReply, CurrentCall, RouteCall, answer_once, make_router, needs
from inlay.service.web.shapes import DatasetShape, ListShape
from inlay.service.web.uploads import (
    FIELDS,
    KINDS_OFFERED,
    TYPES,
    Draft,
    Received,
    check_options,
    clean_name,
    receive_upload,
)

router = make_router("datasets")
COLUMNS = ("text", "pair", "label", "kind")
_LONGEST = 500
Column = Annotated[str | None, Query(max_length=_LONGEST, description="The name of a column, instead of a guess.")]
Limit = Annotated[int, Query(ge=1, le=200)]
Cursor = Annotated[str | None, Query(max_length=1000, description="`next_cursor` of the page before.")]

_FILE = {"type": "string", "format": "binary"}
_FORM = {
    "type": "object",
    "required": ["file"],
    "properties": {"file": _FILE, **{name: {"type": "string", "maxLength": _LONGEST} for name in FIELDS}},
}
_UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {"schema": _FORM},
            "application/octet-stream": {"schema": _FILE},
            **{kind: {"schema": _FILE} for kind in TYPES},
        },
    }
}


@router.post(
    "/v1/datasets",
    status_code=201,
    response_model=DatasetShape,
    openapi_extra={**needs("train"), **_UPLOAD},
    summary="Upload a dataset",
)
async def upload_dataset(
    request: Request,
    here: CurrentCall,
    name: Annotated[str | None, Query(max_length=_LONGEST, description="The file's name.")] = None,
    format: Annotated[str | None, Query(description=f"One of {', '.join(FORMATS)}.")] = None,
    text: Column = None,
    pair: Column = None,
    label: Column = None,
    kind: Annotated[str | None, Query(description=f"One of {', '.join(KINDS_OFFERED)}.")] = None,
) -> Response:
    """Stream a CSV, TSV, JSON-lines, Parquet or Excel file, as the body itself or as `file` of a form.

    The answer has the columns, the kind of task and labels that training would find, notes with line numbers, and the
    first rows. A file without labels is kept too: a batch can answer it.
    """
    given = {"name": name, "format": format, "text": text, "pair": pair, "label": label, "kind": kind}
    query = {key: value for key, value in given.items() if value is not None}
    return await _keep_upload(here, request, query)


async def _keep_upload(here: RouteCall, request: Request, query: dict[str, str]) -> Response:
    """Receive, inspect and keep an upload, and answer with the dataset; after an error nothing of it is left."""
    check_options(query)
    workspace = here.workspace
    async with Draft(workspace) as draft:
        received = await receive_upload(draft, workspace, request.scope, request.receive, query)
        inspected = await inspect_upload(here.state, workspace, received)

        def make(call: Any) -> CreatedReply:
            return _made(workspace.add_dataset(inspected, call))

        def show(dataset_id: str) -> CreatedReply:
            return _made(workspace.dataset(dataset_id))

        content = f"{received.sha256} {sorted(received.options.items())}"
        return await asyncio.to_thread(answer_once, here, make, show, content=content)


async def inspect_upload(state: AppState, workspace: Workspace, received: Received) -> DatasetDraft:
    """Return an upload with what was found in it, ready to be kept as a dataset."""
    options = received.options
    columns = {name: options.get(name) or None for name in COLUMNS}
    limits = workspace.tenant.limits
    num_rows, found = await state.inspector.inspect(received.path, options["format"], limits, columns)
    return DatasetDraft(
        received.path,
        clean_name(options.get("name", "")),
        options["format"],
        received.size_bytes,
        received.sha256,
        num_rows,
        found,
    )


def _made(dataset: Dataset) -> CreatedReply:
    return CreatedReply(dataset.to_json(), 201, {"location": f"/v1/datasets/{dataset.id}"})


@router.get("/v1/datasets", response_model=ListShape[DatasetShape], openapi_extra=needs("train"))
def list_datasets(here: CurrentCall, limit: Limit = 50, cursor: Cursor = None) -> Any:
    """List the datasets, newest first."""
    return here.workspace.datasets(limit, cursor).to_json()


@router.get("/v1/datasets/{dataset}", response_model=DatasetShape, openapi_extra=needs("train"))
def get_dataset(here: CurrentCall, dataset: str) -> Any:
    """Return a dataset."""
    return here.workspace.dataset(dataset).to_json()


@router.post(
    "/v1/datasets/{dataset}/reading",
    response_model=DatasetShape,
    openapi_extra=needs("train"),
    summary="Read a dataset by other columns",
)
async def read_dataset_again(here: CurrentCall, dataset: str, body: ReadingBody) -> Any:
    """Look into a dataset again with chosen columns; later trainings read it that way."""
    found = await read_again(here.state, here.workspace, dataset, body.model_dump(exclude_none=True))
    return found.to_json()


async def read_again(state: AppState, workspace: Workspace, dataset_id: str, columns: dict[str, str]) -> Dataset:
    """Inspect a dataset again with chosen columns, and keep what was found."""
    dataset = await asyncio.to_thread(workspace.dataset, dataset_id)
    with ExitStack() as stack:
        path = await asyncio.to_thread(stack.enter_context, workspace.db.files.reading(dataset.path))
        _, found = await state.inspector.inspect(path, dataset.format, workspace.tenant.limits, columns)
    return await asyncio.to_thread(workspace.set_reading, dataset_id, vars(found))


@router.delete("/v1/datasets/{dataset}", status_code=204, openapi_extra=needs("train"))
def delete_dataset(here: CurrentCall, dataset: str) -> Response:
    """Delete a dataset and its file. A job that has not ended keeps it."""
    here.workspace.delete_dataset(dataset)
    return Response(status_code=204)
