"""The number of engines and trainers: more within seconds, less after a while, never beyond the limits."""

from __future__ import annotations

from inlay.service.on_ray.scaling import TRAINER_WORK_S, Scaler


def run_queue(scaler: Scaler, queue_s: float, begin: float, seconds: float) -> float:
    now = begin
    while now < begin + seconds:
        scaler.follow_queue(queue_s, now)
        scaler.bound(1, 8)
        now += 0.25
    return now


def test_engines_grow_when_the_queue_stays_long_and_not_for_a_moment():
    scaler = Scaler(1)
    now = run_queue(scaler, 2.0, 0.0, 1.0)
    now = run_queue(scaler, 0.2, now, 5.0)
    assert scaler.number == 1
    now = run_queue(scaler, 2.0, now, 3.5)
    assert scaler.number == 2
    run_queue(scaler, 2.0, now, 60.0)
    assert scaler.number == 8


def test_engines_go_one_by_one_once_nothing_waits():
    scaler = Scaler(4)
    now = run_queue(scaler, 0.0, 0.0, 59.0)
    assert scaler.number == 4
    now = run_queue(scaler, 0.0, now, 2.0)
    assert scaler.number == 3
    now = run_queue(scaler, 0.2, now, 120.0)
    assert scaler.number == 3, "neither long nor short: it stays"
    run_queue(scaler, 0.0, now, 600.0)
    assert scaler.number == 1


def test_trainers_follow_the_queued_work():
    scaler = Scaler(1)
    scaler.follow_work(3.5 * TRAINER_WORK_S, 0.0)
    assert scaler.bound(1, 3) == 3
    for now in range(1, 59):
        scaler.follow_work(0.0, float(now))
    assert scaler.number == 3
    for now in range(59, 250):
        scaler.follow_work(0.0, float(now))
    assert scaler.bound(1, 3) == 1
