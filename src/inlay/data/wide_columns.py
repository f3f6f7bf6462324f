"""Several columns read as one: texts that are joined, and columns of 0 and 1 that show which labels a row has.

The table gets one more column, whose name is the names of the joined columns with commas between them. So everything
that follows is the same as for any other table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from inlay.data.columns import (
    LABEL_NAMES,
    PAIR_NAMES,
    SPLIT_NAMES,
    TEXT_NAMES,
    by_number,
    find_name,
    is_missing,
    join_texts,
    split_names,
)
from inlay.data.kinds import KINDS
from inlay.data.sources import Table
from inlay.data.streams import SKIP_HINT
from inlay.errors import BadData
from inlay.settings import DataConfig

# How a cell of 0 or 1 may be written -> whether it is 1.
_INDICATORS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
_IDS = ("", "id", "index", "idx", "unnamed: 0")


@dataclass(frozen=True, eq=False)
class Combined:
    """A table with the joined columns, and the settings that name them."""

    table: Table
    config: DataConfig
    has_sets: bool | None = None
    """whether columns of 0 and 1 give sets of labels, or one label for each row; None: there are no such columns"""


def combine(table: Table, config: DataConfig, *, has_sets: bool | None = None, labelled: bool = True) -> Combined:
    """Add a column for joined texts, and one for columns of 0 and 1; `has_sets` is that of the training rows.

    Columns of labels are those that `config` names, or all but the text if they hold only 0 and 1.
    """
    config = by_number(config, table.header.names)
    texts = split_names(config.text, table.header)
    notes = []
    if len(texts) > 1:
        cells = [join_texts(row, texts) for row in _records(table, texts)]
        table = _add(table, str(config.text), cells)
        notes.append(f"text: columns {_list(texts)} joined, each on a line of its own")
    is_found = config.label is None
    indicators = (
        _find_indicators(table, config) if is_found else split_names(config.label, table.header, required=labelled)
    )
    if len(indicators) < 2:
        return Combined(replace(table, notes=(*table.notes, *notes)), config)
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
    return Combined(replace(table, notes=(*table.notes, *notes)), replace(config, label=name), has_sets)


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
