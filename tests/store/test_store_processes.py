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

from inlay.store import Manifest, Store, Version
from inlay.store.files import locked

# Children are forked from a server that has imported torch once and has no threads.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "pytest", "safetensors.torch"])
STEPS = ("open", "fsync", "mkdir", "replace", "link", "unlink", "rename")


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((4, 4), float(seed)), "bias": torch.arange(4.0) * seed}


def publish_at(start: float, root: Path, name: str, manifest: Manifest, seeds: list[int]) -> list[tuple[int, Version]]:
    time.sleep(max(0.0, start - time.time()))
    return [(seed, Store(root).publish(name, tensors_of(seed), manifest, {"seed": seed})) for seed in seeds]


def test_processes_that_publish_at_once_get_consecutive_numbers(store, make_manifest):
    start = time.time() + 1.5
    with PROCESSES.Pool(8) as pool:
        work = [(start, store.root, "spam", make_manifest(), list(range(4 * i, 4 * i + 4))) for i in range(8)]
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
        work = [(start, store.root, "spam", make_manifest(), [1, 2, 3])] * 4
        published = list(itertools.chain(*pool.starmap(publish_at, work, chunksize=1)))
    assert len({version for _, version in published}) == 3
    assert [info.version.number for info in store.versions("spam")] == [1, 2, 3]


def publish_load_and_remove(root: Path, name: str, manifest: Manifest, rounds: int) -> None:
    """Each round publishes bytes that may lie there unreferenced, from this process's past or from the other's."""
    store = Store(root)
    for index in range(rounds):
        version = store.publish(name, tensors_of(index % 2), manifest)
        assert torch.equal(store.load(version).tensors["bias"], tensors_of(index % 2)["bias"])
        if index < rounds - 2:
            store.remove(version.reference)


def collect_until(root: Path, stop: Path) -> None:
    while not stop.exists():
        Store(root).gc()


def test_gc_beside_publishers_loses_nothing(store, tmp_path, make_manifest):
    store.publish("first", tensors_of(9), make_manifest())
    stop = tmp_path / "stop"
    collector = PROCESSES.Process(target=collect_until, args=(store.root, stop))
    publishers = [
        PROCESSES.Process(target=publish_load_and_remove, args=(store.root, f"task-{i}", make_manifest(), 50))
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


def publish_second(root: Path, manifest: Manifest) -> None:
    Store(root).publish("spam", tensors_of(2), manifest, {"seed": 2})


def import_second(root: Path, manifest: Manifest) -> None:
    Store(root).import_(root.parent / "second.inlay")


def remove_first(root: Path, manifest: Manifest) -> None:
    Store(root).remove("spam@1")


def collect(root: Path, manifest: Manifest) -> None:
    Store(root).gc()


@pytest.mark.parametrize("action", [remove_first, collect])
def test_remove_and_gc_wait_for_a_writer_between_its_object_and_its_reference(tmp_path, make_manifest, action):
    prepare(tmp_path, make_manifest())
    root = tmp_path / "before"
    process = PROCESSES.Process(target=action, args=(root, make_manifest()))
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
    """Call `before_step` with 1, 2, 3 … before each operation on files that the store asks of the system."""
    number = itertools.count(1)

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            before_step(next(number))
            return original(*arguments, **options)

        return call

    for name in STEPS:
        patch(os, name, counted(getattr(os, name)))


def act_and_die(action: Callable[[Path, Manifest], None], root: Path, manifest: Manifest, last: int) -> None:
    count_steps(lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == last else None)
    action(root, manifest)


@pytest.mark.parametrize("action", [publish_second, import_second, remove_first, collect])
def test_killed_at_any_step_leaves_whole_versions_and_nothing_gc_cannot_clear(
    tmp_path, make_manifest, monkeypatch, action
):
    prepare(tmp_path, make_manifest())
    steps: list[int] = []
    with monkeypatch.context() as patch:
        shutil.copytree(tmp_path / "before", tmp_path / "whole")
        count_steps(steps.append, patch.setattr)
        action(tmp_path / "whole", make_manifest())
    assert len(steps) >= 3
    for last in [*steps, len(steps) + 1]:
        root = tmp_path / f"killed-{last}"
        shutil.copytree(tmp_path / "before", root)
        process = PROCESSES.Process(target=act_and_die, args=(action, root, make_manifest(), last))
        process.start()
        process.join()
        assert process.exitcode == (-signal.SIGKILL if last <= len(steps) else 0)
        check_after_kill(Store(root), make_manifest())


def prepare(folder: Path, manifest: Manifest) -> None:
    """A store with one version, and some bytes that nothing refers to; an export of a second version beside it."""
    store = Store(folder / "before")
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
    files = {path.name for path in store.root.rglob("*") if path.is_file()}
    digests = {version.digest for version in live}
    assert not [name for name in files if name.startswith(".draft-")]
    assert {name for name in files if name.endswith(".safetensors")} == {f"{digest}.safetensors" for digest in digests}
    assert {name for name in files if len(name) == 69} == {f"{digest}.json" for digest in digests}
    for version in live:
        store.check(version)
