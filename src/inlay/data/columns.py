"""Columns recognised by name, and their cells as texts, numbers and names.

A cell that cannot be used raises a `Fault` with the reason; the caller, who knows file and line, makes it a `BadData`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from inlay.errors import BadData
from inlay.settings import DataConfig

MOST_LETTERS = 1_000_000
"""letters of a text at most: tokenizers need a second and 100 MB for them, and keep a few hundred tokens"""
_SURROGATE = re.compile("[\ud800-\udfff]")
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
    *("document", "description", "question", "query", "title", "comment_text", "v2"),
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
    """The columns of a table by role."""

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
    config = by_number(config, header.names)
    given = [name for name in (config.text, config.pair, config.label, config.split) if name is not None]
    for name in given:
        if name not in header.names:
            raise BadData(f"no column named `{name}`", list_columns(header), path=header.path, line=header.line)
    free = [name for name in header.names if name not in given]
    text, pair = config.text, config.pair
    if text is None and pair is None:
        found = ((find_name(free, (first,)), find_name(free, (second,))) for first, second in PAIR_NAMES)
        text, pair = next((each for each in found if None not in each), (None, None))
    text = text or find_name(free, TEXT_NAMES)
    free = [name for name in free if name not in (text, pair)]
    label = config.label or find_name(free, LABEL_NAMES)
    split = config.split or find_name(free, SPLIT_NAMES)
    free = [name for name in free if name not in (label, split)]
    if text is None and len(free) == 1:
        text = free.pop()
    if labelled and label is None and len(free) == 1:
        label = free.pop()
    if text is None or (labelled and label is None):
        role = "text" if text is None else "label"
        hint = f"{list_columns(header)}; name it with `--{role}`"
        if header.line is not None:
            hint += "; if the first line is no header, say `--no-header`"
        raise BadData(f"no {role} column recognised", hint, path=header.path, line=header.line)
    return Columns(text, pair, label, split)


def by_number(config: DataConfig, names: Sequence[str]) -> DataConfig:
    """The settings with columns that were given by number, counted from 1, by name; a name goes first."""
    roles = {role: getattr(config, role) for role in ("text", "pair", "label", "split")}
    found: dict[str, Any] = {
        role: names[int(given) - 1]
        for role, given in roles.items()
        if given is not None and given not in names and _is_number_of(given, len(names))
    }
    return replace(config, **found)


def _is_number_of(given: str, num_columns: int) -> bool:
    return given.isdecimal() and len(given) < 7 and 0 < int(given) <= num_columns


def split_names(given: str | None, header: Header, *, required: bool = True) -> tuple[str, ...]:
    """The columns that a setting names: one, or several with commas between them, by name or number.

    Unless they are `required`, they may be missing.
    """
    if given is None or given in header.names or "," not in given:
        return () if given is None else (given,)
    names = []
    for part in (part.strip() for part in given.split(",")):
        name = by_number(DataConfig(text=part), header.names).text
        if name not in header.names:
            if not required:
                return ()
            raise BadData(f"no column named `{part}`", list_columns(header), path=header.path, line=header.line)
        names.append(str(name))
    return tuple(names)


def join_texts(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The texts of a row, each on a line of its own, without those that are empty; None if all are.

    A cell that is no text is returned as it is, to be refused as such.
    """
    texts = []
    for name in names:
        cell = record.get(name)
        if is_missing(cell):
            continue
        try:
            texts.append(read_text(cell, name))
        except Fault:
            return cell
    return "\n".join(texts) or None


def find_name(names: Sequence[str], known: Iterable[str]) -> str | None:
    """The first of the known names that a column has, whatever its case."""
    by_key = {name.strip().lower(): name for name in reversed(names)}
    return next((by_key[key] for key in known if key in by_key), None)


def list_columns(header: Header) -> str:
    """The columns there are, for a hint."""
    shown = [f"`{name[:40]}`" for name in header.names[:30]]
    return f"columns there are: {', '.join(shown)}{', …' if len(header.names) > 30 else ''}"


def read_text(value: Any, column: str) -> str:
    """The text of a cell, unchanged; a cell that is empty or not a text is a `Fault`."""
    if is_missing(value):
        raise Fault(f"empty text in column `{column}`", "fill it in or remove the row")
    if isinstance(value, str):
        fault = find_fault(value)
        if fault is not None:
            raise Fault(f"{fault.reason} in column `{column}`", fault.hint)
        return value
    if isinstance(value, int | float):
        return name_label(value)
    raise Fault(f"column `{column}` holds a {type(value).__name__}, not a text", "name another column with `--text`")


def find_fault(text: str) -> Fault | None:
    """Find why no tokenizer should be given a text: half a character in it, or more letters than any row needs."""
    if len(text) > MOST_LETTERS:
        reason = f"a text of {len(text):,} letters, but a row may have {MOST_LETTERS:,}"
        return Fault(reason, "cut it into several rows: a task reads only as many tokens as its `max_length`")
    if not text.isascii() and _SURROGATE.search(text):
        return Fault("half a character (a lone surrogate)", "write the text again as utf-8")
    return None


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
    except (TypeError, ValueError, OverflowError):  # 10**400 is no float
        return None
    return number if math.isfinite(number) else None


def as_list(value: Any) -> list[Any] | None:
    """The items of a cell that holds a list, or None."""
    return list(value) if isinstance(value, list | tuple | set | np.ndarray) else None
