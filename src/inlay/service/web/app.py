"""The web app: the border, then the routes that answer rows, then the control routes and the pages.

The routes that answer rows ("hot" routes) have no framework between them and the socket, to save processor time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from inlay.errors import InlayError
from inlay.service.engine import Answering
from inlay.service.settings import ServeSettings
from inlay.service.state import Database
from inlay.service.web import account_routes, dataset_routes, health_routes, job_routes, reference_page, task_routes
from inlay.service.web.app_state import AppState
from inlay.service.web.border import Border
from inlay.service.web.compatible_routes import answer_hf, answer_vllm
from inlay.service.web.guard import respond_error
from inlay.service.web.identity import identify, make_host_check
from inlay.service.web.openapi import make_openapi
from inlay.service.web.predict_route import predict
from inlay.service.web.problems import wrong_method
from inlay.service.web.request_context import check_is_json, find_context, read_body

Handler = Callable[..., Awaitable[bytes]]
_ROUTERS = (dataset_routes, job_routes, task_routes, account_routes, health_routes, reference_page)
_HOT: dict[str, Handler] = {"/v1/predict": predict, "/classify": answer_vllm}
_HF = "/hf/"


def make_app(settings: ServeSettings, db: Database, engine: Answering) -> WebApp:
    """Return the app of one web process."""
    return WebApp(AppState(settings, db, engine))


class WebApp:
    """The ASGI app, with what its routes share at `state`."""

    def __init__(self, state: AppState) -> None:
        self.state = state
        self.routes = make_control_app(state)
        settings = state.settings
        allows_host = make_host_check(settings)
        self._app = Border(self._route, allows_host, state.counters, state.secrets, settings.max_body)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        await self._app(scope, receive, send)

    async def _route(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a hot route; hand everything else to the control routes."""
        handler: Handler | None = None
        if scope["type"] == "http":
            route = scope["path"]
            handler = _HOT.get(route)
            if handler is None and route.startswith(_HF):
                task = route[len(_HF) :]
                if task and "/" not in task:
                    handler, route = partial(answer_hf, task=task), "/hf/{task}"
        if handler is None:
            await self.routes(scope, receive, send)
            return
        context = find_context(scope)
        context.route = route
        if scope["method"] != "POST":
            raise wrong_method("POST")
        identity = identify(self.state, scope)
        identity.require("predict")
        check_is_json(scope)
        body = await read_body(scope, receive)
        content = await handler(self.state, identity, body, receive, context)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def make_control_app(state: AppState) -> FastAPI:
    """Return the app of all routes but the hot ones."""

    @asynccontextmanager
    async def live(app: FastAPI) -> AsyncIterator[None]:
        yield
        await state.engine.close()

    app = FastAPI(
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        lifespan=live,
    )
    app.state.inlay = state
    for kind in (InlayError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, respond_error)
    for routes in _ROUTERS:
        app.include_router(routes.router)
    app.openapi = lambda: make_openapi(app)  # type: ignore[method-assign]
    from inlay.service.page import mount  # it imports files of this folder

    mount(app, state)
    return app
