"""What goes into a batch: rows up to the time it may take, and rows that share a text with those that are in it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from inlay.service.engine.batches import BatchFormer, WorkRate
from inlay.service.engine.fair_queue import FairQueue, WaitingRow
from inlay.service.engine.protocol import Caller

TOKENS = 40


class AllHot:
    """Every version is in a slot."""

    def hold_hot(self, digest):
        return object()

    def release(self, digests):
        pass


def row(text, task, share, tenant="acme"):
    tokens = SimpleNamespace(num_tokens=TOKENS, keys=(text,))
    checked = SimpleNamespace(scope=tenant, share=share, found=None)
    item = SimpleNamespace(tokens=tokens, checked=checked, digest=task)
    return WaitingRow(Caller(tenant, 1.0, None, "interactive"), TOKENS, item)


def form(rows, budget):
    """The sizes of the batches that the rows make."""
    queue = FairQueue()
    former = BatchFormer(queue, AllHot(), lambda: budget, lambda found, tenant: None)
    queue.add(rows)
    sizes = []
    while not former.is_empty:
        former.fill()
        sizes.append(len(former.take().rows))
    return sizes


def test_rows_are_taken_until_the_time_of_a_batch_is_full():
    assert form([row(f"text {number}", "a", 0.0) for number in range(6)], budget=2.5 * TOKENS) == [3, 3]


def test_rows_that_add_no_work_join_a_full_batch():
    rows = [row("a text", f"task {number}", 1.0) for number in range(32)]
    assert form(rows, budget=1.0) == [32]
    assert form([*rows, row("another", "task", 1.0)], budget=1.0) == [32, 1]


def test_rows_that_add_part_of_a_row_share_on_a_slow_machine_too_but_not_for_ever():
    rows = [row("a text", f"task {number}", 0.75) for number in range(10)]
    assert form(rows, budget=1.0) == [5, 5]
    assert form(rows, budget=TOKENS * 3) == [9, 1]


def test_rows_of_another_tenant_share_nothing():
    rows = [row("a text", "a", 1.0), row("a text", "b", 1.0, tenant="globex")]
    assert form(rows, budget=1.0) == [1, 1]


def test_a_row_that_does_not_fit_is_overtaken_by_none():
    rows = [row("a text", "a", 1.0), row("another", "a", 0.0), row("a text", "b", 1.0)]
    assert form(rows, budget=1.0) == [1, 1, 1]


def test_on_a_core_that_others_use_too_batches_stay_as_large_and_the_queue_is_known_to_take_longer():
    alone, shared = WorkRate(1000, 0.06), WorkRate(1000, 0.06)
    for _ in range(200):
        alone.learn(60, 0.06, 0.06)
        shared.learn(60, 0.24, 0.06)  # a quarter of a core
    assert alone.budget == pytest.approx(60, rel=0.01)
    assert shared.budget == pytest.approx(60, rel=0.01)
    assert shared.per_s == pytest.approx(250, rel=0.01)


def test_a_slower_machine_gets_smaller_batches_and_a_short_slow_one_tells_nothing():
    rate = WorkRate(1000, 0.06)
    rate.learn(1, 0.01, 0.01)
    assert rate.per_s == 1000
    for _ in range(200):
        rate.learn(60, 0.12, 0.12)
    assert rate.budget == pytest.approx(30, rel=0.01)
