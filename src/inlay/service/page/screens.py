"""A visit to a page: who asks, what was sent, and the answer as HTML, a redirect, or an explained refusal.

Every handler takes a `PageCall` and returns a response. Redirects after a change carry a code of `SAID`, never words
from the address, so nobody can put words of their own on a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any
from urllib.parse import quote, urlencode

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from inlay.errors import InlayError
from inlay.service.page.desk import Desk
from inlay.service.page.explaining import Explained, explain
from inlay.service.page.rendering import render

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
    "live": "Done: that version answers from now on. Going back is always possible here.",
    "policy": "Saved.",
    "deleted": "The task is being erased.",
    "revoked": "The key is revoked.",
    "limits": "The limits are saved.",
    "tenant": "The tenant is added. Make it a key, and it can begin.",
    "signed-out": "You are signed out.",
}


@dataclass(frozen=True)
class PageCall:
    """A visit to a page by somebody who may see it; `form` is what was sent with a post."""

    request: Request
    desk: Desk
    form: FormData = field(default_factory=FormData)

    def text(self, name: str, default: str = "") -> str:
        """Return a field that was sent, or a parameter of the address; never a file."""
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
        """Answer with a page; `place` is where it stands in the main menu."""
        shown = {"error": None, "faults": {}} | dict(context)
        said = SAID.get(self.request.query_params.get("said", ""))
        return answer_html(template, shown | {"place": place, "viewer": self.desk.viewer, "said": said}, status)

    def explain(self, error: InlayError) -> Explained:
        """Return an error in the words of the page."""
        return explain(error, self.desk.secrets)


def answer_html(template: str, context: Mapping[str, Any], status: int = 200) -> Response:
    """Return a page with the headers that all pages have."""
    known = {"viewer": None, "place": "", "said": None, "error": None, "inlay_version": version("inlay")}
    return HTMLResponse(render(template, known | dict(context)), status, HEADERS)


def go_to(path: str, said: str | None = None) -> Response:
    """Send the browser to another page, after something was done."""
    if said is not None:
        path += ("&" if "?" in path else "?") + urlencode({"said": said})
    return RedirectResponse(path, 303, {"Cache-Control": "no-store"})


def task_path(name: str, rest: str = "") -> str:
    """Return the address of a task's page."""
    return f"/tasks/{quote(name, safe='')}{rest}"
