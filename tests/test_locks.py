"""A lock that threads get in the order they asked for it."""

from __future__ import annotations

import copy
import gc
import signal
import threading
import time

import pytest

from inlay.locks import FairLock, lock_of


def test_a_thread_may_take_a_lock_that_it_has():
    lock, others = FairLock(), []
    with lock:
        with lock:
            pass
        thread = threading.Thread(target=lambda: (lock.__enter__(), others.append(1), lock.__exit__()))
        thread.start()
        time.sleep(0.05)
        assert not others  # it is not free before the outer block ends
    thread.join()
    assert others


def test_waiting_threads_get_the_lock_in_the_order_they_came():
    lock, order = FairLock(), []

    def take(number):
        with lock:
            order.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(5)]
    with lock:
        for number, thread in enumerate(threads, start=1):
            thread.start()
            while len(lock._waiting) < number:
                time.sleep(0.001)
    with lock:  # it comes after those that waited
        assert order == [0, 1, 2, 3, 4]
    for thread in threads:
        thread.join()


def test_one_thread_at_a_time_has_the_lock():
    lock, number, inside = FairLock(), 0, 0

    def count():
        nonlocal number, inside
        for _ in range(300):
            with lock:
                inside += 1
                assert inside == 1
                number += 1
                inside -= 1

    threads = [threading.Thread(target=count) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert number == 1800


def test_a_thread_that_is_interrupted_while_it_waits_keeps_nobody_waiting():
    lock, has_it, may_go = FairLock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            has_it.set()
            may_go.wait()

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    thread = threading.Thread(target=hold)
    thread.start()
    has_it.wait()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt), lock:
            pass
    finally:
        signal.signal(signal.SIGALRM, before)
        may_go.set()
        thread.join()
    with lock:
        assert not lock._waiting


def test_an_object_has_one_lock_for_as_long_as_it_lives():
    class Shared:
        pass

    shared, other = Shared(), Shared()
    lock = lock_of(shared)
    assert lock is lock_of(shared)
    assert lock is not lock_of(other)
    assert lock_of(copy.copy(shared)) is not lock
    del shared
    gc.collect()
    with lock:
        pass
