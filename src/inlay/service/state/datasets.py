"""Datasets: uploaded bytes, kept as they came, and what was found in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.service.state.timestamps import to_iso

FORMATS = ("csv", "tsv", "jsonl", "parquet", "xlsx", "json", "conll")


@dataclass(frozen=True)
class DatasetDraft:
    """An upload that is whole on disk and was read, but is no dataset yet.

    `path` is a file in the tenant's own folder (`Places.datasets`) that begins with `DRAFT_PREFIX`, so that a crash
    leaves what a sweep clears. `add_dataset` syncs it and gives it its name; nobody else may have it open for writing.
    """

    path: Path
    name: str
    format: str
    size_bytes: int
    sha256: str
    num_rows: int
    found: Found


@dataclass(frozen=True)
class Found:
    """The columns, reading and first rows that an upload was found to have, as the API shows them."""

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
    found: Found
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
