"""The store: a folder of immutable versions that many processes may use at once.

An object holds one version's tensors and manifest and is named by the sha256 of its bytes; a reference gives it a task
name and a number. What always holds: a reference appears only after the object it names is whole and synced; no
object or reference is ever rewritten with other content; a number is never given twice, even after a removal.
docs/store-format.md has the folders.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import BadData, InlayError, Missing, StoreDamaged, UnknownName
from inlay.store import format as form
from inlay.store.files import (
    DRAFT_PREFIX,
    is_abandoned,
    locked,
    make_directory,
    sync_directory,
    write_atomically,
    write_once,
)
from inlay.store.format import Manifest, Summary, Version, VersionInfo

if TYPE_CHECKING:
    from torch import Tensor

_ENTRY = re.compile(r"([1-9][0-9]{0,8})\.(json|removed)")
_STALE_SECONDS = 3600
_SETTLED_NS = 5_000_000_000  # longer than the resolution of any file system's timestamps


@dataclass(frozen=True)
class Loaded:
    """A version's content read back, exactly as published."""

    manifest: Manifest
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class TaskInfo:
    """A task in the ledger, with its versions, oldest first; there is at least one."""

    name: str
    versions: tuple[VersionInfo, ...]

    @property
    def latest(self) -> VersionInfo:
        """Return the version that `NAME` alone means."""
        return self.versions[-1]

    @property
    def best(self) -> VersionInfo | None:
        """Return the version that `NAME@best` means; None if no version has a dev score to compare.

        It is the first with the best dev value of the latest version's metric, among versions with the same dev rows.
        """
        latest = self.latest.summary
        sign = 1 if latest.higher_is_better else -1
        scored = [
            (sign * score, -info.version.number, info)
            for info in self.versions
            if info.summary.dev_digest == latest.dev_digest and (score := info.summary.score(latest.metric)) is not None
        ]
        return max(scored, key=lambda item: item[:2])[2] if scored else None


@dataclass(frozen=True)
class GcReport:
    """The files that `gc` deleted, or would delete."""

    num_objects: int
    num_sidecars: int
    num_drafts: int
    freed_bytes: int
    paths: tuple[Path, ...]
    dry_run: bool


class Store:
    """The versions under one folder. Making a Store touches nothing; the folder appears with the first write."""

    def __init__(self, root: Path | str | None = None) -> None:
        self.root = Path(root or os.environ.get("INLAY_HOME") or "~/.inlay").expanduser()

    @staticmethod
    def check_name(name: str) -> None:
        """Refuse a text that cannot name a task, before any work is spent on it."""
        form.check_name(name)

    @staticmethod
    def legal_name(text: str) -> str:
        """Return the legal task name nearest to a text, such as a file's name."""
        return form.legal_name(text)

    def run_folder(self, run_id: str) -> Path:
        """Return the folder where training keeps a run. The store only names it."""
        if not form.is_name(run_id):
            raise UnknownName("run", run_id, (), hint="the id of a run has 16 hexadecimal digits")
        return self.root / "runs" / run_id

    def publish(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        manifest: Manifest,
        sidecar: Mapping[str, Any] | None = None,
    ) -> Version:
        """Add one immutable version. Publishing the same content again returns the same version.

        The sidecar (time, host, seconds, commit, machine) is kept beside the version, outside its digest; where
        the content already has one, the first stays.
        """
        form.check_name(name)
        return self._add(name, form.encode_object(tensors, manifest), manifest, sidecar)

    def resolve(self, reference: str) -> Version:
        """Return the version that `NAME` (the latest), `NAME@3` or `NAME@best` means now.

        `best` has the best dev value of the latest version's metric, among versions measured on the same dev rows. Of
        equals it is the earliest, so that a version stays the best until it is beaten.
        """
        name, selector = form.parse_reference(reference)
        number = self._pick(name, selector)
        info = self._info(name, number)
        if info is None:  # removed while we looked
            raise self._unknown_version(name, number)
        return info.version

    def stamp(self, reference: str) -> int | None:
        """Return a number that changes whenever the meaning of a reference may have; None if it is too early to tell.

        It is the time of the last change, so it is None for as long as another change might still get the same time.
        """
        name = reference.partition("@")[0]
        try:
            changed_ns = os.stat(f"{self.root}/tasks/{name}").st_mtime_ns if form.is_name(name) else None
        except OSError:
            return None
        return changed_ns if changed_ns is not None and time.time_ns() - changed_ns > _SETTLED_NS else None

    def versions(self, name: str) -> list[VersionInfo]:
        """Return the versions of a task, oldest first."""
        numbers, _ = self._numbers(name)
        infos = [self._info(name, number) for number in numbers]
        if not any(infos):
            raise self._unknown_task(name)
        return [info for info in infos if info is not None]

    def ledger(self) -> list[TaskInfo]:
        """Return every task with its versions, by name. It opens only references, so a thousand tasks list at once."""
        tasks = []
        for name in self._names():
            infos = [self._info(name, number) for number in self._numbers(name)[0]]
            versions = tuple(info for info in infos if info is not None)
            if versions:
                tasks.append(TaskInfo(name, versions))
        return tasks

    def manifest(self, version: Version) -> Manifest:
        """Read a version's manifest from the head of its object. Needs no torch, and checks no digest."""
        path = self._object_path(version.digest)
        with self._explained(version), path.open("rb") as file:
            return form.read_manifest(file, os.fstat(file.fileno()).st_size, str(path))

    def sidecar(self, version: Version) -> dict[str, Any] | None:
        """Return what is known of how a version was made (time, host, commit, machine), or None."""
        path = self._sidecar_path(version.digest)
        try:
            return form.parse_json(path.read_bytes(), str(path))
        except FileNotFoundError:
            return None
        except StoreDamaged as error:
            raise StoreDamaged(error.message, "delete the file: the version stands without it") from None

    def load(self, version: Version, *, check: bool = True, manifest: Manifest | None = None) -> Loaded:
        """Return a version's manifest and tensors.

        `check=False` skips comparing the bytes with the digest; a `manifest` that was read before is not parsed again.
        """
        path = self._object_path(version.digest)
        with self._explained(version):
            content = path.read_bytes()
            if check:
                _check_digest(hashlib.sha256(content).hexdigest(), version.digest, path)
            if manifest is None:
                manifest = form.read_manifest(io.BytesIO(content), len(content), str(path))
            return Loaded(manifest, form.decode_tensors(content, str(path)))

    def check(self, version: Version) -> None:
        """Reread a version's bytes and raise `StoreDamaged` if they are not what was published."""
        path = self._object_path(version.digest)
        with self._explained(version), path.open("rb") as file:
            _check_digest(hashlib.file_digest(file, "sha256").hexdigest(), version.digest, path)
        self.manifest(version)

    def remove(self, reference: str) -> list[Version]:
        """Drop one version (`NAME@3`) or all of a task (`NAME`). Bytes stay until `gc`; numbers are not used again."""
        name, selector = form.parse_reference(reference)
        if selector is None and not self._numbers(name)[0]:
            raise self._unknown_task(name)
        removed = []
        # Exclusively: a publisher that listed the numbers before a removal might give the removed one again.
        with self._locked(exclusive=True):
            for number in self._numbers(name)[0] if selector is None else [self._pick(name, selector)]:
                removed.append(self._readable_or_blank(name, number))
                path = self._reference_path(name, number)
                os.rename(path, path.with_suffix(".removed"))
                sync_directory(path.parent)
        return removed

    def gc(self, *, dry_run: bool = False) -> GcReport:
        """Delete the files that no reference needs: objects, sidecars, and the drafts that crashes left."""
        if not self.root.exists():
            return GcReport(0, 0, 0, 0, (), dry_run)
        # Exclusively: between a publisher's object and its reference, the object looks unneeded.
        with self._locked(exclusive=True):
            live = {info.version.digest for task in self.ledger() for info in task.versions}
            objects = _unneeded((self.root / "objects").glob("??/*.safetensors"), live)
            sidecars = _unneeded((self.root / "sidecars").glob("*.json"), live)
            drafts = self._stray_drafts()
            paths = (*objects, *sidecars, *drafts)
            freed_bytes = sum(path.stat().st_size for path in paths)
            for path in () if dry_run else paths:
                path.unlink(missing_ok=True)
        return GcReport(len(objects), len(sidecars), len(drafts), freed_bytes, paths, dry_run)

    def export(self, reference: str, path: Path | str) -> Path:
        """Write a version as one file and return its path. A folder gets `NAME.inlay`; a missing folder is not made."""
        version, path = self.resolve(reference), Path(path)
        target = path / f"{version.name}.inlay" if path.is_dir() else path
        if not target.parent.is_dir():
            raise Missing(f"no folder `{target.parent}`", "create it first, or choose another path for the export")
        source = self._object_path(version.digest)
        with self._explained(version):
            content = source.read_bytes()
            _check_digest(hashlib.sha256(content).hexdigest(), version.digest, source)
        export = form.Export(version.name, version.digest, content, self.sidecar(version))
        with _writing(target, "choose another path for the export"):
            write_atomically(target, export.to_bytes())
        return target

    def import_(self, path: Path | str, name: str | None = None) -> Version:
        """Add the version in an exported file, under its own name or another; a damaged file is refused.

        If the name already has a version of this content, that version is returned.
        """
        path = Path(path)
        try:
            export = form.read_export(path)
            manifest = form.check_object(export.content, "object.safetensors")
        except StoreDamaged as error:
            raise BadData(error.message, "export it again from the store it came from", path=path) from None
        except OSError as error:
            hint = "give a file that `inlay export` wrote, or a folder of AdapterHub or PEFT"
            raise Missing(f"cannot read `{path}`: {error.strerror}", hint) from None
        if hashlib.sha256(export.content).hexdigest() != export.digest:
            raise BadData("its bytes are not those that were exported", "copy or export it again", path=path)
        if name is None and not form.is_name(export.name):
            raise BadData(f"its task has an illegal name, `{export.name}`", "import it with `--name NAME`", path=path)
        name = export.name if name is None else name
        form.check_name(name)
        return self._add(name, export.content, manifest, export.sidecar)

    def _add(self, name: str, content: bytes, manifest: Manifest, sidecar: Mapping[str, Any] | None) -> Version:
        digest = hashlib.sha256(content).hexdigest()
        notes = None if sidecar is None else json.dumps(sidecar, sort_keys=True, indent=1).encode()
        with self._locked(exclusive=False):
            path = self._object_path(digest)
            if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == digest:
                sync_directory(path.parent)  # whoever wrote it may have died before doing so
            else:
                write_atomically(path, content)  # also mends a damaged object: the name says what the bytes must be
            if notes is not None:
                with suppress(FileExistsError):
                    write_once(self._sidecar_path(digest), notes)
            return self._refer(name, digest, len(content), Summary.of(manifest))

    def _refer(self, name: str, digest: str, size_bytes: int, summary: Summary) -> Version:
        published_at = datetime.now(UTC).isoformat(timespec="seconds")
        make_directory(self._reference_path(name, 1).parent)
        while True:
            numbers, removed = self._numbers(name)
            for number in numbers:
                version = self._readable_or_blank(name, number)
                if version.digest == digest:
                    return version
            version = Version(name, max([0, *numbers, *removed]) + 1, digest)
            info = VersionInfo(version, published_at, size_bytes, summary)
            with suppress(FileExistsError):  # another process took the number: look again
                write_once(self._reference_path(name, version.number), info.to_json().encode())
                return version

    def _pick(self, name: str, selector: str | None) -> int:
        """Return the number a selector means, without opening references if possible."""
        numbers, _ = self._numbers(name)
        if not numbers and (selector is None or selector == "best"):
            raise self._unknown_task(name)
        if selector is None:
            return numbers[-1]
        if selector != "best":
            if int(selector) not in numbers:
                raise self._unknown_version(name, int(selector))
            return int(selector)
        task = TaskInfo(name, tuple(self.versions(name)))
        if task.best is None:
            metric = task.latest.summary.metric
            hint = f"no version with the dev data of the latest has a dev {metric}; name a number: `{name}@1`"
            raise UnknownName("version", f"{name}@best", (), hint=hint)
        return task.best.version.number

    def _names(self) -> list[str]:
        try:
            with os.scandir(self.root / "tasks") as entries:
                return sorted(entry.name for entry in entries if form.is_name(entry.name) and entry.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InlayError(f"cannot read the store `{self.root}`: {error.strerror}", _ELSEWHERE) from None

    def _numbers(self, name: str) -> tuple[list[int], list[int]]:
        """Return the numbers a name has, and those it had, in order. An illegal name has none."""
        found: dict[str, list[int]] = {"json": [], "removed": []}
        if form.is_name(name):
            with suppress(FileNotFoundError, NotADirectoryError):
                for entry in os.listdir(f"{self.root}/tasks/{name}"):
                    if match := _ENTRY.fullmatch(entry):
                        found[match[2]].append(int(match[1]))
        return sorted(found["json"]), sorted(found["removed"])

    def _info(self, name: str, number: int) -> VersionInfo | None:
        """Read a reference; None if it was removed since the folder was listed."""
        where = f"{self.root}/tasks/{name}/{number}.json"
        try:
            with open(where, "rb") as file:
                content = file.read()
            return VersionInfo.from_json(content, where, name, number)
        except FileNotFoundError:
            return None
        except StoreDamaged as error:
            hint = f"restore the file from a copy, or drop it: `inlay remove {name}@{number}`; other versions stand"
            raise StoreDamaged(error.message, hint) from None

    def _readable_or_blank(self, name: str, number: int) -> Version:
        """Return a version, with an empty digest if its reference is damaged: damage must not block others."""
        with suppress(StoreDamaged):
            if info := self._info(name, number):
                return info.version
        return Version(name, number, "")

    def _unknown_task(self, name: str) -> InlayError:
        names = [known for known in self._names() if self._numbers(known)[0]]
        hint = None
        if form.legal_name(name) in names:
            hint = f"did you mean `{form.legal_name(name)}`?"
        elif self._numbers(name)[1]:
            hint = "all its versions were removed; train or import it again"
        return UnknownName("task", name, names, hint=hint)

    def _unknown_version(self, name: str, number: int) -> InlayError:
        numbers, removed = self._numbers(name)
        if not numbers and number not in removed:
            return self._unknown_task(name)
        fate = "it was removed; " if number in removed else ""
        there = ", ".join(map(str, numbers)) or "none"
        return UnknownName("version", f"{name}@{number}", (), hint=f"{fate}versions of `{name}`: {there}")

    def _stray_drafts(self) -> list[Path]:
        # Writers below these three folders hold the lock, so while we hold it exclusively, no draft has a writer.
        strays = [path for folder in ("objects", "tasks", "sidecars") for path in _drafts_under(self.root / folder)]
        # Runs are written without the lock, perhaps from another machine. Their writers hold the drafts themselves;
        # those of an older Inlay do not, so only what is old as well is taken for left.
        for path in (*_drafts_under(self.root / "runs"), *_drafts_under(self.root / "budgets")):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS and is_abandoned(path):
                    strays.append(path)
        return strays

    def _object_path(self, digest: str) -> Path:
        return self.root / "objects" / digest[:2] / f"{digest}.safetensors"

    def _sidecar_path(self, digest: str) -> Path:
        return self.root / "sidecars" / f"{digest}.json"

    def _reference_path(self, name: str, number: int) -> Path:
        return self.root / "tasks" / name / f"{number}.json"

    @contextmanager
    def _locked(self, *, exclusive: bool) -> Iterator[None]:
        with _writing(self.root, _ELSEWHERE):
            make_directory(self.root)
            with locked(self.root / "lock", exclusive=exclusive, in_turn=True):
                yield

    @contextmanager
    def _explained(self, version: Version) -> Iterator[None]:
        """Add to an error the hint what to do about an object that cannot be read."""
        hint = f"restore it from a copy, or `inlay remove {version.reference}` and train or import it again"
        path = self._object_path(version.digest)
        try:
            yield
        except StoreDamaged as error:
            raise StoreDamaged(error.message, hint) from None
        except FileNotFoundError:
            if version.number not in self._numbers(version.name)[0]:
                raise self._unknown_version(version.name, version.number) from None
            raise StoreDamaged(f"{path}: the object of `{version.reference}` is missing", hint) from None
        except OSError as error:
            raise StoreDamaged(f"{path}: cannot be read: {error.strerror}", hint) from None


_ELSEWHERE = "choose another store with `--store DIR` or $INLAY_HOME"


@contextmanager
def _writing(target: Path, hint: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InlayError(f"cannot write `{target}`: {error.strerror or error}", hint) from error


def _check_digest(found: str, wanted: str, path: Path) -> None:
    if found != wanted:
        raise StoreDamaged(f"{path}: these are not the bytes that were published (their sha256 is {found[:12]}…)")


def _unneeded(paths: Iterator[Path], live: set[str]) -> list[Path]:
    """Return the files named by a digest that nothing refers to; files that are not ours are left alone."""
    return sorted(path for path in paths if form.is_digest(path.stem) and path.stem not in live)


def _drafts_under(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"{DRAFT_PREFIX}*"))
