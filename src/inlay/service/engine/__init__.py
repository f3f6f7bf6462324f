"""The engine room: the process that answers rows of any mix of tasks over a socket, and its clients.

Messages and clients need no torch; names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import import_lazily

if TYPE_CHECKING:
    from inlay.service.engine.engine_client import (
        Answering,
        EngineClient,
        EngineRefused,
        SyncAnswering,
        SyncEngineClient,
        TcpAddress,
    )
    from inlay.service.engine.fleet_client import FleetClient, SyncFleetClient
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
    from inlay.service.engine.roster import Replica, Roster, RosterFile, find_roster

__getattr__ = import_lazily(
    __name__,
    {
        "inlay.service.engine.engine_client": (
            "Answering",
            "EngineClient",
            "EngineRefused",
            "SyncAnswering",
            "SyncEngineClient",
            "TcpAddress",
        ),
        "inlay.service.engine.fleet_client": ("FleetClient", "SyncFleetClient"),
        "inlay.service.engine.roster": ("Replica", "Roster", "RosterFile", "find_roster"),
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
    "Answering",
    "Caller",
    "EngineClient",
    "EngineRefused",
    "EngineStats",
    "FleetClient",
    "Predicted",
    "Replica",
    "Roster",
    "RosterFile",
    "SyncAnswering",
    "SyncEngineClient",
    "SyncFleetClient",
    "TcpAddress",
    "TenantLoad",
    "VersionLoaded",
    "WireAnswer",
    "WireError",
    "WireRow",
    "find_roster",
]
