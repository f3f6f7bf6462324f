"""The mark that a service leaves in its folder or bucket: a machine of the cluster that reads it sees the same one.

Machines may have folders of one path, or buckets of one name at two endpoints, which are not the same.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from inlay.service.settings import ServeSettings
from inlay.store import Store, write_atomically

_NAME = "cluster-mark"
_KEY = f"service/{_NAME}"


def leave_mark(settings: ServeSettings) -> str:
    """Return the mark of a service's folder or bucket, which is made by whoever comes first."""
    mark = secrets.token_hex(16)
    storage = None if settings.store is None else Store(settings.store).storage
    if storage is not None:
        with suppress(FileExistsError):
            storage.put_new(_KEY, mark.encode())
        return storage.get(_KEY).decode()
    path = settings.run_folder / _NAME
    if path.exists():
        return path.read_text()
    write_atomically(path, mark.encode())
    return mark


def has_mark(settings: ServeSettings, mark: str) -> bool:
    """Tell whether this machine sees the folder or bucket that has this mark."""
    storage = None if settings.store is None else Store(settings.store).storage
    try:
        found = (settings.run_folder / _NAME).read_text() if storage is None else storage.get(_KEY).decode()
    except OSError:
        return False
    return found == mark
