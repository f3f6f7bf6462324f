"""A store on object storage keeps the folder's promises, without locks and through failures."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from itertools import count, cycle
from pathlib import Path

import pytest
import torch

pytest.importorskip("obstore")
pytest.importorskip("moto.server")

from bucket_server import BUCKET, FAULTS, KEYS, FaultyProxy, serve_bucket

from inlay.errors import BadConfig, StoreDamaged, StoreUnreachable, UnknownName
from inlay.store import Store, bucket, copy_store, object_storage

_PREFIXES = count()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with serve_bucket() as address:
        yield address


@pytest.fixture
def proxy(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyProxy:
    proxy = FaultyProxy(s3)
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": proxy.address, "INLAY_LOCAL": str(tmp_path / "here")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_storage, "_FIRST_PAUSE_S", 0.001)
    return proxy


@pytest.fixture(params=["s3", "file"])
def address(request: pytest.FixtureRequest, proxy: FaultyProxy, tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{next(_PREFIXES)}" if request.param == "s3" else f"file://{tmp_path}/bucket"


@pytest.fixture
def store(address: str) -> Store:
    return Store(address)


def elsewhere(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The same store, seen from another machine: nothing of it is kept here."""
    monkeypatch.setenv("INLAY_LOCAL", str(tmp_path / f"there-{next(_PREFIXES)}"))
    return Store(store.place)


def age(monkeypatch: pytest.MonkeyPatch, hours: float) -> None:
    """Let the storage's clock be ahead of what was written."""
    read = bucket.BucketFiles._read_clock
    monkeypatch.setattr(bucket.BucketFiles, "_read_clock", lambda files: read(files) + timedelta(hours=hours))


def test_what_is_published_is_what_another_machine_loads(
    store, make_manifest, make_tensors, tmp_path, monkeypatch
) -> None:
    version = store.publish("spam", make_tensors(), make_manifest(), {"host": "here"})
    there = elsewhere(store, tmp_path, monkeypatch)
    assert there.resolve("spam") == version
    loaded = there.load(version)
    assert loaded.manifest == make_manifest() == there.manifest(version)
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in make_tensors().items())
    assert there.sidecar(version) == {"host": "here"}
    there.check(version)
    assert [task.name for task in there.ledger()] == ["spam"]


def test_publishing_again_gives_the_same_version_and_names_count_by_themselves(
    store, make_manifest, make_tensors
) -> None:
    first = store.publish("spam", make_tensors(), make_manifest(), {"seconds": 1})
    assert store.publish("spam", make_tensors(), make_manifest(), {"seconds": 2}) == first
    assert store.sidecar(first) == {"seconds": 1}
    assert store.publish("mail", make_tensors(), make_manifest()).number == 1
    assert store.publish("spam", make_tensors(1), make_manifest()).number == 2
    assert [info.version.number for info in store.versions("spam")] == [1, 2]


def test_a_number_that_another_machine_gave_just_now_is_found(store, make_manifest, make_tensors, monkeypatch) -> None:
    """A service's engine that was asked for version 1 all the time must find version 2 before it goes live."""
    store.publish("spam", make_tensors(0), make_manifest())
    monkeypatch.setattr(bucket, "_REMEMBERED_S", 1e9)
    asked = Store(store.place)
    assert asked.resolve("spam").number == 1
    second = store.publish("spam", make_tensors(1), make_manifest())
    assert asked.resolve("spam@2") == second
    with pytest.raises(UnknownName, match=r"spam@3.*versions of `spam`: 1, 2"):
        asked.resolve("spam@3")


def test_removed_numbers_are_never_given_again(store, make_manifest, make_tensors, tmp_path, monkeypatch) -> None:
    store.publish("spam", make_tensors(0), make_manifest())
    second = store.publish("spam", make_tensors(1), make_manifest())
    assert store.remove("spam@2") == [second]
    there = elsewhere(store, tmp_path, monkeypatch)
    with pytest.raises(UnknownName, match="it was removed"):
        there.resolve("spam@2")
    assert there.publish("spam", make_tensors(1), make_manifest()).number == 3


def test_writer_that_listed_before_a_removal_takes_the_next_number(
    store, make_manifest, make_tensors, monkeypatch
) -> None:
    """It believes that number 2 is free, since it listed the task before there was one, and it was removed since."""
    store.publish("spam", make_tensors(0), make_manifest())
    late = Store(store.place)
    assert late.numbers("spam") == ([1], [])
    monkeypatch.setattr(bucket, "_REMEMBERED_S", 1e9)
    store.publish("spam", make_tensors(1), make_manifest())
    store.remove("spam@2")
    version = late.publish("spam", make_tensors(2), make_manifest())
    assert version.number == 3
    assert Store(store.place).numbers("spam") == ([1, 3], [2])


def test_processes_that_publish_at_once_get_a_number_each(store, make_manifest, make_tensors) -> None:
    versions, barrier = [], threading.Barrier(8)

    def publish(seed: int) -> None:
        mine = Store(store.place)
        tensors = make_tensors(seed)
        barrier.wait()
        versions.append(mine.publish("spam", tensors, make_manifest()))

    threads = [threading.Thread(target=publish, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(version.number for version in versions) == list(range(1, 9))
    assert len({version.digest for version in versions}) == 8


def test_gc_deletes_what_no_version_needs_after_a_day(
    store, make_manifest, make_tensors, tmp_path, monkeypatch
) -> None:
    kept = store.publish("mail", make_tensors(0), make_manifest(), {"seconds": 1})
    store.publish("mail", make_tensors(0), make_manifest())  # a second key of the same content
    gone = store.publish("spam", make_tensors(1), make_manifest(), {"seconds": 2})
    store.remove("spam")
    assert store.gc().paths == ()  # a writer may be about to refer to it
    age(monkeypatch, 25)
    planned = store.gc(dry_run=True)
    report = store.gc()
    assert (report.num_objects, report.num_sidecars) == (2, 1)
    assert report.paths == planned.paths
    assert store.gc().paths == ()
    there = elsewhere(store, tmp_path, monkeypatch)
    there.check(kept)
    assert there.sidecar(kept) == {"seconds": 1}
    with pytest.raises(FileNotFoundError):
        there.files.find_object(gone.digest)


def test_content_published_again_while_gc_runs_stays(store, make_manifest, make_tensors, monkeypatch) -> None:
    store.publish("spam", make_tensors(), make_manifest())
    store.remove("spam")
    age(monkeypatch, 25)
    list_unneeded = bucket.BucketFiles.list_unneeded

    def publish_meanwhile(files: bucket.BucketFiles, live: set[str]) -> list[bucket.Unneeded]:
        found = list_unneeded(files, live)
        Store(store.place).publish("spam", make_tensors(), make_manifest())
        return found

    monkeypatch.setattr(bucket.BucketFiles, "list_unneeded", publish_meanwhile)
    assert store.gc().num_objects == 1
    version = Store(store.place).resolve("spam")
    assert version.number == 2
    Store(store.place).check(version)


def test_damaged_content_is_named_and_a_damaged_copy_here_is_fetched_again(
    store, make_manifest, make_tensors, tmp_path, monkeypatch
) -> None:
    version = store.publish("spam", make_tensors(), make_manifest())
    store.files._kept_object(version.digest).write_bytes(b"rot")
    assert store.load(version).manifest == make_manifest()
    (key,) = (each.key for each in store.files.storage.list("objects/"))
    store.files.storage.put(key, b"rot")
    store.load(version)  # what is kept here is good
    with pytest.raises(StoreDamaged, match="not the bytes that were published"):
        store.check(version)
    with pytest.raises(StoreDamaged):
        elsewhere(store, tmp_path, monkeypatch).load(version)


def test_nothing_is_lost_or_doubled_through_failing_requests(proxy, make_manifest, make_tensors) -> None:
    store = Store(f"s3://{BUCKET}/{next(_PREFIXES)}")
    faults = cycle([fault for each in FAULTS for fault in (None, each, None, None)])
    proxy.fault = lambda method, path: next(faults)
    versions = [store.publish("spam", make_tensors(seed), make_manifest()) for seed in range(12)]
    proxy.fault = lambda method, path: None
    assert {what for *_, what in proxy.requests} >= set(FAULTS)
    assert [version.number for version in versions] == list(range(1, 13))
    assert store.numbers("spam") == (list(range(1, 13)), [])
    for version in versions:
        store.check(version)


@pytest.mark.parametrize(
    ("fault", "message"),
    [("403", "refuses"), ("503", "no answer after 5 attempts"), ("unconditional", "although it was asked to create")],
)
def test_storage_that_cannot_hold_the_promises_is_refused_before_anything_is_written(
    proxy, make_manifest, make_tensors, fault, message
) -> None:
    store = Store(f"s3://{BUCKET}/{next(_PREFIXES)}")
    proxy.fault = lambda method, path: fault
    with pytest.raises(StoreUnreachable, match=message) as caught:
        store.publish("spam", make_tensors(), make_manifest())
    assert caught.value.hint
    proxy.fault = lambda method, path: None
    assert {each.key for each in store.files.storage.list("")} <= {"layout.json"}


def test_nobody_at_the_address_is_an_error_that_names_it(proxy, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreUnreachable, match=rf"s3://{BUCKET}/x.*no answer"):
        Store(f"s3://{BUCKET}/x").ledger()


def test_bucket_that_does_not_exist_is_an_error_that_says_so(proxy, make_manifest, make_tensors) -> None:
    store = Store("s3://nobody-has-this/prefix")
    for use in (
        lambda: store.publish("spam", make_tensors(), make_manifest()),
        lambda: store.resolve("spam"),
        lambda: store.storage.prove_conditions(),  # the first thing that a service asks for
        lambda: store.storage.get("key"),
    ):
        with pytest.raises(StoreUnreachable, match="no bucket at `s3://nobody-has-this/prefix`"):
            use()


def test_address_given_as_a_path_is_the_same_store(proxy) -> None:
    assert Store(Path("s3://models/a/")).place == Store("s3://models/a").place == "s3://models/a"
    assert Store(Path("s3://models/a")).root == Store("s3://models/a").root != Store("s3://models/b").root


def test_copies_are_equal_in_both_directions(store, make_manifest, make_tensors, tmp_path) -> None:
    folder, back = Store(tmp_path / "folder"), Store(tmp_path / "back")
    for seed in range(3):
        folder.publish("spam", make_tensors(seed), make_manifest(), {"seconds": seed})
    folder.publish("mail", make_tensors(7), make_manifest())
    folder.remove("spam@2")
    report = copy_store(folder, store)
    assert (report.num_versions, report.num_there, report.damaged) == (3, 0, ())
    assert copy_store(folder, store).num_there == 3
    copy_store(Store(store.place), back)

    def content(kept: Store) -> dict[str, str]:
        paths = [path for part in ("tasks", "objects", "sidecars") for path in (kept.root / part).rglob("*.*")]
        files = {str(path.relative_to(kept.root)): path for path in paths if path.suffix != ".removed"}
        return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if path.is_file()}

    before, after = content(folder), content(back)
    assert after == {name: digest for name, digest in before.items() if name in after}
    assert len(after) == 3 + 3 + 2  # references, objects, sidecars of versions that were not removed
    assert back.numbers("spam") == ([1, 3], [2])


def test_copy_refuses_a_number_that_is_another_version_there(store, make_manifest, make_tensors, tmp_path) -> None:
    folder = Store(tmp_path / "folder")
    folder.publish("spam", make_tensors(0), make_manifest())
    folder.publish("mail", make_tensors(0), make_manifest())
    store.publish("spam", make_tensors(1), make_manifest())
    with pytest.raises(BadConfig, match="`spam@1` is another version"):
        copy_store(folder, store)
    assert [task.name for task in store.ledger()] == ["spam"]


def test_erased_content_is_gone_at_once_and_what_another_task_needs_stays(
    store, make_manifest, make_tensors, tmp_path, monkeypatch
) -> None:
    shared = store.publish("mail", make_tensors(0), make_manifest())
    store.publish("spam", make_tensors(0), make_manifest(), {"host": "here"})
    own = store.publish("spam", make_tensors(1), make_manifest(), {"host": "here"})
    there = elsewhere(store, tmp_path, monkeypatch)
    there.load(own)
    there.ledger()
    assert store.erase("spam") == 2
    assert store.erase("spam") == 0
    assert not [each for each in store.storage.list("") if own.digest in each.key]
    there.check(shared)
    assert there.forget_gone() == 3  # the content and two references
    assert not [path for path in there.root.rglob("*") if own.digest in path.name]
    there.check(shared)
    assert store.publish("spam", make_tensors(1), make_manifest()).number == 3


def test_content_published_again_while_it_is_erased_is_put_back(
    store, make_manifest, make_tensors, monkeypatch
) -> None:
    store.publish("spam", make_tensors(), make_manifest())
    live = Store._live_digests

    def publish_meanwhile(mine: Store, besides: str = "") -> set[str]:
        found = live(mine, besides)
        monkeypatch.setattr(Store, "_live_digests", live)
        Store(store.place).publish("mail", make_tensors(), make_manifest())
        return found

    monkeypatch.setattr(Store, "_live_digests", publish_meanwhile)
    store.erase("spam")
    Store(store.place).check(Store(store.place).resolve("mail"))


def test_a_publisher_whose_content_was_erased_under_it_puts_it_back(
    store, make_manifest, make_tensors, monkeypatch
) -> None:
    add = bucket.BucketFiles.add_object

    def erased_meanwhile(files: bucket.BucketFiles, digest: str, content: bytes) -> None:
        add(files, digest, content)
        monkeypatch.setattr(bucket.BucketFiles, "add_object", add)
        Store(store.place).files.erase_object(digest, set)

    monkeypatch.setattr(bucket.BucketFiles, "add_object", erased_meanwhile)
    version = store.publish("spam", make_tensors(), make_manifest())
    elsewhere(store, Path(store.root).parent, monkeypatch).check(version)
