"""The page to try a task on: one text, all versions side by side, and the same request for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from inlay.errors import InlayError
from inlay.reports import first_large, percent, plural, show_number, write_client, write_curl
from inlay.service.page.explaining import Explained, explain_problem
from inlay.service.page.screens import PageCall
from inlay.service.page.task_screens import head_of

MOST_VERSIONS = 6
_NUM_SAMPLES = 3


async def show_try(call: PageCall) -> Response:
    """Show where a text is asked about."""
    task = head_of(call)
    return call.show("try.html", "Tasks", _context(call, task) | {"answers": [], "samples": _find_samples(call, task)})


def _context(call: PageCall, task: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "task": task,
        "text": call.text("text"),
        "pair": call.text("pair"),
        "takes_pair": call.desk.takes_pair(task["name"]),
        "samples": [],
        "older": "",
    }


def _find_samples(call: PageCall, task: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a few rows the live version did not learn from; none where nothing is known of them."""
    try:
        return list(call.desk.sample_rows(task["name"], _NUM_SAMPLES))
    except InlayError:
        return []


async def ask_versions(call: PageCall) -> Response:
    """Ask the versions of a task about a text."""
    task = head_of(call)
    context = _context(call, task) | {"answers": []}
    text, pair = call.text("text"), call.text("pair") if context["takes_pair"] else None
    if not text.strip() or (pair is not None and not pair.strip()):
        error = Explained("there is no text", "write one above, then ask", 422, "")
        return call.show("try.html", "Tasks", context | {"error": error}, 422)
    versions = _choose_versions(call, task)
    rows = [{"task": f"{task['name']}@{version['version']}", "text": text, "pair": pair} for version in versions]
    try:
        answers = await call.desk.predict(rows)
    except InlayError as error:
        explained = call.explain(error)
        return call.show("try.html", "Tasks", context | {"error": explained}, explained.status)
    shown = [
        describe_said(answer) | {"version": v["version"], "is_live": v["is_live"]}
        for v, answer in zip(versions, answers, strict=True)
    ]
    more = task["num_versions"] - len(versions)
    address, needs_key = call.desk.address, call.desk.viewer.key is not None
    context |= {
        "answers": shown,
        "older": f"{plural(more, 'older version')} left out." if more > 0 else "",
        "curl": write_curl(address, task["name"], text, pair, needs_key=needs_key),
        "python": write_client(address, task["name"], text, pair, needs_key=needs_key),
    }
    return call.show("try.html", "Tasks", context)


def _choose_versions(call: PageCall, task: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the versions to ask: the live one, one that the address names, and the newest others."""
    named = call.number("version")
    found = sorted(
        call.desk.versions(task["name"]),
        key=lambda version: (not version["is_live"], version["version"] != named, -version["version"]),
    )
    return found[:MOST_VERSIONS]


def describe_said(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an answer says in words for people, or what went wrong."""
    if "error" in answer:
        return {"says": "", "answer": {}, "more": "", "error": explain_problem(answer["error"])}
    return {
        "says": say_answer(answer),
        "answer": {"probabilities": answer.get("probabilities")},
        "more": _say_more(answer),
        "error": None,
    }


def say_answer(answer: Mapping[str, Any]) -> str:
    """Write an answer in words for people."""
    if answer.get("labels") is not None:
        return ", ".join(answer["labels"]) or "no label"
    if answer.get("value") is not None:
        return show_number(round(float(answer["value"]), 3))
    if answer.get("entities") is not None:
        return ", ".join(f"{entity['text']} ({entity['label']})" for entity in answer["entities"]) or "nothing marked"
    if "label" in answer:
        return answer["label"] if answer["label"] is not None else "not sure enough to say"
    return answer.get("answer") or "no answer in the text"


def _say_more(answer: Mapping[str, Any]) -> str:
    if not answer.get("probabilities") and answer.get("probability") is not None:
        return first_large(f"{percent(answer['probability'])} sure")
    return ""
