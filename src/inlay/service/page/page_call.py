"""A request for a page, and its answer: HTML, a redirect, or an error explained.

Every handler takes a `PageCall` and returns a response. Redirects after a change carry a code of `SAID`, never words
from the address, so that nobody can make a page show words of their choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from inlay.errors import InlayError
from inlay.service.page.explaining import ExplainedError, explain
from inlay.service.page.rendering import render
from inlay.service.state import Workspace
from inlay.service.web.app_state import AppState
from inlay.service.web.identity import Identity
from inlay.service.web.predict_route import EngineQuestion, TaskRow, ask_engine, check_num_rows
from inlay.service.web.problems import RequestRefused, Secrets
from inlay.service.web.request_context import find_context, read_body

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
}
SAID = {
    "cancelled": "The job is being cancelled.",
    "live": "Done: that version answers from now on. You can go back here at any time.",
    "policy": "Saved.",
    "deleted": "The task is being deleted.",
    "revoked": "The key is revoked.",
    "limits": "The limits are saved.",
    "tenant": "The tenant is added. Make a key for it next.",
    "signed-out": "You are signed out.",
}
_FORM_TYPE = "application/x-www-form-urlencoded"
_MOST_FIELDS = 2000


@dataclass(frozen=True)
class PageCall:
    """A request for a page by somebody who may see it; `form` has the fields that were sent with a POST."""

    request: Request
    state: AppState
    identity: Identity
    form: FormData = field(default_factory=FormData)

    @property
    def workspace(self) -> Workspace:
        """The tenant's workspace."""
        return self.identity.workspace

    @property
    def scopes(self) -> frozenset[str]:
        """What this person may do."""
        return self.identity.scopes

    def text(self, name: str, default: str = "") -> str:
        """Return a field of the form, or a parameter of the address; never a file."""
        found = self.form.get(name, self.request.query_params.get(name, default))
        return found if isinstance(found, str) else default

    def number(self, name: str) -> int | None:
        """Return a whole number of the form or the address; None for anything else."""
        found = self.text(name).strip()
        return int(found) if found.isascii() and found.isdigit() and len(found) < 10 else None

    def path(self, name: str) -> str:
        """Return a part of the address."""
        return str(self.request.path_params[name])

    def show(self, template: str, place: str, context: Mapping[str, Any], status: int = 200) -> Response:
        """Answer with a page; `place` is the entry of the main menu that it belongs to."""
        shown = {"error": None, "faults": {}} | dict(context)
        said = SAID.get(self.request.query_params.get("said", ""))
        viewer = describe_viewer(self.identity)
        return answer_html(template, shown | {"place": place, "viewer": viewer, "said": said}, status)

    def explain(self, error: InlayError) -> ExplainedError:
        """Return an error in the words of the page."""
        return explain(error, Secrets(self.state.settings.home, self.identity.tenant.prefix))

    async def predict(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return an answer or a problem for each row, by the task or version that it names."""
        check_num_rows(self.workspace, len(rows), len(rows))
        question = EngineQuestion([TaskRow(row["task"], row["text"], row.get("pair")) for row in rows])
        request_id = find_context(self.request.scope).request_id
        return (await ask_engine(self.state, self.identity, question, self.request.receive, request_id))[0]


def describe_viewer(identity: Identity) -> dict[str, Any]:
    """Return what templates know of the person; `key` is the name of the key they signed in with, None without one."""
    key = identity.key
    name = None if key is None else key.name or f"inl_{key.id}"
    return {"tenant": identity.workspace.name, "scopes": identity.scopes, "key": name}


async def read_form(request: Request) -> FormData:
    """Return the fields of a form. Bytes that are not UTF-8 become the replacement character."""
    body = await read_body(request.scope, request.receive)
    if body and request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM_TYPE:
        raise RequestRefused(
            "this is not a form of the page", "use the page itself", code="wrong-content-type", status=415
        )
    try:
        text = body.decode("ascii", "replace")
        fields = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="replace")
    except ValueError:
        raise RequestRefused("the form has too many fields", "send fewer", code="too-large", status=413) from None
    return FormData([(name, value.replace("\0", "").replace("\r\n", "\n")) for name, value in fields])


def answer_html(template: str, context: Mapping[str, Any], status: int = 200) -> Response:
    """Return a page with the headers that all pages have."""
    known = {"viewer": None, "place": "", "said": None, "error": None, "inlay_version": version("inlay")}
    return HTMLResponse(render(template, known | dict(context)), status, HEADERS)


def go_to(path: str, said: str | None = None) -> Response:
    """Redirect the browser to another page after a change; `said` is a code of `SAID`."""
    if said is not None:
        path += ("&" if "?" in path else "?") + urlencode({"said": said})
    return RedirectResponse(path, 303, {"Cache-Control": "no-store"})


def task_path(name: str, rest: str = "") -> str:
    """Return the address of a task's page."""
    return f"/tasks/{quote(name, safe='')}{rest}"


def job_path(job_id: str) -> str:
    """Return the address of a job's page."""
    return f"/jobs/{quote(job_id, safe='')}"
