"""Commands in the several processes of `torchrun`: one speaks, one publishes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inlay.store import Store

from .conftest import SETTINGS, Inlay, Mail

SOURCE = Path(__file__).parents[2] / "src"


def test_torchrun_trains_a_sweep_and_speaks_with_one_voice(mail: Mail, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "inlay"]
    grid = ["--lr", "1e-3,1e-2", *(word for word in SETTINGS if word not in ("--lr", "1e-2"))]
    command = ["sweep", str(mail.data), "--task", "swept", "--backbone", str(mail.backbone), *grid, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "INLAY_HOME": str(mail.store), "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([*launcher, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)  # one document, from one process
    assert len(data["runs"]) == 2
    assert done.stderr.count("task swept from") == 1
    assert [info.version.reference for info in Store(mail.store).versions("swept")] == ["swept@1"]
    cohorts = [json.loads(path.read_text())["runs"] for path in (mail.store / "runs" / "cohorts").glob("*/cohort.json")]
    own = {run["run_id"] for run in data["runs"]}
    assert sorted(len(runs) for runs in cohorts if set(runs) <= own) == [1, 1], "each process trained a run of its own"


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


def test_only_training_may_run_in_several_processes(inlay: Inlay, mail: Mail, second_of_two: None) -> None:
    ended = inlay("predict", "mail", "free prize")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.splitlines() == [
        "process 1: error: `predict` runs in one process, not in 2",
        "hint: run it without `torchrun`",
    ]


def test_a_place_that_is_no_number_is_refused_and_not_a_traceback(
    inlay: Inlay, monkeypatch: pytest.MonkeyPatch, second_of_two: None
) -> None:
    monkeypatch.setenv("RANK", "first")
    ended = inlay("tasks")
    assert ended.status == 2
    assert "`RANK` is `first`" in ended.err
