"""A Ray cluster of two nodes of one processor each on this machine, with little memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STORE_BYTES = 100 * 2**20
_ATTEMPTS = 4


@contextmanager
def run_two_nodes(folder: Path | None = None) -> Iterator[Any]:
    """Give the cluster; its address is in $RAY_ADDRESS inside the block.

    With a folder each node keeps its own files below it, in `node-1` and `node-2`, as machines with disks of their own.
    """
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - as if the machine were the cluster's own
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES, **_keep_in(folder, 1)}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    os.environ["RAY_ADDRESS"] = nodes.address
    try:
        add_node(nodes, folder, 2)
        yield nodes
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        nodes.shutdown()


def add_node(nodes: Any, folder: Path | None = None, number: int = 2) -> None:
    """Add a node of one processor; again, where a busy machine took longer to start it than the 30 s that Ray waits."""
    for attempt in range(_ATTEMPTS):
        try:
            nodes.add_node(num_cpus=1, object_store_memory=STORE_BYTES, **_keep_in(folder, number))
            return
        except Exception as error:
            if attempt + 1 == _ATTEMPTS or "timed out" not in str(error):
                raise


def _keep_in(folder: Path | None, number: int) -> dict[str, Any]:
    return {} if folder is None else {"env_vars": {"INLAY_LOCAL": str(folder / f"node-{number}")}}
