"""Messages between Ray tasks and the process that started them: short messages, files of runs, and errors.

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
"""an InlayError as data, as it may be impossible to pickle"""


class _MessageRelay:
    """An actor that passes messages of all tasks to one process, which can ask the tasks to stop."""

    def __init__(self) -> None:
        self._words: list[Any] = []
        self._is_stopping = False

    def put(self, word: Any) -> bool:
        """Store a message; return whether its task should stop."""
        self._words.append(word)
        return self._is_stopping

    def take(self) -> list[Any]:
        """Return the messages that have arrived since the last call."""
        words, self._words = self._words, []
        return words

    def stop(self) -> None:
        """Ask every task to stop, in reply to its next message."""
        self._is_stopping = True


def start_relay(ray: Any) -> Any:
    """Start a relay on the cluster's head, the machine that lives as long as the cluster."""
    return ray.remote(num_cpus=0, resources={_HEAD: 0.001})(_MessageRelay).remote()


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[str]:
    """Put a mark into a folder for the duration of the block; yields its name."""
    mark = f".ray-{secrets.token_hex(8)}"
    make_directory(folder)
    (folder / mark).touch()
    try:
        yield mark
    finally:
        (folder / mark).unlink(missing_ok=True)


def read_folders(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Read all files of some run folders, results last, as a run with a result counts as finished."""
    paths = [path for name in names for path in sorted((folder / name).rglob("*")) if path.is_file()]
    paths.sort(key=lambda path: path.name == "result.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files that `read_folders` read, in the same order."""
    for name, content in files.items():
        write_atomically(folder / name, content)


def pack_error(error: InlayError) -> PackedError:
    """Turn an error into data that can be sent."""
    return type(error).__name__, vars(error)


def unpack_error(packed: PackedError) -> InlayError:
    """Turn data from another machine back into an error."""
    kind, attributes = packed
    found = getattr(errors, kind, InlayError)
    error = found.__new__(found)
    error.__dict__ |= attributes
    error.args = (attributes.get("message", ""),)
    return error
