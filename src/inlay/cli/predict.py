"""`inlay predict`: answers texts, lines and files with published versions."""

from __future__ import annotations

import io
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from inlay import serving
from inlay.cli import flags, screen
from inlay.cli.lazy_packages import data, pipeline
from inlay.cli.output import Writer, open_rows, standard_rows
from inlay.cli.screen import Rate
from inlay.errors import BadConfig, BadData, InlayError
from inlay.settings import DataConfig
from inlay.store import Store

CHUNK_ROWS = 512
WINDOW_ROWS = 4096
"""most rows of a file in memory at a time: enough to fill batches with rows of one length"""
WINDOW_LETTERS = 4_000_000
"""most letters of a file in memory at a time, if rows are long"""

_MOST_NAMED = 20  # left-out columns that are named


def predict(
    task: Annotated[
        str | None,
        typer.Argument(metavar="TASK[,TASK…]", help="NAME, NAME@3 or NAME@best; several with commas"),
    ] = None,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="texts to answer")] = None,
    pair: Annotated[
        list[str] | None,
        typer.Option("--pair", metavar="TEXT|COLUMN", help="second text, once for each TEXT; with --input its column"),
    ] = None,
    text: flags.TextOption = None,
    file: Annotated[
        str | None,
        typer.Option("--input", metavar="FILE", help=f"{flags.FILES}, of any length, https://…, or - for stdin"),
    ] = None,
    format: flags.FormatOption = "auto",
    header: flags.HeaderOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="CSV, TSV, JSONL, Parquet or .xlsx file to write; default: JSON lines on stdout",
        ),
    ] = None,
    min_confidence: flags.ConfidenceOption = None,
    keep_formulas: flags.FormulasOption = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="fail if any row cannot be answered, not only if none can")
    ] = False,
    backbone: flags.BackboneOption = None,
    device: flags.DeviceOption = "auto",
    precision: flags.PrecisionOption = "auto",
    store: flags.StoreOption = None,
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="URL", help="ask this service, with the key in $INLAY_KEY; see `inlay serve`"),
    ] = None,
    json: flags.JsonOption = False,
) -> None:
    """Answer texts, lines from stdin, or a file of any length.

    Several tasks, as in `inlay predict mood,topic "a text"`, each answer every text, and the layers they share run only
    once. A file with a `task` column is answered in mixed batches, each row by its own task; TASK is for rows that name
    none.

    A file is read and written a few thousand rows at a time, and an output file gets its name when it is complete. A
    row that cannot be answered says why in its `error` column. With --min-confidence, answers below that probability
    are withheld.

    A task that finds answers in a context takes the question as TEXT and the context as --pair. For a long input on a
    GPU, Inlay compiles its forward pass, which takes some seconds, and keeps the compiled program for the next time.
    With --json, it prints a line of JSON for every text.

    With --server, a service answers, and this machine needs no model and no store. A line of stdin with a tab is then a
    pair of texts.
    """
    # 1. check the input, before anything is loaded
    serving.check_confidence(min_confidence)
    columns = DataConfig(format=format, header=header, text=text, pair=pair[0] if pair and file is not None else None)
    asked = PredictInput(task, texts or [], pair or [], file, columns)
    asked.check()
    source = ("stdin" if file == "-" else file) if asked.is_file else None
    # 2. find who answers; the tasks' versions say whether lines of stdin are pairs, and which columns were joined
    pool: RowAnswerer
    joined: str | None = None
    if server is not None:
        from inlay.cli.server_pool import ServerPool
        from inlay.client import Client

        _refuse_beside_server(
            {"--backbone": backbone, "--store": store}, {"--device": device, "--precision": precision}
        )
        pool = ServerPool(Client(server), file=source, min_confidence=min_confidence)
        has_pairs = True
    else:
        pipeline.check_device_name(device)
        pipeline.check_backbone_name(backbone)
        device = pipeline.device_for_precision(precision, device)
        kept = Store(store)
        pool = engines = serving.EnginePool(
            kept,
            lambda name: pipeline.open_stored(backbone, name, kept, device),
            file=source,
            min_confidence=min_confidence,
            precision=precision,
            on_compile=screen.log_above,
        )
        extras = [engines.find_version(name).manifest.extra for name in asked.tasks]
        has_pairs = any(bool(extra.get("pairs")) for extra in extras)
        if asked.is_file and text is None:
            joined = _agree_on_columns(asked.tasks, extras)
    windows = asked.read(has_pairs=has_pairs, joined=joined)
    # 3. answer window by window, on the screen or into a file
    to_file = output is not None and str(output) != "-"
    try:
        if json or asked.is_file or output is not None:
            abstains = min_confidence is not None
            target = (
                open_rows(Path(str(output)), abstains=abstains, keep_formulas=keep_formulas)
                if to_file
                else standard_rows()
            )
            tally = _write_answers(windows, pool, target)
        else:
            tally = _show_answers(windows, pool, len(asked.tasks), is_one=len(asked.texts) * len(asked.tasks) == 1)
    finally:  # after Ctrl-C too: the answers given so far have drifted
        if pool.num_tokens and precision == "int8":
            _log_drift(pool.drifts)
    if to_file and json:
        screen.emit_json({**tally.to_json(), "output": str(output)})
    elif to_file:
        screen.emit(f"wrote {output}")
    tally.check(strict=strict)


def _agree_on_columns(tasks: Sequence[str], extras: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the text columns that the tasks were trained on joined; refuse tasks that read a row differently."""
    found = {extra.get("joined_text"): task for task, extra in zip(tasks, extras, strict=True)}
    if len(found) > 1:
        first, second = [f"`{task}` by {text or 'one column'}" for text, task in found.items()][:2]
        raise BadConfig(f"the tasks read other columns: {first}, {second}", "ask one at a time, or give `--text`")
    return next(iter(found), None)


def _refuse_beside_server(unset: Mapping[str, Any], auto: Mapping[str, str]) -> None:
    """Refuse options about this machine's own engines if a service answers."""
    given = [name for name, value in unset.items() if value is not None]
    given += [name for name, value in auto.items() if value != "auto"]
    if given:
        reason = f"`{given[0]}` is about this machine, but with `--server` the service answers"
        raise BadConfig(reason, f"leave out `{given[0]}`")


class RowAnswerer(Protocol):
    """Answers rows: the engines of this machine, or a service."""

    loading_s: float
    num_tokens: int

    @property
    def drifts(self) -> Mapping[str, serving.Drift]: ...
    def answer(self, rows: Sequence[data.InputRow]) -> Sequence[serving.AnswerLike]: ...


@dataclass(frozen=True)
class PredictInput:
    """The rows to answer: texts, a file with its columns, or the lines of stdin."""

    task: str | None
    texts: Sequence[str] = ()
    pairs: Sequence[str] = ()
    file: str | None = None
    columns: DataConfig = field(default_factory=DataConfig)

    @property
    def is_file(self) -> bool:
        """Whether the rows come from a file, or from stdin in a format; otherwise stdin has plain lines."""
        return self.file is not None and (self.file != "-" or self.columns.format != "auto")

    @property
    def tasks(self) -> list[str]:
        """The tasks for rows that name none."""
        return [name.strip() for name in (self.task or "").split(",") if name.strip()]

    def check(self) -> None:
        """Refuse an input that cannot be answered."""
        if self.file is not None and self.texts:
            raise BadConfig("texts and `--input` exclude each other", "give one of them")
        if self.is_file:
            return
        if not self.tasks:
            raise BadConfig("no task to ask", "name one: `inlay predict TASK TEXT`; `inlay tasks` lists them")
        if self.pairs and not self.texts:
            raise BadConfig("`--pair` without a text", "on stdin, write both texts on one line: text<TAB>pair")
        if self.pairs and len(self.pairs) != len(self.texts):
            counts = f"{len(self.texts)} texts, but {len(self.pairs)} second texts"
            raise BadConfig(counts, "give `--pair` once for each text")
        if not self.texts and self.file is None and sys.stdin.isatty():
            hint = f'write `inlay predict {self.task} "a text"`, pipe lines in, or use `--input FILE`'
            raise BadConfig("no text to answer", hint)

    def read(self, *, has_pairs: bool, joined: str | None = None) -> Iterator[list[data.InputRow]]:
        """Yield the rows a window at a time.

        With `has_pairs`, a line of stdin is two texts separated by a tab; `joined` names the columns of a file whose
        texts the tasks read as one.
        """
        if self.is_file:
            size = CHUNK_ROWS // 2
            chunks = data.stream_rows(str(self.file), self.columns, joined=joined, chunk_size=size, isolate=True)
            return _join_chunks(self._name_tasks(chunk) for chunk in chunks)
        rows: Iterator[data.InputRow]
        if self.texts:
            given = enumerate(itertools.zip_longest(self.texts, self.pairs), start=1)
            rows = (_make_row(line, text, pair) for line, (text, pair) in given)
        else:
            rows = _read_lines(has_pairs=has_pairs)
        return map(self._name_tasks, iter(lambda: list(itertools.islice(rows, CHUNK_ROWS)), []))

    def _name_tasks(self, rows: Sequence[data.InputRow]) -> list[data.InputRow]:
        """Repeat each row that names no task for every given task; if there are several, its record says which."""
        named = []
        for row in rows:
            if row.task or not self.tasks:
                named.append(row)
                continue
            for task in self.tasks:
                record = row.record if len(self.tasks) == 1 else {**(row.record or {}), "task": task}
                named.append(replace(row, task=task, record=record))
        return named


def _make_row(line: int, text: str, pair: str | None) -> data.InputRow:
    record = {"text": text} if pair is None else {"text": text, "pair": pair}
    return data.InputRow(line, text, pair, record=record)


def _read_lines(*, has_pairs: bool) -> Iterator[data.InputRow]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # an invalid byte is an error of its line alone
    for number, line in enumerate(sys.stdin, start=1):
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        text, tab, pair = line.partition("\t") if has_pairs else (line, "", "")
        yield _make_row(number, text, pair if tab else None)


def _join_chunks(chunks: Iterator[list[data.InputRow]]) -> Iterator[list[data.InputRow]]:
    """Join chunks into windows of at most about `WINDOW_ROWS` rows and `WINDOW_LETTERS` letters."""
    window: list[data.InputRow] = []
    num_letters = 0
    for chunk in chunks:
        window += chunk
        num_letters += sum(row.num_letters for row in chunk)
        if len(window) >= WINDOW_ROWS or num_letters >= WINDOW_LETTERS:
            yield window
            window, num_letters = [], 0
    if window:
        yield window


@dataclass
class Tally:
    """The number of rows read and failed, and the first failure."""

    num_rows: int = 0
    num_failed: int = 0
    first: InlayError | None = None
    rate: Rate | None = None
    """how fast they were answered, if that was measured"""

    def add(self, answers: Sequence[serving.AnswerLike]) -> None:
        """Count the answers of a window."""
        errors = [answer.error for answer in answers if answer.error is not None]
        self.num_rows += len(answers)
        self.num_failed += len(errors)
        self.first = self.first or next(iter(errors), None)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as data."""
        rate = {} if self.rate is None else self.rate.to_json()
        return {"num_rows": self.num_rows, "num_failed": self.num_failed, **rate}

    def check(self, *, strict: bool) -> None:
        """Raise if every row failed; with `strict`, if any did."""
        if self.first is None or (self.num_failed < self.num_rows and not strict):
            return
        if self.num_rows == 1:
            raise self.first
        raise BadData(f"{self.num_failed} of {self.num_rows} rows failed, first: {self.first.message}", self.first.hint)


def _show_answers(windows: Iterator[list[data.InputRow]], pool: RowAnswerer, num_tasks: int, *, is_one: bool) -> Tally:
    """Print a line for every text: the answer, its probability, and the text; of several tasks first the task.

    The error of `is_one` text alone is left to `Tally.check`.
    """
    tally = Tally()
    for rows in windows:
        answers = pool.answer(rows)
        tally.add(answers)
        for row, answer in zip(rows, answers, strict=True):
            task = f"{screen.in_line(answer.task)}  " if num_tasks > 1 else ""
            if answer.error is not None and not is_one:
                screen.log(f"line {row.line}: {task}{answer.error.message}", "yellow")
            if answer.error is not None:
                continue
            about = serving.describe_answer(answer)
            sure = f"  {about['probability']:.4f}" if "probability" in about else ""
            screen.emit(f"{task}{screen.in_line(serving.answer_words(about))}{sure}  {screen.shorten(row.text, 60)}")
    if not tally.num_rows:
        screen.log("no text to answer: stdin has no lines", "yellow")
    return tally


def _write_answers(
    windows: Iterator[list[data.InputRow]], pool: RowAnswerer, target: AbstractContextManager[Writer]
) -> Tally:
    """Write all rows with their answers, window by window, and log the rate at the end."""
    tally = Tally()
    began = time.perf_counter()
    with target as writer, screen.Meter("predicting") as meter:
        for rows in windows:
            answers = pool.answer(rows)
            tally.add(answers)
            writer.write([row.record or {} for row in rows], answers)
            tally.rate = Rate(tally.num_rows, pool.num_tokens, time.perf_counter() - began - pool.loading_s)
            meter.update(tally.num_rows, str(tally.rate))
    failed = f", {tally.num_failed:,} failed" if tally.num_failed else ""
    if tally.rate is not None:
        screen.log(f"{tally.rate.describe()}{failed}")
    if writer.left_out:
        names = ", ".join(f"`{name}`" for name in itertools.islice(writer.left_out, _MOST_NAMED))
        names += f" and {len(writer.left_out) - _MOST_NAMED:,} more" if len(writer.left_out) > _MOST_NAMED else ""
        screen.log(f"left out columns that the first rows do not have: {names}; a .jsonl output keeps them", "yellow")
    if tally.first is not None:
        screen.log(f"first failure: {tally.first.message}", "yellow")
    return tally


def _log_drift(drifts: Mapping[str, serving.Drift]) -> None:
    """Log what int8 changed in the answers to the versions' probes."""
    found = serving.Drift.total(drifts.values())
    if not found.num_probes:
        screen.log("int8: no version has probes on which to measure the drift; use `inlay evaluate --precision int8`")
        return
    of = f"{screen.count(found.num_probes, 'probe')} of {screen.count(len(drifts), 'version')}"
    changed = f"{screen.share(found.num_changed, found.num_probes)} changed their answer"
    screen.log(f"int8: of {of}, {changed}; the largest change of a logit is {found.largest:.2g}")
