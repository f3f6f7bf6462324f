"""Problem documents of a service (RFC 9457) as `InlayError`s, with the code, hint and exit status they have locally."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inlay import errors
from inlay.errors import InlayError

# Code -> exit status of the local error with this code.
_EXITS = {
    kind.code: kind.exit_status
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, InlayError)
}


class ServiceProblem(InlayError):
    """A request that a service refused or could not answer. `faults` names the fields at fault, if any."""

    code = "service-problem"

    def __init__(self, message: str, hint: str | None = None, *, code: str, status: int = 400) -> None:
        super().__init__(message, hint)
        self.code, self.http_status = code, status
        self.exit_status = _EXITS.get(code, InlayError.exit_status)
        self.request_id = ""
        self.faults: list[dict[str, str]] = []
        self.retry_after_s: float | None = None


def read_problem(body: Mapping[str, Any], *, status: int = 500) -> ServiceProblem:
    """Return the error that a problem document, a row's `error` or a job's `error` describes."""
    message = body.get("detail") or body.get("message") or f"the service answered {status}"
    error = ServiceProblem(
        str(message), body.get("hint"), code=str(body.get("code", "service-problem")), status=body.get("status", status)
    )
    error.request_id = str(body.get("request_id", ""))
    error.faults = list(body.get("errors", ()))
    return error


def unreachable(url: str, reason: str) -> ServiceProblem:
    """Return the error for a service that does not answer at all."""
    hint = "start one with `inlay serve`, or check the address"
    error = ServiceProblem(f"no service answers at {url}: {reason}", hint, code="unreachable", status=503)
    error.exit_status = 9
    return error
