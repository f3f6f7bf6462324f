"""Jobs beside training: offline batches, which answer a dataset in the engine's bulk band, and erasure.

What always holds: a batch's output appears under its name, complete, after its last row. Until then its rows are in a
part that only one attempt writes. The next attempt after a kill copies the complete lines of the part, so an attempt
that lost its lease writes to a file without a name. One version answers all rows.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.data import InputRow, stream_rows
from inlay.errors import InlayError, StoreUnreachable
from inlay.service.engine import Caller
from inlay.service.logs import log_event
from inlay.service.state import (
    CANCELLED,
    FAILED,
    LOCAL,
    SUCCEEDED,
    JobCohort,
    JobNote,
    StaleLease,
    Tenant,
    Workspace,
    run_erasure,
)
from inlay.service.trainer.answering import CHUNK_ROWS, TextRow
from inlay.service.trainer.attempts import KeptAttempts
from inlay.service.trainer.job_data import TrainerContext, find_dataset
from inlay.service.trainer.job_notes import TextCleaner, describe_failure, make_words
from inlay.service.trainer.job_settings import BATCH_SETTINGS, make_tree
from inlay.service.trainer.leases import Lease
from inlay.service.web.problems import make_problem_body
from inlay.serving import check_confidence
from inlay.settings import DataConfig, from_tree
from inlay.store import make_directory, sync_directory

_NEWS_S = 5.0  # between two notes on the progress of a batch
_SAVE_S, _REST = 30.0, 10.0  # between two saves of answers for other machines: seconds, and times what a save took


class JobCancelled(Exception):
    """The job is to be cancelled."""


class StopAsked(Exception):
    """The trainer is asked to stop; the next trainer goes on with the job."""


@dataclass(frozen=True)
class BatchPlan:
    """The version that answers a batch, and how its rows are read."""

    workspace: Workspace
    tenant: Tenant
    store_name: str
    number: int
    config: DataConfig
    path: Path
    num_rows: int
    min_confidence: float | None


class BatchWork:
    """One attempt at an offline batch."""

    def __init__(self, cohort: JobCohort, context: TrainerContext, lease: Lease, stopping: threading.Event) -> None:
        self._cohort, self._context, self._lease, self._stopping = cohort, context, lease, stopping
        self._job = cohort.jobs[0]
        self._words: TextCleaner = make_words(context.db.paths.home, None)
        self._output = context.db.paths.batch(self._job.tenant, self._job.id)
        self._parts = context.db.paths.batch_parts(self._job.tenant, self._job.id)
        self._files = context.db.files
        self._kept = KeptAttempts(self._files, self._parts, cohort.token)
        self._noted_at = 0.0
        self._save_at = time.monotonic() + _SAVE_S

    def run(self) -> None:
        """Answer every row and finish the job; StaleLease if the lease is lost, StopAsked if asked to stop."""
        job, queue = self._job, self._context.queue
        try:
            if self._files.has(self._output):  # complete, but the last attempt was killed before it finished the job
                self._succeed()
                return
            self._kept.fetch(self._parts, max(self._find_parts(), default=0))
            plan = self._plan()
            part = self._open_part(plan.number)
            self._answer(plan, part)
            self._check()
            os.replace(part, self._output)
            sync_directory(self._output.parent)
            self._files.keep(self._output)
            self._succeed()
        except StaleLease:
            self._leave_part()
            raise
        except StopAsked:
            if self._kept.save(self._parts):  # else this disk has the only copy
                self._leave_part()
            raise
        except StoreUnreachable:
            raise
        except Exception as error:  # whatever is wrong with one job, the trainer goes on
            self._lease.check()
            self._drop_parts()
            if job.id in self._lease.cancelled:
                queue.finish(self._cohort, job.id, CANCELLED)
            else:
                queue.finish(self._cohort, job.id, FAILED, error=describe_failure(error, self._words))

    def _plan(self) -> BatchPlan:
        job, workspace = self._job, self._context.workspace(self._job.tenant)
        tenant = workspace.tenant
        self._words = make_words(self._context.db.paths.home, tenant)
        dataset = find_dataset(job, workspace)
        self._words = make_words(self._context.db.paths.home, tenant, dataset)
        tree = make_tree(job.settings, dataset.found.reading, BATCH_SETTINGS)
        earlier = self._list_parts()
        if earlier:  # the version that answered the first rows answers all
            number = int(earlier[-1].stem)
        else:
            asked = job.settings.get("version")
            number = workspace.resolve(job.task if asked is None else f"{job.task}@{asked}").number
        name = f"{tenant.prefix}{job.task}"
        least = job.settings.get("min_confidence")
        manifest = self._context.store.manifest(self._context.store.resolve(f"{name}@{number}"))
        check_confidence(least, manifest.kind)
        config = from_tree(DataConfig, tree["data"])
        return BatchPlan(workspace, tenant, name, number, config, dataset.path, dataset.num_rows, least)

    def _answer(self, plan: BatchPlan, part: Path) -> None:
        """Write a line for every row that has no line yet."""
        with self._files.reading(plan.path) as rows_path, part.open("r+b") as file:
            num_done = _cut_torn(file)
            row, before = 0, self._context.answers.num_tokens
            for chunk in stream_rows(rows_path, plan.config, chunk_size=CHUNK_ROWS, isolate=True):
                row += len(chunk)
                left = chunk[max(0, len(chunk) - (row - num_done)) :] if row > num_done else []
                if left:
                    self._check()
                    file.writelines(self._answer_chunk(plan, left))
                    file.flush()  # a kill loses one chunk
                    self._save_part()
                    self._note_progress(row, plan)
            file.flush()
            os.fsync(file.fileno())
        tokens = self._context.answers.num_tokens - before
        plan.workspace.add_usage(self._job.task, rows=max(0, row - num_done), tokens=tokens)

    def _answer_chunk(self, plan: BatchPlan, rows: Sequence[InputRow]) -> Iterator[bytes]:
        """Yield a line for each row: its answer or its error."""
        caller = Caller(plan.tenant.name, plan.tenant.weight, plan.tenant.limits.tokens_per_minute, "bulk")
        good: list[TextRow] = [(row.text, row.pair) for row in rows if row.error is None]
        version = (plan.store_name, plan.number)
        answers = iter(self._context.answers.answer(caller, version, good, self._check, plan.min_confidence))
        shown = {"task": self._job.task, "version": f"{self._job.task}@{plan.number}"}
        for row in rows:
            if row.error is not None:
                found: dict[str, Any] = {"error": describe_failure(row.error, self._words)}
            else:
                found = next(answers)
                if "error" in found:
                    said = found["error"]
                    message = self._words.clean(said["message"])
                    hint = None if said["hint"] is None else self._words.clean(said["hint"])
                    problem = make_problem_body(said["code"], said["status"], message, hint)
                    found = {"error": {**problem, "message": message}}
                else:
                    found = {**found, **shown}
            yield json.dumps({"line": row.line, **found}, ensure_ascii=False).encode() + b"\n"

    def _open_part(self, number: int) -> Path:
        """Return this attempt's part, a copy of the last part of earlier attempts."""
        part = self._parts / f"{number}.{self._cohort.token}"
        for path in (self._output, self._parts):
            self._context.queue.note_path(self._cohort, self._job.id, path)
        make_directory(part.parent)
        earlier = self._list_parts()
        with part.open("wb") as file:
            if earlier:
                with earlier[-1].open("rb") as old:
                    shutil.copyfileobj(old, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
        for path in earlier:
            path.unlink(missing_ok=True)
        return part

    def _leave_part(self) -> None:
        """Delete this attempt's part here if other machines may go on: this one may never see the job again."""
        if not self._files.is_shared:
            return
        for path in self._parts.glob(f"*.{self._cohort.token}"):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # the next attempt's part may be in it
            self._parts.rmdir()

    def _list_parts(self) -> list[Path]:
        """Return the parts of earlier attempts, named `VERSION.TOKEN`, the latest last."""
        known = self._find_parts()
        return [known[token] for token in sorted(known) if token < self._cohort.token]

    def _find_parts(self) -> dict[int, Path]:
        return {int(path.suffix[1:]): path for path in self._parts.glob("[0-9]*.*")}

    def _succeed(self) -> None:
        """Count the rows of the output and finish the job."""
        num_rows = num_errors = 0
        version = None
        with self._files.reading(self._output) as path, path.open("rb") as file:
            for line in file:
                num_rows += 1
                about = json.loads(line)
                num_errors += "error" in about
                version = version or about.get("version")
            size_bytes = file.tell()
        number = None if version is None else int(version.rpartition("@")[2])
        result: dict[str, Any] = {"version": number, "rows": num_rows, "errors": num_errors}
        result |= {"size_bytes": size_bytes, "output": f"/v1/batches/{self._job.id}/output"}
        self._lease.check()
        self._drop_parts()
        self._context.queue.finish(self._cohort, self._job.id, SUCCEEDED, result=result)

    def _save_part(self) -> None:
        """Keep the answers so far for other machines, now and then, because each time all of them are sent."""
        began = time.monotonic()
        if began >= self._save_at:
            self._kept.save(self._parts)
            self._save_at = time.monotonic() + max(_SAVE_S, _REST * (time.monotonic() - began))

    def _drop_parts(self) -> None:
        shutil.rmtree(self._parts, ignore_errors=True)
        self._kept.drop()

    def _note_progress(self, num_rows: int, plan: BatchPlan) -> None:
        if time.monotonic() - self._noted_at < _NEWS_S:
            return
        self._noted_at = time.monotonic()
        progress = {"stage": "answering", "rows": num_rows, "of": plan.num_rows}
        note = JobNote("answered", f"{num_rows:,} of {plan.num_rows:,} rows are answered", progress, progress)
        self._context.queue.record(self._cohort, self._job.id, note)

    def _check(self) -> None:
        self._lease.check()
        if self._job.id in self._lease.cancelled:
            raise JobCancelled
        if self._stopping.is_set():
            raise StopAsked


def _cut_torn(file: Any) -> int:
    """Cut off a last line that a kill left incomplete, and return the number of complete lines."""
    number, end = 0, 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        number, end = number + 1, end + len(line)
    file.seek(end)
    file.truncate()
    return number


def erase(cohort: JobCohort, context: TrainerContext) -> None:
    """Do an erase job, and have the engine forget the task's versions."""
    job = cohort.jobs[0]
    prefix = "" if job.tenant == LOCAL else f"{job.tenant}."
    names = [f"{prefix}{job.task}"]
    if not job.task:  # all tasks of the tenant
        known = (task.name for task in context.store.ledger(lambda version, error: None))
        names = [name for name in known if prefix and name.startswith(prefix)]
    erased = run_erasure(context.db, context.queue, cohort)
    counts = {"versions": erased.num_versions, "datasets": erased.num_datasets, "files": erased.num_files}
    log_event("erased", {"tenant": job.tenant, **counts})
    for name in names:
        with suppress(InlayError):  # an engine that is not there has forgotten everything
            if context.answers.client is not None:
                context.answers.client.forget(name)
