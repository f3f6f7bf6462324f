"""The page of the tenant itself: its limits, its use, its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from inlay.errors import InlayError
from inlay.reports import show_bytes, show_number
from inlay.service.page.drawings import draw_days
from inlay.service.page.explaining import Explained
from inlay.service.page.screens import PageCall, go_to
from inlay.service.page.sign_in import SESSION_S, with_session
from inlay.service.page.task_screens import count_days

LIMITS = (
    ("tokens_per_minute", "Tokens (pieces of words) a minute"),
    ("rows_per_request", "Rows in one request"),
    ("queued_jobs", "Jobs in the queue"),
    ("dataset_rows", "Rows of a file"),
    ("dataset_bytes", "Size of a file"),
    ("labels", "Labels of a task"),
    ("stored_bytes", "Stored on the disk"),
)
SCOPES = (
    ("predict", "Ask its tasks"),
    ("train", "Upload, train, correct, change what is live"),
    ("admin", "Make and revoke keys, delete tasks"),
)
_DAYS = 30
_DAY_S = 86400.0


def show_account(call: PageCall) -> Response:
    """Show limits, use and keys."""
    return _show(call, {})


def _show(call: PageCall, context: Mapping[str, Any], status: int = 200) -> Response:
    found = call.desk.limits()
    known = {
        "limits": [_describe_limit(name, words, found) for name, words in LIMITS],
        "columns": draw_days(count_days(call.desk.usage(_DAYS), _DAYS)),
        "keys": call.desk.keys() if "admin" in call.desk.viewer.scopes else [],
        "scopes": SCOPES,
        "made": None,
        "now_signed_in": False,
    }
    return call.show("account.html", "Account", known | dict(context), status)


def _describe_limit(name: str, words: str, found: Mapping[str, Any]) -> dict[str, Any]:
    most, used = found["limits"][name], found["used"].get(name)
    write = show_bytes if name.endswith("bytes") else show_number
    limit = "no limit" if most is None else write(most)
    shown = limit if used is None else f"{write(used)} of {limit}" if most is not None else f"{write(used)}, no limit"
    return {"words": words, "shown": shown, "used": used, "most": most}


def make_key(call: PageCall) -> Response:
    """Make a key and show it once. The first of all gets every right, and signs this browser in."""
    name = call.text("name").strip()
    scopes = [scope for scope, _ in SCOPES if scope in call.form.getlist("scopes")]
    is_first = call.desk.viewer.key is None
    if is_first:
        scopes = [scope for scope, _ in SCOPES]
    faults = {} if name else {"name": "Say what the key is for"}
    if not scopes:
        faults["name"] = "Choose what the key may do"
    if faults:
        return _show(call, {"faults": faults}, 422)
    days = call.number("days")
    try:
        key, text = call.desk.make_key(name, scopes, None if days is None else days * _DAY_S)
    except InlayError as error:
        explained: Explained = call.explain(error)
        return _show(call, {"error": explained}, explained.status)
    if not is_first:
        return _show(call, {"made": text})
    token = call.desk.begin_session(key, SESSION_S)
    signed_in = PageCall(call.request, call.desk.as_key(key), call.form)
    return with_session(call.request, token, _show(signed_in, {"made": text, "now_signed_in": True}))


def revoke_key(call: PageCall) -> Response:
    """End a key of the tenant's."""
    call.desk.revoke_key(call.path("key"))
    return go_to("/account", "revoked")
