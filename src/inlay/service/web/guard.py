"""Control routes: before a route's function runs, its caller is identified and its body was read as JSON.

A route says in `openapi_extra` which scope it needs (`needs("train")`); without one any key is accepted. A POST that
makes something goes through `answer_once`: sent again with the same key, it makes nothing again.
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
from inlay.service.web.identity import Identity, identify
from inlay.service.web.problems import (
    MEDIA_TYPE,
    FieldFault,
    RequestRefused,
    bad_fields,
    make_problem,
    unforeseen,
    wrong_method,
)
from inlay.service.web.request_context import (
    ClientGone,
    RequestContext,
    check_is_json,
    find_context,
    find_header,
    read_body,
    read_json,
)
from inlay.service.web.shapes import ProblemShape

SCOPE = "x-scope"
OPEN = "none"
"""the scope of routes that need no key"""
_any_json = msgspec.json.Decoder(Any)
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": words, "content": {MEDIA_TYPE: {}}, "model": ProblemShape}
    for status, words in (("4XX", "The request cannot be carried out."), ("5XX", "The service cannot carry it out."))
}


@dataclass(frozen=True)
class RouteCall:
    """What the functions of control routes work with: the service, the caller, and the request."""

    state: AppState
    identity: Identity
    context: RequestContext
    body: bytes = b""
    target: str = ""
    """method, path and query"""
    idempotency_key: str | None = None

    @property
    def workspace(self) -> Workspace:
        """The caller's workspace."""
        return self.identity.workspace


def needs(scope: str) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that needs this scope."""
    return {SCOPE: scope}


class GuardedRoute(APIRoute):
    """A control route: it checks the caller, the query and the body before its function runs."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the route's function, with the checks before it."""
        handler = super().get_route_handler()
        scope_name = (self.openapi_extra or {}).get(SCOPE)

        async def answer(request: Request) -> Response:
            context = find_context(request.scope)
            context.route = self.path_format
            if scope_name == OPEN:
                return await handler(request)
            state: AppState = request.app.state.inlay
            identity = identify(state, request.scope)
            if scope_name is not None:
                identity.require(scope_name)
            known = {item.alias for item in self.dependant.query_params}
            unknown = [name for name in request.query_params if name not in known]
            if unknown:
                raise bad_fields([FieldFault(name[:100], "no such parameter") for name in unknown])
            body = b""
            if self.body_field is not None:
                check_is_json(request.scope)
                body = await read_body(request.scope, request.receive)
                read_json(body, _any_json)
                request = Request(request.scope, _replay(body, request.receive))
            target = f"{request.method} {request.scope['path']}?{request.scope['query_string'].decode('latin-1')}"
            request.state.here = RouteCall(
                state, identity, context, body, target, request.headers.get("idempotency-key")
            )
            return await handler(request)

        return answer


def _replay(body: bytes, receive: Any) -> Any:
    """Return a `receive` that gives a body that was already read, and then what comes next."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def hear() -> Any:
        return messages.pop() if messages else await receive()

    return hear


def make_router(tag: str) -> APIRouter:
    """Return a router for the routes under one tag of the reference."""
    return APIRouter(route_class=GuardedRoute, tags=[tag], responses=_PROBLEMS, redirect_slashes=False)


async def find_call(request: Request) -> RouteCall:
    """Return what the guarded route found (FastAPI calls it for `CurrentCall`)."""
    here = request.state.here
    assert isinstance(here, RouteCall)
    return here


CurrentCall = Annotated[RouteCall, Depends(find_call)]


# Requests that make something


@dataclass(frozen=True)
class CreatedReply:
    """The answer to a POST that made something."""

    body: Mapping[str, Any]
    status: int = 201
    headers: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, Any] | None = None
    """the answer to a repeated request, if it differs: a secret is shown once"""


def answer_once(
    here: RouteCall,
    make: Callable[[Call | None], CreatedReply],
    show: Callable[[str], CreatedReply],
    *,
    content: str = "",
) -> Response:
    """Return the answer of `make`, or the first answer again if the request repeats one with its `Idempotency-Key`.

    If the first answer was lost, `show` answers from the id of what was made. `content` identifies a body that is not
    at `here.body`.
    """
    key = here.idempotency_key
    if key is None:
        return _respond(make(None))
    workspace = here.workspace
    digest = hashlib.sha256(f"{here.target}\n{content}\n".encode() + here.body).hexdigest()
    found = workspace.begin_call(key, digest)
    if isinstance(found, StoredAnswer):
        if found.status is None or found.body is None:
            response = _respond(show(found.subject or ""))
        else:
            response = Response(found.body, found.status, dict(found.headers), "application/json")
        response.headers["idempotent-replayed"] = "true"
        return response
    try:
        reply = make(found)
    except BaseException:
        workspace.abandon_call(found)
        raise
    kept = reply.body if reply.kept is None else reply.kept
    workspace.finish_call(found, reply.status, reply.headers, msgspec.json.encode(kept))
    return _respond(reply)


def _respond(reply: CreatedReply) -> Response:
    content = msgspec.json.encode(reply.body)
    return Response(content, reply.status, dict(reply.headers), "application/json")


# Errors


async def respond_error(request: Request, error: Exception) -> Response:
    """Return the problem document for an error of a route."""
    context = find_context(request.scope)
    if isinstance(error, ClientGone):
        raise error
    if isinstance(error, RequestValidationError):
        error = bad_fields([_find_fault(item) for item in error.errors()])
    elif isinstance(error, HTTPException):
        error = _as_refusal(error)
    elif not isinstance(error, InlayError):
        error = unforeseen()
    problem = make_problem(error, context.request_id, request.app.state.inlay.secrets.of_tenant(context.tenant))
    context.code = problem.body["code"]
    return Response(problem.encode(), problem.status, problem.headers, MEDIA_TYPE)


def _as_refusal(error: HTTPException) -> InlayError:
    if error.status_code == 405:
        return wrong_method((error.headers or {}).get("Allow", "another one"))
    if error.status_code == 404:
        return RequestRefused("there is no such route", "`/docs` lists the routes", code="no-route", status=404)
    words = str(error.detail)[:200].lower() or "the request cannot be taken"
    return RequestRefused(
        words, "`/docs` describes what each route takes", code="bad-request", status=error.status_code
    )


# Codes of pydantic -> our plainer words.
_WORDS = {
    "extra_forbidden": "no such field",
    "missing": "it is missing",
    "json_invalid": "it is not JSON",
}


def _find_fault(item: Mapping[str, Any]) -> FieldFault:
    """Return an error of pydantic as a field and what is wrong with it; never its value."""
    place, *path = item["loc"]
    name = ""
    for step in path:
        name += f"[{step}]" if isinstance(step, int) else f".{step}"
    words = _WORDS.get(item["type"]) or str(item["msg"]).removeprefix("Value error, ")
    return FieldFault(name.lstrip(".")[:200] or str(place), words[:1].lower() + words[1:300])


def read_if_match(request: Request) -> int | None:
    """Return the counter in `If-Match`; None without the header, and -1, which matches nothing, if it is no counter."""
    given = find_header(request.scope, b"if-match")
    if given is None or given.strip() == b"*":
        return None
    number = given.strip().removeprefix(b"W/").strip(b'"')
    return int(number) if number.isdigit() and len(number) < 19 else -1
