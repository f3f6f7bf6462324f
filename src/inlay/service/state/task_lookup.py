"""Finding tasks: by their row, or, for the tenant `local`, in the store, where `inlay train` put them.

What a service has trained has a row and follows its alias `live`. A task of `local` without a row follows its newest
version. A name that begins with another tenant's name and a dot is that tenant's, and unknown to `local`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select

from inlay.errors import BadConfig, StoreDamaged, UnknownName
from inlay.service.state import schema
from inlay.service.state.aliases import ACTIVE, Reason, TaskKey, find_task_row, read_alias, set_alias
from inlay.service.state.database import Database, bump
from inlay.service.state.paging import Page, check_limit, cut_page, read_cursor
from inlay.service.state.served_tasks import ResolvedTask, ServedTask, VersionRow
from inlay.service.state.state_errors import Conflict
from inlay.service.state.tenants import LOCAL
from inlay.service.state.timestamps import day_of
from inlay.store import Version, VersionInfo

USUAL_POLICY = "if-better"
ALIAS, LATEST = "alias", "latest"
"""what a task follows"""
_MOST_NAME = 64  # characters of a name in the store
_OWN = re.compile(r"[a-z0-9][a-z0-9_-]*")
_ANY = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_LISTED = "`GET /v1/tasks` lists the tasks, `GET /v1/tasks/{task}/versions` a task's versions"
_BEYOND = 10**9  # numbers of versions have nine digits at most
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class FoundTask:
    """A task that is there: with a row, or only in the store."""

    key: TaskKey
    store_name: str
    row: Any | None

    @property
    def follows(self) -> str:
        """What it follows."""
        return LATEST if self.row is None else ALIAS


def store_name(task: TaskKey) -> str:
    """Return the name of a task in the store."""
    return task.name if task.tenant == LOCAL else f"{task.tenant}.{task.name}"


def check_new_name(task: TaskKey) -> None:
    """Refuse a text that cannot name a task made by a service."""
    most = _MOST_NAME - len(store_name(TaskKey(task.tenant, "")))
    if not _OWN.fullmatch(task.name) or len(task.name) > most:
        rule = f"lower-case letters, digits, `_` and `-`, at most {most}, beginning with a letter or digit"
        raise BadConfig(f"`{task.name[:100]}` cannot name a task", rule)


def find_task(connection: Connection, db: Database, task: TaskKey) -> FoundTask:
    """Return a task; UnknownName if it is not there, is being erased, or is another tenant's."""
    row = find_task_row(connection, task)
    found = FoundTask(task, store_name(task), row)
    if row is None and _is_in_store(connection, db, task):
        return found
    if row is None or row.state != ACTIVE:
        raise _unknown(connection, task)
    return found


def _unknown(connection: Connection, task: TaskKey) -> UnknownName:
    """Return the error for a task that is not there. Only the tenant's own names are compared with it."""
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
    owner, dot, _ = name.partition(".")
    return bool(dot) and owner in tenants


def adopt_task(connection: Connection, db: Database, task: TaskKey, now: float, policy: str | None = None) -> Any:
    """Return a task's row, made if there is none; what `local` has in the store stays live as it is."""
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
    bump(connection)
    return find_task_row(connection, task)


def list_versions(connection: Connection, db: Database, found: FoundTask) -> tuple[VersionRow, ...]:
    """Return a task's versions, oldest first. Those of `local` are all that the store has."""
    row = schema.versions.c
    query = select(schema.versions).where(row.tenant == found.key.tenant, row.task == found.key.name)
    made = {item.number: item for item in connection.execute(query)}
    if not made and found.key.tenant != LOCAL:
        return ()
    infos = _read_infos(db, found.store_name)
    if found.key.tenant != LOCAL:
        infos = [info for info in infos if info.version.number in made]
    live = _live_number(connection, found, infos)
    return tuple(_describe(info, made.get(info.version.number), live) for info in infos)


def _describe(info: VersionInfo, row: Any, live: int | None) -> VersionRow:
    is_live = info.version.number == live
    if row is None:
        return VersionRow(info, is_live)
    return VersionRow(info, is_live, row.dataset, row.job, row.reason)


def _read_infos(db: Database, name: str) -> list[VersionInfo]:
    with suppress(UnknownName):
        return db.store.versions(name, on_damage=lambda version, error: None)
    return []


def _live_number(connection: Connection, found: FoundTask, infos: list[VersionInfo]) -> int | None:
    if found.follows == LATEST:
        return infos[-1].version.number if infos else None
    alias = read_alias(connection, found.key)
    return None if alias is None else alias.version


def describe_task(connection: Connection, db: Database, found: FoundTask) -> ServedTask:
    """Return a task with all there is to show of it."""
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
    """Return the labels of a version; none if its object cannot be read. Cached: a digest's content never changes."""
    try:
        return db.cached(("labels", version.digest), lambda: db.store.manifest(version).labels)
    except StoreDamaged:
        return ()


def list_tasks(connection: Connection, db: Database, tenant: str, limit: int, cursor: str | None) -> Page[ServedTask]:
    """Return a page of a tenant's tasks, by name."""
    check_limit(limit)
    after = read_cursor("tasks", cursor, str) or ""
    shown = []
    for name in sorted(_names(connection, db, tenant)):
        if name <= after:
            continue
        with suppress(UnknownName):
            shown.append(describe_task(connection, db, find_task(connection, db, TaskKey(tenant, name))))
        if len(shown) > limit:
            break
    return cut_page("tasks", shown, limit, lambda task: task.name)


def _names(connection: Connection, db: Database, tenant: str) -> Iterator[str]:
    row = schema.tasks.c
    rows = connection.execute(select(row.name, row.state).where(row.tenant == tenant)).all()
    known = {name for name, _ in rows}
    yield from (name for name, state in rows if state == ACTIVE)
    if tenant == LOCAL:
        tenants = tenant_names(connection)
        for name in db.store.names():
            if name not in known and _ANY.fullmatch(name) and not _is_foreign(name, tenants):
                yield name


def resolve_task(db: Database, tenant: str, reference: str) -> ResolvedTask:
    """Return what `mail` or `mail@3` means now: from memory unless keys, tenants, tasks or aliases changed."""
    found = db.cached(("task", tenant, reference), lambda: _look_up(db, tenant, reference))
    return found if isinstance(found, ResolvedTask) else _follow_store(db, found)


def _look_up(db: Database, tenant: str, reference: str) -> ResolvedTask | str:
    """Return what a reference means, or, where only the store can tell, the reference in the store."""
    name, at, number = reference.partition("@")
    if at and not _NUMBER.fullmatch(number):
        raise BadConfig(f"`{reference[:100]}` names no version of a task", "write `mail`, or `mail@3` for a version")
    with db.reading() as connection:
        task = find_task(connection, db, TaskKey(tenant, name))
        if task.follows == LATEST:
            return reference
        if at:
            return find_version(connection, db, task, int(number))
        alias = read_alias(connection, task.key)
        if alias is None:
            raise Conflict(
                f"task `{name}` has no live version yet", f"train it, or choose one of its versions: `{name}@1`"
            )
        return ResolvedTask(task.store_name, alias.version, alias.digest)


def find_version(connection: Connection, db: Database, task: FoundTask, number: int) -> ResolvedTask:
    """Return a version of a task; UnknownName for one it does not have."""
    row = schema.versions.c
    is_it = (row.tenant == task.key.tenant, row.task == task.key.name, row.number == number)
    digest = None
    if 0 < number < _BEYOND:  # columns hold no larger ones
        digest = connection.execute(select(row.digest).where(*is_it)).scalar()
    if digest is None and task.key.tenant == LOCAL and 0 < number < _BEYOND:
        with suppress(UnknownName):
            digest = db.store.resolve(f"{task.store_name}@{number}").digest
    if digest is None:
        raise UnknownName("version", f"{task.key.name}@{number}", (), hint=_LISTED)
    return ResolvedTask(task.store_name, number, digest)


def _follow_store(db: Database, reference: str) -> ResolvedTask:
    """Return what a reference means in the store now. It is read again once the task's folder has changed."""
    stamp = db.store.stamp(reference)
    kept = db.seen_in_store.get(reference)
    if kept is not None and stamp is not None and kept[0] == stamp:
        return kept[1]
    try:
        version = db.store.resolve(reference)
    except UnknownName:  # without the store's hint: it lists what every tenant has
        is_version = "@" in reference
        raise UnknownName("version" if is_version else "task", reference, (), hint=_LISTED) from None
    found = ResolvedTask(version.name, version.number, version.digest)
    if stamp is not None:
        if len(db.seen_in_store) > _MOST_SEEN:
            db.seen_in_store.clear()
        db.seen_in_store[reference] = (stamp, found)
    return found


_MOST_SEEN = 10_000
