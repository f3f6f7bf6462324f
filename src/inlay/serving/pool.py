"""A pool of engines, one for each backbone that is needed: rows of one file may belong to tasks on several backbones.

A backbone is loaded when the first row needs it. Its engine is replaced by a larger one when a batch has more tasks
than the engine has slots. A bad row, an unknown task or a missing backbone affects no other row. torch is imported with
the first backbone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inlay.errors import BadData, InlayError
from inlay.serving.answers import Answer, Request, Resolved, VersionLookup, as_error
from inlay.store import Store

if TYPE_CHECKING:
    from inlay.data import InputRow
    from inlay.model import Backbone
    from inlay.serving.engine import Engine
    from inlay.serving.precision import Drift

MOST_SLOTS = 256
"""most slots of one engine; more tasks than that take turns"""


class EnginePool:
    """Answers rows by the tasks they name, each on its task's backbone.

    `task` answers the rows that name none. `file` is the file the rows come from, if any: errors then name the line.
    `loading_s` is the time spent loading backbones, which does not count in the rate; `num_tokens` counts the tokens
    answered. `drifts` says how far each version's probes moved, if `precision` moves them. `on_compile` is called with
    a message whenever an engine compiles something.
    """

    def __init__(
        self,
        store: Store,
        open_backbone: Callable[[str], Backbone],
        *,
        task: str | None = None,
        file: str | Path | None = None,
        min_confidence: float | None = None,
        precision: str = "auto",
        on_compile: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._store = store
        self._open_backbone = open_backbone
        self._task = task
        self._file = file
        self._min_confidence = min_confidence
        self._precision = precision
        self._on_compile = on_compile
        self.loading_s = 0.0
        self.num_tokens = 0
        self.drifts: dict[str, Drift] = {}
        self._engines: dict[str, Engine | InlayError] = {}
        self._lookup = VersionLookup(store)
        self._versions: dict[str, Resolved | InlayError] = {}  # looked up for the next call of `answer`

    def find_version(self, task: str) -> Resolved:
        """Return the version that a name stands for in the next call of `answer`; raise what is wrong with the name."""
        return self._lookup.find(task, self._versions)

    def answer(self, rows: Sequence[InputRow]) -> list[Answer]:
        """Answer rows in order. A name stands for one version for all of them."""
        versions, self._versions = self._versions, {}  # the next call looks the names up again
        answers: list[Answer | None] = [None] * len(rows)
        # 1. group the rows by their task's backbone
        groups: dict[str, list[tuple[int, Request]]] = {}
        for position, row in enumerate(rows):
            task = row.task or self._task or ""
            try:
                backbone = self._check(row, task, versions).manifest.backbone["name"]
                request = Request(task, row.text, row.pair, self._min_confidence)
                groups.setdefault(backbone, []).append((position, request))
            except Exception as error:  # whatever happens to a row is its own answer
                answers[position] = self._fail(row, task, as_error(error))
        # 2. answer each group with its engine
        for backbone, items in groups.items():
            requests = [request for _, request in items]
            engine = self._find_engine(backbone, len({request.task for request in requests}))
            if isinstance(engine, InlayError):
                found = [Answer(request.task, error=engine) for request in requests]
            else:
                before = engine.num_tokens
                found = engine.predict(requests, versions)
                self.num_tokens += engine.num_tokens - before
                self.drifts |= engine.drifts
            for (position, _), answer in zip(items, found, strict=True):
                failed = answer.error
                answers[position] = answer if failed is None else self._fail(rows[position], answer.task, failed)
        return [answer for answer in answers if answer is not None]

    def _check(self, row: InputRow, task: str, versions: dict[str, Resolved | InlayError]) -> Resolved:
        """Return the version that will answer a row; raise what is wrong with the row."""
        if row.error is not None:
            raise row.error
        if not task:
            raise BadData("the row names no task", "fill in its `task` column, or give a TASK for such rows")
        found = self._lookup.find(task, versions)
        wants_pair = bool(found.manifest.extra.get("pairs"))
        if self._file is not None and wants_pair != (row.pair is not None):
            if wants_pair:
                reason = f"the row is one text, but task `{task}` reads a pair"
                hint = "name the second text's column with `--pair COLUMN`, or fill it in"
            else:
                reason = f"the row is a pair, but task `{task}` reads one text"
                hint = "name the text's column with `--text COLUMN`, or leave the row's second text empty"
            raise BadData(reason, hint, path=self._file, line=row.line)
        return found

    def _fail(self, row: InputRow, task: str, error: InlayError) -> Answer:
        """Return the answer of a row that could not be answered, with the row's line."""
        # A traceback holds the frames it went through, and with them the whole window that the row was in.
        error.with_traceback(None)
        if self._file is not None and getattr(error, "line", None) is None:
            error = error.at(self._file, row.line)
        return Answer(task, error=error)

    def _find_engine(self, backbone: str, num_tasks: int) -> Engine | InlayError:
        """Return the engine of a backbone, with a slot for each of the tasks up to `MOST_SLOTS`."""
        from inlay.serving.engine import Engine

        num_slots = min(MOST_SLOTS, 1 << (num_tasks - 1).bit_length())
        engine = self._engines.get(backbone)
        if isinstance(engine, InlayError) or (engine is not None and engine.num_slots >= num_slots):
            return engine
        began = time.perf_counter()
        try:
            larger = Engine(
                self._open_backbone(backbone) if engine is None else engine.backbone,
                self._store,
                num_slots=num_slots,
                precision=self._precision,
                # A larger engine keeps capturing if the one before did.
                is_compiled=True if engine is not None and engine.is_compiled else None,
            )
            larger.on_compile = self._on_compile
            self._engines[backbone] = larger
        except Exception as error:
            self._engines[backbone] = as_error(error)
        self.loading_s += time.perf_counter() - began
        return self._engines[backbone]
