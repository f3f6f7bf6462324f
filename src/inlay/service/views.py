"""What both the API and the pages show and do: tasks with their scores, reports, comparisons, suggestions, going live.

Each function takes the caller's workspace, so it sees nothing of other tenants. Functions that read evaluations take
milliseconds to a second and belong in a worker thread; functions that ask the engine are coroutines. No torch.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError, UnknownName
from inlay.reports import Evaluation, list_errors, make_report, read_answer
from inlay.service.engine import Answering, Caller, WireAnswer, WireError, WireRow
from inlay.service.state import (
    BATCH,
    Alias,
    Conflict,
    Dataset,
    Job,
    JobRequest,
    LiveMoved,
    Page,
    ServedTask,
    VersionRow,
    Workspace,
)
from inlay.service.state.paging import check_limit, cut_page, read_cursor
from inlay.service.version_evaluations import (
    NeedsAnswers,
    compare,
    find_comparison,
    read_evaluation,
    write_evaluation,
)
from inlay.store import Manifest, Version

if TYPE_CHECKING:
    from inlay.data import InputRow
    from inlay.service.state import Call

_MOST_REPORTS = 512
_ROWS_AT_ONCE = 256
_MOST_READ = 2000  # rows of a dataset that are answered to find the ones to suggest


@dataclass(frozen=True)
class TaskVersion:
    """A version of one of the caller's tasks, with that task."""

    task: ServedTask
    row: VersionRow

    @property
    def version(self) -> Version:
        """The version in the store."""
        return self.row.info.version


def find_version(workspace: Workspace, name: str, number: int | None = None) -> TaskVersion:
    """Return a version of a task; without a number the live one, or the newest if none is live."""
    task = workspace.task(name)
    if number is None:
        row = task.live or (task.versions[-1] if task.versions else None)
        if row is None:
            raise Conflict(f"task `{name}` has no version yet", "wait until its first job has ended")
        return TaskVersion(task, row)
    for row in task.versions:
        if row.number == number:
            return TaskVersion(task, row)
    raise UnknownName("version", f"{name}@{number}", ())


# Tasks


def describe_task(workspace: Workspace, name: str) -> dict[str, Any]:
    """Return a task as the API shows it, with the interval of its live version's score."""
    return _describe(workspace, workspace.task(name))


def describe_tasks(workspace: Workspace, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
    """Return a page of tasks as the API shows them."""
    page = workspace.tasks(limit, cursor)
    return {"items": [_describe(workspace, task) for task in page.items], "next_cursor": page.next_cursor}


def _describe(workspace: Workspace, task: ServedTask) -> dict[str, Any]:
    about = task.to_json()
    if task.live is not None and about["live"] is not None:
        try:
            report = _find_report(workspace, TaskVersion(task, task.live))
        except InlayError:  # its evaluation is damaged, or of another Inlay: its score is shown without an interval
            report = None
        about["live"]["interval"] = None if report is None else report["interval"]
    return about


# Reports


_reports: OrderedDict[tuple[str, str, int], dict[str, Any]] = OrderedDict()
"""the latest reports; the report of a version never changes"""


def _find_report(workspace: Workspace, place: TaskVersion) -> dict[str, Any] | None:
    """Return the report of a version; None if this service did not evaluate it."""
    key = (str(workspace.db.paths.home), place.version.digest, place.row.number)
    known = _reports.get(key)
    if known is not None:
        return known
    evaluation = _read(workspace, place)
    if evaluation is None:  # not cached: it may be written later
        return None
    report = make_report(evaluation)
    _reports[key] = report
    while len(_reports) > _MOST_REPORTS:
        _reports.popitem(last=False)
    return report


def describe_report(workspace: Workspace, name: str, number: int) -> dict[str, Any]:
    """Return the report of a version: intervals, scores of labels, confusion, calibration."""
    place = find_version(workspace, name, number)
    report = _find_report(workspace, place)
    if report is None:
        raise _not_evaluated(name, number)
    return {**report, "rows": f"/v1/tasks/{name}/versions/{number}/errors"}


def describe_errors(
    workspace: Workspace,
    place: TaskVersion,
    filters: Mapping[str, str | None],
    limit: int = 50,
    cursor: str | None = None,
) -> dict[str, Any]:
    """Return a page of the rows that a version got wrong; `filters` may have `expected` and `answer`."""
    check_limit(limit)
    start = read_cursor("errors", cursor, int) or 0
    evaluation = _read(workspace, place)
    if evaluation is None:
        raise _not_evaluated(place.task.name, place.row.number)
    found = list_errors(evaluation, expected=filters.get("expected"), answer=filters.get("answer"))
    rows = list(enumerate(found))[start : start + limit + 1]
    page: Page[tuple[int, dict[str, Any]]] = cut_page("errors", rows, limit, lambda item: item[0] + 1)
    return {"items": [row for _, row in page.items], "next_cursor": page.next_cursor}


def _read(workspace: Workspace, place: TaskVersion) -> Evaluation | None:
    folder = workspace.db.files.evaluations(workspace.name, place.task.name)
    return read_evaluation(folder, place.row.number)


def _not_evaluated(name: str, number: int) -> InlayError:
    return Conflict(
        f"version {number} of `{name}` was not trained by this service, so it has no answers of it to judge",
        "train the task here once more",
    )


# Comparing


async def describe_comparison(
    workspace: Workspace, engine: Answering, name: str, numbers: tuple[int, int]
) -> dict[str, Any]:
    """Compare two versions on the same dev rows; the engine answers the rows that one of them has not answered yet."""
    found = await asyncio.to_thread(_find_comparison, workspace, name, numbers)
    if isinstance(found, NeedsAnswers):
        needs = found
        answers = await _answer_rows(workspace, engine, name, needs)

        def fill_in() -> tuple[Evaluation, Evaluation] | NeedsAnswers:
            folder = workspace.db.files.evaluations(workspace.name, name)
            write_evaluation(folder, needs.fill_in(answers))
            return _find_comparison(workspace, name, numbers)

        found = await asyncio.to_thread(fill_in)
        assert not isinstance(found, NeedsAnswers)
    return await asyncio.to_thread(compare, *found)


def _find_comparison(
    workspace: Workspace, name: str, numbers: tuple[int, int]
) -> tuple[Evaluation, Evaluation] | NeedsAnswers:
    for number in numbers:
        find_version(workspace, name, number)
    store = workspace.db.store

    def read_manifest(number: int) -> Manifest:
        return store.manifest(find_version(workspace, name, number).version)

    folder = workspace.db.files.evaluations(workspace.name, name)
    return find_comparison(folder, *numbers, read_manifest)


async def _answer_rows(
    workspace: Workspace, engine: Answering, name: str, needs: NeedsAnswers
) -> list[Mapping[str, Any]]:
    """Have one version answer the other's rows, in the bulk band."""
    version = find_version(workspace, name, needs.other.version).version
    tenant = workspace.tenant
    caller = Caller(tenant.name, tenant.weight, None, "bulk")
    answers: list[Mapping[str, Any]] = []
    texts: Sequence[tuple[str, str | None]] = needs.owner.texts
    for start in range(0, len(texts), _ROWS_AT_ONCE):
        rows = [
            WireRow(name, version.name, version.number, text, pair)
            for text, pair in texts[start : start + _ROWS_AT_ONCE]
        ]
        predicted = await engine.predict(caller, rows)
        for answer in predicted.answers:
            if isinstance(answer, WireError):
                raise Conflict(f"version {version.number} cannot answer the rows: {answer.message}", answer.hint)
            if (answer.store_name, answer.number) != (version.name, version.number):
                raise Conflict("the engine answered with another version than asked for", "try again")
            answers.append(answer.answer)
    return answers


# Suggesting


@dataclass(frozen=True)
class RowToLabel:
    """A row, what a version answers to it, and how sure it is."""

    line: int
    text: str
    pair: str | None
    answer: str
    confidence: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the row as the API shows it."""
        return asdict(self)


def choose_rows_to_label(
    rows: Sequence[InputRow],
    answers: Sequence[Mapping[str, Any]],
    limit: int = 20,
    known: Collection[str] = (),
) -> list[RowToLabel]:
    """Choose rows to label from their described answers: the least sure ones first, and not too many of one answer.

    Rows without an answer are left out, and so are texts in `known`, which have labels already. Numeric answers have
    no confidence: of these, rows are chosen over the whole range.
    """
    from inlay.data import group_keys
    from inlay.explore import spread_numbers, take_shares

    seen = set(group_keys(list(known), None))
    found: list[RowToLabel] = []
    for row, answer in zip(rows, answers, strict=True):
        key = group_keys([row.text], None if row.pair is None else [row.pair])[0]
        if "error" in answer or key in seen or group_keys([row.text], None)[0] in seen:
            continue
        seen.add(key)
        given, confidence = read_answer(answer)
        shown = _show(given)
        found.append(RowToLabel(row.line, row.text, row.pair, shown, confidence))
    if any(row.confidence is None for row in found):
        return [found[place] for place in spread_numbers([_as_number(row.answer) for row in found], limit)]
    found.sort(key=lambda row: (row.confidence or 0.0, row.line))
    return [found[place] for place in take_shares([row.answer for row in found], limit)]


def _show(given: Any) -> str:
    if isinstance(given, list):
        return "|".join(map(str, given))
    return f"{given:.6g}" if isinstance(given, float) else str(given)


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


async def suggest_from(
    workspace: Workspace, engine: Answering, name: str, dataset_id: str, limit: int
) -> list[dict[str, Any]]:
    """Return rows of a dataset that are worth labelling: the live version is least sure of them.

    Corrected rows are left out. Of a large dataset the engine answers a sample, in the bulk band.
    """
    from inlay.explore import draw_rows
    from inlay.settings import DataConfig

    version = await asyncio.to_thread(workspace.resolve, name)
    dataset = await asyncio.to_thread(workspace.dataset, dataset_id)
    reading = dataset.found.reading or {}
    columns = DataConfig(text=reading.get("text"), pair=reading.get("pair"))

    def draw() -> Sequence[InputRow]:
        with workspace.db.files.reading(dataset.path) as path:
            return draw_rows(path, columns, most=_MOST_READ)[0]

    rows = await asyncio.to_thread(draw)
    tenant = workspace.tenant
    caller = Caller(tenant.name, tenant.weight, tenant.limits.tokens_per_minute, "bulk")
    answers: list[Mapping[str, Any]] = []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        asked = [
            WireRow(name, version.store_name, version.number, row.text, row.pair)
            for row in rows[start : start + _ROWS_AT_ONCE]
        ]
        predicted = await engine.predict(caller, asked)
        workspace.add_usage(name, rows=len(asked), tokens=predicted.num_tokens)
        answers += [
            answer.answer if isinstance(answer, WireAnswer) and answer.number == version.number else {"error": "none"}
            for answer in predicted.answers
        ]
    corrected = await asyncio.to_thread(workspace.feedback, name, 200)
    known = [item.correction.text for item in corrected.items]
    found = await asyncio.to_thread(choose_rows_to_label, rows, answers, limit, known)
    return [{**row.to_json(), "source": "unlabelled"} for row in found]


# Doing


async def go_live(
    workspace: Workspace, engine: Answering, name: str, to: int, *, if_match: int | None = None, reason: str = ""
) -> Alias:
    """Make a version the live one: first the engine loads it and proves its probes, then the alias moves."""
    place = await asyncio.to_thread(find_version, workspace, name, to)
    alias = await asyncio.to_thread(workspace.alias, name)
    if if_match is not None and if_match != (0 if alias is None else alias.counter):
        raise LiveMoved(name)
    await engine.load(place.version.name, place.version.number)

    def move() -> Alias:
        return workspace.move_alias(name, to, if_match=if_match, reason=reason)

    return await asyncio.to_thread(move)


def submit_training(
    workspace: Workspace, request: JobRequest, call: Call | None = None, *, corrections: bool = False
) -> Job:
    """Queue a training job. Bad rows are left out and reported, unless the settings say otherwise.

    With `corrections` the dataset is the live version's merged with the task's corrections, and the live version's
    settings are the defaults of the request.
    """
    settings = {"bad_rows": "skip", **request.settings}
    dataset = request.dataset
    if corrections:
        settings = {**settings, **_settings_of_live(workspace, request.task), **request.settings, "corrections": True}
        dataset = workspace.feedback_dataset(request.task).id
    if dataset is None:
        raise Conflict("the job names no dataset", "upload one, and name its id")
    return workspace.submit(replace(request, settings=settings, dataset=dataset), call)


def _settings_of_live(workspace: Workspace, task: str) -> dict[str, Any]:
    live = workspace.task(task).live
    if live is None or live.job is None:
        return {}
    try:
        return workspace.job(live.job).settings
    except UnknownName:
        return {}


def submit_batch(
    workspace: Workspace, reference: str, dataset: str, settings: Mapping[str, Any], *, priority: int, call: Call | None
) -> Job:
    """Queue an offline batch over a dataset; the version is the one that the reference means now."""
    found = workspace.resolve(reference)
    task = reference.partition("@")[0]
    request = JobRequest(BATCH, task, dataset, {**settings, "version": found.number}, None, priority)
    return workspace.submit(request, call)


def is_trainable(dataset: Dataset) -> bool:
    """Return whether a dataset can be trained on as it is read now."""
    return dataset.found.problem is None and bool((dataset.found.reading or {}).get("label"))
