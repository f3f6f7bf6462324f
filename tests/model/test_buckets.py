"""Rungs: what a compiled pass reads is what the rows are, at any fill."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inlay.model.batch.buckets import SMALLEST, BucketBuffers, Capacity, PackedRows, bound_length, round_up_tokens


@pytest.mark.parametrize("is_varied", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257, 1000, 5000, 8192, 8193, 40_000, 131_072])
def test_a_rung_holds_its_tokens_and_wastes_little(num_tokens, is_varied):
    rung = round_up_tokens(num_tokens, is_varied=is_varied)
    assert rung >= num_tokens
    assert rung == round_up_tokens(rung, is_varied=is_varied)
    if num_tokens > SMALLEST:
        most = 1 / 4 if num_tokens <= 8192 else 1 / 8 if is_varied else 1 / 16
        assert rung - num_tokens < num_tokens * most


def test_rungs_are_few():
    assert len({round_up_tokens(n) for n in range(1025, 2049)}) == 4
    assert len({round_up_tokens(n) for n in range(16385, 32769)}) == 32
    assert len({round_up_tokens(n, is_varied=True) for n in range(16385, 32769)}) == 8


@pytest.mark.parametrize(("length", "expected"), [(38, False), (384, True)])
def test_rows_of_padding_do_not_make_a_pack_of_long_rows_short(length, expected):
    rung = BucketBuffers(Capacity(round_up_tokens(32 * length), 32, 4, 512), 0, 0, torch.device("cpu"))
    assert rung.route.tiling.is_long == expected


def fill(lengths, slots, num_slots=5, num_rows=9):
    generator = np.random.default_rng(0)
    ids = generator.integers(5, 50, size=sum(lengths))
    capacity = Capacity(round_up_tokens(sum(lengths)), num_rows, num_slots, bound_length(np.array(lengths)))
    rung = BucketBuffers(capacity, first_position=2, pad_id=1, device=torch.device("cpu"))
    laid = PackedRows(ids, None, np.array(lengths), np.array(slots))
    rung.fill(rung.lay(laid))
    return rung, ids, capacity


@pytest.mark.parametrize(
    ("lengths", "slots"),
    [([3, 7, 40, 1, 17, 17], [0, 0, 2, 2, 2, 4]), ([2], [3]), ([60, 60, 60, 60, 16], [0, 1, 2, 3, 4])],
)
def test_every_token_has_its_row_position_and_slot_and_every_tile_one_slot(lengths, slots):
    rung, ids, capacity = fill(lengths, slots)
    parts = {name: tensor.numpy() for name, tensor in rung.parts.items()}
    num = sum(lengths)
    assert (parts["ids"][:num] == ids).all()
    assert (parts["ids"][num:] == 1).all()
    expected = np.concatenate([np.arange(length) + 2 for length in lengths])
    assert (parts["positions"][:num] == expected).all()
    assert parts["positions"].min() == 2
    assert (parts["slots"][:num] == np.repeat(slots, lengths)).all()
    assert (parts["slots"][num:] == slots[-1]).all()
    assert (parts["slots"][parts["starts"]] == parts["row_slots"]).all()  # of empty rows too: no slot reads another's
    covered = np.zeros(capacity.num_tokens, int)
    for start, stop in zip(parts["starts"], parts["stops"], strict=True):
        covered[start:stop] += 1
        assert (
            stop - start <= capacity.max_length
        )  # rows of padding too: attention leaves the rest of a longer one undefined
    assert (covered == 1).all()
    covered[:] = 0
    *by_tile, begins, ends = (tensor.numpy() for tensor in rung.tiles.tensors)
    for slot, start, stop in zip(*by_tile, strict=True):
        covered[start:stop] += 1
        assert stop - start <= capacity.tile
        assert (parts["slots"][start:stop] == slot).all()
    assert (covered == 1).all()
    for slot in range(5):
        assert (np.flatnonzero(parts["slots"] == slot) == np.arange(begins[slot], ends[slot])).all()


def test_every_row_of_the_capacity_is_in_one_row_tile_of_its_slot():
    rung, _, capacity = fill([3, 7, 40], [0, 2, 4])
    parts = {name: tensor.numpy() for name, tensor in rung.parts.items()}
    covered = np.zeros(capacity.all_rows, int)
    for slot, start, stop in zip(*(tensor.numpy() for tensor in rung.row_tiles.tensors[:3]), strict=True):
        covered[start:stop] += 1
        assert (parts["row_slots"][start:stop] == slot).all()
    assert (covered == 1).all()
    assert parts["row_slots"][:3].tolist() == [0, 2, 4]


def test_a_second_batch_leaves_nothing_of_the_first_behind():
    rung, _, capacity = fill([60, 60, 60], [0, 1, 2])
    laid = PackedRows(np.array([9, 9]), np.array([1, 1]), np.array([2]), np.array([3]))
    rung.fill(rung.lay(laid))
    parts = {name: tensor.numpy() for name, tensor in rung.parts.items()}
    assert (parts["ids"] == 1).sum() == capacity.num_tokens - 2
    assert parts["types"].sum() == 2
    assert (parts["slots"] == 3).all()
    *_, begins, ends = rung.tiles.tensors
    assert (begins[:3] == ends[:3]).all()
