"""Whole files or none: what the atomic writers promise inside one process. Kills are in test_store_processes.py."""

from __future__ import annotations

import os
import stat

import pytest

from inlay.store import write_atomically, write_once


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
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "state.bin", b"content")
    assert os.listdir(tmp_path) == []


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
