"""Backup of a running service into one folder, and restoring from it.

A backup shows one moment: the database is copied first (by SQLite's own backup), then the files are linked into a
folder beside them, while nothing may be deleted. Files are never rewritten, so links are a snapshot that takes a
moment. The slow part, copying to another disk, makes nobody wait.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from inlay.errors import BadConfig, BadData, Missing, StoreDamaged, Unsupported
from inlay.service.state.database import VARIABLE
from inlay.service.state.schema import HEAD
from inlay.service.state.service_files import ServicePaths, keeping_files, remove_tree
from inlay.service.state.sqlite import read_revision
from inlay.store import DRAFT_PREFIX, locked, make_directory, sync_directory, telling_full_disk, write_atomically

_STORE = ("tasks", "objects", "sidecars", "backbones")  # in this order: a reference is written after its object
_SERVICE = ("datasets", "evaluations", "batches")
_LIST = "backup.json"
_CHUNK = 2**20


@dataclass(frozen=True)
class BackupReport:
    """The size of a backup, and how long it took."""

    folder: Path
    num_files: int
    num_bytes: int
    seconds: float


def back_up(home: Path, target: Path) -> BackupReport:
    """Copy the database, the store and the service's files of `home` to the new folder `target`, as of one moment.

    The service may run meanwhile. Run folders of training are left out: a restored service trains those jobs again.
    """
    began = time.monotonic()
    paths = ServicePaths(home.expanduser().absolute())
    target = target.expanduser().absolute()
    if os.environ.get(VARIABLE):
        hint = "copy the database with `pg_dump`, then the folder with any tool: docs/operating.md says how"
        raise Unsupported("a copy of a service whose database is Postgres", hint)
    if not paths.database.is_file():
        raise Missing(f"there is no service in `{paths.home}`", "name its folder with `--store DIR`")
    _check_absent(target)
    if target.is_relative_to(paths.home):
        raise BadConfig(f"`{target}` is in the folder that is backed up", "choose a folder elsewhere")
    staging = paths.service / f"{DRAFT_PREFIX}backup-{os.getpid()}"
    remove_tree(staging)
    try:
        make_directory(staging / "service")
        with keeping_files(paths), locked(paths.home / "lock", exclusive=False, in_turn=True):
            _copy_database(paths.database, staging / "service" / paths.database.name)
            for name in _STORE:
                _link_tree(paths.home / name, staging / name)
            for name in _SERVICE:
                _link_tree(paths.service / name, staging / "service" / name)
        files = _copy_all(staging, target)
    finally:
        remove_tree(staging)
    return _report(target, files, began)


def restore(backup: Path, home: Path) -> BackupReport:
    """Make the new folder `home` from a backup. Every file is checked; nothing is left if one is damaged."""
    began = time.monotonic()
    backup, home = backup.expanduser().absolute(), home.expanduser().absolute()
    wanted = _read_list(backup)
    _check_absent(home)
    return _report(home, _copy_all(backup, home, wanted), began)


def _report(folder: Path, files: dict[str, tuple[int, str]], began: float) -> BackupReport:
    num_bytes = sum(size for size, _ in files.values())
    return BackupReport(folder, len(files), num_bytes, time.monotonic() - began)


def _check_absent(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadConfig(f"`{folder}` exists and is not empty", "name a new folder")


def _copy_database(source: Path, target: Path) -> None:
    with telling_full_disk(target, source.stat().st_size):
        with closing(sqlite3.connect(source, timeout=30)) as old, closing(sqlite3.connect(target)) as new:
            old.backup(new)  # all pages in one step, so of one moment
        with closing(sqlite3.connect(target, isolation_level=None)) as copy:
            if copy.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
                raise StoreDamaged(f"`{source}` is damaged", "restore an earlier backup")
            # Nothing runs where the backup is restored.
            copy.execute("UPDATE cohorts SET state = 'waiting' WHERE state IN ('running', 'late')")
            copy.execute("UPDATE jobs SET state = 'queued', progress = NULL WHERE state = 'running'")
            copy.execute("DELETE FROM calls WHERE status IS NULL AND subject IS NULL")
            copy.execute("PRAGMA journal_mode = DELETE")


def _link_tree(source: Path, target: Path) -> None:
    """Link all files of a folder except drafts; copy them where the file system has no links."""
    for path in _walk(source):
        place = target / path.relative_to(source)
        make_directory(place.parent)
        try:
            os.link(path, place)
        except OSError:
            with telling_full_disk(place, path.stat().st_size):
                shutil.copyfile(path, place)


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(DRAFT_PREFIX))
        for name in sorted(names):
            if not name.startswith(DRAFT_PREFIX):
                yield Path(parent, name)


def _copy_all(
    source: Path, target: Path, wanted: dict[str, tuple[int, str]] | None = None
) -> dict[str, tuple[int, str]]:
    """Copy a folder into `target`, synced, whole or not at all; return size and sha256 of every file by its path.

    With `wanted`, the list of a backup, exactly its files are copied and checked. Without it the copy gets a list.
    """
    make_directory(target.parent)
    draft = target.parent / f"{DRAFT_PREFIX}{target.name}-{os.getpid()}"
    remove_tree(draft)
    names = [str(path.relative_to(source)) for path in _walk(source)] if wanted is None else list(wanted)
    files = {}
    try:
        make_directory(draft / "service")
        (draft / "service").chmod(0o700)
        for name in names:
            files[name] = _copy_file(source / name, draft / name)
            if wanted is not None and files[name] != wanted[name]:
                raise BadData("these are not the bytes that were backed up", "use another backup", path=source / name)
        if wanted is None:
            content = {"format": 1, "schema": HEAD, "files": files}
            write_atomically(draft / _LIST, json.dumps(content, indent=1, sort_keys=True).encode())
        with suppress(FileNotFoundError):
            target.rmdir()
        os.replace(draft, target)
        sync_directory(target.parent)
    finally:
        remove_tree(draft)
    return files


def _copy_file(source: Path, target: Path) -> tuple[int, str]:
    make_directory(target.parent)
    digest, size = hashlib.sha256(), 0
    try:
        with source.open("rb") as old, telling_full_disk(target, source.stat().st_size), target.open("xb") as new:
            while chunk := old.read(_CHUNK):
                new.write(chunk)
                digest.update(chunk)
                size += len(chunk)
            new.flush()
            os.fsync(new.fileno())
    except FileNotFoundError:
        raise BadData("a file of the backup is missing", "use another backup", path=source) from None
    sync_directory(target.parent)
    return size, digest.hexdigest()


def _read_list(backup: Path) -> dict[str, tuple[int, str]]:
    """Return the list of a backup's files; refuse a folder that is no backup, or has no database."""
    try:
        content = json.loads((backup / _LIST).read_bytes())
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
    except FileNotFoundError:
        raise Missing(f"there is no backup in `{backup}`", "name the folder that `inlay serve backup` made") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadData("not the list of a backup's files", "use another backup", path=backup / _LIST) from None
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise BadData(f"`{name}` is not a path in a backup", "use another backup", path=backup / _LIST)
    database = str(ServicePaths(Path()).database)
    if database not in files or read_revision(backup / database) is None:
        raise BadData("the backup has no database", "use another backup", path=backup)
    return files
