"""Contents of an uploaded file: columns, first rows, the kind and labels that training would find, and notes.

    python -m inlay.service.web.inspect_file < question.json > answer.json

The service calls it in a separate process, with limits on memory and time, so that no file can stop the service. The
whole file is read once, row by row. Then it is read as training would read it; of a large file, only the first rows.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.data.columns import Header, find_columns, find_name, is_missing, name_label
from inlay.data.kinds import KINDS
from inlay.data.readers import open_file
from inlay.data.streams import count_letters
from inlay.data.table_shapes import SHAPES
from inlay.data.tasks import Task, load_task
from inlay.errors import BadData, InlayError
from inlay.settings import DataConfig

HEAD_ROWS = 20_000
"""most rows that are read as training would read them"""
HEAD_LETTERS = 20_000_000
FIRST_ROWS = 10
MOST_COLUMNS = 1000
MOST_FAULTS = 20
"""most bad rows that are reported one by one"""
SHOWN_LABELS = 1000
_SHOWN_LETTERS = 200
_LINE = re.compile(r"\bline (\d+)")


@dataclass(frozen=True)
class FileQuestion:
    """A file to describe. `columns` has what its owner chose: text, pair, label, kind."""

    path: str
    format: str
    columns: Mapping[str, str] = field(default_factory=dict)
    most_rows: int | None = None
    most_labels: int | None = None
    most_bytes: int | None = None
    """most bytes that a packed file may hold"""

    def config(self, source: str | Path = "") -> DataConfig:
        """Return the settings with which training reads `source`."""
        chosen = {name: value for name, value in self.columns.items() if name in ("text", "pair", "label", "kind")}
        return DataConfig(source=str(source), on_bad_row="skip", **chosen)  # type: ignore[arg-type]


class TooManyRows(InlayError):
    """A file with more rows than the tenant may bring."""

    code = "over-limit"
    http_status = 413


class FileScan:
    """One pass over a file: counts its rows, keeps the first ones, and notes the bad ones."""

    def __init__(self, question: FileQuestion) -> None:
        self.question = question
        self.names: tuple[str, ...] = ()
        self.notes: tuple[str, ...] = ()
        self.num_rows = 0
        self.num_faults = 0
        self.faults: list[BadData] = []
        self.head: list[dict[str, Any]] = []
        self.labels: Counter[str] | None = None
        """the labels of all rows, where the file has more rows than the head"""
        self._head_letters = 0
        self._label = ""
        self._columns: dict[str, dict[str, Any]] = {}

    @property
    def is_whole(self) -> bool:
        """Whether all good rows are in the head."""
        return self.labels is None

    @property
    def columns(self) -> list[dict[str, Any]]:
        """The columns with a few examples."""
        return list(self._columns.values())

    def run(self) -> None:
        """Read the file to its end."""
        question = self.question
        stream = open_file(question.path, question.config(), most_bytes=question.most_bytes)
        self.notes = stream.notes
        for name in stream.header.names:
            self._add_column(name)
        for line, record in stream.records:
            self.num_rows += 1
            if question.most_rows is not None and self.num_rows > question.most_rows:
                reason = f"more than {question.most_rows:,} rows, the limit of dataset rows"
                raise TooManyRows(reason, "send fewer rows, or ask the operator for more")
            if not isinstance(record, BadData):
                self._add(record)
                continue
            self.num_faults += 1
            if len(self.faults) < MOST_FAULTS:
                record.line = record.line or line
                self.faults.append(record)
        if not self.num_rows:
            raise BadData("the file has no rows", "give a file with rows under its header")
        self.names = tuple(self._columns)

    def _add(self, record: dict[str, Any]) -> None:
        # 1. count empty cells, and keep examples
        for name in record:
            if name not in self._columns:
                self._add_column(name)
        for name, column in self._columns.items():
            cell = record.get(name)
            if is_missing(cell):
                column["num_empty"] += 1
            elif len(column["examples"]) < 3:
                shown = str(show_cell(cell))
                if shown not in column["examples"]:
                    column["examples"].append(shown)
        # 2. keep the row in the head; once that is full, count labels alone, those of the head first
        if self.labels is None and len(self.head) < HEAD_ROWS and self._head_letters < HEAD_LETTERS:
            self.head.append(record)
            self._head_letters += count_letters(record)
            return
        if self.labels is None:
            self.labels = Counter()
            with suppress(InlayError):
                self._label = find_roles(tuple(self._columns), None, self.question.columns)["label"] or ""
                for each in self.head:
                    self._count_label(each)
        self._count_label(record)

    def _add_column(self, name: str) -> None:
        if len(self._columns) >= MOST_COLUMNS:
            raise BadData(f"more than {MOST_COLUMNS:,} columns", "keep those that matter")
        lacking = max(0, self.num_rows - 1 - self.num_faults)  # the rows before the first that has it
        self._columns[name] = {"name": name, "examples": [], "num_empty": lacking}

    def _count_label(self, record: Mapping[str, Any]) -> None:
        cell = record.get(self._label)
        assert self.labels is not None
        if isinstance(cell, str | int | float) and not is_missing(cell):
            name = name_label(cell)[:_SHOWN_LETTERS]
            if name in self.labels or len(self.labels) <= (self.question.most_labels or 100_000):
                self.labels[name] += 1


def find_roles(names: tuple[str, ...], kind: str | None, chosen: Mapping[str, str]) -> dict[str, str | None]:
    """Return which columns are text, pair and label, as training would choose them."""
    for shape in KINDS[kind].shapes if kind in KINDS else ():
        places = {role: chosen.get(role) or find_name(names, known) for role, known in SHAPES[shape].roles.items()}
        if all(found or role in SHAPES[shape].optional for role, found in places.items()):
            return {role: places.get(role) for role in ("text", "pair", "label")}
    config = DataConfig(text=chosen.get("text"), pair=chosen.get("pair"), label=chosen.get("label"))
    try:
        columns = find_columns(Header("", names, None), config)
    except BadData:
        columns = find_columns(Header("", names, None), config, labelled=False)
    return {"text": columns.text, "pair": columns.pair, "label": columns.label}


def describe_file(question: FileQuestion) -> dict[str, Any]:
    """Return what a file holds; raise what makes it unreadable."""
    scan = FileScan(question)
    scan.run()
    for name in scan.names:
        if any("\ud800" <= letter <= "\udfff" for letter in name):  # no JSON can hold it
            raise BadData(
                f"the name of the column {name!a} is not text", "save the file as UTF-8, or rename the column"
            )
    notes: list[dict[str, Any]] = [{"message": note} for note in scan.notes]
    notes += [{"message": fault.reason, "line": fault.line} for fault in scan.faults]
    task, problem = _read_task(scan)
    # The task's notes, except those on what the answer has elsewhere: columns, kind, and bad rows.
    told = ("columns:", "kind:") if scan.is_whole else ("columns:", "kind:", "split:")
    if scan.num_faults:
        told = (*told, f"skipped {scan.num_faults} bad row")
    for note in () if task is None else task.notes:
        if note not in scan.notes and not note.startswith(told):
            found = _LINE.search(note)
            notes.append({"message": note} if found is None else {"message": note, "line": int(found[1])})
    if not scan.is_whole:
        message = f"kind, labels and repeats were looked for in the first {len(scan.head):,} rows of {scan.num_rows:,}"
        notes.append({"message": message})
    return {
        "num_rows": scan.num_rows,
        "columns": scan.columns,
        "reading": _describe_reading(scan, task),
        "problem": problem or _check_labels(scan, task),
        "notes": notes,
        "first_rows": [[show_cell(record.get(name)) for name in scan.names] for record in scan.head[:FIRST_ROWS]],
    }


def _read_task(scan: FileScan) -> tuple[Task | None, dict[str, Any] | None]:
    """Return the task that training would find, or why it would find none."""
    source = Path(scan.question.path)
    if not scan.is_whole:
        source = source.with_name(f"{source.stem}-head.jsonl")
        with source.open("w", encoding="utf8") as file:
            file.writelines(json.dumps(record, default=str) + "\n" for record in scan.head)
    try:
        return load_task(scan.question.config(source), "task"), None
    except InlayError as error:
        return None, describe_fault(error)
    finally:
        if not scan.is_whole:
            source.unlink()


def _describe_reading(scan: FileScan, task: Task | None) -> dict[str, Any] | None:
    """Return the columns by role, the kind, and the labels with their numbers of rows; None without text columns."""
    kind = None if task is None else task.kind
    try:
        roles = find_roles(scan.names, kind or scan.question.columns.get("kind"), scan.question.columns)
    except InlayError:
        return None
    if task is None:
        return {**roles, "kind": None, "labels": []}
    counts = _count_labels(scan, task)
    most = scan.question.most_labels or SHOWN_LABELS  # if there are too many, as many as the tenant may have
    labels = [{"label": label, "count": count} for label, count in counts.most_common(min(SHOWN_LABELS, most))]
    return {**roles, "kind": kind, "labels": labels}


def _count_labels(scan: FileScan, task: Task) -> Counter[str]:
    form = KINDS[task.kind].targets
    if not form.has_labels:
        return Counter()
    if scan.labels and form.is_one_label:
        return scan.labels
    counts: Counter[str] = Counter(dict.fromkeys(task.labels, 0))
    for split in (task.train, task.dev, task.test):
        if split is not None and split.targets is not None:
            found = form.count_labels(split.targets, len(task.labels))
            counts.update({label: int(count) for label, count in zip(task.labels, found, strict=False)})
    return counts


def _check_labels(scan: FileScan, task: Task | None) -> dict[str, Any] | None:
    """Return the problem of a file with more labels than the tenant may have; None if there is no problem."""
    most = scan.question.most_labels
    if task is None or most is None:
        return None
    num_labels = len(scan.labels) if scan.labels and KINDS[task.kind].targets.is_one_label else len(task.labels)
    if num_labels <= most:
        return None
    message = f"more than {most:,} labels, the limit of labels"
    return {"code": "over-limit", "status": 413, "message": message, "hint": "use fewer labels, or name another column"}


def show_cell(cell: Any) -> Any:
    """Return a cell as JSON data, a long one cut."""
    if cell is None or isinstance(cell, bool | int):
        return cell
    if isinstance(cell, float):
        return None if is_missing(cell) else cell if abs(cell) < 1e300 else str(cell)
    text = cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False, default=str)
    text = text.encode("utf8", "replace").decode()
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}…"


def describe_fault(error: InlayError) -> dict[str, Any]:
    """Return an error about a file as data, without the file's path."""
    message = error.reason if isinstance(error, BadData) else error.message
    line = getattr(error, "line", None)
    where = "" if line is None else f"line {line}: "
    return {"code": error.code, "status": error.http_status, "message": f"{where}{message}", "hint": error.hint}
