"""What a column is for and what its cells mean: columns recognised by name, texts checked, labels read.

A cell that cannot be used raises a `Fault` with the reason; whoever knows the file and the line makes it a `BadData`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from inlay.data.tags import sort_tags
from inlay.errors import BadConfig, BadData
from inlay.settings.run_config import DataConfig

# Names are compared in lower case; earlier ones are preferred. Where both columns of a pair are there, the pair wins
# over a single text: reading only one half of a pair would be silently wrong.
PAIR_NAMES = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("query", "passage"),
    ("question", "context"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("sentence_a", "sentence_b"),
    ("text", "pair"),
    ("text", "text2"),
    ("text", "text_pair"),
    ("#1 string", "#2 string"),
)
TEXT_NAMES = (
    *("text", "sentence", "sentence1", "premise", "content", "message", "tweet", "review", "body", "comment"),
    *("document", "description", "question", "query", "title", "v2"),
)
LABEL_NAMES = (
    *("label", "labels", "target", "class", "category", "score", "sentiment", "gold_label", "intent", "emotion"),
    *("topic", "rating", "stars", "quality", "is_duplicate", "v1"),
)
SPLIT_NAMES = ("split",)
SIDES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("dev", "valid", "validation", "val"), "dev"),
    **dict.fromkeys(("test", "testing"), "test"),
}
MOST_CLASSES_OF_NUMBERS = 20  # more different whole numbers than this are a scale, not classes
# A scale with a few cells that are no numbers is a scale with bad rows, which are better named than made classes of.
LEAST_SHARE_OF_NUMBERS = 0.9
SEPARATORS = ("|", ";", ",")
UNLABELLED_KINDS = ("regress", "span", "text")  # whose targets are no names out of a list


class Fault(ValueError):
    """Why a cell cannot be used, and what to do."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


class Header(NamedTuple):
    """The columns of a source, and where they are named (no line in a format without a header line)."""

    path: str
    names: tuple[str, ...]
    line: int | None


@dataclass(frozen=True)
class Columns:
    """Which column is what."""

    text: str
    pair: str | None = None
    label: str | None = None
    split: str | None = None

    def describe(self) -> str:
        """The columns as one note."""
        roles = {"text": self.text, "pair": self.pair, "label": self.label, "split": self.split}
        return "columns: " + ", ".join(f"{role} `{name}`" for role, name in roles.items() if name is not None)


def find_columns(header: Header, config: DataConfig, *, labelled: bool = True) -> Columns:
    """The columns named in `config`, the others recognised by name; a column that is missing is a `BadData`.

    Naming the text names all text: a pair is only recognised where neither column was named. Without `labelled` there
    may be no label column.
    """
    given = [name for name in (config.text, config.pair, config.label, config.split) if name is not None]
    for name in given:
        _require_column(header, name)
    free = [name for name in header.names if name not in given]
    text, pair = config.text, config.pair
    if text is None and pair is None:
        text, pair = _find_pair(free)
    text = text or find_name(free, TEXT_NAMES)
    free = [name for name in free if name not in (text, pair)]
    label = config.label or find_name(free, LABEL_NAMES)
    split = config.split or find_name(free, SPLIT_NAMES)
    free = [name for name in free if name not in (label, split)]
    if text is None and len(free) == 1:
        text = free.pop()
    if labelled and label is None and len(free) == 1:
        label = free.pop()
    if text is None:
        raise _unrecognised(header, "text")
    if labelled and label is None:
        raise _unrecognised(header, "label")
    return Columns(text, pair, label, split)


def find_name(names: Sequence[str], known: Iterable[str]) -> str | None:
    """The first of the known names that a column has, whatever its case."""
    by_key = {name.strip().lower(): name for name in reversed(names)}
    return next((by_key[key] for key in known if key in by_key), None)


def _find_pair(names: Sequence[str]) -> tuple[str | None, str | None]:
    for pair in PAIR_NAMES:
        first, second = (find_name(names, (key,)) for key in pair)
        if first is not None and second is not None:
            return first, second
    return None, None


def _require_column(header: Header, name: str) -> None:
    if name not in header.names:
        raise BadData(f"no column named `{name}`", list_columns(header), path=header.path, line=header.line)


def _unrecognised(header: Header, role: str) -> BadData:
    hint = f"{list_columns(header)}; name it with `--{role}`"
    if header.line is not None:
        hint += "; the first line must be a header"
    return BadData(f"no {role} column recognised", hint, path=header.path, line=header.line)


def list_columns(header: Header) -> str:
    """The columns there are, for a hint."""
    shown = [f"`{name[:40]}`" for name in header.names[:30]]
    return f"columns there are: {', '.join(shown)}{', …' if len(header.names) > 30 else ''}"


def read_text(value: Any, column: str) -> str:
    """The text of a cell, unchanged; an empty one, or one that is no text, is a `Fault`."""
    if is_missing(value):
        raise Fault(f"empty text in column `{column}`", "fill it in or remove the row")
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise Fault(f"half a character (a lone surrogate) in column `{column}`", "write the text again as utf-8")
        return value
    if isinstance(value, int | float):
        return name_label(value)
    raise Fault(f"column `{column}` holds a {type(value).__name__}, not a text", "name another column with `--text`")


def is_missing(value: Any) -> bool:
    """Whether a cell holds nothing: null, NaN, or blanks."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def name_label(value: Any) -> str:
    """A label's name: the same for `1` in a CSV, 1 in JSON and the 1.0 a column with gaps turns it into."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def read_number(value: Any) -> float | None:
    """A cell as a finite number, or None. A truth value is a class, not a number."""
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def as_list(value: Any) -> list[Any] | None:
    """The items of a cell that holds a list, or None."""
    return list(value) if isinstance(value, list | tuple | set | np.ndarray) else None


def infer_kind(values: Sequence[Any]) -> str:
    """The kind a label column is for: lists are multilabel, a scale of numbers is regress, the rest classify."""
    if any(as_list(value) is not None for value in values):
        return "multilabel"
    numbers = [number for number in map(read_number, values) if number is not None]
    if len(numbers) < LEAST_SHARE_OF_NUMBERS * len(values):
        return "classify"
    is_scale = any(not number.is_integer() for number in numbers) or len(set(numbers)) > MOST_CLASSES_OF_NUMBERS
    return "regress" if is_scale else "classify"


@dataclass(frozen=True)
class Scheme:
    """How label cells become targets."""

    kind: str
    labels: tuple[str, ...]
    separator: str | None = None  # between the labels of one cell, for multilabel tasks read from text

    def read(self, value: Any) -> Any:
        """A class index, a 0/1 row, a number, tagged words or answers; what cannot be read is a `Fault`."""
        return _READERS[self.kind](self, value)

    def collect(self, targets: list[Any]) -> np.ndarray:
        """Targets as one array: int64 [n], float32 [n, labels], float64 [n], or tuples [n]."""
        if self.kind == "multilabel":
            return np.stack(targets) if targets else np.zeros((0, len(self.labels)), dtype=np.float32)
        if self.kind in _DTYPES:
            return np.array(targets, dtype=_DTYPES[self.kind])
        collected = np.empty(len(targets), dtype=object)  # filled one by one: numpy would make a table of equal tuples
        for row, target in enumerate(targets):
            collected[row] = target
        return collected

    def index(self, name: str) -> int:
        """The number of a label; one that is not known is a `Fault`."""
        try:
            return self.labels.index(name)
        except ValueError:
            shown = ", ".join(self.labels[:30]) + (", …" if len(self.labels) > 30 else "")
            raise Fault(f"unseen label `{name}`", f"known labels: {shown}") from None


_DTYPES = {"classify": np.int64, "regress": np.float64}


def _read_class(scheme: Scheme, value: Any) -> int:
    if is_missing(value):
        raise Fault("missing label", "fill it in or remove the row")
    if as_list(value) is not None:
        raise Fault("the label is a list", "use `--kind multilabel`")
    return scheme.index(name_label(value))


def _read_set(scheme: Scheme, value: Any) -> np.ndarray:
    row = np.zeros(len(scheme.labels), dtype=np.float32)
    row[[scheme.index(name) for name in split_labels(value, scheme)]] = 1
    return row


def _read_target(scheme: Scheme, value: Any) -> float:
    if is_missing(value):
        raise Fault("missing label", "fill it in or remove the row")
    number = read_number(value)
    if number is None:
        raise Fault(f"non-numeric target `{value}`", "a number such as 3.5; for classes use `--kind classify`")
    return number


def _read_tags(scheme: Scheme, value: Any) -> tuple[tuple[int, int, int], ...]:
    if value is None:
        raise Fault("missing tags", "give every word a tag, or remove the row")
    return tuple((start, end, scheme.index(tag)) for start, end, tag in value)


def _read_answer(scheme: Scheme, value: Any) -> str:
    if is_missing(value):
        raise Fault("missing answer", "fill it in or remove the row")
    return " ".join(read_text(value, "label").split())


# Kind -> how a label cell becomes a target. Tagged words and answers were made of their cells by their shape.
_READERS: dict[str, Callable[[Scheme, Any], Any]] = {
    "classify": _read_class,
    "multilabel": _read_set,
    "regress": _read_target,
    "tag": _read_tags,
    "span": lambda scheme, value: value,
    "text": _read_answer,
}


def split_labels(value: Any, scheme: Scheme) -> list[str]:
    """The label names of a multilabel cell; an empty list or an empty cell of text is a row without labels."""
    items = as_list(value)
    if items is not None:
        return [name_label(item) for item in items]
    if isinstance(value, str):
        name = value.strip()
        if scheme.separator is None or name in scheme.labels:
            return [name] if name else []
        return [piece.strip() for piece in name.split(scheme.separator) if piece.strip()]
    if is_missing(value):
        raise Fault("missing label", "write an empty list where no label applies")
    return [name_label(value)]


def list_names(value: Any, scheme: Scheme) -> list[str]:
    """The labels that a cell names, whether the scheme knows them or not; none where it cannot be read."""
    if scheme.kind == "tag":
        return [tag for _, _, tag in value or ()]
    if scheme.kind == "classify":
        return [] if as_list(value) is not None or is_missing(value) else [name_label(value)]
    if scheme.kind != "multilabel":
        return []
    try:
        return split_labels(value, scheme)
    except Fault:
        return []


def find_scheme(values: Sequence[Any], config: DataConfig) -> Scheme:
    """Kind and labels of a task from the label cells of its training rows and what `config` sets."""
    present = [value for value in values if not (as_list(value) is None and is_missing(value))]
    kind = config.kind
    if kind == "auto":
        kind = infer_kind(present)
        if config.labels and kind == "regress":
            kind = "classify"  # who names labels wants classes
    if kind in UNLABELLED_KINDS:
        if config.labels:
            raise BadConfig(f"`data.labels` is set for a {kind} task", "leave it out, or use `--kind classify`")
        return Scheme(kind, ())
    if kind == "tag":
        return Scheme(kind, config.labels or sort_tags({tag for value in values or [] for _, _, tag in value or []}))
    if kind == "classify":
        found = {name_label(value) for value in present if as_list(value) is None}
        return Scheme(kind, config.labels or sort_labels(found))
    scheme = Scheme(kind, config.labels, find_separator(present))
    found = {name for value in present for name in split_labels(value, scheme)}
    return Scheme(kind, config.labels or sort_labels(found), scheme.separator)


def find_separator(values: Iterable[Any]) -> str | None:
    """What stands between the labels of one cell: the first of `|`, `;` and `,` that occurs in any."""
    cells = [value for value in values if isinstance(value, str)]
    return next((separator for separator in SEPARATORS if any(separator in cell for cell in cells)), None)


def sort_labels(names: Iterable[str]) -> tuple[str, ...]:
    """Label names in a fixed order: numbers by value, anything else by letter."""
    names = sorted(names)
    if all(read_number(name) is not None for name in names):
        names.sort(key=float)
    return tuple(names)
