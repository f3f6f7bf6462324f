"""Problems of a service (RFC 9457) as errors of ours, with the same code, hint and exit status as on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inlay import errors
from inlay.errors import InlayError

# Code -> exit status of a command line, as the same error has here.
_EXITS = {
    kind.code: kind.exit_status
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, InlayError)
}


class ServiceProblem(InlayError):
    """A thing that a service refused or failed to do. `faults` names the fields at fault, if it is fields."""

    code = "service-problem"

    def __init__(self, message: str, hint: str | None = None, *, code: str, status: int = 400) -> None:
        super().__init__(message, hint)
        self.code, self.http_status = code, status
        self.exit_status = _EXITS.get(code, InlayError.exit_status)
        self.request_id = ""
        self.faults: list[dict[str, str]] = []
        self.retry_after_s: float | None = None


def read_problem(body: Mapping[str, Any], *, status: int = 500) -> ServiceProblem:
    """Return a problem document, the error of a row, or that of a job, as an error."""
    message = body.get("detail") or body.get("message") or f"the service answered {status}"
    error = ServiceProblem(
        str(message), body.get("hint"), code=str(body.get("code", "service-problem")), status=body.get("status", status)
    )
    error.request_id = str(body.get("request_id", ""))
    error.faults = list(body.get("errors", ()))
    return error


def unreachable(url: str, reason: str) -> ServiceProblem:
    """Return the error of a service that does not answer at all."""
    hint = "start one by `inlay serve`, or see that the address is right"
    error = ServiceProblem(f"no service answers at {url}: {reason}", hint, code="unreachable", status=503)
    error.exit_status = 9
    return error
