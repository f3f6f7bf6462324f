"""Tables whose rows are more than a text and a label: words with tags, texts with spans, questions with contexts.

Each shape is recognised by its columns and turned into the plain columns `text`, `pair` and `label`, so that everything
after it (bad rows, splits, notes, digests) is the same for every kind of task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inlay.data.columns import Fault, as_list, find_name, list_columns
from inlay.data.kinds import KINDS, find_kind
from inlay.data.readers import SKIP_HINT
from inlay.data.sources import Table
from inlay.data.squad import read_answers
from inlay.data.tags import Tagged, join_words, split_words, tag_words, to_iob2
from inlay.errors import BadData
from inlay.settings.run_config import DataConfig

_WORDS = ("tokens", "words")
_TAGS = ("tags", "ner_tags", "labels", "ner", "tag", "pos_tags", "label")
_SPANS = ("spans", "entities")
_ANSWERS = ("answers", "answer")
_STARTS = ("answer_start", "start")

Cells = tuple[Any, ...]
_ABSENT = object()


@dataclass(frozen=True)
class Shape:
    """An entry of the table: which columns make a shape, and how a row's cells become text, pair and label."""

    roles: Mapping[str, Sequence[str]]
    """role -> the names its column may have; a role that is also a setting (text, pair, label) may be named by it"""
    convert: Callable[..., Cells]
    """cells by role, and a count of what was decided on the way -> text, pair, label"""
    listed: str
    """the role whose cells are lists: what tells this shape from others with columns of the same names"""
    optional: tuple[str, ...] = ()
    """roles that need not be there; one that is there tells the shape too"""


def _convert_tags(counts: dict[str, int], text: Any, label: Any = None) -> Cells:
    tokens, tags = _as_words(text, "words"), None if label is None else _as_words(label, "tags")
    joined, words = join_words(tokens)
    if tags is None:
        return joined, None, None
    if len(tags) != len(tokens):
        raise Fault(f"{len(tokens)} words, but {len(tags)} tags", "give every word one tag")
    tags, was_changed = to_iob2(tags)
    counts["sentences whose tags were not IOB2 (IOB1, IOBES or BILOU) were converted to it"] += was_changed
    return joined, None, _place(words, tags)


def _convert_spans(counts: dict[str, int], text: Any, label: Any = None) -> Cells:
    if not isinstance(text, str):
        raise Fault("the text is no text", 'write {"text": "…", "spans": [{"start": 0, "end": 4, "label": "PER"}]}')
    if label is None:
        return text, None, None
    try:
        spans = sorted((int(span["start"]), int(span["end"]), str(span["label"])) for span in label)
    except (TypeError, KeyError, ValueError):
        raise Fault("a span lacks start, end or label", 'write {"start": 0, "end": 4, "label": "PER"}') from None
    for start, end, _ in spans:
        if not 0 <= start < end <= len(text) or not text[start:end].strip():
            raise Fault(f"the span {start} to {end} is not in its text", f"the text has {len(text)} characters")
    words = split_words(text)
    try:
        tags, num_widened = tag_words(words, spans)
    except ValueError as error:
        raise Fault(str(error), "spans must not overlap") from None
    counts["spans that begin or end inside a word were widened to whole words"] += num_widened
    return text, None, _place(words, tags)


def _convert_question(counts: dict[str, int], text: Any, pair: Any, label: Any = _ABSENT, start: Any = None) -> Cells:
    if label is _ABSENT:
        return text, pair, None
    try:
        golds, was_searched = read_answers(label, start, pair if isinstance(pair, str) else "")
    except ValueError as error:
        raise Fault(str(error), "an answer is a part of its context, letter for letter") from None
    except (TypeError, KeyError, AttributeError):
        raise Fault("the answers cannot be read", 'write [{"text": "…", "answer_start": 12}]') from None
    counts["answers without a place were taken where they first stand in the context"] += was_searched
    return text, pair, golds


SHAPES = {
    "words": Shape({"text": _WORDS, "label": _TAGS}, _convert_tags, listed="text"),
    "spans": Shape({"text": ("text", "sentence"), "label": _SPANS}, _convert_spans, listed="label"),
    "questions": Shape(
        {"text": ("question",), "pair": ("context",), "label": _ANSWERS, "start": _STARTS},
        _convert_question,
        listed="label",
        optional=("start",),
    ),
}
"""The shapes that kinds of task name (`Kind.shapes`); earlier ones are tried first."""


def shape_table(table: Table, config: DataConfig, *, labelled: bool = True) -> Table:
    """The table with plain columns if it has the shape of a kind that needs one; otherwise as it is."""
    kinds = KINDS if config.kind == "auto" else {config.kind: find_kind(config.kind)}
    candidates = [(name, SHAPES[shape]) for name, kind in kinds.items() for shape in kind.shapes]
    for kind, shape in candidates:
        places = _find_places(shape, table, config, labelled=labelled)
        if places is not None and _is_told(shape, table, places, has_rivals=len(candidates) > 1):
            return replace(_convert(table, shape, places, config), kind=kind, has_pairs="pair" in shape.roles)
    if config.kind == "auto" or not candidates:
        return table
    wanted = " or ".join(_describe(shape) for _, shape in candidates)
    hint = f"it needs {wanted}; {list_columns(table.header)}"
    raise BadData(f"no columns of a `{config.kind}` task", hint, path=table.header.path, line=table.header.line)


def _describe(shape: Shape) -> str:
    return ", ".join(f"`{names[0]}`" for role, names in shape.roles.items() if role not in shape.optional)


def _find_places(shape: Shape, table: Table, config: DataConfig, *, labelled: bool) -> dict[str, str] | None:
    """The column of each role, or None where the table has not this shape."""
    places = {}
    for role, names in shape.roles.items():
        given = getattr(config, role, None)
        found = given if given in table.header.names else find_name(table.header.names, names)
        if found is not None:
            places[role] = found
        elif role not in shape.optional and (labelled or role != "label"):
            return None
    return places


def _is_told(shape: Shape, table: Table, places: Mapping[str, str], *, has_rivals: bool) -> bool:
    """Return whether columns of these names are this shape, and not a text and its label, or another shape."""
    if not has_rivals or any(role in places for role in shape.optional) or shape.listed not in places:
        return True
    cells = table.column(places[shape.listed])[:100]
    return any(as_list(cell) is not None or isinstance(cell, Mapping) for cell in cells)


def _convert(table: Table, shape: Shape, places: Mapping[str, str], config: DataConfig) -> Table:
    counts: dict[str, int] = _Counts()
    columns = {role: table.column(name) for role, name in places.items()}
    others = [name for name in table.header.names if name not in places.values() and name == (config.split or "split")]
    rows, lines, faults = [], [], list(table.faults)
    for row, line in enumerate(table.lines):
        try:
            cells = shape.convert(counts, **{role: column[row] for role, column in columns.items()})
        except Fault as fault:
            error = BadData(fault.reason, f"{fault.hint}; {SKIP_HINT}", path=table.header.path, line=line)
            if config.on_bad_row == "refuse":
                raise error from None
            faults.append(error)
            continue
        rows.append([*cells, *(table.rows[row][table.header.names.index(name)] for name in others)])
        lines.append(line)
    if not rows:
        raise BadData("no usable rows", "see what is wrong with them by `--on-bad-row refuse`", path=table.header.path)
    header = table.header._replace(names=("text", "pair", "label", *others))
    notes = ["columns: " + ", ".join(f"{role} `{name}`" for role, name in places.items())]
    notes += [f"{number:,} {what}" for what, number in counts.items() if number]
    made = replace(table, header=header, rows=rows, lines=lines, faults=tuple(faults))
    return replace(made, notes=(*table.notes, *notes))


class _Counts(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


def _as_words(cell: Any, what: str) -> list[str]:
    items = as_list(cell)
    if items is None or not all(isinstance(item, str) for item in items):
        raise Fault(f"the {what} are no list of texts", 'write {"tokens": ["In", "Oslo"], "tags": ["O", "B-LOC"]}')
    if what == "words" and not all(item.strip() for item in items):
        raise Fault("a word is empty", "remove it and its tag")
    return items


def _place(words: Iterable[tuple[int, int]], tags: Iterable[str]) -> list[Tagged]:
    return [(start, end, tag) for (start, end), tag in zip(words, tags, strict=True)]
