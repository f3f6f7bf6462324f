"""The names that the service answers to: the header `Host` of a request, and the origin of a page that sends one.

A page on another site may reach a service on this machine through the visitor's browser. It is kept out twice: its
requests name another origin, and a name of its own that it points at this machine is not in the list.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from inlay.service.settings import ServeSettings
from inlay.service.web.problems import RequestRefused
from inlay.service.web.visits import find_header

_SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}


def make_host_check(settings: ServeSettings) -> Callable[[str], bool]:
    """Return the test of a `Host`: loopback names, the address itself, and those the operator lists.

    A service that others can reach, without a list, answers to any name: its callers need keys.
    """
    listed = {host.lower() for host in settings.hosts}
    takes_any = not settings.is_loopback and not listed

    def allows(host: str) -> bool:
        name = strip_port(host)
        return takes_any or name in listed or host.lower() in listed or name == settings.host or is_loopback(name)

    return allows


def is_local_host(host: str, settings: ServeSettings) -> bool:
    """Return whether a `Host` may be served without a key: a name of this machine, or a listed one."""
    name = strip_port(host)
    return is_loopback(name) or name in {item.lower() for item in settings.hosts}


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


def check_origin(scope: object, *, needs_origin: bool) -> None:
    """Refuse a request that changes something and that a page of another site sent.

    `needs_origin`: a browser's session came with it, so that it must say where it comes from.
    """
    assert isinstance(scope, dict)
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
