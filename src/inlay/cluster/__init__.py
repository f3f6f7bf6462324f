"""The cluster room: runs trained on the machines of a Ray cluster, and the connection to one.

Of the rest of Inlay only `service/on_ray/` touches Ray. Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import import_lazily

if TYPE_CHECKING:
    from inlay.cluster.messages import (
        PackedError,
        marked,
        pack_error,
        read_folders,
        start_relay,
        unpack_error,
        write_files,
    )
    from inlay.cluster.on_ray import (
        RETRIES,
        RaySettings,
        check_versions,
        count_places,
        first_error_line,
        fit_on_ray,
        load_same_backbone,
    )
    from inlay.cluster.ray_connection import connect, own_versions, parse_address

__getattr__ = import_lazily(
    __name__,
    {
        "inlay.cluster.messages": (
            "PackedError",
            "marked",
            "pack_error",
            "read_folders",
            "start_relay",
            "unpack_error",
            "write_files",
        ),
        "inlay.cluster.on_ray": (
            "RETRIES",
            "RaySettings",
            "check_versions",
            "count_places",
            "first_error_line",
            "fit_on_ray",
            "load_same_backbone",
        ),
        "inlay.cluster.ray_connection": ("connect", "own_versions", "parse_address"),
    },
)

__all__ = [
    "RETRIES",
    "PackedError",
    "RaySettings",
    "check_versions",
    "connect",
    "count_places",
    "first_error_line",
    "fit_on_ray",
    "load_same_backbone",
    "marked",
    "own_versions",
    "pack_error",
    "parse_address",
    "read_folders",
    "start_relay",
    "unpack_error",
    "write_files",
]
