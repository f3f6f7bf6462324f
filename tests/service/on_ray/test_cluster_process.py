"""The process that looks after a service's cluster: when it takes leave, and when its engines must stay."""

from __future__ import annotations

import threading
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
