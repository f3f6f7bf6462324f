"""The store's promises inside one process."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inlay.errors import BadConfig, BadData, InlayError, Missing, StoreDamaged, UnknownName
from inlay.store import Manifest, Store, Version, write_atomically
from inlay.store.format import Export, encode_object

DOCS = Path(__file__).parents[2] / "docs"
in_a_folder = pytest.mark.parametrize("store", ["folder"], indirect=True)
"""for what is about a folder's own files; test_bucket.py has the like for object storage"""


def folder_of(store: Store) -> Path:
    """The folder with a store's bytes."""
    return Path(store.place.removeprefix("file://"))


def files_of(store: Store) -> dict[str, bytes]:
    paths = [path for path in folder_of(store).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder_of(store))): path.read_bytes() for path in paths}


def object_path(store: Store, version: Version) -> Path:
    """The file with a version's content; on object storage each upload has a key of its own."""
    place = folder_of(store) / "objects" / version.digest[:2] / version.digest
    return max(place.glob("*")) if store.is_remote else place.with_suffix(".safetensors")


def look_again(store: Store) -> Store:
    """The store as a machine sees it that has kept nothing of it."""
    if store.is_remote:
        shutil.rmtree(store.root, ignore_errors=True)
    return Store(store.place)


def test_what_is_published_is_what_is_loaded(store, make_manifest, make_tensors):
    version = store.publish("spam", make_tensors(), make_manifest(), {"host": "here"})
    loaded = store.load(store.resolve("spam"))
    assert version == Version("spam", 1, version.digest)
    assert version.reference == "spam@1"
    assert loaded.manifest == make_manifest() == store.manifest(version)
    assert loaded.tensors.keys() == make_tensors().keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in make_tensors().items())
    assert store.sidecar(version) == {"host": "here"}


def test_object_is_named_by_the_sha256_of_its_bytes(store, make_manifest, make_tensors):
    version = store.publish("spam", make_tensors(), make_manifest())
    content = object_path(store, version).read_bytes()
    assert version.digest == hashlib.sha256(content).hexdigest()
    assert content == encode_object(make_tensors(), make_manifest())


@in_a_folder
def test_store_writes_safetensors_and_json_only(store, make_manifest, make_tensors):
    version = store.publish("spam", make_tensors(), make_manifest(), {"host": "here"})
    digest = version.digest
    assert files_of(store).keys() == {
        "lock",
        "lock.turn",
        "tasks/spam/1.json",
        f"objects/{digest[:2]}/{digest}.safetensors",
        f"sidecars/{digest}.json",
    }


def test_same_content_again_is_the_same_version(store, make_manifest, make_tensors):
    first = store.publish("spam", make_tensors(), make_manifest(), {"seconds": 1})
    before = files_of(store)
    assert store.publish("spam", dict(reversed(make_tensors().items())), make_manifest(), {"seconds": 2}) == first
    assert store.is_remote or files_of(store) == before  # on object storage each upload has a key of its own
    assert look_again(store).sidecar(first) == {"seconds": 1}


@in_a_folder
def test_same_content_under_another_name_shares_the_object(store, make_manifest, make_tensors):
    first = store.publish("spam", make_tensors(), make_manifest())
    second = store.publish("mail", make_tensors(), make_manifest())
    assert (second.name, second.number, second.digest) == ("mail", 1, first.digest)
    assert len(list(store.root.glob("objects/*/*"))) == 1


def test_published_version_cannot_change(store, make_manifest, make_tensors):
    store.publish("spam", make_tensors(0), make_manifest(), {"seconds": 1})
    before = files_of(store)
    for seed in range(1, 4):
        store.publish("spam", make_tensors(seed), make_manifest())
        store.publish(f"other-{seed}", make_tensors(seed), make_manifest())
    store.remove("other-1")
    store.gc()
    after = files_of(store)
    assert {path: after[path] for path in before} == before


def test_tensors_changed_after_publishing_leave_the_version_alone(store, make_manifest, make_tensors):
    tensors = make_tensors()
    version = store.publish("spam", tensors, make_manifest())
    for tensor in tensors.values():
        tensor.zero_()
    assert all(torch.equal(store.load(version).tensors[name], tensor) for name, tensor in make_tensors().items())


def test_name_means_the_latest_and_number_means_itself(store, make_manifest, make_tensors):
    published = [store.publish("spam", make_tensors(seed), make_manifest()) for seed in range(11)]
    assert [version.number for version in published] == list(range(1, 12))
    assert store.resolve("spam") == published[-1]
    assert store.resolve("spam@2") == published[1]
    assert [info.version for info in store.versions("spam")] == published


@pytest.mark.parametrize(("higher_is_better", "best"), [(True, 2), (False, 4)])
def test_best_is_the_best_dev_score_on_the_dev_data_of_the_latest(
    store, make_manifest, make_tensors, higher_is_better, best
):
    def publish(score, dev_digest="e" * 64, metric="score"):
        manifest = make_manifest(
            metrics={"dev": {metric: score}, "test": {metric: 0.5}},
            metric=metric,
            dev_digest=dev_digest,
            higher_is_better=higher_is_better,
        )
        store.publish("spam", make_tensors(), manifest)

    publish(0.99, dev_digest="other")
    publish(0.90)
    publish(math.nan)
    publish(0.70)
    publish(0.01, dev_digest="other")
    publish(0.95, metric="another")
    publish(0.80)
    assert store.resolve("spam@best").number == best


def test_version_stays_the_best_until_it_is_beaten(store, make_manifest, make_tensors):
    for seed in range(3):
        store.publish("spam", make_tensors(seed), make_manifest())
    assert store.resolve("spam@best").number == 1
    store.remove("spam@1")
    assert store.resolve("spam@best").number == 2


def test_best_without_a_dev_score_is_an_error_that_says_so(store, make_manifest, make_tensors):
    store.publish("spam", make_tensors(), make_manifest(metrics={}))
    with pytest.raises(UnknownName, match=r"spam@best.*dev accuracy"):
        store.resolve("spam@best")


def test_unknown_task_names_the_near_one(store, make_manifest, make_tensors):
    store.publish("sst2", make_tensors(), make_manifest())
    for reference in ("sst-2", "SST2", "sst-2@1", "sst-2@best"):
        with pytest.raises(UnknownName, match=r"no task named .*did you mean `sst2`"):
            store.resolve(reference)
    with pytest.raises(UnknownName, match=r"no task named `zzz`.*known: sst2"):
        store.versions("zzz")


def test_unknown_number_lists_the_numbers_and_says_if_it_was_removed(store, make_manifest, make_tensors):
    for seed in range(3):
        store.publish("spam", make_tensors(seed), make_manifest())
    store.remove("spam@2")
    with pytest.raises(UnknownName, match=r"spam@2.*it was removed; versions of `spam`: 1, 3"):
        store.resolve("spam@2")
    with pytest.raises(UnknownName, match=r"spam@7.*hint: versions of `spam`: 1, 3"):
        store.resolve("spam@7")
    store.remove("spam")
    for reference in ("spam", "spam@best"):
        with pytest.raises(UnknownName, match="all its versions were removed"):
            store.resolve(reference)
    with pytest.raises(UnknownName, match="it was removed"):
        store.resolve("spam@1")


@pytest.mark.parametrize("name", ["../evil", "a/b", "..", ".hidden", "/tmp/evil", "Spam", ""])
def test_names_cannot_leave_the_store(store, make_manifest, make_tensors, name):
    with pytest.raises(BadConfig, match="cannot name a task"):
        store.publish(name, make_tensors(), make_manifest())
    with pytest.raises(InlayError):
        store.resolve(name)
    with pytest.raises(InlayError):
        store.remove(name)
    with pytest.raises(UnknownName):
        store.run_folder(name)
    assert not store.root.exists()


def test_reading_an_absent_store_creates_nothing(store):
    assert store.ledger() == []
    assert store.gc().paths == ()
    with pytest.raises(UnknownName, match="none yet"):
        store.resolve("spam")
    assert not store.root.exists()


def test_root_is_the_argument_or_inlay_home_or_the_users_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("INLAY_HOME", str(tmp_path / "env"))
    assert Store(tmp_path / "given").root == tmp_path / "given"
    assert Store().root == tmp_path / "env"
    monkeypatch.delenv("INLAY_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store().root == tmp_path / ".inlay"
    assert Store("~/kept").run_folder("ab12") == tmp_path / "kept" / "runs" / "ab12"


def test_number_is_never_given_twice(store, make_manifest, make_tensors):
    first = store.publish("spam", make_tensors(0), make_manifest())
    second = store.publish("spam", make_tensors(1), make_manifest())
    assert store.remove("spam@2") == [second]
    assert store.publish("spam", make_tensors(1), make_manifest()).number == 3
    assert [version.number for version in store.remove("spam")] == [1, 3]
    store.gc()
    again = store.publish("spam", make_tensors(0), make_manifest())
    assert (again.number, again.digest) == (4, first.digest)
    assert store.load(again).manifest == make_manifest()


@in_a_folder
def test_remove_drops_the_reference_and_gc_the_bytes(store, make_manifest, make_tensors):
    kept = store.publish("mail", make_tensors(0), make_manifest(), {"seconds": 1})
    store.publish("spam", make_tensors(0), make_manifest())
    gone = store.publish("spam", make_tensors(1), make_manifest(), {"seconds": 2})
    store.remove("spam")
    assert [task.name for task in store.ledger()] == ["mail"]
    assert object_path(store, gone).exists()
    before = files_of(store)
    planned = store.gc(dry_run=True)
    assert files_of(store) == before
    report = store.gc()
    assert (report.num_objects, report.num_sidecars, report.num_drafts) == (1, 1, 0)
    assert report.paths == planned.paths
    lost = before.keys() - files_of(store).keys()
    assert {str(Path(path).relative_to(store.root)) for path in report.paths} == lost
    assert report.freed_bytes == planned.freed_bytes == sum(len(before[path]) for path in lost)
    store.check(kept)
    assert store.sidecar(kept) == {"seconds": 1}
    with pytest.raises(UnknownName, match="it was removed"):
        store.load(gone)


@in_a_folder
def test_gc_with_a_clock_ahead_leaves_the_drafts_of_living_writers(store, make_manifest, make_tensors, monkeypatch):
    store.publish("spam", make_tensors(), make_manifest())
    state, seen = store.root / "runs" / "cohorts" / "1" / "state.safetensors", []
    sync = os.fsync

    def collect(descriptor):
        monkeypatch.setattr(os, "fsync", sync)
        now = time.time()
        with monkeypatch.context() as ahead:
            ahead.setattr(time, "time", lambda: now + 5000)
            seen.append(store.gc().paths)

    monkeypatch.setattr(os, "fsync", sync)
    state.parent.mkdir(parents=True)
    monkeypatch.setattr(os, "fsync", collect)
    write_atomically(state, b"weights")
    assert seen == [()]
    assert state.read_bytes() == b"weights"


@in_a_folder
def test_gc_leaves_fresh_drafts_of_runs_and_files_it_does_not_know(store, make_manifest, make_tensors):
    store.publish("spam", make_tensors(), make_manifest())
    runs = store.run_folder("ab12")
    runs.mkdir(parents=True)
    for name in (".draft-1-fresh", ".draft-1-old", "weights.safetensors"):
        (runs / name).write_bytes(b"half")
    old = time.time() - 7200
    for name in (".draft-1-old", "weights.safetensors"):
        os.utime(runs / name, (old, old))
    (store.root / "objects" / "README.txt").write_text("not ours")
    (store.root / "tasks" / ".DS_Store").write_text("not ours")
    assert store.gc().paths == (str(runs / ".draft-1-old"),)
    assert [task.name for task in store.ledger()] == ["spam"]


@pytest.mark.parametrize("position", [0, 9, 200, -1])
def test_one_changed_byte_is_damage_and_says_what_to_do(store, make_manifest, make_tensors, position):
    version = store.publish("spam", make_tensors(), make_manifest())
    path = object_path(store, version)
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    store = look_again(store)
    for read in (store.load, store.check):
        with pytest.raises(StoreDamaged, match=version.digest) as caught:
            read(version)
        assert "inlay remove spam@1" in (caught.value.hint or "")
    with pytest.raises(StoreDamaged):
        store.export("spam", store.root / "spam.inlay")


@pytest.mark.parametrize("length", [0, 5, 8, 100, 1200])
def test_truncated_object_is_damage_with_and_without_the_digest(store, make_manifest, make_tensors, length):
    version = store.publish("spam", make_tensors(), make_manifest())
    path = object_path(store, version)
    assert path.stat().st_size > 1200
    os.truncate(path, length)
    for check in (True, False):
        with pytest.raises(StoreDamaged, match=version.digest):
            look_again(store).load(version, check=check)


def test_missing_object_is_damage_and_publishing_again_mends(store, make_manifest, make_tensors):
    version = store.publish("spam", make_tensors(), make_manifest())
    for damage in (Path.unlink, lambda path: path.write_bytes(b"rot")):
        for path in (folder_of(store) / "objects").rglob("*.safetensors"):
            damage(path)
        store = look_again(store)
        for read in (store.load, store.check, store.manifest):
            with pytest.raises(StoreDamaged):
                read(version)
        assert store.publish("spam", make_tensors(), make_manifest()) == version
        store.check(version)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format":1}', b"\xff"])
def test_damaged_reference_is_named_blocks_gc_and_can_be_removed(store, make_manifest, make_tensors, content):
    damaged = store.publish("spam", make_tensors(0), make_manifest())
    path = folder_of(store) / "tasks" / "spam" / "1.json"
    path.write_bytes(content)
    store = look_again(store)
    other = store.publish("spam", make_tensors(1), make_manifest())
    assert store.resolve("spam") == other
    for read in (store.ledger, store.gc, lambda: store.versions("spam"), lambda: store.resolve("spam@1")):
        with pytest.raises(StoreDamaged, match=f"{re.escape(str(path))}.*inlay remove spam@1"):
            read()
    assert object_path(store, damaged).exists()
    assert [version.number for version in store.remove("spam@1")] == [1]
    assert [info.version for info in store.versions("spam")] == [other]
    assert store.gc().num_objects == (0 if store.is_remote else 1)  # on object storage it waits a day


def test_damaged_sidecar_is_named(store, make_manifest, make_tensors):
    version = store.publish("spam", make_tensors(), make_manifest(), {"seconds": 1})
    path = folder_of(store) / "sidecars" / f"{version.digest}.json"
    path.write_bytes(b"{")
    with pytest.raises(StoreDamaged, match=re.escape(str(path))):
        store.sidecar(version)
    path.unlink()
    assert store.sidecar(version) is None


def test_store_that_cannot_be_written_is_an_error_with_a_way_out(tmp_path, make_manifest, make_tensors):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InlayError, match=r"cannot write .*--store DIR"):
        Store(tmp_path / "file").publish("spam", make_tensors(), make_manifest())
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "spam").write_text("in the way")
    with pytest.raises(InlayError, match="cannot write"):
        Store(tmp_path).publish("spam", make_tensors(), make_manifest())


@in_a_folder
def test_permissions_of_a_version_follow_the_umask(store, make_manifest, make_tensors):
    before = os.umask(0o027)
    try:
        store.publish("spam", make_tensors(), make_manifest(), {"seconds": 1})
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in store.root.rglob("*") if path.is_file()}
    assert modes == {0o640}


def test_ledger_tells_what_a_list_of_tasks_shows(store, make_manifest, make_tensors):
    store.publish("spam", make_tensors(0), make_manifest())
    store.publish("spam", make_tensors(1), make_manifest(kind="regress", labels=(), num_parameters=7))
    version = store.publish("mail", make_tensors(0), make_manifest(higher_is_better=False))
    mail, spam = store.ledger()
    assert (mail.name, [info.version for info in mail.versions]) == ("mail", [version])
    assert mail.latest.size_bytes == object_path(store, version).stat().st_size
    assert not mail.latest.summary.higher_is_better
    assert [info.version.number for info in spam.versions] == [1, 2]
    latest = spam.latest.summary
    assert (latest.kind, latest.num_labels, latest.num_parameters) == ("regress", 0, 7)
    assert latest.score("accuracy") == 0.98
    assert latest.backbone == make_manifest().backbone


@in_a_folder
def test_thousand_tasks_list_fast_and_without_torch_or_numpy(store, make_manifest, make_tensors, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for index in range(1000):
        store.publish(f"task-{index}", make_tensors(), make_manifest(num_parameters=index), {"seconds": 1})
    code = """
import sys, time
from inlay.store import Store
start = time.process_time()
tasks = Store(sys.argv[1]).ledger()
seconds = time.process_time() - start
Store(sys.argv[1]).manifest(tasks[0].latest.version)
heavy = {"torch", "numpy", "pandas", "transformers"} & set(sys.modules)
print(len(tasks), sum(task.latest.summary.num_parameters for task in tasks), len(heavy), seconds)
"""
    answer = subprocess.run(
        [sys.executable, "-c", code, str(store.root)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert answer[:3] == ["1000", str(sum(range(1000))), "0"]
    assert float(answer[3]) < 0.5


def test_export_and_import_carry_a_version_to_another_store(store, tmp_path, make_manifest, make_tensors):
    store.publish("spam", make_tensors(0), make_manifest(), {"seconds": 1})
    version = store.publish("spam", make_tensors(1), make_manifest(), {"seconds": 2})
    path = store.export("spam", tmp_path)
    assert path == tmp_path / "spam.inlay"
    content = path.read_bytes()
    assert store.export("spam@2", path).read_bytes() == content
    other = Store(tmp_path / "other")
    imported = other.import_(path)
    assert imported == Version("spam", 1, version.digest)
    assert other.sidecar(imported) == {"seconds": 2}
    assert other.load(imported).manifest == make_manifest()
    assert torch.equal(other.load(imported).tensors["head.weight"], make_tensors(1)["head.weight"])
    assert other.import_(path) == imported
    assert other.import_(path, "mail").reference == "mail@1"
    assert store.import_(path) == version


def write_zip(path: Path, entries: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return path


def forge(path: Path, content: bytes, name: str = "spam") -> Path:
    """An export whose digest is right and whose content need not be."""
    path.write_bytes(Export(name, hashlib.sha256(content).hexdigest(), content, None).to_bytes())
    return path


def refuse(store: Store, path: Path, reason: str) -> None:
    with pytest.raises(BadData, match=reason) as caught:
        store.import_(path)
    assert str(path) in caught.value.message
    assert not store.root.exists()


def test_import_refuses_what_is_no_export(store, tmp_path, make_manifest, make_tensors):
    good = forge(tmp_path / "good", encode_object(make_tensors(), make_manifest()))
    with zipfile.ZipFile(good) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    (tmp_path / "text").write_text("id,text,label")
    refuse(store, tmp_path / "text", "not an export")
    (tmp_path / "half").write_bytes(good.read_bytes()[:-100])
    refuse(store, tmp_path / "half", "not an export")
    refuse(store, write_zip(tmp_path / "extra", [*entries, ("../../evil", b"x")]), "not an export.*evil")
    refuse(store, write_zip(tmp_path / "few", entries[:1]), "not an export")
    refuse(store, write_zip(tmp_path / "bomb", entries, zipfile.ZIP_DEFLATED), "compressed")
    refuse(store, write_zip(tmp_path / "big", [*entries, ("sidecar.json", b" " * 1_000_001)]), "cannot be")
    refuse(store, write_zip(tmp_path / "list", [*entries, ("sidecar.json", b"[]")]), "sidecar.json: not a JSON object")
    with pytest.warns(UserWarning, match="Duplicate"):
        write_zip(tmp_path / "twice", [*entries, entries[1]])
    refuse(store, tmp_path / "twice", "not an export")
    task = {**json.loads(entries[0][1]), "digest": "0" * 64}
    refuse(store, write_zip(tmp_path / "wrong", [("task.json", json.dumps(task).encode()), entries[1]]), "its bytes")
    del task["name"]
    refuse(
        store, write_zip(tmp_path / "anon", [("task.json", json.dumps(task).encode()), entries[1]]), "must have a name"
    )
    with pytest.raises(Missing, match="No such file"):
        store.import_(tmp_path / "absent")
    with pytest.raises(Missing, match="directory"):
        store.import_(tmp_path)
    assert store.import_(good).reference == "spam@1"


def test_import_refuses_objects_that_are_not_versions(store, tmp_path, make_manifest, make_tensors):
    from safetensors.torch import save

    content = encode_object(make_tensors(), make_manifest())
    manifest = make_manifest().to_json()
    refuse(store, forge(tmp_path / "pickle", b"\x80\x04\x95" + content), "not a safetensors file")
    refuse(store, forge(tmp_path / "cut", content[:-1]), "not a safetensors file")
    refuse(store, forge(tmp_path / "bare", save(make_tensors())), "without an Inlay manifest")
    refuse(store, forge(tmp_path / "keys", save(make_tensors(), {"manifest": '{"format":1}'})), "missing")
    doubles = {name: tensor.double() for name, tensor in make_tensors().items()}
    refuse(store, forge(tmp_path / "f64", save(doubles, {"manifest": manifest})), "F64, not F32")
    for name in ("../evil", "a/b", "", ".draft-1"):
        refuse(store, forge(tmp_path / "name", content, name), "illegal name")
    with pytest.raises(BadConfig, match="cannot name a task"):
        store.import_(forge(tmp_path / "good", content), "../evil")
    assert not store.root.exists()
    assert store.import_(forge(tmp_path / "evil", content, "../evil"), "good").reference == "good@1"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10_000), value=st.integers(1, 255))
def test_import_of_a_changed_file_is_refused_or_harmless(store, tmp_path, make_manifest, make_tensors, position, value):
    manifest: Manifest = make_manifest()
    content = encode_object(make_tensors(), manifest)
    digest = hashlib.sha256(content).hexdigest()
    changed = bytearray(Export("spam", digest, content, {"seconds": 1}).to_bytes())
    changed[position % len(changed)] ^= value
    (tmp_path / "changed").write_bytes(changed)
    try:
        version = store.import_(tmp_path / "changed")
    except InlayError:
        return
    assert (version.name, version.digest) == ("spam", digest)  # a byte zip does not use, such as a date


@in_a_folder
def test_recipe_in_the_docs_reads_a_version_without_inlay(store, make_manifest, make_tensors):
    store.publish("spam", make_tensors(), make_manifest())
    (recipe,) = re.findall(r"```python\n(.*?)```", (DOCS / "store-format.md").read_text(encoding="utf8"), re.DOTALL)
    assert "inlay" not in recipe
    assert len([line for line in recipe.splitlines() if line]) <= 6
    names = {"root": store.root, "name": "spam", "number": 1}
    exec(recipe, names)
    assert Manifest.from_json(json.dumps(names["manifest"])) == make_manifest()
    assert torch.equal(names["tensors"]["head.weight"], make_tensors()["head.weight"])


def test_a_reference_of_another_version_or_with_another_score_is_damage(store, make_manifest, make_tensors):
    first = store.publish("spam", make_tensors(0), make_manifest())
    second = store.publish("mail", make_tensors(1), make_manifest())
    again = store.publish("mail", make_tensors(2), make_manifest())
    paths = [folder_of(store) / "tasks" / version.name / f"{version.number}.json" for version in (first, second, again)]
    contents = [path.read_bytes() for path in paths]
    paths[0].write_bytes(contents[1])
    paths[1].write_bytes(contents[2])
    with pytest.raises(StoreDamaged, match=r"spam/1.json: this is the reference of `mail@1`"):
        look_again(store).resolve("spam")
    with pytest.raises(StoreDamaged, match=r"mail/1.json: this is the reference of `mail@2`"):
        look_again(store).resolve("mail@1")
    paths[1].write_bytes(contents[1])
    for old, new in ((b'"accuracy":0.98', b'"accuracy":0.99'), (b'"published_at":"2', b'"published_at":"3')):
        assert old in contents[0]
        paths[0].write_bytes(contents[0].replace(old, new))
        with pytest.raises(StoreDamaged, match="its seal does not match"):
            look_again(store).resolve("spam")


def old_reference(content: bytes, **changes: object) -> bytes:
    """A reference as format 1 had it."""
    tree = json.loads(content)
    for key in ("name", "number", "seal"):
        del tree[key]
    return json.dumps({**tree, "format": 1, **changes}, sort_keys=True, separators=(",", ":")).encode()


def test_references_of_older_stores_are_read_and_their_scores_proved(store, make_manifest, make_tensors):
    version = store.publish("spam", make_tensors(), make_manifest(metrics={"dev": {"accuracy": math.nan, "f1": 0.5}}))
    path = folder_of(store) / "tasks" / "spam" / "1.json"
    content = path.read_bytes()
    path.write_bytes(old_reference(content))
    store = look_again(store)
    assert store.resolve("spam") == version
    store.check(version)
    for change in ({"size_bytes": 7}, {"summary": {**json.loads(content)["summary"], "metric": "f1"}}):
        path.write_bytes(old_reference(content, **change))
        store = look_again(store)
        with pytest.raises(StoreDamaged, match=r"1.json: it does not agree with the object of `spam@1`"):
            store.check(store.resolve("spam"))


@pytest.mark.parametrize("content", [b"", b'{"format":3}', b'{"format":2,"seal":1e999}'])
def test_a_damaged_reference_costs_only_its_own_version(store, make_manifest, make_tensors, content):
    store.publish("mail", make_tensors(0), make_manifest())
    good = store.publish("spam", make_tensors(1), make_manifest())
    path = folder_of(store) / "tasks" / "mail" / "1.json"
    path.write_bytes(content)
    store, heard = look_again(store), []
    (task,) = store.ledger(lambda version, error: heard.append((version.reference, error)))
    assert task.latest.version == good
    assert store.versions("mail", lambda version, error: heard.append((version.reference, error))) == []
    assert [reference for reference, _ in heard] == ["mail@1", "mail@1"]
    assert all(isinstance(error, InlayError) and str(path) in error.message for _, error in heard)


def test_an_unknown_name_among_thousands_opens_only_the_tasks_that_its_error_shows(tmp_path, monkeypatch):
    store = Store(tmp_path)
    for number in range(3000):
        (tmp_path / "tasks" / f"task-{number:04}").mkdir(parents=True)
        (tmp_path / "tasks" / f"task-{number:04}" / "1.json").touch()
    opened = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: (opened.append(folder), listdir(folder))[1])
    with pytest.raises(UnknownName) as raised:
        store.resolve("tsk-2999")
    assert raised.value.hint == "did you mean `task-2999`?"
    with pytest.raises(UnknownName) as raised:
        store.resolve("nothing")
    assert raised.value.hint.startswith("known: task-0000, task-0001, ")
    assert raised.value.hint.endswith("task-0019 …")
    assert len(opened) < 60
