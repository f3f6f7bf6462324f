"""What tasks on other machines and the process that sent them tell each other: words, files of runs, and errors.

A mark is a file in a folder of runs: a machine that sees it shares the folder, and trains in it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from inlay import errors
from inlay.errors import InlayError
from inlay.store import make_directory, write_atomically

_HEAD = "node:__internal_head__"  # a resource that only the head of a cluster has

PackedError = tuple[str, dict[str, Any]]
"""an error of ours as data: it may not be pickled"""


class _WordRelay:
    """Words of all tasks on their way to one process, which can ask the tasks to stop. An actor."""

    def __init__(self) -> None:
        self._words: list[Any] = []
        self._is_stopping = False

    def put(self, word: Any) -> bool:
        """Take a word; return whether its task is to stop."""
        self._words.append(word)
        return self._is_stopping

    def take(self) -> list[Any]:
        """Hand over the words that came since."""
        words, self._words = self._words, []
        return words

    def stop(self) -> None:
        """Ask every task to stop, once it says something."""
        self._is_stopping = True


def start_relay(ray: Any) -> Any:
    """Start a relay on the cluster's head: the machine without which there is no cluster."""
    return ray.remote(num_cpus=0, resources={_HEAD: 0.001})(_WordRelay).remote()


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[str]:
    """Lay a mark into a folder for the duration of the block; yields its name."""
    mark = f".ray-{secrets.token_hex(8)}"
    make_directory(folder)
    (folder / mark).touch()
    try:
        yield mark
    finally:
        (folder / mark).unlink(missing_ok=True)


def read_folders(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Read all files of some folders of runs, the results last: a run is finished where it has one."""
    paths = [path for name in names for path in sorted((folder / name).rglob("*")) if path.is_file()]
    paths.sort(key=lambda path: path.name == "result.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write what `read_folders` read, in the same order."""
    for name, content in files.items():
        write_atomically(folder / name, content)


def pack_error(error: InlayError) -> PackedError:
    """Make data of an error, to send it."""
    return type(error).__name__, vars(error)


def unpack_error(packed: PackedError) -> InlayError:
    """Make an error again that came from another machine as data."""
    kind, attributes = packed
    found = getattr(errors, kind, InlayError)
    error = found.__new__(found)
    error.__dict__ |= attributes
    error.args = (attributes.get("message", ""),)
    return error
