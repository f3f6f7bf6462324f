"""Published values as data: the numbers a paper printed, their source and their meaning.

`studies/published/NAME.toml` has one or more tables. A column is `task:metric`, so that a value is compared with ours
only where both mean the same; `mean:metric` is a mean over the source's own tasks. Values are as printed, in points,
even where the source's own arithmetic disagrees (the notes say so). Values that a source derives from its columns
(totals, averages) are kept apart in `printed` and never compared.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.errors import BadConfig, UnknownName
from inlay.settings import from_tree

_HINT = "see studies/published/glue.toml for an example"


@dataclass(frozen=True)
class PublishedRow:
    """One printed row."""

    arm: str
    """the row of ours that it is compared with, or another name"""
    label: str
    cells: tuple[float | None, ...]
    """in points, one for each column; None where nothing is printed"""
    printed: Mapping[str, float] = field(default_factory=dict)
    """other values of the row, such as totals that the source derives from its cells"""
    deviations: tuple[float | None, ...] = ()
    """standard deviations over seeds, one for each column or none at all"""
    trained_parameters: int | None = None
    is_difference: bool = False
    """whether the source prints one row less another"""


@dataclass(frozen=True)
class PublishedTable:
    """One printed table."""

    name: str
    title: str
    source: str
    backbone: str
    split: str
    protocol: str
    columns: tuple[str, ...]
    rows: tuple[PublishedRow, ...]
    notes: tuple[str, ...] = ()
    over: str = ""
    """the tasks of a `mean:…` column in words (`17 tasks`), if the source prints means alone"""
    mean_of: tuple[str, ...] = ()
    """the columns (`task:metric`) of this mean, if known: our mean is taken over the same"""

    def row(self, arm: str) -> PublishedRow | None:
        """Return the row that compares with an arm of ours; None if there is none."""
        return next((row for row in self.rows if row.arm == arm), None)

    def value(self, arm: str, column: str) -> float | None:
        """Return the printed value for an arm under `task:metric`."""
        row = self.row(arm)
        return row.cells[self.columns.index(column)] if row is not None and column in self.columns else None

    def mean(self, arm: str, columns: Iterable[str]) -> float | None:
        """Return the mean of the printed cells under these columns; None unless all of them are printed."""
        values = [self.value(arm, column) for column in columns]
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if values and len(known) == len(values) else None


@dataclass(frozen=True)
class Published:
    """The tables of one file."""

    name: str
    tables: tuple[PublishedTable, ...] = ()

    def value(self, arm: str, column: str) -> float | None:
        """Return the first printed value for an arm under `task:metric`, in any table."""
        return next((value for table in self.tables if (value := table.value(arm, column)) is not None), None)


def split_columns(columns: Iterable[str]) -> list[tuple[str, str]]:
    """Return columns named `task:metric` as pairs (task, metric)."""
    return [(task, metric) for task, _, metric in (column.partition(":") for column in columns)]


def read_published(folder: Path, name: str) -> Published:
    """Read the published values of `folder/NAME.toml`; no tables if the name is empty."""
    if not name:
        return Published("")
    path = folder / f"{name}.toml"
    if not path.is_file():
        raise UnknownName("published table", name, [found.stem for found in folder.glob("*.toml")])
    try:
        tree = tomllib.loads(path.read_text(encoding="utf8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: not TOML: {error}", _HINT) from None
    unknown = sorted(tree.keys() - {"tables"})
    if unknown or not isinstance(tree.get("tables"), list):
        raise BadConfig(f"{path}: `{unknown[0] if unknown else 'tables'}` is not a list of tables", _HINT)
    return Published(name, tuple(_read_table(item, f"{path}: ") for item in tree["tables"]))


def _read_table(tree: Mapping[str, Any], where: str) -> PublishedTable:
    texts = {"name", "title", "source", "backbone", "split", "protocol"}
    missing = sorted((texts | {"columns", "rows"}) - tree.keys())
    if missing:
        raise BadConfig(f"{where}table `{tree.get('name', '?')}` has no `{missing[0]}`", _HINT)
    rows = tuple(_read_row(item, f"{where}{tree['name']}: ") for item in tree["rows"])
    table = from_tree(
        PublishedTable, {key: value for key, value in tree.items() if key != "rows"} | {"rows": ()}, where
    )
    for row in rows:
        if len(row.cells) != len(table.columns):
            counts = f"{len(row.cells)} cells for {len(table.columns)} columns"
            raise BadConfig(f"{where}{table.name}: row `{row.arm}` has {counts}", 'write `""` where nothing is printed')
    return PublishedTable(**{**vars(table), "rows": rows})


def _read_row(tree: Mapping[str, Any], where: str) -> PublishedRow:
    known = {"arm", "label", "cells", "printed", "deviations", "trained_parameters", "is_difference"}
    wrong = sorted((tree.keys() - known) | ({"arm", "label", "cells"} - tree.keys()))
    if wrong:
        has = "an unknown" if wrong[0] in tree else "no"
        raise BadConfig(f"{where}row `{tree.get('arm', '?')}` has {has} `{wrong[0]}`", _HINT)
    cells = tuple(None if cell == "" else float(cell) for cell in tree["cells"])
    given = tuple(map(float, tree.get("deviations", ())))  # standard deviations of the printed cells
    num_printed = sum(cell is not None for cell in cells)
    if given and len(given) != num_printed:
        counts = f"{len(given)} deviations for {num_printed} printed cells"
        raise BadConfig(f"{where}row `{tree['arm']}` has {counts}", _HINT)
    each = iter(given)
    return PublishedRow(
        arm=tree["arm"],
        label=tree["label"],
        cells=cells,
        printed={key: float(value) for key, value in tree.get("printed", {}).items()},
        deviations=tuple(None if cell is None else next(each) for cell in cells) if given else (),
        trained_parameters=tree.get("trained_parameters"),
        is_difference=bool(tree.get("is_difference", False)),
    )
