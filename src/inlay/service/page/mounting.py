"""The routes of the page, and what happens around every handler: who asks, whether they may, and errors as pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from inlay.errors import InlayError
from inlay.service.logs import log_failure
from inlay.service.page import (
    account_screen,
    compare_screen,
    job_screens,
    label_screen,
    new_task_screens,
    operator_screen,
    sign_in,
    task_screens,
    try_screen,
    version_screens,
)
from inlay.service.page.desk import Desk, Viewer
from inlay.service.page.explaining import Explained, explain
from inlay.service.page.forms import read_form
from inlay.service.page.rendering import STATIC
from inlay.service.page.screens import PageCall, answer_html
from inlay.service.state import Sessions
from inlay.service.web.app_state import AppState
from inlay.service.web.identity import identify
from inlay.service.web.visits import ClientGone, find_visit

_YEAR_S = 365 * 24 * 3600
_API = ("/v1/", "/hf/", "/static/")


@dataclass(frozen=True)
class Screen:
    """A route of the page. `scope` is what the key must be allowed to do."""

    method: str
    path: str
    handler: Callable[[PageCall], Response] | Callable[[PageCall], Awaitable[Response]]
    scope: str
    reads_form: bool = True


SCREENS = (
    Screen("GET", "/", task_screens.show_tasks, "predict"),
    Screen("GET", "/new", new_task_screens.show_upload, "train"),
    Screen("POST", "/new", new_task_screens.take_upload, "train", reads_form=False),
    Screen("POST", "/new/example", new_task_screens.take_example, "train"),
    Screen("GET", "/new/{dataset}", new_task_screens.show_dataset, "train"),
    Screen("POST", "/new/{dataset}", new_task_screens.train_dataset, "train"),
    Screen("POST", "/new/{dataset}/reading", new_task_screens.read_dataset, "train"),
    Screen("GET", "/jobs", job_screens.show_jobs, "predict"),
    Screen("GET", "/jobs/{job}", job_screens.show_job, "predict"),
    Screen("POST", "/jobs/{job}/cancel", job_screens.cancel_job, "train"),
    Screen("GET", "/tasks/{task}", task_screens.show_task, "predict"),
    Screen("GET", "/tasks/{task}/versions/{version:int}", version_screens.show_version, "predict"),
    Screen("POST", "/tasks/{task}/versions/{version:int}/words", version_screens.show_words, "predict"),
    Screen("GET", "/tasks/{task}/try", try_screen.show_try, "predict"),
    Screen("POST", "/tasks/{task}/try", try_screen.ask_versions, "predict"),
    Screen("GET", "/tasks/{task}/label", label_screen.show_label, "predict"),
    Screen("POST", "/tasks/{task}/label", label_screen.save_label, "train"),
    Screen("POST", "/tasks/{task}/label/own", label_screen.show_own, "predict"),
    Screen("POST", "/tasks/{task}/train-again", label_screen.train_again, "train"),
    Screen("GET", "/tasks/{task}/compare", compare_screen.show_compare, "predict"),
    Screen("POST", "/tasks/{task}/live", compare_screen.move_live, "train"),
    Screen("GET", "/tasks/{task}/settings", task_screens.show_settings, "predict"),
    Screen("POST", "/tasks/{task}/settings", task_screens.save_settings, "train"),
    Screen("POST", "/tasks/{task}/delete", task_screens.delete_task, "admin"),
    Screen("GET", "/account", account_screen.show_account, "predict"),
    Screen("POST", "/account/keys", account_screen.make_key, "admin"),
    Screen("POST", "/account/keys/{key}/revoke", account_screen.revoke_key, "admin"),
    Screen("GET", "/operator", operator_screen.show_operator, "operator"),
    Screen("POST", "/operator/tenants", operator_screen.add_tenant, "operator"),
    Screen("GET", "/operator/tenants/{tenant}", operator_screen.show_tenant, "operator"),
    Screen("POST", "/operator/tenants/{tenant}/limits", operator_screen.save_limits, "operator"),
    Screen("POST", "/operator/tenants/{tenant}/keys", operator_screen.make_tenant_key, "operator"),
    Screen("POST", "/operator/tenants/{tenant}/keys/{key}/revoke", operator_screen.revoke_tenant_key, "operator"),
)


def mount(app: Starlette, state: AppState) -> None:
    """Add the page to the web app, and have the API take the sessions that it begins."""
    state.find_session = Sessions(state.db).find
    routes = app.router.routes
    routes += [_route(screen, state) for screen in SCREENS]
    routes += [
        _plain_route("GET", "/sign-in", sign_in.show_sign_in, state),
        _plain_route("POST", "/sign-in", sign_in.sign_in, state),
        _plain_route("POST", "/sign-out", sign_in.sign_out, state),
        Mount("/static", _KeptFiles(directory=STATIC), name="static"),
    ]
    app.router.default = _Nowhere(app.router.default, state)


def _route(screen: Screen, state: AppState) -> Route:
    async def answer(request: Request) -> Response:
        find_visit(request.scope).route = screen.path
        return await _guarded(request, state, lambda: _visit(screen, state, request))

    return Route(screen.path, answer, methods=[screen.method], include_in_schema=False)


def _plain_route(method: str, path: str, handler: Callable[..., Any], state: AppState) -> Route:
    """Make a route of a page that needs no session."""

    async def answer(request: Request) -> Response:
        find_visit(request.scope).route = path
        return await _guarded(request, state, lambda: _call(handler, request, state))

    return Route(path, answer, methods=[method], include_in_schema=False)


async def _visit(screen: Screen, state: AppState, request: Request) -> Response:
    """Let a handler answer somebody who may be there."""
    try:
        identity = identify(state, request.scope)
    except InlayError as error:
        if error.code == "unauthorized":
            return sign_in.ask_to_sign_in(request)
        raise
    identity.require(screen.scope)
    form = FormData()
    if screen.method == "POST" and screen.reads_form:
        form = await read_form(request)
    response: Response = await _call(screen.handler, PageCall(request, Desk(state, identity, request), form))
    return response


async def _call(handler: Callable[..., Any], *arguments: Any) -> Any:
    """Call a handler: one that waits for nothing but the database in a thread, so that others are not held up."""
    if iscoroutinefunction(handler):
        return await handler(*arguments)
    return await run_in_threadpool(handler, *arguments)


async def _guarded(request: Request, state: AppState, answer: Callable[[], Awaitable[Response]]) -> Response:
    """Turn what a handler raises into a page that says what to do."""
    try:
        return await answer()
    except ClientGone:
        raise
    except InlayError as error:
        return _show_fault(request, explain(error), _find_viewer(request, state))
    except Exception:
        log_failure("a page failed unforeseen", {"request": find_visit(request.scope).request_id})
        words = ("the service failed in a way nobody foresaw", "try again; the reason is in the log of the service")
        return _show_fault(request, Explained(*words, 500, "unforeseen"))


_HEADINGS = {401: "Sign in first", 403: "Not allowed", 404: "Not found", 413: "Too large", 429: "Too much at once"}


def _find_viewer(request: Request, state: AppState) -> Viewer | None:
    try:
        return Desk(state, identify(state, request.scope), request).viewer
    except InlayError:
        return None


def _show_fault(request: Request, error: Explained, viewer: Viewer | None = None) -> Response:
    heading = _HEADINGS.get(error.status, "That did not work")
    visit = find_visit(request.scope)
    visit.code = error.code
    request_id = visit.request_id if error.status >= 500 else None
    shown = {"heading": heading, "error": error, "request_id": request_id, "viewer": viewer}
    response = answer_html("fault.html", shown, error.status)
    if request.headers.get("hx-request") == "true":  # a part of a page was asked for: show this as the whole of it
        response.headers.update({"HX-Retarget": "#main", "HX-Reselect": "#main > *", "HX-Reswap": "innerHTML"})
    return response


class _Nowhere:
    """Answers addresses that do not exist: a browser gets a page, everybody else the API's own answer."""

    def __init__(self, others: ASGIApp, state: AppState) -> None:
        self._others, self._state = others, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        is_page = request.method == "GET" and "text/html" in request.headers.get("accept", "")
        if not is_page or scope["path"].startswith(_API):
            await self._others(scope, receive, send)
            return
        error = Explained("there is no page at this address", "it may be mistyped", 404, "no-route")
        await _show_fault(request, error, _find_viewer(request, self._state))(scope, receive, send)


class _KeptFiles(StaticFiles):
    """Static files, which a browser keeps for good if their address names their content."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        find_visit(scope).route = "/static"
        await super().__call__(scope, receive, send)

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers["Cache-Control"] = f"public, max-age={_YEAR_S}, immutable"
        return response
