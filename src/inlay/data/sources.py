"""Readers of files and hubs: a source becomes tables of cells, each row with the line it stands on.

Text files are read with exact line numbers and in constant memory; the whole file is scanned once before the first row
for its encoding and for bytes no text has, so a reader downstream never meets either. A CSV is quoted and its delimiter
(`,`, `;` or tab) is found from the header; a TSV is raw, as GLUE's are: quotes are letters, unless every cell of the
header is quoted.
"""

from __future__ import annotations

import csv
import difflib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from inlay.config import DataConfig
from inlay.data.answers import is_squad, read_squad
from inlay.data.columns import SIDES, Columns, Fault, Header, find_columns, read_text
from inlay.data.encodings import find_encoding
from inlay.errors import BadData, InlayError, Missing

SKIP_HINT = "mend the row, or leave bad rows out with `--on-bad-row skip`"
TASK_COLUMN = "task"
WAYS_IN = "a file, a folder, glue/NAME, extra/NAME or hub:NAME"
Names = tuple[str, ...] | None  # of the columns of a file without a header
Record = tuple[int, "dict[str, Any] | BadData"]  # the line, and the cells by column or what is wrong with the row


@dataclass(frozen=True, eq=False)
class Stream:
    """A source while it is read: records one by one, and what was found out about it so far."""

    header: Header  # without names where each record brings its own (JSONL)
    records: Iterator[Record]
    encoding: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Table:
    """A source read whole. Cells of text files are strings; JSONL and Parquet keep their values, None if absent."""

    header: Header
    rows: list[list[Any]]
    lines: list[int]
    encoding: str | None = None
    notes: tuple[str, ...] = ()
    faults: tuple[BadData, ...] = ()  # rows left out because they could not be read
    kind: str | None = None  # of the task, where the shape of the rows says so

    def column(self, name: str) -> list[Any]:
        """The cells of one column."""
        index = self.header.names.index(name)
        return [row[index] for row in self.rows]


@dataclass(frozen=True, eq=False)
class Source:
    """Where the sides of a task (train, dev, test) are; each is read when asked for."""

    name: str
    sides: Mapping[str, Callable[[], Table]]
    config: DataConfig  # the user's, with what the source itself says filled in
    place: str = ""
    required: tuple[str, ...] = ("train",)  # sides that cannot be split off another

    def read(self, side: str) -> Table:
        """The table of one side; a side that is not there is a `Missing`."""
        if side not in self.sides:
            raise Missing(f"{self.name}: no {side} rows{f' in {self.place}' if self.place else ''}", self._hint())
        return self.sides[side]()

    def _hint(self) -> str:
        there = sorted(path.name for path in Path(self.place).iterdir()) if self.place else sorted(self.sides)
        return f"there is only: {', '.join(there) or 'nothing'}"


@dataclass(frozen=True, eq=False)
class InputRow:
    """One row to predict: its texts, or the error it gets instead of an answer."""

    line: int
    text: str = ""
    pair: str | None = None
    task: str | None = None
    record: Mapping[str, Any] | None = None  # the original columns, to be written beside the answer
    error: InlayError | None = None


def open_file(
    path: str | Path, encoding: str | None = None, names: Names = None, *, kind: str = "auto", suffix: str | None = None
) -> Stream:
    """A file as a stream of records, read by the reader of its suffix, or of `suffix` where its name has none.

    `names` are those of a file without a header. Plain text of a `tag` task is columns of words, whatever its suffix.
    """
    path = Path(path)
    if not path.is_file():
        raise _missing_file(path)
    reader = READERS.get(suffix or path.suffix.lower())
    if kind == "tag" and reader in (None, _open_txt, _open_tsv):
        reader = _open_conll
    if reader is None:
        known = ", ".join(READERS)
        raise BadData(f"unknown file type `{path.suffix}`", f"give it the suffix of its format: {known}", path=path)
    if path.stat().st_size == 0:
        raise BadData("the file is empty", "give a file with rows", path=path)
    return reader(path, encoding, names)


def read_table(
    path: str | Path, config: DataConfig = DataConfig(), names: Names = None, *, suffix: str | None = None
) -> Table:
    """A file read whole; an unreadable row is refused or, with `on_bad_row` skip, listed in `faults`.

    A quoted field that never ends is always refused: nobody knows how many rows are in it.
    """
    stream = open_file(path, config.encoding, names, kind=config.kind, suffix=suffix)
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
        header = header._replace(names=tuple(dict.fromkeys(name for record in records for name in record)))
    rows = [[record.get(name) for name in header.names] for record in records]
    return Table(header, rows, lines, stream.encoding, stream.notes, tuple(faults))


def stream_rows(
    path: str | Path, config: DataConfig = DataConfig(), *, chunk_size: int = 1024, isolate: bool = False
) -> Iterator[list[InputRow]]:
    """The rows of a file to predict, in chunks, in constant memory.

    Text and pair columns are those of `config` or recognised by name; a column `task` says which task answers the row.
    A bad row stops the stream, or with `isolate` comes as an `InputRow` with its `error`; a quoted field that never
    ends stops it always.
    """
    stream = open_file(path, config.encoding)
    header, columns = stream.header, None
    chunk: list[InputRow] = []
    num_rows = 0
    for line, record in stream.records:
        num_rows += 1
        if columns is None and isinstance(record, dict):
            header = header if header.names else header._replace(names=tuple(record))
            inputs = tuple(name for name in header.names if name != TASK_COLUMN)
            columns = find_columns(
                header._replace(names=inputs), replace(config, label=None, split=None), labelled=False
            )
        row = _read_input(line, record, columns, header.path)
        if row.error is not None and not isolate:
            raise row.error
        chunk.append(row)
        if len(chunk) == chunk_size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
    if not num_rows:
        raise BadData("the file has no rows", "give a file with rows under its header", path=path)


def _read_input(line: int, record: dict[str, Any] | BadData, columns: Columns | None, path: str) -> InputRow:
    if isinstance(record, BadData):
        return InputRow(line, error=record)
    assert columns is not None  # found with the first readable record
    task = record.get(TASK_COLUMN)
    task = str(task).strip() or None if task is not None else None
    try:
        text = read_text(record.get(columns.text), columns.text)
        pair = None if columns.pair is None else record.get(columns.pair)
        # An empty second text is none: a file may mix tasks that read pairs with tasks that do not.
        pair = None if pair is None or not str(pair).strip() else read_text(pair, str(columns.pair))
    except Fault as fault:
        return InputRow(line, "", None, task, record, BadData(fault.reason, fault.hint, path=path, line=line))
    return InputRow(line, text, pair, task, record)


def open_folder(folder: Path, config: DataConfig) -> Source:
    """A folder with a file for each side: train.*, dev.* (or valid, validation, val) and test.*."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        side = SIDES.get(path.stem.lower())
        if side is None or path.suffix.lower() not in READERS:
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
    """A Hugging Face dataset, `NAME` or `NAME:CONFIG`, through the `datasets` library of the `[hub]` extra."""
    try:
        import datasets
    except ImportError:
        raise Missing("the library `datasets` is not installed", "pip install 'inlay[hub]'") from None
    title, _, variant = name.partition(":")
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
        side = SIDES.get(str(split).split("_")[0].lower())  # `validation_matched` is a dev side
        if side is not None and side not in sides:
            sides[side] = _reading_hub(f"hub:{name}[{split}]", parts[split])
    return Source(f"hub:{name}", sides, config)


def _reading_hub(path: str, part: Any) -> Callable[[], Table]:
    def read() -> Table:
        columns = {name: _name_classes(list(part[name]), part.features[name]) for name in part.column_names}
        rows = [list(cells) for cells in zip(*columns.values(), strict=True)]
        return Table(Header(path, tuple(columns), None), rows, list(range(1, len(rows) + 1)))

    return read


def _name_classes(values: list[Any], feature: Any) -> list[Any]:
    """Class numbers as class names; -1 is how the hub writes that a row has no label."""
    names = getattr(feature, "names", None)
    inner = getattr(getattr(feature, "feature", None), "names", None)
    if names:
        return [names[value] if value is not None and value >= 0 else None for value in values]
    if inner:
        return [None if value is None else [inner[item] for item in value] for value in values]
    return values


def _missing_file(path: Path) -> Missing:
    if path.is_dir():
        return Missing(f"`{path}` is a folder, not a file", "name a file in it")
    if path.exists():
        return Missing(
            f"`{path}` is a pipe or a device, not a file",
            "write it to a file first, or use `inlay predict` with lines on stdin",
        )
    near = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, near, n=1)
    hint = (
        f"did you mean `{path.parent / close[0]}`?"
        if close
        else "give a file, a folder, glue/NAME, extra/NAME or hub:NAME"
    )
    return Missing(f"no file or folder `{path}`", hint)


def _open_csv(path: Path, encoding: str | None, names: Names) -> Stream:
    found = find_encoding(path, encoding)
    delimiter = _find_delimiter(_first_line(path, found.name))
    stream = _with_header(path, _split_quoted(path, found.name, delimiter), names)
    shown = "tab" if delimiter == "\t" else f"`{delimiter}`"
    notes = () if delimiter == "," else (f"{path.name}: delimiter {shown}",)
    return replace(stream, encoding=found.name, notes=found.notes + notes + stream.notes)


def _open_tsv(path: Path, encoding: str | None, names: Names) -> Stream:
    found = find_encoding(path, encoding)
    cells = _first_line(path, found.name).split("\t")
    is_quoted = all(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in cells)
    rows = _split_quoted(path, found.name, "\t") if is_quoted else _split_raw(path, found.name)
    stream = _with_header(path, rows, names)
    return replace(stream, encoding=found.name, notes=found.notes + stream.notes)


def _open_jsonl(path: Path, encoding: str | None, names: Names) -> Stream:
    found = find_encoding(path, encoding)
    return Stream(Header(str(path), (), None), _parse_json(path, found.name), found.name, found.notes)


def _open_json(path: Path, encoding: str | None, names: Names) -> Stream:
    """SQuAD's own document, or JSON lines."""
    found = find_encoding(path, encoding)
    with path.open(encoding=found.name) as file:
        if not is_squad(file.read(4096)):
            return _open_jsonl(path, encoding, names)
        file.seek(0)
        try:
            records = list(read_squad(json.load(file)))
        except (json.JSONDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
            reason = f"no SQuAD document: {type(error).__name__}: {error}"
            raise BadData(reason, "write it as SQuAD's own files are, or as JSON lines", path=path) from None
    numbered = cast(Iterator[Record], enumerate(records, start=1))
    note = f"{path.name}: SQuAD's format; a line is a question's number"
    return Stream(Header(str(path), (), None), numbered, found.name, (*found.notes, note))


def _open_conll(path: Path, encoding: str | None, names: Names) -> Stream:
    """Columns of words: the first is the word, the last its tag, a blank line ends the sentence."""
    found = find_encoding(path, encoding)
    return Stream(Header(str(path), (), None), _read_sentences(path, found.name), found.name, found.notes)


def _read_sentences(path: Path, encoding: str) -> Iterator[Record]:
    sentence: list[list[str]] = []
    start, fault = 1, None
    for number, line in itertools.chain(_read_lines(path, encoding), [(0, "")]):
        fields = line.split("\t") if "\t" in line else line.split()
        if line.strip() and fields[0] != "-DOCSTART-":
            if not sentence and re.match(r"# [\w.-]+ = ", line):
                continue  # CoNLL-U says so where a sentence comes from
            start = start if sentence else number
            if fault is None and (len(fields) < 2 or len(fields) != len((sentence or [fields])[0])):
                reason = f"{len(fields)} columns where {max(2, len((sentence or [fields])[0]))} should be"
                hint = f"write word and tag in each line, a blank line after a sentence; {SKIP_HINT}"
                fault = BadData(reason, hint, path=path, line=number)
            if fault is None and " " in fields[-1].strip():
                hint = "a tag is one word, such as B-PER; a table of texts and labels is for `--kind classify`"
                fault = BadData(f"the tag `{fields[-1][:40]}` has spaces in it", hint, path=path, line=number)
            sentence.append(fields)
        elif sentence:
            yield start, fault or _make_sentence(sentence)
            sentence, fault = [], None


def _make_sentence(rows: list[list[str]]) -> dict[str, Any]:
    columns = [list(column) for column in zip(*rows, strict=True)]
    names = ["tokens", *(f"column{number}" for number in range(2, len(columns))), "tags"]
    return {"text": " ".join(columns[0]), **dict(zip(names, columns, strict=True))}


def _open_txt(path: Path, encoding: str | None, names: Names) -> Stream:
    found = find_encoding(path, encoding)
    records = ((number, {"text": line}) for number, line in _read_lines(path, found.name))
    return Stream(Header(str(path), ("text",), None), cast(Iterator[Record], records), found.name, found.notes)


def _open_parquet(path: Path, encoding: str | None, names: Names) -> Stream:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise BadData(f"no readable Parquet file: {error}", "write it again, or use CSV or JSONL", path=path) from None

    def records() -> Iterator[Record]:
        number = 0
        with file:
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record

    return Stream(Header(str(path), tuple(file.schema_arrow.names), None), records())


READERS: dict[str, Callable[[Path, str | None, Names], Stream]] = {
    ".csv": _open_csv,
    ".tsv": _open_tsv,
    ".tab": _open_tsv,
    ".jsonl": _open_jsonl,
    ".ndjson": _open_jsonl,
    ".json": _open_json,
    ".conll": _open_conll,
    ".iob": _open_conll,
    ".bio": _open_conll,
    ".parquet": _open_parquet,
    ".txt": _open_txt,
}


def _read_lines(path: Path, encoding: str) -> Iterator[tuple[int, str]]:
    # Lines end with \n or \r\n only: a stray \r or U+2028 inside a text must not shift every later line number.
    with path.open(encoding=encoding, newline="\n") as file:
        for number, line in enumerate(file, 1):
            yield number, line.rstrip("\n").removesuffix("\r")


def _first_line(path: Path, encoding: str) -> str:
    with path.open(encoding=encoding) as file:  # any line end: spreadsheets on old Macs wrote \r alone
        return next((line.rstrip("\n") for line in file if line.strip()), "")


def _find_delimiter(line: str) -> str:
    """The delimiter that gives the header the most columns; a comma where none does."""
    return max(",;\t", key=lambda delimiter: len(next(csv.reader([line], delimiter=delimiter), [])))


def _split_raw(path: Path, encoding: str) -> Iterator[tuple[int, list[str] | BadData]]:
    for number, line in _read_lines(path, encoding):
        if line:
            yield number, line.split("\t")


def _split_quoted(path: Path, encoding: str, delimiter: str) -> Iterator[tuple[int, list[str] | BadData]]:
    csv.field_size_limit(2**31 - 1)  # the default refuses texts over 128 KiB
    with path.open(encoding=encoding, newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        while True:
            line = reader.line_num + 1  # where the row begins; `line_num` is where the last one ended
            try:
                row = next(reader, None)
            except csv.Error as error:
                if "unexpected end" in str(error):
                    raise _unclosed_quote(path, encoding, delimiter, line) from None
                reason = f"broken quoting: {error}"
                if reader.line_num > line:
                    reason = f"broken quoting in lines {line}–{reader.line_num}: {error}"
                yield line, BadData(reason, f'write " inside a field as ""; {SKIP_HINT}', path=path, line=line)
                continue
            if row is None:
                return
            if row:
                yield line, row


def _unclosed_quote(path: Path, encoding: str, delimiter: str, line: int) -> BadData:
    """The error of a file whose row at `line` has a quote without an end.

    It is the file's and not the row's: how many rows the quote took in is not known, so leaving out one is not enough.
    """
    with path.open(encoding=encoding, newline="") as file:
        reader = csv.reader(itertools.islice(file, line - 1, None), delimiter=delimiter)
        field = next(reader)[-1]
    last = line + reader.line_num - 1
    opened = last - len(re.findall(r"\r\n|\r|\n", field.removesuffix("\n").removesuffix("\r")))
    taken = f": lines {opened}–{last} are all in it" if last > opened else ""
    hint = 'close or remove the quote in this line; write " inside a field as ""'
    return BadData(f"a quoted field never ends{taken}", hint, path=path, line=opened)


def _with_header(path: Path, rows: Iterator[tuple[int, list[str] | BadData]], names: Names) -> Stream:
    """Rows as records: the first names the columns, and every other must have as many fields."""
    line, notes = None, []
    if names is None:
        line, cells = next(rows, (1, []))
        if isinstance(cells, BadData):
            raise cells
        if not cells:
            raise BadData("the file is empty", "give a file with a header and rows", path=path)
        names = tuple(_make_unique(cell.strip() for cell in cells))
        renamed = [name for name, cell in zip(names, cells, strict=True) if name != cell.strip()]
        if renamed:
            notes.append(f"{path.name}: repeated column names, read as {', '.join(f'`{name}`' for name in renamed)}")
    return Stream(Header(str(path), names, line), _check_widths(path, rows, names), None, tuple(notes))


def _make_unique(names: Iterable[str]) -> Iterator[str]:
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}.{seen[name]}"


def _check_widths(
    path: Path, rows: Iterator[tuple[int, list[str] | BadData]], names: tuple[str, ...]
) -> Iterator[Record]:
    for line, row in rows:
        if isinstance(row, BadData):
            yield line, row
        elif len(row) != len(names):
            reason = f"ragged row: {len(row)} fields, but there are {len(names)} columns"
            hint = SKIP_HINT
            if path.suffix.lower() != ".csv":
                hint += "; quotes mean nothing in a TSV: if its fields are quoted, name it .csv"
            yield line, BadData(reason, hint, path=path, line=line)
        else:
            yield line, dict(zip(names, row, strict=True))


def _parse_json(path: Path, encoding: str) -> Iterator[Record]:
    for number, line in _read_lines(path, encoding):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            reason = f"no JSON: {error}" if isinstance(error, json.JSONDecodeError) else "JSON nested too deeply"
            hint = f"one object in each line; {SKIP_HINT}"
            yield number, BadData(reason, hint, path=path, line=number)
            continue
        if isinstance(record, dict):
            yield number, record
        else:
            kind = "an array" if isinstance(record, list) else f"`{line.strip()[:40]}`"
            reason = f"{kind} where an object should be"
            yield number, BadData(reason, 'write each row as {"text": …, "label": …}', path=path, line=number)
