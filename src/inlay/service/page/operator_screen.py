"""The operator's pages: how busy the service is, and its tenants with their limits and keys."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from inlay.errors import InlayError
from inlay.reports import duration, show_bytes, show_number
from inlay.service.page.account_screen import LIMITS, SCOPES
from inlay.service.page.screens import PageCall, go_to
from inlay.service.state import Keys, TenantLimits, Tenants, Workspace
from inlay.service.web.account_routes import describe_operator
from inlay.service.web.app_state import AppState

_MOST_NUMBER = 10**15


async def show_operator(call: PageCall) -> Response:
    """Show load, queue, slots and tenants."""
    return await _show(call, {})


async def _show(call: PageCall, context: Mapping[str, Any], status: int = 200) -> Response:
    state = call.desk.state
    found = await describe_operator(state)
    stats = None if "problem" in found["engine"] else found["engine"]
    known = {
        "engine": stats is not None,
        "load": _list_load(stats, found["jobs"]),
        "queue": found["jobs"]["by_tenant"],
        "resident": [] if stats is None else list(reversed(stats["resident"])),
        "slots": 0 if stats is None else stats["num_slots"],
        "tenants": await asyncio.to_thread(add_uses, state, found["tenants"]),
        "name": "",
    }
    return call.show("operator.html", "Operator", known | dict(context), status)


def _list_load(stats: Mapping[str, Any] | None, queue: Mapping[str, Any]) -> list[tuple[str, str]]:
    jobs = [("Jobs waiting", show_number(queue["queued"])), ("Jobs training", show_number(queue["running"]))]
    if queue["queued"]:
        jobs.append(("Longest wait", duration(queue["oldest_wait_s"])))
    if stats is None:
        return jobs
    return [
        ("Rows in the queue", show_number(stats["queue_rows"])),
        ("Time to answer them", f"{1000 * stats['queue_s']:.0f} ms"),
        ("Tokens a second", show_number(round(stats["tokens_per_s"]))),
        ("Rows answered", show_number(stats["num_rows"])),
        ("Slots in use", f"{len(stats['resident'])} of {stats['num_slots']}"),
        ("Memory of the engine", show_bytes(stats["memory_bytes"])),
        ("Running for", duration(stats["uptime_s"])),
        ("Backbone", stats["backbone"]),
        *jobs,
    ]


def add_uses(state: AppState, tenants: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tenants with how many tasks and keys they have, what is stored, and the rows they asked today."""
    return [{**tenant, **_find_uses(state, str(tenant["name"]))} for tenant in tenants]


def _find_uses(state: AppState, name: str) -> dict[str, Any]:
    nothing = {"rows_today": 0, "num_keys": 0, "num_tasks": 0, "stored_bytes": 0}
    try:
        workspace = Workspace(state.db, name)
        keys = [key for key in state.keys.list(name) if key.revoked_at is None]
        return {
            "rows_today": sum(item.rows for item in workspace.usage(1)),
            "num_keys": len(keys),
            "num_tasks": len(workspace.tasks(200).items),
            "stored_bytes": workspace.stored_bytes(),
        }
    except InlayError:  # it is being removed
        return nothing


async def add_tenant(call: PageCall) -> Response:
    """Add a tenant, and go to its page."""
    name = call.text("name").strip()
    try:
        Tenants(call.desk.state.db).add(name)
    except InlayError as error:
        explained = call.explain(error)
        words = explained.detail if explained.hint is None else f"{explained.detail}; {explained.hint}"
        return await _show(call, {"faults": {"name": words}, "name": name}, explained.status)
    return go_to(f"/operator/tenants/{quote(name, safe='')}", "tenant")


def show_tenant(call: PageCall) -> Response:
    """Show a tenant's limits and keys."""
    return _show_tenant(call, {})


def _show_tenant(call: PageCall, context: Mapping[str, Any], status: int = 200) -> Response:
    tenant = Tenants(call.desk.state.db).get(call.path("tenant")).to_json()
    limits = tenant["limits"]
    written = {name: "" if limits[name] is None else str(limits[name]) for name, _ in LIMITS}
    written |= {"weight": f"{tenant['weight']:g}"}
    written |= {name: call.text(name) for name in written if name in call.form}
    known = {
        "tenant": tenant,
        "limits": [(name, words, written[name]) for name, words in (*LIMITS, ("weight", "Share of the engine"))],
        "keys": [key.to_json() for key in call.desk.state.keys.list(tenant["name"])],
        "scopes": SCOPES,
        "made": None,
    }
    return call.show("tenant.html", "Operator", known | dict(context), status)


def save_limits(call: PageCall) -> Response:
    """Save a tenant's limits, or show which of them are no numbers."""
    limits: dict[str, int | None] = {}
    faults: dict[str, str] = {}
    for name, _ in LIMITS:
        written = call.text(name).strip().replace(",", "")
        if written and not (written.isascii() and written.isdigit() and int(written) <= _MOST_NUMBER):
            faults[name] = "Write a whole number, or nothing for no limit"
        limits[name] = int(written) if written and name not in faults else None
    try:
        weight = float(call.text("weight"))
    except ValueError:
        weight, faults["weight"] = 1.0, "Write a number, such as 1 or 2.5"
    if faults:
        return _show_tenant(call, {"faults": faults}, 422)
    try:
        Tenants(call.desk.state.db).set_limits(call.path("tenant"), TenantLimits(**limits), weight=weight)
    except InlayError as error:
        explained = call.explain(error)
        return _show_tenant(call, {"error": explained}, explained.status)
    return go_to(f"/operator/tenants/{quote(call.path('tenant'), safe='')}", "limits")


def make_tenant_key(call: PageCall) -> Response:
    """Make a key for a tenant and show it once."""
    name = call.text("name").strip()
    scopes = [scope for scope, _ in SCOPES if scope in call.form.getlist("scopes")]
    if not name or not scopes:
        words = "Say what the key is for" if not name else "Choose what the key may do"
        return _show_tenant(call, {"faults": {"name": words}}, 422)
    try:
        text = Keys(call.desk.state.db).make(call.path("tenant"), scopes, name)[1]
    except InlayError as error:
        explained = call.explain(error)
        return _show_tenant(call, {"error": explained}, explained.status)
    return _show_tenant(call, {"made": text})


def revoke_tenant_key(call: PageCall) -> Response:
    """End a tenant's key."""
    Keys(call.desk.state.db).revoke(call.path("key"), tenant=call.path("tenant"))
    return go_to(f"/operator/tenants/{quote(call.path('tenant'), safe='')}", "revoked")
