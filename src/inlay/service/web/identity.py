"""Who sends a request: the key in its header, a browser's session, or, without any key, the person at this machine."""

from __future__ import annotations

from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any

from inlay.service.state import LOCAL, SCOPES, Forbidden, Key, Tenant, Unauthorized, Workspace
from inlay.service.web.app_state import AppState
from inlay.service.web.hosts import check_origin, is_local_host
from inlay.service.web.problems import RequestRefused
from inlay.service.web.visits import find_header, find_visit

COOKIE = "inlay_session"
_LONGEST_KEY = 200
_ALL_SCOPES = frozenset(SCOPES)


@dataclass(frozen=True)
class Identity:
    """The tenant that sends a request, and what it may do."""

    workspace: Workspace
    scopes: frozenset[str]
    key: Key | None = None
    """None: the person at this machine, without any key"""

    @property
    def tenant(self) -> Tenant:
        """The tenant, with its limits."""
        return self.workspace.tenant

    def require(self, scope: str) -> None:
        """Refuse what needs a scope that the key has not."""
        if scope not in self.scopes:
            raise Forbidden(scope)


def identify(state: AppState, scope: Any, *, takes_session: bool = True) -> Identity:
    """Return who sends a request; refuse one without a valid key where keys are needed."""
    identity = _find_identity(state, scope, takes_session=takes_session)
    find_visit(scope).tenant = identity.workspace.name
    return identity


def _find_identity(state: AppState, scope: Any, *, takes_session: bool) -> Identity:
    given = find_header(scope, b"authorization")
    if given is not None:
        return _of_key(state, state.keys.check(_read_bearer(given)))
    token = read_cookie(scope)
    if token is not None and takes_session:
        key = state.find_session(token)
        if key is not None:
            check_origin(scope, needs_origin=True)
            return _of_key(state, key)
    if state.keys.exist():
        raise _no_key()
    host = (find_header(scope, b"host") or b"").decode("latin-1")
    if not state.settings.is_loopback or not is_local_host(host, state.settings):
        raise _no_key()
    check_origin(scope, needs_origin=False)
    return Identity(Workspace(state.db, LOCAL, LOCAL), _ALL_SCOPES)


def _of_key(state: AppState, key: Key) -> Identity:
    return Identity(Workspace(state.db, key.tenant, key.actor), key.scopes, key)


def _read_bearer(header: bytes) -> str:
    kind, _, text = header.decode("latin-1").strip().partition(" ")
    text = text.strip()
    if kind.lower() != "bearer" or not text or len(text) > _LONGEST_KEY:
        raise Unauthorized
    return text


def read_cookie(scope: Any) -> str | None:
    """Return the session that a browser sends, if any."""
    header = find_header(scope, b"cookie")
    if header is None or COOKIE.encode() not in header:
        return None
    try:
        found = SimpleCookie(header.decode("latin-1")).get(COOKIE)
    except CookieError:
        return None
    return None if found is None else found.value


def _no_key() -> RequestRefused:
    return RequestRefused(
        "this service needs a key",
        "send it in the header `Authorization: Bearer inl_…`; the operator makes one by `inlay key make`",
        code="unauthorized",
        status=401,
    )
