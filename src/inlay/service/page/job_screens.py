"""Pages about jobs: the list, and one job with its place in the queue, its learning curve and its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from inlay.reports import capitalize_first, duration, is_share, metric_words, plural, show_number, show_score
from inlay.service.page.explaining import explain_problem, plain_note
from inlay.service.page.page_call import PageCall, go_to, job_path
from inlay.service.page.rendering import nth, read_time
from inlay.service.page.training_cost import estimate_cost
from inlay.service.state import Workspace

_DOING = {"train": "Training", "batch": "Answering with", "erase": "Deleting"}
_WHAT = {"train": "Training", "batch": "Answering a file", "erase": "Deleting"}
# Kind of event -> its words in the log, where the trainer's own message is for programs.
_EVENTS = {
    "queued": "Put into the queue",
    "claimed": "Its turn has come",
    "published": "Stored as a version that never changes",
    "proved": "Loaded and checked: it answers as it did when it was stored",
    "live": "Live: it answers from now on",
    "cancelled": "Cancelled",
}
# Stage before the first round -> its name.
_STAGES = {"probe": "A first guess", "contrast": "A first sorting"}
_STEPS = (
    ("queued", "Waiting"),
    ("read", "Reading"),
    ("training", "Training"),
    ("published", "Storing"),
    ("live", "Live"),
)


def show_jobs(call: PageCall) -> Response:
    """Show all jobs, newest first."""
    page = call.workspace.jobs(limit=50, cursor=call.text("after") or None).to_json()
    jobs = [add_words(job) for job in page["items"]]
    return call.show("jobs.html", "Jobs", {"jobs": jobs, "more": page["next_cursor"]})


def show_job(call: PageCall) -> Response:
    """Show a job. With `seen` only newer events are listed, and the answer is empty (204) if nothing has changed."""
    job = call.workspace.job(call.path("job")).to_json()
    last, _, before = call.text("seen").partition(".")
    after = int(last) if last.isascii() and last.isdigit() and len(last) < 16 else 0
    events = _read_events(call.workspace, job["id"])
    progress = job["progress"] or {}
    marks = (job["state"], job["place"], job["cancel_requested"], progress.get("stage"), progress.get("epoch"))
    state = "-".join(map(str, marks))
    newest = max((event["id"] for event in events), default=0)
    if call.text("seen") and newest == after and state == before:
        return Response(status_code=204, headers={"Cache-Control": "no-store"})
    shown = add_words(job) | describe_progress(job, events)
    if not progress.get("epoch") and job["state"] in ("queued", "running"):
        shown["now"] += _say_cost(call, job, events)
    new = [_say_event(event, shown["metric"]) for event in events if event["id"] > after]
    return call.show("job.html", "Jobs", {"job": shown, "events": new, "seen": f"{newest}.{state}"})


def _read_events(workspace: Workspace, job_id: str) -> list[dict[str, Any]]:
    """Return the events of a job, oldest first: the first 5,000, if there are more."""
    found: list[dict[str, Any]] = []
    after = 0
    while True:
        events = workspace.events(job_id, after, 200)
        found += [event.to_json() for event in events]
        if len(events) < 200 or len(found) >= 5000:
            return found
        after = events[-1].id


def cancel_job(call: PageCall) -> Response:
    """Cancel a job."""
    call.workspace.cancel(call.path("job"))
    return go_to(job_path(call.path("job")), "cancelled")


def add_words(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job with its words in lists."""
    kind = job["kind"]
    said = {"doing": _DOING.get(kind, kind), "what": _WHAT.get(kind, kind)}
    took = ""
    if job["started_at"]:
        ended = read_time(job["ended_at"]) if job["ended_at"] else datetime.now(UTC)
        took = duration((ended - read_time(job["started_at"])).total_seconds())
        took += "" if job["ended_at"] else " so far"
    return {**job, **said, "outcome": _say_outcome(job), "took": took}


def _say_outcome(job: Mapping[str, Any]) -> str:
    if job["state"] == "queued":
        return f"{nth(job['place'])} in the queue" if job["place"] else ""
    if job["error"]:
        return capitalize_first(str(job["error"].get("detail") or job["error"].get("message") or ""))
    result = job["result"] or {}
    if result.get("version"):
        return f"version {result['version']}, {'live' if result.get('is_live') else 'kept aside'}"
    return ""


def describe_progress(job: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a job's own page shows besides the job: steps, curve, result."""
    metric = _find_metric(job, events)
    return {
        "metric": metric,
        "metric_words": metric_words(metric),
        "points": _find_points(job, events, metric),
        "steps": _find_steps(job, events),
        "now": _say_now(job, events, metric),
        "can_cancel": job["state"] in ("queued", "running") and not job["cancel_requested"],
        "rows_words": _say_rows(events),
        "error": explain_problem(job["error"]),
        "result": _describe_result(job["result"], metric),
    }


def _find_metric(job: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> str:
    if job["result"] and job["result"].get("metric"):
        return str(job["result"]["metric"])
    for event in events:
        if event["data"].get("metric"):
            return str(event["data"]["metric"])
    return "accuracy"


def _find_points(job: Mapping[str, Any], events: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """Return the learning curve: the score on dev rows after each round, the latest score of each."""
    found: dict[float, float] = {}
    for event in events:
        data = event["data"]
        score = (data.get("dev") or {}).get(metric)
        if event["kind"] == "epoch" and score is not None and data.get("epoch") is not None:
            found[float(data["epoch"])] = float(score)
    rounds = sorted(found)
    most = (job["progress"] or {}).get("epochs")
    return {"rounds": rounds, "scores": [found[n] for n in rounds], "most": most, "percent": is_share(metric)}


def _find_steps(job: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    if job["kind"] != "train":
        known = {"queued": "Waiting", "running": "Working", "succeeded": "Done", "failed": "Failed"}
        return [{"words": known.get(job["state"], capitalize_first(job["state"])), "state": "now"}]
    seen = {event["kind"] for event in events}
    reached = {"queued": True, "read": "claimed" in seen, "training": bool({"training", "epoch", "read"} & seen)}
    reached |= {"published": "published" in seen, "live": job["state"] == "succeeded"}
    last = max(number for number, (name, _) in enumerate(_STEPS) if reached[name])
    steps = []
    for number, (name, words) in enumerate(_STEPS):
        look = "done" if number < last or job["state"] == "succeeded" else "now" if number == last else ""
        shown = "Kept aside" if name == "live" and "kept" in seen else words
        if look == "now" and job["state"] in ("failed", "cancelled"):
            look, shown = "failed", capitalize_first(job["state"])
        steps.append({"words": shown, "state": look})
    return steps


def _say_now(job: Mapping[str, Any], events: Sequence[Mapping[str, Any]], metric: str) -> str:
    if job["cancel_requested"] and job["state"] in ("queued", "running"):
        return "It is being cancelled."
    if job["state"] == "queued":
        if job["place"] and job["place"] > 1:
            return f"It is {nth(job['place'])} in the queue."
        return "It is next. It waits up to two seconds for jobs that can be trained together with it."
    progress = job["progress"] or {}
    if job["state"] == "running":
        score = (progress.get("dev") or {}).get(metric)
        if progress.get("epoch"):
            so_far = f" So far: {show_score(score, metric)} {metric_words(metric)}." if score is not None else ""
            return f"Round {progress['epoch']} of {progress['epochs']} is done.{so_far}{_say_rest(events)}"
        if job["kind"] != "train":
            return "It is running."
        is_training = any(event["kind"] == "training" for event in events)
        return "The first round is under way." if is_training else "The rows are read and prepared."
    return {"succeeded": "Done.", "failed": "It failed.", "cancelled": "It was cancelled."}[job["state"]]


def _say_rest(events: Sequence[Mapping[str, Any]]) -> str:
    """Write how long the other rounds will take at most: training may stop early."""
    data: Mapping[str, Any] = next((event["data"] for event in reversed(events) if event["kind"] == "epoch"), {})
    if not data.get("seconds") or not data.get("epoch") or data["epoch"] >= data.get("epochs", 0):
        return ""
    return f" At most {duration(data['seconds'] * (data['epochs'] / data['epoch'] - 1))} more."


def _say_cost(call: PageCall, job: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> str:
    """Write how long a training will take in all, before its own rounds show it."""
    rows = next((event["data"]["rows"] for event in events if event["data"].get("rows")), None)
    if job["kind"] != "train" or rows is None:
        return ""
    cost = estimate_cost(call.workspace, sum(rows.values()), job["settings"].get("epochs"))
    return f" In all it usually takes {cost['words']}."


def _say_rows(events: Sequence[Mapping[str, Any]]) -> str:
    for event in events:
        rows = event["data"].get("rows") or {}
        if event["kind"] == "read" and rows:
            return f"{plural(rows['train'], 'row')} to learn from and {show_number(rows['dev'])} to judge it by"
    return ""


def _describe_result(result: Mapping[str, Any] | None, metric: str) -> dict[str, Any] | None:
    if result is None:
        return None
    facts = []
    for side, words in (("test", "on test rows"), ("dev", "on the rows it is judged by")):
        score = (result.get("metrics") or {}).get(side, {}).get(metric)
        if score is not None:
            facts.append((f"{capitalize_first(metric_words(metric))} {words}", show_score(score, metric)))
    return {
        **result,
        "facts": facts,
        "reason_words": capitalize_first(str(result.get("reason") or "")).rstrip(".") + ".",
    }


def _say_event(event: Mapping[str, Any], metric: str) -> dict[str, Any]:
    data, kind = event["data"], event["kind"]
    words = _EVENTS.get(kind, capitalize_first(plain_note(event["message"])))
    score = (data.get("dev") or {}).get(metric)
    if kind == "read":
        words = _say_rows([event]) or words
    if kind == "epoch" and score is not None:
        what = _STAGES.get(data.get("stage"), f"Round {show_number(data.get('epoch'))}")
        words = f"{what}: {show_score(score, metric)} {metric_words(metric)}"
    return {**event, "words": words}
