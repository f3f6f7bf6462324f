"""The service room: customers bring tasks over HTTP, and one frozen backbone answers them all.

A supervisor starts web, engine and trainer processes; the database says what is to be done and who may ask. What the
web processes import has no torch. Names are imported when they are first used: they need the extra [serve].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import import_lazily

if TYPE_CHECKING:
    from inlay.service.home import read_status
    from inlay.service.moving import MoveReport, move_to_postgres
    from inlay.service.settings import ClusterSettings, ServeSettings, parse_range
    from inlay.service.start_service import Readiness, StartCallbacks, check_extra, find_home, find_store_address, serve
    from inlay.service.state import (
        USUAL_SCOPES,
        BackupReport,
        Database,
        Key,
        Keys,
        Tenant,
        TenantLimits,
        Tenants,
        Workspace,
        back_up,
        remove_tenant,
        restore,
    )

_HOMES = {
    "inlay.service.home": ("read_status",),
    "inlay.service.moving": ("MoveReport", "move_to_postgres"),
    "inlay.service.start_service": (
        "StartCallbacks",
        "Readiness",
        "check_extra",
        "find_home",
        "find_store_address",
        "serve",
    ),
    "inlay.service.settings": ("ClusterSettings", "ServeSettings", "parse_range"),
    "inlay.service.state": (
        "USUAL_SCOPES",
        "BackupReport",
        "Database",
        "Key",
        "Keys",
        "Tenant",
        "TenantLimits",
        "Tenants",
        "Workspace",
        "back_up",
        "remove_tenant",
        "restore",
    ),
}
__getattr__ = import_lazily(__name__, _HOMES)

__all__ = [
    "USUAL_SCOPES",
    "BackupReport",
    "ClusterSettings",
    "Database",
    "Key",
    "Keys",
    "MoveReport",
    "Readiness",
    "ServeSettings",
    "StartCallbacks",
    "Tenant",
    "TenantLimits",
    "Tenants",
    "Workspace",
    "back_up",
    "check_extra",
    "find_home",
    "find_store_address",
    "move_to_postgres",
    "parse_range",
    "read_status",
    "remove_tenant",
    "restore",
    "serve",
]
