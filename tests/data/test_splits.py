"""The split: shares kept, classes on both sides, equal texts never torn, nothing left to a library's generator."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.data.kinds import KINDS
from inlay.data.splits import DEV, TEST, TRAIN, assign_sides, find_repeats, group_keys


def test_keys_ignore_case_and_blanks_but_not_the_pair():
    assert group_keys(["A  b\n", "a b"], None) == ["a b", "a b"]
    keys = group_keys(["x y", "x", "X  Y"], ["z", "y z", "z"])
    assert keys[0] == keys[2] != keys[1]


def test_shares_hold_in_total_and_in_every_class():
    strata = np.repeat([0, 1, 2], [600, 300, 100])
    sides = assign_sides([f"text {row}" for row in range(1000)], strata, (0.1, 0.2), seed=0)
    for stratum, size in ((0, 600), (1, 300), (2, 100)):
        assert (sides[strata == stratum] == DEV).sum() == size * 0.1
        assert (sides[strata == stratum] == TEST).sum() == size * 0.2


def test_many_small_classes_still_fill_the_dev_side():
    strata = np.repeat(np.arange(100), 3)
    sides = assign_sides([str(row) for row in range(300)], strata, (0.1, 0.0), seed=0)
    assert (sides == DEV).sum() == 30
    assert not (sides == TEST).any()


def test_seed_decides_and_the_order_of_the_rows_does_not():
    keys, strata = [f"text {row}" for row in range(200)], np.arange(200) % 2
    first, again, other = (assign_sides(keys, strata, (0.1, 0.0), seed) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    turned = assign_sides(keys[::-1], strata[::-1], (0.1, 0.0), seed=0)
    assert np.array_equal(turned[::-1], first)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=60),
    shares=st.tuples(st.sampled_from([0.0, 0.1, 0.3]), st.sampled_from([0.0, 0.2])),
    seed=st.integers(0, 5),
)
def test_equal_texts_stay_together_and_every_class_can_be_trained(rows, shares, seed):
    keys, strata = [str(key) for key, _ in rows], np.array([stratum for _, stratum in rows])
    sides = assign_sides(keys, strata, shares, seed)
    for key in set(keys):
        assert len({int(side) for side, other in zip(sides, keys, strict=True) if other == key}) == 1
    first_stratum = {}
    for key, stratum in zip(keys, strata, strict=True):
        first_stratum.setdefault(key, int(stratum))
    for stratum in set(first_stratum.values()):
        own = [row for row, key in enumerate(keys) if first_stratum[key] == stratum]
        assert (sides[own] == TRAIN).any()
    spare = len(first_stratum) - len(set(first_stratum.values()))
    wanted = [side for side, share in zip((DEV, TEST), shares, strict=True) if share]
    for side in wanted[:spare]:  # dev comes first
        assert (sides == side).any()


def test_dev_comes_before_test_where_one_text_is_all_that_can_be_spared():
    keys, strata = ["a", "a", "a", "a", "a", "a", "b", "c"], np.array([1, 0, 0, 0, 0, 0, 0, 0])
    sides = assign_sides(keys, strata, (0.1, 0.2), seed=0)
    assert sorted(sides[6:].tolist()) == [TRAIN, DEV]
    assert (sides[:6] == TRAIN).all()


def test_a_side_that_took_all_that_can_be_spared_gives_the_other_one_of_it():
    sides = assign_sides(["a", "b", "c"], np.zeros(3), (0.5, 0.1), seed=0)
    assert sorted(sides.tolist()) == [TRAIN, DEV, TEST]


@pytest.mark.parametrize("num_rows", [2, 3, 9])
def test_few_rows_give_one_dev_row(num_rows):
    sides = assign_sides([str(row) for row in range(num_rows)], np.zeros(num_rows), (0.01, 0.0), seed=0)
    assert (sides == DEV).sum() == 1


def test_strata_suit_the_kind():
    assert KINDS["classify"].targets.find_strata(np.array([2, 0])).tolist() == [2, 0]
    sets = np.array([[1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]], dtype=np.float32)
    assert KINDS["multilabel"].targets.find_strata(sets).tolist() == [1, 0, 0, -1]
    bins = KINDS["regress"].targets.find_strata(np.arange(100.0))
    assert np.bincount(bins).tolist() == [10] * 10
    assert len(set(KINDS["regress"].targets.find_strata(np.ones(5)))) == 1


def test_repeats_and_conflicts_are_found():
    keys = ["a", "b", "a", "c", "a", "b"]
    assert find_repeats(keys, np.array([0, 1, 0, 1, 1, 1])) == (3, [(0, 4)])
    sets = np.array([[1, 0], [0, 1], [1, 0], [0, 0], [1, 0], [1, 1]], dtype=np.float32)
    assert find_repeats(keys, sets) == (3, [(1, 5)])
