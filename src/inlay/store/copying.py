"""Copying of versions from one store to another, in folders or object storage: names, numbers and bytes are kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from inlay.errors import BadConfig, StoreDamaged
from inlay.store.format import Version
from inlay.store.store import Store


@dataclass(frozen=True)
class CopyReport:
    """The result of `copy_store`."""

    num_versions: int
    num_there: int
    """versions that the target already had"""
    num_bytes: int
    damaged: tuple[str, ...]
    """versions of the source that could not be copied, with the reason"""


def copy_store(
    source: Store,
    target: Store,
    names: Collection[str] | None = None,
    tell: Callable[[Version], None] = lambda version: None,
) -> CopyReport:
    """Copy every version of `source`, or those of the tasks `names`, and check each copy; `tell` is called for each.

    Numbers that were removed are marked in the target too, so that none is used twice. If both stores have a number
    with different content, nothing is copied. A copy that was stopped can be repeated.
    """
    # 1. list what there is to copy, and refuse conflicts
    damaged: list[str] = []
    tasks = [
        (name, source.versions(name, lambda version, error: damaged.append(f"{version.reference}: {error}")))
        for name in (source.files.list_names() if names is None else names)
        if names is not None or source.numbers(name)[0]
    ]
    versions = [info.version for _, infos in tasks for info in infos]
    wanted = [version for version in versions if _is_missing(version, target)]
    # 2. copy what the target lacks
    num_copied = num_bytes = 0
    for version in wanted:
        try:
            num_bytes += _copy(version, source, target)
        except StoreDamaged as error:
            damaged.append(f"{version.reference}: {error}")
            continue
        num_copied += 1
        tell(version)
    # 3. mark the numbers of removed versions
    for name, _ in tasks:
        for number in set(source.numbers(name)[1]) - set(target.numbers(name)[1]):
            target.files.mark_removed(name, number)
    return CopyReport(num_copied, len(versions) - len(wanted), num_bytes, tuple(damaged))


def _is_missing(version: Version, target: Store) -> bool:
    """Return whether the target lacks a version; refuse a version whose number is another version there."""
    numbers, removed = target.numbers(version.name)
    if version.number in removed:
        raise BadConfig(f"`{version.reference}` was removed from `{target.place}`", "copy into another store")
    if version.number not in numbers:
        return True
    if target.resolve(version.reference).digest != version.digest:
        raise BadConfig(
            f"`{version.reference}` is another version in `{target.place}`",
            "copy into an empty store, or export and import the task under another name",
        )
    return False


def _copy(version: Version, source: Store, target: Store) -> int:
    """Copy one version and read the copy back; return its size."""
    source.check(version)
    content = source.files.find_object(version.digest).read_bytes()
    if hashlib.sha256(content).hexdigest() != version.digest:
        raise StoreDamaged(f"`{version.reference}` changed while it was read")
    reference = source.files.read_reference(version.name, version.number)
    sidecar = source.sidecar(version)
    with target.files.turn(exclusive=False):
        target.files.add_object(version.digest, content)
        if sidecar is not None:
            target.files.add_note(
                f"sidecars/{version.digest}.json", json.dumps(sidecar, sort_keys=True, indent=1).encode()
            )
        with suppress(FileExistsError):  # an earlier copy was stopped here
            target.files.add_reference(version, reference)
    target.check(version)
    return len(content)
