"""The store: immutable versions in a folder or on object storage, which many processes may use at once.

An object holds one version's tensors and manifest and is named by the sha256 of its bytes; a reference gives it a task
name and a number. What always holds: a reference appears only after its object is whole and synced; no object or
reference is ever overwritten with other content; a number is never used twice, even after a removal. `folder.py` and
`bucket.py` know where the files are; docs/store-format.md describes both.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import BadConfig, BadData, InlayError, Missing, StoreDamaged, UnknownName, find_close
from inlay.store import format as form
from inlay.store.files import write_atomically
from inlay.store.folder import FolderFiles, writing
from inlay.store.format import Manifest, Summary, TaskInfo, Version, VersionInfo
from inlay.store.json_values import check_nested, parse_json

if TYPE_CHECKING:
    from torch import Tensor

    from inlay.store.bucket import BucketFiles
    from inlay.store.object_storage import ObjectStorage

OnDamage = Callable[[Version, InlayError], None]
"""Called with a version whose reference cannot be read (so its digest is empty), and the error."""
_ENTRY = re.compile(r"([1-9][0-9]{0,8})\.(json|removed)")
_ADDRESS = re.compile(r"(s3|gs|az|file):/{1,3}(.*)", re.DOTALL)  # a `Path` of an address has one slash only


@dataclass(frozen=True)
class Loaded:
    """The content of a version, exactly as published."""

    manifest: Manifest
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class GcReport:
    """The files that `gc` deleted, or would delete."""

    num_objects: int
    num_sidecars: int
    num_drafts: int
    freed_bytes: int
    paths: tuple[str, ...]
    dry_run: bool


class Store:
    """The versions under one folder, or one address of object storage such as `s3://bucket/prefix`.

    Making a Store writes nothing; the folder is created by the first write. `root` is always a folder of this machine:
    runs are trained there, and what was read from object storage is kept there too.

    >>> store = inlay.Store()
    >>> [task.name for task in store.ledger()]
    ['mood']
    >>> store.resolve("mood@best").reference
    'mood@1'
    """

    def __init__(self, root: Path | str | None = None) -> None:
        place = str(root or os.environ.get("INLAY_HOME") or "~/.inlay")
        self.files: FolderFiles | BucketFiles  # for this room alone
        if address := _ADDRESS.fullmatch(place):
            from inlay.store.bucket import BucketFiles, local_folder

            slashes = ":///" if address[1] == "file" else "://"
            self.place = f"{address[1]}{slashes}{address[2].rstrip('/')}"
            self.root = local_folder(self.place)
            self.files = BucketFiles(self.place, self.root)
        else:
            self.root = Path(place).expanduser()
            self.place = str(self.root)
            self.files = FolderFiles(self.root)

    @property
    def is_remote(self) -> bool:
        """Whether versions are on object storage; then `root` has only runs and copies."""
        return self.place != str(self.root)

    @property
    def storage(self) -> ObjectStorage | None:
        """The object storage of the versions; None for a folder."""
        return None if isinstance(self.files, FolderFiles) else self.files.storage

    def names(self) -> list[str]:
        """Return the tasks' names, sorted. A task whose versions were all removed is among them."""
        return self.files.list_names()

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    @staticmethod
    def check_name(name: str) -> None:
        """Refuse a text that cannot name a task, before any work is spent on it."""
        form.check_name(name)

    @staticmethod
    def legal_name(text: str) -> str:
        """Return a legal task name that is like a text, such as a file's name."""
        return form.legal_name(text)

    def run_folder(self, run_id: str) -> Path:
        """Return the folder for a run, which training creates and fills."""
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

        The sidecar (time, host, seconds, commit, machine) is kept beside the version, outside its digest; if the
        content already has a sidecar, that stays.
        """
        form.check_name(name)
        content = form.encode_object(tensors, manifest)
        # A manifest that could not be read again is refused.
        form.read_manifest(io.BytesIO(content), len(content), f"the manifest of `{name}`")
        return self._add(name, content, manifest, sidecar)

    def resolve(self, reference: str) -> Version:
        """Return the version that `NAME` (the latest), `NAME@3` or `NAME@best` means now.

        `best` has the best dev value of the latest version's metric, among versions with the same dev rows. Of equals
        it is the earliest, so that a version stays the best until another one beats it.
        """
        name, selector = form.parse_reference(reference)
        number = self._pick(name, selector)
        info = self._info(name, number)
        if info is None:  # removed just now
            raise self._unknown_version(name, number)
        return info.version

    def stamp(self, reference: str) -> int | None:
        """Return a number that changes whenever the meaning of a reference may change; None if it is not known yet.

        It is the time of the last change, so it is None as long as another change might still get the same time.
        """
        name = reference.partition("@")[0]
        return self.files.stamp(name) if form.is_name(name) else None

    def versions(self, name: str, on_damage: OnDamage | None = None) -> list[VersionInfo]:
        """Return the versions of a task, oldest first.

        A reference that cannot be read is an error, or with `on_damage` is left out and passed to that.
        """
        numbers, _ = self.numbers(name)
        infos = self._readable(name, numbers, on_damage)
        if not infos and not (numbers and on_damage):
            raise self._unknown_task(name)
        return infos

    def ledger(self, on_damage: OnDamage | None = None) -> list[TaskInfo]:
        """Return every task with its versions, by name. Only references are read, so listing a thousand tasks is fast.

        A reference that cannot be read is an error, or with `on_damage` is left out and passed to that.
        """
        tasks = []
        for name in self.files.list_names():
            versions = tuple(self._readable(name, self.numbers(name)[0], on_damage))
            if versions:
                tasks.append(TaskInfo(name, versions))
        return tasks

    def manifest(self, version: Version) -> Manifest:
        """Read a version's manifest from the head of its object, without torch and without checking the digest."""
        with self._explained(version), self.files.find_object(version.digest).open("rb") as file:
            place = self.files.place_of_object(version.digest)
            return form.read_manifest(file, os.fstat(file.fileno()).st_size, place)

    def sidecar(self, version: Version) -> dict[str, Any] | None:
        """Return how a version was made (time, host, commit, machine), or None if that is not known."""
        key = _sidecar_key(version.digest)
        try:
            tree = parse_json(self.files.read_note(key), f"{self.place}/{key}")
            check_nested(tree, "sidecar", f"{self.place}/{key}")
            return tree
        except FileNotFoundError:
            return None
        except StoreDamaged as error:
            raise StoreDamaged(error.message, "delete the file: the version is complete without it") from None

    def load(self, version: Version, *, check: bool = True, manifest: Manifest | None = None) -> Loaded:
        """Return a version's manifest and tensors.

        `check=False` skips comparing the bytes with the digest; with `manifest`, read before, it is not parsed again.
        """
        with self._explained(version):
            content = self.files.find_object(version.digest).read_bytes()
            place = self.files.place_of_object(version.digest)
            if check:
                _check_digest(hashlib.sha256(content).hexdigest(), version.digest, place)
            if manifest is None:
                manifest = form.read_manifest(io.BytesIO(content), len(content), place)
            return Loaded(manifest, form.decode_tensors(content, place))

    def check(self, version: Version) -> None:
        """Read a version's bytes and reference again; raise `StoreDamaged` if they are not what was published."""
        place = self.files.place_of_object(version.digest)
        with self._explained(version), self.files.find_object(version.digest, fresh=True).open("rb") as file:
            _check_digest(hashlib.file_digest(file, "sha256").hexdigest(), version.digest, place)
            size_bytes = os.fstat(file.fileno()).st_size
        manifest, info = self.manifest(version), self._info(version.name, version.number)
        if info is None:
            raise self._unknown_version(version.name, version.number)
        if (info.version.digest, info.size_bytes) != (version.digest, size_bytes) or not info.summary.matches(manifest):
            place = self.files.place_of_reference(version.name, version.number)
            hint = f"restore the file from a copy, or drop it: `inlay remove {version.reference}`"
            raise StoreDamaged(f"{place}: it does not agree with the object of `{version.reference}`", hint)

    def remove(self, reference: str) -> list[Version]:
        """Remove one version (`NAME@3`) or all of a task (`NAME`). Bytes stay until `gc`; no number is reused."""
        name, selector = form.parse_reference(reference)
        if selector is None and not self.numbers(name)[0]:
            raise self._unknown_task(name)
        removed = []
        # Exclusively: a publisher that listed the numbers before a removal might use the removed number again.
        with self.files.turn(exclusive=True):
            for number in self.numbers(name)[0] if selector is None else [self._pick(name, selector)]:
                removed.append(self._readable_or_blank(name, number))
                self.files.remove_reference(name, number)
        return removed

    def erase(self, name: str) -> int:
        """Remove a task with all its bytes that no other task needs, at once; return how many versions it had.

        An erasure that was stopped can be repeated.
        """
        numbers, files = self.numbers(name)[0], self.files
        if not isinstance(files, FolderFiles):
            mine = {self._readable_or_blank(name, number).digest for number in numbers} - {""}
            for digest in mine - self._live_digests(besides=name):  # before their references are removed
                files.erase_object(digest, lambda: self._live_digests(besides=name))
        if numbers:
            self.remove(name)
        self.gc()
        return len(numbers)

    def forget_gone(self) -> int:
        """Delete the copies on this machine of versions that are gone from object storage; return how many files."""
        return 0 if isinstance(self.files, FolderFiles) else self.files.forget_gone(self._live_digests())

    def _live_digests(self, besides: str = "") -> set[str]:
        """Return the digests of all versions, except those of the task `besides`."""
        tasks = (task for task in self.ledger(lambda version, error: None) if task.name != besides)
        return {info.version.digest for task in tasks for info in task.versions}

    def removed_versions(self, name: str) -> list[VersionInfo]:
        """Return what is left of the references of a task's removed versions, in a store in a folder."""
        found = []
        for number in self.numbers(name)[1]:
            where = self.files.place_of_reference(name, number).removesuffix(".json") + ".removed"
            with suppress(StoreDamaged, OSError):  # on object storage, and in copies, only the number is kept
                found.append(VersionInfo.from_json(Path(where).read_bytes(), where, name, number))
        return found

    def gc(self, *, dry_run: bool = False) -> GcReport:
        """Delete the files that no version needs: objects, sidecars, and the drafts that crashes left."""
        if not self.files.is_there():
            return GcReport(0, 0, 0, 0, (), dry_run)
        with self.files.turn(exclusive=True):
            live = {info.version.digest for task in self.ledger() for info in task.versions}
            unneeded = self.files.list_unneeded(live)
            for each in () if dry_run else unneeded:
                self.files.delete(each.place)
        num = Counter(each.kind for each in unneeded)
        freed_bytes, places = sum(each.num_bytes for each in unneeded), tuple(each.place for each in unneeded)
        return GcReport(num["object"], num["sidecar"], num["draft"], freed_bytes, places, dry_run)

    def register_backbone(self, name: str, here: str | None = None) -> None:
        """Record that the user named a backbone: versions with that backbone may load it, under `here` or its name."""
        content = json.dumps({"format": 1, "here": here or name, "name": name}, sort_keys=True).encode()
        key, known = _backbone_key(name), None
        with suppress(FileNotFoundError):
            known = self.files.read_note(key)
        if known != content:
            with self.files.turn(exclusive=False):
                self.files.change_note(key, content)

    def find_backbone(self, name: str) -> str | None:
        """Return the name by which to load a backbone that the user once named; None if only stored data name it."""
        key = _backbone_key(name)
        with suppress(FileNotFoundError, StoreDamaged):  # a damaged record counts as none: the user is asked again
            known = parse_json(self.files.read_note(key), f"{self.place}/{key}")
            if known.get("name") == name and isinstance(known.get("here"), str):
                return str(known["here"])
        return None

    def export(self, reference: str, path: Path | str) -> Path:
        """Write a version as one file and return its path. A folder gets `NAME.inlay`; a missing folder is not made."""
        version, path = self.resolve(reference), Path(path)
        target = path / f"{version.name}.inlay" if path.is_dir() else path
        if not target.parent.is_dir():
            raise Missing(f"no folder `{target.parent}`", "create it first, or choose another path for the export")
        with self._explained(version):
            content = self.files.find_object(version.digest).read_bytes()
            place = self.files.place_of_object(version.digest)
            _check_digest(hashlib.sha256(content).hexdigest(), version.digest, place)
        export = form.Export(version.name, version.digest, content, self.sidecar(version))
        with writing(target, "choose another path for the export"):
            write_atomically(target, export.to_bytes())
        return target

    def import_(
        self, path: Path | str, name: str | None = None, check: Callable[[Loaded, Version], None] | None = None
    ) -> Version:
        """Add the version in an exported file, under its own name or another; a damaged file is refused.

        If the name already has a version with this content, that version is returned. `check` is called before the
        version is added, and may refuse it, as `inlay.exchange.import_file` does with what the backbone shows.
        """
        path = Path(path)
        # 1. read and check the file
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
        # 2. check the name
        if name is None and not form.is_name(export.name):
            raise BadData(f"its task has an illegal name, `{export.name}`", "import it with `--name NAME`", path=path)
        name = export.name if name is None else name
        form.check_name(name)
        # 3. let the caller check the version
        if check is not None:
            try:
                loaded = Loaded(manifest, form.decode_tensors(export.content, "object.safetensors"))
                check(loaded, Version(name, 1, export.digest))
            except (StoreDamaged, BadConfig) as error:
                raise BadData(error.message, "export it again from the store it came from", path=path) from None
        return self._add(name, export.content, manifest, export.sidecar)

    def _add(self, name: str, content: bytes, manifest: Manifest, sidecar: Mapping[str, Any] | None) -> Version:
        """Write a version's object and sidecar, then a reference with the next number; or return an equal version."""
        digest = hashlib.sha256(content).hexdigest()
        notes = None if sidecar is None else json.dumps(sidecar, sort_keys=True, indent=1).encode()
        with self.files.turn(exclusive=False):
            self.files.add_object(digest, content)
            if notes is not None:
                self.files.add_note(_sidecar_key(digest), notes)
            published_at = datetime.now(UTC).isoformat(timespec="seconds")
            while True:
                numbers, removed = self.numbers(name)
                for number in numbers:
                    version = self._readable_or_blank(name, number)
                    if version.digest == digest:
                        return version
                version = Version(name, max([0, *numbers, *removed]) + 1, digest)
                info = VersionInfo(version, published_at, len(content), Summary.of(manifest))
                with suppress(FileExistsError):  # another process took the number: list them again
                    self.files.add_reference(version, info.to_json().encode())
                    return version

    def _pick(self, name: str, selector: str | None) -> int:
        """Return the number that a selector means; references are read only for `best`."""
        numbers, _ = self.numbers(name)
        if not numbers and (selector is None or selector == "best"):
            raise self._unknown_task(name)
        if selector is None:
            return numbers[-1]
        if selector != "best":
            if int(selector) not in numbers:
                numbers, _ = self.numbers(name, fresh=True)  # another machine may have published it just now
            if int(selector) not in numbers:
                raise self._unknown_version(name, int(selector))
            return int(selector)
        task = TaskInfo(name, tuple(self.versions(name)))
        if task.best is None:
            metric = task.latest.summary.metric
            hint = f"no version with the dev data of the latest has a dev {metric}; name a number: `{name}@1`"
            raise UnknownName("version", f"{name}@best", (), hint=hint)
        return task.best.version.number

    def numbers(self, name: str, *, fresh: bool = False) -> tuple[list[int], list[int]]:
        """Return the numbers of a task's versions, and those of removed ones, in order. An illegal name has none.

        On object storage a list is used again for a moment; `fresh` makes a new one.
        """
        found: dict[str, list[int]] = {"json": [], "removed": []}
        if form.is_name(name):
            for match in filter(None, map(_ENTRY.fullmatch, self.files.list_entries(name, fresh=fresh))):
                found[match[2]].append(int(match[1]))
        return sorted(set(found["json"]) - set(found["removed"])), sorted(found["removed"])

    def _info(self, name: str, number: int) -> VersionInfo | None:
        """Read a reference; None if it was removed since the folder was listed."""
        where = self.files.place_of_reference(name, number)
        try:
            return VersionInfo.from_json(self.files.read_reference(name, number), where, name, number)
        except FileNotFoundError:
            return None
        except (StoreDamaged, OSError) as error:
            hint = f"restore the file from a copy, or drop it: `inlay remove {name}@{number}`; other versions are fine"
            message = f"{where}: cannot be read: {error.strerror}" if isinstance(error, OSError) else error.message
            raise StoreDamaged(message, hint) from None

    def _readable(self, name: str, numbers: Sequence[int], on_damage: OnDamage | None) -> list[VersionInfo]:
        """Read references; one that cannot be read is raised, or passed to `on_damage`."""
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
        """Return a version; if its reference is damaged, with an empty digest, so that no other version is blocked."""
        with suppress(StoreDamaged):
            if info := self._info(name, number):
                return info.version
        return Version(name, number, "")

    def _unknown_task(self, name: str) -> InlayError:
        """Return the error for a task that is not in the store, with similar names."""
        names, near, hint = self.files.list_names(), form.legal_name(name), None
        if near in names and self.numbers(near)[0]:
            hint = f"did you mean `{near}`?"
        elif self.numbers(name)[1]:
            hint = "all its versions were removed; train or import it again"
        # Only as many tasks are looked at as the error shows: there may be thousands.
        likely = dict.fromkeys([*find_close(name, names, 3), *names])
        names = list(itertools.islice((known for known in likely if self.numbers(known)[0]), 21))
        return UnknownName("task", name, names, hint=hint)

    def _unknown_version(self, name: str, number: int) -> InlayError:
        """Return the error for a version that is not in the store, with the numbers that are."""
        numbers, removed = self.numbers(name)
        if not numbers and number not in removed:
            return self._unknown_task(name)
        fate = "it was removed; " if number in removed else ""
        there = ", ".join(map(str, numbers)) or "none"
        return UnknownName("version", f"{name}@{number}", (), hint=f"{fate}versions of `{name}`: {there}")

    @contextmanager
    def _explained(self, version: Version) -> Iterator[None]:
        """Add a hint to an error about an object that cannot be read."""
        hint = f"restore it from a copy, or `inlay remove {version.reference}` and train or import it again"
        place = self.files.place_of_object(version.digest)
        try:
            yield
        except StoreDamaged as error:
            raise StoreDamaged(error.message, hint) from None
        except FileNotFoundError:
            if version.number not in self.numbers(version.name)[0]:
                raise self._unknown_version(version.name, version.number) from None
            raise StoreDamaged(f"{place}: the object of `{version.reference}` is missing", hint) from None
        except OSError as error:
            raise StoreDamaged(f"{place}: cannot be read: {error.strerror}", hint) from None


def _check_digest(found: str, wanted: str, place: str) -> None:
    if found != wanted:
        raise StoreDamaged(f"{place}: these are not the bytes that were published (their sha256 is {found[:12]}…)")


def _sidecar_key(digest: str) -> str:
    return f"sidecars/{digest}.json"


def _backbone_key(name: str) -> str:
    return f"backbones/{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()}.json"
