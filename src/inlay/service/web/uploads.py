"""Uploads, as raw bodies and as forms: they are written to the disk piece by piece as they arrive.

What always holds: no upload is held in memory, and one that ends early, is too long or cannot be read leaves nothing on
the disk.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import TracebackType
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from inlay.errors import DiskFull
from inlay.service.state import FORMATS, OverLimit, Workspace
from inlay.service.web.problems import FieldFault, RequestRefused, bad_fields
from inlay.service.web.request_context import find_context, find_header, stream_body
from inlay.settings import KIND_NAMES
from inlay.store import DRAFT_PREFIX, make_directory

_FORM = b"multipart/form-data"
_FORM_BYTES = 64 * 1024
"""bytes that a form may have besides its file"""
_FIELD_BYTES = 1024
_BUFFER_BYTES = 1 << 20
_LONGEST_NAME = 200
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]")
# Suffix of a file's name -> format; type of its content -> format.
_SUFFIXES = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".xlsx": "xlsx",
    ".conll": "conll",
    ".iob": "conll",
    ".bio": "conll",
    ".txt": "txt",
    ".zip": "zip",
}
_TYPES = {
    b"text/csv": "csv",
    b"application/csv": "csv",
    b"text/tab-separated-values": "tsv",
    b"application/jsonl": "jsonl",
    b"application/x-jsonlines": "jsonl",
    b"application/x-ndjson": "jsonl",
    b"application/jsonlines": "jsonl",
    b"application/json": "json",
    b"application/vnd.apache.parquet": "parquet",
    b"application/x-parquet": "parquet",
    b"application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": "xlsx",
}
TYPES = tuple(sorted(kind.decode() for kind in _TYPES))
KINDS_OFFERED = ("auto", *KIND_NAMES)
FIELDS = ("name", "format", "text", "pair", "label", "kind")
"""options of an upload, in the query or in fields of the form before or after the file"""


@dataclass(frozen=True)
class Received:
    """A complete upload: its draft on the disk, and its options."""

    path: Path
    size_bytes: int
    sha256: str
    options: Mapping[str, str]
    """the `FIELDS` that were given, and the format, which may have been guessed"""


class Draft:
    """A file that an upload is written to. At the end of its `async with` block it is deleted."""

    def __init__(self, workspace: Workspace) -> None:
        folder = workspace.db.paths.datasets(workspace.name)
        self.path = folder / f"{DRAFT_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self.size_bytes = 0
        self._hash = hashlib.sha256()
        self._buffer = bytearray()
        self._file: Any = None

    async def __aenter__(self) -> Draft:
        self._file = await asyncio.to_thread(self._open)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)  # a dataset that was made of it has another name

    def _open(self) -> Any:
        with _full_disk_as_error():
            make_directory(self.path.parent)
            return os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)

    async def write(self, piece: bytes | memoryview) -> None:
        """Add bytes; they are written to the disk a megabyte at a time."""
        self._buffer += piece
        self.size_bytes += len(piece)
        if len(self._buffer) >= _BUFFER_BYTES:
            await self._flush()

    async def finish(self, options: Mapping[str, str]) -> Received:
        """Write the rest, and rename the draft with its format as the suffix, which readers need."""
        await self._flush()
        self._file.close()
        named = self.path.with_name(f"{self.path.name}.{options['format']}")
        with _full_disk_as_error():
            self.path.rename(named)
        self.path = named
        return Received(named, self.size_bytes, self._hash.hexdigest(), options)

    async def _flush(self) -> None:
        piece, self._buffer = self._buffer, bytearray()
        await asyncio.to_thread(self._put, piece)

    def _put(self, piece: bytearray) -> None:
        self._hash.update(piece)
        rest = memoryview(piece)
        with _full_disk_as_error():
            while rest:
                rest = rest[self._file.write(rest) :]


@contextmanager
def _full_disk_as_error() -> Iterator[None]:
    """Turn a full disk in the block into an error in words for the client, who cannot free space."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull("the service's disk is full", "try again later; the operator must free space") from None
        raise


async def receive_upload(
    draft: Draft, workspace: Workspace, scope: Any, receive: Any, query: dict[str, str]
) -> Received:
    """Write an upload into its draft; `query` has the options that its query gives. Refuse one too long or empty."""
    limit, most = _find_limit(workspace)
    content_type = find_header(scope, b"content-type") or b""
    is_form = content_type.split(b";")[0].strip().lower() == _FORM
    find_context(scope).most_bytes = most + (_FORM_BYTES if is_form else 0)
    options = dict(query)
    try:
        if is_form:
            await _read_form(draft, stream_body(scope, receive), content_type, options, most)
        else:
            if not options.get("format"):
                options["format"] = _find_format(options.get("name", ""), content_type)
            async for piece in stream_body(scope, receive):
                await draft.write(piece)
    except RequestRefused as error:
        if error.code != "too-large":
            raise
        over = OverLimit(limit, max(draft.size_bytes, most + 1), most)
        words = f"the file is longer than the {most:,} bytes that the limit of {limit.replace('_', ' ')} leaves"
        raise RequestRefused(words, over.hint, code=over.code, status=413).with_headers(error.headers) from None
    check_options(options)
    if not draft.size_bytes:
        raise RequestRefused("the file is empty", "send a file with a header and rows", code="bad-data", status=400)
    return await draft.finish(options)


def check_options(options: Mapping[str, str]) -> None:
    """Refuse an unknown format or kind of task."""
    faults = [
        FieldFault(name, f"one of {', '.join(known)}")
        for name, known in (("format", FORMATS), ("kind", KINDS_OFFERED))
        if options.get(name) and options[name] not in known
    ]
    if faults:
        raise bad_fields(faults)


def _find_limit(workspace: Workspace) -> tuple[str, int]:
    """Return the limit that bounds the next dataset, and the bytes that it leaves."""
    limits = workspace.tenant.limits
    rooms = {}
    if limits.dataset_bytes is not None:
        rooms["dataset_bytes"] = limits.dataset_bytes
    if limits.stored_bytes is not None:
        rooms["stored_bytes"] = max(0, limits.stored_bytes - workspace.stored_bytes())
    if not rooms:
        return "dataset_bytes", 1 << 40
    name = min(rooms, key=lambda name: rooms[name])
    return name, rooms[name]


def _find_format(name: str, content_type: bytes) -> str:
    """Return a file's format by its name, or by the type of its content."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes[-2:]]
    packed = "".join(suffixes).removeprefix(".")
    if len(suffixes) == 2 and packed in FORMATS:
        return packed
    found = _SUFFIXES.get(suffixes[-1] if suffixes else "") or _TYPES.get(content_type.split(b";")[0].strip().lower())
    if found is None:
        hint = f"send one of the types {', '.join(TYPES)}; or say `format`, or a `name` with a suffix such as .csv"
        raise RequestRefused("the format of the file is not known", hint, code="wrong-content-type", status=415)
    return found


def clean_name(name: str) -> str:
    """Return the name of a file without folders and unprintable characters."""
    last = PureWindowsPath(PurePosixPath(name).name).name
    return _UNPRINTABLE.sub("", last).strip()[:_LONGEST_NAME] or "upload"


class _Form:
    """The parts of a form: fields are short and are kept; pieces of the one file wait at `pieces` to be written."""

    def __init__(self, boundary: bytes, options: dict[str, str]) -> None:
        self.options = options
        self.pieces: list[bytes] = []
        self.has_file = False
        self.is_whole = False
        self.content_type = b""
        self._headers: dict[bytes, bytes] = {}
        self._name, self._value = b"", b""
        self._field = ""
        self._text = bytearray()
        names = ("part_begin", "part_data", "part_end", "header_field", "header_value", "header_end")
        callbacks: dict[str, Any] = {
            f"on_{name}": getattr(self, f"_{name}") for name in (*names, "headers_finished", "end")
        }
        self.parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]

    def _part_begin(self) -> None:
        self._headers, self._field, self._text = {}, "", bytearray()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name, self._value = b"", b""

    def _headers_finished(self) -> None:
        _, parameters = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._field = parameters.get(b"name", b"").decode("utf8", "replace")
        if b"filename" in parameters or self._field == "file":
            if self.has_file:
                raise bad_fields([FieldFault("file", "a form has one file: send each in a request of its own")])
            self.has_file, self._field = True, ""
            self.content_type = self._headers.get(b"content-type", b"")
            self.options.setdefault("name", parameters.get(b"filename", b"").decode("utf8", "replace"))
        elif self._field not in FIELDS:
            raise bad_fields([FieldFault(self._field[:100], f"no such field: a form has `file`, {', '.join(FIELDS)}")])

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if not self._field:
            self.pieces.append(data[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > _FIELD_BYTES:
            raise bad_fields([FieldFault(self._field, f"at most {_FIELD_BYTES:,} bytes")])

    def _part_end(self) -> None:
        if self._field and self._text:
            self.options[self._field] = self._text.decode("utf8", "replace")

    def _end(self) -> None:
        self.is_whole = True


async def _read_form(
    draft: Draft, stream: AsyncIterator[bytes], content_type: bytes, options: dict[str, str], most: int
) -> None:
    _, parameters = parse_options_header(content_type)
    try:
        form = _Form(parameters[b"boundary"], options)
        async for piece in stream:
            form.parser.write(piece)
            for part in form.pieces:
                await draft.write(part)
            form.pieces.clear()
            if draft.size_bytes > most:
                raise RequestRefused("", code="too-large", status=413).with_headers({"connection": "close"})
    except (FormParserError, KeyError):
        raise _bad_form("the form cannot be read") from None
    if not form.is_whole:
        raise _bad_form("the form ends early")
    if not form.has_file:
        raise bad_fields([FieldFault("file", "it is missing")])
    if not options.get("format"):
        options["format"] = _find_format(options.get("name", ""), form.content_type)


def _bad_form(reason: str) -> RequestRefused:
    hint = "send `multipart/form-data` with one `file`, or the file itself as the body"
    return RequestRefused(reason, hint, code="bad-form", status=400)
