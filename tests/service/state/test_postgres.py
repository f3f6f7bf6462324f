"""What only Postgres has to hold: a database that is lost, and answers that come back with it."""

from __future__ import annotations

import threading
import time

import pytest
from postgres_server import IS_POSTGRES, end_connections, url_of
from state_makers import START, make_dataset, train

from inlay.errors import BadConfig, Missing, StoreUnreachable
from inlay.service.state import Database, JobQueue, Keys, Tenants

needs_postgres = pytest.mark.skipif(not IS_POSTGRES, reason="`make postgres` runs it")


def name_of(db: Database) -> str:
    return str(db._engine.url.database)


def test_nobody_at_the_address_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    pytest.importorskip("psycopg")
    monkeypatch.setenv("INLAY_DATABASE", "postgresql://inlay:secret@127.0.0.1:9/inlay")
    with pytest.raises(StoreUnreachable, match="does not answer") as refused:
        Database.open(tmp_path)
    assert "secret" not in str(refused.value)
    assert "INLAY_DATABASE" in str(refused.value.hint)


@needs_postgres
def test_a_wrong_user_or_database_is_an_error_that_says_so(tmp_path, monkeypatch):
    for address, said in (("postgresql://nobody-at-all:secret@/inlay", "nobody-at-all"), (url_of("nix"), "nix")):
        monkeypatch.setenv("INLAY_DATABASE", address)
        with pytest.raises(StoreUnreachable, match=f"refuses: .*{said}") as refused:
            Database.open(tmp_path)
        assert "check the user, password and database" in refused.value.hint


def test_an_address_that_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("INLAY_DATABASE", "somewhere")
    with pytest.raises(Missing, match="not the address of a database"):
        Database.open(tmp_path)


@needs_postgres
def test_a_home_of_postgres_is_not_opened_with_sqlite_by_mistake(home, monkeypatch):
    Database.open(home).close()
    monkeypatch.delenv("INLAY_DATABASE")
    with pytest.raises(Missing, match="is in Postgres"):
        Database.open(home)


@pytest.mark.sqlite
def test_a_home_of_sqlite_is_not_opened_with_postgres_by_mistake(home, monkeypatch):
    monkeypatch.setenv("INLAY_DATABASE", "postgresql://127.0.0.1:9/inlay")
    with pytest.raises(BadConfig, match="is in SQLite"):
        Database.open(home)


@needs_postgres
def test_connections_that_were_ended_are_opened_anew(db, workspace):
    make_dataset(workspace)
    for _ in range(5):
        end_connections(name_of(db))
        train(workspace)
        end_connections(name_of(db))
        assert Keys(db).list("acme") == []
        db.revision()
    assert len(workspace.jobs().items) == 5


@needs_postgres
def test_a_transaction_that_loses_its_connection_leaves_nothing_and_says_so(db, workspace):
    dataset = make_dataset(workspace)

    def change() -> None:
        with db.writing() as connection:
            connection.exec_driver_sql("UPDATE datasets SET name = 'half'")
            end_connections(name_of(db))
            connection.exec_driver_sql("UPDATE datasets SET name = 'whole'")

    with pytest.raises(StoreUnreachable):
        change()
    assert workspace.dataset(dataset.id) == dataset


@needs_postgres
def test_trainers_claim_each_job_once_while_connections_are_ended(db, workspace, home, clock):
    make_dataset(workspace)
    for _ in range(12):
        train(workspace)
    clock.now = START + 60
    claimed, stop = [], threading.Event()

    opened = [Database.open(home, clock=clock) for _ in range(3)]

    def claim(own: Database, owner: str) -> None:
        while not stop.is_set():
            try:
                cohort = JobQueue(own).claim(owner, most=2)
            except StoreUnreachable:
                continue
            if cohort is not None:
                claimed.extend(job.id for job in cohort.jobs)

    threads = [threading.Thread(target=claim, args=(own, f"trainer-{number}")) for number, own in enumerate(opened)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    while len(claimed) < 8 and time.monotonic() < until:
        end_connections(name_of(db))
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join()
    for own in opened:
        own.close()
    assert claimed
    assert len(claimed) == len(set(claimed))


@needs_postgres
def test_another_process_hears_of_a_change_soon(db, home, clock):
    other = Database.open(home, clock=clock)
    before = other.revision()
    Tenants(db).add("late")
    until = time.monotonic() + 5
    while other.revision() == before:
        assert time.monotonic() < until
    other.close()
