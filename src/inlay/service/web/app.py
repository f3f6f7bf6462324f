"""The web app: the border around the hot routes, the control routes and the pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from inlay.errors import InlayError
from inlay.service.engine import Answering
from inlay.service.settings import ServeSettings
from inlay.service.state import Database
from inlay.service.web import account_routes, dataset_routes, health_routes, job_routes, reference_page, task_routes
from inlay.service.web.app_state import AppState
from inlay.service.web.border import Border
from inlay.service.web.guard import respond_error
from inlay.service.web.hosts import make_host_check
from inlay.service.web.hot_routes import HotRoutes
from inlay.service.web.openapi import make_openapi

App = Callable[[Any, Any, Any], Awaitable[None]]
ROUTERS = (dataset_routes, job_routes, task_routes, account_routes, health_routes, reference_page)


def make_app(settings: ServeSettings, db: Database, engine: Answering) -> WebApp:
    """Return the app of one web process."""
    return WebApp(AppState(settings, db, engine))


class WebApp:
    """The ASGI app, with what its routes share at `state`."""

    def __init__(self, state: AppState) -> None:
        self.state = state
        self.routes = make_control_app(state)
        allows_host = make_host_check(state.settings)
        hot = HotRoutes(state, self.routes)
        self._app: App = Border(hot, allows_host, state.counters, state.secrets, state.settings.max_body)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        await self._app(scope, receive, send)


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
        generate_unique_id_function=_name_operation,
        lifespan=live,
    )
    app.state.inlay = state
    for kind in (InlayError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, respond_error)
    for room in ROUTERS:
        app.include_router(room.router)
    app.openapi = lambda: make_openapi(app)  # type: ignore[method-assign]
    _mount_page(app, state)
    return app


def _mount_page(app: FastAPI, state: AppState) -> None:
    from inlay.service.page import mount

    mount(app, state)


def _name_operation(route: APIRoute) -> str:
    return route.name
