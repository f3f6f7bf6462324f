"""Tasks of a tenant, with their versions: by their row, or, for the tenant `local`, in the store.

A task that a service has trained has a row and follows its alias `live`. A task of `local` that `inlay train` put into
the store has no row and follows its newest version. A name that begins with another tenant's name and a dot belongs to
that tenant, and is unknown to `local`.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, insert, select

from inlay.errors import BadConfig, StoreDamaged, UnknownName
from inlay.service.state import schema
from inlay.service.state.aliases import ACTIVE, Reason, TaskKey, find_task_row, read_alias, set_alias
from inlay.service.state.database import Database, count_change
from inlay.service.state.paging import Page, check_limit, cut_page, read_cursor
from inlay.service.state.state_errors import Conflict
from inlay.service.state.tenants import LOCAL, split_store_name, store_prefix
from inlay.service.state.values import day_of, to_iso
from inlay.store import Version, VersionInfo

USUAL_POLICY = "if-better"
ALIAS, LATEST = "alias", "latest"
"""what a task follows"""
_MOST_NAME = 64  # characters of a name in the store
_MOST_SEEN = 10_000
_OWN = re.compile(r"[a-z0-9][a-z0-9_-]*")  # names that a service gives
_ANY = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")  # names in the store
_LISTED = "`GET /v1/tasks` lists the tasks, `GET /v1/tasks/{task}/versions` a task's versions"
_BEYOND = 10**9  # numbers of versions have nine digits at most
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


class ResolvedTask(NamedTuple):
    """The version that a name or reference of a task means, as the store names it."""

    store_name: str
    number: int
    digest: str


@dataclass(frozen=True)
class VersionRow:
    """A version of a task, with the job and the dataset that made it."""

    info: VersionInfo
    is_live: bool
    dataset: str | None = None
    job: str | None = None
    reason: str = ""
    """why it went live, or why it did not"""

    @property
    def number(self) -> int:
        """The version's number."""
        return self.info.version.number

    def to_json(self) -> dict[str, Any]:
        """Return the version as the API shows it."""
        summary = self.info.summary
        return {
            "version": self.number,
            "digest": self.info.version.digest,
            "published_at": self.info.published_at.replace("+00:00", "Z"),
            "metrics": summary.metrics,
            "metric": summary.metric,
            "kind": summary.kind,
            "method": summary.method.get("name"),
            "size": summary.method.get("size"),
            "num_parameters": summary.num_parameters,
            "dataset": self.dataset,
            "job": self.job,
            "reason": self.reason,
            "is_live": self.is_live,
            "size_bytes": self.info.size_bytes,
        }


@dataclass(frozen=True)
class ServedTask:
    """A task of a tenant, as the API shows it."""

    name: str
    store_name: str
    policy: str
    follows: str
    """`alias`, or `latest` for a task that was trained by hand in this store: its newest version answers"""
    counter: int
    created_at: float | None
    versions: tuple[VersionRow, ...]
    rows_today: int = 0
    labels: tuple[str, ...] = ()

    @property
    def live(self) -> VersionRow | None:
        """The version that answers."""
        return next((version for version in self.versions if version.is_live), None)

    @property
    def etag(self) -> str:
        """The ETag of the task's settings."""
        return f'"{self.counter}"'

    def to_json(self) -> dict[str, Any]:
        """Return the task as JSON. `live.interval` is null here, since it needs the version's evaluation."""
        shown = self.live or (self.versions[-1] if self.versions else None)
        summary = None if shown is None else shown.info.summary
        live = None
        if self.live is not None:
            info = self.live.info
            published_at = info.published_at.replace("+00:00", "Z")
            score = info.summary.score(info.summary.metric)
            live = {"version": self.live.number, "score": score, "interval": None, "published_at": published_at}
        return {
            "name": self.name,
            "kind": None if summary is None else summary.kind,
            "labels": list(self.labels),
            "metric": None if summary is None else summary.metric,
            "live": live,
            "num_versions": len(self.versions),
            "policy": self.policy,
            "follows": self.follows,
            "rows_today": self.rows_today,
            "created_at": to_iso(self.created_at),
            "etag": self.etag,
        }


@dataclass(frozen=True)
class FoundTask:
    """A task that exists: with a row, or only in the store."""

    key: TaskKey
    store_name: str
    row: Any | None

    @property
    def follows(self) -> str:
        """`latest` for a task that is only in the store, else `alias`."""
        return LATEST if self.row is None else ALIAS


def store_name(task: TaskKey) -> str:
    """Return the name of a task in the store."""
    return f"{store_prefix(task.tenant)}{task.name}"


def check_new_name(task: TaskKey) -> None:
    """Refuse a name that a service cannot give a task."""
    most = _MOST_NAME - len(store_prefix(task.tenant))
    if not _OWN.fullmatch(task.name) or len(task.name) > most:
        rule = f"lower-case letters, digits, `_` and `-`, at most {most}, beginning with a letter or digit"
        raise BadConfig(f"`{task.name[:100]}` cannot name a task", rule)


def find_task(connection: Connection, db: Database, task: TaskKey) -> FoundTask:
    """Return a task; UnknownName if it does not exist, is being erased, or is another tenant's."""
    row = find_task_row(connection, task)
    found = FoundTask(task, store_name(task), row)
    if row is None and _is_in_store(connection, db, task):
        return found
    if row is None or row.state != ACTIVE:
        raise _unknown(connection, task)
    return found


def _unknown(connection: Connection, task: TaskKey) -> UnknownName:
    """Return the error for an unknown task. Its hint compares only the tenant's own names."""
    row = schema.tasks.c
    query = select(row.name).where(row.tenant == task.tenant, row.state == ACTIVE).limit(1000)
    return UnknownName("task", task.name, connection.execute(query).scalars().all())


def _is_in_store(connection: Connection, db: Database, task: TaskKey) -> bool:
    """Tell whether a task of `local` without a row is in the store."""
    if task.tenant != LOCAL or not _ANY.fullmatch(task.name):
        return False
    if _is_foreign(task.name, tenant_names(connection)):
        return False
    return bool(db.store.numbers(task.name)[0])


def tenant_names(connection: Connection) -> set[str]:
    """Return the names of all tenants."""
    return set(connection.execute(select(schema.tenants.c.name)).scalars())


def _is_foreign(name: str, tenants: set[str]) -> bool:
    """Tell whether a name in the store begins with a tenant's prefix."""
    return split_store_name(name, tenants) != (LOCAL, name)


def adopt_task(connection: Connection, db: Database, task: TaskKey, now: float, policy: str | None = None) -> Any:
    """Return a task's row, made if there is none. The newest version of a task that is only in the store goes live."""
    row = find_task_row(connection, task)
    if row is not None:
        return row
    latest = None
    if _is_in_store(connection, db, task):
        latest = db.store.resolve(task.name)
    elif task.tenant == LOCAL and _is_foreign(task.name, tenant_names(connection)):
        raise _unknown(connection, task)
    values = {"tenant": task.tenant, "name": task.name, "state": ACTIVE, "counter": 1, "created_at": now}
    connection.execute(insert(schema.tasks).values(**values, policy=policy or USUAL_POLICY))
    if latest is not None:
        why = Reason("service", "the newest version when the service took the task over")
        set_alias(connection, task, (latest.number, latest.digest), why, now)
    count_change(connection)
    return find_task_row(connection, task)


def list_versions(connection: Connection, db: Database, found: FoundTask) -> tuple[VersionRow, ...]:
    """Return a task's versions, oldest first. Those of `local` are all that the store has."""
    is_local = found.key.tenant == LOCAL
    row = schema.versions.c
    query = select(schema.versions).where(row.tenant == found.key.tenant, row.task == found.key.name)
    made = {item.number: item for item in connection.execute(query)}
    infos: list[VersionInfo] = []
    if made or is_local:
        with suppress(UnknownName):
            infos = db.store.versions(found.store_name, on_damage=lambda version, error: None)
    infos = [info for info in infos if is_local or info.version.number in made]
    if found.follows == LATEST:
        live = infos[-1].version.number if infos else None
    else:
        alias = read_alias(connection, found.key)
        live = None if alias is None else alias.version
    versions = []
    for info in infos:
        number = info.version.number
        entry = made.get(number)
        about = () if entry is None else (entry.dataset, entry.job, entry.reason)
        versions.append(VersionRow(info, number == live, *about))
    return tuple(versions)


def describe_task(connection: Connection, db: Database, found: FoundTask) -> ServedTask:
    """Return a task with everything that the API shows of it."""
    versions = list_versions(connection, db, found)
    shown = next((version for version in versions if version.is_live), versions[-1] if versions else None)
    usage, row = schema.usage.c, found.row
    is_today = (usage.tenant == found.key.tenant, usage.task == found.key.name, usage.day == day_of(db.now()))
    rows_today = connection.execute(select(usage.rows).where(*is_today)).scalar()
    return ServedTask(
        name=found.key.name,
        store_name=found.store_name,
        policy=USUAL_POLICY if row is None else row.policy,
        follows=found.follows,
        counter=0 if row is None else row.counter,
        created_at=None if row is None else row.created_at,
        versions=versions,
        rows_today=rows_today or 0,
        labels=() if shown is None else _read_labels(db, shown.info.version),
    )


def _read_labels(db: Database, version: Version) -> tuple[str, ...]:
    """Return the labels of a version, or none if it is damaged. Cached: the content of a digest never changes."""
    try:
        return db.cached(("labels", version.digest), lambda: db.store.manifest(version).labels)
    except StoreDamaged:
        return ()


def list_tasks(connection: Connection, db: Database, tenant: str, limit: int, cursor: str | None) -> Page[ServedTask]:
    """Return a page of a tenant's tasks, by name."""
    check_limit(limit)
    after = read_cursor("tasks", cursor, str) or ""
    row = schema.tasks.c
    rows = connection.execute(select(row.name, row.state).where(row.tenant == tenant)).all()
    names = [name for name, state in rows if state == ACTIVE]
    if tenant == LOCAL:
        with_rows = {name for name, _ in rows}
        tenants = tenant_names(connection)
        for name in db.store.names():
            if name not in with_rows and _ANY.fullmatch(name) and not _is_foreign(name, tenants):
                names.append(name)
    shown: list[ServedTask] = []
    for name in sorted(names):
        if name <= after:
            continue
        with suppress(UnknownName):
            shown.append(describe_task(connection, db, find_task(connection, db, TaskKey(tenant, name))))
        if len(shown) > limit:
            break
    return cut_page("tasks", shown, limit, lambda task: task.name)


def resolve_task(db: Database, tenant: str, reference: str) -> ResolvedTask:
    """Return the version that `mail` or `mail@3` means now. Cached until keys, tenants, tasks or aliases change."""
    found = db.cached(("task", tenant, reference), lambda: _look_up(db, tenant, reference))
    return _follow_store(db, reference) if found is None else found


def _look_up(db: Database, tenant: str, reference: str) -> ResolvedTask | None:
    """Return the version that a reference means; None for a task that is only in the store, where versions come."""
    name, at, number = reference.partition("@")
    if at and not _NUMBER.fullmatch(number):
        raise BadConfig(f"`{reference[:100]}` names no version of a task", "write `mail`, or `mail@3` for a version")
    with db.reading() as connection:
        task = find_task(connection, db, TaskKey(tenant, name))
        if task.follows == LATEST:
            return None
        if at:
            return find_version(connection, db, task, int(number))
        alias = read_alias(connection, task.key)
        if alias is None:
            raise Conflict(
                f"task `{name}` has no live version yet",
                f"if it is in training, wait until its job has succeeded; `GET /v1/tasks/{name}/versions` lists what it"
                " has",
            )
        return ResolvedTask(task.store_name, alias.version, alias.digest)


def find_version(connection: Connection, db: Database, task: FoundTask, number: int) -> ResolvedTask:
    """Return a version of a task; UnknownName if there is none of this number."""
    row = schema.versions.c
    is_it = (row.tenant == task.key.tenant, row.task == task.key.name, row.number == number)
    digest = None
    if 0 < number < _BEYOND:  # the column holds no larger ones
        digest = connection.execute(select(row.digest).where(*is_it)).scalar()
        if digest is None and task.key.tenant == LOCAL:
            with suppress(UnknownName):
                digest = db.store.resolve(f"{task.store_name}@{number}").digest
    if digest is None:
        raise UnknownName("version", f"{task.key.name}@{number}", (), hint=_LISTED)
    return ResolvedTask(task.store_name, number, digest)


def _follow_store(db: Database, reference: str) -> ResolvedTask:
    """Return the version that a reference means in the store now. It is read again when the task's folder changes."""
    stamp = db.store.stamp(reference)
    kept = db.seen_in_store.get(reference)
    if kept is not None and stamp is not None and kept[0] == stamp:
        return kept[1]
    try:
        version = db.store.resolve(reference)
    except UnknownName:  # without the store's hint, which lists the tasks of all tenants
        is_version = "@" in reference
        raise UnknownName("version" if is_version else "task", reference, (), hint=_LISTED) from None
    found = ResolvedTask(version.name, version.number, version.digest)
    if stamp is not None:
        if len(db.seen_in_store) > _MOST_SEEN:
            db.seen_in_store.clear()
        db.seen_in_store[reference] = (stamp, found)
    return found
