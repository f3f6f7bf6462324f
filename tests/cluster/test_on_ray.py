"""Runs on a Ray cluster of two nodes on this machine: the same runs as here, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inlay import cluster, training
from inlay.cluster import RaySettings, fit_on_ray, pack_error, unpack_error
from inlay.errors import BadConfig, LostProcess, Missing, Unsupported
from inlay.settings import FitSettings, MethodConfig, RunConfig, TrainConfig

pytestmark = pytest.mark.ray
EXACT = 1e-5


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR", namespace="inlay")
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="module")
def make_runs(toy_task, tiny_bert):
    """Twelve runs: three rates, two sizes, two seeds. Without dropout, so that any cohort gives the same numbers."""

    def make(task: Any = None, epochs: int = 2) -> list[training.Run]:
        own = task or toy_task(num_rows=96)
        return [
            training.make_run(
                own,
                RunConfig(
                    method=MethodConfig(size=size),
                    train=TrainConfig(lr=lr, epochs=epochs, batch_size=8, seed=seed, dropout=0.0),
                ),
                tiny_bert,
            )
            for lr in (1e-3, 3e-3, 1e-2)
            for size in (4, 8)
            for seed in (0, 1)
        ]

    return make


def compare(here: list[training.Result], there: list[training.Result]) -> None:
    assert [result.run_id for result in here] == [result.run_id for result in there]
    for own, other in zip(here, there, strict=True):
        assert other.best_epoch == own.best_epoch
        assert other.dev_metric == pytest.approx(own.dev_metric, abs=EXACT)


@pytest.mark.parametrize("is_shared", [True, False], ids=["one folder", "folders of their own"])
def test_twelve_runs_on_two_nodes_equal_one_machines(
    two_nodes, make_runs, tiny_bert, tmp_path, monkeypatch, is_shared
) -> None:
    if not is_shared:  # as where no machine sees another's disk
        monkeypatch.setattr(cluster.messages.Path, "touch", lambda path, **_: None)
    runs, lines = make_runs(), []
    here = training.fit(runs, tiny_bert, tmp_path / "here", FitSettings())
    there = fit_on_ray(runs, tiny_bert, tmp_path / "there", FitSettings(), RaySettings(), lines.append)
    compare(here, there)
    assert lines[0] == "12 runs in 2 groups on 2 machines"
    assert sum(line.endswith("ended") for line in lines) == 12
    assert not list((tmp_path / "there").glob(".ray-*"))
    names = {path.name for path in (tmp_path / "here" / runs[0].id).iterdir()} | {"curve.png"}  # tests draw none here
    assert names == {path.name for path in (tmp_path / "there" / runs[0].id).iterdir()}
    again: list[str] = []
    compare(here, fit_on_ray(runs, tiny_bert, tmp_path / "there", FitSettings(), RaySettings(), again.append))
    assert again == []  # nothing is trained twice


def test_group_that_dies_goes_on_from_its_state(two_nodes, make_runs, toy_task, tiny_bert, tmp_path) -> None:
    runs = make_runs(toy_task(num_rows=480), epochs=6)
    killed = []
    done = threading.Event()

    def kill_once() -> None:
        while not done.is_set() and not killed:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    if b"ray::_train_group" in path.read_bytes() and list((tmp_path / "runs").glob("*/metrics.jsonl")):
                        os.kill(int(path.parent.name), signal.SIGKILL)
                        killed.append(path.parent.name)
                        return
                except OSError:
                    continue
            time.sleep(0.05)

    killer = threading.Thread(target=kill_once)
    killer.start()
    there = fit_on_ray(runs, tiny_bert, tmp_path / "runs", FitSettings(), RaySettings())
    done.set()
    killer.join()
    assert killed
    # The same groups here, so that sums are rounded alike: then a resume is exact.
    for group in cluster.on_ray._deal(runs, 2):
        training.fit(group, tiny_bert, tmp_path / "here", FitSettings())
    compare(training.fit(runs, tiny_bert, tmp_path / "here", FitSettings()), there)


def test_runs_of_several_tasks_travel_too(two_nodes, toy_task, tiny_bert, tmp_path) -> None:
    tasks = [toy_task(name, num_rows=16, seed=seed) for seed, name in enumerate(("one", "two"))]
    method = MethodConfig("hyperformer++", size=4)
    runs = [
        training.make_joint_run(
            tasks,
            RunConfig(method=method, train=TrainConfig(epochs=1, batch_size=8, seed=seed, dropout=0.0)),
            tiny_bert,
        )
        for seed in (0, 1)
    ]
    there = fit_on_ray(runs, tiny_bert, tmp_path / "there", FitSettings(), RaySettings())
    for group in cluster.on_ray._deal(runs, 2):
        training.fit(group, tiny_bert, tmp_path / "here", FitSettings())
    compare(training.fit(runs, tiny_bert, tmp_path / "here", FitSettings()), there)


def test_error_of_a_group_is_the_same_error_here_and_costs_no_other(
    two_nodes, make_runs, tiny_bert, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(cluster.on_ray, "own_versions", lambda: ("inlay 0.0.1",))
    with pytest.raises(Unsupported, match="a machine of the cluster has inlay"):
        fit_on_ray(make_runs()[:2], tiny_bert, tmp_path, FitSettings(), RaySettings())


def test_group_that_fits_no_machine_is_refused_before_anything_is_sent(
    two_nodes, make_runs, tiny_bert, tmp_path
) -> None:
    with pytest.raises(Missing, match="no machine of the cluster has 64 processors"):
        fit_on_ray(make_runs()[:2], tiny_bert, tmp_path, FitSettings(), RaySettings(num_cpus=64))


@pytest.mark.parametrize("text", ["slurm", "http://host", ""])
def test_what_is_no_cluster_is_refused(text) -> None:
    with pytest.raises(BadConfig, match="is not a cluster"):
        RaySettings.parse(text)


def test_an_error_that_travelled_as_data_is_what_it_was() -> None:
    error = LostProcess("gone", "try again")
    made = unpack_error(pack_error(error))
    assert (type(made), made.message, made.hint, str(made)) == (LostProcess, "gone", "try again", str(error))
