"""The service's engine: a process that answers rows of any mix of tasks over a Unix socket, and its clients.

Messages and clients need no torch; names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import import_lazily

if TYPE_CHECKING:
    from inlay.service.engine.engine_client import EngineClient, EngineRefused, SyncEngineClient
    from inlay.service.engine.protocol import (
        Caller,
        EngineStats,
        Predicted,
        TenantLoad,
        VersionLoaded,
        WireAnswer,
        WireError,
        WireRow,
    )

__getattr__ = import_lazily(
    __name__,
    {
        "inlay.service.engine.engine_client": ("EngineClient", "EngineRefused", "SyncEngineClient"),
        "inlay.service.engine.protocol": (
            "Caller",
            "EngineStats",
            "Predicted",
            "TenantLoad",
            "VersionLoaded",
            "WireAnswer",
            "WireError",
            "WireRow",
        ),
    },
)

__all__ = [
    "Caller",
    "EngineClient",
    "EngineRefused",
    "EngineStats",
    "Predicted",
    "SyncEngineClient",
    "TenantLoad",
    "VersionLoaded",
    "WireAnswer",
    "WireError",
    "WireRow",
]
