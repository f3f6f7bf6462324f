"""Which of several engines is asked: any while all fits one, and the task's own beyond that."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from inlay.service.engine import Replica, Roster
from inlay.service.engine.placement import TaskShares, choose, count_engines, find_holders, order_for


def make_roster(number: int, *, is_crowded: bool = True) -> Roster:
    replicas = tuple(Replica(f"engine-{place + 1}", "10.0.0.1", 4000 + place) for place in range(number))
    return Roster(1, "token", replicas, is_crowded)


TASKS = [f"task-{number}" for number in range(600)]


def test_every_process_finds_the_same_engines_for_a_task():
    roster = make_roster(8)
    for task in TASKS[:50]:
        firsts = {choose(task, roster, 0.0, Counter(), random.Random(seed))[0] for seed in range(5)}
        assert firsts == {order_for(task, roster)[0]}


def test_tasks_are_spread_evenly_over_engines():
    roster = make_roster(6)
    counts = Counter(order_for(task, roster)[0].name for task in TASKS)
    assert len(counts) == 6
    assert max(counts.values()) < 1.5 * min(counts.values())


def test_an_engine_that_goes_moves_only_its_own_tasks():
    before, after = make_roster(6), make_roster(5)
    gone = before.replicas[5]
    for task in TASKS:
        first, *rest = order_for(task, before)
        assert order_for(task, after)[0] == (rest[0] if first == gone else first)


def test_a_task_has_more_engines_the_more_it_is_asked_for():
    assert count_engines(0.0, 10) == 1
    assert count_engines(0.1, 10) == 2
    assert count_engines(0.9, 10) == 10
    roster = make_roster(10)
    asked = {choose("busy", roster, 0.3, Counter(), random.Random(seed))[0] for seed in range(200)}
    assert asked == set(order_for("busy", roster)[:6])


def test_without_a_crowd_the_less_busy_of_two_is_asked_and_all_others_come_after():
    roster = make_roster(2, is_crowded=False)
    busy = Counter({"engine-1": 5})
    for seed in range(20):
        chosen = choose("task", roster, 1.0, busy, random.Random(seed))
        assert [each.name for each in chosen] == ["engine-2", "engine-1"]
    many = choose("task", make_roster(9, is_crowded=False), 0.1, Counter())
    assert len(set(many)) == 9


def test_the_next_engine_helps_out_while_a_tasks_own_has_far_more_to_do_than_others():
    roster = make_roster(4)
    own, following, *_ = order_for("task", roster)
    assert choose("task", roster, 0.0, Counter({own.name: 30}))[0] == own, "a few rows are no reason to leave"
    busy = Counter({own.name: 300, following.name: 100})
    assert choose("task", roster, 0.0, busy)[:2] == [following, order_for("task", roster)[2]]
    everywhere = Counter({replica.name: 300 for replica in roster.replicas})
    assert choose("task", roster, 0.0, everywhere)[0] == own


def test_a_new_version_goes_to_all_engines_or_where_tasks_have_their_own_to_those():
    assert find_holders("task", make_roster(5, is_crowded=False)) == make_roster(5).replicas
    crowded = make_roster(5)
    assert list(find_holders("task", crowded)) == order_for("task", crowded)[:2]


def test_shares_of_tasks_fade():
    now = [100.0]
    shares = TaskShares(lambda: now[0])
    assert shares.find("a") == 0.0
    shares.add(Counter(a=30, b=10))
    assert shares.find("a") == pytest.approx(0.75)
    now[0] += 10.0
    shares.add(Counter(b=25))
    assert shares.find("a") == pytest.approx(15 / 45)
    now[0] += 1000.0
    shares.add(Counter(b=1))
    assert shares.find("a") == 0.0
