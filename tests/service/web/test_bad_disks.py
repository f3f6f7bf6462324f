"""Disks that are full or hang: an upload says so and leaves nothing, and rows are answered meanwhile."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from real_server import serving, wait_until
from web_bench import CSV

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
ROWS = {"task": "mail", "rows": ["a prize"]}
PROMPT_S = 1.0
"""far below how long a disk hangs here, far above what an answer takes"""


def fail(*_):
    raise FULL


@pytest.mark.parametrize("name", ["open", "fsync", "replace"])
def test_an_upload_on_a_full_disk_says_so_and_leaves_nothing(bench, acme, monkeypatch, name):
    folder = bench.db.paths.datasets("acme")
    folder.mkdir(parents=True)
    real = getattr(os, name)

    def act(first, *others, **more):
        is_ours = name == "fsync" or "datasets" in str(first)
        return fail() if is_ours else real(first, *others, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, name, act)
        answer = acme.post("/v1/datasets?name=a.csv", content=CSV)
        predicted = acme.post("/v1/predict", json=ROWS)
    assert (answer.status_code, answer.json()["code"]) == (507, "disk-full")
    assert str(bench.db.paths.home) not in answer.text
    assert not list(folder.iterdir())
    assert predicted.status_code == 200
    assert acme.get("/v1/datasets").json()["items"] == []
    assert acme.post("/v1/datasets?name=a.csv", content=CSV).status_code == 201


def test_while_a_disk_hangs_and_the_database_is_locked_rows_are_answered(bench, acme, monkeypatch):
    hangs, synced = threading.Event(), threading.Event()
    real = os.fsync

    def hang(descriptor):
        synced.set()
        assert hangs.wait(30)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", hang)
    key = {"authorization": f"Bearer {bench.secrets['acme']}"}
    with serving(bench) as served, ThreadPoolExecutor(1) as others, httpx.Client(base_url=served.url) as client:
        url = f"{served.url}/v1/datasets?name=a.csv"
        upload = others.submit(httpx.post, url, content=CSV, headers=key, timeout=60)
        wait_until(synced.is_set, 20)
        locked = sqlite3.connect(bench.db.paths.database, isolation_level=None)
        locked.execute("BEGIN IMMEDIATE")  # as a writer whose commit hangs
        try:
            for _ in range(20):
                began = time.monotonic()
                assert client.post("/v1/predict", json=ROWS, headers=key).status_code == 200
                assert time.monotonic() - began < PROMPT_S
            assert not upload.done()
        finally:
            locked.execute("ROLLBACK")
            locked.close()
            hangs.set()
        assert upload.result(30).status_code == 201
