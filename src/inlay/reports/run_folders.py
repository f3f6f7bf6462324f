"""Lists, compares and deletes the run folders of a store. Only settings and results are read; no torch.

A version needs no run folder to answer. A run that may be training now is never deleted.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, UnknownName, Unsupported
from inlay.locks import TRAINING_LOCK, read_claim
from inlay.settings import RunConfig, read_toml
from inlay.store import Store

UNFINISHED = "unfinished"
_BUSY_SECONDS = 600
_MOST_NAMED = 20
_RUNS, _BUDGETS, _COHORTS = "runs", "budgets", "cohorts"


@dataclass(frozen=True)
class RunEntry:
    """A run's folder: what was trained, how it ended, its size, and the versions that were published from it."""

    id: str
    folder: Path
    tasks: tuple[str, ...]
    source: str
    status: str
    metric: str
    dev_metric: float | None
    best_epoch: int | None
    seconds: float | None
    num_bytes: int
    changed_at: float
    versions: tuple[str, ...]
    settings: Mapping[str, Any]
    """every setting by its key, such as `train.lr`"""
    digests: tuple[str, ...] = ()
    """of the rows of each task; none in folders from before they were written"""

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, even early."""
        return self.status != UNFINISHED

    @property
    def is_busy(self) -> bool:
        """Whether a process is training it now, or may be."""
        return bool(self.trainer)

    @property
    def trainer(self) -> str:
        """Describe in words why it seems to be training now; "" if it does not.

        A process that trains holds a lock on a file that names its runs. If there is no such file, or only one of
        another machine, whose locks may not be visible here, a run counts as training if its files changed in the last
        minutes.
        """
        if self.is_finished:
            return ""
        paths = (self.folder.parent / _COHORTS).glob(f"*/{TRAINING_LOCK}")
        claims = [claim for path in paths if (claim := read_claim(path)) is not None and self.id in claim.names]
        held = next((claim for claim in claims if claim.is_held), None)
        if held is not None:
            return f"process {held.process} of `{held.host}` is training it"
        is_sure = bool(claims) and all(claim.is_sure for claim in claims)
        if is_sure or time.time() - self.changed_at >= _BUSY_SECONDS:
            return ""
        return f"its files changed within {_BUSY_SECONDS // 60} minutes: it may be training now"

    def to_json(self) -> dict[str, Any]:
        """Return the run as data: `inlay runs list --json` prints it."""
        changed = datetime.fromtimestamp(self.changed_at, UTC).isoformat(timespec="seconds")
        return {**asdict(self), "folder": str(self.folder), "changed_at": changed, "settings": dict(self.settings)}


@dataclass(frozen=True)
class DeletedRuns:
    """The runs that were deleted, and the size of their files."""

    runs: tuple[str, ...] = ()
    num_bytes: int = 0
    num_cohorts: int = 0
    """number of resume states that were deleted with them"""


def list_runs(store: Store) -> list[RunEntry]:
    """Return every run folder of a store, including candidates of time budgets, the newest first."""
    versions: dict[str, list[str]] = {}
    for task in store.ledger(on_damage=lambda version, error: None):
        for info in task.versions:
            versions.setdefault(info.summary.run_id, []).append(info.version.reference)
    parents = [store.root / _RUNS, *sorted((store.root / _BUDGETS).glob("*"))]
    folders = [path.parent for parent in parents for path in sorted(parent.glob("*/config.toml"))]
    found = [_read_run(folder, versions.get(folder.name, ())) for folder in folders]
    return sorted(found, key=lambda entry: -entry.changed_at)


def _read_run(folder: Path, versions: Sequence[str]) -> RunEntry:
    from inlay.data import use_whole_paths

    config, result = RunConfig(), {}
    with suppress(OSError, InlayError):
        config = read_toml(folder / "config.toml")
        config = replace(config, data=use_whole_paths(config.data))  # older folders have links as they were given
    with suppress(OSError, ValueError):
        result = json.loads((folder / "result.json").read_text(encoding="utf8"))
    settings = {
        f"{section}.{name}": value
        for section, values in asdict(config).items()
        if isinstance(values, dict)
        for name, value in values.items()
    }
    parts = sorted(path.stem.partition("-")[2] for path in (folder / "tasks").glob("*.toml"))
    num_bytes, changed_at = _measure(folder)
    status = str(result.get("status") or "damaged") if (folder / "result.json").is_file() else UNFINISHED
    return RunEntry(
        id=folder.name,
        folder=folder,
        tasks=tuple(parts) or (config.task,),
        source=config.data.source,
        status=status,
        metric=config.data.metric,
        dev_metric=result.get("dev_metric"),
        best_epoch=result.get("best_epoch"),
        seconds=result.get("seconds"),
        num_bytes=num_bytes,
        changed_at=changed_at,
        versions=tuple(versions),
        settings={**settings, "backbone": config.backbone},
        digests=_read_digests(folder),
    )


def _read_digests(folder: Path) -> tuple[str, ...]:
    """Read the digests of the rows a run was trained on, one a task."""
    paths = [folder / "rows.digest", *sorted((folder / "tasks").glob("*.digest"))]
    with suppress(OSError):
        return tuple(path.read_text(encoding="utf8").strip() for path in paths if path.is_file())
    return ()


def _measure(folder: Path) -> tuple[int, float]:
    """Return the size of all files below a folder, and the time of the last change."""
    num_bytes, changed = 0, 0.0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # deleted meanwhile
                status = os.lstat(os.path.join(root, name))
                num_bytes, changed = num_bytes + status.st_size, max(changed, status.st_mtime)
    return num_bytes, changed


def find_runs(entries: Sequence[RunEntry], ids: Iterable[str]) -> list[RunEntry]:
    """Return the runs with these ids; an unambiguous beginning of an id is enough."""
    found = []
    for wanted in ids:
        matches = [entry for entry in entries if entry.id == wanted]
        matches = matches or [entry for entry in entries if wanted and entry.id.startswith(wanted)]
        if len({entry.id for entry in matches}) != 1:
            known = list(dict.fromkeys(entry.id for entry in matches or entries))[:_MOST_NAMED]
            hint = f"several begin so: {', '.join(known)}" if matches else None
            raise UnknownName("run", wanted, known, hint=hint)
        found += [entry for entry in matches if entry not in found]
    return found


def compare_runs(entries: Sequence[RunEntry]) -> dict[str, list[Any]]:
    """Return the settings in which runs differ, each with the value of every run."""
    keys = dict.fromkeys(key for entry in entries for key in entry.settings)
    values = {key: [entry.settings.get(key) for entry in entries] for key in keys}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each[1:])}


def delete_runs(store: Store, entries: Sequence[RunEntry]) -> DeletedRuns:
    """Delete run folders and the resume states that hold their weights; refuse runs that may be training.

    Other unfinished runs of such a state start from the beginning when they are trained again.
    """
    for entry in entries:
        if trainer := entry.trainer:
            raise Unsupported(
                f"run `{entry.id}` is not finished, and {trainer}", "stop its training, or wait, and delete it then"
            )
    states = [folder for entry in entries for folder in _list_cohorts(entry.folder.parent, {entry.id})]
    num_bytes = 0
    for folder in dict.fromkeys(states):
        num_bytes += _measure(folder)[0]
        shutil.rmtree(folder, ignore_errors=True)
    for entry in entries:
        num_bytes += entry.num_bytes
        # Delete the result first: after a kill, the rest of the folder must not look like a finished run.
        (entry.folder / "result.json").unlink(missing_ok=True)
        shutil.rmtree(entry.folder)
    for parent in {entry.folder.parent for entry in entries if entry.folder.parent.parent == store.root / _BUDGETS}:
        if not any(parent.glob("*/config.toml")):  # only the plan is left
            shutil.rmtree(parent, ignore_errors=True)
    return DeletedRuns(tuple(entry.id for entry in entries), num_bytes, len(set(states)))


def _list_cohorts(parent: Path, run_ids: Collection[str]) -> list[Path]:
    """Return the folders of resume states that have some of these runs, or whose runs are unknown."""
    found = []
    for folder in sorted((parent / _COHORTS).glob("*")):
        members: Any = None
        with suppress(OSError, ValueError, KeyError, TypeError):
            members = json.loads((folder / "cohort.json").read_text(encoding="utf8"))["runs"]
        has_state = any(folder.glob("*.safetensors")) or any(folder.glob(".draft-*"))
        if set(run_ids) & set(members) if isinstance(members, list) else has_state:
            found.append(folder)
    return found


def list_unneeded_runs(store: Store) -> tuple[list[RunEntry], list[RunEntry]]:
    """Return the runs without a version that can be deleted, and those that should stay, as they can be resumed.

    All candidates of a time budget are needed if one of them has a version.
    """

    def can_resume(entry: RunEntry) -> bool:
        states = _list_cohorts(entry.folder.parent, {entry.id})
        return not entry.is_finished and any((folder / "state.safetensors").is_file() for folder in states)

    entries = list_runs(store)
    used = {entry.folder.parent for entry in entries if entry.versions and entry.folder.parent != store.root / _RUNS}
    unneeded = [entry for entry in entries if not entry.versions and entry.folder.parent not in used]
    resumable = [entry for entry in unneeded if entry.is_busy or can_resume(entry)]
    return [entry for entry in unneeded if entry not in resumable], resumable
