"""Tables of other shapes turned into plain columns: `text`, `pair` and `label`.

- Several columns are read as one (`combine`): texts that are joined, and columns of 0 and 1 that show which labels a
  row has. The table gets one more column, whose name is the names of these columns with commas between them.
- Tables with other columns than a text and a label (`shape_table`): words with tags, texts with spans, questions with
  contexts. They are recognised by their columns.

So everything that follows (bad rows, splits, notes, digests) is the same for every kind of task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inlay.data.columns import (
    LABEL_NAMES,
    PAIR_NAMES,
    SPLIT_NAMES,
    TEXT_NAMES,
    Fault,
    as_list,
    by_number,
    find_name,
    is_missing,
    join_texts,
    list_columns,
    split_names,
)
from inlay.data.kinds import KINDS, find_kind
from inlay.data.sources import Table
from inlay.data.squad import read_answers
from inlay.data.streams import SKIP_HINT
from inlay.data.tags import Tagged, join_words, split_words, tag_words, to_iob2
from inlay.errors import BadData
from inlay.settings import DataConfig

# How a cell of 0 or 1 may be written -> whether it is 1.
_INDICATORS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
_IDS = ("", "id", "index", "idx", "unnamed: 0")
# The names that columns of other shapes may have.
_WORDS = ("tokens", "words")
_TAGS = ("tags", "ner_tags", "labels", "ner", "tag", "pos_tags", "label")
_SPANS = ("spans", "entities")
_ANSWERS = ("answers", "answer")
_STARTS = ("answer_start", "start")

PlainRow = tuple[Any, ...]
_ABSENT = object()


@dataclass(frozen=True, eq=False)
class JoinedTable:
    """A table with the joined columns, and the settings that name them."""

    table: Table
    config: DataConfig
    has_sets: bool | None = None
    """whether columns of 0 and 1 give sets of labels, or one label for each row; None: there are no such columns"""


def combine(table: Table, config: DataConfig, *, has_sets: bool | None = None, labelled: bool = True) -> JoinedTable:
    """Add a column for joined texts, and one for columns of 0 and 1; `has_sets` is that of the training rows.

    Columns of labels are those that `config` names, or all but the text if they hold only 0 and 1.
    """
    config = by_number(config, table.header.names)
    texts = split_names(config.text, table.header)
    notes = []
    # 1. join several text columns
    if len(texts) > 1:
        cells = [join_texts(row, texts) for row in _records(table, texts)]
        table = _add(table, str(config.text), cells)
        notes.append(f"text: columns {_list(texts)} joined, each on a line of its own")
    # 2. find the columns of 0 and 1
    is_found = config.label is None
    indicators = (
        _find_indicators(table, config) if is_found else split_names(config.label, table.header, required=labelled)
    )
    if len(indicators) < 2:
        return JoinedTable(replace(table, notes=(*table.notes, *notes)), config)
    # 3. add the labels that they show: sets, or one label for each row
    table, sets = _read_indicators(table, indicators, config)
    if has_sets is None:
        kind = KINDS.get(config.kind)
        has_sets = any(len(names) != 1 for names in sets) if kind is None else kind.targets.num_dims == 2
    name = ",".join(indicators)
    table = _add(table, name, [names if has_sets or len(names) != 1 else names[0] for names in sets])
    what = "sets of labels" if has_sets else "the label of each row"
    why = ", found as all other columns" if is_found else ""
    notes.append(f"labels: columns {_list(indicators)} of 0 and 1{why}, read as {what}")
    unused = [name for name in indicators if not any(name in names for names in sets)]
    notes += [f"labels: no row has {_list(unused)}"] if unused else []
    return JoinedTable(replace(table, notes=(*table.notes, *notes)), replace(config, label=name), has_sets)


def _records(table: Table, names: Sequence[str]) -> list[dict[str, Any]]:
    columns = [table.column(name) for name in names]
    return [dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True)]


def _add(table: Table, name: str, cells: Sequence[Any]) -> Table:
    header = table.header._replace(names=(*table.header.names, name))
    return replace(table, header=header, rows=[[*row, cell] for row, cell in zip(table.rows, cells, strict=True)])


def _find_indicators(table: Table, config: DataConfig) -> tuple[str, ...]:
    """Return the columns of 0 and 1, if there is no other column beside the text that could be the label."""
    names = table.header.names
    free = [name for name in names if name not in (config.text, config.pair, config.split)]
    kind = KINDS.get(config.kind)
    if find_name(free, LABEL_NAMES) is not None or (kind is not None and not kind.targets.has_labels):
        return ()
    texts = {config.text, config.pair} if config.text else {find_name(names, TEXT_NAMES)}
    texts |= {find_name(names, (name,)) for pair in PAIR_NAMES for name in pair} if config.text is None else set()
    parts = set(split_names(config.text, table.header))
    aside = texts | parts | {find_name(names, SPLIT_NAMES), "task"}
    aside |= {name for name in free if name.strip().lower() in _IDS or name.lower().endswith("_id")}
    free = [name for name in free if name not in aside]
    columns = {name: table.column(name) for name in free}
    indicators = [name for name, cells in columns.items() if all(_read_indicator(cell) is not None for cell in cells)]
    others = [name for name in free if name not in indicators]
    has_text = any(name is not None for name in texts)
    return tuple(indicators) if len(indicators) > 1 and len(others) == (0 if has_text else 1) else ()


def _read_indicator(cell: Any) -> bool | None:
    """Return whether a cell is 1; None if it is neither 1 nor 0."""
    return _INDICATORS.get(str(cell).strip().lower())


def _read_indicators(table: Table, indicators: Sequence[str], config: DataConfig) -> tuple[Table, list[list[str]]]:
    """Return the names of the columns that are 1 in each row, and the table without rows with other values."""
    kept, sets, faults = [], [], list(table.faults)
    for row, cells in enumerate(_records(table, indicators)):
        wrong = next((name for name, cell in cells.items() if _read_indicator(cell) is None), None)
        if wrong is None:
            kept.append(row)
            sets.append([name for name, cell in cells.items() if _read_indicator(cell)])
            continue
        shown = "nothing" if is_missing(cells[wrong]) else f"`{str(cells[wrong])[:40]}`"
        line = table.lines[row]
        reason = f"column `{wrong}` holds {shown}, where 0 or 1 should be"
        fault = BadData(reason, SKIP_HINT, path=table.header.path, line=line)
        if config.on_bad_row == "refuse":
            raise fault
        faults.append(fault)
    if not kept:
        raise BadData("no usable rows", "see what is wrong with them by `--on-bad-row refuse`", path=table.header.path)
    rows = [table.rows[row] for row in kept]
    return replace(table, rows=rows, lines=[table.lines[row] for row in kept], faults=tuple(faults)), sets


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:10]) + (", …" if len(names) > 10 else "")


@dataclass(frozen=True)
class RowShape:
    """An entry of the table: which columns make a shape, and how a row's cells become text, pair and label."""

    roles: Mapping[str, Sequence[str]]
    """role -> the names that its column may have; for text, pair and label the settings may give another name"""
    convert: Callable[..., PlainRow]
    """counts of changes to report, and cells by role -> text, pair, label"""
    listed: str
    """the role whose cells are lists; it distinguishes this shape from others with columns of the same names"""
    optional: tuple[str, ...] = ()
    """roles that may be missing; if one is there, the table has this shape"""
    has_objects: bool = False
    """whether those lists hold objects; in a column with another name, lists of texts are labels"""


def _convert_tags(counts: Counter[str], text: Any, label: Any = None) -> PlainRow:
    tokens, tags = _as_words(text, "words"), None if label is None else _as_words(label, "tags")
    joined, words = join_words(tokens)
    if tags is None:
        return joined, None, None
    if len(tags) != len(tokens):
        raise Fault(f"{len(tokens)} words, but {len(tags)} tags", "give every word one tag")
    tags, was_changed = to_iob2(tags)
    counts["sentences whose tags were not IOB2 (IOB1, IOBES or BILOU) were converted to it"] += was_changed
    return joined, None, _place(words, tags)


def _convert_spans(counts: Counter[str], text: Any, label: Any = None) -> PlainRow:
    if not isinstance(text, str):
        raise Fault("the text is not a text", 'write {"text": "…", "spans": [{"start": 0, "end": 4, "label": "PER"}]}')
    if label is None:
        return text, None, None
    try:
        spans = sorted((int(span["start"]), int(span["end"]), str(span["label"])) for span in label)
    except (TypeError, KeyError, ValueError, OverflowError):
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


def _convert_question(counts: Counter[str], text: Any, pair: Any, label: Any = _ABSENT, start: Any = None) -> PlainRow:
    if label is _ABSENT:
        return text, pair, None
    try:
        golds, was_searched = read_answers(label, start, pair if isinstance(pair, str) else "")
    except ValueError as error:
        raise Fault(str(error), "an answer is a part of its context, letter for letter") from None
    except (TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise Fault("the answers cannot be read", 'write [{"text": "…", "answer_start": 12}]') from None
    counts["answers without a place were taken where they first stand in the context"] += was_searched
    return text, pair, golds


SHAPES = {
    "words": RowShape({"text": _WORDS, "label": _TAGS}, _convert_tags, listed="text"),
    "spans": RowShape(
        {"text": ("text", "sentence"), "label": _SPANS}, _convert_spans, listed="label", has_objects=True
    ),
    "questions": RowShape(
        {"text": ("question",), "pair": ("context",), "label": _ANSWERS, "start": _STARTS},
        _convert_question,
        listed="label",
        optional=("start",),
    ),
}
"""The shapes of tables, by the name that `Kind.shapes` uses."""


def shape_table(table: Table, config: DataConfig, *, labelled: bool = True) -> Table:
    """Turn a table with the shape of a kind of task into plain columns; return any other table as it is."""
    config = by_number(config, table.header.names)
    kinds = KINDS if config.kind == "auto" else {config.kind: find_kind(config.kind)}
    candidates = [(name, SHAPES[shape]) for name, kind in kinds.items() for shape in kind.shapes]
    for kind, shape in candidates:
        places = _find_places(shape, table, config, labelled=labelled)
        if places is not None and _is_told(shape, table, places, has_rivals=len(candidates) > 1):
            return replace(_convert_table(table, shape, places, config), kind=kind, has_pairs="pair" in shape.roles)
    if config.kind == "auto" or not candidates:
        return table
    wanted = " or ".join(
        ", ".join(f"`{names[0]}`" for role, names in shape.roles.items() if role not in shape.optional)
        for _, shape in candidates
    )
    hint = f"it needs {wanted}; {list_columns(table.header)}"
    raise BadData(f"no columns of a `{config.kind}` task", hint, path=table.header.path, line=table.header.line)


def _find_places(shape: RowShape, table: Table, config: DataConfig, *, labelled: bool) -> dict[str, str] | None:
    """Return the column of each role; None if the table lacks a column of this shape."""
    places = {}
    for role, names in shape.roles.items():
        given = getattr(config, role, None)
        found = given if given in table.header.names else find_name(table.header.names, names)
        if found is not None:
            places[role] = found
        elif role not in shape.optional and (labelled or role != "label"):
            return None
    return places


def _is_told(shape: RowShape, table: Table, places: Mapping[str, str], *, has_rivals: bool) -> bool:
    """Return whether columns with these names are really of this shape, and not a text and its label."""
    if not has_rivals or any(role in places for role in shape.optional) or shape.listed not in places:
        return True
    cells = table.column(places[shape.listed])[:100]
    if shape.has_objects and places[shape.listed].lower() not in shape.roles[shape.listed]:
        return any(isinstance(item, Mapping) for cell in cells for item in as_list(cell) or ())
    return any(as_list(cell) is not None or isinstance(cell, Mapping) for cell in cells)


def _convert_table(table: Table, shape: RowShape, places: Mapping[str, str], config: DataConfig) -> Table:
    """Turn a table of this shape into plain columns; bad rows are refused or left out."""
    counts = Counter[str]()
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
    shown = "columns: " + ", ".join(f"{role} `{name}`" for role, name in places.items())
    notes = (*table.notes, shown, *(f"{number:,} {what}" for what, number in counts.items() if number))
    return replace(table, header=header, rows=rows, lines=lines, faults=tuple(faults), notes=notes)


def _as_words(cell: Any, what: str) -> list[str]:
    items = as_list(cell)
    if items is None or not all(isinstance(item, str) for item in items):
        raise Fault(f"the {what} are not a list of texts", 'write {"tokens": ["In", "Oslo"], "tags": ["O", "B-LOC"]}')
    if what == "words" and not all(item.strip() for item in items):
        raise Fault("a word is empty", "remove it and its tag")
    return items


def _place(words: Iterable[tuple[int, int]], tags: Iterable[str]) -> list[Tagged]:
    return [(start, end, tag) for (start, end), tag in zip(words, tags, strict=True)]
