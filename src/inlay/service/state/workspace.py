"""The workspace of one tenant: every read and write of customers' data goes through it, and it carries the tenant.

An id or name of another tenant is refused exactly as one that never existed: UnknownName, after the same one query.
Methods are synchronous and take about a millisecond; `resolve` and `tenant` take microseconds when nothing changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace

from sqlalchemy import Connection, delete, func, select, update

from inlay.errors import BadConfig, InlayError, StoreUnreachable, UnknownName
from inlay.service.state import aliases, datasets, feedback, idempotency, jobs, schema, served_tasks
from inlay.service.state.aliases import LIVE, Alias, AliasMove, Reason, TaskKey
from inlay.service.state.database import Database, count_change, write_audit
from inlay.service.state.datasets import Dataset, DatasetDraft, UploadContent
from inlay.service.state.feedback import Correction, Feedback
from inlay.service.state.idempotency import Call, StoredAnswer
from inlay.service.state.jobs import Job, JobEvent, JobRequest
from inlay.service.state.paging import Page, check_limit, read_newest
from inlay.service.state.served_tasks import FoundTask, ResolvedTask, ServedTask, VersionRow
from inlay.service.state.state_errors import Conflict, LiveMoved
from inlay.service.state.tenants import LimitsUsed, Tenant, active_tenant
from inlay.service.state.usage import DayUsage
from inlay.service.state.values import check_label, day_of

MOST_REASON = 500
_MOST_DAYS = 366
_UPLOAD = "upload a dataset with the corrected rows, and train with that"


class Workspace:
    """Everything of one tenant. Cheap to make: one for each request."""

    def __init__(self, db: Database, tenant: str, actor: str = "local") -> None:
        self.db = db
        self.name = tenant
        self.actor = actor

    @property
    def tenant(self) -> Tenant:
        """The tenant, with its limits. Cached; UnknownName if it is gone or being removed."""

        def load() -> Tenant:
            with self.db.reading() as connection:
                return active_tenant(connection, self.name)

        return self.db.cached(("tenant", self.name), load)

    # datasets

    def add_dataset(self, draft: DatasetDraft, call: Call | None = None) -> Dataset:
        """Keep an upload as a dataset: sync and rename its file, and write its row. A refused one is deleted."""
        return self._add_dataset(draft, call, made_by=None)

    def dataset(self, dataset_id: str) -> Dataset:
        """Return a dataset."""
        with self._reading() as connection:
            return datasets.find_dataset(connection, self.db.paths, self.name, dataset_id)

    def datasets(self, limit: int = 50, cursor: str | None = None) -> Page[Dataset]:
        """Return the datasets, newest first."""
        with self._reading() as connection:
            page = read_newest(connection, schema.datasets, [schema.datasets.c.tenant == self.name], limit, cursor)
            return page.convert(lambda row: datasets.dataset_of(row, self.db.paths))

    def set_reading(self, dataset_id: str, found: Mapping[str, object]) -> Dataset:
        """Change what was found in a dataset, after other columns were chosen: some fields of `UploadContent`."""
        known = {item.name for item in fields(UploadContent)}
        with self._writing() as connection:
            dataset = datasets.find_dataset(connection, self.db.paths, self.name, dataset_id)
            for name in found:
                if name not in known:
                    raise BadConfig(f"a dataset has no `{name}` to change", f"one of: {', '.join(sorted(known))}")
            mine = update(schema.datasets).where(schema.datasets.c.number == dataset.number)
            connection.execute(mine.values(found={**asdict(dataset.found), **found}))
            return datasets.find_dataset(connection, self.db.paths, self.name, dataset_id)

    def delete_dataset(self, dataset_id: str) -> None:
        """Delete a dataset and its file; Conflict while a job that has not ended uses it."""
        row = schema.jobs.c
        with self._writing() as connection:
            dataset = datasets.find_dataset(connection, self.db.paths, self.name, dataset_id)
            is_user = (row.tenant == self.name, row.dataset == dataset_id, row.state.not_in(jobs.ENDED))
            job = connection.execute(select(row.id).where(*is_user)).scalar()
            if job is not None:
                raise Conflict(f"job `{job}` uses dataset `{dataset_id}`", "cancel the job, or wait until it ends")
            connection.execute(delete(schema.datasets).where(schema.datasets.c.number == dataset.number))
            calls = schema.calls.c
            connection.execute(delete(schema.calls).where(calls.tenant == self.name, calls.subject == dataset_id))
            self._note(connection, "dataset.delete", dataset_id)
        self.db.files.drop(dataset.path)

    # jobs

    def submit(self, request: JobRequest, call: Call | None = None) -> Job:
        """Queue a job; a task's first one makes the task. May raise OverLimit, UnknownName (dataset) or Conflict."""
        jobs.check_request(request)
        task = TaskKey(self.name, request.task)
        now = self.db.now()
        with self._writing() as connection:
            tenant = active_tenant(connection, self.name)
            if request.dataset is not None:
                datasets.find_dataset(connection, self.db.paths, self.name, request.dataset)
            if request.kind == jobs.TRAIN:
                served_tasks.check_new_name(task)
                row = served_tasks.adopt_task(connection, self.db, task, now, request.publish)
                if row.state != aliases.ACTIVE:
                    raise Conflict(f"task `{task.name}` is being erased", "wait until it is gone, or use another name")
                request = replace(request, publish=request.publish or row.policy)
            else:
                served_tasks.find_task(connection, self.db, task)
            job = jobs.insert_job(connection, tenant, request, self.actor, now)
            idempotency.note_subject(connection, self.name, call, job.id)
            self._note(connection, "job.submit", job.id)
            return jobs.placed(connection, [job])[0]

    def job(self, job_id: str) -> Job:
        """Return a job, with its place in the queue."""
        with self._reading() as connection:
            return jobs.placed(connection, [jobs.find_job(connection, self.name, job_id)])[0]

    def jobs(
        self, *, task: str | None = None, state: str | None = None, limit: int = 50, cursor: str | None = None
    ) -> Page[Job]:
        """Return the jobs, newest first."""
        with self._reading() as connection:
            return jobs.list_jobs(connection, self.name, {"task": task, "state": state}, limit, cursor)

    def cancel(self, job_id: str) -> Job:
        """Cancel a job: at once if it is queued, at its trainer's next heartbeat if it runs. Ended ones stay."""
        with self._writing() as connection:
            job = jobs.find_job(connection, self.name, job_id)
            if not job.has_ended:
                if job.kind == jobs.ERASE:
                    raise Conflict("an erasure cannot be cancelled", "wait until it is done")
                jobs.cancel_where(connection, schema.jobs.c.number == job.number, self.db.now())
                self._note(connection, "job.cancel", job_id)
            return jobs.find_job(connection, self.name, job_id)

    def events(self, job_id: str, after: int = 0, limit: int = 200) -> list[JobEvent]:
        """Return the events of a job after the one with the id `after`, oldest first."""
        check_limit(limit)
        row = schema.job_events.c
        with self._reading() as connection:
            job = jobs.find_job(connection, self.name, job_id)
            query = select(schema.job_events).where(row.job == job.number, row.id > after)
            found = connection.execute(query.order_by(row.id).limit(limit))
            return [JobEvent(item.id, item.at, item.kind, item.message, item.data) for item in found]

    # tasks

    def tasks(self, limit: int = 50, cursor: str | None = None) -> Page[ServedTask]:
        """Return the tasks, by name."""
        with self._reading() as connection:
            return served_tasks.list_tasks(connection, self.db, self.name, limit, cursor)

    def task(self, name: str) -> ServedTask:
        """Return a task, with its versions and labels."""
        with self._reading() as connection:
            return served_tasks.describe_task(connection, self.db, self._find_task(connection, name))

    def versions(self, name: str) -> list[VersionRow]:
        """Return a task's versions, oldest first."""
        with self._reading() as connection:
            return list(served_tasks.list_versions(connection, self.db, self._find_task(connection, name)))

    def live(self, name: str) -> int | None:
        """Return the number of the version that answers for a task."""
        try:
            return self.resolve(name).number
        except Conflict:
            return None

    def alias(self, name: str) -> Alias | None:
        """Return the alias `live` of a task; None if it was never set."""
        with self._reading() as connection:
            return aliases.read_alias(connection, self._find_task(connection, name).key)

    def resolve(self, reference: str) -> ResolvedTask:
        """Return the version that `mail` (the live one) or `mail@3` means. Cached, for the hot route.

        UnknownName for an unknown task or version; Conflict for a task without a live version.
        """
        return served_tasks.resolve_task(self.db, self.name, reference)

    def move_alias(self, name: str, to: int, *, if_match: int | None = None, reason: str = "") -> Alias:
        """Make a version the live one. LiveMoved if `if_match` is not the alias's counter (0: never set)."""
        check_label("reason", reason, MOST_REASON)
        now = self.db.now()
        with self._writing() as connection:
            found = self._find_task(connection, name)
            alias = aliases.read_alias(connection, found.key)
            if if_match is not None and if_match != (0 if alias is None else alias.counter):
                raise LiveMoved(name)
            version = served_tasks.find_version(connection, self.db, found, to)
            served_tasks.adopt_task(connection, self.db, found.key, now)
            why = Reason(self.actor, reason)
            self._note(connection, "alias.move", f"{name}@{to}")
            return aliases.set_alias(connection, found.key, (version.number, version.digest), why, now)

    def history(self, name: str) -> list[AliasMove]:
        """Return the moves of a task's `live`, newest first."""
        with self._reading() as connection:
            self._find_task(connection, name)
            row = schema.alias_moves.c
            query = select(schema.alias_moves).where(row.tenant == self.name, row.task == name, row.name == LIVE)
            found = connection.execute(query.order_by(row.number.desc()))
            return [AliasMove(item.from_number, item.to_number, item.at, item.by, item.reason) for item in found]

    def set_policy(self, name: str, publish: str, *, if_match: int | None = None) -> ServedTask:
        """Say when a version trained from now on goes live. LiveMoved if `if_match` is not the task's counter."""
        if publish not in jobs.POLICIES:
            raise UnknownName("policy", publish, jobs.POLICIES)
        row = schema.tasks.c
        with self._writing() as connection:
            found = self._find_task(connection, name)
            if if_match is not None and if_match != (0 if found.row is None else found.row.counter):
                raise LiveMoved(name)
            served_tasks.adopt_task(connection, self.db, found.key, self.db.now())
            mine = update(schema.tasks).where(row.tenant == self.name, row.name == name)
            connection.execute(mine.values(policy=publish))
            aliases.touch_task(connection, found.key)
            self._note(connection, "task.policy", f"{name} {publish}")
            return served_tasks.describe_task(connection, self.db, self._find_task(connection, name))

    def erase_task(self, name: str, call: Call | None = None) -> Job:
        """Begin to erase a task: it is hidden at once, its jobs are cancelled, and a job erases the rest."""
        task, job = schema.tasks.c, schema.jobs.c
        now = self.db.now()
        with self._writing() as connection:
            tenant = active_tenant(connection, self.name)
            found = self._find_task(connection, name)
            served_tasks.adopt_task(connection, self.db, found.key, now)
            is_it = (task.tenant == self.name, task.name == name, task.state == aliases.ACTIVE)
            hidden = {"state": aliases.ERASING, "counter": task.counter + 1}
            connection.execute(update(schema.tasks).where(*is_it).values(**hidden))
            jobs.cancel_where(connection, (job.tenant == self.name) & (job.task == name), now)
            count_change(connection)
            erasure = jobs.insert_job(connection, tenant, JobRequest(jobs.ERASE, name), self.actor, now)
            idempotency.note_subject(connection, self.name, call, erasure.id)
            self._note(connection, "task.erase", name)
            return erasure

    # feedback

    def add_feedback(self, task: str, items: Sequence[Correction], call: Call | None = None) -> list[Feedback]:
        """Keep corrections of a task's answers."""
        feedback.check_corrections(items)
        with self._writing() as connection:
            found = self._find_task(connection, task)
            kept = feedback.insert_feedback(connection, found.key, items, self.actor, self.db.now())
            idempotency.note_subject(connection, self.name, call, f"task:{task}")
            return kept

    def feedback(self, task: str, limit: int = 50, cursor: str | None = None) -> Page[Feedback]:
        """Return a task's corrections, newest first."""
        with self._reading() as connection:
            self._find_task(connection, task)
            row = schema.feedback.c
            is_its = [row.tenant == self.name, row.task == task]
            page = read_newest(connection, schema.feedback, is_its, limit, cursor)
            return page.convert(feedback.feedback_of)

    def num_feedback(self, task: str) -> int:
        """Return the number of a task's corrections."""
        with self._reading() as connection:
            self._find_task(connection, task)
            row = schema.feedback.c
            query = select(func.count()).where(row.tenant == self.name, row.task == task)
            return int(connection.execute(query).scalar_one())

    def feedback_dataset(self, task: str) -> Dataset:
        """Merge the corrections with the live version's dataset into a new dataset. It reads files, so it is slow.

        A correction of a row in the dataset replaces its label; other corrections are added as rows. Of several
        corrections of one row the last one counts.
        """
        row = schema.feedback.c
        with self._reading() as connection:
            found = self._find_task(connection, task)
            query = select(schema.feedback).where(row.tenant == self.name, row.task == task).order_by(row.number)
            corrections = [feedback.feedback_of(item).correction for item in connection.execute(query)]
            live = next((each for each in served_tasks.list_versions(connection, self.db, found) if each.is_live), None)
            if live is None or live.dataset is None:
                raise Conflict(f"no dataset is known for the live version of `{task}`", _UPLOAD)
            if not corrections:
                raise Conflict(f"task `{task}` has no corrections", "send some first")
            try:
                dataset = datasets.find_dataset(connection, self.db.paths, self.name, live.dataset)
            except UnknownName:
                raise Conflict(f"the dataset of the live version of `{task}` was deleted", _UPLOAD) from None
        with self.db.files.reading(dataset.path) as path:
            folder = self.db.paths.datasets(self.name)
            draft = feedback.merge_corrections(replace(dataset, path=path), corrections, task, folder)
        return self._add_dataset(draft, None, made_by=task)

    # usage and limits

    def add_usage(self, task: str, *, rows: int, tokens: int, requests: int = 1) -> None:
        """Count answered rows. A thread writes the counts once a second."""
        self.db.meter.add(self.name, task, rows=rows, tokens=tokens, requests=requests)

    def usage(self, days: int = 30) -> list[DayUsage]:
        """Return the usage of the last days, including today, by day and task, newest first."""
        row = schema.usage.c
        with self._reading() as connection:
            if not 1 <= days <= _MOST_DAYS:
                raise BadConfig(f"`days` is {days}", f"a whole number from 1 to {_MOST_DAYS}")
            since = day_of(self.db.now() - (days - 1) * 86400)
            query = select(row.day, row.task, row.rows, row.tokens, row.requests)
            query = query.where(row.tenant == self.name, row.day >= since).order_by(row.day.desc(), row.task)
            return [DayUsage(*item) for item in connection.execute(query)]

    def stored_bytes(self) -> int:
        """Return the size of the tenant's datasets and versions on the disk."""
        with self._reading() as connection:
            return datasets.count_stored(connection, self.name)

    def limits(self) -> LimitsUsed:
        """Return the tenant's limits, and how much of them is used."""
        with self._reading() as connection:
            limits = active_tenant(connection, self.name).limits
            num_queued = jobs.count_queued(connection, self.name)
            return LimitsUsed(limits, num_queued, datasets.count_stored(connection, self.name))

    # idempotency and audit

    def begin_call(self, key: str, digest: str) -> Call | StoredAnswer:
        """Begin a request with an idempotency key; `digest` is the sha256 of its route and body.

        Returns the first answer if there is one. KeyReused (422) for another digest, CallInFlight (409) while the
        first is being answered.
        """
        with self._writing() as connection:
            return idempotency.begin_call(connection, self.name, key, digest, self.db.now())

    def finish_call(self, call: Call, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Keep the answer of a call, for 24 hours."""
        with self._writing() as connection:
            answer = StoredAnswer(None, status, headers, body)
            idempotency.finish_call(connection, self.name, call, answer)

    def abandon_call(self, call: Call) -> None:
        """Forget a call that made nothing: it may be sent again."""
        with self._writing() as connection:
            idempotency.abandon_call(connection, self.name, call)

    def audit(self, action: str, target: str) -> None:
        """Note who did what (`key.make`, `task.erase` …). Never pass a text or a label."""
        with self._writing() as connection:
            self._note(connection, action, target)

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """Give a connection to read with; UnknownName once the tenant is gone."""
        with self.db.reading() as connection:
            active_tenant(connection, self.name)
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """Give a transaction; UnknownName once the tenant is gone."""
        with self.db.writing() as connection:
            active_tenant(connection, self.name)
            yield connection

    def _find_task(self, connection: Connection, name: str) -> FoundTask:
        return served_tasks.find_task(connection, self.db, TaskKey(self.name, name))

    def _note(self, connection: Connection, action: str, target: str) -> None:
        write_audit(connection, self.name, self.db.now(), (self.actor, action, target))

    def _add_dataset(self, draft: DatasetDraft, call: Call | None, *, made_by: str | None) -> Dataset:
        """Keep a draft as a dataset. A refused one is deleted."""
        try:
            datasets.check_draft(draft, self.tenant.limits)
            folder = self.db.paths.datasets(self.name)
            dataset_id = datasets.keep_file(draft, folder, self.db.files)
        except BaseException:
            draft.path.unlink(missing_ok=True)
            raise
        try:
            with self._writing() as connection:
                tenant = active_tenant(connection, self.name)
                datasets.insert_dataset(connection, tenant, dataset_id, draft, (self.db.now(), made_by))
                idempotency.note_subject(connection, self.name, call, dataset_id)
                return datasets.find_dataset(connection, self.db.paths, self.name, dataset_id)
        except StoreUnreachable:  # it may be committed all the same; if not, a sweep deletes the file
            raise
        except BaseException:
            with suppress(InlayError):
                self.db.files.remove(folder / datasets.file_name(dataset_id, draft.format))
            raise
