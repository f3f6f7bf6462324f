"""The pages that ask a task: to try a text on its versions, and to label rows and train again with the corrections."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from zlib import crc32

from starlette.responses import Response

from inlay.errors import InlayError
from inlay.reports import capitalize_first, percent, plural, show_number, write_client, write_curl
from inlay.service import views
from inlay.service.page.explaining import ExplainedError, explain_problem
from inlay.service.page.page_call import PageCall, go_to, job_path, task_path
from inlay.service.page.suggesting import sample_rows, suggest_rows
from inlay.service.page.task_screens import find_label_form, find_task, list_versions, takes_pair
from inlay.service.state import TRAIN, Correction, JobRequest

_MOST_VERSIONS = 6
_NUM_SAMPLES = 3
_MOST_PICKS = 12
_MOST_LISTED = 1000
_MOST_OWN = 200
_NUM_ROWS = 20
_ASKED_TITLE = "What is the right answer?"

# Trying a task


async def show_try(call: PageCall) -> Response:
    """Show the form for a text, with a few rows that the live version did not learn from."""
    task = find_task(call)
    samples: list[dict[str, Any]] = []
    with suppress(InlayError):  # nothing is known of the version's rows
        samples = sample_rows(call.workspace, task["name"], _NUM_SAMPLES)
    return call.show("try.html", "Tasks", _make_context(call, task) | {"samples": samples})


def _make_context(call: PageCall, task: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "task": task,
        "text": call.text("text"),
        "pair": call.text("pair"),
        "takes_pair": takes_pair(call.workspace, task["name"]),
        "answers": [],
        "samples": [],
        "older": "",
    }


async def ask_versions(call: PageCall) -> Response:
    """Ask the versions of a task about a text."""
    task = find_task(call)
    context = _make_context(call, task)
    text, pair = call.text("text"), call.text("pair") if context["takes_pair"] else None
    if not text.strip() or (pair is not None and not pair.strip()):
        error = ExplainedError("there is no text", "write one above, then ask", 422, "")
        return call.show("try.html", "Tasks", context | {"error": error}, 422)
    # the live version first, then one that the address names, then the newest others
    named = call.number("version")
    versions = sorted(
        list_versions(call.workspace, task["name"]),
        key=lambda version: (not version["is_live"], version["version"] != named, -version["version"]),
    )[:_MOST_VERSIONS]
    rows = [{"task": f"{task['name']}@{version['version']}", "text": text, "pair": pair} for version in versions]
    try:
        answers = await call.predict(rows)
    except InlayError as error:
        explained = call.explain(error)
        return call.show("try.html", "Tasks", context | {"error": explained}, explained.status)
    shown = []
    for version, answer in zip(versions, answers, strict=True):
        shown.append(_describe_answer(answer) | {"version": version["version"], "is_live": version["is_live"]})
    more = task["num_versions"] - len(versions)
    address = f"{call.request.url.scheme}://{call.request.url.netloc}"  # as this browser knows the service
    needs_key = call.identity.key is not None
    context |= {
        "answers": shown,
        "older": f"{plural(more, 'older version')} left out." if more > 0 else "",
        "curl": write_curl(address, task["name"], text, pair, needs_key=needs_key),
        "python": write_client(address, task["name"], text, pair, needs_key=needs_key),
    }
    return call.show("try.html", "Tasks", context)


def _describe_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer in words for people, or what went wrong."""
    if "error" in answer:
        return {"says": "", "answer": {}, "more": "", "error": explain_problem(answer["error"])}
    more = ""
    if not answer.get("probabilities") and answer.get("probability") is not None:
        more = capitalize_first(f"{percent(answer['probability'])} sure")
    shown = {"probabilities": answer.get("probabilities")}
    return {"says": _say_answer(answer), "answer": shown, "more": more, "error": None}


def _say_answer(answer: Mapping[str, Any]) -> str:
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


# Labelling


async def show_label(call: PageCall) -> Response:
    """Show the rows that are worth labelling most."""
    task = find_task(call)
    error, rows = None, []
    if task["live"]:
        try:
            found = await asyncio.to_thread(suggest_rows, call.workspace, task["name"], _NUM_ROWS)
            rows = [_describe_row(row) for row in found]
        except InlayError as fault:
            error = call.explain(fault)
    words = "Rows that it did not learn from, the least sure first. It learns most from right answers to these."
    nothing = "No rows to suggest. Write texts of your own below, and label those."
    if not task["live"]:
        nothing = "There is no live version yet. When there is one, the rows it is least sure of are shown here."
    context = {"error": error, "asked_title": _ASKED_TITLE, "asked_words": words, "nothing": nothing}
    return _show_label(call, task, rows, context)


def _show_label(
    call: PageCall, task: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], context: Mapping[str, Any]
) -> Response:
    workspace, name, labels = call.workspace, task["name"], task["labels"]
    form = find_label_form(workspace, name)
    known = {
        "task": task,
        "rows": rows,
        "form": form,
        "takes_pair": form != "" and task["live"] is not None and takes_pair(workspace, name),
        "picks": labels if form == "pick" and len(labels) <= _MOST_PICKS else [],
        "sets": labels if form == "set" else [],
        "known": labels[:_MOST_LISTED] if form == "pick" and len(labels) > _MOST_PICKS else [],
        "corrections": workspace.num_feedback(name),
        "latest": [item.to_json() for item in workspace.feedback(name, 10).items],
        "saved": None,
        "own": call.text("texts"),
        "nothing": "",
    }
    return call.show("label.html", "Tasks", known | dict(context))


def _describe_row(row: Mapping[str, Any]) -> dict[str, Any]:
    said = row.get("answer")
    return {
        "text": row["text"],
        "pair": row.get("pair"),
        "answer": said,
        "answered_set": [] if said is None else str(said).split("|"),
        "confidence": row.get("confidence"),
        "expected": row.get("expected"),
        "line": row.get("line"),
    }


async def save_label(call: PageCall) -> Response:
    """Keep the right answer of one row."""
    task = find_task(call)
    labels = [str(label) for label in call.form.getlist("labels")]
    label = "|".join(labels) if call.text("save") == "set" else call.text("label").strip()
    version = task["live"]["version"] if task["live"] else None
    item = Correction(call.text("text"), label, call.text("pair") or None, call.text("answered") or None, version)
    call.workspace.add_feedback(task["name"], [item])
    if call.request.headers.get("hx-request") != "true":
        return go_to(task_path(task["name"], "/label"))
    saved = _describe_row({"text": item.text, "pair": item.pair, "answer": label})
    saved["number"] = f"saved-{crc32(item.text.encode())}"
    return _show_label(call, task, [], {"asked_title": "", "asked_words": "", "saved": saved})


async def show_own(call: PageCall) -> Response:
    """Answer texts that the person wrote, and show them with the least sure first."""
    task = find_task(call)
    texts = list(dict.fromkeys(line.strip() for line in call.text("texts").splitlines() if line.strip()))
    error, rows = None, []
    try:
        answers = await call.predict([{"task": task["name"], "text": text} for text in texts[:_MOST_OWN]])
        rows = [_describe_own(text, answer) for text, answer in zip(texts, answers, strict=False)]
    except InlayError as fault:
        error = call.explain(fault)
    rows.sort(key=lambda row: -1.0 if row["confidence"] is None else row["confidence"])
    left = f" Only the first {_MOST_OWN} are shown." if len(texts) > _MOST_OWN else ""
    words, nothing = f"Your texts, the least sure first.{left}", "Write at least one text."
    context = {"error": error, "asked_title": _ASKED_TITLE, "asked_words": words, "nothing": nothing}
    return _show_label(call, task, rows, context)


def _describe_own(text: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    said = None if "error" in answer else _say_answer(answer)
    sure = answer.get("probability")
    if sure is None and answer.get("probabilities"):
        sure = min(max(share, 1 - share) for share in answer["probabilities"].values())
    if said is not None and answer.get("labels") is not None:
        said = "|".join(answer["labels"])
    return _describe_row({"text": text, "answer": said, "confidence": sure})


async def train_again(call: PageCall) -> Response:
    """Train the task again with its corrections."""
    request = JobRequest(TRAIN, call.path("task"))
    job = await asyncio.to_thread(views.submit_training, call.workspace, request, corrections=True)
    return go_to(job_path(job.id))
