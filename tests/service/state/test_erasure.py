"""Erasure: nothing is left of a task or a tenant, in rows, files, free pages or logs, whenever it is killed."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import select
from state_makers import go_live, make_dataset, store_version, train, train_and_store

from inlay.errors import InlayError, StoreDamaged, UnknownName
from inlay.service.state import (
    LOCAL,
    Conflict,
    Correction,
    Database,
    JobNote,
    JobQueue,
    JobRequest,
    Keys,
    Sessions,
    Tenants,
    Workspace,
    erase_task,
    erase_tenant,
    run_erasure,
    schema,
    sweep_leftovers,
)

SECRET = "the customer wrote quinquireme"
STEPS = ("versions", "files", "rows", "log")


def fill(workspace: Workspace, task: str = "mail") -> None:
    """A task with a secret in everything it can be in."""
    db, queue = workspace.db, JobQueue(workspace.db)
    dataset = make_dataset(workspace, f"text,label\n{SECRET},ham\n")
    workspace.set_reading(dataset.id, {"first_rows": [[SECRET, "ham"]], "notes": [{"message": SECRET}]})
    job = train(workspace, task, dataset=dataset.id)
    cohort = queue.claim("trainer", company_s=0)
    assert cohort is not None
    run = db.paths.runs / workspace.name / job.id
    queue.note_path(cohort, job.id, run)
    run.mkdir(parents=True)
    (run / "rows.txt").write_text(SECRET)
    queue.record(cohort, job.id, JobNote("notice", SECRET, {"text": SECRET}))
    queue.finish(cohort, job.id, "failed", error={"message": SECRET})
    train_and_store(workspace, task, dataset=dataset.id)
    store_version(workspace, task, seed=7, text=SECRET)
    batch = workspace.submit(JobRequest("batch", task, dataset.id, {"note": SECRET}))
    workspace.cancel(batch.id)
    for path in (db.paths.evaluations(workspace.name, task) / "1.json", db.paths.batch(workspace.name, batch.id)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SECRET)
    workspace.add_feedback(task, [Correction(f"{SECRET} {number}", SECRET) for number in range(50)])
    workspace.feedback_dataset(task)
    call = workspace.begin_call(f"upload-{task}", "ab" * 32)
    again = make_call_dataset(workspace, call)
    train(workspace, task, dataset=again.id)
    workspace.finish_call(call, 201, {}, SECRET.encode())
    workspace.add_usage(task, rows=3, tokens=30)
    db.meter.flush()


def make_call_dataset(workspace, call):
    from inlay.service.state import DatasetDraft, UploadContent

    path = workspace.db.paths.datasets(workspace.name) / ".draft-call.csv"
    path.write_text(f"text,label\n{SECRET},x\n")
    return workspace.add_dataset(DatasetDraft(path, "x", "csv", 40, "ab" * 32, 1, UploadContent()), call)


def places_of_the_secret(home: Path) -> list[str]:
    files = [path for path in home.rglob("*") if path.is_file()]
    return [str(path) for path in files if b"quinquireme" in path.read_bytes()]


@pytest.fixture
def filled(workspace) -> Workspace:
    fill(workspace)
    return workspace


def run_erase_jobs(db: Database) -> None:
    queue = JobQueue(db)
    while (cohort := queue.claim("trainer", kinds=("erase",))) is not None:
        run_erasure(db, queue, cohort)


def test_nothing_is_left_of_an_erased_task(db, filled):
    home = db.paths.home
    assert len(places_of_the_secret(home)) > 5
    job = filled.erase_task("mail")
    with pytest.raises(UnknownName):
        filled.task("mail")
    run_erase_jobs(db)
    assert filled.job(job.id).state == "succeeded"
    assert filled.job(job.id).result["num_versions"] == 2
    assert places_of_the_secret(home) == []
    assert filled.datasets().items == ()
    assert [each.kind for each in filled.jobs().items] == ["erase"]
    assert [(item.task, item.rows) for item in filled.usage()] == [("", 3)]


def test_answers_of_a_batch_that_is_not_done_are_erased_also_if_nobody_noted_where_they_lie(db, workspace):
    train_and_store(workspace, "mail")
    batch = workspace.submit(JobRequest("batch", "mail", make_dataset(workspace, "mail").id, {}))
    part = db.paths.batch_parts(workspace.name, batch.id) / "1.1"
    part.parent.mkdir(parents=True)
    part.write_text(SECRET)
    workspace.cancel(batch.id)
    workspace.erase_task("mail")
    run_erase_jobs(db)
    assert places_of_the_secret(db.paths.home) == []
    assert not part.parent.exists()


def test_a_dataset_that_another_task_uses_stays(db, workspace):
    shared, own = make_dataset(workspace), make_dataset(workspace)
    train_and_store(workspace, "mail", dataset=shared.id)
    train_and_store(workspace, "mail", seed=1, dataset=own.id)
    train_and_store(workspace, "news", seed=2, dataset=shared.id)
    workspace.erase_task("mail")
    run_erase_jobs(db)
    assert [dataset.id for dataset in workspace.datasets().items] == [shared.id]
    assert shared.path.exists()
    assert not own.path.exists()
    workspace.erase_task("news")
    run_erase_jobs(db)
    assert workspace.datasets().items == ()


def test_others_keep_what_they_have(db, filled):
    Tenants(db).add("rival")
    rival = Workspace(db, "rival")
    mine = train_and_store(rival, "mail", seed=3, dataset=make_dataset(rival).id)
    by_hand = store_version(Workspace(db, LOCAL), "mail", seed=4)
    other = train_and_store(filled, "news", seed=5)
    filled.erase_task("mail")
    run_erase_jobs(db)
    for version in (mine, by_hand, other):
        db.store.check(version)
    assert rival.resolve("mail").digest == mine.digest
    assert len(rival.datasets().items) == 1
    assert [task.name for task in filled.tasks().items] == ["news"]


def test_a_task_that_is_being_erased_takes_nothing_in(db, queue, filled):
    job = filled.jobs(state="queued").items[0]
    cohort = queue.claim("trainer", company_s=0)
    filled.erase_task("mail")
    with pytest.raises(Conflict):
        queue.publish_live(cohort, job.id, None)
    with pytest.raises(Conflict, match="being erased"):
        train(filled)
    for call in (lambda: filled.add_feedback("mail", [Correction("a", "b")]), lambda: filled.erase_task("mail")):
        with pytest.raises(UnknownName):
            call()


def test_erasure_waits_for_the_trainer_to_stop(db, queue, filled):
    cohort = queue.claim("trainer", company_s=0)
    (job,) = cohort.jobs
    filled.erase_task("mail")
    assert queue.claim("trainer", kinds=("erase",)) is None
    with pytest.raises(Conflict, match="still works"):
        erase_task(db, "acme", "mail")
    assert queue.heartbeat(cohort).cancelled == (job.id,)
    queue.finish(cohort, job.id, "cancelled")
    run_erase_jobs(db)
    assert places_of_the_secret(db.paths.home) == []


def test_an_erased_name_can_be_used_again_and_numbers_go_on(db, workspace):
    train_and_store(workspace, seed=1)
    workspace.erase_task("mail")
    run_erase_jobs(db)
    assert train_and_store(workspace, seed=2).number == 2
    assert workspace.resolve("mail").number == 2
    assert [move.from_version for move in workspace.history("mail")] == [None]


def test_only_what_was_marked_is_erased(db, filled):
    with pytest.raises(Conflict, match="not marked"):
        erase_task(db, "acme", "mail")
    with pytest.raises(Conflict, match="not marked"):
        erase_tenant(db, "acme")
    erase_task(db, "acme", "never-was")
    erase_tenant(db, "never-was")


def test_an_erasure_cannot_be_cancelled(filled):
    job = filled.erase_task("mail")
    with pytest.raises(Conflict):
        filled.cancel(job.id)


def test_nothing_is_left_of_a_removed_tenant(db, filled, clock):
    key, _ = Keys(db).make("acme")
    Sessions(db).begin(key, 1000.0)
    fill(filled, "news")
    store_version(filled, "zombie", seed=9, text=SECRET)
    Tenants(db).remove("acme")
    for wait in (21, 11):  # a trainer that died with a job of the tenant's is waited for
        run_erase_jobs(db)
        assert places_of_the_secret(db.paths.home)
        clock.now += wait
    run_erase_jobs(db)
    assert places_of_the_secret(db.paths.home) == []
    assert [tenant.name for tenant in Tenants(db).list()] == [LOCAL]
    with db.reading() as connection:
        for table in schema.metadata.sorted_tables:
            if "tenant" in table.c:
                assert connection.execute(select(table).where(table.c.tenant == "acme")).all() == [], table.name
        for table in (schema.cohorts, schema.cohort_members, schema.job_events, schema.sessions):
            assert connection.execute(select(table)).all() == [], table.name
    assert not any((db.paths.service / kind / "acme").exists() for kind in ("datasets", "evaluations", "runs"))
    Tenants(db).add("acme")
    assert filled.tasks().items == ()


def test_a_task_trained_by_hand_can_be_erased(db):
    local = Workspace(db, LOCAL)
    store_version(local, "spam", text=SECRET)
    local.erase_task("spam")
    run_erase_jobs(db)
    assert local.tasks().items == ()
    assert places_of_the_secret(db.paths.home) == []


def test_an_erasure_that_failed_is_queued_again(db, queue, filled, monkeypatch):
    job = filled.erase_task("mail")
    with monkeypatch.context() as patch:
        patch.setattr("inlay.store.Store.erase", lambda store, name: (_ for _ in ()).throw(damaged()))
        with pytest.raises(StoreDamaged):
            run_erasure(db, queue, queue.claim("trainer", kinds=("erase",)))
    assert filled.job(job.id).state == "failed"
    assert queue.claim("trainer", kinds=("erase",)) is None
    sweep_leftovers(db)
    sweep_leftovers(db)
    run_erase_jobs(db)
    assert places_of_the_secret(db.paths.home) == []
    assert len([each for each in filled.jobs().items if each.kind == "erase"]) == 2


def damaged() -> InlayError:
    return StoreDamaged("a reference is damaged", "restore it")


@pytest.mark.parametrize("step", STEPS)
def test_an_erasure_killed_at_any_step_is_finished_by_the_next(db, filled, step):
    filled.erase_task("mail")
    home = db.paths.home
    child = os.fork()
    if child == 0:
        own = Database.open(home, clock=db.now)
        erase_task(own, "acme", "mail", lambda now: os.kill(os.getpid(), signal.SIGKILL) if now == step else None)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    run_erase_jobs(db)
    assert places_of_the_secret(home) == []
    assert filled.datasets().items == ()


@pytest.mark.sqlite
def test_deleted_rows_are_in_no_free_page(db, workspace):
    go_live(workspace)
    workspace.add_feedback("mail", [Correction(SECRET * 50, "spam") for _ in range(100)])
    assert places_of_the_secret(db.paths.home)
    workspace.erase_task("mail")
    run_erase_jobs(db)
    assert places_of_the_secret(db.paths.home) == []
    with sqlite3.connect(db.paths.database) as connection:
        assert connection.execute("PRAGMA freelist_count").fetchone()[0] > 0  # there are free pages, and they are clean
    connection.close()
