"""A service's state moved from SQLite into Postgres, and a service on Postgres brought back from a dump."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import threading
import time
from contextlib import closing

import pytest
from postgres_server import IS_POSTGRES, drop_database, make_database, url_of
from sqlalchemy import select
from state_makers import make_dataset, train, train_and_store

from inlay.errors import BadConfig, Missing
from inlay.service import moving
from inlay.service.home import AlreadyServed, HomeLock, prepare_home
from inlay.service.moving import move_to_postgres
from inlay.service.settings import ServeSettings
from inlay.service.state import Conflict, Database, Keys, Tenants, Workspace
from inlay.service.state.schema import metadata

needs_postgres = pytest.mark.skipif(not IS_POSTGRES, reason="`make postgres` runs it")


def rows_of(db: Database) -> dict[str, list[tuple]]:
    """Every row of every table but what says which store it is."""
    with db.reading() as connection:
        return {
            table.name: sorted((tuple(row) for row in connection.execute(select(table))), key=repr)
            for table in metadata.sorted_tables
            if table.name != "facts"
        }


@pytest.fixture
def old(tmp_path, monkeypatch):
    """A home on SQLite that was used."""
    monkeypatch.delenv("INLAY_DATABASE", raising=False)
    db = Database.open(tmp_path / "home")
    Tenants(db).add("acme")
    workspace = Workspace(db, "acme", "key:test")
    Keys(db).make("acme", ("predict",), "first")
    make_dataset(workspace)
    train_and_store(workspace)
    train(workspace)
    db.close()
    return tmp_path / "home"


@pytest.fixture
def empty(monkeypatch):
    name = make_database()
    monkeypatch.setenv("INLAY_DATABASE", url_of(name))
    yield name
    drop_database(name)


@needs_postgres
def test_a_moved_service_has_every_row_and_goes_on_counting(old, empty, monkeypatch):
    monkeypatch.delenv("INLAY_DATABASE")
    db = Database.open(old)
    before = rows_of(db)
    db.close()
    monkeypatch.setenv("INLAY_DATABASE", url_of(empty))
    report = move_to_postgres(old)
    assert report.kept.is_file()
    assert report.num_rows == sum(map(len, before.values()))
    db = Database.open(old)
    assert rows_of(db) == before
    workspace = Workspace(db, "acme", "key:test")
    numbers = [job.number for job in workspace.jobs().items]
    assert train(workspace).number > max(numbers)
    db.close()
    with pytest.raises(BadConfig, match="is in Postgres already"):
        move_to_postgres(old)
    monkeypatch.delenv("INLAY_DATABASE")
    with pytest.raises(Missing, match="is in Postgres"):
        Database.open(old)


@needs_postgres
def test_a_database_that_is_in_use_is_no_place_to_move_to(old, empty, tmp_path):
    Database.open(tmp_path / "another").close()
    other = Database.open(tmp_path / "another")
    Keys(other).make("local", ("predict",), "in use")
    other.close()
    with pytest.raises(BadConfig, match="has a service's state already"):
        move_to_postgres(old)
    assert (old / "service" / "service.db").is_file()
    assert not (old / "service" / "postgres").exists()


@needs_postgres
def test_a_running_service_is_not_moved(old, empty):
    settings = ServeSettings(home=old)
    prepare_home(settings)
    lock = HomeLock(settings)
    with pytest.raises(AlreadyServed):
        move_to_postgres(old)
    lock.release()
    assert move_to_postgres(old).num_rows


def begin_aside(work):
    """Begin something in a thread; return a function that waits for its result, or the error that it ended with."""
    found = []

    def run():
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return lambda: thread.join() or found[0]


@needs_postgres
def test_what_a_command_writes_while_the_state_is_moved_is_not_lost(old, empty, monkeypatch):
    """It waits, and is told then where the state is; or it was in time, and is moved too."""
    monkeypatch.delenv("INLAY_DATABASE")
    db = Database.open(old)
    monkeypatch.setenv("INLAY_DATABASE", url_of(empty))
    write_note, results = moving.write_atomically, []

    def write_late(path, content):
        results.append(begin_aside(lambda: Keys(db).make("acme", ("predict",), "late")))
        time.sleep(0.3)  # now it waits for the lock
        write_note(path, content)

    monkeypatch.setattr(moving, "write_atomically", write_late)
    Keys(db).make("acme", ("predict",), "in time")
    move_to_postgres(old)
    late = results[0]()
    db.close()
    moved = Database.open(old)
    names = {key.name for key in Keys(moved).list("acme")}
    moved.close()
    assert isinstance(late, Missing), late
    assert "is in Postgres" in late.message
    assert "in time" in names
    assert "late" not in names


@needs_postgres
def test_a_log_that_cannot_be_emptied_is_neither_lost_nor_moved(old, empty, monkeypatch):
    monkeypatch.delenv("INLAY_DATABASE")
    monkeypatch.setattr(moving, "_TRIES", 2)
    db = Database.open(old)
    with closing(sqlite3.connect(old / "service" / "service.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM keys").fetchall()
        Keys(db).make("acme", ("predict",), "last")
        monkeypatch.setenv("INLAY_DATABASE", url_of(empty))
        with pytest.raises(Conflict, match="another process reads"):
            move_to_postgres(old)
        assert (old / "service" / "service.db-wal").stat().st_size
        assert not (old / "service" / "postgres").exists()
    db.close()
    report = move_to_postgres(old)
    with closing(sqlite3.connect(report.kept)) as kept:
        assert ("last",) in kept.execute("SELECT name FROM keys").fetchall()
    assert not list((old / "service").glob("service.db*-wal"))


def test_nothing_is_written_into_sqlite_once_the_state_lies_in_postgres(old):
    db = Database.open(old)
    (old / "service" / "postgres").write_text("postgresql://db/inlay")
    with pytest.raises(Missing, match="is in Postgres"):
        Keys(db).make("acme", ("predict",), "late")
    with closing(sqlite3.connect(old / "service" / "service.db")) as connection:
        assert ("late",) not in connection.execute("SELECT name FROM keys").fetchall()
    db.close()


def test_without_a_database_to_move_to_it_says_what_to_set(old):
    with pytest.raises(Missing, match="it names the database to move to"):
        move_to_postgres(old)


@needs_postgres
def test_a_dump_and_a_copy_of_the_home_are_the_service_again(old, empty, tmp_path, monkeypatch):
    """As docs/operating.md says: first the database, then the files."""
    move_to_postgres(old)
    db = Database.open(old)
    before = rows_of(db)
    db.close()
    copy = make_database("template0")
    dump = subprocess.run(["pg_dump", "--no-owner", "--format=custom", empty], check=True, capture_output=True).stdout
    shutil.copytree(old, tmp_path / "restored", ignore=shutil.ignore_patterns("run"))
    subprocess.run(["pg_restore", "--no-owner", "-d", copy], input=dump, check=True, capture_output=True)
    monkeypatch.setenv("INLAY_DATABASE", url_of(copy))
    db = Database.open(tmp_path / "restored")
    assert rows_of(db) == before
    workspace = Workspace(db, "acme", "key:test")
    assert all(dataset.path.is_file() for dataset in workspace.datasets().items)
    assert db.store.load(db.store.resolve("acme.mail")).tensors
    db.close()
    drop_database(copy)
