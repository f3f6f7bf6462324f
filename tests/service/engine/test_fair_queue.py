"""The queue's fairness, by simulation: no torch, no time."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from inlay.service.engine.fair_queue import FairQueue, TokenBuckets, WaitingRow
from inlay.service.engine.protocol import Caller


def row(tenant, num_tokens=10, weight=1.0, band="interactive"):
    return WaitingRow(Caller(tenant, weight, None, band), num_tokens)


def take(queue):
    return queue.take(lambda row: float(row.num_tokens))


def serve(queue, work):
    """Serve so much work; return what each (tenant, band) got."""
    found = {}
    while work > 0 and (taken := take(queue)) is not None:
        key = taken.caller.tenant, taken.caller.band
        found[key] = found.get(key, 0) + taken.num_tokens
        work -= taken.num_tokens
    return found


def test_the_queue_needs_no_torch():
    program = (
        "import sys, inlay.service.engine.fair_queue, inlay.service.engine.engine_client\n"
        "assert not {'torch', 'transformers', 'numpy', 'pandas'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def test_tenants_are_served_by_work_and_not_by_rows():
    queue = FairQueue()
    queue.add([row("long", 100) for _ in range(100)])
    queue.add([row("short", 10) for _ in range(1000)])
    found = serve(queue, 4000)
    assert abs(found["long", "interactive"] - found["short", "interactive"]) <= 100


@pytest.mark.parametrize("weight", [0.5, 2.0, 3.0])
def test_shares_follow_the_weights(weight):
    queue = FairQueue()
    queue.add([row("a", weight=weight) for _ in range(2000)])
    queue.add([row("b") for _ in range(2000)])
    found = serve(queue, 10_000)
    assert found["a", "interactive"] / found["b", "interactive"] == pytest.approx(weight, rel=0.02)


def test_a_noisy_neighbour_takes_nothing_from_who_asks_for_less_than_its_share():
    """One tenant asks for ten times its share, nine for half of theirs: their rows wait for about one round.

    A row is a unit of work, and the engine does a unit in a unit of time.
    """
    chosen, queue = random.Random(0), FairQueue()
    arrived, waits = {}, {}
    for now in range(40_000):
        queue.add([row("noisy", 1)])  # ten times a tenth
        for tenant in range(9):
            if chosen.random() < 0.05:
                quiet = row(f"quiet-{tenant}", 1)
                arrived[id(quiet)] = quiet, now
                queue.add([quiet])
        taken = take(queue)
        if taken is not None and id(taken) in arrived:
            waits.setdefault(taken.caller.tenant, []).append(now - arrived[id(taken)][1])
    for own in waits.values():
        own.sort()
        assert own[int(0.99 * len(own))] <= 20
    assert queue.find("noisy").num_rows > 15_000
    assert sum(queue.find(f"quiet-{tenant}").num_rows for tenant in range(9)) < 30


def test_who_comes_back_from_idleness_has_no_claim_to_what_it_did_not_use():
    queue = FairQueue()
    queue.add([row("busy") for _ in range(2000)])
    serve(queue, 10_000)
    queue.add([row("idle") for _ in range(2000)])
    found = serve(queue, 2000)
    assert abs(found["busy", "interactive"] - found["idle", "interactive"]) <= 10
    # and who leaves with more than its share does not find it forgotten
    queue = FairQueue()
    queue.add([row("a", 1000), row("b", 10)])
    serve(queue, 1010)
    queue.add([row("a", 10) for _ in range(200)])
    queue.add([row("b", 10) for _ in range(200)])
    assert serve(queue, 500) == {("b", "interactive"): 500}


def test_bulk_gets_what_is_left_and_at_least_a_twentieth():
    queue = FairQueue()
    queue.add([row("a", band="bulk") for _ in range(5000)])
    assert serve(queue, 1000) == {("a", "bulk"): 1000}
    queue.add([row("b") for _ in range(5000)])
    queue.add([row("c") for _ in range(5000)])
    found = serve(queue, 20_000)
    assert found["a", "bulk"] == pytest.approx(1000, abs=20)
    assert found["b", "interactive"] == pytest.approx(found["c", "interactive"], abs=20)


def test_rows_of_a_tenant_keep_their_order_also_when_they_were_parked():
    queue, order = FairQueue(), []
    rows = [row("a", number) for number in range(1, 9)]
    queue.add(rows)
    parked = []

    def price(taken):
        if taken.num_tokens % 2 and taken not in parked:
            parked.append(taken)
            return None
        return 1.0

    for _ in range(2):
        order.append(queue.take(price).num_tokens)
    assert (queue.num_rows, queue.num_tokens) == (6, 30)  # the parked ones wait too
    queue.put_back(parked)
    while (taken := queue.take(lambda row: 1.0)) is not None:
        order.append(taken.num_tokens)
    assert order == [2, 4, 1, 3, 5, 6, 7, 8]
    assert queue.num_rows == queue.num_tokens == 0


def test_dropped_rows_are_not_served_and_not_counted():
    queue = FairQueue()
    rows = [row("a") for _ in range(4)] + [row("b") for _ in range(4)]
    queue.add(rows)
    assert queue.drop(rows[0])
    assert not queue.drop(rows[0])
    assert (queue.num_rows, queue.find("a").num_rows) == (7, 3)
    found = []
    while (taken := take(queue)) is not None:
        found.append(taken)
    assert sorted(map(id, found)) == sorted(map(id, rows[1:]))
    assert not queue.tenants


def test_any_order_of_adding_taking_parking_and_dropping_serves_each_row_once():
    chosen = random.Random(1)
    for _ in range(200):
        queue, all_rows, served, parked = FairQueue(), [], [], []

        def price(taken, parked=parked):
            if chosen.random() < 0.3:
                parked.append(taken)
                return None
            return taken.num_tokens

        for _ in range(60):
            action = chosen.random()
            if action < 0.4:
                band = chosen.choice(["interactive", "bulk"])
                new = [row(chosen.choice("abc"), chosen.randint(1, 5), chosen.choice([1, 2]), band) for _ in range(3)]
                all_rows += new
                queue.add(new)
            elif action < 0.6 and (taken := queue.take(price)) is not None:
                served.append(taken)
            elif action < 0.75:
                queue.put_back(parked[:])
                parked.clear()
            elif all_rows:
                dropped = chosen.choice(all_rows)
                if queue.drop(dropped):
                    served.append(dropped)
            waiting = [each for each in all_rows if each.is_waiting]
            assert (queue.num_rows, queue.num_tokens) == (len(waiting), sum(each.num_tokens for each in waiting))
        queue.put_back(parked)
        while (taken := take(queue)) is not None:
            served.append(taken)
        assert sorted(map(id, served)) == sorted(map(id, all_rows))


def test_weights_that_are_no_weights_stop_nobody():
    queue = FairQueue()
    queue.add([row("a", weight=0.0), row("b", weight=float("nan")), row("c", weight=-1.0), row("d")])
    assert {take(queue).caller.tenant for _ in range(4)} == set("abcd")


def test_a_bucket_holds_a_minute_and_refills_all_the_time():
    buckets, caller = TokenBuckets(), Caller("a", 1.0, 600)
    assert buckets.find_wait_s(caller, 600, 0.0) == 0
    buckets.use(caller, 600, 0.0)
    assert buckets.find_wait_s(caller, 10, 0.0) == pytest.approx(1.0)
    assert buckets.find_wait_s(caller, 10, 1.0) == pytest.approx(0)
    assert buckets.find_wait_s(Caller("b", 1.0, 600), 600, 1.0) == 0  # another tenant's is its own
    assert buckets.find_wait_s(Caller("c"), 10**9, 1.0) == 0
    assert buckets.find_wait_s(Caller("d", 1.0, 0), 1, 1.0) == float("inf")


def test_a_request_of_more_than_a_minute_is_taken_with_a_full_bucket_and_paid_for_afterwards():
    buckets, caller = TokenBuckets(), Caller("a", 1.0, 600)
    assert buckets.find_wait_s(caller, 1200, 0.0) == 0
    buckets.use(caller, 1200, 0.0)
    assert buckets.find_wait_s(caller, 1, 0.0) == pytest.approx(60.1)
    assert buckets.find_wait_s(caller, 1200, 0.0) == pytest.approx(120)
