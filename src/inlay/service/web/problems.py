"""Errors as problem documents over HTTP (RFC 9457), in words for callers of the API.

An `InlayError` becomes a problem by its code and status. What always holds: no problem has a path of the server or the
name of another tenant, and no hint speaks of command lines or settings files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from inlay.errors import InlayError, UnknownName
from inlay.service.state import LOCAL

MEDIA_TYPE = "application/problem+json"
_LONGEST_WORDS = 1000  # letters of a detail or hint


@dataclass(frozen=True)
class FieldFault:
    """A field of a request, such as `rows[3].text` or `query.limit`, and what is wrong with it."""

    field: str
    detail: str


class RequestRefused(InlayError):
    """The refusal of a request, with its status, the fields at fault, and headers for the answer."""

    code = "bad-request"

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        *,
        code: str,
        status: int,
        faults: Sequence[FieldFault] = (),
    ) -> None:
        super().__init__(message, hint)
        self.code, self.http_status, self.faults = code, status, tuple(faults)
        self.headers: dict[str, str] = {}

    def with_headers(self, headers: Mapping[str, str]) -> RequestRefused:
        """Return the same refusal with these headers on its answer."""
        self.headers |= headers
        return self


@dataclass(frozen=True)
class Problem:
    """A problem document and how it is sent."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the document as JSON."""
        return msgspec.json.encode(self.body)


def bad_fields(faults: Sequence[FieldFault]) -> RequestRefused:
    """Return the refusal of a request with wrong fields."""
    first = faults[0]
    more = f"; and {len(faults) - 1} more" if len(faults) > 1 else ""
    hint = "`errors` lists the fields; `/docs` has what each of them takes"
    return RequestRefused(f"`{first.field}`: {first.detail}{more}", hint, code="bad-fields", status=422, faults=faults)


def unforeseen() -> RequestRefused:
    """Return the refusal that stands for an unexpected error: it tells nothing of the cause."""
    return RequestRefused(
        "the service failed unexpectedly",
        "try again; the operator finds the reason in the log under this `request_id`",
        code="unforeseen",
        status=500,
    )


def wrong_method(allowed: str) -> RequestRefused:
    """Return the refusal of a method that a route does not have."""
    return RequestRefused(
        "the route does not take this method",
        f"use {allowed.replace(',', ' or')}; `/docs` lists the routes",
        code="wrong-method",
        status=405,
    ).with_headers({"allow": allowed})


def refuse_row(problem: Mapping[str, Any], field_name: str) -> RequestRefused:
    """Return the refusal of a whole request because one of its rows has a problem."""
    fault = FieldFault(field_name, problem["detail"])
    return RequestRefused(
        problem["detail"], problem["hint"], code=problem["code"], status=problem["status"], faults=[fault]
    )


def make_problem(error: InlayError, request_id: str, secrets: Secrets | None = None) -> Problem:
    """Return an error as the problem document of a request."""
    status = error.http_status
    body = describe_error(error, secrets)
    body["status"] = status
    body["request_id"] = request_id
    faults = getattr(error, "faults", ())
    if faults:
        body["errors"] = [{"field": fault.field, "detail": fault.detail} for fault in faults]
    headers = dict(getattr(error, "headers", {}))
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(retry_after_s)))
    elif status in (429, 503):
        headers["retry-after"] = "1"
    if status == 401:
        headers["www-authenticate"] = 'Bearer realm="inlay"'
    return Problem(status, body, headers)


def describe_error(error: InlayError, secrets: Secrets | None = None) -> dict[str, Any]:
    """Return an error as a problem without the fields of a request: the problem of a row, or of a job."""
    return make_problem_body(error.code, error.http_status, error.message, error.hint, secrets)


def make_problem_body(
    code: str, status: int, message: str, hint: str | None, secrets: Secrets | None = None
) -> dict[str, Any]:
    """Return the parts of an error as a problem, without anything that a caller must not see."""
    if code == UnknownName.code:
        found = _UNKNOWN.match(message)
        hint = hint if found is None else _LISTS.get(found[1], hint)

    def clean(text: str) -> str:
        return text[:_LONGEST_WORDS] if secrets is None else secrets.remove(text)[:_LONGEST_WORDS]

    title = code.replace("-", " ").capitalize() if code else HTTPStatus(status).phrase
    return {
        "type": f"urn:inlay:problem:{code}",
        "title": title,
        "status": status,
        "detail": clean(message),
        "hint": None if hint is None else clean(speak_http(hint)),
        "code": code,
    }


@dataclass(frozen=True)
class Secrets:
    """What is removed from problems: the server's folders, and the prefix of a tenant's names in the store."""

    home: Path
    prefix: str = ""

    def of_tenant(self, name: str) -> Secrets:
        """Return the secrets of problems for this tenant, which sees its names without their prefix."""
        return Secrets(self.home, "" if name in ("", LOCAL) else f"{name}.")

    def remove(self, words: str) -> str:
        """Return words without the server's folders and the tenant's prefix; a file keeps its name."""
        home = str(self.home)
        if home in words:
            words = re.sub(rf"{re.escape(home)}(?:/(?:[^\s`:,;()]*/)?|(?![\w.-]))", "", words)
        if self.prefix:
            words = re.sub(rf"(?<![\w.-]){re.escape(self.prefix)}(?=[a-z0-9])", "", words)
        return words


# The kind of an unknown name -> where a tenant finds its own names. The store's hint would list those of all tenants.
_LISTS = {
    "task": "`GET /v1/tasks` lists your tasks",
    "version": "`GET /v1/tasks/{task}/versions` lists a task's versions",
    "dataset": "`GET /v1/datasets` lists your datasets",
    "job": "`GET /v1/jobs` lists your jobs",
    "key": "`GET /v1/keys` lists your keys",
    "tenant": "ask the operator of this service",
    "reference": "`GET /v1/tasks` lists your tasks",
}
_UNKNOWN = re.compile(r"no ([a-z]+)(?: named)? ")


# Words of the command line -> words of the API. They are replaced in this order.
_WORDS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"; or leave bad rows out with `--on-bad-row skip`|, or leave bad rows out with `--on-bad-row skip`", ""),
        (r"see what is wrong with them by `--on-bad-row refuse`", "see the dataset's `notes`"),
        (r"`--(?:min-confidence)`", "`min_confidence`"),
        (r"`--input`", "the upload"),
        (r"`--pair(?: (?:COLUMN|TEXT))?`", "`pair`"),
        (r"`--text(?: COLUMN)?`", "`text`"),
        (r"`--kind ([a-z]+)`", r"`kind`: `\1`"),
        (r"give (?:dev rows|\w+ rows in a file|them) with `--(?:dev|test)`", "add rows"),
        (r"(?:, )?or give \w+ rows in a file with `--(?:dev|test)`", ""),
        (r"`--(lr|epochs|size|method|seed)(?: ([\w.-]+))?`", r"`settings.\1`"),
        (r"`--max-length(?: \w+)?`", "`settings.max_length`"),
        (r"`--class-weights balanced`", '`settings.class_weights`: `"balanced"`'),
        (r"`--name`|`--task`", "`task`"),
        (r"`--label`", "`label`"),
        (r"`--set data\.metric=(\w+)`", r'`settings.metric`: `"\1"`'),
        (r"`(?:data|train|method)\.(\w+)`", r"`settings.\1`"),
        (r"`inlay tasks` lists (?:the tasks there are|them)", "`GET /v1/tasks` lists your tasks"),
        (r"`inlay tasks`", "`GET /v1/tasks`"),
        (r"; `inlay doctor` looks through the store", ""),
        (r"`inlay (?:verify|doctor)[^`]*`", "the operator's `inlay verify`"),
        (r"`inlay show[^`]*`", "`GET /v1/tasks/{task}/versions`"),
        (r"`inlay predict[^`]*`", "`POST /v1/predict`"),
        (r"`inlay train[^`]*`", "`POST /v1/jobs`"),
    )
)
# Parts of a hint that still name the command line are left out.
_COMMAND_LINE = re.compile(r"`(?:--|inlay )|--[a-z]|pip install|\.toml\b")


def speak_http(hint: str) -> str:
    """Return a hint in the words of the API."""
    for pattern, words in _WORDS:
        hint = pattern.sub(words, hint)
    parts = [part for part in hint.split("; ") if "operator's" in part or not _COMMAND_LINE.search(part)]
    return "; ".join(parts) or "`/docs` describes what the API takes"
