"""The connection to a Ray cluster, and the versions that all its machines must share. No torch."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from importlib import metadata
from typing import Any

from inlay.errors import BadConfig, Missing

AUTO = "auto"
"""the cluster of $RAY_ADDRESS, or else the one on this machine"""
NAMESPACE = "inlay"
_PATIENCE_S = 10.0
_SAME = ("inlay", "torch", "transformers")  # packages that must have the same version on all machines


def parse_address(text: str) -> str:
    """Return the address of the cluster in `--on ray` or `--on ray://HOST:10001`."""
    if text != "ray" and not text.startswith("ray://"):
        raise BadConfig(f"`--on {text}` is not a cluster", "use `--on ray`, or `--on ray://HOST:10001`")
    return AUTO if text == "ray" else text


def connect(address: str) -> Any:
    """Connect to the cluster and return the module `ray`."""
    try:
        import ray
    except ImportError:
        raise Missing("`--on ray` needs Ray, which is not installed", "`pip install 'inlay[ray]'`") from None
    if ray.is_initialized():
        return ray
    given = os.environ.get("RAY_ADDRESS", AUTO) if address == AUTO else address
    try:
        _knock(given)
        ray.init(address=given, log_to_driver=False, logging_level="ERROR", namespace=NAMESPACE)
    except (OSError, RuntimeError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        hint = "start one with `ray start --head`, or name it: `--on ray://HOST:10001`, $RAY_ADDRESS"
        raise Missing(f"no Ray cluster at `{given}`: {reason}", hint) from None
    return ray


def _knock(address: str) -> None:
    """Raise OSError if nothing listens at the address; Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE_S).close()


def living_nodes(ray: Any) -> list[dict[str, Any]]:
    """Return the machines of the cluster that are alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def own_versions() -> tuple[str, ...]:
    """Return this machine's versions of the packages that must be the same on all machines."""
    found = []
    for name in _SAME:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name).partition('+')[0]}")  # without the build tag
    return tuple(found)
