"""JSON files as records: a row in each line, one document with all rows, or SQuAD's format.

A document may be a list of objects, an object of columns (lists, or objects by row, as pandas writes them), or an
object with one list of objects in it. The rows of a list are read one by one, each with its line.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from inlay.data.columns import TEXT_NAMES, Header
from inlay.data.data_files import RawFile
from inlay.data.squad import is_squad, read_squad
from inlay.data.streams import (
    KNOWN_NAMES,
    MOST_COLUMNS,
    SKIP_HINT,
    ReadOptions,
    Record,
    Stream,
    UnpackLimit,
    count_letters,
)
from inlay.errors import BadData

_FORMS = 'write a list of objects, [{"text": …, "label": …}, …], or one object in each line'
_SHOWN = 40
_BLANKS = re.compile(r"[ \t\n\r]*")


def open_jsonl(file: RawFile, options: ReadOptions) -> Stream:
    """Open JSON lines as a stream."""
    first = file.head().lstrip(codecs.BOM_UTF8).lstrip()
    if first.startswith(b"[") and first[1:].lstrip()[:1] in (b"{", b""):
        raise BadData("it is one list, not an object in each line", "name it with the suffix .json", path=file.name)
    return Stream(Header(file.name, (), None), _limit_columns(file, _read_json_lines(file, options.encoding)))


def open_json(file: RawFile, options: ReadOptions) -> Stream:
    """Open a JSON file as a stream: a SQuAD document, a list of objects, columns, or JSON lines."""
    with file.open_text(options.encoding) as content:
        start = content.read(4096)
    if is_squad(start):
        return _open_squad(file, options)
    if start.lstrip().startswith("["):
        return Stream(Header(file.name, (), None), _limit_columns(file, _read_list(file, options.encoding)))
    if _is_lines(file, options.encoding):
        return open_jsonl(file, options)
    return _open_document(file, options)


def read_lines(file: RawFile, encoding: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers.

    Lines end with \\n or \\r\\n only: a stray \\r or U+2028 inside a text must not shift every later line number.
    """
    with file.open_text(encoding, newline="\n") as content:
        for number, line in enumerate(content, 1):
            yield number, line.rstrip("\n").removesuffix("\r")


def _is_lines(file: RawFile, encoding: str) -> bool:
    """Return whether each line is a row: the first is, or it is broken and the next is. One line is a document."""
    with file.open_text(encoding) as content:
        first, rest = content.readline(), content.read(4096).lstrip()
    if not rest:
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return rest.startswith('{"')
    return True


def _open_squad(file: RawFile, options: ReadOptions) -> Stream:
    with file.open_text(options.encoding) as content:
        try:
            records = list(read_squad(json.load(content)))
            limit = UnpackLimit(file)  # a context is in the file once, and in the rows once for each of its questions
            for record in records:
                limit.add(count_letters(record))
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            reason = f"not a SQuAD document: {type(error).__name__}: {error}"
            raise BadData(reason, "write it as SQuAD's own files are, or as JSON lines", path=file.name) from None
    note = f"{file.title}: SQuAD's format; a line is a question's number"
    return Stream(Header(file.name, (), None), enumerate(records, start=1), (note,))


def _open_document(file: RawFile, options: ReadOptions) -> Stream:
    with file.open_text(options.encoding) as content:
        text = content.read()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else None
        raise BadData(_describe_fault(error, text), _FORMS, path=file.name, line=line) from None
    records = _find_records(document)
    if records is None:
        hint = f"{_FORMS}; an object of columns has a list of one length for each"
        raise BadData("no rows found in this JSON document", hint, path=file.name)
    note = f"{file.title}: one JSON document; a line is a row's number"
    return Stream(Header(file.name, (), None), _limit_columns(file, enumerate(records, start=1)), (note,))


def _limit_columns(file: RawFile, records: Iterable[Record]) -> Iterator[Record]:
    """Yield records; one that brings more columns than a table may have is an error of its row.

    Each row may have keys of its own, and a table of them all would have a cell for every key in every row.
    """
    names: set[str] = set()
    for line, record in records:
        added = record.keys() - names if isinstance(record, dict) else set()
        num_columns = len(names) + len(added)
        if num_columns > MOST_COLUMNS:
            reason = f"with this row there are {num_columns:,} columns, but a table may have {MOST_COLUMNS:,}"
            hint = f"keep the columns of the text and its label; {SKIP_HINT}"
            yield line, BadData(reason, hint, path=file.name, line=line)
            continue
        names |= added
        yield line, record


def _find_records(document: Any) -> list[dict[str, Any]] | None:
    """Return the rows of an object; None if it is not a table."""
    if not isinstance(document, dict):
        return None
    if any(name.lower() in KNOWN_NAMES and isinstance(value, str) for name, value in document.items()):
        return [document]  # a row
    values = list(document.values())
    has_columns = all(isinstance(value, list) for value in values) and len(set(map(len, values))) == 1 and values[0]
    has_texts = has_columns and any(name.lower() in TEXT_NAMES and type(document[name][0]) is str for name in document)
    lists = [value for value in values if isinstance(value, list) and value and isinstance(value[0], dict)]
    if len(lists) == 1 and not has_texts and all(isinstance(item, dict) for item in lists[0]):
        return lists[0]
    if values and all(isinstance(value, dict) for value in values) and values[0]:  # as pandas writes a frame
        keys = list(values[0])
        if all(list(value) == keys for value in values):
            return [{name: column[key] for name, column in document.items()} for key in keys]
    if has_columns:
        return [dict(zip(document, cells, strict=True)) for cells in zip(*values, strict=True)]
    return None


def _read_list(file: RawFile, encoding: str) -> Iterator[Record]:
    """Read the objects of a list one by one. One that cannot be read ends the file: the next one's start is unknown."""
    with file.open_text(encoding, newline="\n") as content:
        text = content.read()
    decoder = json.JSONDecoder()
    # `line` is the line of `counted`, the start of the last object
    place, line, counted = _skip(text, _skip(text, 0) + 1), 1, 0
    while text[place : place + 1] != "]":
        line, counted = line + text.count("\n", counted, place), place
        try:
            item, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            where = line
            if isinstance(error, json.JSONDecodeError):
                where += text.count("\n", counted, error.pos)
            raise BadData(_describe_fault(error, text), _FORMS, path=file.name, line=where) from None
        yield _as_record(item, file, line)
        # A comma and another object must follow, or the end of the list.
        place = _skip(text, place)
        if text[place : place + 1] == ",":
            place = _skip(text, place + 1)
        elif text[place : place + 1] != "]":
            where = line + text.count("\n", counted, place)
            near = text[max(0, place - 20) : place + 20].strip()
            reason = f"the list ends early, near `{near}`" if place >= len(text) else f"no comma, near `{near}`"
            raise BadData(reason, _FORMS, path=file.name, line=where)
    rest = _skip(text, place + 1)
    if rest < len(text):
        where = line + text.count("\n", counted, rest)
        raise BadData("more text after the end of the list", _FORMS, path=file.name, line=where)


def _skip(text: str, place: int) -> int:
    found = _BLANKS.match(text, place)
    return int(found.end()) if found else place


def _read_json_lines(file: RawFile, encoding: str) -> Iterator[Record]:
    for number, line in read_lines(file, encoding):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            hint = f"one object in each line; {SKIP_HINT}"
            yield number, BadData(_describe_fault(error, line), hint, path=file.name, line=number)
            continue
        yield _as_record(record, file, number)


def _as_record(item: Any, file: RawFile, line: int) -> Record:
    if isinstance(item, dict):
        return line, item
    if isinstance(item, list):
        hint = 'write each row as {"text": …, "label": …}; a list of them is a .json file'
        return line, BadData("an array where an object should be", hint, path=file.name, line=line)
    shown = json.dumps(item, ensure_ascii=False)[:_SHOWN]
    hint = 'write each row as {"text": …, "label": …}'
    return line, BadData(f"`{shown}` where an object should be", hint, path=file.name, line=line)


def _describe_fault(error: Exception, text: str) -> str:
    if isinstance(error, json.JSONDecodeError):
        near = text[max(0, error.pos - 20) : error.pos + 20].strip()
        return f"not JSON: {error.msg.lower()} in column {error.colno}, near `{near}`"
    # Any other ValueError is about a number with thousands of digits.
    return "JSON nested too deeply" if isinstance(error, RecursionError) else "a number with too many digits"
