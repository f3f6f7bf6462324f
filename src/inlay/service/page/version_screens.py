"""Pages about versions: one with its scores, mistakes and confidence, and two compared.

The page of a version also shows the words on which an answer depends: each is left out in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from inlay.errors import InlayError
from inlay.explore import MOST_WORDS, leave_out, measure_effects, place_words
from inlay.reports import (
    SHOWN_LABELS,
    capitalize_first,
    choose_labels,
    draw_calibration,
    is_share,
    level,
    metric_words,
    plural,
    show_number,
    show_score,
)
from inlay.service import views
from inlay.service.page.drawings import draw_difference
from inlay.service.page.explaining import ExplainedError, explain_problem
from inlay.service.page.page_call import PageCall, go_to, task_path
from inlay.service.page.task_screens import find_label_form, find_task, list_versions, takes_pair

_HIDDEN = ("ece_uncalibrated",)
_STRONG, _CLEAR, _SLIGHT = 0.2, 0.05, 0.01
"""changes of a probability that a word's mark tells apart"""
_SIDES = (("dev", "On the rows it is judged by"), ("test", "On test rows"))
_VERDICTS = {"better": ("good", "better"), "worse": ("bad", "worse"), "no-difference": ("", "no clear difference")}

# One version


def show_version(call: PageCall, moved: Mapping[str, Any] | None = None) -> Response:
    """Show a version; with `expected` and `answer`, also the rows of that cell of the confusion matrix.

    `moved` has the words on which an answer depends, if they were asked for.
    """
    task, workspace = find_task(call), call.workspace
    number = int(call.path("version"))
    place = views.find_version(workspace, task["name"], number)
    version, form = place.row.to_json(), find_label_form(workspace, task["name"])
    report, no_report = None, None
    try:
        report = views.describe_report(workspace, task["name"], number)
    except InlayError as error:
        no_report = call.explain(error)
    expected, answer = call.request.query_params.get("expected"), call.request.query_params.get("answer")
    errors = None
    is_asked = expected is not None or answer is not None
    if report is not None and (is_asked or report["confusion"] is None):
        filters = {"expected": expected, "answer": answer}
        errors = views.describe_errors(workspace, place, filters, 50, call.text("after") or None)
    context = {
        "task": task,
        "version": version,
        "report": report,
        "no_report": no_report,
        "scores": _list_scores(version, report),
        "confusion": [] if report is None else _draw_confusion(call, report, number),
        "left_out": "",
        "calibration": None if report is None else draw_calibration(report["calibration"]),
        "errors": errors,
        "behind_title": _say_behind(expected, answer, is_number=form == "number"),
        "behind_next": _next_page(call, errors, expected, answer),
        "moved": moved,
        "can_move": form == "pick" and not takes_pair(workspace, task["name"]),
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
    """Return the scores on dev and test rows as (name, value, interval), the deciding metric first."""
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
        shown = [(capitalize_first(metric_words(metric)), show_score(scores.get(metric), metric), bounds)]
        shown += [(capitalize_first(metric_words(name)), show_score(scores[name], name), "") for name in names]
        found.append((words, shown))
    return found


def _draw_confusion(call: PageCall, report: Mapping[str, Any], number: int) -> list[list[dict[str, Any]]]:
    """Return the cells of the confusion matrix, with colours by their share of the row, and links to their rows."""
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
    """Show on which words of a text its answer depends."""
    return show_version(call, await _find_moved(call))


async def _find_moved(call: PageCall) -> dict[str, Any]:
    """Return the words of the text with their effects, or an error that explains why there are none."""
    reference = f"{call.path('task')}@{int(call.path('version'))}"
    text = call.text("text").strip()
    empty: dict[str, Any] = {"error": None, "words": [], "table": [], "left_out": "", "is_marked": False}
    if not text:
        return empty | {"error": ExplainedError("there is no text", "write one above", 422, "")}
    try:
        places = place_words(text)
        shorter = leave_out(text, places)
        answers = await call.predict([{"task": reference, "text": each} for each in (text, *shorter)])
    except InlayError as error:
        return empty | {"error": call.explain(error)}
    whole, others = answers[0], answers[1:]
    failed = next((answer["error"] for answer in answers if "error" in answer), None)
    if failed is not None:
        return empty | {"error": explain_problem(failed)}
    if whole.get("label") is None or not whole.get("probabilities"):
        return empty | {"error": ExplainedError("this works only for tasks that answer with one label", None, 422, "")}
    if not shorter:
        return empty | {"error": ExplainedError("a text of one word has no other words", "write a longer one", 422, "")}
    said = whole["label"]
    effects = measure_effects(
        text, places, whole["probabilities"][said], [answer["probabilities"][said] for answer in others]
    )
    words = [
        {"text": effect.text, "look": _look_of(effect.change), "title": f"{_write_change(-effect.change)} without it"}
        for effect in effects
    ]
    table = [
        {"text": effect.text, "without": effect.without, "change": _write_change(-effect.change)}
        for effect in sorted(effects, key=lambda effect: -abs(effect.change))[:20]
    ]
    is_grouped = len(places) == MOST_WORDS or any(" " in effect.text for effect in effects)
    left_out = "The text has many words, so some were left out together with their neighbours." if is_grouped else ""
    if not any(word["look"] for word in words):
        left_out = f"No single word decides: without any one of them the answer is still {whole['label']}. {left_out}"
    return empty | {
        "is_marked": any(word["look"] for word in words),
        "label": whole["label"],
        "probability": whole["probability"],
        "words": words,
        "table": table,
        "left_out": left_out,
    }


def _look_of(change: float) -> str:
    """Return the CSS class of a word: it supports the answer (`up`), or speaks against it (`down`)."""
    size = abs(change)
    strength = 3 if size >= _STRONG else 2 if size >= _CLEAR else 1 if size >= _SLIGHT else 0
    return f"{'up' if change > 0 else 'down'}{strength}" if strength else ""


def _write_change(change: float) -> str:
    """Write the change of a probability in percentage points."""
    sign = "+" if change > 0 else "−" if change < 0 else ""
    return f"{sign}{show_number(round(100 * abs(change), 1))} points"


# Two versions compared


async def show_compare(call: PageCall, error: ExplainedError | None = None) -> Response:
    """Compare two versions: those of the address, or the live one with the newest other."""
    task, workspace = find_task(call), call.workspace
    versions = list(reversed(list_versions(workspace, task["name"])))
    alias = workspace.alias(task["name"])
    live = task["live"]["version"] if task["live"] else 0
    first, second = _choose_two(call, versions, live)
    found = None
    if first != second:
        try:
            compared = await views.describe_comparison(workspace, call.state.engine, task["name"], (first, second))
            found = _describe_comparison(compared, live)
        except InlayError as fault:
            error = error or call.explain(fault)
    context = {
        "task": task,
        "versions": versions,
        "a": first,
        "b": second,
        "found": found,
        "live": live,
        "etag": alias.to_json()["etag"] if alias is not None else "",
        "history": [move.to_json() for move in workspace.history(task["name"])],
        "error": error,
    }
    return call.show("compare.html", "Tasks", context, 200 if error is None else error.status)


def _choose_two(call: PageCall, versions: Sequence[Mapping[str, Any]], live: int) -> tuple[int, int]:
    """Return the numbers of the versions to compare: those of the address, or the live one and the newest other."""
    numbers = [version["version"] for version in versions]
    first = call.number("a") if call.number("a") in numbers else live or (numbers[-1] if numbers else 0)
    others = [number for number in numbers if number != first]
    second = call.number("b") if call.number("b") in numbers else (others[0] if others else first)
    if first == second and others:
        second = others[0]
    assert first is not None
    assert second is not None
    return (first, second) if call.number("a") else (min(first, second), max(first, second))


def _describe_comparison(found: Mapping[str, Any], live: int) -> dict[str, Any]:
    """Return a comparison with its words and drawing."""
    look, verdict = _VERDICTS[found["verdict"]]
    first, second = found["a"], found["b"]
    gain = found.get("gain", found["difference"])
    low, high = found["interval"]
    sign = 1 if gain * found["difference"] >= 0 else -1  # an error, for example, is better if it is smaller
    bounds = sorted((sign * low, sign * high))
    better = second if found["verdict"] == "better" else first if found["verdict"] == "worse" else None
    title = (
        f"Version {second} is {verdict} than version {first}"
        if better
        else f"Versions {first} and {second} are about as good"
    )
    return {
        **found,
        "title": title,
        "look": look,
        "verdict_words": verdict,
        "words": _say_chance(found),
        "better": better,
        "difference_words": _write_difference(found["difference"], found["metric"]),
        "interval_words": f"{_write_difference(low, found['metric'])} to {_write_difference(high, found['metric'])}",
        "plot": draw_difference(bounds[0], gain, bounds[1]),
        "movable": [number for number in (first, second) if number != live],
    }


def _say_chance(found: Mapping[str, Any]) -> str:
    """Write how likely such a difference is by chance."""
    chance = found["p_value"]
    rows = f"Both answered the same {show_number(found['num_rows'])} rows"
    if chance is None:
        return f"{rows}."
    if chance >= 0.5:
        return f"{rows}. A difference like this one comes about by chance most of the time."
    often = max(2, round(1 / max(chance, 1e-4)))
    times = "less than once in 10,000 times" if chance < 1e-4 else f"about once in {show_number(often)} times"
    return f"{rows}. A difference as large as this one would come about by chance {times}."


def _write_difference(value: float, metric: str) -> str:
    sign = "+" if value > 0 else "−" if value < 0 else "±"
    if is_share(metric):
        return f"{sign}{100 * abs(value):.1f} points"
    return f"{sign}{abs(value):.3f}"


async def move_live(call: PageCall) -> Response:
    """Make a version live, if the live version is still the one that the person saw."""
    task, number = call.path("task"), call.number("version") or 0
    etag = call.text("etag").strip('"')
    if_match = int(etag) if etag.isdigit() else None
    try:
        reason = "chosen on the page"
        await views.go_live(call.workspace, call.state.engine, task, number, if_match=if_match, reason=reason)
    except InlayError as error:
        return await show_compare(call, call.explain(error))
    return go_to(task_path(task, "/compare"), "live")
