"""Datasets: uploaded files, kept byte for byte, and what was found in them."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, insert, select

from inlay.errors import UnknownName
from inlay.service.state import schema
from inlay.service.state.service_files import ServicePaths, SharedFiles
from inlay.service.state.state_errors import OverLimit
from inlay.service.state.tenants import Tenant, TenantLimits
from inlay.service.state.values import check_label, make_id, to_iso
from inlay.store import sync_directory, telling_full_disk

MOST_DATASET_NAME = 255
_TEXT_FORMATS = ("csv", "tsv", "jsonl", "json", "txt")
_PACKINGS = ("gz", "bz2", "xz", "zst")
FORMATS = (
    *("csv", "tsv", "jsonl", "parquet", "xlsx", "json", "conll", "txt", "zip"),
    *(f"{kind}.{packing}" for kind in _TEXT_FORMATS for packing in _PACKINGS),
)
"""formats of a dataset, which are the suffixes of its file"""


@dataclass(frozen=True)
class DatasetDraft:
    """An upload that is complete on the disk and was read, but is no dataset yet.

    `path` is a file in the tenant's own folder (`ServicePaths.datasets`) whose name begins with `DRAFT_PREFIX`, so a
    sweep deletes it after a crash. `add_dataset` syncs and renames it; nobody else may have it open for writing.
    """

    path: Path
    name: str
    format: str
    size_bytes: int
    sha256: str
    num_rows: int
    found: UploadContent


@dataclass(frozen=True)
class UploadContent:
    """The columns, the way to read them, and the first rows that were found in an upload, as the API shows them."""

    columns: list[dict[str, Any]] = field(default_factory=list)
    reading: dict[str, Any] | None = None
    problem: dict[str, Any] | None = None
    notes: list[dict[str, Any]] = field(default_factory=list)
    first_rows: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Dataset:
    """A dataset of a tenant; `path` is its file."""

    id: str
    name: str
    format: str
    path: Path
    size_bytes: int
    sha256: str
    num_rows: int
    found: UploadContent
    created_at: float
    number: int
    task: str | None = None
    """the task whose corrections made it"""

    def to_json(self) -> dict[str, Any]:
        """Return the dataset as the API shows it: without its path."""
        return {
            "id": self.id,
            "name": self.name,
            "format": self.format,
            "size_bytes": self.size_bytes,
            "sha256": self.sha256,
            "num_rows": self.num_rows,
            "columns": self.found.columns,
            "reading": self.found.reading,
            "problem": self.found.problem,
            "notes": self.found.notes,
            "first_rows": self.found.first_rows,
            "created_at": to_iso(self.created_at),
        }


def check_draft(draft: DatasetDraft, limits: TenantLimits) -> None:
    """Refuse an upload above the tenant's limits, or with a name or a format that is not allowed."""
    check_label("name of a dataset", draft.name, MOST_DATASET_NAME)
    if draft.format not in FORMATS:
        raise UnknownName("format", draft.format, FORMATS)
    labels = len((draft.found.reading or {}).get("labels") or ())
    for name, asked in (("dataset_bytes", draft.size_bytes), ("dataset_rows", draft.num_rows), ("labels", labels)):
        allowed = getattr(limits, name)
        if allowed is not None and asked > allowed:
            raise OverLimit(name, asked, allowed)


def keep_file(draft: DatasetDraft, folder: Path, files: SharedFiles) -> str:
    """Sync an upload and rename it in the tenant's folder; return the id of the new dataset."""
    dataset_id = make_id("ds")
    with telling_full_disk(folder, 0):
        descriptor = os.open(draft.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        path = folder / file_name(dataset_id, draft.format)
        os.replace(draft.path, path)
        sync_directory(folder)
    files.keep(path)
    return dataset_id


def file_name(dataset_id: str, format_: str) -> str:
    """Return the name of a dataset's file in the tenant's folder."""
    return f"{dataset_id}.{format_}"


def insert_dataset(
    connection: Connection, tenant: Tenant, dataset_id: str, draft: DatasetDraft, made: tuple[float, str | None]
) -> None:
    """Enter a dataset whose file is in place; `made` is the time, and the task whose corrections made it."""
    allowed = tenant.limits.stored_bytes
    stored = count_stored(connection, tenant.name)
    if allowed is not None and stored + draft.size_bytes > allowed:
        raise OverLimit("stored_bytes", stored + draft.size_bytes, allowed)
    created_at, task = made
    connection.execute(
        insert(schema.datasets).values(
            tenant=tenant.name,
            id=dataset_id,
            name=draft.name,
            format=draft.format,
            file=file_name(dataset_id, draft.format),
            size_bytes=draft.size_bytes,
            sha256=draft.sha256,
            num_rows=draft.num_rows,
            found=asdict(draft.found),
            task=task,
            created_at=created_at,
        )
    )


def count_stored(connection: Connection, tenant: str) -> int:
    """Return the bytes of a tenant's datasets and of the versions it trained."""
    total = 0
    for table in (schema.datasets, schema.versions):
        query = select(func.coalesce(func.sum(table.c.size_bytes), 0)).where(table.c.tenant == tenant)
        total += int(connection.execute(query).scalar_one())
    return total


def find_dataset(connection: Connection, paths: ServicePaths, tenant: str, dataset_id: str) -> Dataset:
    """Return a tenant's dataset."""
    row = schema.datasets.c
    query = select(schema.datasets).where(row.tenant == tenant, row.id == dataset_id)
    found = connection.execute(query).one_or_none()
    if found is None:
        raise UnknownName("dataset", dataset_id, (), hint="`GET /v1/datasets` lists them")
    return dataset_of(found, paths)


def dataset_of(row: Any, paths: ServicePaths) -> Dataset:
    """Return a row of the table as a dataset."""
    return Dataset(
        id=row.id,
        name=row.name,
        format=row.format,
        path=paths.datasets(row.tenant) / row.file,
        size_bytes=row.size_bytes,
        sha256=row.sha256,
        num_rows=row.num_rows,
        found=UploadContent(**row.found),
        created_at=row.created_at,
        number=row.number,
        task=row.task,
    )
