"""Usage: rows, tokens and requests by day and task, and how much of its limits a tenant uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from inlay.errors import BadConfig
from inlay.service.state import schema
from inlay.service.state.datasets import count_stored
from inlay.service.state.jobs import ERASE, QUEUED
from inlay.service.state.tenants import Tenant, TenantLimits
from inlay.service.state.timestamps import day_of

MOST_DAYS = 366
_DAY_S = 86400.0


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


def list_usage(connection: Connection, tenant: str, days: int, now: float) -> list[DayUsage]:
    """Return a tenant's usage of the last days, newest first."""
    if not 1 <= days <= MOST_DAYS:
        raise BadConfig(f"`days` is {days}", f"a whole number from 1 to {MOST_DAYS}")
    row = schema.usage.c
    since = day_of(now - (days - 1) * _DAY_S)
    query = select(row.day, row.task, row.rows, row.tokens, row.requests).where(row.tenant == tenant, row.day >= since)
    return [DayUsage(*item) for item in connection.execute(query.order_by(row.day.desc(), row.task))]


def read_limits(connection: Connection, tenant: Tenant) -> LimitsUsed:
    """Return a tenant's limits, and what of them is used."""
    row = schema.jobs.c
    query = select(func.count()).where(row.tenant == tenant.name, row.state == QUEUED, row.kind != ERASE)
    return LimitsUsed(tenant.limits, connection.execute(query).scalar_one(), count_stored(connection, tenant.name))
