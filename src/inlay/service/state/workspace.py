"""The workspace of one tenant: every read and write of what customers own goes through it, and it carries the tenant.

An id or name of another tenant's is refused exactly as one that never was: UnknownName, after the same one query.
Methods are synchronous and take about a millisecond; `resolve` and `tenant` take microseconds when nothing changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inlay.service.state.database import Database
from inlay.service.state.datasets import Dataset, DatasetDraft
from inlay.service.state.feedback import Correction, Feedback
from inlay.service.state.idempotency import Call, StoredAnswer
from inlay.service.state.jobs import Job, JobEvent, JobRequest
from inlay.service.state.paging import Page
from inlay.service.state.served_tasks import Alias, AliasMove, ResolvedTask, ServedTask, VersionRow
from inlay.service.state.tenants import Tenant
from inlay.service.state.usage import DayUsage, LimitsUsed


class Workspace:
    """All that one tenant has. Cheap to make: one for each request."""

    def __init__(self, db: Database, tenant: str, actor: str = "local") -> None:
        self.db = db
        self.name = tenant
        self.actor = actor

    @property
    def tenant(self) -> Tenant:
        """The tenant, with its limits. Cached; UnknownName if it is gone or being removed."""
        raise NotImplementedError

    # datasets

    def add_dataset(self, draft: DatasetDraft, call: Call | None = None) -> Dataset:
        """Keep an upload: sync the draft, name it, and write its row. OverLimit removes nothing: the caller does."""
        raise NotImplementedError

    def dataset(self, dataset_id: str) -> Dataset:
        """Return a dataset."""
        raise NotImplementedError

    def datasets(self, limit: int = 50, cursor: str | None = None) -> Page[Dataset]:
        """Return the datasets, newest first."""
        raise NotImplementedError

    def set_reading(self, dataset_id: str, found: Mapping[str, object]) -> Dataset:
        """Replace what was found in a dataset: other columns were chosen. Keys as in `Found`; others stay."""
        raise NotImplementedError

    def delete_dataset(self, dataset_id: str) -> None:
        """Delete a dataset and its file; Conflict while a job that has not ended uses it."""
        raise NotImplementedError

    # jobs

    def submit(self, request: JobRequest, call: Call | None = None) -> Job:
        """Queue a job. The first job of a task makes the task. OverLimit, UnknownName of a dataset, Conflict."""
        raise NotImplementedError

    def job(self, job_id: str) -> Job:
        """Return a job, with its place in the queue."""
        raise NotImplementedError

    def jobs(
        self, *, task: str | None = None, state: str | None = None, limit: int = 50, cursor: str | None = None
    ) -> Page[Job]:
        """Return the jobs, newest first."""
        raise NotImplementedError

    def cancel(self, job_id: str) -> Job:
        """Cancel a job: at once if it is queued, as soon as its trainer hears of it if it runs. Ended ones stay."""
        raise NotImplementedError

    def events(self, job_id: str, after: int = 0, limit: int = 200) -> list[JobEvent]:
        """Return what happened to a job after the event with the id `after`, oldest first."""
        raise NotImplementedError

    def place(self, job_id: str) -> int | None:
        """Return a queued job's place in the queue (1: next); None if it is not queued."""
        raise NotImplementedError

    # tasks

    def tasks(self, limit: int = 50, cursor: str | None = None) -> Page[ServedTask]:
        """Return the tasks, by name."""
        raise NotImplementedError

    def task(self, name: str) -> ServedTask:
        """Return a task, with its versions and labels."""
        raise NotImplementedError

    def versions(self, name: str) -> list[VersionRow]:
        """Return a task's versions, oldest first."""
        raise NotImplementedError

    def live(self, name: str) -> int | None:
        """Return the number of the version that answers for a task."""
        raise NotImplementedError

    def alias(self, name: str) -> Alias | None:
        """Return what `live` of a task stands for; None if it was never set."""
        raise NotImplementedError

    def resolve(self, reference: str) -> ResolvedTask:
        """Return what `mail` (the live version) or `mail@3` means in the store. The hot route: cached.

        UnknownName for an unknown task or version; Conflict for a task without a live version.
        """
        raise NotImplementedError

    def move_alias(self, name: str, to: int, *, if_match: int | None = None, reason: str = "") -> Alias:
        """Make a version the live one. LiveMoved if `if_match` is not the alias's counter (0: never set)."""
        raise NotImplementedError

    def history(self, name: str) -> list[AliasMove]:
        """Return the moves of a task's `live`, newest first."""
        raise NotImplementedError

    def set_policy(self, name: str, publish: str, *, if_match: int | None = None) -> ServedTask:
        """Say when a version trained from now on goes live. LiveMoved if `if_match` is not the task's counter."""
        raise NotImplementedError

    def erase_task(self, name: str, call: Call | None = None) -> Job:
        """Begin to erase a task: it is gone for all readers at once, its jobs are cancelled, a job erases the rest."""
        raise NotImplementedError

    # feedback

    def add_feedback(self, task: str, items: Sequence[Correction], call: Call | None = None) -> list[Feedback]:
        """Keep corrections of a task's answers."""
        raise NotImplementedError

    def feedback(self, task: str, limit: int = 50, cursor: str | None = None) -> Page[Feedback]:
        """Return a task's corrections, newest first."""
        raise NotImplementedError

    def num_feedback(self, task: str) -> int:
        """Return the number of a task's corrections."""
        raise NotImplementedError

    def feedback_dataset(self, task: str) -> Dataset:
        """Merge the corrections with the live version's dataset into a new dataset. Reads files: not on a hot route.

        A correction of a row that is there replaces its label; others are added. Of several the last one counts.
        """
        raise NotImplementedError

    # usage and limits

    def add_usage(self, task: str, *, rows: int, tokens: int, requests: int = 1) -> None:
        """Count answered rows. Written once a second by a thread of the database."""
        raise NotImplementedError

    def usage(self, days: int = 30) -> list[DayUsage]:
        """Return the usage of the last days (today's included), by day and task, newest first."""
        raise NotImplementedError

    def stored_bytes(self) -> int:
        """Return what the tenant's datasets and versions take on the disk."""
        raise NotImplementedError

    def limits(self) -> LimitsUsed:
        """Return the tenant's limits, and what of them is used."""
        raise NotImplementedError

    # idempotency and audit

    def begin_call(self, key: str, digest: str) -> Call | StoredAnswer:
        """Begin a request with an idempotency key; `digest` is the sha256 of its route and body.

        Returns the first answer if there is one. KeyReused (422) for another digest, CallInFlight (409) while the
        first is being answered.
        """
        raise NotImplementedError

    def finish_call(self, call: Call, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Keep the answer of a call, for 24 hours."""
        raise NotImplementedError

    def abandon_call(self, call: Call) -> None:
        """Forget a call that made nothing: it may be sent again."""
        raise NotImplementedError

    def audit(self, action: str, target: str) -> None:
        """Note who did what: `key.make`, `task.erase` … Never a text or a label."""
        raise NotImplementedError
