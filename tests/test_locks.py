"""Locks of threads, which get them in the order they asked for them, and claims of processes on files."""

from __future__ import annotations

import copy
import errno
import fcntl
import gc
import os
import signal
import threading
import time

import pytest

from inlay.locks import FairLock, claim, lock_of, read_claim


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


def test_processes_that_look_at_a_claim_at_once_are_not_taken_for_its_owner(tmp_path):
    path = tmp_path / "training.lock"
    with claim(path, ["run"]):
        assert read_claim(path).is_held
    found = []
    threads = [threading.Thread(target=lambda: found.extend(read_claim(path).is_held for _ in range(50))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 100
    assert not any(found)


def test_a_claim_is_seen_where_only_files_open_for_writing_can_be_locked(tmp_path, monkeypatch):
    usual = fcntl.flock

    def flock_of_nfs(file, operation):
        number = file if isinstance(file, int) else file.fileno()
        is_writable = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        if operation & fcntl.LOCK_EX and not is_writable:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return usual(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    path = tmp_path / "training.lock"
    with claim(path, ["run"]):
        found = read_claim(path)
        assert (found.is_held, found.is_sure) == (True, True)
    found = read_claim(path)
    assert (found.is_held, found.is_sure) == (False, True)


def test_without_locks_nothing_is_claimed_and_nothing_is_sure(tmp_path, monkeypatch):
    path = tmp_path / "training.lock"
    with claim(path, ["run"]):
        pass

    def refuse(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    found = read_claim(path)
    assert (found.is_held, found.is_sure) == (False, False)
    with claim(path, ["run"]):
        assert not path.exists()
