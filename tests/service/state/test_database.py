"""The database: opened by many, brought up to date, whole after crashes, and clear about what is wrong."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from postgres_server import IS_POSTGRES
from sqlalchemy import func, insert, select
from sqlalchemy.exc import IntegrityError
from state_makers import make_dataset, train

from inlay.errors import BadConfig, DiskFull, StoreBusy, StoreDamaged
from inlay.service.state import Correction, Database, Keys, NewerDatabase, ServicePaths, Tenants, Workspace, schema
from inlay.service.state.sqlite import read_revision

OPEN = "import sys; from inlay.service.state import Database; Database.open(sys.argv[1]).close()"
# The schema that migration 0001 made, as it was released, with a row in every table that upgrades must not lose.
FIRST_SCHEMA = Path(__file__).with_name("schema_0001.sql")


def open_elsewhere(home: Path, program: str = OPEN) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", program, str(home)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.sqlite
def test_several_processes_may_make_the_database_at_once(tmp_path):
    openers = [open_elsewhere(tmp_path) for _ in range(4)]
    for opener in openers:
        _, said = opener.communicate(timeout=60)
        assert opener.returncode == 0, said
    assert read_revision(ServicePaths(tmp_path).database) == schema.HEAD


def test_migrations_make_exactly_the_tables_that_the_code_sees(db):
    with db.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []


def test_the_database_is_nobody_elses(db):
    assert db.paths.service.stat().st_mode & 0o077 == 0


def test_a_database_of_an_older_inlay_is_upgraded_and_keeps_its_rows(tmp_path):
    paths = ServicePaths(tmp_path)
    paths.service.mkdir()
    with sqlite3.connect(paths.database) as old:
        old.executescript(FIRST_SCHEMA.read_text())
    old.close()
    assert read_revision(paths.database) == "0001"
    db = Database.open(tmp_path)
    workspace = Workspace(db, "acme")
    assert read_revision(paths.database) == schema.HEAD
    assert workspace.job("job_old").settings == {"method": "lora"}
    assert workspace.resolve("mail").number == 3
    assert [event.kind for event in workspace.events("job_old")] == ["queued"]
    assert Keys(db).exist()
    with db.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
    db.close()


@pytest.mark.sqlite
def test_a_newer_schema_is_refused_with_a_hint(home):
    with sqlite3.connect(ServicePaths(home).database) as newer:
        newer.execute("UPDATE alembic_version SET version_num = '9999'")
    newer.close()
    with pytest.raises(NewerDatabase, match="9999") as refused:
        Database.open(home)
    assert "later one" in str(refused.value.hint)


def test_a_process_killed_in_a_migration_leaves_the_old_schema(tmp_path):
    stall = (
        "import os, sys, inlay.service.state.database\n"
        "from alembic import command\n"
        "real = command.upgrade\n"
        "def upgraded(*arguments): real(*arguments); os.kill(os.getpid(), 9)\n"
        "command.upgrade = upgraded\n"
        "from inlay.service.state import Database; Database.open(sys.argv[1])"
    )
    killed = open_elsewhere(tmp_path, stall)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert read_revision(ServicePaths(tmp_path).database) is None
    Database.open(tmp_path).close()
    assert read_revision(ServicePaths(tmp_path).database) == schema.HEAD


def test_what_was_acknowledged_is_there_after_a_kill(home):
    writer = (
        "import sys\n"
        "from inlay.service.state import Database, Tenants\n"
        "db = Database.open(sys.argv[1])\n"
        "for number in range(100000):\n"
        "    Tenants(db).add(f't-{number}')\n"
        "    print(number, flush=True)\n"
    )
    for _ in range(3):
        process = open_elsewhere(home, writer)
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(5)]
        process.kill()
        told += [int(line) for line in process.stdout.read().split()]
        process.communicate()
        db = Database.open(home)
        names = [tenant.name for tenant in Tenants(db).list()]
        assert {f"t-{number}" for number in told} <= set(names)
        assert len(names) <= len(told) + 2  # `local`, and one that nobody heard of
        with db.writing() as connection:
            connection.execute(schema.tenants.delete().where(schema.tenants.c.name != "local"))
            assert IS_POSTGRES or connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
        db.close()


def test_a_transaction_that_fails_leaves_nothing(db):
    def fail() -> None:
        with db.writing() as connection:
            connection.execute(insert(schema.revisions).values(name="half", value=1))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with db.reading() as connection:
        assert connection.execute(select(func.count()).where(schema.revisions.c.name == "half")).scalar() == 0


@pytest.mark.sqlite
def test_a_full_disk_is_an_error_that_says_so_and_changes_nothing(db, workspace):
    dataset = make_dataset(workspace)
    train(workspace)
    corrections = [Correction("word " * 200, "spam") for _ in range(200)]
    with db.writing() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
    engine = db._engine
    held = [engine.connect() for _ in range(4)]
    for connection in held:  # SQLite says SQLITE_FULL here as it does on a full disk
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 2}")
        connection.close()
    with pytest.raises(DiskFull, match="no room"):
        workspace.add_feedback("mail", corrections)
    assert workspace.num_feedback("mail") == 0
    assert workspace.dataset(dataset.id) == dataset


@pytest.mark.sqlite
def test_a_lock_held_for_too_long_is_an_error_that_says_so(db, monkeypatch):
    monkeypatch.setattr("inlay.service.state.database.BUSY_S", 0.2)
    other = sqlite3.connect(db.paths.database, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with db._engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout = 50")
    with pytest.raises(StoreBusy):
        db.probe()
    other.execute("ROLLBACK")
    other.close()
    db.probe()


def test_threads_wait_for_each_other_in_turn(db):
    def count() -> None:
        for _ in range(10):
            db.probe()

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with db.reading() as connection:
        query = select(schema.revisions.c.value).where(schema.revisions.c.name == "probe")
        assert connection.execute(query).scalar() == 80


@pytest.mark.sqlite
def test_a_damaged_file_is_an_error_that_says_so(home):
    ServicePaths(home).database.write_bytes(b"no database at all, " * 1000)
    with pytest.raises(StoreDamaged, match="damaged"):
        Database.open(home)


def test_no_error_carries_the_values_of_its_statement(db):
    def insert_twice() -> None:
        with db.writing() as connection:
            for _ in range(2):
                connection.execute(insert(schema.revisions).values(name="a customer's text", value=1))

    with pytest.raises(IntegrityError) as failed:
        insert_twice()
    assert "customer" not in str(failed.value)


def test_the_revision_grows_with_keys_and_not_with_usage(db, workspace):
    before = db.revision()
    workspace.add_usage("mail", rows=1, tokens=2)
    db.meter.flush()
    assert db.revision() == before
    Keys(db).make("acme")
    assert db.revision() > before


def test_another_process_is_heard_at_once(db, home):
    keys = Keys(db)
    assert not keys.exist()
    maker = "import sys; from inlay.service.state import *; print(Keys(Database.open(sys.argv[1])).make('local')[1])"
    process = open_elsewhere(home, maker)
    secret, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert keys.exist()
    key = keys.check(secret.strip())
    process = open_elsewhere(
        home, f"import sys; from inlay.service.state import *; Keys(Database.open(sys.argv[1])).revoke('{key.id}')"
    )
    process.communicate(timeout=60)
    with pytest.raises(Exception, match="not valid"):
        keys.check(secret.strip())


def test_a_forked_child_has_connections_of_its_own(db):
    db.probe()
    child = os.fork()
    if child == 0:
        try:
            db.probe()
            db.revision()
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    db.probe()


@pytest.mark.sqlite
def test_the_log_is_emptied(db):
    db.probe()
    log = db.paths.database.with_name("service.db-wal")
    assert log.stat().st_size > 0
    assert db.checkpoint()
    assert log.stat().st_size == 0


@pytest.mark.sqlite
def test_a_checkpoint_gives_up_soon_while_somebody_reads(db):
    with db.reading() as connection:
        connection.execute(select(schema.tenants)).all()
        db.probe()
        began = time.monotonic()
        assert not db.checkpoint()
        assert time.monotonic() - began < 5


def test_readiness_needs_a_database_that_can_be_written(db):
    db.probe()
    assert db.free_bytes() > 0


def test_names_are_checked_before_anything_is_stored(db):
    for name in ("", "local", "Acme", "a.b", "-a", "a" * 32, "ä", "a\n"):
        with pytest.raises(BadConfig):
            Tenants(db).add(name)
