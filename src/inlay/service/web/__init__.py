"""The web room: an ASGI app whose routes identify the caller, keep uploads, and send rows to the engine.

It imports no torch; names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import import_lazily

if TYPE_CHECKING:
    from inlay.service.web.app import WebApp, make_app
    from inlay.service.web.app_state import AppState
    from inlay.service.web.identity import Identity, identify

__getattr__ = import_lazily(
    __name__,
    {
        "inlay.service.web.app": ("WebApp", "make_app"),
        "inlay.service.web.app_state": ("AppState",),
        "inlay.service.web.identity": ("Identity", "identify"),
    },
)

__all__ = ["AppState", "Identity", "WebApp", "identify", "make_app"]
