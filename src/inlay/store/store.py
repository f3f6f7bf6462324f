"""The store: a folder of immutable versions that many processes may use at once.

An object holds one version's tensors and manifest and is named by the sha256 of its bytes; a reference gives it a task
name and a number. What always holds: a reference appears only after the object it names is whole and synced; no
object or reference is ever rewritten with other content; a number is never given twice, even after a removal.
docs/store-format.md has the folders.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import BadConfig, BadData, InlayError, Missing, StoreDamaged, UnknownName, find_close
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
from inlay.store.format import Manifest, Summary, TaskInfo, Version, VersionInfo
from inlay.store.json_values import check_nested, parse_json

if TYPE_CHECKING:
    from torch import Tensor

OnDamage = Callable[[Version, InlayError], None]
"""Called with a version whose reference cannot be read, its digest unknown, and why."""
_ENTRY = re.compile(r"([1-9][0-9]{0,8})\.(json|removed)")
_STALE_SECONDS = 3600
_SETTLED_NS = 5_000_000_000  # longer than the resolution of any file system's timestamps


@dataclass(frozen=True)
class Loaded:
    """A version's content read back, exactly as published."""

    manifest: Manifest
    tensors: dict[str, Tensor]


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
        self._listed: tuple[int, list[str]] | None = None  # the tasks' names, and when they last changed

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
        content = form.encode_object(tensors, manifest)
        form.read_manifest(io.BytesIO(content), len(content), f"the manifest of `{name}`")  # or nobody could read it
        return self._add(name, content, manifest, sidecar)

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

    def versions(self, name: str, on_damage: OnDamage | None = None) -> list[VersionInfo]:
        """Return the versions of a task, oldest first.

        A reference that cannot be read is an error, or left out if `on_damage` is there to hear of it.
        """
        numbers, _ = self._numbers(name)
        infos = self._readable(name, numbers, on_damage)
        if not infos and not (numbers and on_damage):
            raise self._unknown_task(name)
        return infos

    def ledger(self, on_damage: OnDamage | None = None) -> list[TaskInfo]:
        """Return every task with its versions, by name. It opens only references, so a thousand tasks list at once.

        A reference that cannot be read is an error, or left out if `on_damage` is there to hear of it.
        """
        tasks = []
        for name in self._names():
            versions = tuple(self._readable(name, self._numbers(name)[0], on_damage))
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
            tree = parse_json(path.read_bytes(), str(path))
            check_nested(tree, "sidecar", str(path))
            return tree
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
        """Reread a version's bytes and reference, and raise `StoreDamaged` if they are not what was published."""
        path = self._object_path(version.digest)
        with self._explained(version), path.open("rb") as file:
            _check_digest(hashlib.file_digest(file, "sha256").hexdigest(), version.digest, path)
            size_bytes = os.fstat(file.fileno()).st_size
        manifest, info = self.manifest(version), self._info(version.name, version.number)
        if info is None:
            raise self._unknown_version(version.name, version.number)
        if (info.version.digest, info.size_bytes) != (version.digest, size_bytes) or not info.summary.matches(manifest):
            path = self._reference_path(version.name, version.number)
            hint = f"restore the file from a copy, or drop it: `inlay remove {version.reference}`"
            raise StoreDamaged(f"{path}: it says of `{version.reference}` what its object does not", hint)

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

    def register_backbone(self, name: str, here: str | None = None) -> None:
        """Keep that the user named a backbone: versions that name it may have it loaded, as `here` (or the same)."""
        content = json.dumps({"format": 1, "here": here or name, "name": name}, sort_keys=True).encode()
        path = self._backbone_path(name)
        if not path.is_file() or path.read_bytes() != content:
            with self._locked(exclusive=False):
                write_atomically(path, content)

    def find_backbone(self, name: str) -> str | None:
        """Return what a backbone that the user named is called here; None if only stored data name it."""
        path = self._backbone_path(name)
        with suppress(FileNotFoundError, StoreDamaged):  # damage is as if it had not been named: it is asked for again
            known = parse_json(path.read_bytes(), str(path))
            if known.get("name") == name and isinstance(known.get("here"), str):
                return str(known["here"])
        return None

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

    def import_(
        self, path: Path | str, name: str | None = None, check: Callable[[Loaded, Version], None] | None = None
    ) -> Version:
        """Add the version in an exported file, under its own name or another; a damaged file is refused.

        If the name already has a version of this content, that version is returned. `check` is given what would be
        added, and refuses what only its backbone can tell, as `inlay.exchange.import_file` does.
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
        if check is not None:
            try:
                loaded = Loaded(manifest, form.decode_tensors(export.content, "object.safetensors"))
                check(loaded, Version(name, 1, export.digest))
            except (StoreDamaged, BadConfig) as error:
                raise BadData(error.message, "export it again from the store it came from", path=path) from None
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
            changed_ns = os.stat(self.root / "tasks").st_mtime_ns
            if self._listed is not None and self._listed[0] == changed_ns:
                return list(self._listed[1])
            with os.scandir(self.root / "tasks") as entries:
                names = sorted(entry.name for entry in entries if form.is_name(entry.name) and entry.is_dir())
            if time.time_ns() - changed_ns > _SETTLED_NS:  # else another change might get the same time
                self._listed = (changed_ns, names)
            return list(names)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InlayError(f"cannot read the store `{self.root}`: {error.strerror}", _ELSEWHERE) from None

    def _numbers(self, name: str) -> tuple[list[int], list[int]]:
        """Return the numbers a name has, and those it had, in order. An illegal name has none."""
        found: dict[str, list[int]] = {"json": [], "removed": []}
        if form.is_name(name):
            try:
                entries = os.listdir(f"{self.root}/tasks/{name}")
            except (FileNotFoundError, NotADirectoryError):
                entries = []
            except OSError as error:
                message = f"{self.root}/tasks/{name}: cannot be read: {error.strerror}"
                raise StoreDamaged(message, "make the folder readable, or restore it from a copy") from None
            for match in filter(None, map(_ENTRY.fullmatch, entries)):
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
        except (StoreDamaged, OSError) as error:
            hint = f"restore the file from a copy, or drop it: `inlay remove {name}@{number}`; other versions stand"
            message = f"{where}: cannot be read: {error.strerror}" if isinstance(error, OSError) else error.message
            raise StoreDamaged(message, hint) from None

    def _readable(self, name: str, numbers: Sequence[int], on_damage: OnDamage | None) -> list[VersionInfo]:
        """Read the references that can be read; the others are raised, or handed to `on_damage`."""
        infos = []
        for number in numbers:
            try:
                if info := self._info(name, number):
                    infos.append(info)
            except InlayError as error:
                if on_damage is None:
                    raise
                on_damage(Version(name, number, ""), error)
        return infos

    def _readable_or_blank(self, name: str, number: int) -> Version:
        """Return a version, with an empty digest if its reference is damaged: damage must not block others."""
        with suppress(StoreDamaged):
            if info := self._info(name, number):
                return info.version
        return Version(name, number, "")

    def _unknown_task(self, name: str) -> InlayError:
        names, near, hint = self._names(), form.legal_name(name), None
        if near in names and self._numbers(near)[0]:
            hint = f"did you mean `{near}`?"
        elif self._numbers(name)[1]:
            hint = "all its versions were removed; train or import it again"
        # Only as many tasks are opened as the error shows: there may be thousands, and as many requests that ask.
        likely = dict.fromkeys([*find_close(name, names, 3), *names])
        names = list(itertools.islice((known for known in likely if self._numbers(known)[0]), 21))
        return UnknownName("task", name, names, hint=hint)

    def _unknown_version(self, name: str, number: int) -> InlayError:
        numbers, removed = self._numbers(name)
        if not numbers and number not in removed:
            return self._unknown_task(name)
        fate = "it was removed; " if number in removed else ""
        there = ", ".join(map(str, numbers)) or "none"
        return UnknownName("version", f"{name}@{number}", (), hint=f"{fate}versions of `{name}`: {there}")

    def _stray_drafts(self) -> list[Path]:
        # Writers below these folders hold the lock, so while we hold it exclusively, no draft has a writer.
        strays = [
            path
            for folder in ("objects", "tasks", "sidecars", "backbones")
            for path in _drafts_under(self.root / folder)
        ]
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

    def _backbone_path(self, name: str) -> Path:
        return self.root / "backbones" / f"{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()}.json"

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
