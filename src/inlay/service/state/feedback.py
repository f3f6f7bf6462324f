"""Feedback: corrections of answers, and how they are merged with a dataset into the next one."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert

from inlay.errors import BadConfig, BadData, Unsupported
from inlay.service.state import schema
from inlay.service.state.aliases import TaskKey
from inlay.service.state.datasets import Dataset, DatasetDraft, UploadContent
from inlay.service.state.values import check_storable, make_id, to_iso
from inlay.settings import ONE_CELL_KINDS, ONE_LABEL_KINDS, DataConfig
from inlay.store import DRAFT_PREFIX, make_directory, telling_full_disk

MOST_CHARACTERS = 1_000_000
MOST_AT_ONCE = 1024
_MOST_LABELS = 1000  # labels that are listed with their counts
_FIRST_ROWS = 10


@dataclass(frozen=True)
class Correction:
    """A row and the label that it should have been given, as a caller sends it."""

    text: str
    label: str
    pair: str | None = None
    answered: str | None = None
    """the label that was answered"""
    version: int | None = None
    """the version that answered"""


@dataclass(frozen=True)
class Feedback:
    """A correction that was kept."""

    id: str
    task: str
    correction: Correction
    by: str
    at: float
    number: int

    def to_json(self) -> dict[str, Any]:
        """Return the correction as the API shows it."""
        said = self.correction
        return {
            "id": self.id,
            "task": self.task,
            "text": said.text,
            "pair": said.pair,
            "label": said.label,
            "answered": said.answered,
            "version": said.version,
            "by": self.by,
            "at": to_iso(self.at),
        }


def check_corrections(items: Sequence[Correction]) -> None:
    """Refuse corrections that cannot be kept."""
    if not 1 <= len(items) <= MOST_AT_ONCE:
        raise BadConfig(f"{len(items)} corrections at once", f"1 to {MOST_AT_ONCE}")
    for item in items:
        for name in ("text", "pair", "label", "answered"):
            said = getattr(item, name)
            if said is None:
                continue
            check_storable(f"{name} of a correction", said)
            if len(said) > MOST_CHARACTERS:
                raise BadConfig(
                    f"the {name} of a correction has {len(said):,} characters", f"{MOST_CHARACTERS:,} at most"
                )
        if not item.text.strip() or not item.label.strip():
            raise BadConfig("a correction has no text or no label", "give both")


def insert_feedback(
    connection: Connection, task: TaskKey, items: Sequence[Correction], by: str, at: float
) -> list[Feedback]:
    """Keep checked corrections."""
    kept = []
    for item in items:
        values = {"tenant": task.tenant, "task": task.name, "id": make_id("fb"), "by": by, "at": at, **vars(item)}
        query = insert(schema.feedback).values(**values).returning(schema.feedback.c.number)
        number = connection.execute(query).scalar_one()
        kept.append(Feedback(str(values["id"]), task.name, item, by, at, number))
    return kept


def feedback_of(row: Any) -> Feedback:
    """Return a row of the table as a correction that was kept."""
    said = Correction(row.text, row.label, row.pair, row.answered, row.version)
    return Feedback(row.id, row.task, said, row.by, row.at, row.number)


_RowKey = tuple[str, str]  # text and pair


@dataclass
class _Merge:
    """The corrected labels, how the dataset is read, and counts of what the merge did."""

    labels: dict[_RowKey, str]
    reading: Mapping[str, Any]
    counts: Counter[str] = field(default_factory=Counter)
    num_replaced: int = 0
    num_added: int = 0
    num_left_out: int = 0


def merge_corrections(dataset: Dataset, corrections: Sequence[Correction], task: str, folder: Path) -> DatasetDraft:
    """Write into `folder` the draft of a dataset with the corrected labels; rows that only corrections have are added.

    Of several corrections of one row the last one counts. Rows keep their other columns and their order. Whole files
    are read and written.
    """
    reading = dataset.found.reading
    if reading is None or reading.get("kind") not in ONE_CELL_KINDS or not reading.get("label"):
        kind = None if reading is None else reading.get("kind")
        raise Unsupported(f"corrections of kind `{kind}` cannot be merged", "upload a corrected dataset")
    merge = _Merge({_key(item.text, item.pair): item.label for item in corrections}, reading)
    make_directory(folder)
    path = folder / f"{DRAFT_PREFIX}{os.getpid()}-{os.urandom(8).hex()}.jsonl"
    digest, size_bytes, num_rows = hashlib.sha256(), 0, 0
    first: list[Mapping[str, Any]] = []
    try:
        with telling_full_disk(path, dataset.size_bytes), path.open("xb") as file:
            for record in _merged(dataset, corrections, merge):
                line = json.dumps(record, ensure_ascii=False, default=str).encode(errors="replace") + b"\n"
                file.write(line)
                digest.update(line)
                size_bytes += len(line)
                num_rows += 1
                if len(first) < _FIRST_ROWS:
                    first.append(record)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    found = _describe(dataset, merge, first)
    name = f"{task} with corrections"
    return DatasetDraft(path, name, "jsonl", size_bytes, digest.hexdigest(), num_rows, found)


def _key(text: str, pair: str | None) -> _RowKey:
    return text.strip(), (pair or "").strip()


def _merged(dataset: Dataset, corrections: Sequence[Correction], merge: _Merge) -> Iterator[dict[str, Any]]:
    """Yield the rows of the dataset with the corrected labels, then the rows that only corrections have."""
    from inlay.data import stream_rows  # it imports numpy and pyarrow

    text, pair, label = (merge.reading.get(name) for name in ("text", "pair", "label"))
    assert isinstance(label, str)
    met: set[_RowKey] = set()
    has_split, sample = False, None  # the first label cell: it shows the type of labels
    for rows in stream_rows(dataset.path, DataConfig(text=text, pair=pair), isolate=True):
        for row in rows:
            if row.error is not None or row.record is None:
                merge.num_left_out += 1  # training leaves it out too
                continue
            record, key = dict(row.record), _key(row.text, row.pair)
            has_split = has_split or "split" in record
            sample = record.get(label) if sample is None else sample
            if key in merge.labels:
                met.add(key)
                merge.num_replaced += _as_text(record.get(label)) != merge.labels[key]
                record[label] = _like(sample, merge.labels[key])
            merge.counts[_as_text(record.get(label))] += 1
            yield record
    for correction in corrections:
        key = _key(correction.text, correction.pair)
        if key in met:
            continue
        met.add(key)
        record = {str(text): correction.text}
        if pair is not None:
            record[str(pair)] = correction.pair or ""
        record[label] = _like(sample, merge.labels[key])
        if has_split:
            record["split"] = "train"
        merge.num_added += 1
        merge.counts[_as_text(record[label])] += 1
        yield record
    if not merge.counts:
        raise BadData("the dataset has no rows", "upload a dataset with rows")


def _as_text(cell: Any) -> str:
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False, default=str)


def _like(sample: Any, label: str) -> Any:
    """Return a label in the type of the dataset's labels: a text, a number or a list."""
    if isinstance(sample, str) or sample is None:
        return label
    try:
        value = json.loads(label)
    except ValueError:
        return [label] if isinstance(sample, list) else label
    is_number = isinstance(sample, int | float) and isinstance(value, int | float)
    return value if is_number or (isinstance(sample, list) and isinstance(value, list)) else label


def _describe(dataset: Dataset, merge: _Merge, first: Sequence[Mapping[str, Any]]) -> UploadContent:
    """Return what is found in the merged rows, which are read as the old dataset is."""
    reading = dict(merge.reading)
    if reading.get("kind") in ONE_LABEL_KINDS:
        counts = ((label, count) for label, count in merge.counts.most_common(_MOST_LABELS + 1) if label)
        reading["labels"] = [{"label": label, "count": count} for label, count in counts][:_MOST_LABELS]
    said = f"{merge.num_replaced} labels were corrected and {merge.num_added} rows added"
    notes = [{"message": said}]
    if merge.num_left_out:
        notes.append({"message": f"{merge.num_left_out} rows that cannot be read were left out"})
    names = [str(column["name"]) for column in dataset.found.columns] or list(first[0])
    rows = []
    for record in first:
        cells = [record.get(name) for name in names]
        rows.append([cell[:200] if isinstance(cell, str) else cell for cell in cells])
    return UploadContent(dataset.found.columns, reading, None, notes, rows)
