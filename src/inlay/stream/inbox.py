"""The inbox of a stream: the watched folder, the settings of each file in it, and the journal of results.

Nothing here trains or publishes. What always holds: a file counts as settled only after it stayed the same between two
looks; a bad file is never lost, only moved to `bad/` after its error is written there; what the journal was told is on
disk before the call returns, and a line torn by a kill is dropped. Whoever may put files into the folder is not trusted
with more: a file's own settings say how its own data is read and trained, and no path leaves the folder.
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
"""the sections that a file's own settings may have; `backbone` and `task` may only say what holds anyway"""
MAX_OWN_BYTES = 1_000_000
MOST_DOTS = 200
"""dots in a line of settings: the reader takes the square of a key's parts, so 50,000 took 10 GB"""
MOST_OF_OWN = {"epochs": 100, "contrast": 10_000, "batch_size": 4096, "beams": 16, "max_answer": 512}
"""what a file may ask for, of what would keep all others waiting, if the stream's own settings are not higher"""

Stamp = tuple[tuple[int, int, int] | None, ...]
"""size, time of change and inode of a data file and of its settings file: equal as long as neither changes"""


@dataclass(frozen=True)
class DataFile:
    """A data file as it was at one look."""

    path: Path
    stamp: Stamp
    config: RunConfig
    """the stream's settings, with the file's own over them"""
    own: dict[str, Any]
    """the file's own settings, as written in its `NAME.toml`"""
    content: str
    """digest of its bytes, its own settings and the backbone; not of the stream's settings, which may change"""

    @property
    def name(self) -> str:
        return self.path.name


def identify(path: Path, stamp: Stamp, config: RunConfig, fingerprint: str) -> DataFile:
    """Return a data file with its settings and digest, without reading its rows; `config` has the stream's settings."""
    if any("\ud800" <= letter <= "\udfff" for letter in path.name):  # a config that names it could not be written
        raise BadData(f"its name is not UTF-8: {path.name!a}", "rename it, then put it back")
    _check_inside(path, path.parent)
    own = _read_own_settings(path.with_suffix(".toml"), config)
    merged = _merge(config, own, path)
    others = [Path(other) for other in (merged.data.dev, merged.data.test) if other]
    hashes = [_hash_file(each) for each in (path, *others) if each is path or each.is_file()]
    return DataFile(path, stamp, merged, own, digest([hashes, own, fingerprint]))


class Inbox:
    """The watched folder: which files have settled, and the place for bad ones."""

    def __init__(self, path: Path, settle_s: float) -> None:
        self.path, self._settle_s = path, settle_s
        self._since: dict[str, tuple[Stamp, float]] = {}

    def scan(self) -> list[Path]:
        """List every file by name, except hidden and unfinished ones."""
        try:
            with os.scandir(self.path) as entries:
                names = [entry.name for entry in entries if _is_file(entry)]
        except OSError as error:
            raise Missing(f"cannot read the folder `{self.path}`: {error.strerror}", "see that it is there") from None
        wanted = (name for name in names if not name.startswith(".") and not name.endswith(UNFINISHED_SUFFIXES))
        return [self.path / name for name in sorted(wanted)]

    def look(self) -> Iterator[tuple[Path, Stamp, bool]]:
        """List data files with their stamps and whether they have settled: unchanged for long enough between two looks.

        Not by the clock in the file's time: copies keep old times, and another machine's clock may differ.
        """
        for path in self.scan():
            stamp, now = self.stamp(path), time.monotonic()
            if path.suffix.lower() in SUFFIXES and stamp[0] is not None:
                if self._since.get(path.name, (None, 0.0))[0] != stamp:
                    self._since[path.name] = (stamp, now)
                yield path, stamp, now - self._since[path.name][1] >= self._settle_s

    def stamp(self, path: Path) -> Stamp:
        """Return the stamp of a data file now; its first part is None if the file is gone."""
        return tuple(_stamp_file(each) for each in (path, path.with_suffix(".toml")))

    def move_aside(self, path: Path, text: str) -> Path:
        """Put a file into `bad/` with its error beside it, under a name that is free there.

        The error comes first: killed in between, the file is still here and will be found bad again.
        """
        bad = self.path / BAD_FOLDER
        if bad.is_symlink():
            raise OSError(errno.ELOOP, f"`{bad}` is a symbolic link")
        names = (path.name if number == 1 else f"{path.stem}.{number}{path.suffix}" for number in range(1, 10**6))
        target = next(bad / name for name in names if not (bad / name).exists())
        write_atomically(bad / f"{target.name}.error.txt", text.encode(errors="backslashreplace"))
        os.rename(path, target)
        return target


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link that leads round in a circle, or to where this process may not look
        return False


def _stamp_file(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:  # gone; or a link that leads nowhere, which is refused when it is read
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


@contextmanager
def open_journal(store: Store, folder: Path) -> Iterator[Journal]:
    """Open the journal of a folder in a store and lock it for this process: a second stream is refused."""
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
            raise InlayError(f"another stream is watching `{folder}`", "let that one do it, or end it first") from None
        yield Journal(journal_dir / "journal.jsonl")


class Journal:
    """A file of JSON lines that say what is done and what is under way.

    Losing a line costs a second reading of a file, never a second training.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._published: dict[str, list[Version]] = {}  # by content, oldest first
        self.pending: dict[str, Any] | None = None
        """the files that were being trained together, with their settings then"""
        self.is_unproved = False
        """whether something was published since the last proof"""
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue
        if lines and not lines[-1].endswith(b"\n"):  # torn by a kill: the next line must begin on a new line
            write_atomically(path, b"".join(lines[:-1]))

    def write(self, kind: str, **values: Any) -> None:
        """Add a line, on disk before this returns."""
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
        """Return the versions made of this content, oldest first, under any name; some may be removed since."""
        return self._published.get(content, ())


def _check_inside(path: Path, folder: Path) -> None:
    """Refuse a file outside the folder, however it is reached: by its root, by `..` or by a symbolic link."""
    try:
        is_inside = path.resolve().is_relative_to(folder.resolve())
        with suppress(FileNotFoundError):  # what is not there is missed, with likely names, when it is read
            path.stat()
    except (OSError, RuntimeError, ValueError):  # links in a circle; a name too long, or with a zero byte
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
            raise BadConfig(f"{path}: no file of settings, or over {MAX_OWN_BYTES:,} bytes", example)
        content = path.read_bytes()
        if max(line.count(b".") for line in [b"", *content.splitlines()]) > MOST_DOTS:
            raise BadConfig(f"{path}: a line with more than {MOST_DOTS} dots", example)
        own = tomllib.loads(content.decode("utf8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, a number of 5,000 digits, nested too deep
        raise BadConfig(f"{path}: not TOML: {error}", example) from None
    except OSError as error:
        raise BadConfig(f"{path}: cannot be read: {error.strerror}", "see who may read it") from None
    _check_own(own, path, config)
    return own


def _check_own(own: dict[str, Any], path: Path, config: RunConfig) -> None:
    """Refuse settings that reach beyond the file's own data: it decides how that is read and trained, nothing else."""
    if own.get("backbone", config.backbone) != config.backbone:
        raise BadConfig(
            f"{path}: `backbone` is `{own['backbone']}`, but the stream's is `{config.backbone}`",
            "leave it out: a stream has one backbone",
        )
    name = Store.legal_name(path.stem)
    if own.get("task", name) != name:
        raise BadConfig(
            f"{path}: `task` is `{own['task']}`, but the file's name makes it `{name}`",
            "leave it out, and name the file as its task shall be called",
        )
    data = own.get("data")
    given = [f"data.{key}" for key in ("source", "root") if isinstance(data, dict) and key in data]
    given += [key for key in own if key not in (*OWN_SECTIONS, "backbone", "task") and key in RunConfig.__annotations__]
    if given:
        raise BadConfig(
            f"{path}: `{given[0]}` is not for a file's own settings",
            "leave it out: they say how its own data is read and trained, nothing else",
        )
    asked = own["train"] if isinstance(own.get("train"), dict) else {}
    for key, most in MOST_OF_OWN.items():
        value, usual = asked.get(key), getattr(config.train, key) or 0
        if isinstance(value, int) and value > max(most, usual):
            hint = f"`{most}` at most, or as many as the stream's own settings have: other files wait for this one"
            raise BadConfig(f"{path}: `train.{key}` is `{str(value)[:40]}`", hint)


def _merge(config: RunConfig, own: dict[str, Any], path: Path) -> RunConfig:
    """Lay a file's own settings over the stream's; the data is always the file itself."""
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
    """Return the text of the error file beside a bad file; an internal error comes with its traceback."""
    if not isinstance(error, InlayError):
        return f"error: {type(error).__name__}: {error}\n\n{''.join(traceback.format_exception(error))}"
    return f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else "")
