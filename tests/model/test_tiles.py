"""Tiles cover every token once, each within its slot; arrays that go to a device together arrive as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inlay.model.batch.buckets import Capacity
from inlay.model.batch.route import Route
from inlay.model.batch.tiles import FEW_TILES, TILE_SIZES, make_tiles, send, tile_capacity

ARRAYS = [
    np.arange(5),
    np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3),
    np.zeros(0, dtype=np.int32),
    np.arange(3, dtype=np.int32),
]


def lay_out(lengths, order):
    starts = {}
    start = 0
    for slot in order:
        starts[slot], start = start, start + lengths[slot]
    return [(slot, starts[slot], starts[slot] + lengths[slot]) for slot in order if lengths[slot]]


@given(st.data(), st.lists(st.integers(0, 200), min_size=1, max_size=8), st.sampled_from(TILE_SIZES))
def test_tiles_cover_every_token_once_and_none_crosses_a_slot(data, lengths, tile):
    segments = lay_out(lengths, data.draw(st.permutations(range(len(lengths)))))
    tiles = make_tiles(segments, len(lengths), tile, tile_capacity(sum(lengths), len(lengths), tile), "cpu")
    found = [-1] * sum(lengths)
    for slot, start, stop in zip(*(tensor.tolist() for tensor in tiles.tensors[:3]), strict=True):
        assert 0 <= stop - start <= tile
        for token in range(start, stop):
            assert found[token] == -1
            found[token] = slot
    assert found == [slot for slot, start, stop in segments for _ in range(start, stop)]
    ranges = list(zip(*(tensor.tolist() for tensor in tiles.tensors[3:]), strict=True))
    assert all(ranges[slot] == (start, stop) for slot, start, stop in segments)
    assert all(begin == end for slot, (begin, end) in enumerate(ranges) if not lengths[slot])


def test_more_tiles_than_the_capacity_are_refused():
    with pytest.raises(AssertionError, match="3 tiles do not fit 2"):
        make_tiles([(0, 0, 40)], 1, 16, 2, "cpu")


@pytest.mark.parametrize("num_tokens", [1216, 64 * FEW_TILES - 1, 64 * FEW_TILES, 38912])
def test_tiles_are_large_only_where_they_fill_the_device_launched_or_captured(num_tokens):
    expected = 64 if num_tokens // 64 >= FEW_TILES else 16
    launched = Route(((0, 0, num_tokens),)).tiled(1, 1, torch.device("cpu")).tiling
    assert launched is not None
    assert launched.tiles.tile == Capacity(num_tokens, 32, 1, 128).tile == expected


def test_tiles_of_a_launched_route_with_few_tokens_to_a_task_are_small():
    segments = tuple((slot, slot * 20, slot * 20 + 20) for slot in range(600))
    tiling = Route(segments).tiled(600, 1, torch.device("cpu")).tiling
    assert tiling is not None
    assert tiling.tiles.tile == 16


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_arrays_of_any_type_and_shape_arrive(device):
    for array, tensor in zip(ARRAYS, send(ARRAYS, device), strict=True):
        assert tensor.device.type == device
        assert tensor.data_ptr() % 16 == 0 or device == "cpu"
        assert torch.equal(tensor.cpu(), torch.from_numpy(array))
