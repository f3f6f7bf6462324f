"""Who sends a request: the key in its header, a browser's session, or, while no key exists, the user of this machine.

A page on another site may reach a service on this machine through the visitor's browser. It is kept out twice: its
requests carry another `Origin`, and a host name that it points at this machine is not among the allowed ones.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

from inlay.service.settings import ServeSettings
from inlay.service.state import LOCAL, SCOPES, Forbidden, Key, Tenant, Unauthorized, Workspace
from inlay.service.web.app_state import AppState
from inlay.service.web.problems import RequestRefused
from inlay.service.web.request_context import find_context, find_header

COOKIE = "inlay_session"
_LONGEST_KEY = 200
_ALL_SCOPES = frozenset(SCOPES)
_SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}


@dataclass(frozen=True)
class Identity:
    """The tenant that sends a request, and what it may do."""

    workspace: Workspace
    scopes: frozenset[str]
    key: Key | None = None
    """None: the user of this machine, while the service has no keys"""

    @property
    def tenant(self) -> Tenant:
        """The tenant, with its limits."""
        return self.workspace.tenant

    def require(self, scope: str) -> None:
        """Refuse the request if the key does not have this scope."""
        if scope not in self.scopes:
            raise Forbidden(scope)

    @classmethod
    def of_key(cls, state: AppState, key: Key) -> Identity:
        """Return the identity of a valid key."""
        return cls(Workspace(state.db, key.tenant, key.actor), key.scopes, key)


def identify(state: AppState, scope: Any) -> Identity:
    """Return who sends a request; refuse it without a valid key where keys are needed."""
    identity = _find_identity(state, scope)
    find_context(scope).tenant = identity.workspace.name
    return identity


def _find_identity(state: AppState, scope: Any) -> Identity:
    # 1. a key in the header
    given = find_header(scope, b"authorization")
    if given is not None:
        kind, _, text = given.decode("latin-1").strip().partition(" ")
        text = text.strip()
        if kind.lower() != "bearer" or not text or len(text) > _LONGEST_KEY:
            raise Unauthorized
        return Identity.of_key(state, state.keys.check(text))
    # 2. a browser's session
    token = read_cookie(scope)
    key = None if token is None else state.find_session(token)
    if key is not None:
        check_origin(scope, needs_origin=True)
        return Identity.of_key(state, key)
    # 3. nobody: allowed on this machine, while there are no keys
    host = strip_port((find_header(scope, b"host") or b"").decode("latin-1"))
    is_local = is_loopback(host) or host in {name.lower() for name in state.settings.hosts}
    if state.keys.exist() or not state.settings.is_loopback or not is_local:
        raise RequestRefused(
            "this service needs a key",
            "send it in the header `Authorization: Bearer inl_…`; the operator makes one by `inlay key make`",
            code="unauthorized",
            status=401,
        )
    check_origin(scope, needs_origin=False)
    return Identity(Workspace(state.db, LOCAL, LOCAL), _ALL_SCOPES)


def read_cookie(scope: Any) -> str | None:
    """Return the session token that a browser sends, if any."""
    header = find_header(scope, b"cookie")
    if header is None or COOKIE.encode() not in header:
        return None
    try:
        found = SimpleCookie(header.decode("latin-1")).get(COOKIE)
    except CookieError:
        return None
    return None if found is None else found.value


# Host names and origins


def make_host_check(settings: ServeSettings) -> Callable[[str], bool]:
    """Return a test of the header `Host`: it allows loopback names, the service's address, and the listed hosts.

    A service that is reachable from other machines and has no list allows any name: its callers need keys.
    """
    listed = {host.lower() for host in settings.hosts}
    takes_any = not settings.is_loopback and not listed

    def allows(host: str) -> bool:
        name = strip_port(host)
        return takes_any or name in listed or host.lower() in listed or name == settings.host or is_loopback(name)

    return allows


def strip_port(host: str) -> str:
    """Return the name in a `Host`, in lower case and without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def is_loopback(name: str) -> bool:
    """Return whether a name means this machine."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_origin(scope: Any, *, needs_origin: bool) -> None:
    """Refuse a request that changes something and was sent by a page of another site.

    With `needs_origin` a request that does not say where it comes from is refused too: it has a browser's session.
    """
    if scope["method"] in _SAFE_METHODS:
        return
    origin = find_header(scope, b"origin")
    if origin is None:
        site = find_header(scope, b"sec-fetch-site")
        is_own = site in (b"same-origin", b"none") if site is not None else not needs_origin
    else:
        host = find_header(scope, b"host") or b""
        is_own = urlsplit(origin.decode("latin-1")).netloc.lower() == host.decode("latin-1").lower()
    if not is_own:
        raise RequestRefused(
            "the request comes from a page of another site",
            "send it from the service's own page, or with a key and without `Origin`",
            code="wrong-origin",
            status=403,
        )
