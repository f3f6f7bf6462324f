"""The page to label on: the rows a task is least sure of, corrections of them, and training again with those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote
from zlib import crc32

from starlette.responses import Response

from inlay.errors import InlayError
from inlay.service.page.screens import PageCall, go_to, task_path
from inlay.service.page.task_screens import head_of
from inlay.service.page.try_screen import say_answer
from inlay.service.state import Correction

_MOST_PICKS = 12
_MOST_LISTED = 1000
_MOST_OWN = 200
_NUM_ROWS = 20


async def show_label(call: PageCall) -> Response:
    """Show the rows that are worth labelling most."""
    task = head_of(call)
    error, rows = None, []
    if task["live"]:
        try:
            rows = [_describe_row(row) for row in await call.desk.suggestions(task["name"], _NUM_ROWS)]
        except InlayError as fault:
            error = call.explain(fault)
    words = "Rows it did not learn from, the least sure first. A right answer for one of them teaches it most."
    nothing = "Nothing to suggest: write texts of your own, on this page, and label those."
    if not task["live"]:
        nothing = "There is no live version yet. When there is one, the rows it is least sure of are shown here."
    return _show(
        call,
        task,
        rows,
        {"error": error, "asked_title": "What is right here?", "asked_words": words, "nothing": nothing},
    )


def _show(
    call: PageCall, task: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], context: Mapping[str, Any]
) -> Response:
    form = call.desk.label_form(task["name"])
    labels = task["labels"]
    latest = call.desk.corrections(task["name"])
    known = {
        "task": task,
        "rows": rows,
        "form": form,
        "takes_pair": form != "" and task["live"] is not None and call.desk.takes_pair(task["name"]),
        "picks": labels if form == "pick" and len(labels) <= _MOST_PICKS else [],
        "sets": labels if form == "set" else [],
        "known": labels[:_MOST_LISTED] if form == "pick" and len(labels) > _MOST_PICKS else [],
        "corrections": latest["count"],
        "latest": latest["items"][:10],
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
    task = head_of(call)
    labels = [str(label) for label in call.form.getlist("labels")]
    label = "|".join(labels) if call.text("save") == "set" else call.text("label").strip()
    version = task["live"]["version"] if task["live"] else None
    item = Correction(call.text("text"), label, call.text("pair") or None, call.text("answered") or None, version)
    call.desk.add_corrections(task["name"], [item])
    if call.request.headers.get("hx-request") != "true":
        return go_to(task_path(task["name"], "/label"))
    saved = _describe_row({"text": item.text, "pair": item.pair, "answer": label})
    saved["number"] = f"saved-{crc32(item.text.encode())}"
    words = {"asked_title": "", "asked_words": "", "saved": saved}
    return _show(call, task, [], words)


async def show_own(call: PageCall) -> Response:
    """Answer texts that were written, and show them with the least sure first."""
    task = head_of(call)
    texts = list(dict.fromkeys(line.strip() for line in call.text("texts").splitlines() if line.strip()))
    error, rows = None, []
    try:
        answers = await call.desk.predict([{"task": task["name"], "text": text} for text in texts[:_MOST_OWN]])
        rows = [_describe_own(text, answer) for text, answer in zip(texts, answers, strict=False)]
    except InlayError as fault:
        error = call.explain(fault)
    rows.sort(key=lambda row: -1.0 if row["confidence"] is None else row["confidence"])
    left = f" Only the first {_MOST_OWN} are shown." if len(texts) > _MOST_OWN else ""
    words = f"Your texts, the least sure first.{left}"
    shown = {
        "error": error,
        "asked_title": "What is right here?",
        "asked_words": words,
        "nothing": "Write at least one text.",
    }
    return _show(call, task, rows, shown)


def _describe_own(text: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    said = None if "error" in answer else say_answer(answer)
    sure = answer.get("probability")
    if sure is None and answer.get("probabilities"):
        sure = min(max(share, 1 - share) for share in answer["probabilities"].values())
    if said is not None and answer.get("labels") is not None:
        said = "|".join(answer["labels"])
    return _describe_row({"text": text, "answer": said, "confidence": sure})


async def train_again(call: PageCall) -> Response:
    """Train again with the corrections."""
    job = await call.desk.train_again(call.path("task"))
    return go_to(f"/jobs/{quote(job['id'], safe='')}")
