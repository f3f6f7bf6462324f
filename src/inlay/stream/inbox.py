"""The inbox of a stream: the watched folder, the settings of each file in it, and the journal of results.

Nothing here trains or publishes. A file counts as settled only if it has not changed between two looks. A bad file is
never lost: it is moved to `bad/`, after its error is written there. A line of the journal is on disk before the call
returns, and a line that was cut off by a kill is dropped. People who may put files into the folder are not trusted with
more: a file's own settings only decide how its own data is read and trained, and no path leaves the folder.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.errors import BadConfig, BadData, InlayError, Missing
from inlay.locks import lock_file
from inlay.settings import RunConfig, digest, from_tree
from inlay.store import Store, Version, write_atomically

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
UNFINISHED_SUFFIXES = (".tmp", ".part")
BAD_FOLDER = "bad"
OWN_SECTIONS = ("method", "train", "data")
"""the sections that a file's own settings may have; `backbone` and `task` may only repeat the actual values"""
MAX_OWN_BYTES = 1_000_000
MOST_DOTS = 200
"""most dots in a line of settings: the TOML reader needs the square of a key's parts, 10 GB for 50,000 dots"""
MOST_OF_OWN = {
    "epochs": 100,
    "contrast": 10_000,
    "contrast_folds": 20,
    "batch_size": 4096,
    "beams": 16,
    "max_answer": 512,
}
"""largest values of settings that would keep other files waiting, unless the stream's own settings are larger"""

Stamp = tuple[tuple[int, int, int] | None, ...]
"""size, time of change and inode of a data file and of its settings file; equal as long as neither changes"""


@dataclass(frozen=True)
class DataFile:
    """A data file, as it was when it was looked at."""

    path: Path
    stamp: Stamp
    config: RunConfig
    """the stream's settings, overridden by the file's own"""
    own: dict[str, Any]
    """the file's own settings, as written in its `NAME.toml`"""
    content: str
    """digest of its bytes, its own settings and the backbone; without the stream's settings, which may change"""

    @property
    def name(self) -> str:
        return self.path.name


def identify(path: Path, stamp: Stamp, config: RunConfig, fingerprint: str) -> DataFile:
    """Return a data file with its settings and digest, without reading its rows; `config` has the stream's settings."""
    if any("\ud800" <= letter <= "\udfff" for letter in path.name):  # a config that names it could not be written
        raise BadData(f"its name is not UTF-8: {path.name!a}", "rename it, then put it back")
    _check_inside(path, path.parent)
    toml = path.with_suffix(".toml")
    try:
        own = _read_own_settings(toml, config)
        merged = _merge(config, own, path)
        others = [Path(other) for other in (merged.data.dev, merged.data.test) if other]
        hashes = [_hash_file(each) for each in (path, *others) if each is path or each.is_file()]
        content = digest([hashes, own, fingerprint])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # a date, or a number of 4,000 digits
        raise BadConfig(f"{toml}: a value that no setting can have: {str(error)[:200]}", "correct it") from None
    return DataFile(path, stamp, merged, own, content)


class Inbox:
    """The watched folder: tells which files have settled, and moves bad ones aside."""

    def __init__(self, path: Path, settle_s: float) -> None:
        self.path, self._settle_s = path, settle_s
        self._since: dict[str, tuple[Stamp, float]] = {}

    def scan(self) -> list[Path]:
        """List every file by name, except hidden and unfinished ones."""

        def is_file(entry: os.DirEntry[str]) -> bool:
            try:
                return entry.is_file()
            except OSError:  # a circular link, or one to a place that this process may not read
                return False

        try:
            with os.scandir(self.path) as entries:
                names = [entry.name for entry in entries if is_file(entry)]
        except OSError as error:
            raise Missing(f"cannot read the folder `{self.path}`: {error.strerror}", "see that it is there") from None
        wanted = (name for name in names if not name.startswith(".") and not name.endswith(UNFINISHED_SUFFIXES))
        return [self.path / name for name in sorted(wanted)]

    def look(self) -> Iterator[tuple[Path, Stamp, bool]]:
        """Yield data files with their stamps, and whether they have settled: unchanged long enough between two looks.

        The file's own time is not compared with the clock: copies keep old times, and clocks of machines differ.
        """
        for path in self.scan():
            stamp, now = self.stamp(path), time.monotonic()
            if path.suffix.lower() in SUFFIXES and stamp[0] is not None:
                if self._since.get(path.name, (None, 0.0))[0] != stamp:
                    self._since[path.name] = (stamp, now)
                yield path, stamp, now - self._since[path.name][1] >= self._settle_s

    def stamp(self, path: Path) -> Stamp:
        """Return the stamp of a data file now; its first part is None if the file is gone."""
        stamp: list[tuple[int, int, int] | None] = []
        for each in (path, path.with_suffix(".toml")):
            try:
                found = each.stat()
                stamp.append((found.st_size, found.st_mtime_ns, found.st_ino))
            except OSError:  # gone; or a broken link, which is refused when it is read
                stamp.append(None)
        return tuple(stamp)

    def move_aside(self, path: Path, text: str) -> Path:
        """Move a file into `bad/` under a free name, with its error beside it.

        The error is written first: after a kill in between, the file is still here and will be found bad again.
        """
        bad = self.path / BAD_FOLDER
        if bad.is_symlink():
            raise OSError(errno.ELOOP, f"`{bad}` is a symbolic link")
        names = (path.name if number == 1 else f"{path.stem}.{number}{path.suffix}" for number in range(1, 10**6))
        target = next(bad / name for name in names if not (bad / name).exists())
        write_atomically(bad / f"{target.name}.error.txt", text.encode(errors="backslashreplace"))
        os.rename(path, target)
        return target


@contextmanager
def open_journal(store: Store, folder: Path) -> Iterator[Journal]:
    """Open the journal of a folder in a store and lock it for this process; a second stream is refused."""
    journal_dir = store.root / "runs" / "streams" / digest(str(folder.resolve()))[:16]
    try:
        journal_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "choose another store with `--store DIR` or $INLAY_HOME"
        raise InlayError(f"cannot write `{journal_dir}`: {error.strerror}", hint) from None
    with (journal_dir / "lock").open("ab") as file:
        try:
            lock_file(file)
        except BlockingIOError:
            raise InlayError(f"another stream is watching `{folder}`", "leave it to that, or end it first") from None
        yield Journal(journal_dir / "journal.jsonl")


class Journal:
    """A file of JSON lines that record what is done and what is being trained.

    If a line is lost, a file is read again, but never trained again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._published: dict[str, list[Version]] = {}  # by content, oldest first
        self.pending: dict[str, Any] | None = None
        """the files that were being trained together, with the stream's settings at that time"""
        self.is_unproved = False
        """whether something was published after the last proof"""
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue
        if lines and not lines[-1].endswith(b"\n"):  # cut off by a kill: the next line must begin on a new line
            write_atomically(path, b"".join(lines[:-1]))

    def write(self, kind: str, **values: Any) -> None:
        """Add a line, which is on disk before this returns."""
        entry = {"kind": kind, **values}
        with self._path.open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        if entry["kind"] == "began":
            self.pending = entry
        elif entry["kind"] == "published":
            version = Version(**entry["version"])
            for content in entry["contents"]:
                self._published.setdefault(content, []).append(version)
            self.is_unproved = True
        elif entry["kind"] == "proved":
            self.pending, self.is_unproved = None, False

    def versions(self, content: str) -> Sequence[Version]:
        """Return the versions of this content, oldest first, under any name; some may have been removed since."""
        return self._published.get(content, ())


def _check_inside(path: Path, folder: Path) -> None:
    """Refuse a file outside the folder, also one reached by an absolute path, by `..` or by a symbolic link."""
    try:
        is_inside = path.resolve().is_relative_to(folder.resolve())
        with suppress(FileNotFoundError):  # reading it raises a better error, with similar names
            path.stat()
    except (OSError, RuntimeError, ValueError):  # circular links; a name that is too long or has a zero byte
        is_inside = False
    if not is_inside:
        raise BadData("not a file inside the watched folder", "put the file itself into the folder", path=path)


def _read_own_settings(path: Path, config: RunConfig) -> dict[str, Any]:
    """Read the settings file beside a data file, as a tree; {} if there is none."""
    if not os.path.lexists(path):
        return {}
    _check_inside(path, path.parent)
    example = "see the config.toml of any run folder for an example"
    try:
        if not path.is_file() or path.stat().st_size > MAX_OWN_BYTES:
            raise BadConfig(f"{path}: not a file, or over {MAX_OWN_BYTES:,} bytes", example)
        content = path.read_bytes()
        if max(line.count(b".") for line in [b"", *content.splitlines()]) > MOST_DOTS:
            raise BadConfig(f"{path}: a line with more than {MOST_DOTS} dots", example)
        own = tomllib.loads(content.decode("utf8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, a number of 5,000 digits, nested too deeply
        raise BadConfig(f"{path}: not TOML: {error}", example) from None
    except OSError as error:
        raise BadConfig(f"{path}: cannot be read: {error.strerror}", "see who may read it") from None
    _check_own(own, path, config)
    return own


def _check_own(own: dict[str, Any], path: Path, config: RunConfig) -> None:
    """Refuse settings of a file that do more than decide how its own data is read and trained."""
    if own.get("backbone", config.backbone) != config.backbone:
        raise BadConfig(
            f"{path}: `backbone` is `{own['backbone']}`, but the stream's is `{config.backbone}`",
            "leave it out: a stream has one backbone",
        )
    name = Store.legal_name(path.stem)
    if own.get("task", name) != name:
        raise BadConfig(
            f"{path}: `task` is `{own['task']}`, but the file's name makes it `{name}`",
            "leave it out, and give the file the name of its task",
        )
    data = own.get("data")
    given = [f"data.{key}" for key in ("source", "root") if isinstance(data, dict) and key in data]
    given += [key for key in own if key not in (*OWN_SECTIONS, "backbone", "task") and key in RunConfig.__annotations__]
    if given:
        raise BadConfig(
            f"{path}: `{given[0]}` is not allowed in a file's own settings",
            "leave it out: they only decide how the file's own data is read and trained",
        )
    asked = own["train"] if isinstance(own.get("train"), dict) else {}
    for key, most in MOST_OF_OWN.items():
        value, usual = asked.get(key), getattr(config.train, key) or 0
        if isinstance(value, int) and value > max(most, usual):
            hint = f"use at most `{most}`, or the stream's own setting if it is larger: other files wait for this one"
            raise BadConfig(f"{path}: `train.{key}` is `{str(value)[:40]}`", hint)


def _merge(config: RunConfig, own: dict[str, Any], path: Path) -> RunConfig:
    """Override the stream's settings by a file's own; the data is always the file itself."""
    tree = dataclasses.asdict(dataclasses.replace(config, task=Store.legal_name(path.stem)))
    for key, value in own.items():
        tree[key] = {**tree[key], **value} if isinstance(value, dict) and isinstance(tree.get(key), dict) else value
    merged = from_tree(RunConfig, tree)
    Store.check_name(merged.task)
    data = dataclasses.replace(merged.data, source=str(path))
    for side in ("dev", "test"):  # a path in a file's own settings is relative to the file's folder, and stays in it
        other = getattr(data, side)
        if other and side in own.get("data", {}):
            _check_inside(path.parent / other, path.parent)
            changed: dict[str, Any] = {side: str(path.parent / other)}
            data = dataclasses.replace(data, **changed)
    return dataclasses.replace(merged, data=data)


def _hash_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadData(f"cannot be read: {error.strerror}", "see who may read it", path=path) from None


def describe_error(error: Exception) -> str:
    """Return the text of the error file beside a bad file; an internal error has its traceback."""
    if not isinstance(error, InlayError):
        return f"error: {type(error).__name__}: {error}\n\n{''.join(traceback.format_exception(error))}"
    return f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else "")
