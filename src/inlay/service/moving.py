"""The move of a service's state from SQLite to Postgres: all rows in one transaction, and then a note in the home.

What always holds: until the note is written the service is on SQLite as before, and from then on it is on Postgres.
The service must not run meanwhile, and no command writes: the writer's lock of SQLite is held from before the copy
until its file has another name, and a command that waited for the lock finds the note (`Database.writing`). Files stay
where they are. SQLite's file is kept and complete, since its log is empty when the copy begins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, Table, func, insert, select, text

from inlay.errors import BadConfig, Missing
from inlay.service.home import HomeLock, prepare_home
from inlay.service.settings import ServeSettings
from inlay.service.state import Database
from inlay.service.state.database import (
    VARIABLE,
    bring_up_to_date,
    make_engine,
    set_store,
    telling_sql_errors,
)
from inlay.service.state.postgres import Postgres
from inlay.service.state.schema import datasets, jobs, keys, metadata, revisions, tasks
from inlay.service.state.service_files import ServicePaths
from inlay.service.state.sqlite import Sqlite
from inlay.service.state.state_errors import Conflict
from inlay.store import Store, write_atomically

_ROWS = 1000  # inserted at a time
_TRIES = 20
_LOGS = ("-wal", "-shm")
_MADE_BY_USE = (keys, datasets, jobs, tasks)  # tables that are empty in a database that nobody has used


@dataclass(frozen=True)
class MoveReport:
    """Where the state is now, and how many rows it has."""

    where: str
    num_rows: int
    kept: Path
    """SQLite's file under its new name"""


def move_to_postgres(home: Path) -> MoveReport:
    """Move the state of the service in `home` into the empty database that `$INLAY_DATABASE` names."""
    address = os.environ.get(VARIABLE)
    if not address:
        hint = "set it to postgresql://USER:PASSWORD@HOST/DATABASE, an empty database (`createdb`)"
        raise Missing(f"`${VARIABLE}` is not set: it names the database to move to", hint)
    paths = ServicePaths(home)
    if paths.postgres_note.exists():
        raise BadConfig(f"the state of the service in `{home}` is in Postgres already", "there is nothing to move")
    if not paths.database.is_file():
        raise Missing(f"there is no service in `{home}`", "name its folder with `--store DIR`")
    settings = ServeSettings(home=home)
    prepare_home(settings)
    lock = HomeLock(settings)  # refuses a service that runs
    try:
        return _move(paths, Sqlite(paths), Postgres(address))
    finally:
        lock.release()


def _move(paths: ServicePaths, old: Sqlite, new: Postgres) -> MoveReport:
    for kind in (old, new):
        with telling_sql_errors(kind):
            bring_up_to_date(kind, paths, time.time)
    source, target = make_engine(old), make_engine(new)
    try:
        with telling_sql_errors(old), _holding(old, source) as reading:
            num_rows = _copy(paths, reading, (new, target))
            write_atomically(paths.postgres_note, f"{new.where}\n".encode())
            kept = _put_aside(paths)
    finally:
        source.dispose()
        target.dispose()
    _clear_logs(kept)
    with closing(Database.open(paths.home)):  # check it as every later start does
        pass
    return MoveReport(new.where, num_rows, kept)


@contextmanager
def _holding(old: Sqlite, source: Engine) -> Iterator[Connection]:
    """Give a connection that shuts out all writers of SQLite, once its file has everything and its log is empty."""
    for _ in range(_TRIES):
        old.checkpoint()
        with source.connect() as connection, old.as_writer(connection).begin():
            if not _size_of(_log_of(old.path)):  # nobody wrote since, and nobody can now
                yield connection
                return
    hint = "end the processes that use it (`fuser` lists them), and begin again; nothing was changed"
    raise Conflict(f"another process reads `{old.path}`, so its log cannot be emptied", hint)


def _copy(paths: ServicePaths, reading: Connection, new: tuple[Postgres, Engine]) -> int:
    """Copy every row in one transaction; return how many there are."""
    kind, target = new
    num_rows = 0
    with telling_sql_errors(kind), target.connect() as connection, kind.as_writer(connection).begin():
        _check_empty(connection, kind)
        for table in reversed(metadata.sorted_tables):
            connection.execute(table.delete())  # the rows that a new database begins with
        for table in metadata.sorted_tables:
            found = reading.execute(select(table)).mappings()
            while rows := [dict(row) for row in found.fetchmany(_ROWS)]:
                connection.execute(insert(table), rows)
                num_rows += len(rows)
        for name, last in reading.execute(text("SELECT name, seq FROM sqlite_sequence")).all():
            _continue_numbers(connection, metadata.tables[name], int(last))
        set_store(connection, paths, Store(paths.home))
    return num_rows


def _check_empty(connection: Connection, kind: Postgres) -> None:
    for table in _MADE_BY_USE:
        if connection.execute(select(func.count()).select_from(table)).scalar_one():
            raise BadConfig(f"the database `{kind.where}` has a service's state already", "name an empty database")
    if connection.execute(select(func.count()).select_from(revisions)).scalar_one() == 0:
        raise BadConfig(f"the database `{kind.where}` is damaged", "make a new one with `createdb`")


def _continue_numbers(connection: Connection, table: Table, last: int) -> None:
    """Let numbers continue after the last one ever used, even if its row is deleted."""
    (column,) = table.primary_key.columns
    if last > 0:
        name = f"pg_get_serial_sequence('{table.name}', '{column.name}')"
        connection.execute(text(f"SELECT setval({name}, {last})"))


def _put_aside(paths: ServicePaths) -> Path:
    """Rename SQLite's file and its log, which a process that has the file open goes on using."""
    kept = paths.database.with_suffix(".db.moved")
    os.replace(paths.database, kept)
    for suffix in _LOGS:
        with suppress(FileNotFoundError):
            os.replace(f"{paths.database}{suffix}", f"{kept}{suffix}")
    return kept


def _clear_logs(kept: Path) -> None:
    """Delete the empty log beside SQLite's file; one that is not empty stays."""
    if not _size_of(_log_of(kept)):
        for suffix in _LOGS:
            Path(f"{kept}{suffix}").unlink(missing_ok=True)


def _log_of(database: Path) -> Path:
    return Path(f"{database}{_LOGS[0]}")


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
