"""Pages about tasks: the list of all, one task with its versions, and its settings. Also the example data."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from inlay.reports import plural, show_number
from inlay.service import views
from inlay.service.page.drawings import draw_days, draw_spark
from inlay.service.page.job_screens import add_words
from inlay.service.page.page_call import PageCall, go_to, task_path
from inlay.service.page.training_cost import estimate_cost, list_open_jobs
from inlay.service.state import Workspace

POLICIES = (
    ("if-better", "it goes live if it is better than the live one on the same rows; a first one always does"),
    ("always", "it goes live"),
    ("never", "it waits until you make it live"),
)
SPARK_DAYS = 14
_MOST_LABELS = 4
_EXAMPLE = Path("examples") / "sms_spam" / "sms_spam.tsv"


def show_tasks(call: PageCall) -> Response:
    """Show all tasks, or, before there is one, how to make the first."""
    after = call.text("after")
    page = views.describe_tasks(call.workspace, 50, after or None)
    running = [add_words(job) for job in list_open_jobs(call.workspace) if job["kind"] == "train"]
    days = list_usage(call.workspace, SPARK_DAYS)
    tasks = [describe_task(task, days) for task in page["items"]]
    has_live = any(task["live"] for task in tasks)
    context = {
        "tasks": [task for task in tasks if task["live"] or task["name"] not in {job["task"] for job in running}],
        "running": running,
        "more": page["next_cursor"],
        "here": f"/?{urlencode({'after': after})}" if after else "/",
        "example": None if has_live else describe_example(call),
    }
    return call.show("tasks.html", "Tasks", context)


def show_task(call: PageCall) -> Response:
    """Show one task: what is live, how much it is used, its versions and its latest jobs."""
    task = find_task(call)
    name, metric = task["name"], task["metric"]
    versions = []
    for version in reversed(list_versions(call.workspace, name)):
        score = version["metrics"].get("dev", {}).get(metric)
        versions.append({**version, "score": None if score is None else float(score)})
    jobs = [add_words(job) for job in call.workspace.jobs(task=name, limit=5).to_json()["items"]]
    columns = draw_days(count_days(list_usage(call.workspace, 30), 30, name))
    return call.show("task.html", "Tasks", {"task": task, "versions": versions, "jobs": jobs, "columns": columns})


def show_settings(call: PageCall, fault: str | None = None) -> Response:
    """Show a task's settings; `fault` is what is wrong with the confirmation of a deletion."""
    context = {"task": find_task(call), "policies": POLICIES, "fault_words": fault}
    return call.show("settings.html", "Tasks", context, 200 if fault is None else 422)


def save_settings(call: PageCall) -> Response:
    """Save when new versions go live."""
    call.workspace.set_policy(call.path("task"), call.text("policy"))
    return go_to(task_path(call.path("task"), "/settings"), "policy")


def delete_task(call: PageCall) -> Response:
    """Begin to erase a task, if its name was written as a confirmation."""
    name = call.path("task")
    if call.text("sure").strip() != name:
        return show_settings(call, f"That is not the task's name. Write “{name}” if you want to delete the task")
    call.workspace.erase_task(name)
    return go_to("/", "deleted")


# Tasks in words and drawings


def find_task(call: PageCall) -> dict[str, Any]:
    """Return the task of the address, as the head of its pages shows it."""
    return describe_task(views.describe_task(call.workspace, call.path("task")), [])


def describe_task(task: Mapping[str, Any], days: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a task with its words and drawings; `days` is the tenant's usage."""
    counts = count_days(days, SPARK_DAYS, task["name"])
    total = plural(sum(counts.values()), "row")
    return {
        **task,
        "about": say_labels(task),
        "spark": draw_spark(list(counts.values())),
        "spark_words": f"{total} in the last {SPARK_DAYS} days",
    }


def say_labels(task: Mapping[str, Any]) -> str:
    """Write the labels of a task, the first few if there are many; "" if it has none."""
    labels = task["labels"]
    if task["kind"] == "tag":  # B-LOC and I-LOC are the beginning and the rest of one entity
        labels = list(dict.fromkeys(re.sub("^[BI]-", "", label) for label in labels if label != "O"))
    if len(labels) <= _MOST_LABELS:
        return ", ".join(labels)
    return f"{', '.join(labels[: _MOST_LABELS - 1])} and {show_number(len(labels) - _MOST_LABELS + 1)} more"


def list_versions(workspace: Workspace, name: str) -> list[dict[str, Any]]:
    """Return a task's versions, oldest first."""
    return [row.to_json() for row in workspace.versions(name)]


def list_usage(workspace: Workspace, num_days: int) -> list[dict[str, Any]]:
    """Return what was answered in the last days, by day and task."""
    return [item.to_json() for item in workspace.usage(num_days)]


def count_days(days: Sequence[Mapping[str, Any]], num_days: int, task: str | None = None) -> dict[str, int]:
    """Return the rows of each of the last days, oldest first, for one task or for all; missing days count 0."""
    today = datetime.now(UTC).date()
    counts = {(today - timedelta(days=back)).isoformat(): 0 for back in range(num_days - 1, -1, -1)}
    for item in days:
        if item["day"] in counts and task in (None, item["task"]):
            counts[item["day"]] += item["rows"]
    return counts


def takes_pair(workspace: Workspace, name: str) -> bool:
    """Return whether a task answers pairs of texts."""
    place = views.find_version(workspace, name)
    return bool(workspace.db.store.manifest(place.version).extra.get("pairs"))


def find_label_form(workspace: Workspace, name: str) -> str:
    """Return how a right answer is given: pick, set, number or text; "" if the pages have no form for this kind."""
    from inlay.data import KINDS

    kind = workspace.task(name).to_json()["kind"]
    if kind is None:
        return ""
    entry = KINDS[kind]
    if entry.targets.is_one_label:
        return "pick"
    if entry.is_number:
        return "number"
    if entry.targets.has_labels and entry.decide is not None:
        return "set"
    return "text" if entry.spell_answers is not None and not entry.targets.has_labels else ""


# The example data: SMS messages, each marked as spam or not


@dataclass(frozen=True)
class ExampleData:
    """The example file, and the number of its rows."""

    path: Path
    num_rows: int


@lru_cache(maxsize=1)
def find_example() -> ExampleData | None:
    """Return the example file, from a checkout or as the wheel installs it; None if it is not there."""
    checkout = Path(__file__).parents[4]
    for folder in (checkout, Path(sysconfig.get_path("data")) / "share" / "inlay"):
        path = folder / _EXAMPLE
        if path.is_file():
            with path.open("rb") as file:
                return ExampleData(path, sum(1 for _ in file) - 1)
    return None


def describe_example(call: PageCall) -> dict[str, Any] | None:
    """Return what the pages show of the example data; None if it is not installed."""
    example = find_example()
    if example is None:
        return None
    cost = estimate_cost(call.workspace, example.num_rows, None)
    return {"num_rows": example.num_rows, "cost": cost["words"]}
