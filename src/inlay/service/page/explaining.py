"""Errors in the words of the pages: what is wrong, and what a person at a browser can do about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from inlay.errors import InlayError
from inlay.service.web.problems import Secrets, describe_error


class ExplainedError(NamedTuple):
    """An error in words for people: what went wrong and what to do, with the status and code of the answer."""

    detail: str
    hint: str | None
    status: int
    code: str


# Code of an error -> what to do, where the API's hint is for programs.
_HINTS = {
    "unknown-name": "it may have been deleted, or it belongs to somebody else",
    "unauthorized": "check that the whole key was copied; it may also have expired or been revoked",
    "forbidden": "sign in with a key that allows this, or ask for one",
    "live-moved": "somebody else changed what is live in the meantime: look at the page again",
    "unforeseen": "try again; whoever runs the service finds the reason in its log",
    "tenant-limit": "wait a moment and try again",
    "queue-full": "the service is busy: try again in a moment",
    "draining": "the service is restarting: try again in a moment",
    "wrong-origin": "open the page by its own address and try again",
}
# Words of the API -> words of the page. They are replaced in this order.
_WORDS = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"`settings\.lr`", "learning rate (under “More settings”)"),
        (r"`settings\.epochs`", "number of rounds (under “More settings”)"),
        (r"`settings\.class_weights`: `\"balanced\"`", "“Rare labels count as much”, under “More settings”"),
        (r"`settings\.max_length`", "longest text (under “More settings”)"),
        (r"`settings\.seed`", "seed (under “More settings”)"),
        (r"`settings\.size`", "size (under “More settings”)"),
        (r"name it with `text`", "choose it under “Text”"),
        (r"name it with `pair`", "choose it under “Second text”"),
        (r"name (it|another column) with `label`", r"choose \1 under “Right answer”"),
        (r"`kind`: `\w+`", "another answer under “Kind of answer”"),
        (r"\bkind `(\w+)`", r"kind `\1`"),
    )
)
_FOR_PROGRAMS = re.compile(
    r"`(?:GET|POST|PUT|DELETE|PATCH) |`/docs`|`errors` lists|`next_cursor`|`inlay |`settings\.|Authorization"
)


def explain(error: InlayError, secrets: Secrets | None = None) -> ExplainedError:
    """Return an error for a page, without paths of the server and hints for programs."""
    said = describe_error(error, secrets)
    return ExplainedError(said["detail"], _reword(said["code"], said["hint"]), said["status"], said["code"])


def explain_problem(problem: dict[str, object] | None) -> ExplainedError | None:
    """Return a stored problem (of a job, a dataset or a row) for a page."""
    if problem is None:
        return None
    code, hint, status = str(problem.get("code", "")), problem.get("hint"), problem.get("status", 400)
    detail = str(problem.get("detail") or problem.get("message") or "")
    hint = _reword(code, hint if isinstance(hint, str) else None)
    return ExplainedError(detail, hint, status if isinstance(status, int) else 400, code)


# Words of notes on rows -> words of the page.
_NOTES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (
            r"^split: ([\d,]+) train, ([\d,]+) dev rows\b.*",
            r"\1 rows are learned from, \2 chosen at random to judge by",
        ),
        (
            r"(\d+) dev texts are nearly the same as a training text",
            r"\1 texts to judge by are nearly the same as one that is learned from",
        ),
        (r"\b\d{4,}(?= (?:rows|texts|chosen))", lambda found: f"{int(found[0]):,}"),
        (r"^delimiter (`.*`)$", r"columns are set apart by \1"),
        (r"\b(?:dev|training) line (\d+)", r"line \1"),
        (r"\bdev texts?\b", "texts to judge by"),
        (r"\bdev rows?\b", "rows to judge by"),
        (r"\btraining rows\b", "rows to learn from"),
        (r"; (?:try )?`[^`]*settings[^`]*`.*$", ""),
    )
)


def plain_note(note: str) -> str:
    """Return a note on rows in plain words."""
    for pattern, words in _NOTES:
        note = pattern.sub(words, note)
    return note


def _reword(code: str, hint: str | None) -> str | None:
    if code in _HINTS:
        return _HINTS[code]
    if hint is None:
        return None
    for pattern, words in _WORDS:
        hint = pattern.sub(words, hint)
    parts = [part for part in hint.split("; ") if not _FOR_PROGRAMS.search(part)]
    return "; ".join(parts) or None
