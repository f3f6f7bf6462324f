"""The store of trained tasks: immutable versions, content-addressed, safe against crashes and other writers.

Importing this room, and listing what is in a store, imports neither torch nor numpy.
"""

from __future__ import annotations

from inlay.store.copying import CopyReport, copy_store
from inlay.store.files import (
    DRAFT_PREFIX,
    locked,
    make_directory,
    sync_directory,
    telling_full_disk,
    write_atomically,
    write_once,
)
from inlay.store.format import HASHED, Manifest, Probe, TaskInfo, Version, VersionInfo, legal_name
from inlay.store.object_storage import ObjectStorage
from inlay.store.snapshots import FolderSnapshots
from inlay.store.store import Loaded, Store

__all__ = [
    "DRAFT_PREFIX",
    "HASHED",
    "CopyReport",
    "FolderSnapshots",
    "Loaded",
    "Manifest",
    "ObjectStorage",
    "Probe",
    "Store",
    "TaskInfo",
    "Version",
    "VersionInfo",
    "copy_store",
    "legal_name",
    "locked",
    "make_directory",
    "sync_directory",
    "telling_full_disk",
    "write_atomically",
    "write_once",
]
