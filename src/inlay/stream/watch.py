"""The stream: every data file that appears in a folder becomes a task, and no earlier task changes.

Files that are there at the same time are trained as one cohort and published. Then every version on the backbone is
proved by its probes. The stream may be killed at any moment: a journal in the store (`runs/streams/<id>/journal.jsonl`)
records which content is done and which files are being trained together, so that a restart continues the same cohort
from its resume state. The journal is stored with the versions and not with the data: a new store starts from the
beginning, and a folder may be moved (its files are then read again and recognised).

The same content (a file's bytes or rows, with its own settings, on one backbone) is trained once, under whatever name,
and published again if its version was removed. A file that cannot be used is moved to `bad/` with its error beside it,
and the others go on. A file that is still changing is not touched. The stream stops if the store fails, or if a version
fails its proof.
"""

from __future__ import annotations

import dataclasses
import time
import tomllib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from inlay.data import WHOLE_ROW, Split, Task, load_task
from inlay.errors import DiskFull, Diverged, InlayError, Missing, StoreBusy, StoreDamaged, UnknownName
from inlay.model import Backbone
from inlay.reports import write_run_report
from inlay.serving import Engine, verify
from inlay.settings import RunConfig, digest, from_tree, write_toml
from inlay.store import Store, Version
from inlay.stream.inbox import SUFFIXES, DataFile, Inbox, Journal, Stamp, describe_error, identify, open_journal
from inlay.training import (
    DIVERGED,
    MAX_COHORT,
    EpochEnded,
    Event,
    FitSettings,
    PreparedRun,
    Result,
    fit,
    ignore,
    is_finished,
    make_run,
    publish_result,
)

T = TypeVar("T")


@dataclass(frozen=True)
class StreamSettings:
    """Settings of the stream itself, none of which is part of a run."""

    together: bool = True
    """train files that are there at the same time as one cohort, and not one after another"""
    settle_s: float = 2.0
    """seconds a file must stay unchanged before it is read"""
    every_s: float = 5.0
    """seconds between looks at the folder"""
    once: bool = False
    """process the present files, and end"""
    fit: FitSettings = field(default_factory=FitSettings)
    """settings of the training"""
    writes_reports: bool = True
    """whether the folder of each run gets a report and a model card"""


@dataclass(frozen=True)
class StreamEvent(Event):
    """An event: its kind, a line of text, and the same as data.

    Kinds: `waiting`, `ignored`, `unsettled`, `read`, `training`, `epoch`, `published`, `known` (not trained again),
    `aside` (moved to `bad/`), `stands` (all versions passed the proof), `fallen` (some did not), `stopped`.
    """

    kind: str
    message: str
    file: str | None = None
    task: str | None = None
    version: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the event as data, without empty fields."""
        named = {"file": self.file, "task": self.task, "version": self.version}
        given = {name: value for name, value in named.items() if value is not None}
        return {"event": self.kind, "message": self.message, **given, **self.details}


@dataclass(frozen=True)
class StreamResult:
    """The result of a stream, from its start to its end."""

    published: tuple[Version, ...]
    aside: tuple[str, ...]
    """names of the files that were moved to `bad/`"""
    num_standing: int
    """number of tasks that passed the last proof; 0 if nothing was added"""
    is_interrupted: bool = False


def watch_folder(
    folder: Path | str,
    backbone: Backbone,
    store: Store,
    config: RunConfig = RunConfig(),
    settings: StreamSettings = StreamSettings(),
    emit: Callable[[StreamEvent], None] = ignore,
) -> StreamResult:
    """Train, publish and prove every data file of `folder`, until Ctrl-C or, with `once`, until all are done.

    `config` has the settings of files without their own in a `NAME.toml`. Raises `StoreDamaged` if a published version
    fails the proof.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise Missing(f"no folder `{folder}`", "make it, then put data files into it")
    config = dataclasses.replace(config, backbone=backbone.name)
    # Refuse settings that do not work with any file, before the first file is treated as bad because of them.
    rows = Split(["a", "b"], None, np.array([0, 1]), [1, 2])
    make_run(Task("any", WHOLE_ROW, ("a", "b"), "accuracy", rows, rows, None, (), "", ""), config, backbone, store)
    with open_journal(store, folder) as journal:
        return _Stream(Inbox(folder, settings.settle_s), journal, backbone, store, settings, emit).run(config)


@dataclass(frozen=True, eq=False)
class _ReadyFile:
    """A file that is ready to be trained."""

    item: DataFile
    prepared: PreparedRun
    rows: str


class _Stream:
    """One watch over a folder."""

    def __init__(
        self,
        folder: Inbox,
        journal: Journal,
        backbone: Backbone,
        store: Store,
        settings: StreamSettings,
        emit: Callable[[StreamEvent], None],
    ) -> None:
        self._folder, self._journal, self._backbone, self._store = folder, journal, backbone, store
        self._settings, self._emit = settings, emit
        self._runs = store.root / "runs"
        self._engine = Engine(backbone, store)  # for all proofs
        self._closed: dict[str, Stamp] = {}  # file -> its stamp, for files that are done unless they change
        self._ignored: set[str] = set()
        self._published: list[Version] = []
        self._aside: list[str] = []
        self._num_standing = 0

    def run(self, config: RunConfig) -> StreamResult:
        """Finish what an earlier stream began, then add the files of the folder, once or until Ctrl-C."""
        is_interrupted = False
        try:
            self._finish_pending(config)
            if self._settings.once:
                self._take_once(config)
            else:
                self._take_forever(config)
        except KeyboardInterrupt:
            self._emit(StreamEvent("stopped", "stopped; everything so far is kept, and a restart continues from here"))
            is_interrupted = True
        return StreamResult(tuple(self._published), tuple(self._aside), self._num_standing, is_interrupted)

    def _take_once(self, config: RunConfig) -> None:
        names = {path.name for path, _, _ in self._folder.look()}
        if names:
            time.sleep(self._settings.settle_s)
        self._drain(config, names)
        for name in sorted(names & set(self._open_files())):
            self._emit(StreamEvent("unsettled", f"{name}: still being written, left alone", file=name))

    def _take_forever(self, config: RunConfig) -> None:
        is_announced, every_s = False, self._settings.every_s
        while True:
            if self._drain(config) or not is_announced:
                message = f"waiting for files in {self._folder.path} (every {every_s:g} s; Ctrl-C ends)"
                self._emit(StreamEvent("waiting", message))
                is_announced = True
            settle_s = max(self._settings.settle_s, 0.05)
            time.sleep(min(every_s, settle_s) if self._open_files() else every_s)

    def _open_files(self) -> list[str]:
        """Return the files that are not done; after a drain, these have not settled."""
        return [path.name for path, stamp, _ in self._folder.look() if self._closed.get(path.name) != stamp]

    def _drain(self, config: RunConfig, names: Collection[str] | None = None) -> bool:
        """Add files, alone or in cohorts, until no settled file is left; return whether any was added."""
        for path in self._folder.scan():
            if path.suffix.lower() not in (*SUFFIXES, ".toml") and path.name not in self._ignored:
                self._ignored.add(path.name)
                message = f"{path.name}: not a data file ({', '.join(SUFFIXES)}), left alone"
                self._emit(StreamEvent("ignored", message, path.name))
        was_added = False
        while batch := self._next_batch(config, names):
            files = [{"file": ready.item.name, "content": ready.item.content} for ready in batch]
            self._journal.write("began", files=files, settings=write_toml(config))
            self._add(batch)
            was_added = True
        if self._journal.is_unproved:  # a second name for known content is an addition too
            self._prove()
            was_added = True
        return was_added

    def _next_batch(self, config: RunConfig, names: Collection[str] | None) -> list[_ReadyFile]:
        limit = MAX_COHORT if self._settings.together else 1
        batch: dict[str, _ReadyFile] = {}
        for path, stamp, is_settled in self._folder.look():
            wanted = is_settled and self._closed.get(path.name) != stamp and (names is None or path.name in names)
            if not wanted or (ready := self._prepare(path, stamp, config)) is None:
                continue
            batch.setdefault(ready.rows, ready)  # of two with the same rows, the second waits for the first's version
            if len(batch) == limit:
                break
        return list(batch.values())

    def _finish_pending(self, config: RunConfig) -> None:
        """Resume after a kill: the same files, trained together with the same settings, find their resume state."""
        pending = self._journal.pending
        if pending is not None:
            with suppress(InlayError):  # the settings are of another Inlay version: use the current ones
                config = from_tree(RunConfig, tomllib.loads(pending["settings"]))
            batch = []
            for file in pending["files"]:
                path = self._folder.path / file["file"]
                ready = self._prepare(path, self._folder.stamp(path), config, known=True) if path.is_file() else None
                if ready is not None and ready.item.content == file["content"]:
                    batch.append(ready)
            if batch:
                self._add(batch)
        if self._journal.is_unproved:
            self._prove()

    def _prepare(self, path: Path, stamp: Stamp, config: RunConfig, *, known: bool = False) -> _ReadyFile | None:
        """Make a file ready to train; None if it is bad, gone, changing, or (without `known`) already trained."""
        item = self._attempt(path, stamp, lambda: identify(path, stamp, config, self._backbone.fingerprint))
        if item is None or (not known and self._is_known(item, item.content)):
            return None
        ready = self._attempt(path, stamp, lambda: self._load(item))
        if ready is None or (not known and self._is_known(item, ready.rows, also=item.content)):
            return None
        return ready

    def _attempt(self, path: Path, stamp: Stamp, read: Callable[[], T]) -> T | None:
        """Return the result of `read`; None if the file is bad, and was moved aside, or has changed meanwhile."""
        try:
            found = read()
        except (DiskFull, StoreBusy):  # not the file's fault
            raise
        except Exception as error:  # whatever is wrong with one file, the others go on
            self._set_aside(path, stamp, error)
            return None
        return found if self._folder.stamp(path) == stamp else None

    def _load(self, item: DataFile) -> _ReadyFile:
        task = load_task(item.config.data, item.config.task)
        run = make_run(task, item.config, self._backbone, self._store)
        prepared = PreparedRun(run, self._backbone, self._store)
        settings = {name: item.own.get(name, {}) for name in ("method", "train")}
        rows = digest([task.digest, settings, run.fingerprint])
        details = {"notes": list(task.notes), "run": run.id}
        message = f"{item.name}: {len(task.train)} training rows, {task.kind}, task `{task.name}`"
        self._emit(StreamEvent("read", message, item.name, task.name, details=details))
        return _ReadyFile(item, prepared, rows)

    def _is_known(self, item: DataFile, content: str, *, also: str | None = None) -> bool:
        """Tell whether this content has a version; if that has another name, publish it under this name too."""
        name, version = item.config.task, self._find(content)
        if version is None:
            return False
        twin = self._find(content, name)
        is_news = twin is None or item.name in self._closed or also is not None
        if twin is None:
            try:
                loaded = self._store.load(version)
            except InlayError:
                return False  # damaged, or removed just now: read it from the run's folder, or train it again
            twin = self._store.publish(name, loaded.tensors, loaded.manifest, self._store.sidecar(version))
            self._keep(item, twin, [content] if also is None else [content, also])
        if is_news:
            message = f"{item.name}: the same content as `{version.reference}`, not trained again"
            message += f": task `{name}` is `{twin.reference}`" if twin != version else ""
            details = {"same_as": version.reference, "digest": twin.digest}
            self._emit(StreamEvent("known", message, item.name, name, twin.reference, details))
        self._closed[item.name] = item.stamp
        return True

    def _find(self, content: str, name: str | None = None) -> Version | None:
        """Find a version of this content that the store still has, under this name, or under any name."""
        for version in self._journal.versions(content):
            with suppress(UnknownName):  # removed since
                if name in (None, version.name) and self._store.resolve(version.reference) == version:
                    return version
        return None

    def _keep(self, item: DataFile, version: Version, contents: Sequence[str]) -> None:
        self._journal.write("published", file=item.name, contents=contents, version=dataclasses.asdict(version))
        self._published.append(version)
        self._closed[item.name] = item.stamp

    def _add(self, batch: list[_ReadyFile]) -> None:
        """Train files together, publish each, and prove every version."""
        names = [ready.item.name for ready in batch]
        message = f"training {', '.join(names)}" + (f" together ({len(batch)} files)" if len(batch) > 1 else "")
        run_ids = [ready.prepared.run.id for ready in batch]
        self._emit(StreamEvent("training", message, details={"files": names, "runs": run_ids}))
        known = {run_id for run_id in run_ids if is_finished(self._runs / run_id)}
        results = self._fit(batch)
        for ready in batch:
            is_done = self._find(ready.item.content, ready.item.config.task) is not None
            if ready.prepared.run.id in results and not is_done:
                self._publish(ready, results[ready.prepared.run.id], was_trained=ready.prepared.run.id not in known)
        self._prove()

    def _fit(self, batch: list[_ReadyFile], *, restart: bool = False) -> dict[str, Result]:
        """Train files; return results by run id. If a cohort fails, its files train alone, and bad ones are set
        aside."""
        runs = [ready.prepared.run for ready in batch]
        try:
            settings = dataclasses.replace(self._settings.fit, restart=restart)
            results = fit(runs, self._backbone, self._runs, settings, self._emit_epoch)
        except StoreDamaged as error:
            if restart:
                raise
            self._emit(StreamEvent("training", f"started again from the beginning: {error.message}"))
            return self._fit(batch, restart=True)
        except (DiskFull, StoreBusy):  # not the files' fault: they stay, and the next stream trains them
            raise
        except Exception as error:  # whatever is wrong with one file, for example its memory, the others go on
            if len(batch) == 1:
                self._set_aside(batch[0].item.path, batch[0].item.stamp, error)
                return {}
            return {run_id: result for ready in batch for run_id, result in self._fit([ready]).items()}
        return {result.run_id: result for result in results}

    def _publish(self, ready: _ReadyFile, result: Result, *, was_trained: bool) -> None:
        item, task = ready.item, ready.prepared.run.task
        if result.status == DIVERGED:
            hint = f"set a smaller learning rate in `{item.path.stem}.toml`, or correct its rows, and put it back"
            self._set_aside(item.path, item.stamp, Diverged(result.message, hint))
            return
        try:
            version = publish_result(ready.prepared, result)
        except (DiskFull, StoreBusy):  # not the file's fault
            raise
        except Exception as error:
            self._set_aside(item.path, item.stamp, error)
            return
        self._keep(item, version, [item.content, ready.rows])
        score = "" if result.dev_metric is None else f", dev {task.metric} {result.dev_metric:.4g}"
        message = f"{item.name}: published `{version.reference}`{score}" + ("" if was_trained else ", trained before")
        details = {
            "digest": version.digest,
            "run": ready.prepared.run.id,
            "dev": result.dev_metrics,
            "trained": was_trained,
            "report": self._write_report(ready, result, version),
        }
        self._emit(StreamEvent("published", message, item.name, task.name, version.reference, details))

    def _write_report(self, ready: _ReadyFile, result: Result, version: Version) -> str | None:
        """Write the report on a published file and return its path; None if it is not wanted or cannot be written."""
        if not self._settings.writes_reports:
            return None
        run = ready.prepared.run
        with suppress(InlayError):
            notes = [*run.task.notes, *run.start.notes, *run.notes]
            test = self._store.manifest(version).metrics.get("test")
            return str(write_run_report(ready.prepared, result, version, notes, test))
        return None

    def _prove(self) -> None:
        """Check every version on this backbone, alone and in mixed batches; raise `StoreDamaged` if one fails."""
        fingerprint = self._backbone.fingerprint
        infos = [info for task in self._store.ledger() for info in task.versions]
        ours = [info.version for info in infos if info.summary.backbone["fingerprint"] == fingerprint]
        different = list({version.digest: version for version in ours}.values())  # each content needs one proof
        checks = verify(different, self._backbone, self._store, engine=self._engine)
        fallen = {check.version.reference: check.problem for check in checks if not check.stands}
        self._num_standing = len({version.name for version in ours})
        if fallen:
            problems = "; ".join(f"`{reference}`: {problem}" for reference, problem in fallen.items())
            message = f"{len(fallen)} of {len(different)} versions failed the proof: {problems}"
            self._emit(StreamEvent("fallen", message, details={"fallen": fallen}))
            raise StoreDamaged(message, "restore them from a copy, or remove them, and start the stream again")
        self._journal.write("proved", num_versions=len(ours))
        num_tasks, num_elsewhere = self._num_standing, len(infos) - len(ours)
        is_exact = all(check.is_exact for check in checks)
        how = "bit for bit" if is_exact else "some within tolerance: their probes are another machine's"
        elsewhere = f"; {num_elsewhere} versions on other backbones not checked" if num_elsewhere else ""
        message = f"{num_tasks} {'task answers' if num_tasks == 1 else 'tasks answer'} as published"
        message += f" ({len(ours)} version{'s' * (len(ours) != 1)}, {how}{elsewhere})"
        details = {"num_tasks": num_tasks, "num_versions": len(ours), "is_exact": is_exact}
        self._emit(StreamEvent("stands", message, details={**details, "num_on_other_backbones": num_elsewhere}))

    def _set_aside(self, path: Path, stamp: Stamp, error: Exception) -> None:
        """Move a bad file to `bad/`, and emit an event."""
        if stamp[0] is None or self._folder.stamp(path) != stamp:
            return  # gone or changed meanwhile: the file there now is not the one that failed
        reason = error.to_json() if isinstance(error, InlayError) else {"message": f"{type(error).__name__}: {error}"}
        try:
            target = self._folder.move_aside(path, describe_error(error))
            where = f"moved to {target.relative_to(self._folder.path)}"
        except (OSError, DiskFull) as trouble:
            why = trouble.strerror if isinstance(trouble, OSError) else trouble.message
            where = f"stays where it is, as it cannot be moved ({why})"
            self._closed[path.name] = stamp
        self._aside.append(path.name)
        self._emit(StreamEvent("aside", f"bad file {path.name} {where}: {error}", path.name, details={"error": reason}))

    def _emit_epoch(self, event: Event) -> None:
        """Emit an event for each scored epoch of each run; other events of training are ignored."""
        if not isinstance(event, EpochEnded):
            return
        run, record, num_epochs = event.member.run, event.record, event.member.num_stages
        score = f"dev {run.metric} {record['dev'][run.metric]:.4g}"
        loss = "linear probe" if record["train_loss"] is None else f"loss {record['train_loss']:.4g}"
        message = f"{run.name}: epoch {record['epoch']} of {num_epochs}, {loss}, {score}"
        self._emit(StreamEvent("epoch", message, task=run.name, details={"run": run.id, **record}))
