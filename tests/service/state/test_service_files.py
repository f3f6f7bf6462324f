"""Copies of shared files: what a process reads is left alone, and what a killed one left is deleted."""

from __future__ import annotations

import os
from pathlib import Path

from inlay.service.state import ServicePaths, SharedFiles


def test_copies_of_living_processes_stay_also_where_there_is_no_proc(tmp_path, monkeypatch):
    paths = ServicePaths(tmp_path)
    fetched = paths.run / "fetched"
    mine, left = fetched / f"{os.getpid()}-0a", fetched / f"{2**31 - 1}-0b"
    for folder in (mine, left):
        folder.mkdir(parents=True)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: not path.is_relative_to("/proc") and exists(path))
    assert SharedFiles(paths).sweep_fetched() == 1
    assert mine.is_dir()
    assert not left.is_dir()
