"""The page to compare two versions on: their difference, the rows that changed, and what is live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from inlay.errors import InlayError
from inlay.reports import is_share, show_number
from inlay.service.page.drawings import draw_difference
from inlay.service.page.explaining import Explained
from inlay.service.page.screens import PageCall, go_to, task_path
from inlay.service.page.task_screens import head_of

_VERDICTS = {"better": ("good", "better"), "worse": ("bad", "worse"), "no-difference": ("", "no clear difference")}


async def show_compare(call: PageCall) -> Response:
    """Compare two versions: those of the address, or the live one with the newest other."""
    return await _show(call, None)


async def _show(call: PageCall, error: Explained | None) -> Response:
    task = head_of(call)
    versions = list(reversed(call.desk.versions(task["name"])))
    alias = call.desk.alias(task["name"])
    live = task["live"]["version"] if task["live"] else 0
    first, second = _choose(call, versions, live)
    found = None
    if first != second:
        try:
            found = _describe(await call.desk.compare(task["name"], first, second), live)
        except InlayError as fault:
            error = error or call.explain(fault)
    context = {
        "task": task,
        "versions": versions,
        "a": first,
        "b": second,
        "found": found,
        "live": live,
        "etag": alias["etag"] if alias else "",
        "history": call.desk.history(task["name"]),
        "error": error,
    }
    return call.show("compare.html", "Tasks", context, 200 if error is None else error.status)


def _choose(call: PageCall, versions: Sequence[Mapping[str, Any]], live: int) -> tuple[int, int]:
    numbers = [version["version"] for version in versions]
    first = call.number("a") if call.number("a") in numbers else live or (numbers[-1] if numbers else 0)
    others = [number for number in numbers if number != first]
    second = call.number("b") if call.number("b") in numbers else (others[0] if others else first)
    if first == second and others:
        second = others[0]
    assert first is not None
    assert second is not None
    return (first, second) if call.number("a") else (min(first, second), max(first, second))


def _describe(found: Mapping[str, Any], live: int) -> dict[str, Any]:
    """Return a comparison with what is said and drawn of it."""
    look, verdict = _VERDICTS[found["verdict"]]
    first, second = found["a"], found["b"]
    gain = found.get("gain", found["difference"])
    low, high = found["interval"]
    sign = 1 if gain * found["difference"] >= 0 else -1  # of metrics like an error, less is better
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
        "words": _say(found),
        "better": better,
        "difference_words": _points(found["difference"], found["metric"]),
        "interval_words": f"{_points(low, found['metric'])} to {_points(high, found['metric'])}",
        "plot": draw_difference(bounds[0], gain, bounds[1]),
        "movable": [number for number in (first, second) if number != live],
    }


def _say(found: Mapping[str, Any]) -> str:
    """Say how sure the difference is."""
    chance = found["p_value"]
    rows = f"Both answered the same {show_number(found['num_rows'])} rows"
    if chance is None:
        return f"{rows}."
    if chance >= 0.5:
        return f"{rows}. A difference like this one comes about by chance most of the time."
    often = max(2, round(1 / max(chance, 1e-4)))
    times = "less than once in 10,000 times" if chance < 1e-4 else f"about once in {show_number(often)} times"
    return f"{rows}. A difference as large as this one would come about by chance {times}."


def _points(value: float, metric: str) -> str:
    sign = "+" if value > 0 else "−" if value < 0 else "±"
    if is_share(metric):
        return f"{sign}{100 * abs(value):.1f} points"
    return f"{sign}{abs(value):.3f}"


async def move_live(call: PageCall) -> Response:
    """Make a version the live one, if what is live is still what the person saw."""
    number = call.number("version")
    etag = call.text("etag").strip('"')
    try:
        await call.desk.move_live(call.path("task"), number or 0, int(etag) if etag.isdigit() else None)
    except InlayError as error:
        return await _show(call, call.explain(error))
    return go_to(task_path(call.path("task"), "/compare"), "live")
