"""Errors as documents over HTTP (RFC 9457), in words that suit a caller of the API.

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
    """What is wrong with one field of a request, such as `rows[3].text` or `query.limit`."""

    field: str
    detail: str


class RequestRefused(InlayError):
    """A request that is not carried out, with its status, the fields at fault and the headers of its answer."""

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
    """Return the refusal of a request whose fields are at fault."""
    first = faults[0]
    more = f"; and {len(faults) - 1} more" if len(faults) > 1 else ""
    hint = "`errors` lists the fields; `/docs` has what each of them takes"
    return RequestRefused(f"`{first.field}`: {first.detail}{more}", hint, code="bad-fields", status=422, faults=faults)


def unforeseen() -> RequestRefused:
    """Return what a caller hears of an error that nobody foresaw."""
    return RequestRefused(
        "the service failed in a way nobody foresaw",
        "try again; the operator finds the reason in the log under this `request_id`",
        code="unforeseen",
        status=500,
    )


def refuse_row(problem: Mapping[str, Any], field_name: str) -> RequestRefused:
    """Return the refusal of a request for the problem of one of its rows."""
    fault = FieldFault(field_name, problem["detail"])
    return RequestRefused(
        problem["detail"], problem["hint"], code=problem["code"], status=problem["status"], faults=[fault]
    )


def make_problem(error: InlayError, request_id: str, secrets: Secrets | None = None) -> Problem:
    """Return the problem that an error is to a caller of the API."""
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
    """Return an error as the part of a problem that does not belong to a request: that of a row, or of a job."""
    return describe_words(error.code, error.http_status, error.message, error.hint, secrets)


def describe_words(
    code: str, status: int, message: str, hint: str | None, secrets: Secrets | None = None
) -> dict[str, Any]:
    """Return a problem from the parts of an error, without what a caller must not see."""
    if code == UnknownName.code:
        hint = _where_names_are(message, hint)
    clean = _no_secrets if secrets is None else secrets.remove
    title = code.replace("-", " ").capitalize() if code else HTTPStatus(status).phrase
    return {
        "type": f"urn:inlay:problem:{code}",
        "title": title,
        "status": status,
        "detail": clean(message)[:_LONGEST_WORDS],
        "hint": None if hint is None else clean(speak_http(hint))[:_LONGEST_WORDS],
        "code": code,
    }


@dataclass(frozen=True)
class Secrets:
    """What is cut out of every problem: the folders of the server, and the prefix of its names in the store."""

    home: Path
    prefix: str = ""

    def of_tenant(self, name: str) -> Secrets:
        """Return what problems for a tenant must not show: its own names are told without their prefix."""
        return Secrets(self.home, "" if name in ("", LOCAL) else f"{name}.")

    def remove(self, words: str) -> str:
        """Return words without the server's folders; a file keeps its name."""
        home = str(self.home)
        if home in words:
            words = re.sub(rf"{re.escape(home)}(?:/(?:[^\s`:,;()]*/)?|(?![\w.-]))", "", words)
        if self.prefix:
            words = re.sub(rf"(?<![\w.-]){re.escape(self.prefix)}(?=[a-z0-9])", "", words)
        return words


def _no_secrets(words: str) -> str:
    return words


# What an unknown name is a name of -> where a tenant finds its own. A store's hint would list everybody's.
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


def _where_names_are(message: str, hint: str | None) -> str | None:
    found = _UNKNOWN.match(message)
    return hint if found is None or found[1] not in _LISTS else _LISTS[found[1]]


# Words of the command line -> words of the API, in this order.
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
        (r"a smaller `settings\.lr`", "a smaller `settings.lr`"),
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
# A part of a hint that still speaks of the command line is left out.
_COMMAND_LINE = re.compile(r"`(?:--|inlay )|--[a-z]|pip install|\.toml\b")


def speak_http(hint: str) -> str:
    """Return a hint in the words of the API."""
    for pattern, words in _WORDS:
        hint = pattern.sub(words, hint)
    parts = [part for part in hint.split("; ") if "operator's" in part or not _COMMAND_LINE.search(part)]
    return "; ".join(parts) or "`/docs` describes what the API takes"
