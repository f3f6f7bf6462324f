"""The corrections of a task merged with the rows it was trained on, as a new dataset. Reads and writes whole files."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.errors import BadData, Unsupported
from inlay.service.state.datasets import Dataset, DatasetDraft, Found
from inlay.service.state.feedback import Correction
from inlay.settings import ONE_CELL_KINDS, ONE_LABEL_KINDS
from inlay.store import DRAFT_PREFIX, make_directory, telling_full_disk

_MOST_LABELS = 1000  # labels that are listed with their counts
_FIRST_ROWS = 10
RowKey = tuple[str, str]  # text and pair


@dataclass
class _Merge:
    """Rows on their way from the old dataset to the new one."""

    wanted: dict[RowKey, str]
    reading: Mapping[str, Any]
    counts: Counter[str] = field(default_factory=Counter)
    num_replaced: int = 0
    num_added: int = 0
    num_left_out: int = 0


def merge_corrections(dataset: Dataset, corrections: Sequence[Correction], task: str, folder: Path) -> DatasetDraft:
    """Write into `folder` the draft of a dataset whose rows have the corrected labels; new rows are added.

    Of several corrections of one row the last counts. The rows keep their other columns, and their order.
    """
    reading = dataset.found.reading
    if reading is None or reading.get("kind") not in ONE_CELL_KINDS or not reading.get("label"):
        kind = None if reading is None else reading.get("kind")
        raise Unsupported(f"corrections of kind `{kind}` are not merged by themselves", "upload a corrected dataset")
    wanted = {_key(item.text, item.pair): item.label for item in corrections}
    merge = _Merge(wanted, reading)
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


def _key(text: str, pair: str | None) -> RowKey:
    return text.strip(), (pair or "").strip()


def _merged(dataset: Dataset, corrections: Sequence[Correction], merge: _Merge) -> Iterator[dict[str, Any]]:
    """Yield the rows of the dataset, mended, then those that only corrections have."""
    from inlay.data import stream_rows  # numpy and pyarrow: only here
    from inlay.settings import DataConfig

    text, pair, label = (merge.reading.get(name) for name in ("text", "pair", "label"))
    assert isinstance(label, str)
    met: set[RowKey] = set()
    has_split, sample = False, None  # a cell that says of which type labels are
    for rows in stream_rows(dataset.path, DataConfig(text=text, pair=pair), isolate=True):
        for row in rows:
            if row.error is not None or row.record is None:
                merge.num_left_out += 1  # as training leaves it out
                continue
            record, key = dict(row.record), _key(row.text, row.pair)
            has_split = has_split or "split" in record
            sample = record.get(label) if sample is None else sample
            if key in merge.wanted:
                met.add(key)
                merge.num_replaced += _as_text(record.get(label)) != merge.wanted[key]
                record[label] = _like(sample, merge.wanted[key])
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
        record[label] = _like(sample, merge.wanted[key])
        if has_split:
            record["split"] = "train"
        merge.num_added += 1
        merge.counts[_as_text(record[label])] += 1
        yield record
    if not merge.counts:
        raise BadData("the dataset has no rows", "upload a dataset with rows")


def _as_text(cell: Any) -> str:
    return "" if cell is None else cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False, default=str)


def _like(sample: Any, label: str) -> Any:
    """Return a label as the dataset writes labels: as a number or a list where it does so."""
    if isinstance(sample, str) or sample is None:
        return label
    try:
        value = json.loads(label)
    except ValueError:
        return [label] if isinstance(sample, list) else label
    is_number = isinstance(sample, int | float) and isinstance(value, int | float)
    return value if is_number or (isinstance(sample, list) and isinstance(value, list)) else label


def _describe(dataset: Dataset, merge: _Merge, first: Sequence[Mapping[str, Any]]) -> Found:
    """Return what is found in the merged rows: read as the old dataset was."""
    reading = dict(merge.reading)
    if reading.get("kind") in ONE_LABEL_KINDS:
        counts = ((label, count) for label, count in merge.counts.most_common(_MOST_LABELS + 1) if label)
        reading["labels"] = [{"label": label, "count": count} for label, count in counts][:_MOST_LABELS]
    said = f"{merge.num_replaced} labels were corrected and {merge.num_added} rows added"
    notes = [{"message": said}]
    if merge.num_left_out:
        notes.append({"message": f"{merge.num_left_out} rows that cannot be read were left out"})
    names = [str(column["name"]) for column in dataset.found.columns] or list(first[0])
    rows = [[_cut(record.get(name)) for name in names] for record in first]
    return Found(dataset.found.columns, reading, None, notes, rows)


def _cut(cell: Any) -> Any:
    return cell[:200] if isinstance(cell, str) else cell
