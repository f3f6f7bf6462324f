"""All that the pages ask of the service on behalf of one person, in the API's JSON shapes.

It calls what the API's routes call: the workspace, `views` and the web room's own functions. Methods without `async`
read the database and small files, and are called from a worker thread or for a millisecond.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request

from inlay.errors import InlayError
from inlay.service import views
from inlay.service.page.example_data import copy_example
from inlay.service.page.suggesting import sample_rows, suggest_rows
from inlay.service.state import QUEUED, RUNNING, TRAIN, Correction, JobRequest, Key, Keys, Sessions, Workspace
from inlay.service.trainer.job_settings import check_settings
from inlay.service.web.app_state import AppState
from inlay.service.web.asking import Asked, RowAsked, ask, check_num_rows
from inlay.service.web.dataset_routes import look_into, make_draft, read_again
from inlay.service.web.identity import Identity
from inlay.service.web.problems import Secrets
from inlay.service.web.uploads import Draft, receive_upload
from inlay.service.web.visits import find_visit


@dataclass(frozen=True)
class Viewer:
    """Who looks at a page; `key` is the name of the key they signed in with, None for the person at this machine."""

    tenant: str
    scopes: frozenset[str]
    key: str | None


class Desk:
    """What one person may see and do."""

    def __init__(self, state: AppState, identity: Identity, request: Request) -> None:
        self.state = state
        self._identity = identity
        self._request = request
        self._workspace: Workspace = identity.workspace

    @property
    def viewer(self) -> Viewer:
        """Who looks at the page."""
        key = self._identity.key
        name = None if key is None else key.name or f"inl_{key.id}"
        return Viewer(self._workspace.name, self._identity.scopes, name)

    @property
    def secrets(self) -> Secrets:
        """What no page may show."""
        return Secrets(self.state.settings.home, self._identity.tenant.prefix)

    @property
    def address(self) -> str:
        """The address of the service as this browser knows it."""
        return f"{self._request.url.scheme}://{self._request.url.netloc}"

    # tasks and versions

    def tasks(self, cursor: str | None = None) -> dict[str, Any]:
        """Return a page of tasks."""
        return views.describe_tasks(self._workspace, 50, cursor)

    def task(self, name: str) -> dict[str, Any]:
        """Return a task."""
        return views.describe_task(self._workspace, name)

    def policy_of(self, name: str) -> str | None:
        """Return when new versions of a task go live; None if there is no such task."""
        try:
            return self._workspace.task(name).policy
        except InlayError:
            return None

    def versions(self, name: str) -> list[dict[str, Any]]:
        """Return a task's versions, oldest first."""
        return [row.to_json() for row in self._workspace.versions(name)]

    def version(self, name: str, number: int) -> dict[str, Any]:
        """Return a version."""
        return views.find_version(self._workspace, name, number).row.to_json()

    def report(self, name: str, number: int) -> dict[str, Any]:
        """Return how good a version is."""
        return views.describe_report(self._workspace, name, number)

    def errors(
        self, name: str, number: int, filters: Mapping[str, str | None], cursor: str | None = None
    ) -> dict[str, Any]:
        """Return a page of the rows behind a cell of a version's confusion."""
        place = views.find_version(self._workspace, name, number)
        return views.describe_errors(self._workspace, place, filters, 50, cursor)

    async def compare(self, name: str, first: int, second: int) -> dict[str, Any]:
        """Compare two versions."""
        return await views.describe_comparison(self._workspace, self.state.engine, name, (first, second))

    def alias(self, name: str) -> dict[str, Any] | None:
        """Return what is live of a task, if that was ever set."""
        found = self._workspace.alias(name)
        return None if found is None else found.to_json()

    def history(self, name: str) -> list[dict[str, Any]]:
        """Return what was live when, newest first."""
        return [move.to_json() for move in self._workspace.history(name)]

    async def move_live(self, name: str, number: int, if_match: int | None) -> None:
        """Make a version the live one."""
        reason = "chosen on the page"
        await views.go_live(self._workspace, self.state.engine, name, number, if_match=if_match, reason=reason)

    def set_policy(self, name: str, policy: str) -> None:
        """Say when new versions go live."""
        self._workspace.set_policy(name, policy)

    def erase_task(self, name: str) -> None:
        """Begin to erase a task."""
        self._workspace.erase_task(name)

    def takes_pair(self, name: str) -> bool:
        """Tell whether a task answers pairs of texts."""
        place = views.find_version(self._workspace, name)
        return bool(self._workspace.db.store.manifest(place.version).extra.get("pairs"))

    def label_form(self, name: str) -> str:
        """Return how the right answer of a row is given: pick, set, number or text; "" if not on a page."""
        from inlay.data import KINDS

        kind = self._workspace.task(name).to_json()["kind"]
        if kind is None:
            return ""
        entry = KINDS[kind]
        if entry.targets.is_one_label:
            return "pick"
        if entry.is_number:
            return "number"
        if entry.targets.has_labels and entry.decide is not None:
            return "set"
        return "text" if entry.spell_answers is not None and not entry.targets.has_labels else ""

    # asking and correcting

    async def predict(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Have rows answered, each by the task or version it names."""
        check_num_rows(self._workspace, len(rows), len(rows))
        asked = Asked([RowAsked(row["task"], row["text"], row.get("pair")) for row in rows])
        request_id = find_visit(self._request.scope).request_id
        return (await ask(self.state, self._identity, asked, self._request.receive, request_id)).answers

    async def suggestions(self, name: str, most: int) -> list[dict[str, Any]]:
        """Return the rows that are worth labelling most."""
        return await asyncio.to_thread(suggest_rows, self._workspace, name, most)

    def sample_rows(self, name: str, number: int) -> list[dict[str, Any]]:
        """Return a few rows to try a task on, which it did not learn from."""
        return sample_rows(self._workspace, name, number)

    def add_corrections(self, name: str, items: Sequence[Correction]) -> None:
        """Keep right answers."""
        self._workspace.add_feedback(name, items)

    def corrections(self, name: str) -> dict[str, Any]:
        """Return the number of a task's corrections, and the latest."""
        items = self._workspace.feedback(name, 10).items
        return {"count": self._workspace.num_feedback(name), "items": [item.to_json() for item in items]}

    async def train_again(self, name: str) -> dict[str, Any]:
        """Train a task again with its corrections."""
        request = JobRequest(TRAIN, name)
        job = await asyncio.to_thread(views.submit_training, self._workspace, request, corrections=True)
        return job.to_json()

    # datasets and jobs

    async def upload(self) -> dict[str, Any]:
        """Keep the file that this request brings, and say what is in it."""
        async with Draft(self._folder) as draft:
            scope, receive = self._request.scope, self._request.receive
            received = await receive_upload(draft, self._workspace, scope, receive, {})
            looked = await look_into(self.state, self._workspace, received)
            made = await asyncio.to_thread(self._workspace.add_dataset, make_draft(received, looked))
            return made.to_json()

    async def keep_file(self, path: Path) -> dict[str, Any]:
        """Keep a file of the installation's own as a dataset, and say what is in it."""
        async with Draft(self._folder) as draft:
            received = await copy_example(path, draft)
            looked = await look_into(self.state, self._workspace, received)
            made = await asyncio.to_thread(self._workspace.add_dataset, make_draft(received, looked))
            return made.to_json()

    @property
    def _folder(self) -> Path:
        return self._workspace.db.places.datasets(self._workspace.name)

    def dataset(self, dataset_id: str) -> dict[str, Any]:
        """Return a dataset."""
        return self._workspace.dataset(dataset_id).to_json()

    async def read_again(self, dataset_id: str, columns: dict[str, str]) -> dict[str, Any]:
        """Read a dataset by other columns; later trainings read it so."""
        return (await read_again(self.state, self._workspace, dataset_id, columns)).to_json()

    def train(self, task: str, dataset: str, settings: Mapping[str, Any], publish: str | None = None) -> dict[str, Any]:
        """Queue a training."""
        check_settings(settings)
        request = JobRequest(TRAIN, task, dataset, dict(settings), publish)
        return views.submit_training(self._workspace, request).to_json()

    def job(self, job_id: str) -> dict[str, Any]:
        """Return a job as it stands."""
        return self._workspace.job(job_id).to_json()

    def jobs(
        self, *, task: str | None = None, state: str | None = None, limit: int = 50, cursor: str | None = None
    ) -> dict[str, Any]:
        """Return a page of jobs, newest first."""
        return self._workspace.jobs(task=task, state=state, limit=limit, cursor=cursor).to_json()

    def open_jobs(self) -> list[dict[str, Any]]:
        """Return the jobs that run or wait, the first to be done first."""
        found = [job for state in (RUNNING, QUEUED) for job in reversed(self._workspace.jobs(state=state).items)]
        return [job.to_json() for job in found]

    def events(self, job_id: str) -> list[dict[str, Any]]:
        """Return what happened to a job, oldest first."""
        found: list[dict[str, Any]] = []
        after = 0
        while True:
            events = self._workspace.events(job_id, after, 200)
            found += [event.to_json() for event in events]
            if len(events) < 200 or len(found) >= 5000:
                return found
            after = events[-1].id

    def cancel(self, job_id: str) -> None:
        """Cancel a job."""
        self._workspace.cancel(job_id)

    # the tenant itself

    def usage(self, days: int) -> list[dict[str, Any]]:
        """Return what was answered in the last days, by day and task."""
        return [item.to_json() for item in self._workspace.usage(days)]

    def limits(self) -> dict[str, Any]:
        """Return the tenant's limits, and what of them is used."""
        return self._workspace.limits().to_json()

    def keys(self) -> list[dict[str, Any]]:
        """Return the tenant's keys."""
        return [key.to_json() for key in self.state.keys.list(self._workspace.name)]

    def make_key(self, name: str, scopes: Sequence[str], seconds: float | None) -> tuple[Key, str]:
        """Make a key of the tenant's, which ends after so many seconds."""
        expires_at = None if seconds is None else self.state.db.now() + seconds
        return Keys(self.state.db, self._workspace.actor).make(self._workspace.name, scopes, name, expires_at)

    def revoke_key(self, key_id: str) -> None:
        """End a key of the tenant's."""
        Keys(self.state.db, self._workspace.actor).revoke(key_id, tenant=self._workspace.name)

    def begin_session(self, key: Key, seconds: float) -> str:
        """Begin a session of a key in this browser; return its token."""
        return Sessions(self.state.db).begin(key, seconds)

    def as_key(self, key: Key) -> Desk:
        """Return the desk of the same person, signed in with a key."""
        workspace = Workspace(self.state.db, key.tenant, key.actor)
        return Desk(self.state, Identity(workspace, key.scopes, key), self._request)
