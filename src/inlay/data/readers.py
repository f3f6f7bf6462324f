"""Readers of files by their format: a stream of records, each with the line it stands on.

Text files are read with exact line numbers and in constant memory. A CSV is quoted, and its delimiter (`,`, `;` or tab)
is found from its first line. A TSV is raw, as GLUE's are: quotes are letters, unless every cell of the first line is
quoted. A .txt is a text in each line, or a TSV where every line has the same number of tabs.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from inlay.data.columns import Header
from inlay.data.data_files import RawFile, find_file
from inlay.data.downloads import download
from inlay.data.encodings import find_encoding
from inlay.data.file_formats import check_content, guess_suffix, list_formats
from inlay.data.json_files import open_json, open_jsonl, read_lines
from inlay.data.kinds import KINDS
from inlay.data.packed_files import PACKINGS, unpack
from inlay.data.parquet_files import open_parquet
from inlay.data.spreadsheets import open_spreadsheet
from inlay.data.streams import SKIP_HINT, Cells, Names, ReadOptions, Record, Stream, with_header
from inlay.errors import BadData
from inlay.settings import DataConfig

_PEEKED_LINES = 100


def open_file(
    place: str | Path,
    config: DataConfig = DataConfig(),
    names: Names = None,
    *,
    suffix: str | None = None,
    most_bytes: int | None = None,
) -> Stream:
    """A file as a stream of records, read by the reader of its suffix, or of `suffix` where its name has none.

    `place` may be a packed file, `-` for stdin, or a URL. `names` are the columns of a file without a header. Plain
    text of a `tag` task is columns of words, whatever its suffix. A packed file may hold `most_bytes`.
    """
    suffix = suffix or (None if config.format == "auto" else f".{config.format}")
    file = find_content(find_file(place, download), suffix, most_bytes)
    reader = READERS.get(file.suffix)
    if config.kind in KINDS and KINDS[config.kind].reads_conll and reader in (None, _open_txt, _open_tsv):
        reader = _open_conll
    if reader is None:
        reason, hint = (
            f"unknown file type `{file.suffix}`",
            f"give it the suffix of its format: {list_formats(READERS)}",
        )
        raise check_content(file) or BadData(reason, f"{hint}; or say it, as in `--format csv`", path=file.name)
    is_empty = next(file.chunks()) == b""
    if is_empty:
        raise BadData("the file is empty", "give a file with rows", path=file.name)
    wrong = check_content(file)
    if wrong is not None:
        raise wrong
    given = (config.text, config.pair, config.label, config.split)
    roles = [part.strip() for name in given if name is not None for part in (name, *name.split(","))]
    options = ReadOptions("", names, config.header, [name for name in roles if not name.isdecimal()])
    if reader in (open_parquet, open_spreadsheet):  # no text
        stream = reader(file, options)
        return replace(stream, notes=(*file.notes, *stream.notes))
    found = find_encoding(file, config.encoding)
    stream = reader(file, replace(options, encoding=found.name))
    return replace(stream, notes=(*file.notes, *found.notes, *stream.notes))


def find_content(file: RawFile, suffix: str | None, most_bytes: int | None = None) -> RawFile:
    """The file unpacked, with the suffix of its format: the one given, its own, or the one its first bytes show."""
    if file.suffix in PACKINGS:
        file = unpack(file, most_bytes=most_bytes)
    elif not file.suffix and (packing := guess_suffix(file)) in PACKINGS:
        file = unpack(file, packing, most_bytes)
    if suffix is not None:
        return replace(file, suffix=suffix)
    if file.suffix:
        return file
    guessed = guess_suffix(file)
    note = f"{file.title}: read as {guessed.removeprefix('.')}; `--format` says otherwise"
    return replace(file, suffix=guessed, notes=(*file.notes, note))


def _open_csv(file: RawFile, options: ReadOptions) -> Stream:
    csv.field_size_limit(2**31 - 1)  # the default refuses texts over 128 KiB
    # The delimiter that gives the first line the most columns; a comma where none does.
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
    """Columns of words: the first is the word, the last its tag, a blank line ends the sentence."""
    return Stream(Header(file.name, (), None), _read_sentences(file, options.encoding))


def _read_sentences(file: RawFile, encoding: str) -> Iterator[Record]:
    sentence: list[list[str]] = []
    start, fault = 1, None
    for number, line in itertools.chain(read_lines(file, encoding), [(0, "")]):
        fields = line.split("\t") if "\t" in line else line.split()
        if line.strip() and fields[0] != "-DOCSTART-":
            if not sentence and re.match(r"# [\w.-]+ = ", line):
                continue  # CoNLL-U says so where a sentence comes from
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
    """A text in each line; a table where every line has the same number of tabs."""
    lines = (line for _, line in read_lines(file, options.encoding) if line.strip())
    tabs = {line.count("\t") for line in itertools.islice(lines, _PEEKED_LINES)}
    if len(tabs) == 1 and tabs != {0}:
        stream = _open_tsv(file, options)
        return replace(stream, notes=(f"{file.title}: columns with tabs between them", *stream.notes))
    records: Iterator[Record] = ((number, {"text": line}) for number, line in read_lines(file, options.encoding))
    return Stream(Header(file.name, ("text",), None), records)


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
    ".parquet": open_parquet,
    ".xlsx": open_spreadsheet,
    ".txt": _open_txt,
}


def has_reader(path: Path) -> bool:
    """Whether a file's name says how it is read."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in PACKINGS:
        return suffixes[-1] == ".zip" or suffixes[0] in READERS
    return bool(suffixes) and suffixes[-1] in READERS


def _first_line(file: RawFile, encoding: str) -> str:
    with file.open_text(encoding) as content:  # any line end: spreadsheets on old Macs wrote \r alone
        return next((line.rstrip("\n") for line in content if line.strip()), "")


def _split_quoted(file: RawFile, encoding: str, delimiter: str) -> Cells:
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
    """The error of a file whose row at `line` has a quote without an end.

    It is the file's and not the row's: how many rows the quote took in is not known, so leaving out one is not enough.
    """
    with file.open_text(encoding, newline="") as content:
        reader = csv.reader(itertools.islice(content, line - 1, None), delimiter=delimiter)
        field = next(reader)[-1]
    last = line + reader.line_num - 1
    opened = last - len(re.findall(r"\r\n|\r|\n", field.removesuffix("\n").removesuffix("\r")))
    taken = f": lines {opened}–{last} are all in it" if last > opened else ""
    hint = 'close or remove the quote in this line; write " inside a field as ""'
    return BadData(f"a quoted field never ends{taken}", hint, path=file.name, line=opened)
