"""The outermost layer of the web app: what every request goes through, whatever its route.

Each request gets an id, is refused if its `Host` is not allowed, is counted, and is logged without its texts. It always
ends in an answer: what a route raises becomes a problem. All answers have the security headers.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from inlay.errors import InlayError
from inlay.service.logs import log_event, log_failure
from inlay.service.web.counters import Counters
from inlay.service.web.problems import MEDIA_TYPE, Problem, RequestRefused, Secrets, make_problem, unforeseen
from inlay.service.web.request_context import BodyBudget, ClientGone, RequestContext, find_header, make_request_id

App = Callable[[Any, Any, Any], Awaitable[None]]
_QUIET_ROUTES = {"/healthz", "/readyz", "/metrics", "/static"}
"""requested often and by programs: logged only if they fail"""
_NOTHING_NEW = 204
"""the answer to a page that polls a job each second when nothing has changed"""
_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
# Headers that a route may set itself, as the page does.
_DEFAULTS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
)


class Border:
    """Wraps the app. `allows_host` tests the header `Host`."""

    def __init__(
        self, app: App, allows_host: Callable[[str], bool], counters: Counters, secrets: Secrets, most_bytes: int
    ) -> None:
        self._app = app
        self._allows_host = allows_host
        self._counters = counters
        self._secrets = secrets
        self._most_bytes = most_bytes
        self._budget = BodyBudget()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or pass on the start and end of the process."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket: closed before it begins
            await send({"type": "websocket.close", "code": 1008})
            return
        request_id = make_request_id(find_header(scope, b"x-request-id"))
        context = RequestContext(request_id, self._most_bytes, budget=self._budget)
        scope.setdefault("state", {})["context"] = context
        answer = _Answer(send, context)
        try:
            host = (find_header(scope, b"host") or b"").decode("latin-1")
            if not self._allows_host(host):
                raise RequestRefused(
                    "this service does not answer to the name in the header `Host`",
                    "the operator allows names by `inlay serve --allow-host NAME`",
                    code="wrong-host",
                    status=400,
                )
            await self._app(scope, receive, answer.send)
        except ClientGone:
            context.status = 499
        except InlayError as error:
            await answer.send_problem(make_problem(error, request_id, self._secrets.of_tenant(context.tenant)))
        except Exception:
            log_failure("a request failed unexpectedly", {"request": request_id, "route": context.route})
            await answer.send_problem(make_problem(unforeseen(), request_id))
        finally:
            self._budget.give_back(context)
        self._record(scope["method"], context)

    def _record(self, method: str, context: RequestContext) -> None:
        seconds = time.monotonic() - context.began_at
        self._counters.add_request(method, context.route, context.status, seconds)
        is_quiet = context.route in _QUIET_ROUTES and context.status < 400
        if is_quiet or (method == "GET" and context.status == _NOTHING_NEW):
            return
        fields: dict[str, object] = {
            "request": context.request_id,
            "tenant": context.tenant,
            "route": f"{method if len(method) < 8 else '?'} {context.route}",
            "status": context.status,
            "ms": round(1000 * seconds, 1),
        }
        if context.num_rows:
            fields["rows"] = context.num_rows
        if context.code:
            fields["code"] = context.code
        log_event("request", fields)


class _Answer:
    """Sends an answer, with the headers that all answers have."""

    def __init__(self, send: Any, context: RequestContext) -> None:
        self._send = send
        self._context = context
        self._has_begun = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_begun = True
            self._context.status = message["status"]
            headers = list(message.get("headers", ()))
            names = {name for name, _ in headers}
            headers += [header for header in _DEFAULTS if header[0] not in names]
            headers += _HEADERS
            headers.append((b"x-request-id", self._context.request_id.encode()))
            message["headers"] = headers
        await self._send(message)

    async def send_problem(self, problem: Problem) -> None:
        """Send a problem, unless an answer has begun: then the client sees it cut off."""
        self._context.code = problem.body["code"]
        if self._has_begun:
            self._context.status = problem.status
            return
        body = problem.encode()
        headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", str(len(body)).encode())]
        headers += [(name.encode(), value.encode("latin-1", "replace")) for name, value in problem.headers.items()]
        await self.send({"type": "http.response.start", "status": problem.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
