"""The lookup of the version that a name means now. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from inlay.store import Manifest, Store, Version

_MOST_KNOWN = 10_000  # names whose version is remembered


@dataclass(frozen=True)
class Resolved:
    """The version that a name stands for, and its manifest. `stamp` is the store's stamp of the name at that time."""

    version: Version
    manifest: Manifest
    stamp: int | None = None


class VersionLookup:
    """Finds the version that a name means now. The store is read again only if the name's versions may have changed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, Resolved] = {}

    def find(self, task: str) -> Resolved:
        """Return the version that `NAME`, `NAME@3` or `NAME@best` means now, with its manifest."""
        stamp = self._store.stamp(task)  # taken first: a change after it shows in the next one
        known = self._known.get(task)
        if known is not None and known.stamp is not None and known.stamp == stamp:
            return known
        version = self._store.resolve(task)
        if known is not None and known.version == version:
            manifest = known.manifest
        else:
            manifest = self._store.manifest(version)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[task] = found = Resolved(version, manifest, stamp)
        return found
