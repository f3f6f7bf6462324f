"""Output of the commands: data to stdout, everything else to stderr, the same words with and without colour.

Tables are laid out here and not by rich, which needs a second for a thousand rows; rich draws the moving bars. Colour
and moving bars need a terminal, and NO_COLOR switches colour off; elsewhere the same lines are printed plain. Control
characters in what is printed (labels, texts, names of files) are written out: data cannot colour or overwrite a line.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TextIO

from inlay.processes import current_process

if TYPE_CHECKING:
    from rich.progress import Progress

    from inlay.errors import InlayError

PLAIN_SECONDS = 10.0  # seconds between the lines that replace a moving bar without a terminal
# Control characters but tab and line end, those that turn the direction of letters, and halves of characters.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_STYLES = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "33", "cyan": "36"}


class Rate(NamedTuple):
    """A number of rows and tokens, and the time they took."""

    num_rows: int
    num_tokens: int
    seconds: float

    def __str__(self) -> str:
        seconds = max(self.seconds, 1e-9)
        return f"{self.num_rows / seconds:,.0f} rows/s, {self.num_tokens / seconds:,.0f} tokens/s"

    def describe(self) -> str:
        """Return the rows, the time and the rates in one line."""
        return f"{count(self.num_rows, 'row')} in {duration(self.seconds)}, {self}"

    def to_json(self) -> dict[str, Any]:
        """Return the rate as data."""
        return {"num_tokens": self.num_tokens, "seconds": self.seconds}


class Column(NamedTuple):
    """A column of a table; a flexible one is cut where the terminal is too narrow."""

    title: str
    is_number: bool = False
    is_flexible: bool = False


def numbers(*titles: str) -> list[Column]:
    """Return columns of numbers, which stand on the right."""
    return [Column(title, is_number=True) for title in titles]


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


def emit(text: str = "", style: str = "") -> None:
    """Print a line of data to stdout."""
    _put(paint(printable(text), style, sys.stdout))


def _put(text: str) -> None:
    if is_main_process():
        print(text, file=sys.stdout)


def emit_json(value: Any, *, indent: int | None = 2) -> None:
    """Print data as one JSON document to stdout. NaN and infinity become null."""
    is_unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    emit(json.dumps(_plain(value), indent=indent, ensure_ascii=not is_unicode, default=str, allow_nan=False))


def log(text: str = "", style: str = "") -> None:
    """Print a line that is not data to stderr."""
    if is_main_process():
        print(paint(printable(text), style, sys.stderr), file=sys.stderr, flush=True)


def detail(text: str) -> None:
    """Print a detail of the line before to stderr, indented; on a terminal it is wrapped and keeps its indent."""
    if is_main_process():
        print(_hang("  ", printable(text), sys.stderr), file=sys.stderr, flush=True)


def print_error(error: InlayError, *, as_json: bool = False) -> None:
    """Print an error and its hint to stderr; as one JSON line if data is printed as JSON.

    Every process prints its errors: one of several may be the only one that knows why it ended.
    """
    if as_json:
        print(json.dumps({"error": error.to_json()}), file=sys.stderr)
        return
    rank = os.environ.get("RANK", "0")  # not parsed: the error may be that it is not a number
    who = "" if rank == "0" or "WORLD_SIZE" not in os.environ else f"process {rank}: "
    print(f"{who}{paint('error:', 'red', sys.stderr)} {printable(error.message)}", file=sys.stderr)
    if error.hint:
        print(f"{paint('hint:', 'cyan', sys.stderr)} {printable(error.hint)}", file=sys.stderr)


def paint(text: str, style: str, stream: TextIO) -> str:
    """Return the text in a style, if the stream shows styles."""
    has_colour = is_terminal(stream) and not os.environ.get("NO_COLOR")
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if style and text and has_colour else text


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can be redrawn."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def emit_table(titles: Sequence[Column | str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout: at most as wide as the terminal, or whole if there is none."""
    columns = [Column(title) if isinstance(title, str) else title for title in titles]
    columns = [column._replace(title=in_line(column.title)) for column in columns]
    rows = [[in_line(cell) for cell in row] for row in rows]
    widths = [max([_width(column.title), *(_width(row[i]) for row in rows)]) for i, column in enumerate(columns)]
    if is_terminal(sys.stdout):
        widths = _fit(columns, widths, shutil.get_terminal_size().columns)
    emit(_line(columns, widths, [column.title for column in columns]), "bold")
    rule = "─" if (sys.stdout.encoding or "").lower().startswith("utf") else "-"
    emit("  ".join(rule * width for width in widths), "dim")
    emit("\n".join(_line(columns, widths, row) for row in rows))


def emit_pairs(pairs: Mapping[str, Any]) -> None:
    """Print names and values, one pair a line, with the values aligned."""
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        indent = f"{name.ljust(width)}  "
        lines = _hang(indent, in_line(str(value)), sys.stdout)
        _put(paint(indent, "dim", sys.stdout) + lines.removeprefix(indent))


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
    if _width(text) <= width:
        return text
    kept, used = [], 0
    for character in text:
        used += _width(character)
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


def own_version() -> str:
    """Return the version of Inlay, or words for a checkout that was never installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("inlay")
    except PackageNotFoundError:
        return "of a checkout (not installed)"


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
    if Meter.current is not None or not is_terminal(sys.stderr) or not is_main_process():
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
        if self._bar is None and is_terminal(sys.stderr):
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


def _hang(indent: str, text: str, stream: TextIO) -> str:
    """Return the text after its indent, wrapped on a terminal so that all lines have the same indent."""
    room = shutil.get_terminal_size().columns - len(indent)
    if not is_terminal(stream) or len(text) <= room or room < 20:
        return indent + text
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return indent + f"\n{' ' * len(indent)}".join(lines)


def _line(columns: Sequence[Column], widths: Sequence[int], cells: Sequence[str]) -> str:
    parts = []
    for column, width, cell in zip(columns, widths, cells, strict=True):
        cell = cell if _width(cell) <= width else shorten(cell, width)
        blanks = " " * (width - _width(cell))
        parts.append(blanks + cell if column.is_number else cell + blanks)
    return "  ".join(parts).rstrip()


def _fit(columns: Sequence[Column], widths: list[int], available: int) -> list[int]:
    """Return widths that fit: the widest flexible columns are narrowed first, down to eight cells."""
    widths = list(widths)
    flexible = [i for i, column in enumerate(columns) if column.is_flexible]
    excess = sum(widths) + 2 * (len(widths) - 1) - available
    while excess > 0 and flexible:
        widest = max(flexible, key=lambda i: widths[i])
        if widths[widest] <= 8:
            break
        widths[widest] -= 1
        excess -= 1
    return widths


def _width(text: str) -> int:
    """Return the cells a text takes: two for wide characters, none for combining ones."""
    if text.isascii():
        return len(text)
    plain = [letter for letter in text if not unicodedata.combining(letter)]
    return len(plain) + sum(unicodedata.east_asian_width(letter) in "WF" for letter in plain)


def _plain(value: Any) -> Any:
    """Return data that JSON can hold: NaN and infinity become None, tuples lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
