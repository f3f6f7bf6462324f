"""Rows in memory, in any usual form, as the table that a file with them would be.

A DataFrame (or an object with `to_pandas`), a list of dicts, a dict of columns, `(X, y)`, or a `datasets.Dataset`.
Objects of other libraries are recognised by their methods: none is imported that the caller did not import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from inlay.data.columns import as_list, find_side
from inlay.data.sources import Source, Table, read_hub, table_of_columns
from inlay.errors import BadData
from inlay.settings import DataConfig

if TYPE_CHECKING:
    import pandas

RowsGiven: TypeAlias = "str | Path | pandas.DataFrame | Mapping[str, Any] | Sequence[Any] | Any"
"""A file or another name of data, or rows in any of these forms"""
_FORMS = "a path, a DataFrame, a list of dicts, a dict of columns, (X, y), or a datasets.Dataset"
WORDS, TEXT, PAIR, LABEL = "tokens", "text", "pair", "label"
"""The names given to columns without names, by which they are recognised."""


def open_given(given: Any, config: DataConfig) -> Source:
    """Return rows in memory as a source; a mapping from sides to rows, such as a `DatasetDict`, has several sides."""
    if isinstance(given, Mapping) and given and all(isinstance(key, str) and find_side(key) for key in given):
        parts = {str(find_side(key)): rows for key, rows in reversed(list(given.items()))}  # the first of a side stays
        return Source("rows", {side: partial(tabulate, rows, side) for side, rows in parts.items()}, config)
    return Source("rows", {"train": partial(tabulate, given)}, config)


def tabulate(given: Any, side: str = "") -> Table:
    """Return rows in memory as a table; their lines are counted from 1."""
    if hasattr(given, "column_names") and hasattr(given, "features"):  # a datasets.Dataset
        return read_hub(f"dataset[{side}]" if side else "dataset", given)
    name = "dataframe" if hasattr(given, "iloc") or hasattr(given, "to_pandas") else "rows"
    columns = {str(key): as_cells(cells) for key, cells in _find_columns(given, name).items()}
    table = table_of_columns(name, columns)
    if not table.rows:
        raise BadData("the frame has no rows", "give a frame with rows", path=name)
    return table


def _find_columns(given: Any, path: str) -> Mapping[Any, Any]:
    """Return the columns of rows in any form, by name."""
    if hasattr(given, "to_pandas"):  # pyarrow, polars
        given = given.to_pandas()
    if hasattr(given, "iloc") and hasattr(given, "columns"):
        # By position: two columns of a frame may have the same name; then the first is meant, as in a file.
        return {column: given.iloc[:, place] for place, column in reversed(list(enumerate(given.columns)))}
    if isinstance(given, Mapping):
        lengths = {key: len(as_cells(cells)) for key, cells in given.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"`{key}` {length}" for key, length in lengths.items())
            raise BadData(f"columns of different lengths: {shown}", "give each row a cell in every column", path=path)
        return given
    if isinstance(given, tuple) and len(given) == 2 and not isinstance(given[0], str | Mapping):
        return join_labels(find_texts(given[0]), given[1])
    if isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(row, Mapping) for row in given):
        names = dict.fromkeys(name for row in given for name in row)
        return {name: [row.get(name) for row in given] for name in names}
    raise BadData(f"a `{type(given).__name__}` cannot be read as rows", f"give {_FORMS}", path=path)


def find_texts(given: Any, *, has_words: bool = False) -> dict[str, list[Any]]:
    """Return the text columns of rows without labels: texts, pairs, or lists of words (always those if `has_words`).

    The rows may be a list, a Series, an array of objects, or a frame of one or two columns; a frame with more columns
    keeps their names, by which they are recognised.
    """
    if hasattr(given, "iloc") and hasattr(given, "columns"):
        columns = [as_cells(given.iloc[:, place]) for place in range(given.shape[1])]
        if len(columns) > 2:
            return dict(zip(map(str, given.columns), columns, strict=True))
        return dict(zip((WORDS,) if has_words else (TEXT, PAIR), columns, strict=False))
    cells = as_cells(given)
    if has_words:
        return {WORDS: cells}
    lists = [as_list(cell) for cell in cells]
    if cells and all(items is not None and len(items) == 1 for items in lists):  # an array with one column
        return {TEXT: [items[0] for items in lists if items]}
    if cells and all(items is not None and len(items) == 2 and isinstance(items[0], str) for items in lists):
        return {TEXT: [items[0] for items in lists if items], PAIR: [items[1] for items in lists if items]}
    if cells and all(items is not None for items in lists):
        return {WORDS: cells}
    return {TEXT: cells}


def join_labels(texts: Mapping[str, list[Any]], given: Any) -> dict[str, list[Any]]:
    """Return columns of texts with a column of labels; an array of 0 and 1 gives sets of its columns' names."""
    names = [str(name) for name in getattr(given, "columns", ())]
    if getattr(given, "ndim", 1) == 2:
        table = np.asarray(given.toarray() if hasattr(given, "toarray") else given)
        names = names or [str(place) for place in range(table.shape[1])]
        labels: list[Any] = [[names[place] for place in np.flatnonzero(row)] for row in table]
    else:
        labels = as_cells(given)
    num_rows = len(next(iter(texts.values()), ()))
    if len(labels) != num_rows:
        raise BadData(f"{num_rows} rows of texts, but {len(labels)} labels", "give each row one label")
    return {**texts, LABEL: labels}


def as_cells(given: Any) -> list[Any]:
    """Return a column's cells as Python's own values; None where there is nothing."""
    if hasattr(given, "isna"):  # a Series
        return [None if gone else cell for cell, gone in zip(given.tolist(), given.isna(), strict=True)]
    if not hasattr(given, "tolist") and hasattr(given, "__array__"):  # a column of another library
        given = np.asarray(given)
    if hasattr(given, "tolist"):
        return list(given.tolist())
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__iter__"):
        raise BadData(f"a `{type(given).__name__}` cannot be read as a column of rows", f"give {_FORMS}")
    return [cell.item() if isinstance(cell, np.generic) else cell for cell in given]
