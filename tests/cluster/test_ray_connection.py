"""A cluster that is not there is refused soon, with what to do."""

from __future__ import annotations

import time

import pytest

from inlay.cluster import connect, parse_address
from inlay.errors import BadConfig, Missing


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "ray://[::1]:1"])
def test_where_nothing_listens_is_refused_at_once(address):
    pytest.importorskip("ray")
    began = time.monotonic()
    with pytest.raises(Missing, match="no Ray cluster at") as refused:
        connect(address)
    assert "ray start --head" in refused.value.hint
    assert time.monotonic() - began < 10.0


def test_addresses_are_ray_or_a_place():
    assert parse_address("ray") == "auto"
    assert parse_address("ray://head:10001") == "ray://head:10001"
    for text in ("slurm", "http://head", ""):
        with pytest.raises(BadConfig, match="is not a cluster"):
            parse_address(text)
