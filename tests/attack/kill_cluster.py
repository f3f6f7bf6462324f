"""Kills nodes, engines and all else of a service on a Ray cluster at random moments under load:

    python tests/attack/kill_cluster.py [--kills N] [--minutes M] [--seed S] [--only node,engine,…]

Two nodes of one processor each, on this machine. Customers and ledgers are those of `kill_service.py`. A node that is
killed is replaced by a new one. After each kill everything must be there again within ten minutes: both engines, the
trainer, the web process. Prints `N kills, M problems`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "cluster")]
import kill_service
from two_nodes import add_node, run_two_nodes

from running_service import RunningService, wait_until

READY_S = 600.0
TARGETS = {"node": 0.3, "engine": 0.2, "trainer": 0.15, "keeper": 0.1, "member": 0.1, "cluster": 0.1, "web": 0.05}
FLAGS = ("--on", "ray", "--engines", "2", "--ray-cpus", "0.5", "--drain", "20s")


class ClusterService(RunningService):
    """A service whose engines and trainer are on a cluster."""

    def __enter__(self) -> RunningService:
        self.start()
        self.wait_whole()
        return self

    def wait_whole(self) -> None:
        """Wait until every process and every member is there."""
        wait_until(lambda: self.is_ready() and self.is_whole(), f"all members:\n{self.tail()}", READY_S, 0.2)

    def is_whole(self) -> bool:
        alive = [each for each in self.members() if each["is_up"] and Path(f"/proc/{each['pid']}").exists()]
        return sorted(each["name"] for each in alive) == ["engine-1", "engine-2", "trainer-1"]

    def stop(self, patience_s: float = 150.0) -> int:
        """Ask for a drain, of the members too; the exit status."""
        return super().stop(patience_s)


class ClusterAttack(kill_service.Attack):
    """A service on a cluster, its customers, and the kills."""

    nodes: Any

    def __init__(self, folder: Path, seed: str, targets: Sequence[str], patience_s: float) -> None:
        super().__init__(folder, seed, targets, patience_s)
        self.chance = random.Random(f"cluster:{seed}")
        self.service: ClusterService = ClusterService(folder / "home", folder / "backbone", *FLAGS)

    def run(self, num_kills: int, minutes: float) -> None:
        """Kill on a cluster of two nodes."""
        with run_two_nodes() as self.nodes:
            super().run(num_kills, minutes)

    def kill_once(self) -> None:
        """Kill one thing, perhaps a second one right after, and wait until all is there again."""
        time.sleep(self.chance.uniform(0.0, 2.0))
        names = self.chance.choices(self.targets, [TARGETS[name] for name in self.targets], k=1)
        if self.chance.random() < 0.15:
            names += self.chance.choices(self.targets, k=1)
        for name in names:
            self.kill(name)
            self.kills[name] += 1
            time.sleep(self.chance.choice((0.0, 0.0, 0.3)))
        began = time.monotonic()
        time.sleep(1.0)  # until the keeper has seen it
        try:
            self.service.wait_whole()
        except AssertionError as error:
            self.problems.append(f"after {'+'.join(names)}: {error}")
            return
        self.waits.append(time.monotonic() - began)

    def kill(self, name: str) -> None:
        if name == "node":
            workers = [node for node in self.nodes.list_all_nodes() if node is not self.nodes.head_node]
            self.nodes.remove_node(workers[0], allow_graceful=False)
            add_node(self.nodes)
        elif name in ("web", "cluster"):
            self.service.kill(name)
        elif name in ("engine", "trainer"):
            self.kill_one(
                [each["pid"] for each in self.service.members() if each["name"].startswith(name) and "pid" in each]
            )
        else:
            title = {"keeper": b"ray::FleetKeeper", "member": b"ray::FleetMember"}[name]
            self.kill_one(find_titles(title))

    def kill_one(self, pids: Sequence[int | None]) -> None:
        known = [pid for pid in pids if pid is not None]
        if known:
            try:
                os.kill(self.chance.choice(known), signal.SIGKILL)
            except ProcessLookupError:
                return


def find_titles(title: bytes) -> list[int]:
    """The processes that are called so."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(title):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


if __name__ == "__main__":
    kill_service.TARGETS = TARGETS
    kill_service.READY_S = READY_S
    kill_service.KILLS_BETWEEN_LOOKS = 10
    kill_service.Attack = ClusterAttack
    kill_service.main()
