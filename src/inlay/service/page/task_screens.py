"""Pages about tasks: the list of all, one task with its versions, and its settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from inlay.reports import plural, show_number
from inlay.service.page.drawings import draw_days, draw_spark
from inlay.service.page.example_data import find_example
from inlay.service.page.job_screens import add_words
from inlay.service.page.screens import PageCall, go_to, task_path
from inlay.service.page.training_cost import estimate_cost

POLICIES = (
    ("if-better", "it goes live if it is better than the live one on the same rows; a first one always does"),
    ("always", "it goes live"),
    ("never", "it waits until you make it live"),
)
SPARK_DAYS = 14
_MOST_LABELS = 4


def show_tasks(call: PageCall) -> Response:
    """Show all tasks, or, before there is one, how to make the first."""
    after = call.text("after")
    page = call.desk.tasks(after or None)
    running = [add_words(job) for job in call.desk.open_jobs() if job["kind"] == "train"]
    days = call.desk.usage(SPARK_DAYS)
    tasks = [describe_task(task, days) for task in page["items"]]
    known = {task["name"] for task in tasks if task["live"]}
    context = {
        "tasks": [task for task in tasks if task["live"] or task["name"] not in {job["task"] for job in running}],
        "running": running,
        "more": page["next_cursor"],
        "here": f"/?{urlencode({'after': after})}" if after else "/",
        "example": None if known else describe_example(call),
    }
    return call.show("tasks.html", "Tasks", context)


def describe_example(call: PageCall) -> dict[str, Any] | None:
    """Return what is said of the data that came along; None where it is not installed."""
    example = find_example()
    if example is None:
        return None
    cost = estimate_cost(call.desk, example.num_rows, None)
    return {"num_rows": example.num_rows, "cost": cost["words"]}


def describe_task(task: Mapping[str, Any], days: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a task with what is said and drawn of it; `days` is the tenant's usage."""
    counts = count_days(days, SPARK_DAYS, task["name"])
    total = plural(sum(counts.values()), "row")
    return {
        **task,
        "about": say_labels(task),
        "spark": draw_spark(list(counts.values())),
        "spark_words": f"{total} in the last {SPARK_DAYS} days",
    }


def say_labels(task: Mapping[str, Any]) -> str:
    """Name the labels that a task answers with, the first few of many; "" for one without labels."""
    labels = task["labels"]
    if task["kind"] == "tag":  # B-LOC and I-LOC are the beginning and the rest of one thing
        labels = list(dict.fromkeys(re.sub("^[BI]-", "", label) for label in labels if label != "O"))
    if len(labels) <= _MOST_LABELS:
        return ", ".join(labels)
    return f"{', '.join(labels[: _MOST_LABELS - 1])} and {show_number(len(labels) - _MOST_LABELS + 1)} more"


def count_days(days: Sequence[Mapping[str, Any]], num_days: int, task: str | None = None) -> dict[str, int]:
    """Return the rows of each of the last days, oldest first, of one task or of all; days without any count 0."""
    today = datetime.now(UTC).date()
    counts = {(today - timedelta(days=back)).isoformat(): 0 for back in range(num_days - 1, -1, -1)}
    for item in days:
        if item["day"] in counts and task in (None, item["task"]):
            counts[item["day"]] += item["rows"]
    return counts


def show_task(call: PageCall) -> Response:
    """Show one task: what is live, how much it is used, its versions and its latest jobs."""
    name = call.path("task")
    task = describe_task(call.desk.task(name), [])
    metric = task["metric"]
    versions = [{**version, "score": find_score(version, metric)} for version in reversed(call.desk.versions(name))]
    jobs = [add_words(job) for job in call.desk.jobs(task=name, limit=5)["items"]]
    columns = draw_days(count_days(call.desk.usage(30), 30, name))
    return call.show("task.html", "Tasks", {"task": task, "versions": versions, "jobs": jobs, "columns": columns})


def find_score(version: Mapping[str, Any], metric: str | None) -> float | None:
    """Return a version's score on the rows it is judged by."""
    found = version["metrics"].get("dev", {}).get(metric)
    return None if found is None else float(found)


def show_settings(call: PageCall) -> Response:
    """Show a task's settings."""
    task = describe_task(call.desk.task(call.path("task")), [])
    return call.show("settings.html", "Tasks", {"task": task, "policies": POLICIES, "fault_words": None})


def save_settings(call: PageCall) -> Response:
    """Save when new versions go live."""
    call.desk.set_policy(call.path("task"), call.text("policy"))
    return go_to(task_path(call.path("task"), "/settings"), "policy")


def delete_task(call: PageCall) -> Response:
    """Begin to erase a task whose name was written to confirm it."""
    name = call.path("task")
    if call.text("sure").strip() != name:
        task = describe_task(call.desk.task(name), [])
        words = f"That is not the task's name. Write “{name}”, or leave it as it is"
        context = {"task": task, "policies": POLICIES, "fault_words": words}
        return call.show("settings.html", "Tasks", context, 422)
    call.desk.erase_task(name)
    return go_to("/", "deleted")


def head_of(call: PageCall) -> dict[str, Any]:
    """Return the task of the address, for the head of its pages."""
    return describe_task(call.desk.task(call.path("task")), [])
