"""Output beside the data, on stderr: notes, spinners and moving bars; and how numbers are written for people.

Commands and the Python library speak through it alike. Colour and moving bars need a terminal, and NO_COLOR switches
colour off; elsewhere, as in a notebook, the same lines are printed plain. Control characters in what is printed
(labels, texts, names of files) are escaped: data cannot colour or overwrite a line. `silenced` switches all of it off
for a caller of the library.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TextIO

from inlay.processes import current_process

if TYPE_CHECKING:
    from rich.progress import Progress

PLAIN_SECONDS = 10.0  # seconds between the lines that replace a moving bar without a terminal
# Control characters but tab and line end, those that turn the direction of letters, and halves of characters.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_STYLES = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "33", "cyan": "36"}
_IS_SILENT: ContextVar[bool] = ContextVar("is_silent", default=False)


@contextmanager
def silenced(is_silent: bool = True) -> Iterator[None]:
    """Say nothing inside the block, if asked to; data and errors are not held back."""
    token = _IS_SILENT.set(_IS_SILENT.get() or is_silent)
    try:
        yield
    finally:
        _IS_SILENT.reset(token)


def _speaks() -> bool:
    return not _IS_SILENT.get() and is_main_process()


class Rate(NamedTuple):
    """A number of rows and tokens, and the time they took."""

    num_rows: int
    num_tokens: int
    seconds: float

    def __str__(self) -> str:
        seconds = max(self.seconds, 1e-9)
        tokens = f", {self.num_tokens / seconds:,.0f} tokens/s" if self.num_tokens else ""  # a service counts its own
        return f"{self.num_rows / seconds:,.0f} rows/s{tokens}"

    def describe(self) -> str:
        """Return the rows, the time and the rates in one line."""
        return f"{count(self.num_rows, 'row')} in {duration(self.seconds)}, {self}"

    def to_json(self) -> dict[str, Any]:
        """Return the rate as data."""
        return {"num_tokens": self.num_tokens, "seconds": self.seconds}


def is_main_process() -> bool:
    """Return whether this process prints: of several that `torchrun` started only the first does."""
    return current_process().is_first


def printable(text: str) -> str:
    """Return a text with its control characters written out, such as `\\x1b`. What was JSON is the same JSON."""
    return text if text.isprintable() else _CONTROLS.sub(_write_out, text)


def _write_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 32 else f"\\u{code:04x}"


def in_line(text: str) -> str:
    """Return a printable text with its line ends written out too."""
    return printable(text).replace("\n", "\\n")


def log(text: str = "", style: str = "") -> None:
    """Print a line that is not data to stderr."""
    if _speaks():
        print(paint(printable(text), style, sys.stderr), file=sys.stderr, flush=True)


def detail(text: str) -> None:
    """Print a detail of the line before to stderr, indented; on a terminal it is wrapped and keeps its indent."""
    if _speaks():
        print(hang("  ", printable(text), sys.stderr), file=sys.stderr, flush=True)


def paint(text: str, style: str, stream: TextIO) -> str:
    """Return the text in a style, if the stream shows styles."""
    has_colour = is_terminal(stream) and not os.environ.get("NO_COLOR")
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if style and text and has_colour else text


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can be redrawn."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def count(number: int, noun: str = "") -> str:
    """Return a whole number with its noun: `1 task`, `1,024 tasks`."""
    if not noun:
        return f"{number:,}"
    return f"{number:,} {noun}{'' if number == 1 or noun.endswith('s') else 's'}"


def size(num_bytes: float) -> str:
    """Return bytes as people read them."""
    units = ["bytes", "kB", "MB", "GB"]
    while num_bytes >= 1000 and len(units) > 1:
        num_bytes /= 1000
        del units[0]
    return f"{num_bytes:,.0f} {units[0]}" if units[0] == "bytes" or num_bytes >= 100 else f"{num_bytes:.1f} {units[0]}"


def duration(seconds: float) -> str:
    """Return seconds as people read them."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def share(part: float, whole: float) -> str:
    """Return a part as a percentage of a whole."""
    return f"{100 * part / whole:.2f}%" if whole else "-"


def score(value: float | None) -> str:
    """Return a score with four digits, or `-` if there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.4f}"


def shorten(text: str, width: int) -> str:
    """Return the text on one line, cut with an ellipsis if it is longer than `width`."""
    text = " ".join(text.split())
    if text_width(text) <= width:
        return text
    kept, used = [], 0
    for character in text:
        used += text_width(character)
        if used > width - 1:
            break
        kept.append(character)
    return "".join(kept).rstrip() + "…"


def name_method(name: str | None, size: int | None) -> str:
    """Return a method in two words at most: `houlsby 64`, `bitfit`."""
    return str(name) if size is None else f"{name} {size}"


def describe_method(method: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Return a method with its unusual settings: `houlsby of size 64 (sharing every-3, depth 2)`."""
    size = "" if method.get("size") is None else f" of size {method['size']}"
    settings = describe_settings({key: method[key] for key in method if key not in ("name", "size")}, usual)
    return f"{method.get('name')}{size}" + (f" ({settings})" if settings else "")


def describe_settings(settings: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Return the settings that have a value other than the usual one: `sharing every-3, depth 2`."""
    shown = []
    for name, value in settings.items():
        value = tuple(value) if isinstance(value, list) else value  # a manifest's JSON has lists
        if value is None or value == () or value == usual.get(name):
            continue
        if isinstance(value, tuple):
            value = "+".join(map(str, value))
        elif isinstance(value, float):
            value = f"{value:.4g}"
        shown.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(shown)


def log_above(text: str) -> None:
    """Print a line that is not data, above the moving bar if there is one."""
    if Meter.current is None:
        log(text)
    else:
        Meter.current.log(text)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show that something takes a moment: a spinner on a terminal, which leaves no trace, or one line elsewhere.

    stdout is flushed first, so that a reader of a pipe has what was printed before.
    """
    sys.stdout.flush()
    if Meter.current is not None or not is_terminal(sys.stderr) or not _speaks():
        log_above(text)
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True, highlight=False).status(
        Text(f"{printable(text)} …"), spinner="dots", spinner_style="cyan"
    ):
        yield


class _Clock:
    """The time since it was made, each time it is formatted: rich redraws a bar ten times a second."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __format__(self, spec: str) -> str:
        return duration(time.monotonic() - self._began)


class Meter:
    """The progress of long work: a moving bar on a terminal, a line every ten seconds elsewhere.

    The bar appears with the first update, so that a spinner may be shown before it.
    """

    current: ClassVar[Meter | None] = None
    """the meter whose bar is on the screen"""

    def __init__(self, title: str, total: int | None = None) -> None:
        self.title, self.total, self.done = title, total, 0
        self._bar: Progress | None = None
        self._spoke = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = Meter.current = None

    def _find_bar(self) -> Progress | None:
        """Return the bar, which begins to move now if it did not before; None where there is no terminal."""
        if self._bar is None and is_terminal(sys.stderr) and not _IS_SILENT.get():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            Meter.current = self
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None, style="bright_black", complete_style="cyan", finished_style="cyan"),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}", markup=False),
                TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                console=Console(stderr=True, highlight=False),
                transient=True,
                expand=True,
            )
            self._bar.add_task(printable(self.title), total=self.total, text="")
            self._bar.start()
        return self._bar

    def update(self, done: int, text: str = "", *, title: str | None = None, total: int | None = None) -> None:
        """Show how far the work is now."""
        self.done, self.title, self.total = done, title or self.title, total or self.total
        bar = self._find_bar()
        if bar is not None:
            shown, about = printable(self.title), printable(text)
            bar.update(bar.task_ids[0], completed=done, total=self.total, description=shown, text=about)
        elif time.monotonic() - self._spoke >= PLAIN_SECONDS:
            of = f"/{self.total:,}" if self.total else ""
            self.log(f"{self.title}  {done:,}{of}  {text}".rstrip())

    def advance(self, number: int, text: str) -> None:
        """Show that this much more is done."""
        self.update(self.done + number, text)

    def wait(self, title: str) -> None:
        """Show work that has no steps: on the bar, with the seconds it takes; elsewhere as a line."""
        bar = self._find_bar()
        if bar is None:
            self.log(title)
        else:
            bar.update(bar.task_ids[0], description=printable(title), text=_Clock())

    def log(self, text: str, style: str = "") -> None:
        """Print a line that stays, above the bar."""
        self._spoke = time.monotonic()
        if self._bar is None:
            log(text, style)
        else:
            self._bar.console.print(printable(text), style=style or None, markup=False, highlight=False, soft_wrap=True)


def hang(indent: str, text: str, stream: TextIO) -> str:
    """Return the text after its indent, wrapped on a terminal so that all lines have the same indent."""
    room = shutil.get_terminal_size().columns - len(indent)
    if not is_terminal(stream) or len(text) <= room or room < 20:
        return indent + text
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return indent + f"\n{' ' * len(indent)}".join(lines)


def text_width(text: str) -> int:
    """Return the cells a text takes: two for wide characters, none for combining ones."""
    if text.isascii():
        return len(text)
    plain = [letter for letter in text if not unicodedata.combining(letter)]
    return len(plain) + sum(unicodedata.east_asian_width(letter) in "WF" for letter in plain)
