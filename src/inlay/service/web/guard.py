"""Control routes: who calls is known and allowed, and the body is whole and JSON, before a route sees anything.

A route says in `openapi_extra` which scope it needs (`needs("train")`); without one any key will do. A POST that makes
something goes through `answer_once`, so that a request which is sent again makes nothing again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from inlay.errors import InlayError
from inlay.service.state import Call, StoredAnswer, Workspace
from inlay.service.web.app_state import AppState
from inlay.service.web.hot_routes import only_methods
from inlay.service.web.identity import Identity, identify
from inlay.service.web.json_bodies import check_is_json, read_json
from inlay.service.web.problems import (
    MEDIA_TYPE,
    FieldFault,
    RequestRefused,
    bad_fields,
    make_problem,
    unforeseen,
)
from inlay.service.web.shapes import ProblemShape
from inlay.service.web.visits import ClientGone, Visit, find_header, find_visit, read_body

SCOPE = "x-scope"
OPEN = "none"
"""the scope of routes that need no key"""
_any_json = msgspec.json.Decoder(Any)
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": words, "content": {MEDIA_TYPE: {}}, "model": ProblemShape}
    for status, words in (("4XX", "The request cannot be carried out."), ("5XX", "The service cannot carry it out."))
}


@dataclass(frozen=True)
class Here:
    """The things a control route works with: the service, who calls, and the request."""

    state: AppState
    identity: Identity
    visit: Visit
    body: bytes = b""
    target: str = ""
    """method, path and query"""
    idempotency_key: str | None = None

    @property
    def workspace(self) -> Workspace:
        """The caller's workspace."""
        return self.identity.workspace


def needs(scope: str) -> dict[str, Any]:
    """Return what a route says to need a scope."""
    return {SCOPE: scope}


class GuardedRoute(APIRoute):
    """A control route."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the route's function, with what goes before it."""
        handler = super().get_route_handler()
        scope_name = (self.openapi_extra or {}).get(SCOPE)

        async def answer(request: Request) -> Response:
            visit = find_visit(request.scope)
            visit.route = self.path_format
            if scope_name == OPEN:
                return await handler(request)
            state: AppState = request.app.state.inlay
            identity = identify(state, request.scope)
            if scope_name is not None:
                identity.require(scope_name)
            self._check_query(request)
            body = b""
            if self.body_field is not None:
                check_is_json(request.scope)
                body = await read_body(request.scope, request.receive)
                read_json(body, _any_json)
                request = Request(request.scope, _replay(body, request.receive))
            request.state.here = Here(
                state, identity, visit, body, _find_target(request.scope), request.headers.get("idempotency-key")
            )
            return await handler(request)

        return answer

    def _check_query(self, request: Request) -> None:
        known = {item.alias for item in self.dependant.query_params}
        faults = [FieldFault(name[:100], "no such parameter") for name in request.query_params if name not in known]
        if faults:
            raise bad_fields(faults)


def _replay(body: bytes, receive: Any) -> Any:
    """Return a `receive` that gives a body that was read already, and then what comes."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def hear() -> Any:
        return messages.pop() if messages else await receive()

    return hear


def _find_target(scope: Any) -> str:
    return f"{scope['method']} {scope['path']}?{scope['query_string'].decode('latin-1')}"


def make_router(tag: str) -> APIRouter:
    """Return a router for routes of one kind of thing."""
    return APIRouter(route_class=GuardedRoute, tags=[tag], responses=_PROBLEMS, redirect_slashes=False)


async def find_here(request: Request) -> Here:
    """Return what the guard found."""
    here = request.state.here
    assert isinstance(here, Here)
    return here


CurrentHere = Annotated[Here, Depends(find_here)]


# Requests that make something


@dataclass(frozen=True)
class MadeReply:
    """The thing that a POST made, as it is answered."""

    body: Mapping[str, Any]
    status: int = 201
    headers: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, Any] | None = None
    """what a repeated request is answered, where it is less: a secret is shown once"""


def answer_once(
    here: Here, make: Callable[[Call | None], MadeReply], show: Callable[[str], MadeReply], *, content: str = ""
) -> Response:
    """Return the answer of `make`; that of the first request if this one was sent again with its key.

    `show` answers from what was made (its id), where the first answer was lost. `content` stands for a body that was
    not kept.
    """
    key = here.idempotency_key
    if key is None:
        return _respond(make(None))
    workspace = here.workspace
    digest = hashlib.sha256(f"{here.target}\n{content}\n".encode() + here.body).hexdigest()
    found = workspace.begin_call(key, digest)
    if isinstance(found, StoredAnswer):
        return _respond_again(found, show)
    try:
        reply = make(found)
    except BaseException:
        workspace.abandon_call(found)
        raise
    kept = reply.body if reply.kept is None else reply.kept
    workspace.finish_call(found, reply.status, reply.headers, msgspec.json.encode(kept))
    return _respond(reply)


def _respond(reply: MadeReply) -> Response:
    content = msgspec.json.encode(reply.body)
    return Response(content, reply.status, dict(reply.headers), "application/json")


def _respond_again(stored: StoredAnswer, show: Callable[[str], MadeReply]) -> Response:
    if stored.status is None or stored.body is None:
        response = _respond(show(stored.subject or ""))
    else:
        response = Response(stored.body, stored.status, dict(stored.headers), "application/json")
    response.headers["idempotent-replayed"] = "true"
    return response


# Errors


async def respond_error(request: Request, error: Exception) -> Response:
    """Return the problem that an error of a route is."""
    visit = find_visit(request.scope)
    if isinstance(error, ClientGone):
        raise error
    if isinstance(error, RequestValidationError):
        error = bad_fields([_find_fault(item) for item in error.errors()])
    elif isinstance(error, HTTPException):
        error = _as_refusal(error)
    elif not isinstance(error, InlayError):
        error = unforeseen()
    problem = make_problem(error, visit.request_id, request.app.state.inlay.secrets.of_tenant(visit.tenant))
    visit.code = problem.body["code"]
    return Response(problem.encode(), problem.status, problem.headers, MEDIA_TYPE)


def _as_refusal(error: HTTPException) -> InlayError:
    if error.status_code == 405:
        return only_methods((error.headers or {}).get("Allow", "another one"))
    if error.status_code == 404:
        return RequestRefused("there is no such route", "`/docs` lists the routes", code="no-route", status=404)
    words = str(error.detail)[:200].lower() or "the request cannot be taken"
    return RequestRefused(
        words, "`/docs` describes what each route takes", code="bad-request", status=error.status_code
    )


# pydantic's words -> ours, where ours are plainer.
_WORDS = {
    "extra_forbidden": "no such field",
    "missing": "it is missing",
    "json_invalid": "it is not JSON",
}


def _find_fault(item: Mapping[str, Any]) -> FieldFault:
    """Return which field an error of pydantic's is about, and what is wrong with it; never its value."""
    place, *path = item["loc"]
    name = ""
    for step in path:
        name += f"[{step}]" if isinstance(step, int) else f".{step}"
    words = _WORDS.get(item["type"]) or str(item["msg"]).removeprefix("Value error, ")
    return FieldFault(name.lstrip(".")[:200] or str(place), words[:1].lower() + words[1:300])


def read_if_match(request: Request) -> int | None:
    """Return the counter in `If-Match`; None without the header. One that is no ETag of ours matches nothing."""
    given = find_header(request.scope, b"if-match")
    if given is None or given.strip() == b"*":
        return None
    number = given.strip().removeprefix(b"W/").strip(b'"')
    return int(number) if number.isdigit() and len(number) < 19 else -1
