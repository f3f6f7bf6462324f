"""Modules and names that are imported when they are first used, so that naming them costs nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """A module that is imported when one of its names is first used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def import_lazily(package: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package; `homes` says which module defines which names."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home_of[name]), name)

    return find
