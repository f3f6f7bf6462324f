"""Studies on a Ray cluster of two nodes on this machine: the records of one machine, whatever dies on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from two_nodes import add_node, run_two_nodes

from inlay import studies
from inlay.cluster import RaySettings, messages
from inlay.model import load_backbone, make_tiny_folder
from inlay.studies import StudyDirs, StudyPlan, StudyProgress, load_tasks, plan_study, run_studies, run_studies_on_ray
from inlay.training import list_stopped

pytestmark = pytest.mark.ray
EXACT = 1e-5
TASKS = 'tasks = ["glue/cola", "glue/stsb"]'
STUDY = f"""
title = "small"
{TASKS}
[arms.baseline]
kind = "baseline"
tasks = ["glue/cola"]
seeds = 1
[arms.full]
method = {{ name = "full" }}
[arms.adapters]
method = {{ name = "houlsby" }}
axes = {{ size = [2, 4] }}
[profiles.tiny]
backbone = "tiny"
rows = "toy"
seeds = 2
train = {{ epochs = 2, batch_size = 8, lr = 1e-3, dropout = 0.0, head_dropout = 0.0 }}
fit = {{ token_budget = 4096 }}
"""
LONG = STUDY.replace("epochs = 2, batch_size = 8", "epochs = 20, batch_size = 2")


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    with run_two_nodes() as nodes:
        yield nodes
        ray.shutdown()


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tiny_folder(tmp_path_factory.mktemp("backbones") / "tiny", studies.WORDS)
    return load_backbone(str(folder), device="cpu")


def make_plan(folder: Path, backbone: Any, text: str = STUDY) -> StudyPlan:
    path = folder / "small.toml"
    path.write_text(text)
    study = studies.read_study(path, "tiny")
    return plan_study(study, backbone, *load_tasks(study, None))


def dirs_in(folder: Path) -> StudyDirs:
    return StudyDirs(folder / "results", folder / "runs")


def send(plan: StudyPlan, dirs: StudyDirs, **more: Any) -> Any:
    return run_studies_on_ray([plan], dirs, RaySettings(), commit="abc", device="cpu", **more)


def lines_of(dirs: StudyDirs) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (dirs.results / "small" / "tiny-tiny.jsonl").read_text().splitlines()]


def assert_as_alone(plan: StudyPlan, dirs: StudyDirs, alone: StudyDirs) -> None:
    """What came from the cluster is what one machine comes to, each run once."""
    assert run_studies([plan], alone, commit="abc").missing == []
    expected = {(line["id"], line["arm"]): line for line in lines_of(alone)}
    found = lines_of(dirs)
    assert len(found) == len(expected) == len(plan.items)
    timely = dict.fromkeys(("seconds", "date", "extra", "curve", "dev"), 0)
    for line in found:
        other = expected[line["id"], line["arm"]]
        assert line["dev"][line["metric"]] == pytest.approx(other["dev"][line["metric"]], abs=EXACT)
        assert line["dev"] == pytest.approx(other["dev"], abs=1e-3)  # calibration is counted in bins: it jumps
        assert {**line, **timely} == {**other, **timely}
    assert not [*dirs.runs.glob(".ray-*"), *dirs.runs.glob("claims/*.json")]


@pytest.mark.parametrize("is_shared", [True, False], ids=["one folder", "folders of their own"])
def test_a_study_on_two_nodes_is_that_of_one_machine(
    two_nodes: Any, backbone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    if not is_shared:  # as where no machine sees another's disk
        monkeypatch.setattr(messages.Path, "touch", lambda path, **_: None)
    plan, dirs = make_plan(tmp_path, backbone), dirs_in(tmp_path)
    found = send(plan, dirs)
    assert (found.missing, found.failed, found.total_trained) == ([], [], len(plan.items))
    assert_as_alone(plan, dirs, dirs_in(tmp_path / "alone"))
    assert send(plan, dirs).total_trained == 0, "nothing is trained twice"


class Saboteur(StudyProgress):
    """Does something once two units have taken steps."""

    def __init__(self, act: Any) -> None:
        self._act, self.num_begun, self.warnings = act, 0, []

    def begin(self, number: int, num_units: int, unit: Any) -> None:
        self.num_begun += 1

    def tell(self, num_done: int, num_runs: int, num_busy: int, num_rows: int) -> None:
        if num_rows and self.num_begun > 1 and self._act is not None:
            act, self._act = self._act, None
            act()

    def warn(self, message: str) -> None:
        self.warnings.append(message)


def test_a_node_that_dies_costs_no_record(two_nodes: Any, backbone: Any, tmp_path: Path) -> None:
    plan, dirs = make_plan(tmp_path, backbone, LONG), dirs_in(tmp_path)
    node = next(iter(two_nodes.worker_nodes))
    stage = Saboteur(lambda: two_nodes.remove_node(node, allow_graceful=False))
    try:
        found = send(plan, dirs, progress=stage)
    finally:
        add_node(two_nodes)
    assert [text for text in stage.warnings if "died; another one continues it" in text], stage.warnings
    assert (found.missing, found.failed) == ([], [])
    assert_as_alone(plan, dirs, dirs_in(tmp_path / "alone"))


def test_what_is_stopped_is_saved_and_the_next_session_goes_on(two_nodes: Any, backbone: Any, tmp_path: Path) -> None:
    plan, dirs = make_plan(tmp_path, backbone, LONG), dirs_in(tmp_path)

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        send(plan, dirs, progress=Saboteur(stop))
    assert list_stopped(dirs.runs / "cohorts"), "the state is kept"
    assert not list(dirs.runs.glob("claims/*.json"))
    began = time.monotonic()
    late = send(plan, dirs, deadline=began + 3.0)
    assert late.missing
    assert time.monotonic() - began < 20.0
    assert send(plan, dirs).missing == []
    assert_as_alone(plan, dirs, dirs_in(tmp_path / "alone"))


def test_the_command_on_a_cluster(two_nodes: Any, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "inlay",
        "study",
        "uva",
        "--profile",
        "tiny",
        "--on",
        "ray",
        "--no-report",
        "--json",
    ]
    environment = {**os.environ, "INLAY_HOME": str(tmp_path), "RAY_ADDRESS": two_nodes.address}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["left"] == 0
    assert said["trained"] == said["studies"][0]["runs"]
