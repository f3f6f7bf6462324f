"""Tenants: who brings tasks, what they may use, and their names in the store.

The tenant `local` always is there. In the store its tasks have their own names; the task `mail` of the tenant `acme`
is `acme.mail`.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, insert, select, update

from inlay.errors import BadConfig, UnknownName
from inlay.service.state import schema
from inlay.service.state.audit import write_audit
from inlay.service.state.database import Database, bump
from inlay.service.state.state_errors import Conflict
from inlay.service.state.timestamps import to_iso

if TYPE_CHECKING:
    from inlay.service.state.jobs import Job

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
        check_tenant_name(name)
        _check_weight(weight)
        if _owns_in_store(self._db, name):
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
        """Return all tenants by name, those that are being removed too."""
        with self._db.reading() as connection:
            rows = connection.execute(select(schema.tenants).order_by(schema.tenants.c.name)).all()
        return [tenant_of(row) for row in rows]

    def get(self, name: str) -> Tenant:
        """Return a tenant; UnknownName for one that is not there or is being removed."""
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

        A trainer runs that job (`run_erasure`), or `inlay tenant remove` does. Doing it twice gives the same job.
        """
        from inlay.service.state.erasing import mark_tenant  # it needs what is here

        if name == LOCAL:
            raise Conflict("the tenant `local` always is there", "erase its tasks one by one")
        with self._db.writing() as connection:
            job = mark_tenant(connection, name, self._actor, self._db.now())
            self._note(connection, name, "tenant.remove")
        return job

    def _note(self, connection: Connection, name: str, action: str) -> None:
        bump(connection)
        write_audit(connection, name, self._db.now(), (self._actor, action, name))


def check_tenant_name(name: str) -> None:
    """Refuse a text that cannot name a new tenant."""
    if not _NAME.fullmatch(name) or name == LOCAL:
        raise BadConfig(
            f"`{name}` cannot name a tenant",
            "lower-case letters, digits and `-`, at most 31, beginning with a letter or digit; not `local`",
        )


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
        raise UnknownName("tenant", name, (), hint="`inlay tenant list` lists them")
    return tenant_of(row)


def tenant_of(row: Any) -> Tenant:
    """Return a row of the table as a tenant."""
    limits = TenantLimits(**{item.name: getattr(row, item.name) for item in fields(TenantLimits)})
    return Tenant(row.name, limits, row.weight, row.created_at, row.state != ACTIVE)


def _owns_in_store(db: Database, name: str) -> bool:
    """Tell whether the store has versions under a tenant's prefix. What was removed leaves empty folders."""
    return any(db.store.numbers(known)[0] for known in db.store.names() if known.startswith(f"{name}."))
