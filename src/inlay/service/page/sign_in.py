"""Signing in with a key, and out again. The browser keeps a random token, the database only its digest.

The cookie is HttpOnly and SameSite=Strict, and Secure over HTTPS. A session ends when its key does, after a while, or
when the person signs out.
"""

from __future__ import annotations

from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from inlay.errors import InlayError
from inlay.service.page.explaining import explain
from inlay.service.page.page_call import SAID, answer_html, read_form
from inlay.service.state import Keys, Sessions
from inlay.service.web.app_state import AppState
from inlay.service.web.identity import COOKIE, check_origin, read_cookie

SESSION_S = 12 * 3600.0
_LONGEST_KEY = 200


def show_sign_in(request: Request, state: AppState) -> Response:
    """Show the form for a key."""
    said = SAID.get(request.query_params.get("said", ""))
    return answer_html("sign_in.html", {"next": safe_path(request.query_params.get("next", "/")), "said": said})


async def sign_in(request: Request, state: AppState) -> Response:
    """Begin a session for a valid key."""
    check_origin(request.scope, needs_origin=True)
    form = await read_form(request)
    given, path = form.get("key", ""), form.get("next", "/")
    assert isinstance(given, str)
    assert isinstance(path, str)
    try:
        key = Keys(state.db).check(given.strip()[:_LONGEST_KEY])
    except InlayError as error:
        explained = explain(error)
        return answer_html("sign_in.html", {"next": safe_path(path), "error": explained}, explained.status)
    token = Sessions(state.db).begin(key, SESSION_S)
    return with_session(request, token, RedirectResponse(safe_path(path), 303, {"Cache-Control": "no-store"}))


def sign_out(request: Request, state: AppState) -> Response:
    """End the session of this browser."""
    check_origin(request.scope, needs_origin=True)
    token = read_cookie(request.scope)
    if token is not None:
        Sessions(state.db).end(token)
    response = RedirectResponse("/sign-in?said=signed-out", 303, {"Cache-Control": "no-store"})
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return response


def with_session(request: Request, token: str, response: Response) -> Response:
    """Add the cookie with a session's token to a response."""
    is_secure = request.url.scheme == "https"
    response.set_cookie(
        COOKIE, token, max_age=int(SESSION_S), path="/", secure=is_secure, httponly=True, samesite="strict"
    )
    return response


def ask_to_sign_in(request: Request) -> Response:
    """Redirect to the form for a key, and from there back to the page that was asked for."""
    if request.headers.get("hx-request") == "true":  # a part of a page is updated: the whole page goes there
        return Response(status_code=200, headers={"HX-Redirect": "/sign-in", "Cache-Control": "no-store"})
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    wanted = path if request.method == "GET" and path != "/" else ""
    return RedirectResponse("/sign-in" + (f"?{urlencode({'next': wanted})}" if wanted else ""), 303)


def safe_path(path: str) -> str:
    """Return a path of this service to redirect to, or `/` for a path that a browser might take for another site."""
    is_own = path.startswith("/") and not path.startswith(("//", "/\\")) and "\\" not in path
    return path if is_own and path.isprintable() else "/"
