"""Pages about tenants: one's own limits, use and keys, and, for the operator, the load and all tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from inlay.errors import InlayError
from inlay.reports import duration, show_bytes, show_number
from inlay.service.page.drawings import draw_days
from inlay.service.page.page_call import PageCall, go_to
from inlay.service.page.sign_in import SESSION_S, with_session
from inlay.service.page.task_screens import count_days, list_usage
from inlay.service.state import Keys, Sessions, TenantLimits, Tenants, Workspace
from inlay.service.web.account_routes import describe_operator
from inlay.service.web.app_state import AppState
from inlay.service.web.identity import Identity

_LIMITS = (
    ("tokens_per_minute", "Tokens (pieces of words) a minute"),
    ("rows_per_request", "Rows in one request"),
    ("queued_jobs", "Jobs in the queue"),
    ("dataset_rows", "Rows of a file"),
    ("dataset_bytes", "Size of a file"),
    ("labels", "Labels of a task"),
    ("stored_bytes", "Stored on the disk"),
)
_SCOPES = (
    ("predict", "Get answers from tasks"),
    ("train", "Upload, train, correct, change what is live"),
    ("admin", "Make and revoke keys, delete tasks"),
)
_DAYS = 30
_DAY_S = 86400.0
_MOST_NUMBER = 10**15

# One's own account


def show_account(call: PageCall, context: Mapping[str, Any] | None = None, status: int = 200) -> Response:
    """Show limits, use and keys; `context` has what the page shows after a form was sent."""
    workspace = call.workspace
    found = workspace.limits().to_json()
    known = {
        "limits": [_describe_limit(name, words, found) for name, words in _LIMITS],
        "columns": draw_days(count_days(list_usage(workspace, _DAYS), _DAYS)),
        "keys": _list_keys(call.state, workspace.name) if "admin" in call.scopes else [],
        "scopes": _SCOPES,
        "made": None,
        "now_signed_in": False,
    }
    return call.show("account.html", "Account", known | dict(context or {}), status)


def _describe_limit(name: str, words: str, found: Mapping[str, Any]) -> dict[str, Any]:
    most, used = found["limits"][name], found["used"].get(name)
    write = show_bytes if name.endswith("bytes") else show_number
    if most is None:
        shown = "no limit" if used is None else f"{write(used)}, no limit"
    else:
        shown = write(most) if used is None else f"{write(used)} of {write(most)}"
    return {"words": words, "shown": shown, "used": used, "most": most}


def make_key(call: PageCall) -> Response:
    """Make a key and show it once. The service's first key gets all scopes, and signs this browser in."""
    name = call.text("name").strip()
    scopes = [scope for scope, _ in _SCOPES if scope in call.form.getlist("scopes")]
    is_first = call.identity.key is None
    if is_first:
        scopes = [scope for scope, _ in _SCOPES]
    faults = {} if name else {"name": "Say what the key is for"}
    if not scopes:
        faults["name"] = "Choose what the key may do"
    if faults:
        return show_account(call, {"faults": faults}, 422)
    days = call.number("days")
    try:
        expires_at = None if days is None else call.state.db.now() + days * _DAY_S
        key, text = _keys(call).make(call.workspace.name, scopes, name, expires_at)
    except InlayError as error:
        explained = call.explain(error)
        return show_account(call, {"error": explained}, explained.status)
    if not is_first:
        return show_account(call, {"made": text})
    token = Sessions(call.state.db).begin(key, SESSION_S)
    signed_in = replace(call, identity=Identity.of_key(call.state, key))
    return with_session(call.request, token, show_account(signed_in, {"made": text, "now_signed_in": True}))


def revoke_key(call: PageCall) -> Response:
    """Revoke a key of the tenant."""
    _keys(call).revoke(call.path("key"), tenant=call.workspace.name)
    return go_to("/account", "revoked")


def _keys(call: PageCall) -> Keys:
    return Keys(call.state.db, call.workspace.actor)


def _list_keys(state: AppState, tenant: str) -> list[dict[str, Any]]:
    return [key.to_json() for key in state.keys.list(tenant)]


# The operator


async def show_operator(call: PageCall, context: Mapping[str, Any] | None = None, status: int = 200) -> Response:
    """Show load, queue, slots and tenants."""
    state = call.state
    found = await describe_operator(state)
    names = [tenant["name"] for tenant in found["tenants"]]
    uses = await asyncio.to_thread(lambda: [_find_uses(state, name) for name in names])
    stats = None if "problem" in found["engine"] else found["engine"]
    known = {
        "engine": stats is not None,
        "load": _list_load(stats, found["jobs"]),
        "queue": found["jobs"]["by_tenant"],
        "resident": [] if stats is None else list(reversed(stats["resident"])),
        "slots": 0 if stats is None else stats["num_slots"],
        "tenants": [{**tenant, **use} for tenant, use in zip(found["tenants"], uses, strict=True)],
        "name": "",
    }
    return call.show("operator.html", "Operator", known | dict(context or {}), status)


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


def _find_uses(state: AppState, name: str) -> dict[str, Any]:
    """Return the rows that a tenant asked today, its tasks and keys, and what it stores."""
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
        return {"rows_today": 0, "num_keys": 0, "num_tasks": 0, "stored_bytes": 0}


async def add_tenant(call: PageCall) -> Response:
    """Add a tenant, and go to its page."""
    name = call.text("name").strip()
    try:
        Tenants(call.state.db).add(name)
    except InlayError as error:
        explained = call.explain(error)
        words = explained.detail if explained.hint is None else f"{explained.detail}; {explained.hint}"
        return await show_operator(call, {"faults": {"name": words}, "name": name}, explained.status)
    return go_to(_tenant_path(name), "tenant")


def show_tenant(call: PageCall, context: Mapping[str, Any] | None = None, status: int = 200) -> Response:
    """Show a tenant's limits and keys."""
    tenant = Tenants(call.state.db).get(call.path("tenant")).to_json()
    limits = tenant["limits"]
    written = {name: "" if limits[name] is None else str(limits[name]) for name, _ in _LIMITS}
    written |= {"weight": f"{tenant['weight']:g}"}
    written |= {name: call.text(name) for name in written if name in call.form}
    known = {
        "tenant": tenant,
        "limits": [(name, words, written[name]) for name, words in (*_LIMITS, ("weight", "Share of the engine"))],
        "keys": _list_keys(call.state, tenant["name"]),
        "scopes": _SCOPES,
        "made": None,
    }
    return call.show("tenant.html", "Operator", known | dict(context or {}), status)


def save_limits(call: PageCall) -> Response:
    """Save a tenant's limits, or show which of them are not numbers."""
    limits: dict[str, int | None] = {}
    faults: dict[str, str] = {}
    for name, _ in _LIMITS:
        written = call.text(name).strip().replace(",", "")
        if written and not (written.isascii() and written.isdigit() and int(written) <= _MOST_NUMBER):
            faults[name] = "Write a whole number, or nothing for no limit"
        limits[name] = int(written) if written and name not in faults else None
    try:
        weight = float(call.text("weight"))
    except ValueError:
        weight, faults["weight"] = 1.0, "Write a number, such as 1 or 2.5"
    if faults:
        return show_tenant(call, {"faults": faults}, 422)
    try:
        Tenants(call.state.db).set_limits(call.path("tenant"), TenantLimits(**limits), weight=weight)
    except InlayError as error:
        explained = call.explain(error)
        return show_tenant(call, {"error": explained}, explained.status)
    return go_to(_tenant_path(call.path("tenant")), "limits")


def make_tenant_key(call: PageCall) -> Response:
    """Make a key for a tenant and show it once."""
    name = call.text("name").strip()
    scopes = [scope for scope, _ in _SCOPES if scope in call.form.getlist("scopes")]
    if not name or not scopes:
        words = "Say what the key is for" if not name else "Choose what the key may do"
        return show_tenant(call, {"faults": {"name": words}}, 422)
    try:
        text = Keys(call.state.db).make(call.path("tenant"), scopes, name)[1]
    except InlayError as error:
        explained = call.explain(error)
        return show_tenant(call, {"error": explained}, explained.status)
    return show_tenant(call, {"made": text})


def revoke_tenant_key(call: PageCall) -> Response:
    """Revoke a tenant's key."""
    Keys(call.state.db).revoke(call.path("key"), tenant=call.path("tenant"))
    return go_to(_tenant_path(call.path("tenant")), "revoked")


def _tenant_path(name: str) -> str:
    return f"/operator/tenants/{quote(name, safe='')}"
