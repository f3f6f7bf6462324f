"""Rows to be answered: where they come from, which engine answers them, and how many failed."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.cli.screen import Rate, log_above
from inlay.errors import BadConfig, BadData, InlayError
from inlay.store import Manifest, Store

if TYPE_CHECKING:
    from inlay.data import InputRow
    from inlay.model import Backbone
    from inlay.serving import Answer, Engine, Request
    from inlay.serving.drift import Drift

CHUNK_ROWS = 512
WINDOW_ROWS = 4096
"""of a file in memory at a time: enough to fill batches with rows of one length"""
WINDOW_LETTERS = 4_000_000
"""likewise, where rows are long"""
MOST_SLOTS = 256
Windows = Iterator[list["InputRow"]]


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

    def read(self, *, has_pairs: bool) -> Windows:
        """The rows, a window at a time. `has_pairs`: lines of stdin are two texts with a tab between."""
        if self.is_file:
            from inlay.data import stream_rows
            from inlay.settings.run_config import DataConfig

            columns = DataConfig(text=self.text_column, pair=self.pairs[0] if self.pairs else None)
            return _join(stream_rows(str(self.file), columns, chunk_size=CHUNK_ROWS // 2, isolate=True))
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


def _chunk(rows: Iterator[InputRow]) -> Windows:
    while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
        yield chunk


def _join(chunks: Iterator[list[InputRow]]) -> Windows:
    """Chunks joined to windows, which are as large as their rows allow."""
    window: list[InputRow] = []
    num_letters = 0
    for chunk in chunks:
        window += chunk
        num_letters += sum(len(row.text) + len(row.pair or "") for row in chunk)
        if len(window) >= WINDOW_ROWS or num_letters >= WINDOW_LETTERS:
            yield window
            window, num_letters = [], 0
    if window:
        yield window


class Engines:
    """An engine for each backbone that is needed, loaded when it is: rows of one file may stand on several.

    `file` is where the rows come from, if they do: then what is wrong with one is said with its line.
    `loading_s` is the time that went into loading backbones so far, which is no part of the rate; `num_tokens` counts
    those answered. Answers less sure than `min_confidence` are not given. `drifts` says how far each version's probes
    moved, if `precision` moves them.
    """

    def __init__(
        self, store: Store, task: str | None, open_by_name: Callable[[str], Backbone], file: Path | None = None
    ) -> None:
        self._store, self._task, self._open, self._file = store, task, open_by_name, file
        self.loading_s = 0.0
        self.min_confidence: float | None = None
        self.precision = "auto"
        self.drifts: dict[str, Drift] = {}
        self.num_tokens = 0
        self._engines: dict[str, Engine | InlayError] = {}
        self._manifests: dict[str, Manifest | InlayError] = {}

    def answer(self, rows: Sequence[InputRow]) -> list[Answer]:
        """Answers in order; a bad row, an unknown task or a missing backbone spoils no other row."""
        from inlay.serving import Request

        answers: list[Answer | None] = [None] * len(rows)
        groups: dict[str, list[tuple[int, Request]]] = {}
        for position, row in enumerate(rows):
            task = row.task or self._task or ""
            try:
                name = self._find_backbone(row, task)
                groups.setdefault(name, []).append((position, Request(task, row.text, row.pair, self.min_confidence)))
            except InlayError as error:
                answers[position] = self._fail(row, task, error)
        for name, items in groups.items():
            for (position, _), answer in zip(items, self._ask(name, [request for _, request in items]), strict=True):
                failed = answer.error
                answers[position] = answer if failed is None else self._fail(rows[position], answer.task, failed)
        return [answer for answer in answers if answer is not None]

    def _fail(self, row: InputRow, task: str, error: InlayError) -> Answer:
        """The answer to a row that has none, saying where the row stands."""
        from inlay.serving import Answer

        if self._file is not None and getattr(error, "line", None) is None:
            error = error.at(self._file, row.line)
        # A traceback holds the frames it went through, and with them the whole window that the row was in.
        return Answer(task, error=error.with_traceback(None))

    def _ask(self, name: str, requests: list[Request]) -> list[Answer]:
        from inlay.serving import Answer

        engine = self._engine(name, len({request.task for request in requests}))
        if isinstance(engine, InlayError):
            return [Answer(request.task, error=engine) for request in requests]
        before = engine.num_tokens
        answers = engine.predict(requests)
        self.num_tokens += engine.num_tokens - before
        self.drifts |= engine.drifts
        return answers

    def _engine(self, name: str, num_tasks: int) -> Engine | InlayError:
        """The engine of a backbone, with room for so many tasks at once, as far as there may be."""
        from inlay.serving import Engine

        num_slots = min(MOST_SLOTS, 1 << (num_tasks - 1).bit_length())
        engine = self._engines.get(name)
        if engine is not None and (isinstance(engine, InlayError) or engine.num_slots >= num_slots):
            return engine
        began = time.perf_counter()
        try:
            backbone = self._open(name) if engine is None else engine.backbone
            # A larger one goes on as the one before did.
            is_compiled = True if engine is not None and engine.is_compiled else None
            larger = Engine(
                backbone, self._store, num_slots=num_slots, precision=self.precision, is_compiled=is_compiled
            )
            larger.on_compile = log_above
            self._engines[name] = larger
        except InlayError as error:
            self._engines[name] = error
        self.loading_s += time.perf_counter() - began
        return self._engines[name]

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
            raise found.with_traceback(None)  # raised again and again, it would gather the frames of every row
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


@dataclass
class Tally:
    """How many rows were read, how many failed, and how the first did."""

    num_rows: int = 0
    num_failed: int = 0
    first: InlayError | None = None
    rate: Rate | None = None
    """how fast they were answered, where that was measured"""

    def add(self, answers: Sequence[Answer]) -> None:
        """Count a window."""
        errors = [answer.error for answer in answers if answer.error is not None]
        self.num_rows += len(answers)
        self.num_failed += len(errors)
        self.first = self.first or next(iter(errors), None)

    def to_json(self) -> dict[str, Any]:
        """The counts as data."""
        return {"num_rows": self.num_rows, "num_failed": self.num_failed, **(self.rate.to_json() if self.rate else {})}

    def settle(self, *, strict: bool) -> None:
        """Raise if too much failed: any row where that is strict, otherwise all of them."""
        if self.first is None or (self.num_failed < self.num_rows and not strict):
            return
        if self.num_rows == 1:
            raise self.first
        raise BadData(f"{self.num_failed} of {self.num_rows} rows failed, first: {self.first.message}", self.first.hint)
