"""Rows to be answered: where they come from, which engine answers them, and how many failed."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.cli.backbones import open_backbone
from inlay.errors import BadConfig, BadData, InlayError
from inlay.store import Manifest, Store

if TYPE_CHECKING:
    from inlay.data import InputRow
    from inlay.serving import Answer, Engine, Request

CHUNK_ROWS = 512
NUM_SLOTS = 64
Chunks = Iterator[list["InputRow"]]


@dataclass(frozen=True)
class Asked:
    """What a user wants answered: texts, a file with its columns, or the lines of stdin."""

    task: str | None
    texts: Sequence[str] = ()
    pairs: Sequence[str] = ()
    file: Path | None = None
    text_column: str | None = None

    @property
    def is_file(self) -> bool:
        return self.file is not None and str(self.file) != "-"

    def check(self) -> None:
        """Refuse what cannot be answered, before anything is loaded."""
        if self.file is not None and self.texts:
            raise BadConfig("texts and `--input` exclude each other", "give one of them")
        if self.is_file:
            return
        if self.task is None:
            raise BadConfig("no task to ask", "name one: `inlay predict TASK TEXT`; `inlay tasks` lists them")
        if self.pairs and not self.texts:
            raise BadConfig("`--pair` without a text", "on stdin, write both into a line: text<TAB>pair")
        if self.pairs and len(self.pairs) != len(self.texts):
            raise BadConfig(
                f"{len(self.texts)} texts, but {len(self.pairs)} second texts", "give `--pair` once per text"
            )
        if not self.texts and self.file is None and sys.stdin.isatty():
            hint = f'write `inlay predict {self.task} "a text"`, pipe lines in, or use `--input FILE`'
            raise BadConfig("no text to answer", hint)

    def read(self, *, has_pairs: bool) -> Chunks:
        """The rows, in chunks. `has_pairs` says whether lines of stdin are two texts with a tab between."""
        if self.is_file:
            from inlay.config import DataConfig
            from inlay.data import stream_rows

            columns = DataConfig(text=self.text_column, pair=self.pairs[0] if self.pairs else None)
            return stream_rows(str(self.file), columns, chunk_size=CHUNK_ROWS, isolate=True)
        return _chunk(_read_texts(self.texts, self.pairs) if self.texts else _read_lines(has_pairs=has_pairs))


def _read_texts(texts: Sequence[str], pairs: Sequence[str]) -> Iterator[InputRow]:
    from inlay.data import InputRow

    for line, (text, pair) in enumerate(itertools.zip_longest(texts, pairs), start=1):
        yield InputRow(line, text, pair, record={"text": text} if pair is None else {"text": text, "pair": pair})


def _read_lines(*, has_pairs: bool) -> Iterator[InputRow]:
    from inlay.data import InputRow

    for number, line in enumerate(sys.stdin, start=1):
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        text, tab, pair = line.partition("\t") if has_pairs else (line, "", "")
        yield InputRow(number, text, pair if tab else None, record={"text": text, **({"pair": pair} if tab else {})})


def _chunk(rows: Iterator[InputRow]) -> Chunks:
    while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
        yield chunk


class Engines:
    """An engine for each backbone that is needed, loaded when it is: rows of one file may stand on several.

    `file` is where the rows come from, if they do: then what is wrong with them is wrong with its columns.
    `loading_s` is the time that went into loading so far, which is no part of the rate. Answers less sure than
    `min_confidence` are not given.
    """

    def __init__(
        self, store: Store, task: str | None, open_by_name: Callable[[str], Engine], file: Path | None = None
    ) -> None:
        self._store, self._task, self._open, self._file = store, task, open_by_name, file
        self.loading_s = 0.0
        self.min_confidence: float | None = None
        self._engines: dict[str, Engine | InlayError] = {}
        self._manifests: dict[str, Manifest | InlayError] = {}

    def answer(self, rows: Sequence[InputRow]) -> list[Answer]:
        """Answers in order; a bad row, an unknown task or a missing backbone spoils no other row."""
        from inlay.serving import Answer, Request

        answers: list[Answer | None] = [None] * len(rows)
        groups: dict[str, list[tuple[int, Request]]] = {}
        for position, row in enumerate(rows):
            task = row.task or self._task or ""
            try:
                name = self._find_backbone(row, task)
                groups.setdefault(name, []).append((position, Request(task, row.text, row.pair, self.min_confidence)))
            except InlayError as error:
                answers[position] = Answer(task, error=error)
        for name, items in groups.items():
            for (position, _), answer in zip(items, self._ask(name, [request for _, request in items]), strict=True):
                answers[position] = answer
        return [answer for answer in answers if answer is not None]

    def _ask(self, name: str, requests: list[Request]) -> list[Answer]:
        from inlay.serving import Answer

        if name not in self._engines:
            began = time.perf_counter()
            try:
                self._engines[name] = self._open(name)
            except InlayError as error:
                self._engines[name] = error
            self.loading_s += time.perf_counter() - began
        engine = self._engines[name]
        if isinstance(engine, InlayError):
            return [Answer(request.task, error=engine) for request in requests]
        return engine.predict(requests)

    def _find_backbone(self, row: InputRow, task: str) -> str:
        """The name of the backbone that the row's task stands on; raises what is wrong with the row."""
        if row.error is not None:
            raise row.error
        if not task:
            raise BadData("the row names no task", "fill in its `task` column, or name a TASK")
        if task not in self._manifests:
            try:
                self._manifests[task] = self._store.manifest(self._store.resolve(task))
            except InlayError as error:
                self._manifests[task] = error
        found = self._manifests[task]
        if isinstance(found, InlayError):
            raise found
        if self._file is not None:
            self._check_columns(row, task, wants_pair=bool(found.extra.get("pairs")))
        return found.backbone["name"]

    def _check_columns(self, row: InputRow, task: str, *, wants_pair: bool) -> None:
        if wants_pair == (row.pair is not None):
            return
        if wants_pair:
            reason = f"the row is one text, but task `{task}` reads a pair"
            hint = "name the second text's column with `--pair COLUMN`, or fill it in"
        else:
            reason = f"the row is a pair, but task `{task}` reads one text"
            hint = "name the text's column with `--text COLUMN`, or leave the row's second text empty"
        raise BadData(reason, hint, path=self._file, line=row.line)


def open_engines(
    store: Store, task: str | None, *, backbone: str | None, device: str, num_slots: int, file: Path | None = None
) -> Engines:
    """Engines that load each task's own backbone by its name, or `backbone` for all of them."""

    def open_engine(name: str) -> Engine:
        loaded = open_backbone(backbone or name, device)
        from inlay.serving import Engine

        return Engine(loaded, store, num_slots=num_slots)

    return Engines(store, task, open_engine, file)


@dataclass
class Tally:
    """How many rows were read, how many failed, and how the first did."""

    num_rows: int = 0
    num_failed: int = 0
    first: InlayError | None = None

    def add(self, answers: Sequence[Answer]) -> None:
        """Count a chunk."""
        errors = [answer.error for answer in answers if answer.error is not None]
        self.num_rows += len(answers)
        self.num_failed += len(errors)
        self.first = self.first or next(iter(errors), None)

    def to_json(self) -> dict[str, Any]:
        """The counts as data."""
        return {"num_rows": self.num_rows, "num_failed": self.num_failed}

    def settle(self, *, strict: bool) -> None:
        """Raise if too much failed: any row where that is strict, otherwise all of them."""
        if self.first is None or (self.num_failed < self.num_rows and not strict):
            return
        if self.num_rows == 1:
            raise self.first
        raise BadData(f"{self.num_failed} of {self.num_rows} rows failed, first: {self.first.message}", self.first.hint)
