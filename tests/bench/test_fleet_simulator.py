"""The simulator of fleets beside queueing theory: waiting times, hit rates, and what must always hold."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from fleet_cell import PLACEMENTS, Cell, ServiceTimes, find_homes, hash_pairs
from fleet_simulator import Fleet

from inlay.service.engine.placement import count_engines

ONE = ServiceTimes(pass_s=0.01, token_s=0.0)  # 100 rows a second, one at a time
REAL = ServiceTimes(0.006, 0.0002, row_s=0.001, task_s=0.0002, load_s=0.004, load_busy_s=0.001, outside_s=0.002)


def queue(load: float, **settings) -> Fleet:
    """A fleet whose tasks fit the slots and whose batches are single rows, at a share of what it can do."""
    count = settings.get("num_replicas", 1)
    settings = {"num_rows": 60_000, "num_tasks": 10, "num_slots": 10, "most_rows": 1} | settings
    return Fleet(Cell(ONE, 100 * load * count, **settings)).run()


def mean_ms(fleet: Fleet) -> float:
    return fleet.summarise()["mean_ms"]


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_replica_waits_as_the_theory_of_fixed_service_says(load):
    wait_ms = 10 * load / (2 * (1 - load))  # M/D/1: Pollaczek and Khinchine
    assert mean_ms(queue(load)) == pytest.approx(10 + wait_ms, rel=0.06)


@pytest.mark.parametrize(("num_replicas", "load"), [(1, 0.6), (4, 0.7), (16, 0.85)])
def test_one_queue_for_all_waits_as_the_theory_of_many_servers_says(num_replicas, load):
    fleet = queue(load, num_replicas=num_replicas, placement="pull", service="exponential", num_rows=80_000)
    offered = load * num_replicas
    blocked = 1.0  # Erlang's B, one server after another, and from it his C
    for servers in range(1, num_replicas + 1):
        blocked = offered * blocked / (servers + offered * blocked)
    share_that_waits = blocked / (1 - load * (1 - blocked))
    wait_ms = 10 * share_that_waits / (num_replicas * (1 - load))
    assert mean_ms(fleet) == pytest.approx(10 + wait_ms, rel=0.06)


def test_random_replicas_are_queues_of_their_own():
    fleet = queue(0.7, num_replicas=8, placement="random", service="exponential", num_rows=80_000)
    assert mean_ms(fleet) == pytest.approx(10 / (1 - 0.7), rel=0.06)  # M/M/1


def test_the_less_busy_of_two_waits_as_its_fixed_point_says():
    load = 0.9
    fleet = queue(load, num_replicas=200, placement="two-choices", service="exponential", num_rows=150_000)
    # Mitzenmacher 1996, Vvedenskaya 1996: the share of queues of at least k rows is load^(2^k - 1).
    in_system = sum(load ** (2**k - 1) for k in range(1, 30))
    assert mean_ms(fleet) == pytest.approx(10 * in_system / load, rel=0.06)


@pytest.mark.parametrize(("num_slots", "zipf"), [(20, 0.8), (100, 1.0), (400, 1.2)])
def test_slots_are_hit_as_often_as_ches_approximation_says(num_slots, zipf):
    times = dataclasses.replace(REAL, pass_s=1e-5, token_s=0.0, row_s=0.0, task_s=0.0, load_s=1e-4, load_busy_s=0.0)
    cell = Cell(times, 100, num_slots=num_slots, num_tasks=2000, zipf=zipf, num_rows=60_000, seed=3)
    fleet = Fleet(cell).run()
    shares = np.arange(1, 2001.0) ** -zipf
    shares /= shares.sum()
    low, high = 0.0, 1e7  # the time after which a version that nobody asks for leaves: as many are in as there is room
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.sum(1 - np.exp(-shares * middle)) < num_slots else (low, middle)
    expected = float(np.sum(shares * (1 - np.exp(-shares * low))))
    assert fleet.summarise()["hit_rate"] == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "pull"])
def test_every_row_is_answered_once_whatever_fails(placement):
    cell = Cell(
        REAL,
        800,
        placement,
        num_replicas=20,
        num_slots=32,
        num_tasks=3000,
        num_rows=20_000,
        failures_per_hour=300,
        restart_s=4,
        publishes_per_s=20,
        removals_per_s=5,
        far_s=0.01,
    )
    fleet = Fleet(cell).run()
    found = fleet.summarise()
    assert not np.isnan(fleet.done).any()
    assert (fleet.done > fleet.arrivals + REAL.pass_s).all()
    assert all(not replica.queue and not replica.parked for replica in fleet.replicas if replica.is_up)
    assert all(len(replica.hot) <= 32 for replica in fleet.replicas)
    assert found["num_failures"] > 20
    assert 0 < found["retried_share"] < 0.5
    assert len(fleet.publish_s) > 100
    assert Fleet(cell).run().summarise() == found
    assert Fleet(dataclasses.replace(cell, seed=1)).run().summarise() != found


def test_a_lost_replica_costs_a_wait_until_somebody_notices():
    quick, late = (
        Fleet(Cell(REAL, 400, num_replicas=10, num_tasks=50, num_rows=20_000, failures_per_hour=100, detect_s=detect_s))
        .run()
        .summarise()
        for detect_s in (0.2, 5.0)
    )
    assert quick["num_failures"] == late["num_failures"] > 3
    assert late["p999_ms"] > 4000 > quick["p999_ms"]


def test_hashing_hits_more_often_and_copies_spare_the_busiest_replica():
    cell = Cell(REAL, 1500, num_replicas=20, num_slots=64, num_tasks=20_000, num_rows=30_000)
    found = {
        name: Fleet(dataclasses.replace(cell, placement=name)).run().summarise()
        for name in ("two-choices", "rendezvous", "bounded", "replicated")
    }
    assert found["rendezvous"]["hit_rate"] > found["two-choices"]["hit_rate"] + 0.15
    assert found["rendezvous"]["is_overloaded"]
    for name in ("replicated", "bounded"):
        assert not found[name]["is_overloaded"]
        assert found["rendezvous"]["p99_ms"] > 5 * found[name]["p99_ms"]
    assert found["bounded"]["hit_rate"] > found["two-choices"]["hit_rate"] + 0.1


def test_where_a_tasks_own_replicas_have_far_more_to_do_the_next_one_helps():
    settings = {"num_replicas": 8, "num_tasks": 24, "num_slots": 12, "num_rows": 20_000, "zipf": 0.3, "most_rows": 1}
    cells = {name: Cell(ONE, 8 * 70.0, placement=name, **settings) for name in ("replicated", "helped")}
    found = {name: Fleet(cell).run().summarise() for name, cell in cells.items()}
    assert found["replicated"]["is_overloaded"], "one replica has more tasks than it can do"
    assert not found["helped"]["is_overloaded"]
    assert found["helped"]["p99_ms"] < 0.1 * found["replicated"]["p99_ms"]


def test_batches_grow_with_load_up_to_the_target_time():
    budget = Cell(REAL, 1.0).find_budget()
    few, many = (
        Fleet(Cell(REAL, load * 90, num_tasks=40, num_rows=10_000)).run().summarise()["rows_per_batch"]
        for load in (0.2, 0.9)
    )
    assert 1 <= few < many <= math.ceil(budget / 38)


def test_homes_are_even_and_move_only_from_a_replica_that_is_gone():
    tasks = np.arange(20_000)
    homes = find_homes(tasks, 20)
    counts = np.bincount(homes, minlength=20)
    assert abs(counts - 1000).max() < 5 * math.sqrt(1000)
    more = find_homes(tasks, 21)
    moved = homes != more
    assert (more[moved] == 20).all()  # only to the new one
    assert moved.mean() == pytest.approx(1 / 21, rel=0.15)
    assert hash_pairs(tasks[:3], 20).shape == (3, 20)


@pytest.mark.parametrize("bad", [{"placement": "nowhere"}, {"placement": "pull", "num_tasks": 100}])
def test_a_fleet_that_cannot_be_simulated_is_refused(bad):
    with pytest.raises(ValueError, match=r"pull|nowhere"):
        Fleet(Cell(ONE, 50, **bad))


def test_tasks_have_as_many_replicas_as_in_the_service():
    cell = Cell(REAL, 500, "replicated", num_replicas=40, num_tasks=500, num_rows=200)
    fleet = Fleet(cell)
    expected = [count_engines(float(share), 40) for share in fleet.popularity]
    assert fleet._all_spreads.tolist() == expected
    assert expected[0] > 5 > expected[-1] == 1
