"""Pages on the way to a new task: upload a file, check and correct what was found in it, submit a job."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any
from urllib.parse import quote, urlencode

from starlette.responses import Response

from inlay.errors import InlayError
from inlay.reports import capitalize_first
from inlay.service import views
from inlay.service.page.explaining import ExplainedError, explain_problem, plain_note
from inlay.service.page.page_call import PageCall, go_to, job_path
from inlay.service.page.task_screens import POLICIES, describe_example, find_example
from inlay.service.page.training_cost import estimate_cost
from inlay.service.state import TRAIN, JobRequest
from inlay.service.trainer.job_settings import check_settings
from inlay.service.web.dataset_routes import inspect_upload, read_again
from inlay.service.web.uploads import Draft, Received, receive_upload
from inlay.settings import DataConfig

_ROLES = (
    ("text", "Text", "The column with the texts"),
    ("label", "Right answer", "The column with the labels, or numbers"),
    ("pair", "Second text", "Only where two texts are answered together"),
)
_SETTINGS = (
    ("epochs", "Rounds", "How often each row is learned from, at most. Empty: a number that suits the data"),
    ("size", "Size", "How many weights of its own it has: more can learn more. Empty: the usual"),
    ("lr", "Learning rate", "Empty: the usual, or chosen by trials"),
    ("max_length", "Longest text", "In pieces of words; longer texts are cut. Empty: the usual"),
    ("seed", "Seed", "Another number gives other random choices"),
)
_WHOLE = ("epochs", "size", "max_length", "seed")
_KINDS = next(item.metadata["choices"] for item in fields(DataConfig) if item.name == "kind")
_EXAMPLE_TASK = "sms-spam"
_SETTING = re.compile(r"`settings\.(\w+)` is ")
_WARNING = re.compile(r"\bskipped\b|conflicting|nearly the same|\bbad\b", re.IGNORECASE)
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def show_upload(call: PageCall, error: ExplainedError | None = None) -> Response:
    """Show the form for a file."""
    context = {
        "task": call.text("task"),
        "example": describe_example(call),
        "most_bytes": call.workspace.tenant.limits.dataset_bytes,
        "error": error,
    }
    return call.show("upload.html", "Tasks", context, 200 if error is None else error.status)


async def take_upload(call: PageCall) -> Response:
    """Keep an uploaded file, and go to what was found in it. A script gets that address in a header."""
    try:
        async with Draft(call.workspace) as draft:
            received = await receive_upload(draft, call.workspace, call.request.scope, call.request.receive, {})
            dataset = await _keep(call, received)
    except InlayError as error:
        return show_upload(call, call.explain(error))
    path = f"/new/{quote(dataset['id'], safe='')}"
    if call.text("task"):
        path += "?" + urlencode({"task": call.text("task")})
    if call.request.headers.get("x-upload") == "page":
        return Response(status_code=201, headers={"X-Next": path, "Cache-Control": "no-store"})
    return go_to(path)


async def take_example(call: PageCall) -> Response:
    """Keep the example data as a dataset; train on it at once, or show it first."""
    example = find_example()
    if example is None:
        return show_upload(call, ExplainedError("the example data is not installed", "use a file of yours", 404, ""))
    options = {"name": example.path.name, "format": example.path.suffix.removeprefix(".")}
    async with Draft(call.workspace) as draft:
        await draft.write(example.path.read_bytes())
        dataset = await _keep(call, await draft.finish(options))
    if call.text("go") != "train":
        return go_to(f"/new/{quote(dataset['id'], safe='')}?task={_EXAMPLE_TASK}")
    job = views.submit_training(call.workspace, JobRequest(TRAIN, _EXAMPLE_TASK, dataset["id"], {}))
    return go_to(job_path(job.id))


async def _keep(call: PageCall, received: Received) -> dict[str, Any]:
    """Inspect an upload, keep it, and return the dataset."""
    inspected = await inspect_upload(call.state, call.workspace, received)
    dataset = await asyncio.to_thread(call.workspace.add_dataset, inspected)
    return dataset.to_json()


def show_dataset(call: PageCall) -> Response:
    """Show what was found in a dataset."""
    return _show_dataset(call, _find_dataset(call), {})


def _find_dataset(call: PageCall) -> dict[str, Any]:
    return call.workspace.dataset(call.path("dataset")).to_json()


async def read_dataset(call: PageCall) -> Response:
    """Read a dataset again by the chosen columns, and show what was found."""
    chosen = {name: call.text(name) for name in ("text", "label", "pair", "kind") if call.text(name)}
    if chosen.get("kind") == "auto":
        del chosen["kind"]
    try:
        found = await read_again(call.state, call.workspace, call.path("dataset"), chosen)
    except InlayError as error:
        return _show_dataset(call, _find_dataset(call), {}, call.explain(error))
    return _show_dataset(call, found.to_json(), {})


def _show_dataset(
    call: PageCall, found: Mapping[str, Any], faults: Mapping[str, str], error: ExplainedError | None = None
) -> Response:
    reading = found["reading"]
    chosen = _find_chosen(call, found)
    faults = dict(faults) or _place_problem(found["problem"], chosen)
    named = {chosen[role]: title.lower() for role, title, _ in _ROLES if chosen[role]}
    problem = None if faults else explain_problem(found["problem"])
    rows = [["" if cell is None else show_cell(str(cell)) for cell in row] for row in found["first_rows"]]
    epochs = int(chosen["epochs"]) if str(chosen["epochs"]).isdigit() else None
    context = {
        "dataset": {**found, "problem": problem, "first_rows": rows, "notes": _as_notes(found)},
        "reading": reading,
        "most": max((item["count"] for item in (reading or {}).get("labels") or []), default=1),
        "roles": _ROLES,
        "kinds": _KINDS,
        "settings": _SETTINGS,
        "policies": POLICIES,
        "chosen": chosen,
        "picked": named,
        "cost": estimate_cost(call.workspace, found["num_rows"], epochs),
        "can_train": reading is not None and found["problem"] is None and "train" in call.scopes,
        "why_not": _say_why_not(call, found),
        "faults": faults,
        "error": error,
    }
    status = 422 if faults else 200
    return call.show("dataset.html", "Tasks", context, status if error is None else error.status)


def show_cell(cell: str) -> str:
    """Write a list, or the answers to a question, without the brackets and quotes of JSON."""
    try:
        found = json.loads(cell) if cell.startswith(("[", "{")) else None
    except (ValueError, RecursionError):
        return cell
    if isinstance(found, dict):
        found = found.get("text")
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        return cell
    return ", ".join(found)


def _as_notes(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the notes on a file in plain words, each with its line unless the words name it."""
    notes = [(plain_note(note["message"]), note.get("line")) for note in found["notes"]]
    return [
        {"message": words, "line": None if "line" in words else line, "is_warning": bool(_WARNING.search(words))}
        for words, line in notes
    ]


def _find_chosen(call: PageCall, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every field: what was sent, or else what was found in the file."""
    reading = found["reading"] or {}
    names = {column["name"] for column in found["columns"]}
    chosen: dict[str, Any] = {}
    for role, _, _ in _ROLES:
        given = call.text(role) or reading.get(role) or ""
        chosen[role] = given if given in names else ""
    chosen["kind"] = call.text("kind") or "auto"
    chosen["task"] = call.text("task") or _suggest_name(found["name"])
    chosen |= {name: call.text(name) for name, _, _ in _SETTINGS}
    chosen["publish"] = call.text("publish") or "if-better"
    if call.text("task") and not call.text("publish"):
        with suppress(InlayError):  # there is no such task yet
            chosen["publish"] = call.workspace.task(chosen["task"]).policy
    chosen["balanced"] = call.text("balanced") == "yes"
    return chosen


def _suggest_name(file: str) -> str:
    """Return a name for a task, made from a file's name."""
    stem = file.rpartition(".")[0] or file
    found = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-")
    return found if _NAME.fullmatch(found) else "my-task"


def _place_problem(problem: Mapping[str, Any] | None, chosen: Mapping[str, Any]) -> dict[str, str]:
    """Return a problem under the field that can solve it; nothing if it is about the whole file."""
    if problem is None or not chosen["text"] or not chosen["label"]:
        return {}
    said = explain_problem(dict(problem))
    assert said is not None
    if f"`{chosen['label']}`" in said.detail:
        return {"label": said.detail if said.hint is None else f"{said.detail}; {said.hint}"}
    return {}


def _say_why_not(call: PageCall, found: Mapping[str, Any]) -> str:
    if "train" not in call.scopes:
        return "Your key may not train: that needs a key with the right “train”."
    return "Choose the columns first." if found["reading"] is None else "Something above must be corrected first."


async def train_dataset(call: PageCall) -> Response:
    """Submit a job with the chosen settings, or show at each field what is wrong with it."""
    settings, faults = _read_settings(call)
    task = call.text("task").strip()
    if not _NAME.fullmatch(task):
        faults["task"] = "Use small letters, digits and hyphens, and begin with a letter or digit"
    dataset = _find_dataset(call)
    if faults:
        return _show_dataset(call, dataset, faults)
    dataset = await _as_chosen(call, dataset)
    if dataset["reading"] is None or dataset["problem"] is not None:
        return _show_dataset(call, dataset, {})
    try:
        check_settings(settings)
        request = JobRequest(TRAIN, task, dataset["id"], settings, call.text("publish") or None)
        job = views.submit_training(call.workspace, request)
    except InlayError as error:
        field = _SETTING.match(error.message)
        if field is not None and error.hint and any(field[1] == name for name, _, _ in _SETTINGS):
            return _show_dataset(call, dataset, {field[1]: capitalize_first(error.hint)})
        return _show_dataset(call, dataset, {}, call.explain(error))
    return go_to(job_path(job.id))


async def _as_chosen(call: PageCall, dataset: dict[str, Any]) -> dict[str, Any]:
    """Return the dataset as read by the columns of the form. Without JavaScript it was not read by them yet."""
    reading = dataset["reading"] or {}
    chosen = {name: call.text(name) for name in ("text", "label", "pair") if call.text(name)}
    if call.text("kind") not in ("", "auto"):
        chosen["kind"] = call.text("kind")
    if all(reading.get(name) == value for name, value in chosen.items()):
        return dataset
    return (await read_again(call.state, call.workspace, dataset["id"], chosen)).to_json()


def _read_settings(call: PageCall) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of the form, and what is wrong with those that are not numbers."""
    settings: dict[str, Any] = {}
    faults: dict[str, str] = {}
    for name, _, _ in _SETTINGS:
        written = call.text(name).strip()
        if not written:
            continue
        try:
            settings[name] = int(written) if name in _WHOLE else float(written)
        except ValueError:
            faults[name] = "Write a whole number" if name in _WHOLE else "Write a number, such as 0.0005"
    if call.text("balanced") == "yes":
        settings["class_weights"] = "balanced"
    return settings, faults
