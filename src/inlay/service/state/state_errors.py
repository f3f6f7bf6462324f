"""The errors of the service's state that a caller can cause, with their HTTP statuses."""

from __future__ import annotations

from inlay.errors import InlayError, Unsupported


class Unauthorized(InlayError):
    """A key that is missing, unknown, revoked or expired. The error never says which."""

    code = "unauthorized"
    exit_status = 15
    http_status = 401

    def __init__(self) -> None:
        super().__init__("the key is not valid", "send a valid key; `inlay key make` makes one")


class Forbidden(InlayError):
    """A key without the scope that a call needs."""

    code = "forbidden"
    exit_status = 15
    http_status = 403

    def __init__(self, scope: str) -> None:
        super().__init__(f"the key lacks the scope `{scope}`", "use a key that has it, or ask for one")
        self.scope = scope


class Conflict(InlayError):
    """A call that does not fit the present state, such as a task that is being erased, or a dataset in use."""

    code = "conflict"
    exit_status = 16
    http_status = 409


class StaleLease(InlayError):
    """A write of a trainer that lost its cohort to another one."""

    code = "stale-lease"
    exit_status = 16
    http_status = 409

    def __init__(self, cohort: str, token: int) -> None:
        super().__init__(f"attempt {token} of cohort `{cohort}` has lost its lease", "stop this work")


class LiveMoved(InlayError):
    """An alias that was moved since the caller read it."""

    code = "live-moved"
    exit_status = 16
    http_status = 412

    def __init__(self, task: str) -> None:
        super().__init__(f"the live version of `{task}` has changed since you read it", "read it again, then decide")


class OverLimit(InlayError):
    """A limit of the tenant that a call would exceed; `limit` is its name in `TenantLimits`."""

    code = "over-limit"
    exit_status = 17

    def __init__(self, limit: str, asked: int, allowed: int) -> None:
        words = limit.replace("_", " ")
        super().__init__(f"{asked:,} is above the limit of {allowed:,} {words}", _LIMIT_HINTS[limit])
        self.limit, self.asked, self.allowed = limit, asked, allowed
        self.http_status = 429 if limit in _FREED_BY_WAITING else 413


_FREED_BY_WAITING = {"queued_jobs", "tokens_per_minute"}
_LIMIT_HINTS = {
    "queued_jobs": "wait until a job ends, or cancel one",
    "tokens_per_minute": "wait a little, or ask the operator for more",
    "dataset_rows": "send fewer rows, or ask the operator for more",
    "dataset_bytes": "send a smaller file, or ask the operator for more",
    "labels": "use fewer labels, or ask the operator for more",
    "stored_bytes": "delete datasets or tasks, or ask the operator for more",
    "rows_per_request": "send the rows in several requests",
}


class KeyReused(InlayError):
    """An idempotency key that was used before with another request."""

    code = "idempotency-key-reused"
    exit_status = 16
    http_status = 422

    def __init__(self) -> None:
        super().__init__(
            "this idempotency key was used for another request", "use a new key for every request that differs"
        )


class CallInFlight(InlayError):
    """An idempotency key whose first request is still being answered."""

    code = "request-in-flight"
    exit_status = 16
    http_status = 409

    def __init__(self) -> None:
        super().__init__("a request with this idempotency key is being answered", "send it again in a few seconds")


class NewerDatabase(Unsupported):
    """A database written by a later Inlay."""

    code = "newer-database"
    http_status = 503

    def __init__(self, revision: str) -> None:
        super().__init__(
            f"the service's database has the schema `{revision}`, which this Inlay does not know",
            "install the Inlay that wrote it, or a later one; or restore a backup made before the upgrade",
        )
