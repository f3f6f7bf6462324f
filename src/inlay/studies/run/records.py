"""What studies measured, as data: one record per run, kept by run id.

`results/<study>/<backbone>-<profile>.json` holds the records of one study on one backbone, sorted, so that files of
several sittings and machines merge cleanly. A record says everything about its run: settings, commit, hardware,
seconds. The same run from other hardware is a repeat and is kept beside the first; from the same hardware the newer one
stands.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from inlay.errors import BadData
from inlay.store import write_atomically
from inlay.store.files import locked, make_directory

FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
STATUSES = (FINISHED, DIVERGED, FAILED)


@dataclass(frozen=True)
class Record:
    """One run of a study, with what it came to."""

    id: str
    """the run's id: settings, data and backbone"""
    study: str
    arm: str
    """the row of the study's table: `full`, `adapters-64`, `top-3`"""
    task: str
    """as the study names it: `glue/cola`"""
    backbone: str
    fingerprint: str
    profile: str
    seed: int
    axes: dict[str, Any]
    """what varies within the arm: {"lr": 3e-4, "size": 64, "epochs": 10}"""
    trained_parameters: int
    backbone_parameters: int
    num_train: int
    metric: str
    """the one that selects, on dev"""
    dev: dict[str, float]
    """every metric of the task at the best epoch"""
    test: dict[str, float] | None
    majority: float | None
    """accuracy of the most frequent class of the training rows, on dev; None where there are no classes"""
    status: str
    curve: list[list[float]]
    """[epoch, dev value] of each epoch"""
    seconds: float
    commit: str
    hardware: str
    versions: dict[str, str]
    date: str
    config: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    """what one study needs beyond that: spans of layers and their score, scores of earlier tasks"""

    @property
    def key(self) -> tuple[str, ...]:
        """What tells records apart: a run may stand in several arms, and be repeated on other hardware; one that reads
        no backbone, such as TF-IDF's, stands beside every backbone and in every profile."""
        return (self.id, self.arm, self.hardware, self.fingerprint, self.profile)

    @property
    def pooling(self) -> str:
        """How its heads read the backbone: as its settings say, or what those left open came to; `auto`: not known."""
        return str(self.extra.get("pooling") or self.config.get("train", {}).get("pooling", "auto"))

    def to_json(self) -> dict[str, Any]:
        """The record as data; a number that is none (NaN, infinite) is null, as JSON has no word for it."""
        return {name: _plain(getattr(self, name)) for name in _FIELDS}

    @classmethod
    def from_json(cls, content: Any, path: Path | None = None) -> Self:
        """The record that `to_json` gave; what does not look like one is a `BadData` that says why."""
        if not isinstance(content, Mapping):
            raise BadData("a record is no object", _MEND, path=path)
        known = dict(content)
        known.setdefault("extra", {})
        wrong = sorted(_FIELDS ^ known.keys())
        if wrong:
            has = "an unknown" if wrong[0] in known else "no"
            raise BadData(f"record `{known.get('id')}` has {has} field `{wrong[0]}`", _MEND, path=path)
        if known["status"] not in STATUSES:
            raise BadData(f"record `{known['id']}` has the status `{known['status']}`", _MEND, path=path)
        return cls(**known)


# Not `dataclasses.asdict`: it copies what is copied anyway, and a file's records are written whenever one is added.
_FIELDS = dict.fromkeys(item.name for item in dataclasses.fields(Record)).keys()
_MEND = "results are written by `inlay study`: move the file away, or mend what was changed by hand"


def count_layers(records: Iterable[Record]) -> int | None:
    """Layers of the backbone that these records are of; None where none says it."""
    said = (record.extra.get("layers", _LAYERS.get(short_name(record.backbone))) for record in records)
    return next((layers for layers in said if layers is not None), None)


# Of the backbones that the first records were made on, which do not say it.
_LAYERS = {"minilm": 6, "mpnet-base": 12}


def results_file(root: Path, study: str, backbone: str, profile: str) -> Path:
    """Where the records of a study on a backbone are kept under the folder of results."""
    return root / study / f"{short_name(backbone)}-{profile}.json"


def short_name(backbone: str) -> str:
    """A backbone's name without the folders it lies in: `mpnet-base` for `/data/backbones/mpnet-base`."""
    return backbone.rstrip("/").rpartition("/")[2]


def read_records(path: Path) -> list[Record]:
    """The records of one file; none if there is no file."""
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadData(f"not JSON: {error}", _MEND, path=path) from None
    if not isinstance(content, dict) or not isinstance(content.get("records"), list):
        raise BadData("no list `records`", _MEND, path=path)
    return [Record.from_json(item, path) for item in content["records"]]


def read_study(root: Path, study: str) -> list[Record]:
    """All records of a study, of every backbone and profile. Other JSON files of the folder are left alone."""
    return merge_records(record for path in list_files(root, study) for record in read_records(path))


def list_files(root: Path, study: str = "*") -> list[Path]:
    """The files of records under the folder of results: of one study, or of all; none that lies in a deeper folder."""
    found = sorted(root.glob(f"{study}/*.json"))
    return [path for path in found if '"records"' in path.read_text(encoding="utf8", errors="replace")]


def merge_records(*groups: Iterable[Record]) -> list[Record]:
    """All records, each run once of those with its key, in an order that does not depend on who came first."""
    kept: dict[tuple[str, ...], Record] = {}
    for record in (record for group in groups for record in group):
        other = kept.get(record.key)
        if other is None or _rank(record) > _rank(other):
            kept[record.key] = record
    return sorted(kept.values(), key=lambda record: record.key)


def add_records(path: Path, study: str, records: Iterable[Record]) -> list[Record]:
    """Put records into a file beside those it has; several processes may do so at a time. All of them come back."""
    make_directory(path.parent)
    with locked(path.parent / ".lock", exclusive=True):
        merged = merge_records(read_records(path), records)
        write_atomically(path, _encode(study, merged))
    return merged


def revise_records(path: Path, study: str, records: Iterable[Record]) -> list[Record]:
    """Put records in the place of those with their keys, whatever these say; all of the file come back."""
    revised = {record.key: record for record in records}
    with locked(path.parent / ".lock", exclusive=True):
        merged = [revised.get(record.key, record) for record in read_records(path)]
        write_atomically(path, _encode(study, merged))
    return merged


def _encode(study: str, records: Iterable[Record]) -> bytes:
    """A line for each record, so that a merge of two files is a merge of lines."""
    lines = [json.dumps(record.to_json(), sort_keys=True, ensure_ascii=False, allow_nan=False) for record in records]
    return "\n".join([f'{{"study": {json.dumps(study)}, "records": [', ",\n".join(lines), "]}", ""]).encode()


def _rank(record: Record) -> tuple[bool, str, str]:
    """A run that came to something beats one that failed, the newer one the older; the rest settles ties."""
    return (record.status != FAILED, record.date, json.dumps(record.to_json(), sort_keys=True))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
