"""`inlay tenant add|list|limit|remove`: the tenants of a service and their limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import screen
from inlay.cli.app import make_typer
from inlay.cli.flags import JsonOption, StoreOption, parse_size
from inlay.cli.key import open_database
from inlay.cli.screen import Column, numbers
from inlay.errors import BadConfig

if TYPE_CHECKING:
    from inlay.service import Database, Tenant, TenantLimits

app = make_typer(no_args_is_help=True, help="Add, list, limit and remove the tenants of a service.")
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="lower-case letters, digits and `-`")]
_NO_LIMIT = "none"
_IN_BYTES = ("dataset_bytes", "stored_bytes")
_NONE_TOO = f"; `{_NO_LIMIT}`: no limit"
Tokens = Annotated[
    str | None, typer.Option("--tokens-per-minute", metavar="N", help=f"tokens answered per minute{_NONE_TOO}")
]
Jobs = Annotated[str | None, typer.Option("--queued-jobs", metavar="N", help=f"jobs in the queue{_NONE_TOO}")]
Rows = Annotated[str | None, typer.Option("--dataset-rows", metavar="N", help=f"rows of a dataset{_NONE_TOO}")]
Bytes = Annotated[
    str | None, typer.Option("--dataset-bytes", metavar="SIZE", help=f"size of a dataset, such as 1GB{_NONE_TOO}")
]
Labels = Annotated[str | None, typer.Option("--labels", metavar="N", help=f"labels of a task{_NONE_TOO}")]
Stored = Annotated[
    str | None,
    typer.Option("--stored-bytes", metavar="SIZE", help=f"size of all its datasets and versions{_NONE_TOO}"),
]
RequestRows = Annotated[
    str | None, typer.Option("--rows-per-request", metavar="N", help=f"rows of a request{_NONE_TOO}")
]
Weight = Annotated[
    float | None,
    typer.Option("--weight", metavar="W", help="share of the service when tenants compete  [default: 1 for a new one]"),
]


@app.command("add")
def add(
    name: NameArgument,
    tokens_per_minute: Tokens = None,
    queued_jobs: Jobs = None,
    dataset_rows: Rows = None,
    dataset_bytes: Bytes = None,
    labels: Labels = None,
    stored_bytes: Stored = None,
    rows_per_request: RequestRows = None,
    weight: Weight = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Add a tenant. Its tasks have names of their own, and no other tenant sees them."""
    from inlay.service import TenantLimits, Tenants

    given = (
        *(tokens_per_minute, queued_jobs, dataset_rows, dataset_bytes),
        *(labels, stored_bytes, rows_per_request),
    )
    limits = _changed(TenantLimits(), given)
    with open_database(store) as db:
        tenant = Tenants(db).add(name, limits, weight=1.0 if weight is None else weight)
    _show(tenant, as_json=json)
    if not json:
        screen.log(f"make its first key: inlay key make {name}", "dim")


@app.command("limit")
def limit(
    name: NameArgument,
    tokens_per_minute: Tokens = None,
    queued_jobs: Jobs = None,
    dataset_rows: Rows = None,
    dataset_bytes: Bytes = None,
    labels: Labels = None,
    stored_bytes: Stored = None,
    rows_per_request: RequestRows = None,
    weight: Weight = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Show a tenant's limits, and change those that are given. A running service applies them at once."""
    from inlay.service import Tenants

    given = (
        *(tokens_per_minute, queued_jobs, dataset_rows, dataset_bytes),
        *(labels, stored_bytes, rows_per_request),
    )
    with open_database(store) as db:
        tenants = Tenants(db)
        tenant = tenants.get(name)
        limits = _changed(tenant.limits, given)
        if limits != tenant.limits or weight is not None:
            tenant = tenants.set_limits(name, limits, weight=weight)
    _show(tenant, as_json=json)


@app.command("list")
def list_(store: StoreOption = None, json: JsonOption = False) -> None:
    """List the tenants and what they use."""
    from inlay.service import Tenants

    with open_database(store) as db:
        entries = [_describe(db, tenant) for tenant in Tenants(db).list()]
    if json:
        screen.emit_json({"tenants": entries})
        return
    columns = [
        Column("tenant", is_flexible=True),
        *numbers("keys", "queued jobs", "stored", "tokens per minute", "weight"),
        Column("since"),
    ]
    screen.emit_table(columns, [_row(entry) for entry in entries])


@app.command("remove")
def remove(
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", help="confirm: what is erased cannot be restored")] = False,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Erase a tenant: its keys, tasks, versions, datasets, answers and rows in the database.

    Its keys stop working at once. If a trainer is still working for it, a running service erases the rest afterwards.
    """
    from inlay.service import Tenants, remove_tenant

    with open_database(store) as db:
        tenant = next((each for each in Tenants(db).list() if each.name == name), None)
        if tenant is not None and not yes:
            raise BadConfig(
                f"this would erase everything of `{name}` for ever",
                f"to confirm: `inlay tenant remove {name} --yes`",
            )
        with screen.working(f"erasing {name}"):
            erased = remove_tenant(db, name)
    if json:
        done = None if erased is None else erased.to_json()
        screen.emit_json({"tenant": name, "state": "removing" if done is None else "removed", "erased": done})
    elif erased is None:
        screen.emit(f"{name} is locked out and will be erased")
        screen.log(
            "a trainer is still working for it: the running service will finish, or run this again later", "yellow"
        )
    else:
        versions, sets = screen.count(erased.num_versions, "version"), screen.count(erased.num_datasets, "dataset")
        screen.emit(f"removed {name}: {versions}, {sets}, {screen.count(erased.num_files, 'file')}")


def _changed(limits: TenantLimits, given: Sequence[str | None]) -> TenantLimits:
    """Return limits with the given ones replaced; `given` has an entry for each field, in order."""
    changed: dict[str, int | None] = {}
    for item, text in zip(dataclasses.fields(limits), given, strict=True):
        option = f"--{item.name.replace('_', '-')}"
        if text is None:
            continue
        if text == _NO_LIMIT:
            changed[item.name] = None
        elif item.name in _IN_BYTES:
            changed[item.name] = parse_size(text, option)
        else:
            digits = text.replace(",", "").replace("_", "")
            if not digits.isascii() or not digits.isdigit():
                raise BadConfig(f"`{option} {text}` is not a limit", f"write a whole number, or `{option} {_NO_LIMIT}`")
            changed[item.name] = int(digits)
    return dataclasses.replace(limits, **changed)


def _show(tenant: Tenant, *, as_json: bool) -> None:
    if as_json:
        screen.emit_json(tenant.to_json())
        return
    screen.emit(f"{tenant.name}: weight {tenant.weight:g}")
    for name, value in tenant.limits.to_json().items():
        shown = _NO_LIMIT if value is None else screen.size(value) if name in _IN_BYTES else screen.count(value)
        screen.emit(f"  {name.replace('_', ' ')}: {shown}")


def _describe(db: Database, tenant: Tenant) -> dict[str, Any]:
    """Return a tenant as data, with what it uses (None if it is being removed)."""
    from inlay.service import Keys, Workspace

    used = None if tenant.is_removing else Workspace(db, tenant.name).limits().to_json()["used"]
    return {**tenant.to_json(), "used": used, "num_keys": len(Keys(db).list(tenant.name))}


def _row(entry: Mapping[str, Any]) -> list[str]:
    used, tokens = entry["used"], entry["limits"]["tokens_per_minute"]
    return [
        entry["name"] if used is not None else f"{entry['name']} (being removed)",
        screen.count(entry["num_keys"]),
        "-" if used is None else screen.count(used["queued_jobs"]),
        "-" if used is None else screen.size(used["stored_bytes"]),
        _NO_LIMIT if tokens is None else screen.count(tokens),
        f"{entry['weight']:g}",
        entry["created_at"][:10],
    ]
