"""A client of Inlay's service, with the names of the library.

    client = inlay.Client("https://inlay.example", key="inl_…")
    version = client.train("mail", "mail.csv")
    client.predict("mail", "Where is my parcel?").label

Every failure is an `InlayError` with a code and a hint, as in local use.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, overload

from inlay.client.problems_read import ServiceProblem
from inlay.client.results import (
    RemoteAlias,
    RemoteAnswer,
    RemoteDataset,
    RemoteEvent,
    RemoteJob,
    RemoteTask,
    RemoteVersion,
    make_answer,
    make_result,
)
from inlay.client.transport import Transport, in_path
from inlay.errors import BadConfig, Missing

DEFAULT_URL = "http://127.0.0.1:8642"
KEY_VARIABLE = "INLAY_KEY"
_ROWS_AT_ONCE = 512
_PIECE_BYTES = 1 << 20


class RequestLike(Protocol):
    """A row that names its task, such as `inlay.Request`."""

    @property
    def task(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def pair(self) -> str | None: ...
    @property
    def min_confidence(self) -> float | None: ...


Row = str | tuple[str, str] | Mapping[str, Any] | RequestLike
Data = str | Path | bytes | RemoteDataset
Progress = Callable[[RemoteEvent], None]


class Client:
    """A service at an address `url`. `key` is a tenant's key, by default `$INLAY_KEY`.

    A busy service is asked again for up to `patience_s` seconds. A request times out after `timeout_s` seconds.

    >>> client = inlay.Client("https://inlay.example", key="inl_0123")
    >>> client.close()
    """

    def __init__(
        self, url: str = DEFAULT_URL, key: str | None = None, *, timeout_s: float = 120.0, patience_s: float = 30.0
    ) -> None:
        key = key or os.environ.get(KEY_VARIABLE) or None
        if not url.startswith(("http://", "https://")):
            raise BadConfig(f"`{url[:200]}` is not the address of a service", f"write it as {DEFAULT_URL}")
        self._http = Transport(url, key, timeout_s=timeout_s, patience_s=patience_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # predictions

    @overload
    def predict(  # type: ignore[overload-overlap]
        self, task: str, rows: str | tuple[str, str], *, min_confidence: float | None = None
    ) -> RemoteAnswer: ...
    @overload
    def predict(
        self, task: str | None, rows: Sequence[Row], *, min_confidence: float | None = None
    ) -> list[RemoteAnswer]: ...
    def predict(self, task: Any, rows: Any, *, min_confidence: float | None = None) -> Any:
        """Answer one text, or rows in order: texts, pairs (text, pair), or requests that name their own task.

        A row that cannot be answered has an `error` in its answer; the others are answered. With one text it is raised.
        """
        is_one = isinstance(rows, str | tuple)
        asked = {"task": task, "min_confidence": min_confidence}
        found = [make_answer(answer) for answer in self._ask([rows] if is_one else rows, asked)]
        if not is_one:
            return found
        if found[0].error is not None:
            raise found[0].error
        return found[0]

    def predict_tasks(
        self, tasks: Sequence[str] | Literal["*"], rows: str | Sequence[Row], *, min_confidence: float | None = None
    ) -> list[list[RemoteAnswer]]:
        """Answer each row with several tasks (`"*"`: all) at once; return a list of answers for each row."""
        asked = {"tasks": tasks if isinstance(tasks, str) else list(tasks), "min_confidence": min_confidence}
        given = [rows] if isinstance(rows, str) else rows
        return [[make_answer(answer) for answer in answers] for answers in self._ask(given, asked)]

    def _ask(self, rows: Sequence[Row], asked: Mapping[str, Any]) -> Iterator[Any]:
        common = {name: value for name, value in asked.items() if value is not None}
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = [_spell_row(row) for row in rows[start : start + _ROWS_AT_ONCE]]
            yield from self._http.ask("/v1/predict", {**common, "rows": part})["answers"]

    # datasets

    def upload(
        self, data: str | Path | bytes, *, name: str | None = None, columns: Mapping[str, str] = {}
    ) -> RemoteDataset:
        """Upload a CSV, TSV, JSON-lines, Parquet or Excel file. `columns` may name text, pair, label and kind.

        Bytes have no name to tell their format from: without `name` they are CSV.
        """
        if isinstance(data, bytes):
            content, name = data, name or "rows.csv"
            read: Callable[[], Iterator[bytes]] = lambda: iter((content,))  # noqa: E731
        else:
            path = Path(data).expanduser()
            if not path.is_file():
                raise Missing(f"no file `{path}`", "give a CSV, TSV, JSON-lines, Parquet or Excel file")
            name = name or path.name

            def read() -> Iterator[bytes]:
                with path.open("rb") as file:
                    while piece := file.read(_PIECE_BYTES):
                        yield piece

        made = self._http.upload("/v1/datasets", {"name": name, **columns}, read)
        return make_result(RemoteDataset, made)

    def datasets(self) -> list[RemoteDataset]:
        """List the datasets, newest first."""
        return [make_result(RemoteDataset, item) for item in self._http.pages("/v1/datasets")]

    def dataset(self, dataset: str) -> RemoteDataset:
        """Return a dataset."""
        return make_result(RemoteDataset, self._http.get(f"/v1/datasets/{in_path(dataset)}"))

    def delete_dataset(self, dataset: str | RemoteDataset) -> None:
        """Delete a dataset."""
        self._http.change("DELETE", f"/v1/datasets/{in_path(_id_of(dataset))}")

    # jobs

    @overload
    def train(
        self,
        task: str,
        data: Data | None = None,
        *,
        settings: Mapping[str, Any] = {},
        publish: str | None = None,
        wait: Literal[True] = True,
        on_progress: Progress | None = None,
    ) -> RemoteVersion: ...
    @overload
    def train(
        self,
        task: str,
        data: Data | None = None,
        *,
        settings: Mapping[str, Any] = {},
        publish: str | None = None,
        wait: Literal[False],
        on_progress: Progress | None = None,
    ) -> RemoteJob: ...
    def train(
        self,
        task: str,
        data: Data | None = None,
        *,
        settings: Mapping[str, Any] = {},
        publish: str | None = None,
        wait: bool = True,
        on_progress: Progress | None = None,
    ) -> RemoteVersion | RemoteJob:
        """Train a version of a task on a file or a dataset; without either, on its earlier rows and the corrections.

        `settings` are those of the library by name: `{"size": 64, "lr": 5e-4, "epochs": 3}`. `on_progress` is called
        with every event. Without `wait`, the queued job is returned at once.
        """
        body: dict[str, Any] = {"task": task, "settings": dict(settings)}
        body |= {"corrections": True} if data is None else {"dataset": self._find_dataset(data)}
        body |= {} if publish is None else {"publish": publish}
        job = make_result(RemoteJob, self._http.post("/v1/jobs", body))
        if not wait:
            return job
        done = self.wait(job, on_progress)
        return self.version(task, int((done.result or {})["version"]))

    def _find_dataset(self, data: Data) -> str:
        if isinstance(data, RemoteDataset):
            return data.id
        if isinstance(data, str) and data.startswith("ds_") and not Path(data).exists():
            return data
        return self.upload(data).id

    def jobs(self, *, task: str | None = None, state: str | None = None) -> list[RemoteJob]:
        """List the jobs, newest first."""
        found = self._http.pages("/v1/jobs", {"task": task, "state": state})
        return [make_result(RemoteJob, item) for item in found]

    def job(self, job: str) -> RemoteJob:
        """Return a job in its present state."""
        return make_result(RemoteJob, self._http.get(f"/v1/jobs/{in_path(job)}"))

    def cancel(self, job: str | RemoteJob) -> RemoteJob:
        """Cancel a job."""
        return make_result(RemoteJob, self._http.post(f"/v1/jobs/{in_path(_id_of(job))}/cancel", {}))

    def events(self, job: str | RemoteJob) -> Iterator[RemoteEvent]:
        """Yield the events of a job, from its beginning until it has ended."""
        for kind, data in self._http.events(f"/v1/jobs/{in_path(_id_of(job))}/events"):
            if kind != "end":
                yield make_result(RemoteEvent, data)

    def wait(self, job: str | RemoteJob, on_progress: Progress | None = None) -> RemoteJob:
        """Wait until a job has ended, and return it; raise what went wrong with it."""
        for event in self.events(job):
            if on_progress is not None:
                on_progress(event)
        return self.job(_id_of(job)).check()

    def predict_file(self, task: str, data: Data, *, min_confidence: float | None = None) -> Iterator[dict[str, Any]]:
        """Answer a file or dataset in a background job, wait for it, and yield a JSON object for each row, in order."""
        body: dict[str, Any] = {"task": task, "dataset": self._find_dataset(data)}
        body |= {} if min_confidence is None else {"min_confidence": min_confidence}
        job = self.wait(self._http.post("/v1/batches", body)["id"])
        return map(json.loads, self._http.lines(f"/v1/batches/{in_path(job.id)}/output"))

    # tasks

    def tasks(self) -> list[RemoteTask]:
        """List the tasks by name."""
        return [make_result(RemoteTask, item) for item in self._http.pages("/v1/tasks")]

    def task(self, task: str) -> RemoteTask:
        """Return a task."""
        return make_result(RemoteTask, self._http.get(f"/v1/tasks/{in_path(task)}"))

    def versions(self, task: str) -> list[RemoteVersion]:
        """List a task's versions, oldest first."""
        return [make_result(RemoteVersion, item) for item in self._http.pages(f"/v1/tasks/{in_path(task)}/versions")]

    def version(self, task: str, version: int) -> RemoteVersion:
        """Return a version of a task."""
        return make_result(RemoteVersion, self._http.get(f"/v1/tasks/{in_path(task)}/versions/{version}"))

    def report(self, task: str, version: int | None = None) -> dict[str, Any]:
        """Return the quality of a version (default: the live one): intervals, label scores, confusion, calibration."""
        found: dict[str, Any] = self._http.get(f"{self._path_of(task, version)}/report")
        return found

    def errors(
        self, task: str, version: int | None = None, *, expected: str | None = None, answer: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the dev rows that a version (default: the live one) got wrong, the most confident first."""
        return self._http.pages(f"{self._path_of(task, version)}/errors", {"expected": expected, "answer": answer})

    def _path_of(self, task: str, version: int | None) -> str:
        number = self.live(task).version if version is None else version
        return f"/v1/tasks/{in_path(task)}/versions/{number}"

    def compare(self, task: str, a: int, b: int) -> dict[str, Any]:
        """Compare two versions on the same rows: the paired difference, its interval, a test, and changed answers."""
        found: dict[str, Any] = self._http.get(f"/v1/tasks/{in_path(task)}/compare", {"a": a, "b": b})
        return found

    def live(self, task: str) -> RemoteAlias:
        """Return the live version, which answers requests."""
        return make_result(RemoteAlias, self._http.get(f"/v1/tasks/{in_path(task)}/aliases/live"))

    def history(self, task: str) -> list[dict[str, Any]]:
        """List the changes of the live version, newest first."""
        return list(self._http.pages(f"/v1/tasks/{in_path(task)}/aliases/live/history"))

    def go_live(self, task: str, version: int, *, reason: str = "", etag: str | None = None) -> RemoteAlias:
        """Make a version live; with the `etag` of `live`, only if nobody changed it since."""
        path = f"/v1/tasks/{in_path(task)}/aliases/live"
        return make_result(RemoteAlias, self._http.change("PUT", path, {"version": version, "reason": reason}, etag))

    def rollback(self, task: str, *, reason: str = "rolled back") -> RemoteAlias:
        """Make the version live again that was live before the present one."""
        now = self.live(task)
        for move in self.history(task):
            if move["to"] == now.version and move["from"] is not None:
                return self.go_live(task, move["from"], reason=reason, etag=now.etag)
        raise ServiceProblem(
            f"no version of `{task}` was live before version {now.version}",
            "`client.versions` lists the versions, and `client.go_live` makes one live",
            code="conflict",
            status=409,
        )

    def set_policy(self, task: str, policy: str) -> RemoteTask:
        """Set when new versions go live: always, if-better or never."""
        return make_result(RemoteTask, self._http.change("PATCH", f"/v1/tasks/{in_path(task)}", {"policy": policy}))

    def erase(self, task: str, *, wait: bool = True) -> RemoteJob:
        """Erase a task with all its versions, runs, answers and corrections."""
        job = make_result(RemoteJob, self._http.change("DELETE", f"/v1/tasks/{in_path(task)}"))
        return self.wait(job) if wait else job

    # feedback

    def feedback(self, task: str, corrections: Sequence[Mapping[str, Any] | tuple[str, str]]) -> list[dict[str, Any]]:
        """Correct answers: (text, right label), or objects that also have pair, answered and version."""
        items = [{"text": item[0], "label": item[1]} if isinstance(item, tuple) else dict(item) for item in corrections]
        kept: list[dict[str, Any]] = self._http.post(f"/v1/tasks/{in_path(task)}/feedback", {"items": items})["items"]
        return kept

    def corrections(self, task: str) -> list[dict[str, Any]]:
        """List the corrections of a task's answers, newest first."""
        return list(self._http.pages(f"/v1/tasks/{in_path(task)}/feedback"))

    def suggestions(
        self, task: str, *, dataset: str | RemoteDataset | None = None, limit: int = 20
    ) -> list[dict[str, Any]]:
        """List the rows whose labels would teach the task most."""
        params = {"limit": limit, "dataset": None if dataset is None else _id_of(dataset)}
        found: list[dict[str, Any]] = self._http.get(f"/v1/tasks/{in_path(task)}/suggestions", params)["items"]
        return found

    # the tenant

    def usage(self, days: int = 30) -> list[dict[str, Any]]:
        """List what was answered for each day and task, newest first."""
        return list(self._http.pages("/v1/usage", {"days": days}))

    def limits(self) -> dict[str, Any]:
        """Return the tenant's limits, and what it uses of them."""
        found: dict[str, Any] = self._http.get("/v1/limits")
        return found

    def make_key(self, name: str = "", scopes: Sequence[str] = ("predict",)) -> dict[str, Any]:
        """Make a key; its `secret` is shown only now."""
        made: dict[str, Any] = self._http.post("/v1/keys", {"name": name, "scopes": list(scopes)})
        return made

    def keys(self) -> list[dict[str, Any]]:
        """List the keys, newest first."""
        return list(self._http.pages("/v1/keys"))

    def revoke_key(self, key: str) -> None:
        """Revoke a key at once."""
        self._http.change("DELETE", f"/v1/keys/{in_path(key)}")


def _id_of(item: str | RemoteDataset | RemoteJob) -> str:
    return item if isinstance(item, str) else item.id


def _spell_row(row: Row) -> str | dict[str, Any]:
    if isinstance(row, str):
        return row
    if isinstance(row, tuple):
        return {"text": row[0], "pair": row[1]}
    if isinstance(row, Mapping):
        return {name: value for name, value in row.items() if value is not None}
    found = {"task": row.task, "text": row.text, "pair": row.pair, "min_confidence": row.min_confidence}
    return {name: value for name, value in found.items() if value is not None}
