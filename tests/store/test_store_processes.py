"""The store under processes that write at once, and under processes killed at every step."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inlay.store import Manifest, ObjectStorage, Store, Version
from inlay.store.files import locked

# Children are forked from a server that has imported torch once and has no threads.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "pytest", "safetensors.torch"])
STEPS = ("open", "fsync", "mkdir", "replace", "link", "unlink", "rename")


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((4, 4), float(seed)), "bias": torch.arange(4.0) * seed}


def folder_of(place: str) -> Path:
    """The folder with a store's bytes."""
    return Path(place.removeprefix("file://"))


def open_store(place: str) -> Store:
    """The store as its own machine has it: what is kept of object storage lies beside it."""
    os.environ["INLAY_LOCAL"] = f"{folder_of(place)}-local"
    return Store(place)


def publish_at(start: float, place: str, name: str, manifest: Manifest, seeds: list[int]) -> list[tuple[int, Version]]:
    time.sleep(max(0.0, start - time.time()))
    return [(seed, open_store(place).publish(name, tensors_of(seed), manifest, {"seed": seed})) for seed in seeds]


def test_processes_that_publish_at_once_get_consecutive_numbers(store, make_manifest):
    start = time.time() + 1.5
    with PROCESSES.Pool(8) as pool:
        work = [(start, store.place, "spam", make_manifest(), list(range(4 * i, 4 * i + 4))) for i in range(8)]
        published = list(itertools.chain(*pool.starmap(publish_at, work, chunksize=1)))
    assert sorted(version.number for _, version in published) == list(range(1, 33))
    for seed, version in published:
        assert store.resolve(version.reference) == version
        assert torch.equal(store.load(version).tensors["weight"], tensors_of(seed)["weight"])
        assert store.sidecar(version) == {"seed": seed}
    assert store.gc().paths == ()


def test_processes_that_publish_the_same_content_share_one_version(store, make_manifest):
    start = time.time() + 0.5
    with PROCESSES.Pool(4) as pool:
        work = [(start, store.place, "spam", make_manifest(), [1, 2, 3])] * 4
        published = list(itertools.chain(*pool.starmap(publish_at, work, chunksize=1)))
    assert len({version for _, version in published}) == 3
    assert [info.version.number for info in store.versions("spam")] == [1, 2, 3]


def publish_load_and_remove(place: str, name: str, manifest: Manifest, rounds: int) -> None:
    """Each round publishes bytes that may lie there unreferenced, from this process's past or from the other's."""
    store = open_store(place)
    for index in range(rounds):
        version = store.publish(name, tensors_of(index % 2), manifest)
        assert torch.equal(store.load(version).tensors["bias"], tensors_of(index % 2)["bias"])
        if index < rounds - 2:
            store.remove(version.reference)


def collect_until(place: str, stop: Path) -> None:
    while not stop.exists():
        open_store(place).gc()


def test_gc_beside_publishers_loses_nothing(store, tmp_path, make_manifest):
    store.publish("first", tensors_of(9), make_manifest())
    stop = tmp_path / "stop"
    collector = PROCESSES.Process(target=collect_until, args=(store.place, stop))
    publishers = [
        PROCESSES.Process(target=publish_load_and_remove, args=(store.place, f"task-{i}", make_manifest(), 50))
        for i in range(3)
    ]
    for process in (collector, *publishers):
        process.start()
    for process in publishers:
        process.join()
    stop.touch()
    collector.join()
    assert [process.exitcode for process in (collector, *publishers)] == [0, 0, 0, 0]
    versions = [info.version for task in store.ledger() for info in task.versions]
    assert len(versions) == 7
    for version in versions:
        store.check(version)


def publish_second(place: str, manifest: Manifest) -> None:
    open_store(place).publish("spam", tensors_of(2), manifest, {"seed": 2})


def import_second(place: str, manifest: Manifest) -> None:
    open_store(place).import_(folder_of(place).parent / "second.inlay")


def remove_first(place: str, manifest: Manifest) -> None:
    open_store(place).remove("spam@1")


def collect(place: str, manifest: Manifest) -> None:
    open_store(place).gc()


@pytest.mark.parametrize("action", [remove_first, collect])
def test_remove_and_gc_wait_for_a_writer_between_its_object_and_its_reference(
    tmp_path, make_manifest, monkeypatch, action
):
    monkeypatch.setenv("INLAY_LOCAL", "each has its own")
    prepare("", tmp_path, make_manifest())
    root = tmp_path / "before"
    process = PROCESSES.Process(target=action, args=(str(root), make_manifest()))
    before = sorted(root.rglob("*"))
    with locked(root / "lock", exclusive=False, in_turn=True):
        with locked(root / "lock", exclusive=False, in_turn=True):
            pass  # other writers do not wait, unless they come after one who waits to be alone
        process.start()
        process.join(0.5)
        assert process.is_alive()
        assert sorted(root.rglob("*")) == before
    process.join()
    assert process.exitcode == 0
    assert sorted(root.rglob("*")) != before


def count_steps(before_step: Callable[[int], None], patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Call `before_step` with 1, 2, 3 … before each operation on files, and each request to object storage."""
    number = itertools.count(1)

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            before_step(next(number))
            return original(*arguments, **options)

        return call

    for name in STEPS:
        patch(os, name, counted(getattr(os, name)))
    patch(ObjectStorage, "_ask", counted(ObjectStorage._ask))


def act_and_die(action: Callable[[str, Manifest], None], place: str, manifest: Manifest, last: int) -> None:
    count_steps(lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == last else None)
    action(place, manifest)


@pytest.mark.parametrize(
    "scheme", ["", pytest.param("file://", marks=pytest.mark.long)], ids=["folder", "object storage"]
)
@pytest.mark.parametrize("action", [publish_second, import_second, remove_first, collect])
def test_killed_at_any_step_leaves_whole_versions_and_nothing_gc_cannot_clear(
    tmp_path, make_manifest, monkeypatch, action, scheme
):
    monkeypatch.setenv("INLAY_LOCAL", "each has its own")
    prepare(scheme, tmp_path, make_manifest())
    steps: list[int] = []
    with monkeypatch.context() as patch:
        shutil.copytree(tmp_path / "before", tmp_path / "whole")
        count_steps(steps.append, patch.setattr)
        action(f"{scheme}{tmp_path / 'whole'}", make_manifest())
    assert len(steps) >= 3
    for last in [*steps, len(steps) + 1]:
        root = tmp_path / f"killed-{last}"
        shutil.copytree(tmp_path / "before", root)
        process = PROCESSES.Process(target=act_and_die, args=(action, f"{scheme}{root}", make_manifest(), last))
        process.start()
        process.join()
        assert process.exitcode == (-signal.SIGKILL if last <= len(steps) else 0)
        check_after_kill(open_store(f"{scheme}{root}"), make_manifest())


def prepare(scheme: str, folder: Path, manifest: Manifest) -> None:
    """A store with one version, and some bytes that nothing refers to; an export of a second version beside it."""
    store = open_store(f"{scheme}{folder / 'before'}")
    store.publish("spam", tensors_of(1), manifest, {"seed": 1})
    for seed in (5, 6):
        store.publish("gone", tensors_of(seed), manifest, {"seed": seed})
    store.remove("gone")
    other = Store(folder / "other")
    other.publish("spam", tensors_of(2), manifest, {"seed": 2})
    other.export("spam", folder / "second.inlay")


def check_after_kill(store: Store, manifest: Manifest) -> None:
    seeds = {1: 1, 2: 2}  # by number, whether or not the killed process got that far
    versions = [info.version for task in store.ledger() for info in task.versions]
    assert {version.number for version in versions} in ({1}, {1, 2}, set())
    for version in versions:
        assert torch.equal(store.load(version).tensors["weight"], tensors_of(seeds[version.number])["weight"])
        assert store.sidecar(version) == {"seed": seeds[version.number]}
    again = store.publish("spam", tensors_of(2), manifest, {"seed": 2})
    assert again.number == 2
    store.gc()
    live = [info.version for task in store.ledger() for info in task.versions]
    assert live == [*(version for version in versions if version.number == 1), again]
    for version in live:
        store.check(version)
    if store.is_remote:  # where `gc` waits a day
        return
    files = {path.name for path in store.root.rglob("*") if path.is_file()}
    digests = {version.digest for version in live}
    assert not [name for name in files if name.startswith(".draft-")]
    assert {name for name in files if name.endswith(".safetensors")} == {f"{digest}.safetensors" for digest in digests}
    assert {name for name in files if len(name) == 69} == {f"{digest}.json" for digest in digests}
