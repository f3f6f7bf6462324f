"""Tasks of a tenant: their versions, which one is live, and what a name means now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from inlay.service.state.timestamps import to_iso
from inlay.store import VersionInfo

LIVE = "live"


class ResolvedTask(NamedTuple):
    """The version that a name or reference of a task means, as the store names it."""

    store_name: str
    number: int
    digest: str


@dataclass(frozen=True)
class Alias:
    """The version that `live` stands for; `counter` grows with every move."""

    version: int
    counter: int
    moved_at: float
    moved_by: str
    reason: str
    name: str = LIVE
    digest: str = ""

    @property
    def etag(self) -> str:
        """The ETag that `If-Match` is compared with."""
        return f'"{self.counter}"'

    def to_json(self) -> dict[str, Any]:
        """Return the alias as the API shows it."""
        return {
            "alias": self.name,
            "version": self.version,
            "etag": self.etag,
            "moved_at": to_iso(self.moved_at),
            "moved_by": self.moved_by,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class AliasMove:
    """A move of `live` from one version to another."""

    from_version: int | None
    to_version: int
    at: float
    by: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return the move as the API shows it."""
        said = {"from": self.from_version, "to": self.to_version}
        return {**said, "at": to_iso(self.at), "by": self.by, "reason": self.reason}


@dataclass(frozen=True)
class VersionRow:
    """A version of a task: what the store has of it, and what made it."""

    info: VersionInfo
    is_live: bool
    dataset: str | None = None
    job: str | None = None
    reason: str = ""
    """why it went live, or why it did not"""

    @property
    def number(self) -> int:
        """Its number."""
        return self.info.version.number

    def to_json(self) -> dict[str, Any]:
        """Return the version as the API shows it."""
        summary = self.info.summary
        return {
            "version": self.number,
            "digest": self.info.version.digest,
            "published_at": self.info.published_at.replace("+00:00", "Z"),
            "metrics": summary.metrics,
            "metric": summary.metric,
            "kind": summary.kind,
            "method": summary.method.get("name"),
            "size": summary.method.get("size"),
            "num_parameters": summary.num_parameters,
            "dataset": self.dataset,
            "job": self.job,
            "reason": self.reason,
            "is_live": self.is_live,
            "size_bytes": self.info.size_bytes,
        }


@dataclass(frozen=True)
class ServedTask:
    """A task of a tenant. One that follows `latest` was trained by hand in this store: its newest version answers."""

    name: str
    store_name: str
    policy: str
    follows: str
    """alias or latest"""
    counter: int
    created_at: float | None
    versions: tuple[VersionRow, ...]
    rows_today: int = 0
    labels: tuple[str, ...] = ()

    @property
    def live(self) -> VersionRow | None:
        """The version that answers."""
        return next((version for version in self.versions if version.is_live), None)

    @property
    def etag(self) -> str:
        """The ETag of the task's settings."""
        return f'"{self.counter}"'

    def to_json(self) -> dict[str, Any]:
        """Return the task as the API shows it. `live.interval` is null here: it needs the version's evaluation."""
        shown = self.live or (self.versions[-1] if self.versions else None)
        summary = None if shown is None else shown.info.summary
        live = None
        if self.live is not None:
            info = self.live.info
            published_at = info.published_at.replace("+00:00", "Z")
            score = info.summary.score(info.summary.metric)
            live = {"version": self.live.number, "score": score, "interval": None, "published_at": published_at}
        return {
            "name": self.name,
            "kind": None if summary is None else summary.kind,
            "labels": list(self.labels),
            "metric": None if summary is None else summary.metric,
            "live": live,
            "num_versions": len(self.versions),
            "policy": self.policy,
            "follows": self.follows,
            "rows_today": self.rows_today,
            "created_at": to_iso(self.created_at),
            "etag": self.etag,
        }
