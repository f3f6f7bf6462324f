"""Readers of files by their format: each gives a stream of records with their line numbers.

Text files are read with exact line numbers and in constant memory. A CSV is quoted, and its delimiter (`,`, `;` or tab)
is found from its first line. A TSV is raw, as GLUE's are: quotes are ordinary characters, unless every cell of the
first line is quoted. A .txt has a text in each line, or is a TSV where every line has the same number of tabs.

Of Parquet files a few rows are read at a time. A value that repeats is in the file once: what a column says it unpacks
to is checked before it is read, and what comes out is counted again.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from inlay.data.columns import Header
from inlay.data.data_files import RawFile, find_file
from inlay.data.downloads import download
from inlay.data.file_formats import check_content, find_encoding, guess_suffix
from inlay.data.json_files import open_json, open_jsonl, read_lines
from inlay.data.kinds import KINDS
from inlay.data.packed_files import PACKINGS, unpack
from inlay.data.spreadsheets import open_spreadsheet
from inlay.data.streams import (
    SKIP_HINT,
    Cells,
    Names,
    ReadOptions,
    Record,
    Stream,
    UnpackLimit,
    check_num_columns,
    count_letters,
    with_header,
)
from inlay.errors import BadData
from inlay.settings import DataConfig

PARQUET_BATCH_BYTES = 64_000_000
"""most bytes that a batch of rows takes, if the largest value is in each of them"""
_PEEKED_LINES = 100


def open_file(
    place: str | Path,
    config: DataConfig = DataConfig(),
    names: Names = None,
    *,
    suffix: str | None = None,
    most_bytes: int | None = None,
) -> Stream:
    """Open a file as a stream of records, with the reader of its suffix, or of the `suffix` given.

    `place` may be a packed file, `-` for stdin, or a URL. `names` are the columns of a file without a header. Plain
    text of a `tag` task is read as CoNLL columns, whatever its suffix. A packed file may hold at most `most_bytes`.
    """
    suffix = suffix or (None if config.format == "auto" else f".{config.format}")
    file = find_content(find_file(place, download), suffix, most_bytes)
    reader = READERS.get(file.suffix)
    if config.kind in KINDS and KINDS[config.kind].reads_conll and reader in (None, _open_txt, _open_tsv):
        reader = _open_conll
    if reader is None:
        hint = (
            f"give it the suffix of its format: {', '.join(READERS)}, each also packed as .gz, .bz2, .xz, .zst or .zip"
        )
        unknown = BadData(
            f"unknown file type `{file.suffix}`", f"{hint}; or name the format, as in `--format csv`", path=file.name
        )
        raise check_content(file) or unknown
    if not file.head(1):
        raise BadData("the file is empty", "give a file with rows", path=file.name)
    if (wrong := check_content(file)) is not None:
        raise wrong
    given = (config.text, config.pair, config.label, config.split)
    roles = [part.strip() for name in given if name is not None for part in (name, *name.split(","))]
    options = ReadOptions("", names, config.header, [name for name in roles if not name.isdecimal()])
    if reader in (_open_parquet, open_spreadsheet):  # not text files
        stream = reader(file, options)
        return replace(stream, notes=(*file.notes, *stream.notes))
    encoding, notes = find_encoding(file, config.encoding)
    stream = reader(file, replace(options, encoding=encoding))
    return replace(stream, notes=(*file.notes, *notes, *stream.notes))


def find_content(file: RawFile, suffix: str | None, most_bytes: int | None = None) -> RawFile:
    """Unpack a file, and give it the suffix of its format: the one given, its own, or the one its first bytes show."""
    if file.suffix in PACKINGS:
        file = unpack(file, most_bytes=most_bytes)
    elif not file.suffix and (packing := guess_suffix(file)) in PACKINGS:
        file = unpack(file, packing, most_bytes)
    if suffix is not None:
        return replace(file, suffix=suffix)
    if file.suffix:
        return file
    guessed = guess_suffix(file)
    note = f"{file.title}: read as {guessed.removeprefix('.')}; if it is not, give `--format`"
    return replace(file, suffix=guessed, notes=(*file.notes, note))


def _open_csv(file: RawFile, options: ReadOptions) -> Stream:
    csv.field_size_limit(2**31 - 1)  # the default refuses texts over 128 KiB
    # The delimiter that splits the first line into most columns; a comma if none splits it.
    line = _first_line(file, options.encoding)
    delimiter = max(",;\t", key=lambda delimiter: len(next(csv.reader([line], delimiter=delimiter), [])))
    stream = with_header(file, _split_quoted(file, options.encoding, delimiter), options)
    if delimiter == ",":
        return stream
    shown = "tab" if delimiter == "\t" else f"`{delimiter}`"
    return replace(stream, notes=(f"{file.title}: delimiter {shown}", *stream.notes))


def _open_tsv(file: RawFile, options: ReadOptions) -> Stream:
    cells = _first_line(file, options.encoding).split("\t")
    is_quoted = all(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in cells)
    raw = ((number, line.split("\t")) for number, line in read_lines(file, options.encoding) if line)
    return with_header(file, _split_quoted(file, options.encoding, "\t") if is_quoted else raw, options)


def _open_conll(file: RawFile, options: ReadOptions) -> Stream:
    """Open CoNLL columns: the first is the word, the last its tag, a blank line ends the sentence."""
    return Stream(Header(file.name, (), None), _read_sentences(file, options.encoding))


def _read_sentences(file: RawFile, encoding: str) -> Iterator[Record]:
    """Yield a record for each sentence; one with an unusable line is an error."""
    sentence: list[list[str]] = []
    start, fault = 1, None
    for number, line in itertools.chain(read_lines(file, encoding), [(0, "")]):
        fields = line.split("\t") if "\t" in line else line.split()
        if line.strip() and fields[0] != "-DOCSTART-":
            if not sentence and re.match(r"# [\w.-]+ = ", line):
                continue  # a comment of CoNLL-U on the sentence
            start = start if sentence else number
            if fault is None and (len(fields) < 2 or len(fields) != len((sentence or [fields])[0])):
                reason = f"{len(fields)} columns where {max(2, len((sentence or [fields])[0]))} should be"
                hint = f"write word and tag in each line, a blank line after a sentence; {SKIP_HINT}"
                fault = BadData(reason, hint, path=file.name, line=number)
            if fault is None and " " in fields[-1].strip():
                hint = "a tag is one word, such as B-PER; a table of texts and labels is for `--kind classify`"
                fault = BadData(f"the tag `{fields[-1][:40]}` has spaces in it", hint, path=file.name, line=number)
            sentence.append(fields)
        elif sentence:
            if fault is None:
                columns = [list(column) for column in zip(*sentence, strict=True)]
                names = ["tokens", *(f"column{number}" for number in range(2, len(columns))), "tags"]
                yield start, {"text": " ".join(columns[0]), **dict(zip(names, columns, strict=True))}
            else:
                yield start, fault
            sentence, fault = [], None


def _open_txt(file: RawFile, options: ReadOptions) -> Stream:
    """Open a text file: a text in each line, or a table where every line has the same number of tabs."""
    lines = (line for _, line in read_lines(file, options.encoding) if line.strip())
    tabs = {line.count("\t") for line in itertools.islice(lines, _PEEKED_LINES)}
    if len(tabs) == 1 and tabs != {0}:
        stream = _open_tsv(file, options)
        return replace(stream, notes=(f"{file.title}: columns with tabs between them", *stream.notes))
    records: Iterator[Record] = ((number, {"text": line}) for number, line in read_lines(file, options.encoding))
    return Stream(Header(file.name, ("text",), None), records)


def _open_parquet(file: RawFile, options: ReadOptions) -> Stream:
    """Open a Parquet file; a line is a row."""
    import pyarrow
    from pyarrow import parquet

    unreadable = (pyarrow.ArrowException, OSError, ValueError, OverflowError, NotImplementedError)

    def refuse(error: Exception) -> BadData:
        return BadData(f"not a readable Parquet file: {error}", "write it again, or use CSV or JSONL", path=file.name)

    # 1. read repeated texts as a dictionary: each is kept once until it is asked for
    try:
        table = parquet.ParquetFile(file.handle)
        leaves = [table.schema.column(index) for index in range(len(table.schema))]
        texts = [leaf.path for leaf in leaves if leaf.logical_type.type == "STRING"]
        table.close()
        table = parquet.ParquetFile(file.handle, read_dictionary=texts)
    except unreadable as error:
        raise refuse(error) from None
    # 2. check the sizes that the file declares
    limit = UnpackLimit(file)
    for number in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(number)
        sizes = [group.column(index).total_uncompressed_size for index in range(group.num_columns)]
        limit.check(max(sizes, default=0))

    # 3. read a few rows at a time, and count what they hold
    def records() -> Iterator[dict[str, Any]]:
        try:
            with table:
                for batch in table.iter_batches(batch_size=1024):
                    num_rows = max(1, PARQUET_BATCH_BYTES // max(1, batch.nbytes))
                    for start in range(0, len(batch), num_rows):
                        columns = [column.slice(start, num_rows) for column in batch.columns]
                        columns = [
                            column.dictionary_decode() if hasattr(column, "dictionary_decode") else column
                            for column in columns
                        ]
                        for record in pyarrow.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist():
                            limit.add(count_letters(record))
                            yield record
        except unreadable as error:
            raise refuse(error) from None

    names = tuple(table.schema_arrow.names)
    check_num_columns(file.name, names)
    return Stream(Header(file.name, names, None), enumerate(records(), start=1))


READERS: dict[str, Callable[[RawFile, ReadOptions], Stream]] = {
    ".csv": _open_csv,
    ".tsv": _open_tsv,
    ".tab": _open_tsv,
    ".jsonl": open_jsonl,
    ".ndjson": open_jsonl,
    ".json": open_json,
    ".conll": _open_conll,
    ".iob": _open_conll,
    ".bio": _open_conll,
    ".parquet": _open_parquet,
    ".xlsx": open_spreadsheet,
    ".txt": _open_txt,
}


def has_reader(path: Path) -> bool:
    """Return whether a file's name shows how it is read."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in PACKINGS:
        return suffixes[-1] == ".zip" or suffixes[0] in READERS
    return bool(suffixes) and suffixes[-1] in READERS


def _first_line(file: RawFile, encoding: str) -> str:
    with file.open_text(encoding) as content:  # any line end: spreadsheets on old Macs wrote \r alone
        return next((line.rstrip("\n") for line in content if line.strip()), "")


def _split_quoted(file: RawFile, encoding: str, delimiter: str) -> Cells:
    """Yield the rows of a quoted table; a row with broken quoting is an error."""
    csv.field_size_limit(2**31 - 1)
    with file.open_text(encoding, newline="") as content:
        reader = csv.reader(content, delimiter=delimiter, strict=True)
        while True:
            line = reader.line_num + 1  # where the row begins; `line_num` is where the last one ended
            try:
                row = next(reader, None)
            except csv.Error as error:
                if "unexpected end" in str(error):
                    raise _unclosed_quote(file, encoding, delimiter, line) from None
                reason = f"broken quoting: {error}"
                if reader.line_num > line:
                    reason = f"broken quoting in lines {line}–{reader.line_num}: {error}"
                yield line, BadData(reason, f'write " inside a field as ""; {SKIP_HINT}', path=file.name, line=line)
                continue
            if row is None:
                return
            if row:
                yield line, row


def _unclosed_quote(file: RawFile, encoding: str, delimiter: str, line: int) -> BadData:
    """Return the error for a file whose row at `line` has a quote without an end.

    It is an error of the file, not of a row: nobody knows how many rows are inside the quote, so leaving out one row
    is not enough.
    """
    with file.open_text(encoding, newline="") as content:
        reader = csv.reader(itertools.islice(content, line - 1, None), delimiter=delimiter)
        field = next(reader)[-1]
    last = line + reader.line_num - 1
    opened = last - len(re.findall(r"\r\n|\r|\n", field.removesuffix("\n").removesuffix("\r")))
    taken = f": lines {opened}–{last} are all in it" if last > opened else ""
    hint = 'close or remove the quote in this line; write " inside a field as ""'
    return BadData(f"a quoted field never ends{taken}", hint, path=file.name, line=opened)
