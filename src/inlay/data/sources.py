"""Sources of rows: files, folders and Hugging Face data sets become tables of cells, with the line of each row."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from inlay.data.columns import (
    SIDES,
    Columns,
    Fault,
    Header,
    by_number,
    find_columns,
    find_side,
    join_texts,
    read_text,
    split_names,
)
from inlay.data.data_files import STDIN, hide_secrets, is_url, keep_address
from inlay.data.packed_files import strip_packing
from inlay.data.readers import has_reader, open_file
from inlay.data.streams import SKIP_HINT, Names, check_num_columns, count_letters
from inlay.errors import BadData, InlayError, Missing
from inlay.settings import DataConfig

CHUNK_LETTERS = 4_000_000
"""characters after which a chunk of rows ends"""
FREE_CELLS, MOST_BLANKS = 10_000_000, 20
"""cells that any table of records may have, and the limit for each filled cell beyond that"""
TASK_COLUMN = "task"
WAYS_IN = "a file, a folder, glue/NAME, extra/NAME, hub:NAME, a URL, or - for stdin"
_NAMED = ("glue/", "extra/", "hub:")  # prefixes of names that are neither files nor folders


@dataclass(frozen=True, eq=False)
class Table:
    """A source read whole. Cells of text files are strings; JSON and Parquet keep their values, None if absent."""

    header: Header
    rows: list[list[Any]]
    lines: list[int]
    notes: tuple[str, ...] = ()
    faults: tuple[BadData, ...] = ()  # rows left out because they could not be read
    kind: str | None = None  # the task's kind, if the shape of the rows shows it
    has_pairs: bool = False  # whether that shape has a second text

    def column(self, name: str) -> list[Any]:
        """Return the cells of one column."""
        index = self.header.names.index(name)
        return [row[index] for row in self.rows]


@dataclass(frozen=True, eq=False)
class Source:
    """A place from which the sides of a task (train, dev, test) are read, each on demand."""

    name: str
    sides: Mapping[str, Callable[[], Table]]
    config: DataConfig  # the user's config, with what is known of the source filled in
    place: str = ""
    required: tuple[str, ...] = ("train",)  # sides that must not be split off another side
    bounds: tuple[float, float] | None = None  # the known range of a set's targets

    def read(self, side: str) -> Table:
        """Read the table of one side; a side that does not exist is a `Missing`."""
        if side not in self.sides:
            there = sorted(path.name for path in Path(self.place).iterdir()) if self.place else sorted(self.sides)
            where = f" in {self.place}" if self.place else ""
            raise Missing(
                f"{self.name}: no {side} rows{where}",
                f"found there: {', '.join(there)}" if there else "the folder is empty",
            )
        return self.sides[side]()


@dataclass(frozen=True, eq=False)
class InputRow:
    """One row to predict: its texts, or the error it gets instead of an answer."""

    line: int
    text: str = ""
    pair: str | None = None
    task: str | None = None
    record: Mapping[str, Any] | None = None  # the original columns, to be written beside the answer
    error: InlayError | None = None

    @property
    def num_letters(self) -> int:
        """The number of characters in all its columns."""
        return count_letters(self.record or {})


def use_whole_paths(config: DataConfig) -> DataConfig:
    """Return settings that find the same rows from any working folder: with absolute paths, also of published sets.

    Of a URL only what is not secret is kept: a signed link must be given again.
    """
    whole: dict[str, Any] = {}
    for name in ("source", "dev", "test"):
        place = getattr(config, name)
        if place and is_url(place):
            whole[name] = keep_address(place)
        elif place and place != STDIN and not place.startswith(_NAMED):
            whole[name] = os.path.abspath(Path(place).expanduser())
    root = config.root or os.environ.get("INLAY_DATA")
    if root and config.source.startswith(_NAMED[:2]):
        whole["root"] = os.path.abspath(root)
    return replace(config, **whole)


def name_of_source(source: str) -> str:
    """Return the name of data: `mail` for `data/mail.csv.gz` or `https://host/mail.csv?v=2`, `cola` for `glue/cola`."""
    place = hide_secrets(source).removeprefix("hub:")
    last = place.rstrip("/").rpartition("/")[2]
    return "stdin" if source == STDIN else Path(strip_packing(last)).stem


def read_table(
    path: str | Path, config: DataConfig = DataConfig(), names: Names = None, *, suffix: str | None = None
) -> Table:
    """Read a whole file; an unreadable row is refused or, if `on_bad_row` is `skip`, listed in `faults`.

    A quoted field that never ends is always refused: nobody knows how many rows are in it.
    """
    stream = open_file(path, config, names, suffix=suffix)
    records, lines, faults = [], [], []
    for line, record in stream.records:
        if isinstance(record, BadData):
            if config.on_bad_row == "refuse":
                raise record
            faults.append(record)
        else:
            records.append(record)
            lines.append(line)
    if not records:
        raise BadData("the file has no rows", "give a file with rows under its header", path=path)
    header = stream.header
    if not header.names:
        header = header._replace(names=_list_names(path, records))
    rows = [[record.get(name) for name in header.names] for record in records]
    return Table(header, rows, lines, stream.notes, tuple(faults))


def _list_names(path: str | Path, records: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the columns of records that each have their own; refuse a table that would be nearly all blanks."""
    names: dict[str, None] = {}
    num_cells = 0
    for record in records:
        num_cells += len(record)
        if not record.keys() <= names.keys():
            names.update(dict.fromkeys(record))
            check_num_columns(path, names)
    if len(names) * len(records) > max(FREE_CELLS, MOST_BLANKS * num_cells):
        reason = f"{len(records):,} rows have {len(names):,} columns, nearly all of them blank"
        raise BadData(reason, "keep the columns of the text and its label", path=path)
    return tuple(names)


def stream_rows(
    path: str | Path,
    config: DataConfig = DataConfig(),
    *,
    joined: str | None = None,
    chunk_size: int = 1024,
    isolate: bool = False,
) -> Iterator[list[InputRow]]:
    """Yield the rows of a file to predict, in chunks, in constant memory; chunks of long rows are smaller.

    Text and pair columns are those of `config`, or recognised by name; a column `task` names the task of each row.
    `joined` names the text columns that the task was trained on, for a file that has them and no others named.

    A bad row stops the stream, or with `isolate` is an `InputRow` with an `error`; a quoted field that never ends
    always stops it.
    """
    stream = open_file(path, config)
    header, columns = stream.header, None
    texts: tuple[str, ...] = ()
    chunk: list[InputRow] = []
    num_rows = num_letters = 0
    for line, record in stream.records:
        num_rows += 1
        if columns is None and isinstance(record, dict):
            header = header if header.names else header._replace(names=tuple(record))
            columns, texts = _find_inputs(header, config, joined)
        row = _read_input(line, record, columns, texts, header.path)
        if row.error is not None and not isolate:
            raise row.error
        chunk.append(row)
        num_letters += row.num_letters
        if len(chunk) == chunk_size or num_letters >= CHUNK_LETTERS:
            yield chunk
            chunk, num_letters = [], 0
    if chunk:
        yield chunk
    if not num_rows:
        raise BadData("the file has no rows", "give a file with rows under its header", path=path)


def _find_inputs(header: Header, config: DataConfig, joined: str | None) -> tuple[Columns, tuple[str, ...]]:
    """Return the columns of a file to predict, and the text columns that are joined if there are several."""
    if config.text is None:
        config = replace(config, text=_find_joined(header, joined))
    config = replace(by_number(config, header.names), label=None, split=None)
    texts = split_names(config.text, header)
    inputs = tuple(name for name in header.names if name != TASK_COLUMN)
    config = replace(config, text=texts[0] if texts else None)
    return find_columns(header._replace(names=inputs), config, labelled=False), texts if len(texts) > 1 else ()


def _find_joined(header: Header, joined: str | None) -> str | None:
    """Return the text columns that the task was trained on if the file has them, None if it has none; refuse a part."""
    if joined is None or split_names(joined, header, required=False):
        return joined
    names = [name.strip() for name in joined.split(",")]
    there = [name for name in names if name in header.names]
    if not there:
        return None
    missing = next(name for name in names if name not in header.names)
    reason = f"no column named `{missing}`, and the task was trained on `{joined}` joined"
    raise BadData(reason, f"name the columns to read with `--text`, such as `--text {there[0]}`", path=header.path)


def _read_input(
    line: int, record: dict[str, Any] | BadData, columns: Columns | None, texts: tuple[str, ...], path: str
) -> InputRow:
    if isinstance(record, BadData):
        # In prediction no row is left out: a bad one gets an error, the others are answered.
        record.hint = record.hint and record.hint.replace(SKIP_HINT, "fix the row")
        return InputRow(line, error=record)
    assert columns is not None  # found with the first readable record
    task = record.get(TASK_COLUMN)
    task = str(task).strip() or None if task is not None else None
    try:
        cell = join_texts(record, texts) if texts else record.get(columns.text)
        text = read_text(cell, ",".join(texts) or columns.text)
        pair = None if columns.pair is None else record.get(columns.pair)
        # An empty second text counts as no second text: a file may mix tasks that read pairs with others.
        pair = None if pair is None or not str(pair).strip() else read_text(pair, str(columns.pair))
    except Fault as fault:
        return InputRow(line, "", None, task, record, BadData(fault.reason, fault.hint, path=path, line=line))
    return InputRow(line, text, pair, task, record)


def open_folder(folder: Path, config: DataConfig) -> Source:
    """Open a folder with a file for each side: train.*, dev.* (or valid, validation, val) and test.*."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        side = SIDES.get(Path(strip_packing(path.name)).stem.lower())
        if side is None or not has_reader(path):
            continue
        if side in found:
            raise BadData(
                f"two files of {side} rows: `{found[side].name}` and `{path.name}`", "keep one of them", path=folder
            )
        found[side] = path
    return Source(
        str(folder), {side: partial(read_table, path, config) for side, path in found.items()}, config, str(folder)
    )


def open_hub(name: str, config: DataConfig) -> Source:
    """Open a Hugging Face dataset, `NAME` or `NAME:CONFIG`, with the `datasets` library of the `[hub]` extra."""
    try:
        import datasets
    except ImportError:
        raise Missing("the library `datasets` is not installed", "pip install 'inlay[hub]'") from None
    title, _, variant = name.partition(":")
    if hasattr(datasets, "config"):  # before version 4 it asked on stdin whether to run a set's own code
        datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False
    try:
        parts = datasets.load_dataset(title, variant or None)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Missing(
            f"dataset `{name}` could not be loaded: {reason}",
            "check its name, its config (`hub:NAME:CONFIG`) and the network",
        ) from None
    sides: dict[str, Callable[[], Table]] = {}
    for split in parts:
        side = find_side(str(split))
        if side is not None and side not in sides:
            sides[side] = partial(read_hub, f"hub:{name}[{split}]", parts[split])
    return Source(f"hub:{name}", sides, config)


def read_hub(path: str, part: Any) -> Table:
    """Return one part of a `datasets` set as a table, with class names in place of class numbers."""
    columns: dict[str, list[Any]] = {}
    for column in part.column_names:
        values, feature = list(part[column]), part.features[column]
        names = getattr(feature, "names", None)
        inner = getattr(getattr(feature, "feature", None), "names", None)  # of a list of classes
        if names:  # -1 stands for a row without a label
            values = [names[value] if value is not None and value >= 0 else None for value in values]
        elif inner:
            values = [None if value is None else [inner[item] for item in value] for value in values]
        columns[column] = values
    return table_of_columns(path, columns)


def table_of_columns(path: str, columns: Mapping[str, Sequence[Any]]) -> Table:
    """Return columns of equal length as a table whose lines are counted from 1."""
    rows = [list(cells) for cells in zip(*columns.values(), strict=True)]
    return Table(Header(path, tuple(columns), None), rows, list(range(1, len(rows) + 1)))
