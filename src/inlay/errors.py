"""The errors that a user can cause.

Each kind has a stable `code`, an exit status for the command line and an HTTP status for the service. The message says
what is wrong with which value, in lower case; the hint says what to do next.
"""

from __future__ import annotations

import bisect
import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

NONE_YET = "known: none yet"
"""hint of an unknown name if there are no names at all"""
MOST_COMPARED = 1000  # names that an unknown one is compared with


class InlayError(Exception):
    """An error a user can fix: `message` says what is wrong, `hint` what to do.

    >>> try:
    ...     inlay.load_task(rows, name="mood", lable="mood")
    ... except inlay.InlayError as error:
    ...     (error.code, error.hint)
    ('bad-config', 'did you mean `label`?')
    """

    code = "error"
    exit_status = 1
    http_status = 400

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} (hint: {self.hint})"

    def speak_python(self) -> None:
        """Rewrite options of the command line in the error as keyword arguments of the library."""
        self.message, self.hint = in_python(self.message), self.hint and in_python(self.hint)

    def at(self, path: str | Path, line: int) -> InlayError:
        """Return the same error, with the file and line it is about in its message."""
        return self._with_message(f"{path}:{line}: {self.message}")

    def of(self, task: str) -> InlayError:
        """Return the same error, with the task it is about in its message."""
        return self._with_message(f"task `{task}`: {self.message}")

    def _with_message(self, message: str) -> InlayError:
        same = type(self).__new__(type(self))  # the constructors of subclasses differ, their attributes do not
        same.__dict__ |= self.__dict__ | {"message": message}
        return same

    def to_json(self) -> dict[str, str | None]:
        """Return the error as data, for `--json` and for answers in a batch."""
        return {"code": self.code, "message": self.message, "hint": self.hint}


_FLAG = re.compile(r"--(?:set )?([a-z][a-z_-]*(?:\.[a-z_]+)?)(?:[ =]([^\s`]+))?")
_SETTING = re.compile(r"`(?:data|method|train|joint)\.([a-z_]+)`")
# Option -> keyword in Python, if their names differ.
_KEYWORDS = {"from": "start", "no_reuse": "fit=inlay.FitSettings(reuse_prefix=False)", "from_run": "start"}


def in_python(text: str) -> str:
    """Rewrite options and settings in a text as keyword arguments of the library: `--size 64` becomes `size=64`.

    Whole commands, such as `inlay verify sms`, stay as they are: they are useful beside a script too.
    """

    def respell(found: re.Match[str]) -> str:
        name, value = found[1].rpartition(".")[2].replace("-", "_"), found[2]
        name = _KEYWORDS.get(name, name)
        if value is None:
            return name
        is_plain = value in ("True", "False", "None") or value.replace(".", "", 1).replace("e-", "", 1).isdigit()
        return f"{name}={value}" if is_plain else f'{name}="{value}"'

    parts = text.split("`")
    for place, part in enumerate(parts):  # every second part is in backticks
        if place % 2 and not part.startswith("inlay "):
            parts[place] = _FLAG.sub(respell, part)
    return _SETTING.sub(r"`\1`", "`".join(parts))


@contextmanager
def speaking_python() -> Iterator[None]:
    """Rewrite errors of the block (or of the decorated function) for a caller of the library."""
    try:
        yield
    except InlayError as error:
        error.speak_python()
        raise


def find_close(name: str, known: list[str], most: int) -> list[str]:
    """Find the names most like an unknown one. In a long (sorted) list, only its neighbours are compared."""
    place = max(0, bisect.bisect(known, name) - MOST_COMPARED // 2) if len(known) > MOST_COMPARED else 0
    return difflib.get_close_matches(name[:200], known[place : place + MOST_COMPARED], n=most)


class UnknownName(InlayError):
    """A name that is not known: of a method, a family, a task, a column."""

    code = "unknown-name"
    exit_status = 3
    http_status = 404

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str | None = None) -> None:
        known = sorted(known)
        close = find_close(name, known, 1)
        if hint is None:
            listed = ", ".join(known[:20]) + (" …" if len(known) > 20 else "")
            hint = f"did you mean `{close[0]}`?" if close else f"known: {listed}" if listed else NONE_YET
        self.kind = kind
        super().__init__(f"no {kind} named `{name}`", hint)


class BadConfig(InlayError):
    """A wrong setting: an unknown key, a value out of range, two settings that exclude each other."""

    code = "bad-config"
    exit_status = 2


class BadData(InlayError):
    """Input that cannot be used as it is, with its file and line."""

    code = "bad-data"
    exit_status = 4

    def __init__(
        self, reason: str, hint: str | None = None, *, path: str | Path | None = None, line: int | None = None
    ) -> None:
        self.reason, self.path, self.line = reason, path, line
        where = "" if path is None else f"{path}:{line}: " if line is not None else f"{path}: "
        super().__init__(f"{where}{reason}", hint)


class Unsupported(InlayError):
    """A combination that Inlay does not support."""

    code = "unsupported"
    exit_status = 5


class WrongBackbone(InlayError):
    """A version that was trained on another backbone."""

    code = "wrong-backbone"
    exit_status = 6
    http_status = 409


class StoreDamaged(InlayError):
    """Stored data that is not what was published."""

    code = "store-damaged"
    exit_status = 7
    http_status = 500


class DiskFull(InlayError):
    """A file that did not fit on its disk. What was there before is unchanged."""

    code = "disk-full"
    exit_status = 13
    http_status = 507


class StoreBusy(InlayError):
    """A lock that others held for too long."""

    code = "store-busy"
    exit_status = 14
    http_status = 503


class StoreUnreachable(InlayError):
    """Object storage that does not answer, refuses these credentials, or cannot do what a store needs."""

    code = "store-unreachable"
    exit_status = 15
    http_status = 503


class Diverged(InlayError):
    """A run whose loss became NaN or exploded."""

    code = "diverged"
    exit_status = 8
    http_status = 500


class NotFinite(InlayError):
    """Outputs that are NaN or infinite, which are never turned into an answer."""

    code = "not-finite"
    exit_status = 12
    http_status = 500


class Unanswered(InlayError):
    """A request that failed unexpectedly; other requests are not affected."""

    code = "unanswered"
    exit_status = 13
    http_status = 500


class LostProcess(InlayError):
    """One of several processes that train together died or stopped answering."""

    code = "lost-process"
    exit_status = 11
    http_status = 500


class Missing(InlayError):
    """Something that must be installed or fetched first: a backbone, an extra, a file."""

    code = "missing"
    exit_status = 9
    http_status = 503


class OutOfMemory(InlayError):
    """Work that does not fit in memory, even in its smallest pieces."""

    code = "out-of-memory"
    exit_status = 10
    http_status = 507
