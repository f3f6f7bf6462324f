"""The serving room: published versions that answer requests, and the proof that they still stand.

Names are imported when they are first used: requests, answers and the pool need no torch, the rest does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inlay.serving.answers import Answer, Request
    from inlay.serving.engine import Engine
    from inlay.serving.pool import EnginePool
    from inlay.serving.verification import Check, verify

_HOMES = {"answers": ("Answer", "Request"), "engine": ("Engine",), "pool": ("EnginePool",)}
_HOMES |= {"verification": ("Check", "verify")}
_HOME_OF = {name: f"inlay.serving.{home}" for home, names in _HOMES.items() for name in names}

__all__ = ["Answer", "Check", "Engine", "EnginePool", "Request", "verify"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'inlay.serving' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
