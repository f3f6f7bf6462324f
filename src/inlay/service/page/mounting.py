"""The routes of the pages, and what happens around every handler: identity, rights, and errors as pages."""

from __future__ import annotations

from collections.abc import Callable
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
    account_screens,
    answer_screens,
    job_screens,
    new_task_screens,
    sign_in,
    task_screens,
    version_screens,
)
from inlay.service.page.explaining import ExplainedError, explain
from inlay.service.page.page_call import PageCall, answer_html, describe_viewer, read_form
from inlay.service.page.rendering import STATIC
from inlay.service.state import Sessions
from inlay.service.web.app_state import AppState
from inlay.service.web.identity import identify
from inlay.service.web.request_context import ClientGone, find_context

_YEAR_S = 365 * 24 * 3600
_API = ("/v1/", "/hf/", "/static/")
_HEADINGS = {401: "Sign in first", 403: "Not allowed", 404: "Not found", 413: "Too large", 429: "Too much at once"}


@dataclass(frozen=True)
class Screen:
    """A route of the pages. `scope` is what the key must allow; None for pages without a session.

    A handler takes a `PageCall`; without a session it takes the request and the app's state.
    """

    method: str
    path: str
    handler: Callable[..., Any]
    scope: str | None
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
    Screen("GET", "/tasks/{task}/try", answer_screens.show_try, "predict"),
    Screen("POST", "/tasks/{task}/try", answer_screens.ask_versions, "predict"),
    Screen("GET", "/tasks/{task}/label", answer_screens.show_label, "predict"),
    Screen("POST", "/tasks/{task}/label", answer_screens.save_label, "train"),
    Screen("POST", "/tasks/{task}/label/own", answer_screens.show_own, "predict"),
    Screen("POST", "/tasks/{task}/train-again", answer_screens.train_again, "train"),
    Screen("GET", "/tasks/{task}/compare", version_screens.show_compare, "predict"),
    Screen("POST", "/tasks/{task}/live", version_screens.move_live, "train"),
    Screen("GET", "/tasks/{task}/settings", task_screens.show_settings, "predict"),
    Screen("POST", "/tasks/{task}/settings", task_screens.save_settings, "train"),
    Screen("POST", "/tasks/{task}/delete", task_screens.delete_task, "admin"),
    Screen("GET", "/account", account_screens.show_account, "predict"),
    Screen("POST", "/account/keys", account_screens.make_key, "admin"),
    Screen("POST", "/account/keys/{key}/revoke", account_screens.revoke_key, "admin"),
    Screen("GET", "/operator", account_screens.show_operator, "operator"),
    Screen("POST", "/operator/tenants", account_screens.add_tenant, "operator"),
    Screen("GET", "/operator/tenants/{tenant}", account_screens.show_tenant, "operator"),
    Screen("POST", "/operator/tenants/{tenant}/limits", account_screens.save_limits, "operator"),
    Screen("POST", "/operator/tenants/{tenant}/keys", account_screens.make_tenant_key, "operator"),
    Screen("POST", "/operator/tenants/{tenant}/keys/{key}/revoke", account_screens.revoke_tenant_key, "operator"),
    Screen("GET", "/sign-in", sign_in.show_sign_in, None),
    Screen("POST", "/sign-in", sign_in.sign_in, None),
    Screen("POST", "/sign-out", sign_in.sign_out, None),
)


def mount(app: Starlette, state: AppState) -> None:
    """Add the pages to the web app, and let the API accept the sessions of browsers."""
    state.find_session = Sessions(state.db).find
    app.router.routes += [_make_route(screen, state) for screen in SCREENS]
    app.router.routes.append(Mount("/static", _StaticFiles(directory=STATIC), name="static"))
    app.router.default = _NotFound(app.router.default, state)


def _make_route(screen: Screen, state: AppState) -> Route:
    async def answer(request: Request) -> Response:
        context = find_context(request.scope)
        context.route = screen.path
        try:
            return await _answer(screen, state, request)
        except ClientGone:
            raise
        except InlayError as error:
            return _show_fault(request, explain(error), _find_viewer(request, state))
        except Exception:
            log_failure("a page failed unexpectedly", {"request": context.request_id})
            words = ("the service failed unexpectedly", "try again; the reason is in the log of the service")
            return _show_fault(request, ExplainedError(*words, 500, "unforeseen"))

    return Route(screen.path, answer, methods=[screen.method], include_in_schema=False)


async def _answer(screen: Screen, state: AppState, request: Request) -> Response:
    """Call a screen's handler for somebody who may see it."""
    if screen.scope is None:
        return await _call(screen.handler, request, state)
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
    return await _call(screen.handler, PageCall(request, state, identity, form))


async def _call(handler: Callable[..., Any], *arguments: Any) -> Response:
    """Call a handler; one without `async` reads the database, and runs in a thread so that others do not wait."""
    answering = handler(*arguments) if iscoroutinefunction(handler) else run_in_threadpool(handler, *arguments)
    response: Response = await answering
    return response


def _find_viewer(request: Request, state: AppState) -> dict[str, Any] | None:
    try:
        return describe_viewer(identify(state, request.scope))
    except InlayError:
        return None


def _show_fault(request: Request, error: ExplainedError, viewer: dict[str, Any] | None = None) -> Response:
    heading = _HEADINGS.get(error.status, "That did not work")
    context = find_context(request.scope)
    context.code = error.code
    request_id = context.request_id if error.status >= 500 else None
    shown = {"heading": heading, "error": error, "request_id": request_id, "viewer": viewer}
    response = answer_html("fault.html", shown, error.status)
    if request.headers.get("hx-request") == "true":  # a part of a page was asked for: show this as the whole page
        response.headers.update({"HX-Retarget": "#main", "HX-Reselect": "#main > *", "HX-Reswap": "innerHTML"})
    return response


class _NotFound:
    """Answers unknown addresses: a browser gets a page, everybody else the API's own answer."""

    def __init__(self, others: ASGIApp, state: AppState) -> None:
        self._others, self._state = others, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        is_page = request.method == "GET" and "text/html" in request.headers.get("accept", "")
        if not is_page or scope["path"].startswith(_API):
            await self._others(scope, receive, send)
            return
        error = ExplainedError("there is no page at this address", "it may be mistyped", 404, "no-route")
        await _show_fault(request, error, _find_viewer(request, self._state))(scope, receive, send)


class _StaticFiles(StaticFiles):
    """Static files, which browsers may keep for good: their addresses change with their content."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        find_context(scope).route = "/static"
        await super().__call__(scope, receive, send)

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers["Cache-Control"] = f"public, max-age={_YEAR_S}, immutable"
        return response
