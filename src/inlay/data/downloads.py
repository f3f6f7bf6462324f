"""Downloads of data files from a URL, with limits on size and time, and from public addresses only.

Every host name is resolved here, all of its addresses are checked, and the connection is made to one that was checked:
a second look-up could give another. So neither a redirect nor a name server leads into this machine's own network. No
proxy is used, since it would resolve the name again.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from inlay.data.data_files import RawFile, Spool, hide_secrets
from inlay.errors import BadData, Missing

MOST_BYTES = 2 << 30
MOST_SECONDS = 900.0
CONNECT_SECONDS = 10.0
QUIET_SECONDS = 30.0
"""longest silence of a server"""
MOST_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_PIECE_BYTES = 1 << 16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_PIPE = "fetch it yourself: `curl -L URL | inlay train - --task NAME`, or name the file it is saved to"
# The server's content type -> suffix, for a URL without a suffix.
_TYPES = {
    "text/csv": ".csv",
    "application/csv": ".csv",
    "text/tab-separated-values": ".tsv",
    "application/jsonl": ".jsonl",
    "application/x-ndjson": ".jsonl",
    "application/json": ".json",
    "application/vnd.apache.parquet": ".parquet",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": ".xlsx",
}
_KEPT = "/%:@!$&'()*+,;=~-._"
"""characters of a path that are sent unquoted"""
_HEADERS = {"User-Agent": "inlay", "Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}
_PACKED = {"gzip": ".gz", "x-gzip": ".gz", "zstd": ".zst"}


def download(url: str) -> RawFile:
    """Fetch a URL into a spool. Redirects are followed, each to an address that is checked."""
    deadline = time.monotonic() + MOST_SECONDS
    given = hide_secrets(url)
    for _ in range(MOST_REDIRECTS + 1):
        parts = _check_url(url, given)
        with _connect(parts, given, deadline) as (connection, is_late):
            try:
                path = quote(parts.path or "/", safe=_KEPT)
                path += f"?{quote(parts.query, safe=_KEPT + '?')}" if parts.query else ""
                connection.request("GET", path, headers=_HEADERS)
                with connection.getresponse() as response:
                    if response.status not in _REDIRECTS:
                        return _take(response, parts, given, deadline)
                    url = _follow(url, response, given)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise (_too_slow(given) if is_late() else _refuse(given, error)) from None
    raise Missing(f"`{given}` redirects more than {MOST_REDIRECTS} times", _PIPE)


def is_public(address: str) -> bool:
    """Return whether an address is on the public network: not this machine, not its network, no multicast."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found in _NAT64 or found.ipv4_mapped is not None:  # an IPv4 address written as IPv6
            return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
        if found.sixtofour is not None or found.teredo is not None or found.is_site_local:
            return False  # tunnels, which may end anywhere, and the old form of private networks
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)


def _check_url(url: str, given: str) -> SplitResult:
    """Split a URL; refuse one that is not the address of a file on the web."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        reason = "" if "@" in url else f": {error}"  # which may quote a password
        raise Missing(f"`{given}` is not a URL{reason}", _PIPE) from None
    if parts.scheme.lower() not in ("http", "https"):
        raise Missing(f"`{given}` leads to `{parts.scheme[:20]}:`, not to https or http", _PIPE)
    if not host:
        raise Missing(f"`{given}` has no host", "write it as https://HOST/FILE")
    if parts.username is not None or parts.password is not None:
        hint = "it would be kept with the run's settings; " + _PIPE
        raise Missing(f"a URL with a name or password of {host} in it", hint)
    return parts


def _resolve(host: str, port: int, given: str) -> str:
    """Return the address to connect to: the first of a host, all of whose addresses must be public."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise Missing(f"no address found for `{host}` of `{given}`", "check its name and the network") from None
    addresses = [str(item[4][0]) for item in found]
    private = next((address for address in addresses if not is_public(address)), None)
    if private is not None:
        raise Missing(f"`{host}` of `{given}` is at {private}, which is not on the public network", _PIPE)
    return addresses[0]


@contextmanager
def _connect(parts: SplitResult, given: str, deadline: float) -> Iterator[tuple[http.client.HTTPConnection, Any]]:
    """Connect to a checked address, until the deadline at most; yield the connection, and a test if it was cut off."""
    host, port = str(parts.hostname), parts.port or (443 if parts.scheme.lower() == "https" else 80)
    address = _resolve(host, port, given)
    connection = http.client.HTTPConnection(host, port, timeout=QUIET_SECONDS)
    was_late = threading.Event()
    try:
        raw = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
    except OSError as error:
        raise _refuse(given, error) from None
    with raw, raw.dup() as second:  # TLS takes over the first one

        def cut_off() -> None:  # on the timer's thread, while this one reads
            was_late.set()
            with suppress(OSError):
                second.shutdown(socket.SHUT_RDWR)

        clock = threading.Timer(max(0.0, deadline - time.monotonic()), cut_off)
        clock.daemon = True
        clock.start()
        try:
            raw.settimeout(QUIET_SECONDS)
            is_safe = parts.scheme.lower() == "https"
            # The certificate must be the name's, though the connection is to an address.
            connection.sock = ssl.create_default_context().wrap_socket(raw, server_hostname=host) if is_safe else raw
            yield connection, was_late.is_set
        except OSError as error:  # of TLS; what comes later is the caller's
            raise (_too_slow(given) if was_late.is_set() else _refuse(given, error)) from None
        finally:
            clock.cancel()
            connection.close()


def _follow(url: str, response: http.client.HTTPResponse, given: str) -> str:
    """Return the URL that a redirect leads to; refuse one that leaves TLS."""
    target = response.getheader("Location")
    if not target:
        raise Missing(f"`{given}` answered {response.status} without saying where to go", _PIPE)
    found = urljoin(url, target)
    if url.lower().startswith("https:") and found.lower().startswith("http:"):
        raise Missing(f"`{given}` redirects from https to http", _PIPE)
    return found


def _take(response: http.client.HTTPResponse, parts: SplitResult, given: str, deadline: float) -> RawFile:
    """Read an answer piece by piece into a spool."""
    if response.status != 200:
        hint = "check the link in a browser; a private file needs a signed link"
        if response.status >= 500:
            hint = "try later"
        raise Missing(f"`{given}` answered {response.status} {response.reason}", hint)
    length = response.getheader("Content-Length")
    if length is not None and length.isdigit() and int(length) > MOST_BYTES:
        raise _too_long(given)
    spool = Spool()
    while piece := response.read1(_PIECE_BYTES):
        spool.write(piece)
        if spool.size_bytes > MOST_BYTES:
            raise _too_long(given)
        if time.monotonic() > deadline:
            raise _too_slow(given)
    if time.monotonic() > deadline:
        raise _too_slow(given)
    if length is not None and length.isdigit() and spool.size_bytes < int(length):
        raise BadData(f"it broke off after {spool.size_bytes:,} of {int(length):,} bytes", "try again", path=given)
    if not spool.size_bytes:
        raise BadData("the answer is empty", "check the link in a browser", path=given)
    return RawFile(given, _find_suffix(response, parts), spool, spool.size_bytes)


def _find_suffix(response: http.client.HTTPResponse, parts: SplitResult) -> str:
    """Return the suffix of the content: of its packing, of the URL, or by its type."""
    suffix = PurePosixPath(unquote(parts.path)).suffix.lower()
    kind = (response.getheader("Content-Type") or "").partition(";")[0].strip().lower()
    packing = _PACKED.get((response.getheader("Content-Encoding") or "").strip().lower())
    if packing is not None and suffix != packing:
        return packing  # sent packed although the request refused that
    return suffix or _TYPES.get(kind, "")


def _refuse(given: str, error: Exception) -> Missing:
    if isinstance(error, TimeoutError):
        return Missing(f"`{given}` does not answer", _PIPE)
    if isinstance(error, ssl.SSLCertVerificationError):
        return Missing(f"the certificate of `{given}` is not valid: {error.verify_message}", _PIPE)
    words = " ".join(str(error).split())[:100] or type(error).__name__
    return Missing(f"`{given}` cannot be read: {words}", _PIPE)


def _too_long(given: str) -> BadData:
    return BadData(f"it is longer than {MOST_BYTES:,} bytes", f"use a part of it, or {_PIPE}", path=given)


def _too_slow(given: str) -> BadData:
    return BadData(f"it was not read within {MOST_SECONDS:,.0f} seconds", _PIPE, path=given)
