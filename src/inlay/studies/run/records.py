"""Records of studies, one for each run, and the files they are kept in.

New records are appended to `results/<study>/<backbone>-<profile>.jsonl`, one per line, and merged on reading. A last
line that a kill cut off is not read, and the next append removes it. Older results are in a `.json` of the same name,
which is read before the `.jsonl` and never written. A record has everything about its run: settings, commit, hardware,
seconds. The same run from other hardware is a repeat and is kept beside the first; from the same hardware, the newer
record replaces the older.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from inlay.errors import BadData
from inlay.store import locked, make_directory, sync_directory, telling_full_disk

if TYPE_CHECKING:
    from inlay.studies.spec.planning import PlannedRun, StudyPlan

FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
STATUSES = (FINISHED, DIVERGED, FAILED)


@dataclass(frozen=True)
class Record:
    """The record of one run of a study, with its result."""

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
    """the values that vary within the arm: {"lr": 3e-4, "size": 64, "epochs": 10}"""
    trained_parameters: int
    backbone_parameters: int
    num_train: int
    metric: str
    """the metric that selects on dev"""
    dev: dict[str, float]
    """every metric of the task at the best epoch"""
    test: dict[str, float] | None
    majority: float | None
    """dev accuracy of the most frequent training class; None without classes"""
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
    """data that only some studies have: spans of layers and their scores, scores of earlier tasks"""

    @property
    def key(self) -> tuple[str, ...]:
        """The fields that tell records apart.

        A run may belong to several arms and be repeated on other hardware; a run without a backbone, such as TF-IDF's,
        is recorded for every backbone and profile.
        """
        return (self.id, self.arm, self.hardware, self.fingerprint, self.profile)

    @property
    def group(self) -> tuple[str, str, str]:
        """The fields that all records of one plan share."""
        return (self.study, self.profile, self.backbone)

    @property
    def pooling(self) -> str:
        """The pooling of its heads, from its settings or its result; `auto` if it is not known."""
        return str(self.extra.get("pooling") or self.config.get("train", {}).get("pooling", "auto"))

    def to_json(self) -> dict[str, Any]:
        """Return the record as data; NaN and infinite numbers become null, as JSON has none."""
        return {name: _plain(getattr(self, name)) for name in _FIELDS}

    @classmethod
    def from_json(cls, content: Any, path: Path | None = None) -> Self:
        """Read a record that `to_json` wrote; raise `BadData` with the reason for anything else."""
        if not isinstance(content, Mapping):
            raise BadData("a record is not an object", _HINT, path=path)
        known = dict(content)
        known.setdefault("extra", {})
        wrong = sorted(_FIELDS ^ known.keys())
        if wrong:
            has = "an unknown" if wrong[0] in known else "no"
            raise BadData(f"record `{known.get('id')}` has {has} field `{wrong[0]}`", _HINT, path=path)
        if known["status"] not in STATUSES:
            raise BadData(f"record `{known['id']}` has the status `{known['status']}`", _HINT, path=path)
        return cls(**known)


# Not `dataclasses.asdict`: it would copy everything once more.
_FIELDS = dict.fromkeys(item.name for item in dataclasses.fields(Record)).keys()
_HINT = "`inlay study` writes these files: move the file away, or undo what was changed by hand"


@dataclass(frozen=True)
class StudyDirs:
    """The folders where studies read and write."""

    results: Path
    """the folder of records, with a folder for each study"""
    runs: Path
    """the folder of run folders, of all studies together"""


def count_layers(records: Iterable[Record]) -> int | None:
    """Return the number of layers of these records' backbone; None if no record has it."""
    return next((record.extra["layers"] for record in records if "layers" in record.extra), None)


def results_file(root: Path, study: str, backbone: str, profile: str) -> Path:
    """Return the file that the records of a study on a backbone are appended to, under `results`."""
    return root / study / f"{short_name(backbone)}-{profile}.jsonl"


def short_name(backbone: str) -> str:
    """Return a backbone's name without its path: `mpnet-base` for `/data/backbones/mpnet-base`."""
    return backbone.rstrip("/").rpartition("/")[2]


def read_records(path: Path) -> list[Record]:
    """Read the records of one file; none if there is no file.

    A `.jsonl` continues the `.json` of the same name beside it. Of records with the same key the last one counts,
    unless it is older or says that the run failed.
    """
    if path.suffix == ".json":
        return _read_list(path)
    kept = {record.key: record for record in _read_list(path.with_suffix(".json"))}
    for record in read_appended(path)[0]:
        other = kept.get(record.key)
        if other is None or _replaces(record, other):
            kept[record.key] = record
    return sorted(kept.values(), key=lambda record: record.key)


def _read_list(path: Path) -> list[Record]:
    """Read a file of the older format: one JSON object with the list `records`."""
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadData(f"not JSON: {error}", _HINT, path=path) from None
    if not isinstance(content, dict) or not isinstance(content.get("records"), list):
        raise BadData("there is no list `records`", _HINT, path=path)
    return [Record.from_json(item, path) for item in content["records"]]


def read_appended(path: Path, start: int = 0) -> tuple[list[Record], int]:
    """Read the lines of a `.jsonl` from the byte `start` on; return their records and the byte to continue from.

    A last line without a newline was cut off by a kill, or is being written, and is not read.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            content = file.read()
    except FileNotFoundError:
        return [], start
    end = content.rfind(b"\n") + 1
    records = []
    for line in content[:end].splitlines():
        try:
            records.append(Record.from_json(json.loads(line), path))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise BadData(f"not JSON: {error}", _HINT, path=path) from None
    return records, start + end


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Append a line for each record to a `.jsonl`; several processes may do so at the same time."""
    lines = [json.dumps(record.to_json(), sort_keys=True, ensure_ascii=False, allow_nan=False) for record in records]
    if not lines:
        return
    make_directory(path.parent)
    num_bytes = sum(map(len, lines))
    with locked(path.parent / ".lock", exclusive=True), telling_full_disk(path, num_bytes):
        is_new = not path.exists()
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            # Remove a last line that a kill left incomplete.
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
                    file.seek(0, os.SEEK_END)
            file.write("".join(f"{line}\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync_directory(path.parent)


def read_study(root: Path, study: str) -> list[Record]:
    """Read all records of a study, of every backbone and profile; other files of its folder are skipped."""
    return merge_records(record for path in list_files(root, study) for record in read_records(path))


def list_files(root: Path, study: str = "*") -> list[Path]:
    """List the record files under `results`, of one study or of all; not in deeper folders.

    A `.json` with a `.jsonl` of the same name beside it is not listed, as it is read with that one.
    """
    appended = [path for path in root.glob(f"{study}/*.jsonl") if _has_records(path)]
    whole = [path for path in root.glob(f"{study}/*.json") if path.with_suffix(".jsonl") not in appended]
    return sorted([*appended, *filter(_has_records, whole)])


def _has_records(path: Path) -> bool:
    """Tell whether a file holds records, and not some other measurement."""
    if path.suffix == ".json":
        return '"records"' in path.read_text(encoding="utf8", errors="replace")
    with path.open("rb") as file:
        return b'"backbone_parameters"' in file.readline()


def merge_records(*groups: Iterable[Record]) -> list[Record]:
    """Merge records, keeping the best of each key; the order does not depend on the input's."""

    def rank(record: Record) -> tuple[bool, str, str]:
        # A finished run above a failed one, a newer above an older; the text settles ties.
        return (record.status != FAILED, record.date, json.dumps(record.to_json(), sort_keys=True))

    kept: dict[tuple[str, ...], Record] = {}
    for record in itertools.chain(*groups):
        other = kept.get(record.key)
        if other is None or rank(record) > rank(other):
            kept[record.key] = record
    return sorted(kept.values(), key=lambda record: record.key)


def _replaces(record: Record, other: Record) -> bool:
    """Tell whether a later record of the same key replaces an earlier one: finished beats failed, then newer older."""
    return (record.status != FAILED, record.date) >= (other.status != FAILED, other.date)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class StudyRecords:
    """The records of several plans, of different studies.

    A record of a run, from any study, session or machine, serves every arm of every plan that asks for the run: it is
    lent to them. A study's folder may hold files of other machines under any name; their records of its backbone and
    profile count as its own. Several processes may add records at the same time, and `refresh` reads the new ones.
    """

    def __init__(self, plans: Sequence[StudyPlan], dirs: StudyDirs) -> None:
        self._dirs = dirs
        self._plans = {plan.study.name: plan for plan in plans}
        self._groups = {
            name: (name, plan.study.profile, short_name(plan.backbone.name)) for name, plan in self._plans.items()
        }
        self._asking: dict[str, list[PlannedRun]] = {}
        for item in (item for plan in plans for item in plan.items):
            self._asking.setdefault(item.id, []).append(item)
        self._known: dict[tuple[str, str, str], dict[tuple[str, ...], Record]] = {}
        self._read_to: dict[str, int] = {}
        """study -> byte of its file up to which records were read"""
        self.failed: dict[str, str] = {}
        """run id -> the reason, for runs that failed since this object was made"""
        # 1. records of the studies' own files, and their records in other files beside them
        for name, group in self._groups.items():
            own = self.file_of(name)
            _, self._read_to[name] = read_appended(own)
            others = [path for path in list_files(dirs.results, name) if path.with_suffix(".jsonl") != own]
            beside = [record for path in others for record in read_records(path) if record.group == group]
            self._note(name, merge_records(read_records(own), beside))
        self.failed.clear()
        # 2. records of the same runs in other arms, studies and profiles
        self._borrowed: list[Record] = []
        if not all(self.is_known(item) for plan in plans for item in plan.items):
            for path in list_files(dirs.results):
                self._borrowed += [copy for record in read_records(path) for copy in self._lend(record)]
        for record in self._borrowed:
            self._note(record.study, [record])

    def file_of(self, study: str) -> Path:
        """Return the file that a study's records are appended to."""
        _, profile, backbone = self._groups[study]
        return results_file(self._dirs.results, study, backbone, profile)

    def is_known(self, item: PlannedRun) -> bool:
        """Tell whether an item has a record; a record of a failure does not count."""
        return item.key in self._known

    def is_left(self, item: PlannedRun) -> bool:
        """Tell whether an item has no record and has not failed since this object was made."""
        return not self.is_known(item) and item.id not in self.failed

    def records(self, study: str) -> list[Record]:
        """Return the records of a plan's items; those of other settings, from earlier sessions, are left out."""
        wanted = {item.key for item in self._plans[study].items}
        found = [
            record
            for (name, run_id, arm), records in self._known.items()
            if (name, run_id.partition("-")[0], arm) in wanted  # later tasks of one run are `<id>-1`, `<id>-2`, …
            for record in records.values()
        ]
        return sorted(found, key=lambda record: record.key)

    def run_ids(self, study: str) -> set[str]:
        """Return the runs of a plan that have records; a multi-task run counts once."""
        return {record.id.partition("-")[0] for record in self.records(study)}

    def refresh(self) -> None:
        """Read what this process and others have appended since the last call."""
        for name in self._plans:
            records, self._read_to[name] = read_appended(self.file_of(name), self._read_to[name])
            self._note(name, records)

    def write_borrowed(self) -> None:
        """Copy the records that were found in other studies' files to the files of these plans."""
        self._append(self._borrowed)
        self._borrowed = []

    def add(self, records: Sequence[Record]) -> None:
        """Append records to the files of all studies that ask for their runs."""
        self.refresh()
        lent = [copy for record in records for copy in self._lend(record)]
        self._append([*records, *lent])
        for record in records:
            self._drop_weights(record)

    def revise(self, study: str, records: Iterable[Record]) -> None:
        """Replace records of the study's own file by key; others stay as they are."""
        own = {record.key for record in read_records(self.file_of(study))}
        append_records(self.file_of(study), [record for record in records if record.key in own])
        self.refresh()

    def _append(self, records: Sequence[Record]) -> None:
        for study in dict.fromkeys(record.study for record in records):
            append_records(self.file_of(study), [record for record in records if record.study == study])
        self.refresh()

    def _note(self, study: str, records: Iterable[Record]) -> None:
        for record in records:
            if record.status == FAILED:
                self.failed[record.id] = str(record.extra.get("message", ""))
            elif self._is_read_alike(record, study):
                known = self._known.setdefault((study, record.id, record.arm), {})
                if record.key not in known or _replaces(record, known[record.key]):
                    known[record.key] = record

    def _is_read_alike(self, record: Record, study: str) -> bool:
        """Tell whether a record whose settings leave the pooling open was trained with the plan's pooling."""
        default = self._plans[study].backbone.default_pooling
        return bool(record.extra.get("pooling", default) == default)

    def _lend(self, record: Record) -> list[Record]:
        """Copy a record for every item that asks for its run and has none."""
        copies: list[Record] = []
        if record.status == FAILED:
            return copies
        for item in self._asking.get(record.id.partition("-")[0], ()):
            is_own = (self._groups[item.study], item.arm.name) == (record.group, record.arm)
            has_one = (item.study, record.id, item.arm.name) in self._known
            lacks_spans = item.arm.kind == "spans" and "spans" not in record.extra
            if is_own or has_one or lacks_spans or not self._is_read_alike(record, item.study):
                continue
            plan = self._plans[item.study]
            copy = dataclasses.replace(
                record,
                study=item.study,
                arm=item.arm.name,
                profile=plan.study.profile,
                axes=dict(item.axes),
                # The same weights may have another name elsewhere, and a baseline has no backbone.
                backbone=short_name(plan.backbone.name),
                fingerprint=plan.backbone.fingerprint,
                backbone_parameters=plan.backbone.num_parameters,
                extra={**record.extra, "layers": plan.backbone.anatomy.num_layers},
            )
            copies.append(copy)
        return copies

    def _drop_weights(self, record: Record) -> None:
        """Delete the weights of fine-tuned copies, as many would fill the disk; the best of each arm stay for answers.

        A copy trained on several tasks stays too, as other runs may start from it.
        """
        asking = self._asking.get(record.id, [])
        trained = [item.run for item in asking if item.run is not None and item.is_finetuned]
        if record.status == FAILED or not trained or any(len(run.parts) > 1 for run in trained):
            return
        rivals: dict[tuple[str, str], list[Record]] = {}
        for (study, _, arm), others in self._known.items():
            finished = [other for other in others.values() if other.task == record.task and other.status == FINISHED]
            rivals.setdefault((study, arm), []).extend(finished)
        # The best of every study, as the run may be the best of another one.
        best = {
            max(others, key=lambda other: other.dev[other.metric]).id
            for (study, _), others in rivals.items()
            if others and self._plans[study].study.submission
        }
        beaten = {other.id for item in asking for other in rivals.get((item.study, item.arm.name), ())}
        for run_id in {*beaten, record.id} - best:
            (self._dirs.runs / run_id / "best.safetensors").unlink(missing_ok=True)


def count_other_poolings(plan: StudyPlan, results: Path) -> dict[str, int]:
    """Count the recorded runs that differ from a plan's runs in the pooling alone, by pooling."""
    default = plan.backbone.default_pooling
    own = (plan.study.name, plan.study.profile, plan.backbone.fingerprint)
    planned: dict[tuple[Any, ...], list[PlannedRun]] = {}
    for item in plan.items:
        planned.setdefault((item.arm.name, item.seed, repr(sorted(item.axes.items()))), []).append(item)
    found: dict[str, set[str]] = {}
    for record in read_study(results, plan.study.name):
        if (record.study, record.profile, record.fingerprint) != own or record.pooling == "auto":
            continue
        for item in planned.get((record.arm, record.seed, repr(sorted(record.axes.items()))), ()):
            pooling = item.config.train.pooling
            reads = default if pooling == "auto" else pooling
            if record.pooling != reads and record.task in item.all_tasks and _is_same_but_pooling(record, item):
                found.setdefault(record.pooling, set()).add(record.id.partition("-")[0])
    return {pooling: len(runs) for pooling, runs in found.items()}


def _is_same_but_pooling(record: Record, item: PlannedRun) -> bool:
    """Tell whether a record's method and training equal an item's, apart from the pooling."""
    for section in ("method", "train", "joint"):
        said, asked = record.config.get(section, {}), _plain(dataclasses.asdict(getattr(item.config, section)))
        names = (said.keys() & asked.keys()) - {"pooling"}
        if any(_plain(said[name]) != asked[name] for name in names):
            return False
    return True
