"""Usage: rows, tokens and requests by day and task, and how much of its limits a tenant uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inlay.service.state.tenants import TenantLimits


@dataclass(frozen=True)
class DayUsage:
    """The rows, tokens and requests of one task on one day (UTC)."""

    day: str
    task: str
    rows: int
    tokens: int
    requests: int

    def to_json(self) -> dict[str, Any]:
        """Return the usage as the API shows it."""
        return vars(self).copy()


@dataclass(frozen=True)
class LimitsUsed:
    """A tenant's limits, and how much of those that add up is used."""

    limits: TenantLimits
    queued_jobs: int
    stored_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the limits as the API shows them: `{"limits": …, "used": …}`."""
        used = {"queued_jobs": self.queued_jobs, "stored_bytes": self.stored_bytes}
        return {"limits": self.limits.to_json(), "used": used}
