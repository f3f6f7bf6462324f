"""Forgetting a task: deletes its texts and weights from the store, its runs and the user's caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from inlay.caches import Usage
from inlay.errors import BadConfig, Unsupported
from inlay.reports.run_folders import DeletedRuns, RunEntry, delete_runs, list_runs
from inlay.store import Store, VersionInfo


@dataclass(frozen=True)
class ForgottenTask:
    """The result of forgetting a task: what was deleted, and what stays because other tasks need it."""

    removed: tuple[str, ...]
    """versions that were removed now"""
    runs: DeletedRuns
    cached: Usage
    """tokenised texts of all tasks, as the cache does not know whose they are"""
    shared: tuple[str, ...]
    """versions of other tasks with the same content or from the same run, which stay"""

    def to_json(self) -> dict[str, Any]:
        """Return it as data: `inlay remove --forget --json` prints it."""
        return asdict(self)


def forget_task(store: Store, name: str) -> ForgottenTask:
    """Delete everything that a store and the caches have of a task, even if its versions were removed before.

    A run belongs to the task if a version of the task came from it, or if it was trained for the task, on the same
    file or on the same rows. A run that only versions of other tasks came from stays.
    """
    from inlay.data import open_tokens

    if "@" in name:
        task = name.partition("@")[0]
        raise BadConfig(f"`{name}` is one version, and a task is forgotten as a whole", f"give `{task}` with --forget")
    _refuse_served(store, name)
    # 1. find its versions, also removed ones, and its runs
    infos = [*(store.versions(name) if store.numbers(name)[0] else []), *store.removed_versions(name)]
    entries = list_runs(store)
    runs = _list_own(entries, name, {info.summary.run_id for info in infos})
    if not infos and not runs and not store.numbers(name)[1]:
        store.versions(name)  # raises the error that there is no such task
    shared = _list_shared(store, name, infos)
    # 2. delete the runs first, as this is refused while one of them may be training
    deleted = delete_runs(store, runs)
    # 3. delete the versions with their content
    removed = tuple(f"{name}@{number}" for number in store.numbers(name)[0])
    store.erase(name)
    store.forget_gone()
    # 4. delete the tokenised texts
    cached = open_tokens().clear()
    return ForgottenTask(removed, deleted, cached, shared)


def _list_own(entries: Sequence[RunEntry], name: str, run_ids: set[str]) -> list[RunEntry]:
    """Return the runs that belong to a task."""
    certain = [entry for entry in entries if entry.id in run_ids]
    names = {name, *(task for entry in certain if len(entry.tasks) == 1 for task in entry.tasks)}
    sources = {entry.source for entry in certain if entry.source not in ("", "-")}  # stdin has other rows each time
    # A link that was signed anew is another source with the same rows.
    digests = {digest for entry in certain if len(entry.tasks) == 1 for digest in entry.digests}

    def belongs(entry: RunEntry) -> bool:
        if entry in certain:
            return True
        is_others = any(reference.partition("@")[0] != name for reference in entry.versions)
        is_same = not names.isdisjoint(entry.tasks) or not digests.isdisjoint(entry.digests)
        return not is_others and (is_same or entry.source in sources)

    return [entry for entry in entries if belongs(entry)]


def _list_shared(store: Store, name: str, infos: Sequence[VersionInfo]) -> tuple[str, ...]:
    """Return the versions of other tasks that have the content or the run of one of these."""
    digests, runs = {info.version.digest for info in infos}, {info.summary.run_id for info in infos}
    others = (info for task in store.ledger() if task.name != name for info in task.versions)
    return tuple(
        info.version.reference for info in others if info.version.digest in digests or info.summary.run_id in runs
    )


def _refuse_served(store: Store, name: str) -> None:
    """Refuse a task of a service in this store, which also has uploads, jobs and answers of it, and erases them all."""
    tenant, _, task = name.rpartition(".")
    folders = [("local", name), (tenant, task)] if tenant else [("local", name)]
    for owner, own_name in folders:
        place = f"service/evaluations/{owner}/{own_name}"
        if (store.root / place).is_dir() or (store.storage is not None and store.storage.list(f"{place}/")):
            raise Unsupported(
                f"`{name}` belongs to the service in this store, which also has its uploads, jobs and answers",
                f"delete it there: on its page, or with `curl -X DELETE HOST/v1/tasks/{own_name}`; that erases all",
            )
