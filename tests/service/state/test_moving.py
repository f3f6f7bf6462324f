"""A service's state moved from SQLite into Postgres, and a service on Postgres brought back from a dump."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from postgres_server import IS_POSTGRES, drop_database, make_database, url_of
from sqlalchemy import select
from state_makers import make_dataset, train, train_and_store

from inlay.errors import BadConfig, Missing
from inlay.service.home import AlreadyServed, HomeLock, prepare_home
from inlay.service.moving import move_to_postgres
from inlay.service.settings import ServeSettings
from inlay.service.state import Database, Keys, Tenants, Workspace
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
    with pytest.raises(BadConfig, match="lies in Postgres already"):
        move_to_postgres(old)
    monkeypatch.delenv("INLAY_DATABASE")
    with pytest.raises(Missing, match="lies in Postgres"):
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
