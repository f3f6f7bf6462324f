"""Tasks are drawn as published, and a step's rows depend on seed and step alone."""

from __future__ import annotations

import numpy as np
import pytest

from inlay.data.sampling import TaskSampler, task_shares
from inlay.settings import JointConfig

SIZES = (10, 100, 1000)


def make_sampler(seed=0, sizes=SIZES, steps=50, **config):
    return TaskSampler(sizes, JointConfig(**config), 8, steps, 4, seed)


def test_tasks_are_drawn_by_the_tth_root_of_their_rows():
    for temperature in (1.0, 10.0):
        roots = [size ** (1 / temperature) for size in SIZES]
        shares = task_shares(SIZES, JointConfig(temperature=temperature))
        np.testing.assert_allclose(shares, np.array(roots) / sum(roots))
    np.testing.assert_allclose(task_shares(SIZES, JointConfig(sampling="uniform")), 1 / 3)


def test_annealed_shares_go_from_the_rows_to_their_fifth_root():
    config = JointConfig(sampling="annealed")
    for epoch, exponent in [(0, 1.0), (2, 1 - 0.8 * 2 / 3), (3, 0.2)]:
        powers = np.array(SIZES, dtype=float) ** exponent
        np.testing.assert_allclose(task_shares(SIZES, config, epoch, 4), powers / powers.sum())


def test_a_homogeneous_batch_is_of_one_task_and_full():
    sampler = make_sampler()
    for cursor in range(50):
        ((_, rows),) = sampler.rows(0, cursor).items()
        assert len(rows) == 8


def test_a_mixed_batch_has_as_many_rows_in_all_and_draws_by_the_shares():
    sampler = make_sampler(batches="mixed", temperature=1.0, steps=4000)
    counts = sampler.counts(0)
    assert (counts.sum(1) == 8).all()
    np.testing.assert_allclose(counts.mean(0) / 8, task_shares(SIZES, JointConfig(temperature=1.0)), atol=0.01)


@pytest.mark.parametrize("batches", ["homogeneous", "mixed"])
def test_every_row_of_a_task_is_seen_once_before_any_is_seen_again(batches):
    sampler = make_sampler(batches=batches, sampling="uniform")
    seen = {task: [] for task in range(3)}
    for epoch in range(2):
        for cursor in range(50):
            for task, rows in sampler.rows(epoch, cursor).items():
                seen[task] += rows.tolist()
    for size, rows in zip(SIZES, seen.values(), strict=True):
        for start in range(0, len(rows), size):
            once = rows[start : start + size]
            assert len(set(once)) == len(once)
    assert len(seen[0]) > 10


def test_a_step_is_the_same_whenever_it_is_asked_for():
    walked, jumped = make_sampler(batches="mixed"), make_sampler(batches="mixed")
    steps = [(epoch, cursor) for epoch in range(3) for cursor in range(50)]
    before = {step: walked.rows(*step) for step in steps}
    for step in [(2, 40), (0, 3), (1, 0)]:
        again = jumped.rows(*step)
        assert again.keys() == before[step].keys()
        assert all(np.array_equal(again[task], rows) for task, rows in before[step].items())


def test_seeds_draw_other_tasks_and_other_rows():
    first, second = make_sampler(0), make_sampler(1)
    assert not np.array_equal(first.counts(0), second.counts(0))
    assert not np.array_equal(first._order(1, 0), second._order(1, 0))


def test_shares_are_numbers_at_any_temperature():
    np.testing.assert_array_equal(task_shares([8551, 67349], JointConfig(temperature=1e-3)), [0, 1])
    np.testing.assert_allclose(task_shares([8551, 67349], JointConfig(temperature=1e9)), 0.5)


def test_an_epoch_far_on_is_found_by_a_sampler_that_begins_there():
    config = JointConfig(steps=3000)
    made = TaskSampler((5, 7), config, batch_size=2, steps_per_epoch=1, num_epochs=3000, seed=0)
    for epoch in range(3000):
        expected = made.rows(epoch, 0)
    fresh = TaskSampler((5, 7), config, batch_size=2, steps_per_epoch=1, num_epochs=3000, seed=0)
    found = fresh.rows(2999, 0)
    assert found.keys() == expected.keys()
    for task in found:
        np.testing.assert_array_equal(found[task], expected[task])


def test_every_pass_over_a_task_has_an_order_of_its_own():
    sampler = make_sampler()
    passes = [tuple(sampler._order(1, turn)) for turn in range(4)]
    assert len(set(passes)) == 4
    assert all(sorted(rows) == list(range(100)) for rows in passes)
