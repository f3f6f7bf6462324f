"""The process that looks after a service's cluster: when it takes leave, and when its engines must stay."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from inlay.errors import DiskFull
from inlay.service.home import prepare_home
from inlay.service.on_ray import cluster_process
from inlay.service.on_ray.fleet_messages import find_home_id
from inlay.service.settings import ClusterSettings, ServeSettings


@pytest.fixture
def left(monkeypatch) -> list[str]:
    """What a service has taken leave of; its heartbeats end with a full disk."""
    found: list[str] = []

    class PlayedClient:
        def __init__(self, *given: Any, **more: Any) -> None:
            pass

        def run(self, child: Any) -> None:
            raise DiskFull("no room for the roster", "make room")

        def leave(self) -> None:
            found.append("the fleet")

    monkeypatch.setattr(cluster_process, "KeeperClient", PlayedClient)
    monkeypatch.setattr(cluster_process, "connect", lambda address: None)
    monkeypatch.setattr(cluster_process.Database, "open", lambda place: SimpleNamespace(close=lambda: None))
    return found


def test_two_machines_with_one_host_name_are_two_services_and_a_restarted_one_is_the_same(tmp_path):
    first, second = (ServeSettings(home=tmp_path / name, store="s3://bucket") for name in ("first", "second"))
    for settings in (first, second):
        prepare_home(settings)
    assert find_home_id(first) == find_home_id(first) != find_home_id(second)


@pytest.mark.parametrize(("is_ready", "is_stopping"), [(True, False), (True, True), (False, False)])
def test_engines_stay_if_the_process_ends_with_an_error_while_it_served(left, tmp_path, is_ready, is_stopping):
    child = SimpleNamespace(
        settings=ServeSettings(home=tmp_path, cluster=ClusterSettings()),
        progress=lambda words: None,
        hear_signals=lambda: None,
        stopping=threading.Event(),
        is_ready=is_ready,
    )
    if is_stopping:
        child.stopping.set()
    with pytest.raises(DiskFull):
        cluster_process.serve(child)
    assert left == ([] if is_ready and not is_stopping else ["the fleet"])


class PlayedRay:
    """A cluster whose keeper answers only at the last of several calls: before it is being restarted."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls, self.left = num_calls, list[str]()

    def get_actor(self, name: str, namespace: str) -> Any:
        if self.left:
            raise ValueError(f"no actor `{name}`")
        return SimpleNamespace(leave=SimpleNamespace(remote=lambda service: service))

    def get(self, service: str, timeout: float) -> None:
        self.num_calls -= 1
        if self.num_calls:
            raise ConnectionError("the actor is being restarted")
        self.left.append(service)


@pytest.mark.parametrize("num_calls", [1, 3])
def test_a_keeper_that_is_being_restarted_is_told_that_its_service_has_ended(tmp_path, monkeypatch, num_calls):
    monkeypatch.setattr(cluster_process, "_PAUSES_S", (0.01,))
    settings = ServeSettings(home=tmp_path / "home", cluster=ClusterSettings())
    prepare_home(settings)
    ray = PlayedRay(num_calls)
    client = cluster_process.KeeperClient(ray, settings, SimpleNamespace())
    client.leave()
    assert len(ray.left) == 1
    client.leave()
    assert len(ray.left) == 1, "nobody is left to be told"


def test_who_cannot_reach_the_keeper_gives_up_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_process, "_PAUSES_S", (0.01,))
    monkeypatch.setattr(cluster_process, "START_S", 0.5)
    settings = ServeSettings(home=tmp_path / "home", cluster=ClusterSettings(), drain_s=0.2)
    prepare_home(settings)
    ray = PlayedRay(1_000_000)
    began = time.monotonic()
    cluster_process.KeeperClient(ray, settings, SimpleNamespace()).leave()
    assert 0.2 <= time.monotonic() - began < 5
    assert not ray.left
