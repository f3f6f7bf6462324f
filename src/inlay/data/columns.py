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
"""most characters of a text: a tokenizer needs a second and 100 MB for them, and keeps a few hundred tokens"""
_SURROGATE = re.compile("[\ud800-\udfff]")
# Names are compared in lower case; earlier ones are preferred. Where both columns of a pair exist, the pair wins over a
# single text: reading only one half of a pair would be silently wrong.
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


def find_side(name: str) -> str | None:
    """Return the side that a split's name stands for: `validation_matched` is a dev side."""
    return SIDES.get(name.split("_")[0].lower())


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
        """Describe the columns in a note."""
        roles = {"text": self.text, "pair": self.pair, "label": self.label, "split": self.split}
        return "columns: " + ", ".join(f"{role} `{name}`" for role, name in roles.items() if name is not None)


def find_columns(header: Header, config: DataConfig, *, labelled: bool = True) -> Columns:
    """Return the columns that `config` names, and recognise the others by name; a missing column is a `BadData`.

    A pair is only recognised where neither of its columns was named. Without `labelled` the label column is optional.
    """
    config = by_number(config, header.names)
    # 1. columns that were named must exist
    given = [name for name in (config.text, config.pair, config.label, config.split) if name is not None]
    for name in given:
        if name not in header.names:
            raise BadData(f"no column named `{name}`", list_columns(header), path=header.path, line=header.line)
    # 2. recognise the others by name: a pair first, then a text, then label and split
    free = [name for name in header.names if name not in given]
    text, pair = config.text, config.pair
    if text is None and pair is None:
        found = ((find_name(free, (first,)), find_name(free, (second,))) for first, second in PAIR_NAMES)
        text, pair = next((each for each in found if None not in each), (None, None))
    text = text or find_name(free, TEXT_NAMES)
    free = [name for name in free if name not in (text, pair)]
    label = config.label or find_name(free, LABEL_NAMES)
    split = config.split or find_name(free, SPLIT_NAMES)
    # 3. a single column that is left is the text, or the label
    free = [name for name in free if name not in (label, split)]
    if text is None and len(free) == 1:
        text = free.pop()
    if labelled and label is None and len(free) == 1:
        label = free.pop()
    if text is None or (labelled and label is None):
        role = "text" if text is None else "label"
        hint = f"{list_columns(header)}; name it with `--{role}`"
        if header.line is not None:
            hint += "; if the first line is not a header, use `--no-header`"
        raise BadData(f"no {role} column recognised", hint, path=header.path, line=header.line)
    return Columns(text, pair, label, split)


def by_number(config: DataConfig, names: Sequence[str]) -> DataConfig:
    """Return the settings with column numbers, counted from 1, replaced by names; a column called `2` goes first."""
    found: dict[str, Any] = {}
    for role in ("text", "pair", "label", "split"):
        given = getattr(config, role)
        if given is None or given in names or not given.isdecimal() or len(given) > 6:
            continue
        if 0 < int(given) <= len(names):
            found[role] = names[int(given) - 1]
    return replace(config, **found)


def split_names(given: str | None, header: Header, *, required: bool = True) -> tuple[str, ...]:
    """Return the columns that a setting names: one, or several separated by commas, by name or number.

    A missing column is a `BadData`; if none is `required`, the result is empty.
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
    """Join the texts of a row, each on a line of its own, without empty ones; None if all are empty.

    A cell that is not a text is returned as it is, so that the caller refuses it.
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
    """Return the column that has the first of the known names, in upper or lower case; None if no column has one."""
    by_key = {name.strip().lower(): name for name in reversed(names)}
    return next((by_key[key] for key in known if key in by_key), None)


def list_columns(header: Header) -> str:
    """List the columns for a hint."""
    shown = [f"`{name[:40]}`" for name in header.names[:30]]
    return f"columns there are: {', '.join(shown)}{', …' if len(header.names) > 30 else ''}"


def read_text(value: Any, column: str) -> str:
    """Return the text of a cell, unchanged; a cell that is empty or not a text is a `Fault`."""
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


def find_fault(text: object) -> Fault | None:
    """Return why a text must not reach a tokenizer (no text, half a character in it, far too long); None if it may."""
    if not isinstance(text, str):
        return Fault(f"`{text!r:.80}` is a {type(text).__name__}, not a text", "give a text")
    if len(text) > MOST_LETTERS:
        reason = f"a text of {len(text):,} characters, but a row may have {MOST_LETTERS:,}"
        return Fault(reason, "cut it into several rows: a task reads only as many tokens as its `max_length`")
    if not text.isascii() and _SURROGATE.search(text):
        return Fault("half a character (a lone surrogate)", "write the text again as utf-8")
    return None


def is_missing(value: Any) -> bool:
    """Return whether a cell is empty: null, NaN, or blanks."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def name_label(value: Any) -> str:
    """Return a label's name: the same for `1` in a CSV, 1 in JSON, and 1.0 in a column with gaps."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def read_number(value: Any) -> float | None:
    """Return a cell as a finite number, or None. A truth value is a class, not a number."""
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # 10**400 is too large for a float
        return None
    return number if math.isfinite(number) else None


def as_list(value: Any) -> list[Any] | None:
    """Return the items of a cell that holds a list; None for any other cell."""
    return list(value) if isinstance(value, list | tuple | set | np.ndarray) else None
