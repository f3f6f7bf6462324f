"""Whole files or none: what the atomic writers promise inside one process. Kills are in test_store_processes.py."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import time

import pytest

from inlay.errors import InlayError
from inlay.store import DRAFT_PREFIX, files, locked, write_atomically, write_once
from inlay.store.files import is_abandoned


def test_write_atomically_replaces_and_makes_folders(tmp_path):
    path = tmp_path / "a" / "b" / "state.bin"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["state.bin"]


def test_write_once_never_overwrites(tmp_path):
    path = tmp_path / "1.json"
    write_once(path, b"first")
    with pytest.raises(FileExistsError):
        write_once(path, b"second")
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["1.json"]


@pytest.mark.parametrize("write", [write_atomically, write_once])
def test_failed_write_leaves_nothing(tmp_path, monkeypatch, write):
    def full_disk(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path / "state.bin", b"content")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_an_error_that_says_how_much_room_was_needed_and_where(tmp_path, monkeypatch, number):
    path = tmp_path / "state.bin"
    write_atomically(path, b"before")

    def full_disk(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(InlayError, match=re.escape(f"`{path}`: it takes 1,234 bytes")) as caught:
        write_atomically(path, [b"a" * 1000, memoryview(b"b" * 234)])
    assert caught.value.code == "disk-full"
    assert ("quota" in caught.value.message) == (number == errno.EDQUOT)
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["state.bin"]


def test_a_draft_is_abandoned_only_once_its_writer_is_gone(tmp_path, monkeypatch):
    seen = []

    def look(descriptor):
        seen.extend(is_abandoned(path) for path in tmp_path.glob(f"{DRAFT_PREFIX}*"))

    monkeypatch.setattr(os, "fsync", look)
    write_atomically(tmp_path / "state.bin", b"content")
    assert seen == [False]
    left = tmp_path / f"{DRAFT_PREFIX}1-2"
    left.write_bytes(b"half")
    assert is_abandoned(left)


def hold_in_turns(path, stop):
    while not stop.is_set():
        with locked(path, exclusive=False, in_turn=True):
            time.sleep(0.03)


def test_who_wants_a_lock_alone_is_served_beside_steady_sharers(tmp_path):
    path, stop, served = tmp_path / "lock", threading.Event(), []

    def take_alone():
        for _ in range(3):
            with locked(path, exclusive=True, in_turn=True):
                served.append(1)

    sharers = [threading.Thread(target=hold_in_turns, args=(path, stop), daemon=True) for _ in range(6)]
    for thread in sharers:
        thread.start()
    alone = threading.Thread(target=take_alone, daemon=True)
    alone.start()
    alone.join(timeout=20)
    stop.set()
    for thread in sharers:
        thread.join(timeout=20)
    assert len(served) == 3
    assert not any(thread.is_alive() for thread in sharers), "and those who share go on"


@pytest.mark.parametrize("exclusive", [True, False])
def test_who_waits_for_a_lock_too_long_is_told_who_holds_it(tmp_path, monkeypatch, exclusive):
    monkeypatch.setattr(files, "PATIENCE_SECONDS", {True: 0.2, False: 0.2})
    path = tmp_path / "lock"
    with locked(path, exclusive=not exclusive, in_turn=True):
        with (
            pytest.raises(InlayError, match=f"process {os.getpid()} ") as caught,
            locked(path, exclusive=exclusive, in_turn=True),
        ):
            pass
        assert caught.value.code == "store-busy"
    with locked(path, exclusive=exclusive, in_turn=True):
        pass  # nobody waits for what failed


@pytest.mark.parametrize("write", [write_atomically, write_once])
def test_file_and_folder_are_synced_and_the_file_before_it_is_named(tmp_path, monkeypatch, write):
    events = []

    def note(name):
        original = getattr(os, name)

        def call(target, *rest):
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(target).st_mode)
            events.append("sync folder" if is_folder else name)
            return original(target, *rest)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "replace", "link"):
        note(name)
    write(tmp_path / "state.bin", b"content")
    assert events == ["fsync", "replace" if write is write_atomically else "link", "sync folder"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
@pytest.mark.parametrize("write", [write_atomically, write_once])
def test_permissions_follow_the_umask(tmp_path, umask, mode, write):
    before = os.umask(umask)
    try:
        write(tmp_path / "file", b"content")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
