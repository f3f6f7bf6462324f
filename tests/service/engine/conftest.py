"""Tasks of several tenants, of several methods and kinds."""

from __future__ import annotations

import pytest
from running_engine import SPECS


@pytest.fixture(scope="session")
def publish_tasks(publish_random):
    """A function: publish so many tasks of several methods and kinds for tenants in turn; their names in the store."""

    def publish(store, backbone, number, tenants=("a", "b", "c")):
        names = [f"{tenants[index % len(tenants)]}.task-{index}" for index in range(number)]
        for index, name in enumerate(names):
            publish_random(store, name, backbone, SPECS[index % len(SPECS)], index)
        return names

    return publish
