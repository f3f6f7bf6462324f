"""The routes that answer rows, found before all others and without a framework between them and the socket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from inlay.service.web.app_state import AppState
from inlay.service.web.classify_route import answer_vllm
from inlay.service.web.hf_route import answer_hf
from inlay.service.web.identity import Identity, identify
from inlay.service.web.json_bodies import check_is_json
from inlay.service.web.predicting import predict
from inlay.service.web.problems import RequestRefused
from inlay.service.web.visits import Visit, find_visit, read_body

App = Callable[[Any, Any, Any], Awaitable[None]]
Handler = Callable[[AppState, Identity, bytes, Any, Visit], Awaitable[bytes]]
_HF = "/hf/"
_ROUTES: dict[str, Handler] = {"/v1/predict": predict, "/classify": answer_vllm}


class HotRoutes:
    """Answers the hot routes, and hands every other request to `rest`."""

    def __init__(self, state: AppState, rest: App) -> None:
        self._state = state
        self._rest = rest

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            path = scope["path"]
            handler = _ROUTES.get(path)
            if handler is not None:
                await self._answer(scope, receive, send, handler, path)
                return
            task = path[len(_HF) :]
            if path.startswith(_HF) and task and "/" not in task:

                async def handle(state: AppState, identity: Identity, body: bytes, hear: Any, visit: Visit) -> bytes:
                    return await answer_hf(state, identity, body, hear, visit, task)

                await self._answer(scope, receive, send, handle, "/hf/{task}")
                return
        await self._rest(scope, receive, send)

    async def _answer(self, scope: Any, receive: Any, send: Any, handler: Handler, route: str) -> None:
        visit = find_visit(scope)
        visit.route = route
        if scope["method"] != "POST":
            raise only_methods("POST")
        identity = identify(self._state, scope)
        identity.require("predict")
        check_is_json(scope)
        body = await read_body(scope, receive)
        content = await handler(self._state, identity, body, receive, visit)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def only_methods(allowed: str) -> RequestRefused:
    """Return the refusal of a method that a route does not have."""
    return RequestRefused(
        "the route does not take this method",
        f"use {allowed.replace(',', ' or')}; `/docs` lists the routes",
        code="wrong-method",
        status=405,
    ).with_headers({"allow": allowed})
