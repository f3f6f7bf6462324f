"""The cluster room: runs trained on the machines of a Ray cluster, and the connection to one.

Of the rest of Inlay only `service/on_ray/` touches Ray. Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import import_lazily

if TYPE_CHECKING:
    from inlay.cluster.on_ray import RaySettings, fit_on_ray
    from inlay.cluster.ray_connection import AUTO, connect, living_nodes, own_versions, parse_address

__getattr__ = import_lazily(
    __name__,
    {
        "inlay.cluster.on_ray": ("RaySettings", "fit_on_ray"),
        "inlay.cluster.ray_connection": ("AUTO", "connect", "living_nodes", "own_versions", "parse_address"),
    },
)

__all__ = ["AUTO", "RaySettings", "connect", "fit_on_ray", "living_nodes", "own_versions", "parse_address"]
