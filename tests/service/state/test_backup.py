"""Backup of a service that works on, and restoring: one moment, every byte checked, nothing half-made."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from state_makers import go_live, make_dataset, publication, train, train_and_store

from inlay.errors import BadConfig, BadData, InlayError, Missing
from inlay.service.state import Correction, Database, JobQueue, Keys, Workspace, back_up, restore
from inlay.store import Store

pytestmark = pytest.mark.sqlite


def test_a_restored_service_has_all_there_was(db, workspace, tmp_path):
    dataset = make_dataset(workspace)
    version = train_and_store(workspace, dataset=dataset.id)
    workspace.add_feedback("mail", [Correction("win", "spam")])
    _, text = Keys(db).make("acme")
    evaluation = db.paths.evaluations("acme", "mail") / "1.json"
    evaluation.parent.mkdir(parents=True)
    evaluation.write_text("{}")
    report = back_up(db.paths.home, tmp_path / "backup")
    assert report.num_files >= 5
    assert report.num_bytes > 1000
    restore(tmp_path / "backup", tmp_path / "new")
    new = Database.open(tmp_path / "new")
    found = Workspace(new, "acme")
    assert Keys(new).check(text).tenant == "acme"
    assert found.resolve("mail").digest == version.digest
    assert found.dataset(dataset.id).path.read_bytes() == dataset.path.read_bytes()
    assert found.num_feedback("mail") == 1
    assert (new.paths.evaluations("acme", "mail") / "1.json").read_text() == "{}"
    Store(tmp_path / "new").check(version)
    assert new.paths.service.stat().st_mode & 0o077 == 0
    new.close()


def test_what_ran_goes_on_without_blame_where_it_is_restored(db, workspace, queue, tmp_path):
    job = train(workspace)
    queue.claim("trainer", company_s=0)
    workspace.begin_call("once", "ab" * 32)
    back_up(db.paths.home, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "new")
    new = Database.open(tmp_path / "new", clock=db.now)
    restored, ws = JobQueue(new), Workspace(new, "acme")
    assert ws.job(job.id).deaths == 0
    cohort = restored.claim("trainer")
    assert cohort.members == (job.id,)
    assert cohort.token == 2
    restored.publish_live(cohort, job.id, publication())
    ws.begin_call("once", "cd" * 32)
    new.close()


def test_a_backup_is_of_one_moment_while_others_write_and_erase(db, workspace, tmp_path):
    from inlay.service.state import erase_task

    ending, failed = threading.Event(), []

    def work() -> None:
        number = 0
        try:
            while not ending.is_set():
                number += 1
                name = f"task-{number}"
                train_and_store(workspace, name, seed=number, dataset=make_dataset(workspace).id)
                if number % 2:
                    workspace.erase_task(name)
                    erase_task(db, "acme", name)
        except InlayError as error:
            failed.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for number in range(6):
            back_up(db.paths.home, tmp_path / f"backup-{number}")
    finally:
        ending.set()
        worker.join()
    assert failed == []
    for number in range(6):
        home = tmp_path / f"new-{number}"
        restore(tmp_path / f"backup-{number}", home)
        new = Database.open(home)
        found = Workspace(new, "acme")
        for dataset in found.datasets(limit=200).items:
            assert dataset.path.is_file()
        for task in found.tasks(limit=200).items:
            live = found.live(task.name)
            assert live is None or new.store.load(new.store.resolve(f"acme.{task.name}@{live}"))
        new.close()


def test_a_damaged_backup_is_refused_and_leaves_nothing(db, workspace, tmp_path):
    dataset = make_dataset(workspace)
    backup = tmp_path / "backup"
    back_up(db.paths.home, backup)
    kept = backup / dataset.path.relative_to(db.paths.home)
    content = kept.read_bytes()
    for damage in (lambda: kept.write_bytes(content[:-1]), lambda: kept.write_bytes(b"x" * len(content)), kept.unlink):
        damage()
        with pytest.raises(BadData):
            restore(backup, tmp_path / "new")
        assert not (tmp_path / "new").exists()
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".draft")] == []


@pytest.mark.parametrize(
    "said", ["", "[]", '{"files": 3}', '{"files": {"../x": [1, "a"]}}', '{"files": {"/x": [1, "a"]}}']
)
def test_a_list_that_is_none_is_refused(db, tmp_path, said):
    backup = tmp_path / "backup"
    back_up(db.paths.home, backup)
    (backup / "backup.json").write_text(said)
    with pytest.raises(BadData):
        restore(backup, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten(db, workspace, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(BadConfig, match="not empty"):
        back_up(db.paths.home, tmp_path / "full")
    with pytest.raises(BadConfig, match="in the folder"):
        back_up(db.paths.home, db.paths.home / "backup")
    back_up(db.paths.home, tmp_path / "backup")
    with pytest.raises(BadConfig, match="not empty"):
        restore(tmp_path / "backup", db.paths.home)
    with pytest.raises(Missing, match="no service"):
        back_up(tmp_path / "nothing", tmp_path / "other")
    with pytest.raises(Missing, match="no backup"):
        restore(tmp_path / "full", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_backup_says_what_is_in_it_and_leaves_no_links_behind(db, workspace, tmp_path):
    go_live(workspace)
    report = back_up(db.paths.home, tmp_path / "backup")
    listed = json.loads((tmp_path / "backup" / "backup.json").read_text())
    assert listed["schema"] == "0003"
    assert len(listed["files"]) == report.num_files
    assert not list(db.paths.service.glob(".draft-backup*"))
    names = {
        str(path.relative_to(tmp_path / "backup")) for path in Path(tmp_path / "backup").rglob("*") if path.is_file()
    }
    assert names == {*listed["files"], "backup.json"}
