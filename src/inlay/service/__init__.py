"""The service room: customers bring tasks over HTTP, and one frozen backbone answers them all.

A supervisor starts web, engine and trainer processes; the database says what is to be done and who may ask. What the
web processes import has no torch. Names are imported when they are first used: they need the extra [serve].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import import_lazily

if TYPE_CHECKING:
    from inlay.service.home import read_status
    from inlay.service.launch import Announcer, Readiness, check_extra, find_home, serve
    from inlay.service.settings import ServeSettings
    from inlay.service.state import BackupReport, Database, Keys, Tenants, back_up, restore

_HOMES = {
    "inlay.service.home": ("read_status",),
    "inlay.service.launch": ("Announcer", "Readiness", "check_extra", "find_home", "serve"),
    "inlay.service.settings": ("ServeSettings",),
    "inlay.service.state": ("BackupReport", "Database", "Keys", "Tenants", "back_up", "restore"),
}
__getattr__ = import_lazily(__name__, _HOMES)

__all__ = [
    "Announcer",
    "BackupReport",
    "Database",
    "Keys",
    "Readiness",
    "ServeSettings",
    "Tenants",
    "back_up",
    "check_extra",
    "find_home",
    "read_status",
    "restore",
    "serve",
]
