"""The trainer as a process of its own: it starts, trains, drains, and goes on where one that was killed was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from trainer_bench import make_rows, open_bench_at

from inlay.service.settings import VARIABLE, ServeSettings
from inlay.service.state import Tenants


@pytest.fixture
def start(tmp_path, backbone_folder):
    """A function that starts a trainer on the test's home."""
    running = []

    def start_it():
        settings = ServeSettings(tmp_path / "home", backbone=str(backbone_folder("bert")), trainer_threads=1)
        environment = os.environ | {VARIABLE: settings.to_json(), "OMP_NUM_THREADS": "1"}
        program = [sys.executable, "-m", "inlay.service.trainer"]
        running.append(subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True))
        return running[-1]

    yield start_it
    for process in running:
        process.kill()
        process.wait()


def wait_for(condition, process, seconds=90.0):
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_a_process_is_killed_started_again_and_drained(tmp_path, backbone_of, start):
    bench = open_bench_at(tmp_path / "home", backbone_of("bert"))
    Tenants(bench.db).add("acme")
    secret = [{"text": f"quokka {row['text']}", "label": row["label"]} for row in make_rows(200)]
    job = bench.submit(secret, settings={"epochs": 100})
    first = start()
    wait_for(lambda: bench.kinds(job).count("epoch") >= 2, first)
    first.kill()
    first.communicate()
    assert bench.see(job).state == "running"
    # The next one takes over at once, goes on, and gives its work back when it is asked to stop.
    second = start()
    wait_for(lambda: bench.kinds(job).count("training") == 2, second)
    wait_for(lambda: bench.see(job).progress is not None, second)
    second.send_signal(signal.SIGTERM)
    _, told = second.communicate(timeout=60)
    assert second.returncode == 0, told
    assert "given back" in told
    assert "quokka" not in told
    assert "billing" not in told
    state = bench.see(job)
    assert (state.state, state.deaths) == ("queued", 1)
    resumed = [event.data for event in bench.workspace().events(job.id) if event.kind == "training"]
    assert [event.message for event in bench.workspace().events(job.id) if event.kind == "training"][1] == (
        "training goes on where it was stopped"
    )
    assert len(resumed) == 2
    bench.db.close()
