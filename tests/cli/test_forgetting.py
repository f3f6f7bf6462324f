"""Forgetting a task, and the runs of a store: what is said to be gone is nowhere on the disk."""

from __future__ import annotations

import json
import os
import platform
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.numpy

from inlay.data import readers, token_cache
from inlay.data.data_files import RawFile
from inlay.errors import Missing, Unsupported
from inlay.locks import claim
from inlay.reports import RunEntry, delete_runs, forget_task, list_runs
from inlay.store import Store

from .conftest import SETTINGS, Inlay, Mail, write_mail

MARKER = "xylophone"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of tokenised texts of one's own, that keeps small sets too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("INLAY_CACHE_BYTES", str(1 << 30))
    monkeypatch.setattr(token_cache, "SMALL_CHARACTERS", 0)
    monkeypatch.setattr(token_cache, "_MEMORY", token_cache.MemoryCache())
    return tmp_path / "cache"


def write_secret(path: Path) -> Path:
    rows = write_mail(path, 60, seed=11).read_text().replace("free", MARKER)
    path.write_text(rows)
    return path


def find_bytes(folders: list[Path], wanted: bytes) -> list[Path]:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if wanted in path.read_bytes()]


def list_places(store: Store, name: str) -> list[bytes]:
    """The bytes of a tensor of each version and of each run of a task."""
    paths = [store.files.find_object(info.version.digest) for info in store.versions(name)]
    paths += [path for entry in list_runs(store) if name in entry.tasks for path in entry.folder.glob("*.safetensors")]
    tensors = [safetensors.numpy.load_file(path) for path in paths]
    return [max(found.values(), key=lambda tensor: tensor.size).tobytes()[:64] for found in tensors]


def age(folder: Path) -> None:
    """Let a folder look as if nothing had changed for an hour."""
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 3600, time.time() - 3600))


def test_nothing_of_a_forgotten_task_is_on_the_disk_and_it_does_not_come_back(
    inlay: Inlay, mail: Mail, cache: Path, tmp_path: Path
) -> None:
    # 1. a task with two versions, a sweep, folds and a run that was not published, beside another task
    secret = write_secret(tmp_path / "secret.csv")
    where = ("--backbone", mail.backbone, *SETTINGS)
    assert inlay("train", secret, "--folds", 2, *where).status == 0
    assert inlay("train", secret, "--task", "hidden", "--name", "secret", "--set", "train.seed=7", *where).status == 0
    assert inlay("train", secret, "--task", "aside", "--no-publish", "--set", "train.seed=8", *where).status == 0
    assert inlay("sweep", secret, "--lr", "1e-3,1e-2", "--size", "4", "--epochs", "1", *where[:2]).status == 0
    store, places = Store(mail.store), [mail.store, cache]
    weights = list_places(store, "secret") + list_places(store, "mail")[:1]
    others = weights.pop()
    assert len(weights) >= 5
    found = find_bytes(places, MARKER.encode())
    assert {path.name for path in found} >= {"report.html"}
    assert any(path.parent.parent.name == "objects" for path in found), "probes"
    tokens = cache / "inlay" / "tokens"
    assert any(tokens.iterdir())
    # 2. forgotten, after an ordinary removal of all its versions
    assert inlay("remove", "secret").status == 0
    assert all(find_bytes(places, each) for each in weights)
    ended = inlay("remove", "secret", "--forget", "--json")
    assert ended.status == 0, ended.err
    # 3. no text, no weight, no tokens; the other task stands
    assert find_bytes(places, MARKER.encode()) == []
    assert not any(find_bytes(places, each) for each in weights)
    assert not any(tokens.iterdir())
    assert find_bytes(places, others)
    assert inlay("verify").status == 0
    assert [entry.tasks for entry in list_runs(store)] == [("mail",)]
    # 4. it does not come back: the same training is done anew, and numbers that were given are spent
    again = inlay("train", secret, *where, "--json")
    assert again.data["was_finished"] is False
    assert again.data["reference"] == "secret@4"


def test_a_signed_link_stays_nowhere_and_its_run_is_resumed_reported_and_forgotten(
    inlay: Inlay, mail: Mail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_secret(tmp_path / "rows.csv")

    def download(url: str) -> RawFile:
        if "s3cret" not in url:
            raise Missing(f"`{url}` answered 403 Forbidden", "a private file needs a signed link")
        return RawFile("https://data.test/linked.csv", ".csv", rows, rows.stat().st_size)

    monkeypatch.setattr(readers, "download", download)
    link, where = "https://data.test/linked.csv?signature=s3cret", ("--backbone", mail.backbone, *SETTINGS)
    first = inlay("train", link, *where)
    assert first.status == 0, first.err
    # 1. on no screen and in no file
    again = inlay("train", link + "2", *where, "--json")  # signed anew, the same rows
    listed, compared = inlay("runs", "list", "--json"), inlay("runs", "compare", *[e.id for e in list_runs(Store())])
    for ended in (first, again, listed, compared, inlay("show", "linked"), inlay("suggest", link, *where[:2])):
        assert ended.status == 0, ended.err
        assert "s3cret" not in ended.out + ended.err
    assert find_bytes([mail.store], b"s3cret") == []
    assert find_bytes([mail.store], b"https://data.test/linked.csv#address-")
    # 2. the same run, whose rows are found where they are said to be
    assert again.data["was_finished"] is True
    gone = inlay("report", "linked", "--html", tmp_path / "page.html", "--card", tmp_path / "card.md")
    assert "403 Forbidden" in gone.err
    assert "the part of its link after `?` is not kept" in gone.err
    assert inlay("report", "linked", "--data", link, "--json").status == 0
    # 3. forgotten, also what was trained of the same rows by a newer link without being published
    aside = ("--task", "aside", "--no-publish", "--set", "train.seed=7")
    assert inlay("train", link + "3", *aside, *where).status == 0
    assert inlay("train", link, "--test", link, *aside, *where).status == 0
    assert inlay("remove", "linked", "--forget").status == 0
    assert find_bytes([mail.store], MARKER.encode()) == []
    assert {entry.tasks for entry in list_runs(Store(mail.store))} == {("mail",)}


def test_a_resume_state_with_the_weights_of_a_forgotten_task_goes_too(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    store = Store(mail.store)
    (entry,) = list_runs(store)
    cohort = mail.store / "runs" / "cohorts" / "0123456789abcdef"
    cohort.mkdir()
    (cohort / "cohort.json").write_text(json.dumps({"runs": [entry.id, "f" * 16]}))
    marker = struct.pack("<4f", 0.125, -7.5, 3.25, 99.0)
    (cohort / "state.safetensors").write_bytes(marker)
    (cohort / "previous.safetensors").write_bytes(marker)
    unknown = cohort.with_name("fedcba9876543210")
    unknown.mkdir()
    (unknown / "state.safetensors").write_bytes(marker)
    ended = inlay("remove", "mail", "--forget")
    assert ended.status == 0, ended.err
    assert "removed mail@1" in ended.out
    assert find_bytes([mail.store], marker) == []
    assert not list((mail.store / "objects").rglob("*.safetensors"))


def test_what_cannot_be_forgotten_is_refused_and_left_alone(inlay: Inlay, mail: Mail) -> None:
    one = inlay("remove", "mail@1", "--forget")
    assert one.status == 2
    assert "a task is forgotten as a whole" in one.err
    assert inlay("remove", "other", "--forget").status == inlay("remove", "other").status
    (run,) = list_runs(Store(mail.store))
    (run.folder / "result.json").rename(run.folder / "away.json")
    (run.folder / "metrics.jsonl").touch()
    (lock,) = run.folder.parent.glob("cohorts/*/training.lock")
    with claim(lock, [run.id]):
        age(run.folder)  # however long an epoch takes
        busy = inlay("remove", "mail", "--forget")
        assert f"process {os.getpid()} of `{platform.node()}` is training it" in busy.err
        assert inlay("gc", "--runs").status == 0
        assert inlay("runs", "delete", run.id, "--force").status != 0
        assert run.folder.is_dir()
    (run.folder / "away.json").rename(run.folder / "result.json")
    (mail.store / "service" / "evaluations" / "local" / "mail").mkdir(parents=True)
    served = inlay("remove", "mail", "--forget")
    assert "belongs to the service in this store" in served.err
    assert inlay("verify", "mail").status == 0


def test_whether_a_run_is_being_trained_is_told_by_its_lock_and_else_by_the_age_of_its_files(mail: Mail) -> None:
    (run,) = list_runs(Store(mail.store))
    assert not run.is_busy, "it is finished"
    (run.folder / "result.json").unlink()
    (lock,) = run.folder.parent.glob("cohorts/*/training.lock")
    assert json.loads(lock.read_text())["names"] == [run.id], "it was claimed while it was trained"

    def look() -> RunEntry:
        return next(entry for entry in list_runs(Store(mail.store)) if entry.id == run.id)

    (run.folder / "metrics.jsonl").touch()
    assert look().trainer == "", "killed a moment ago: nobody holds its lock"
    with claim(lock, [run.id]), claim(lock, [run.id]):
        assert "is training it" in look().trainer
    elsewhere = json.loads(lock.read_text()) | {"host": "elsewhere"}
    lock.write_text(json.dumps(elsewhere))
    assert "it may be training now" in look().trainer, "another machine's locks may not be seen here"
    lock.unlink()
    assert "it may be training now" in look().trainer, "a folder of before there were locks"
    age(run.folder)
    assert look().trainer == ""


def test_a_run_that_another_process_trains_is_busy_however_old_its_files_are(mail: Mail) -> None:
    (run,) = list_runs(Store(mail.store))
    (run.folder / "result.json").unlink()
    (lock,) = run.folder.parent.glob("cohorts/*/training.lock")
    program = f"""
import sys
from pathlib import Path
from inlay.locks import claim
with claim(Path({str(lock)!r}), [{run.id!r}]):
    print("claimed", flush=True)
    sys.stdin.read()
"""
    age(run.folder)
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"claimed\n"
        (entry,) = list_runs(Store(mail.store))
        assert entry.trainer.startswith(f"process {process.pid} of ")
        with pytest.raises(Unsupported, match="is training it"):
            delete_runs(Store(mail.store), [entry])
    finally:
        process.kill()
        process.communicate()
    (entry,) = list_runs(Store(mail.store))
    assert not entry.is_busy, "a process that dies lets go"


def test_a_task_of_a_service_on_object_storage_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INLAY_LOCAL", str(tmp_path / "local"))
    store = Store(f"file://{tmp_path}/bucket")
    assert store.storage is not None
    store.storage.put("service/evaluations/acme/mail/1.json", b"{}")
    with pytest.raises(Unsupported, match="belongs to the service"):
        forget_task(store, "acme.mail")


def copy_run(entry: RunEntry, run_id: str, *changes: tuple[str, str]) -> None:
    """Copy a run's folder under another id, with other words in its settings."""
    folder = entry.folder.with_name(run_id)
    shutil.copytree(entry.folder, folder, dirs_exist_ok=True)
    settings = (folder / "config.toml").read_text()
    for old, new in changes:
        assert old in settings
        settings = settings.replace(old, new)
    (folder / "config.toml").write_text(settings)


def test_runs_of_other_tasks_that_came_from_stdin_are_left(inlay: Inlay, mail: Mail) -> None:
    (entry,) = list_runs(Store(mail.store))
    source = json.dumps(entry.source)
    copy_run(entry, "f" * 16, (source, '"-"'), ('task = "mail"', 'task = "aside"'))
    entry.folder.with_name("f" * 16).joinpath("rows.digest").write_text("of other rows\n")
    text = (entry.folder / "config.toml").read_text()
    (entry.folder / "config.toml").write_text(text.replace(source, '"-"'))
    assert inlay("remove", "mail", "--forget").status == 0
    assert [found.tasks for found in list_runs(Store(mail.store))] == [("aside",)]


def test_a_run_that_is_named_twice_is_deleted_once(inlay: Inlay, mail: Mail) -> None:
    (entry,) = list_runs(Store(mail.store))
    copy_run(entry, "f" * 16)
    (entry.folder.with_name("f" * 16) / "result.json").touch()
    ended = inlay("runs", "delete", "f" * 16, "ffff", "--json")
    assert ended.status == 0, ended.err
    assert ended.data["runs"] == ["f" * 16]


def test_content_that_another_task_has_stands(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    assert inlay("export", "mail", "-o", tmp_path / "mail.inlay").status == 0
    assert inlay("import", tmp_path / "mail.inlay", "--name", "twin").status == 0
    ended = inlay("remove", "mail", "--forget")
    assert "still there: twin@1" in ended.err
    assert inlay("verify", "twin").status == 0


def test_gc_deletes_runs_that_no_version_came_of(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    rows = write_mail(tmp_path / "aside.csv", 40, seed=3)
    where = ("--backbone", mail.backbone, *SETTINGS)
    run = inlay("train", rows, "--no-publish", *where, "--json").data["run"]
    assert inlay("gc").status == 0
    assert len(list_runs(Store(mail.store))) == 2, "without --runs they stay"
    told = inlay("gc", "--runs", "--dry-run", "--json")
    assert told.data["runs"]["runs"] == [run]
    assert len(list_runs(Store(mail.store))) == 2
    assert "deleted 1 run folder" in inlay("gc", "--runs").out
    assert [entry.versions for entry in list_runs(Store(mail.store))] == [("mail@1",)]
    assert inlay("remove", "mail").status == 0
    assert inlay("gc", "--runs").status == 0
    assert not list(mail.store.rglob("*.safetensors"))


def test_gc_keeps_a_run_that_can_go_on(inlay: Inlay, mail: Mail) -> None:
    (run,) = list_runs(Store(mail.store))
    stopped = run.folder.with_name("a" * 16)
    stopped.mkdir()
    (stopped / "config.toml").write_bytes((run.folder / "config.toml").read_bytes())
    lost = run.folder.with_name("b" * 16)
    lost.mkdir()
    (lost / "config.toml").write_bytes((run.folder / "config.toml").read_bytes())
    cohort = run.folder.parent / "cohorts" / "0123456789abcdef"
    cohort.mkdir()
    (cohort / "cohort.json").write_text(json.dumps({"runs": [stopped.name]}))
    (cohort / "state.safetensors").write_bytes(b"state")
    age(run.folder.parent)
    ended = inlay("gc", "--runs")
    assert "kept 1 unfinished run that can be continued" in ended.err
    assert {entry.id for entry in list_runs(Store(mail.store))} == {run.id, stopped.name}
    assert (cohort / "state.safetensors").is_file()


def test_runs_are_listed_compared_and_deleted(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    where = ("--backbone", mail.backbone, *SETTINGS, "--no-publish", "--task", "mail", "--test-share", "0.2")
    other = inlay("train", mail.data, *where, "--set", "train.seed=5", "--json").data["run"]
    listed = inlay("runs", "list", "--json").data["runs"]
    assert listed[0]["id"] == other
    first = listed[1]
    assert first["versions"] == ["mail@1"]
    assert first["status"] in ("finished", "stopped-early")
    assert first["num_bytes"] > 1000
    plain = inlay("runs", "list", "--task", "mail")
    assert other in plain.out
    assert "mail@1" in plain.out
    assert "no runs of the task" in inlay("runs", "list", "--task", "none").err
    compared = inlay("runs", "compare", other, first["id"][:6], "--json")
    assert compared.data["differences"] == {"train.seed": [5, 0]}
    assert "train.seed" in inlay("runs", "compare", other, first["id"]).out
    assert inlay("runs", "compare", other).status == 2
    refused = inlay("runs", "delete", first["id"])
    assert "was published as mail@1" in refused.err
    assert "no run named `zzz`" in inlay("runs", "delete", "zzz").err
    assert inlay("runs", "delete", other).out.startswith(f"deleted run {other}")
    assert inlay("runs", "delete", first["id"], "--force").status == 0
    assert list_runs(Store(mail.store)) == []
    assert inlay("verify", "mail").status == 0, "a version needs no run"
