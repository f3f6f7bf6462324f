"""The page of one version: scores, what was taken for what, how sure it is, and the words that moved an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from inlay.errors import InlayError
from inlay.explore import MOST_WORDS, leave_out, measure_effects, place_words
from inlay.reports import (
    SHOWN_LABELS,
    choose_labels,
    draw_calibration,
    first_large,
    level,
    metric_words,
    plural,
    show_number,
    show_score,
)
from inlay.service.page.explaining import Explained, explain_problem
from inlay.service.page.screens import PageCall, task_path
from inlay.service.page.task_screens import head_of

_HIDDEN = ("ece_uncalibrated",)
_STRONG, _CLEAR, _SLIGHT = 0.2, 0.05, 0.01
"""changes of a probability that a word's mark tells apart"""
_SIDES = (("dev", "On the rows it is judged by"), ("test", "On test rows"))


def show_version(call: PageCall) -> Response:
    """Show a version; with `expected` and `answer`, also the rows behind that cell."""
    return _show_version(call, None)


def _show_version(call: PageCall, moved: Mapping[str, Any] | None) -> Response:
    task = head_of(call)
    number = int(call.path("version"))
    version, form = call.desk.version(task["name"], number), call.desk.label_form(task["name"])
    report, no_report = None, None
    try:
        report = call.desk.report(task["name"], number)
    except InlayError as error:
        no_report = call.explain(error)
    expected, answer = call.request.query_params.get("expected"), call.request.query_params.get("answer")
    errors = None
    is_asked = expected is not None or answer is not None
    if report is not None and (is_asked or report["confusion"] is None):
        errors = call.desk.errors(
            task["name"], number, {"expected": expected, "answer": answer}, call.text("after") or None
        )
    context = {
        "task": task,
        "version": version,
        "report": report,
        "no_report": no_report,
        "scores": _list_scores(version, report),
        "confusion": [] if report is None else _look_at_confusion(call, report, number),
        "left_out": "",
        "calibration": None if report is None else draw_calibration(report["calibration"]),
        "errors": errors,
        "behind_title": _say_behind(expected, answer, is_number=form == "number"),
        "behind_next": _next_page(call, errors, expected, answer),
        "moved": moved,
        "can_move": form == "pick" and not call.desk.takes_pair(task["name"]),
        "text": call.text("text"),
    }
    if report is not None and report["confusion"]:
        num_labels = len(report["confusion"]["labels"])
        if num_labels > SHOWN_LABELS:
            context["left_out"] = (
                f"The {SHOWN_LABELS} of {num_labels} labels that it confuses most; all are in the table below."
            )
            context["report"] = {**report, "confusion": {"labels": choose_labels(report)}}
    return call.show("version.html", "Tasks", context)


def _list_scores(
    version: Mapping[str, Any], report: Mapping[str, Any] | None
) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return the scores by side, each the one that decides first: name, value, bounds."""
    metric, found = version["metric"], []
    for side, words in _SIDES:
        scores = version["metrics"].get(side)
        if not scores:
            continue
        names = [name for name in scores if name not in (metric, *_HIDDEN)]
        bounds = ""
        if side == "dev" and report is not None and report["interval"] is not None:
            low, high = report["interval"]
            bounds = f"{show_score(low, metric)} to {show_score(high, metric)}"
        shown = [(first_large(metric_words(metric)), show_score(scores.get(metric), metric), bounds)]
        shown += [(first_large(metric_words(name)), show_score(scores[name], name), "") for name in names]
        found.append((words, shown))
    return found


def _look_at_confusion(call: PageCall, report: Mapping[str, Any], number: int) -> list[list[dict[str, Any]]]:
    """Return the cells of a confusion: the count, its colour by its share of the row, and where its rows are shown."""
    if report["confusion"] is None:
        return []
    labels, counts = report["confusion"]["labels"], report["confusion"]["counts"]
    shown = [labels.index(label) for label in choose_labels(report)]
    path = task_path(call.path("task"), f"/versions/{number}")
    rows = []
    for true in shown:
        cells, num_rows = [], sum(counts[true])
        for said in shown:
            count, is_right = counts[true][said], true == said
            strength = level(count, num_rows if is_right else num_rows / 3)
            query = urlencode({"expected": labels[true], "answer": labels[said]})
            words = f"{plural(count, 'row')} of {labels[true]} that it took for {labels[said]}"
            look = f"{'r' if is_right else 'w'}{strength}" if strength else ""
            cells.append({"count": count, "look": look, "href": f"{path}?{query}", "words": words})
        rows.append(cells)
    return rows


def _say_behind(expected: str | None, answer: str | None, *, is_number: bool) -> str:
    if expected is None and answer is None:
        return "The rows it missed by most" if is_number else "Rows it got wrong"
    if expected is not None and answer is not None:
        if expected == answer:
            return f"Rows of {expected} that it got right"
        return f"Rows of {expected} that it took for {answer}"
    return f"Rows of {expected} that it got wrong" if expected is not None else f"Rows it wrongly took for {answer}"


def _next_page(call: PageCall, errors: Mapping[str, Any] | None, expected: str | None, answer: str | None) -> str:
    if errors is None or not errors["next_cursor"]:
        return ""
    given = {"expected": expected, "answer": answer, "after": errors["next_cursor"]}
    kept = {name: value for name, value in given.items() if value is not None}
    return f"{call.request.url.path}?{urlencode(kept)}"


async def show_words(call: PageCall) -> Response:
    """Show which words of a text moved its answer."""
    reference = f"{call.path('task')}@{int(call.path('version'))}"
    text = call.text("text").strip()
    moved = await _find_moved(call, reference, text)
    return _show_version(call, moved)


async def _find_moved(call: PageCall, reference: str, text: str) -> dict[str, Any]:
    empty: dict[str, Any] = {"error": None, "words": [], "table": [], "left_out": "", "is_marked": False}
    if not text:
        return empty | {"error": Explained("there is no text", "write one above", 422, "")}
    try:
        places = place_words(text)
        shorter = leave_out(text, places)
        answers = await call.desk.predict([{"task": reference, "text": each} for each in (text, *shorter)])
    except InlayError as error:
        return empty | {"error": call.explain(error)}
    whole, others = answers[0], answers[1:]
    failed = next((answer["error"] for answer in answers if "error" in answer), None)
    if failed is not None:
        return empty | {"error": explain_problem(failed)}
    if whole.get("label") is None or not whole.get("probabilities"):
        return empty | {"error": Explained("only tasks that answer with one label can be asked so", None, 422, "")}
    if not shorter:
        return empty | {"error": Explained("a text of one word has no other words", "write a longer one", 422, "")}
    said = whole["label"]
    effects = measure_effects(
        text, places, whole["probabilities"][said], [answer["probabilities"][said] for answer in others]
    )
    words = [
        {"text": effect.text, "look": _look_of(effect.change), "title": f"{_points(-effect.change)} without it"}
        for effect in effects
    ]
    table = [
        {"text": effect.text, "without": effect.without, "change": _points(-effect.change)}
        for effect in sorted(effects, key=lambda effect: -abs(effect.change))[:20]
    ]
    grouped = len(places) == MOST_WORDS or any(" " in effect.text for effect in effects)
    left_out = "Neighbouring words were left out together, as there are many." if grouped else ""
    if not any(word["look"] for word in words):
        left_out = f"No single word decides: it says {whole['label']} without any of them too. {left_out}"
    return empty | {
        "is_marked": any(word["look"] for word in words),
        "label": whole["label"],
        "probability": whole["probability"],
        "words": words,
        "table": table,
        "left_out": left_out,
    }


def _look_of(change: float) -> str:
    """Return the class of a word's mark: the answer rests on it (`up`), or it speaks against the answer (`down`)."""
    size = abs(change)
    strength = 3 if size >= _STRONG else 2 if size >= _CLEAR else 1 if size >= _SLIGHT else 0
    return f"{'up' if change > 0 else 'down'}{strength}" if strength else ""


def _points(change: float) -> str:
    """Write a change of a share in points."""
    sign = "+" if change > 0 else "−" if change < 0 else ""
    return f"{sign}{show_number(round(100 * abs(change), 1))} points"
