"""`/v1/usage`, `/v1/limits`, `/v1/keys`, and `/v1/operator` for the operator of the service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC
from typing import Annotated, Any

import msgspec
from fastapi import Query, Response

from inlay.errors import InlayError
from inlay.service.engine import EngineRefused
from inlay.service.home import read_fleet, read_status
from inlay.service.state import JobQueue, Key, Keys, Tenants, Workspace
from inlay.service.web.app_state import AppState
from inlay.service.web.bodies import KeyBody, RotationBody
from inlay.service.web.guard import CreatedReply, CurrentCall, RouteCall, answer_once, make_router, needs
from inlay.service.web.problems import FieldFault, RequestRefused, bad_fields
from inlay.service.web.shapes import DayUsageShape, KeyShape, LimitsShape, ListShape, MadeKeyShape

router = make_router("account")
Days = Annotated[int, Query(ge=1, le=366)]


@router.get("/v1/usage", response_model=ListShape[DayUsageShape])
def list_usage(here: CurrentCall, days: Days = 30) -> Any:
    """List what was answered in the last days (UTC), by day and task, newest first."""
    return {"items": [item.to_json() for item in here.workspace.usage(days)], "next_cursor": None}


@router.get("/v1/limits", response_model=LimitsShape)
def get_limits(here: CurrentCall) -> Any:
    """Return what you may use, and what of it is used."""
    tenant = here.workspace.tenant
    return {"tenant": tenant.name, "weight": tenant.weight, **here.workspace.limits().to_json()}


@router.post(
    "/v1/keys",
    status_code=201,
    response_model=MadeKeyShape,
    openapi_extra=needs("admin"),
    summary="Make a key",
)
def make_key(here: CurrentCall, body: KeyBody) -> Response:
    """Make a key. Its `secret` is in this answer and nowhere else: it is not shown again."""
    expires_at = None
    if body.expires_at is not None:
        at = body.expires_at if body.expires_at.tzinfo is not None else body.expires_at.replace(tzinfo=UTC)
        expires_at = at.timestamp()
        if expires_at <= here.state.db.now():
            raise bad_fields([FieldFault("expires_at", "it has passed")])
    return _answer_secret(here, lambda: _keys(here).make(here.workspace.name, body.scopes, body.name, expires_at))


@router.post(
    "/v1/keys/{key}/rotate",
    status_code=201,
    response_model=MadeKeyShape,
    openapi_extra=needs("admin"),
    summary="Replace a key",
)
def rotate_key(here: CurrentCall, key: str, body: RotationBody) -> Response:
    """Make a key like another one, which ends now or after `overlap_s` seconds."""
    tenant = here.workspace.name
    return _answer_secret(here, lambda: _keys(here).rotate(key, tenant=tenant, overlap_s=body.overlap_s))


def _answer_secret(here: RouteCall, make: Callable[[], tuple[Key, str]]) -> Response:
    """Answer with a new key and its secret. A repeated request is not shown the secret again."""

    def reply(call: Any) -> CreatedReply:
        key, secret = make()
        body = {**key.to_json(), "secret": secret}
        return CreatedReply(body, 201, kept={**body, "secret": None})

    def show(subject: str) -> CreatedReply:
        raise RequestRefused(
            "the key was made, and its secret is shown only once",
            "`GET /v1/keys` lists it: end it, and make another",
            code="secret-lost",
            status=409,
        )

    return answer_once(here, reply, show)


def _keys(here: RouteCall) -> Keys:
    return Keys(here.state.db, here.workspace.actor)


@router.get("/v1/keys", response_model=ListShape[KeyShape], openapi_extra=needs("admin"))
def list_keys(here: CurrentCall) -> Any:
    """List the keys, newest first, without their secrets."""
    return {"items": [key.to_json() for key in here.state.keys.list(here.workspace.name)], "next_cursor": None}


@router.delete("/v1/keys/{key}", response_model=KeyShape, openapi_extra=needs("admin"), summary="End a key")
def revoke_key(here: CurrentCall, key: str) -> Any:
    """End a key at once, and the sessions that began with it."""
    return _keys(here).revoke(key, tenant=here.workspace.name).to_json()


@router.get("/v1/operator", openapi_extra=needs("operator"), summary="The whole service")
async def get_operator(here: CurrentCall) -> dict[str, Any]:
    """Return the tenants with what they use, the queue of jobs, the engine's load and slots, and the processes."""
    return await describe_operator(here.state)


async def describe_operator(state: AppState) -> dict[str, Any]:
    """Return the state of the whole service, for its operator."""
    try:
        found = await state.engine.stats()
        stats: dict[str, Any] = msgspec.structs.asdict(found)
        stats.pop("id")
        stats["per_tenant"] = {name: msgspec.structs.asdict(load) for name, load in found.per_tenant.items()}
    except EngineRefused as error:
        stats = {"problem": error.to_json()}
    about = await asyncio.to_thread(_describe_database, state)
    about |= {"engine": stats, "processes": read_status(state.settings)}
    return about if state.settings.cluster is None else {**about, "cluster": read_fleet(state.settings)}


def _describe_database(state: AppState) -> dict[str, Any]:
    tenants = []
    for tenant in Tenants(state.db).list():
        about = tenant.to_json()
        if not tenant.is_removing:
            try:
                about["used"] = Workspace(state.db, tenant.name).limits().to_json()["used"]
            except InlayError:  # it was removed just now
                continue
        tenants.append(about)
    return {"tenants": tenants, "jobs": asdict(JobQueue(state.db).stats())}
