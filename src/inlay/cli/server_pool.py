"""Rows answered by a service, for `inlay predict --server`. No model is loaded here, and torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inlay.client import Client, RemoteAnswer
from inlay.errors import BadData, InlayError, UnknownName

if TYPE_CHECKING:
    from inlay.data import InputRow


class ServerPool:
    """Answers rows as an `EnginePool` does, but asks a service. `file` is the file that the rows come from, if any."""

    def __init__(self, client: Client, *, file: str | None, min_confidence: float | None) -> None:
        self._client, self._file, self._min_confidence = client, file, min_confidence
        # What only this machine's engines have:
        self.num_tokens, self.loading_s = 0, 0.0
        self.drifts: Mapping[str, Any] = {}

    def answer(self, rows: Sequence[InputRow]) -> list[RemoteAnswer]:
        """Answer rows in order. A bad row has its own error; a service that cannot be asked is an error of all."""
        answers: list[RemoteAnswer | None] = [None] * len(rows)
        asked = []
        for position, row in enumerate(rows):
            error = row.error
            if error is None and not row.task:
                error = BadData("the row names no task", "fill in its `task` column, or give a TASK for such rows")
            if error is None:
                asked.append((position, {"task": row.task, "text": row.text, "pair": row.pair}))
            else:
                answers[position] = self._fail(row, row.task or "", error)
        if asked:
            found = self._client.predict(None, [row for _, row in asked], min_confidence=self._min_confidence)
            for (position, _), answer in zip(asked, found, strict=True):
                failed = answer.error
                if failed is not None and failed.code == UnknownName.code:  # its hint is a route of the API
                    failed.hint = "the page at the service's address lists its tasks, and so does `GET /v1/tasks`"
                answers[position] = answer if failed is None else self._fail(rows[position], answer.task, failed)
        return [answer for answer in answers if answer is not None]

    def _fail(self, row: InputRow, task: str, error: InlayError) -> RemoteAnswer:
        """Return the answer of a row that could not be answered, with the row's line."""
        if self._file is not None and getattr(error, "line", None) is None:
            error = error.at(self._file, row.line)
        return RemoteAnswer(task, error=error)
