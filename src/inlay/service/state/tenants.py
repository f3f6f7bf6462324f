"""Tenants: who brings tasks, what they may use, and their names in the store.

The tenant `local` always is there. In the store its tasks have their own names; the task `mail` of the tenant `acme`
is `acme.mail`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from inlay.service.state.timestamps import to_iso

if TYPE_CHECKING:
    from inlay.service.state.database import Database
    from inlay.service.state.jobs import Job

LOCAL = "local"


@dataclass(frozen=True)
class TenantLimits:
    """The most that a tenant may use; None is no limit."""

    tokens_per_minute: int | None = 600_000
    queued_jobs: int | None = 100
    dataset_rows: int | None = 1_000_000
    dataset_bytes: int | None = 2**30
    labels: int | None = 10_000
    stored_bytes: int | None = 10 * 2**30
    rows_per_request: int | None = 1024

    def to_json(self) -> dict[str, int | None]:
        """Return the limits by name."""
        return asdict(self)


NO_LIMITS = TenantLimits(None, None, None, None, None, None, None)


@dataclass(frozen=True)
class Tenant:
    """A tenant; `weight` is its share where tenants compete."""

    name: str
    limits: TenantLimits
    weight: float
    created_at: float
    is_removing: bool = False

    @property
    def prefix(self) -> str:
        """What its tasks' names begin with in the store."""
        return "" if self.name == LOCAL else f"{self.name}."

    def to_json(self) -> dict[str, Any]:
        """Return the tenant as data."""
        return {
            "name": self.name,
            "weight": self.weight,
            "limits": self.limits.to_json(),
            "state": "removing" if self.is_removing else "active",
            "created_at": to_iso(self.created_at),
        }


class Tenants:
    """All tenants of a service: the operator's side."""

    def __init__(self, db: Database, actor: str = "operator") -> None:
        self._db = db
        self._actor = actor

    def add(self, name: str, limits: TenantLimits | None = None, *, weight: float = 1.0) -> Tenant:
        """Add a tenant. Its name must be free, also as the beginning of names in the store."""
        raise NotImplementedError

    def list(self) -> list[Tenant]:
        """Return all tenants by name, those that are being removed too."""
        raise NotImplementedError

    def get(self, name: str) -> Tenant:
        """Return a tenant; UnknownName for one that is not there or is being removed."""
        raise NotImplementedError

    def set_limits(self, name: str, limits: TenantLimits | None = None, *, weight: float | None = None) -> Tenant:
        """Replace a tenant's limits, its weight, or both."""
        raise NotImplementedError

    def remove(self, name: str) -> Job:
        """Begin to erase a tenant: its keys end at once, its jobs are cancelled, and a job erases the rest.

        A trainer runs that job (`run_erasure`), or `inlay tenant remove` does.
        """
        raise NotImplementedError
