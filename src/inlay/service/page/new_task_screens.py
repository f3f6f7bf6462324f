"""Pages on the way to a new task: a file is uploaded, what was found in it is shown and mended, a job is submitted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any
from urllib.parse import quote, urlencode

from starlette.responses import Response

from inlay.errors import InlayError
from inlay.reports import first_large
from inlay.service.page.example_data import TASK, find_example
from inlay.service.page.explaining import Explained, explain_problem, plain_note
from inlay.service.page.screens import PageCall, go_to
from inlay.service.page.task_screens import POLICIES, describe_example
from inlay.service.page.training_cost import estimate_cost
from inlay.settings import DataConfig

_ROLES = (
    ("text", "Text", "The column with the texts"),
    ("label", "Right answer", "The column with the labels, or numbers"),
    ("pair", "Second text", "Only where two texts are answered together"),
)
_SETTINGS = (
    ("epochs", "Rounds", "How often each row is learned from, at most. Empty: as suits the number of rows"),
    ("size", "Size", "Weights of its own: more can learn more. Empty: the usual"),
    ("lr", "Learning rate", "Empty: the usual, or found by trying"),
    ("max_length", "Longest text", "In pieces of words; longer texts are cut. Empty: the usual"),
    ("seed", "Seed", "Another number gives another draw of the dice"),
)
_WHOLE = ("epochs", "size", "max_length", "seed")
_KINDS = next(item.metadata["choices"] for item in fields(DataConfig) if item.name == "kind")
_SETTING = re.compile(r"`settings\.(\w+)` is ")
_WARNING = re.compile(r"\bskipped\b|conflicting|nearly the same|\bbad\b", re.IGNORECASE)
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def show_upload(call: PageCall) -> Response:
    """Show where a file is dropped or chosen."""
    return _show_upload(call, None)


def _show_upload(call: PageCall, error: Explained | None) -> Response:
    context = {
        "task": call.text("task"),
        "example": describe_example(call),
        "most_bytes": call.desk.limits()["limits"]["dataset_bytes"],
        "error": error,
    }
    return call.show("upload.html", "Tasks", context, 200 if error is None else error.status)


async def take_upload(call: PageCall) -> Response:
    """Take an uploaded file, and go to what was found in it. A page that sends it by script is told where to go."""
    try:
        dataset = await call.desk.upload()
    except InlayError as error:
        return _show_upload(call, call.explain(error))
    path = f"/new/{quote(dataset['id'], safe='')}"
    if call.text("task"):
        path += "?" + urlencode({"task": call.text("task")})
    if call.request.headers.get("x-upload") == "page":
        return Response(status_code=201, headers={"X-Next": path, "Cache-Control": "no-store"})
    return go_to(path)


async def take_example(call: PageCall) -> Response:
    """Take the data that came along; train it at once, or look at it first."""
    example = find_example()
    if example is None:
        return _show_upload(
            call, Explained("the data that came along is not installed", "use a file of yours", 404, "")
        )
    dataset = await call.desk.keep_file(example.path)
    if call.text("go") != "train":
        return go_to(f"/new/{quote(dataset['id'], safe='')}?task={TASK}")
    job = call.desk.train(TASK, dataset["id"], {})
    return go_to(f"/jobs/{quote(job['id'], safe='')}")


def show_dataset(call: PageCall) -> Response:
    """Show what was found in a dataset."""
    return _show_dataset(call, call.desk.dataset(call.path("dataset")), {})


async def read_dataset(call: PageCall) -> Response:
    """Read a dataset by the columns that were chosen, and show what is found then."""
    chosen = {name: call.text(name) for name in ("text", "label", "pair", "kind") if call.text(name)}
    if chosen.get("kind") == "auto":
        del chosen["kind"]
    try:
        found = await call.desk.read_again(call.path("dataset"), chosen)
    except InlayError as error:
        explained = call.explain(error)
        return _show_dataset(call, call.desk.dataset(call.path("dataset")), {}, explained)
    return _show_dataset(call, found, {})


def _show_dataset(
    call: PageCall, found: Mapping[str, Any], faults: Mapping[str, str], error: Explained | None = None
) -> Response:
    reading = found["reading"]
    chosen = _find_chosen(call, found)
    faults = dict(faults) or _place_problem(found["problem"], chosen)
    named = {chosen[role]: title.lower() for role, title, _ in _ROLES if chosen[role]}
    problem = None if faults else explain_problem(found["problem"])
    epochs = int(chosen["epochs"]) if str(chosen["epochs"]).isdigit() else None
    context = {
        "dataset": {**found, "problem": problem, "first_rows": _as_rows(found), "notes": _as_notes(found)},
        "reading": reading,
        "most": max((item["count"] for item in (reading or {}).get("labels") or []), default=1),
        "roles": _ROLES,
        "kinds": _KINDS,
        "settings": _SETTINGS,
        "policies": POLICIES,
        "chosen": chosen,
        "picked": named,
        "cost": estimate_cost(call.desk, found["num_rows"], epochs),
        "can_train": reading is not None and found["problem"] is None and "train" in call.desk.viewer.scopes,
        "why_not": _say_why_not(call, found),
        "faults": faults,
        "error": error,
    }
    return call.show("dataset.html", "Tasks", context, _find_status(faults, error))


def _find_status(faults: Mapping[str, str], error: Explained | None) -> int:
    return error.status if error is not None else 422 if faults else 200


def _as_rows(found: Mapping[str, Any]) -> list[list[Any]]:
    return [["" if cell is None else show_cell(str(cell)) for cell in row] for row in found["first_rows"]]


def show_cell(cell: str) -> str:
    """Write a list, or the answers of a question, without the marks of JSON."""
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
    """Return the notes on a file, with a line where the words have none."""
    notes = [(plain_note(note["message"]), note.get("line")) for note in found["notes"]]
    return [
        {"message": words, "line": None if "line" in words else line, "is_warning": bool(_WARNING.search(words))}
        for words, line in notes
    ]


def _find_chosen(call: PageCall, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what every field shows: what was sent, or what was found."""
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
        chosen["publish"] = call.desk.policy_of(chosen["task"]) or "if-better"
    chosen["balanced"] = call.text("balanced") == "yes"
    return chosen


def _suggest_name(file: str) -> str:
    """Return a name for a task that a file's name suggests."""
    stem = file.rpartition(".")[0] or file
    found = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-")
    return found if _NAME.fullmatch(found) else "my-task"


def _place_problem(problem: Mapping[str, Any] | None, chosen: Mapping[str, Any]) -> dict[str, str]:
    """Return a problem of the columns at the field that mends it; none if it is about the whole file."""
    if problem is None or not chosen["text"] or not chosen["label"]:
        return {}
    said = explain_problem(dict(problem))
    assert said is not None
    if f"`{chosen['label']}`" in said.detail:
        return {"label": said.detail if said.hint is None else f"{said.detail}; {said.hint}"}
    return {}


def _say_why_not(call: PageCall, found: Mapping[str, Any]) -> str:
    if "train" not in call.desk.viewer.scopes:
        return "Your key may not train. One with the right “train” may."
    return "Choose the columns first." if found["reading"] is None else "Something above must be mended first."


async def train_dataset(call: PageCall) -> Response:
    """Submit a job with what was chosen, or show what is wrong with it where it was written."""
    settings, faults = _read_settings(call)
    task = call.text("task").strip()
    if not _NAME.fullmatch(task):
        faults["task"] = "Use small letters, digits and hyphens, and begin with a letter or digit"
    dataset = call.desk.dataset(call.path("dataset"))
    if faults:
        return _show_dataset(call, dataset, faults)
    dataset = await _as_chosen(call, dataset)
    if dataset["reading"] is None or dataset["problem"] is not None:
        return _show_dataset(call, dataset, {})
    try:
        job = call.desk.train(task, dataset["id"], settings, call.text("publish") or None)
    except InlayError as error:
        field = _SETTING.match(error.message)
        if field is not None and error.hint and field[1] in dict.fromkeys(name for name, _, _ in _SETTINGS):
            return _show_dataset(call, dataset, {field[1]: first_large(error.hint)})
        return _show_dataset(call, dataset, {}, call.explain(error))
    return go_to(f"/jobs/{quote(job['id'], safe='')}")


async def _as_chosen(call: PageCall, dataset: dict[str, Any]) -> dict[str, Any]:
    """Return the dataset as read by the columns of the form, which without JavaScript were not read yet."""
    reading = dataset["reading"] or {}
    chosen = {name: call.text(name) for name in ("text", "label", "pair") if call.text(name)}
    if call.text("kind") not in ("", "auto"):
        chosen["kind"] = call.text("kind")
    if all(reading.get(name) == value for name, value in chosen.items()):
        return dataset
    return await call.desk.read_again(dataset["id"], chosen)


def _read_settings(call: PageCall) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings that were written, and what is wrong with those that are none."""
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
