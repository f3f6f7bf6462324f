"""Tenants: the customers of a service, with their limits.

The tenant `local` always exists. In the store its tasks have their own names, while the task `mail` of the tenant
`acme` is `acme.mail`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from inlay.errors import BadConfig, UnknownName
from inlay.service.state import schema
from inlay.service.state.aliases import ERASING
from inlay.service.state.database import Database, count_change, write_audit
from inlay.service.state.jobs import ERASE, Job, JobRequest, cancel_where, insert_job, job_of
from inlay.service.state.state_errors import Conflict
from inlay.service.state.values import to_iso

LOCAL = "local"
ACTIVE, REMOVING = "active", "removing"
MOST_WEIGHT = 1000.0
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")


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

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62):
                raise BadConfig(f"the limit `{name}` is `{value}`", "a whole number, or none for no limit")

    def to_json(self) -> dict[str, int | None]:
        """Return the limits by name."""
        return asdict(self)


def store_prefix(tenant: str) -> str:
    """Return the beginning of the store's names for a tenant's tasks: `acme.`, or nothing for `local`."""
    return "" if tenant == LOCAL else f"{tenant}."


def split_store_name(name: str, tenants: Collection[str]) -> tuple[str, str]:
    """Return the tenant and the task that a name in the store means; without a tenant's prefix it is of `local`."""
    owner, dot, task = name.partition(".")
    return (owner, task) if dot and owner in tenants else (LOCAL, name)


NO_LIMITS = TenantLimits(None, None, None, None, None, None, None)


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
        """The beginning of its tasks' names in the store."""
        return store_prefix(self.name)

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
    """All tenants of a service, as the operator manages them."""

    def __init__(self, db: Database, actor: str = "operator") -> None:
        self._db = db
        self._actor = actor

    def add(self, name: str, limits: TenantLimits | None = None, *, weight: float = 1.0) -> Tenant:
        """Add a tenant. Neither another tenant nor a task in the store may use its name."""
        if not _NAME.fullmatch(name) or name == LOCAL:
            raise BadConfig(
                f"`{name}` cannot name a tenant",
                "lower-case letters, digits and `-`, at most 31, beginning with a letter or digit; not `local`",
            )
        _check_weight(weight)
        # A tenant that was removed leaves empty folders in the store.
        store = self._db.store
        if any(store.numbers(known)[0] for known in store.names() if known.startswith(f"{name}.")):
            raise Conflict(f"the store has tasks whose names begin with `{name}.`", "choose another name")
        now = self._db.now()
        values = {"name": name, "state": ACTIVE, "weight": weight, "turn": 0.0, "created_at": now}
        with self._db.writing() as connection:
            if find_row(connection, name) is not None:
                raise Conflict(f"there is a tenant named `{name}`", "choose another name")
            connection.execute(insert(schema.tenants).values(**values, **(limits or TenantLimits()).to_json()))
            self._note(connection, name, "tenant.add")
        return self.get(name)

    def list(self) -> list[Tenant]:
        """Return all tenants by name, including those that are being removed."""
        with self._db.reading() as connection:
            rows = connection.execute(select(schema.tenants).order_by(schema.tenants.c.name)).all()
        return [tenant_of(row) for row in rows]

    def get(self, name: str) -> Tenant:
        """Return a tenant; UnknownName if it does not exist or is being removed."""
        with self._db.reading() as connection:
            return active_tenant(connection, name)

    def set_limits(self, name: str, limits: TenantLimits | None = None, *, weight: float | None = None) -> Tenant:
        """Replace a tenant's limits, its weight, or both."""
        values: dict[str, Any] = {} if limits is None else limits.to_json()
        if weight is not None:
            _check_weight(weight)
            values["weight"] = weight
        with self._db.writing() as connection:
            active_tenant(connection, name)
            if values:
                connection.execute(update(schema.tenants).where(schema.tenants.c.name == name).values(**values))
            self._note(connection, name, "tenant.limit")
        return self.get(name)

    def remove(self, name: str) -> Job:
        """Begin to erase a tenant: its keys end at once, its jobs are cancelled, and a job erases the rest.

        A trainer runs that job (`run_erasure`), or `inlay tenant remove` does. Removing it again returns the same job.
        """
        if name == LOCAL:
            raise Conflict("the tenant `local` cannot be removed", "erase its tasks one by one")
        job = schema.jobs.c
        with self._db.writing() as connection:
            found = find_row(connection, name)
            if found is None:
                raise _unknown(name)
            is_erasure = (job.tenant == name, job.kind == ERASE, job.task == "")
            begun = connection.execute(select(schema.jobs).where(*is_erasure)).first()
            if found.state == REMOVING and begun is not None:
                erasure = job_of(begun)
            else:
                now = self._db.now()
                keys = select(schema.keys.c.id).where(schema.keys.c.tenant == name)
                connection.execute(update(schema.tenants).where(schema.tenants.c.name == name).values(state=REMOVING))
                connection.execute(delete(schema.sessions).where(schema.sessions.c.key.in_(keys)))
                connection.execute(delete(schema.keys).where(schema.keys.c.tenant == name))
                connection.execute(update(schema.tasks).where(schema.tasks.c.tenant == name).values(state=ERASING))
                cancel_where(connection, job.tenant == name, now)
                erasure = insert_job(connection, tenant_of(found), JobRequest(ERASE, ""), self._actor, now)
            self._note(connection, name, "tenant.remove")
        return erasure

    def _note(self, connection: Connection, name: str, action: str) -> None:
        count_change(connection)
        write_audit(connection, name, self._db.now(), (self._actor, action, name))


def _check_weight(weight: float) -> None:
    if not 0 < weight <= MOST_WEIGHT:  # NaN is not
        raise BadConfig(f"the weight is {weight}", f"a number above 0, at most {MOST_WEIGHT:g}")


def find_row(connection: Connection, name: str) -> Any:
    """Return a tenant's row, None if there is none."""
    return connection.execute(select(schema.tenants).where(schema.tenants.c.name == name)).one_or_none()


def active_tenant(connection: Connection, name: str) -> Tenant:
    """Return a tenant that is not being removed; UnknownName for any other."""
    row = find_row(connection, name)
    if row is None or row.state != ACTIVE:
        raise _unknown(name)
    return tenant_of(row)


def _unknown(name: str) -> UnknownName:
    return UnknownName("tenant", name, (), hint="`inlay tenant list` lists them")


def tenant_of(row: Any) -> Tenant:
    """Return a row of the table as a tenant."""
    limits = TenantLimits(**{item.name: getattr(row, item.name) for item in fields(TenantLimits)})
    return Tenant(row.name, limits, row.weight, row.created_at, row.state != ACTIVE)
