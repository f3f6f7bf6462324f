"""Studies done by several processes: the same records as by one, whoever is stopped or dies on the way."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_conduct import Counter, file_of, make_plan, without_times
from test_conduct_several import make_plan as make_several

from inlay.model import load_backbone
from inlay.model.tiny import make_tiny_folder
from inlay.research import jobs
from inlay.research.conduct import Pace, Places, Sitting, Stage, conduct
from inlay.research.jobs import Crew, conduct_in_jobs
from inlay.research.records import read_records
from inlay.research.toy import WORDS
from inlay.research.worker import Recipe

LONG = """
title = "small"
tasks = ["glue/cola"]
[arms.full]
method = { name = "full" }
[arms.adapters]
method = { name = "houlsby" }
axes = { size = [2, 4] }
[profiles.tiny]
backbone = "tiny"
rows = "toy"
train = { epochs = 40, batch_size = 2, lr = 1e-3 }
fit = { token_budget = 4096 }
"""
CREW = Crew(2, "cpu", commit="abc")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return load_backbone(str(make_tiny_folder(tmp_path_factory.mktemp("backbones") / "tiny", WORDS)), device="cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Processes share two cores with other tests."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)


def places_in(folder: Path) -> Places:
    return Places(folder / "results", folder / "runs")


class Saboteur(Stage):
    """Does something once it has heard of steps."""

    def __init__(self, act):
        self._act, self.warnings = act, []

    def tell(self, num_done, num_runs, num_busy, num_rows):
        if self._act is not None and num_rows:
            act, self._act = self._act, None
            act()

    def warn(self, message):
        self.warnings.append(message)


def test_two_processes_come_to_the_records_of_one_and_one_that_dies_costs_its_own_unit(tmp_path, backbone, monkeypatch):
    plan, places = make_plan(tmp_path, backbone), places_in(tmp_path)
    hired = []
    hire = jobs._Foreman._hire
    monkeypatch.setattr(jobs._Foreman, "_hire", lambda self, number: hired.append(hire(self, number)) or hired[-1])
    stage = Saboteur(lambda: os.kill(hired[0].process.pid, signal.SIGKILL))
    first = conduct_in_jobs([plan], places, CREW, stage=stage)
    assert len(hired) == 3, "another took its place"
    assert first.failed
    assert {item.id for item in first.missing} == {item.id for item, _ in first.failed}
    assert f"ended with status {-signal.SIGKILL}" in stage.warnings[0]
    failed = [record for record in read_records(file_of(places)) if record.status == "failed"]
    assert {record.id for record in failed} == {item.id for item in first.missing}
    second = conduct_in_jobs([plan], places, CREW)
    assert not second.missing
    assert all(record.status == "finished" for record in read_records(file_of(places)))
    alone = conduct([plan], places_in(tmp_path / "alone"), commit="abc")
    theirs = {record["id"] + record["arm"]: record for record in without_times(alone.records)}
    for ours in without_times(second.records):
        expected = theirs[ours["id"] + ours["arm"]]
        assert ours.pop("dev") == pytest.approx(expected.pop("dev"), abs=1e-3)
        assert {**ours, "curve": 0} == {**expected, "curve": 0}


STOPPED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_jobs import CREW, LONG, Saboteur, make_plan, places_in
from inlay.model import load_backbone
from inlay.research.jobs import conduct_in_jobs

if __name__ == "__main__":
    folder = Path(sys.argv[2])
    plan = make_plan(folder, load_backbone(sys.argv[3], device="cpu"), LONG)
    stage = Saboteur(lambda: print("at work", flush=True))
    try:
        conduct_in_jobs([plan], places_in(folder), CREW, stage=stage)
    except KeyboardInterrupt:
        print("stopped", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_or_killed_all_processes_end_with_their_state_saved(tmp_path, backbone, how):
    (tmp_path / "stopped.py").write_text(STOPPED)
    here = str(Path(__file__).parent)
    command = [sys.executable, tmp_path / "stopped.py", here, tmp_path, backbone.folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        children = _children_of(process.pid)
        assert children
        process.send_signal(how)
        assert process.stdout.readline() == ("stopped\n" if how == signal.SIGINT else "")
    until = time.monotonic() + 30
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    assert list((tmp_path / "runs" / "cohorts").glob("*/state.safetensors"))


def _children_of(pid: int) -> list[str]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_at_the_deadline_what_is_in_hand_is_stopped_and_goes_on_in_the_next_sitting(tmp_path, backbone, monkeypatch):
    plan, places, paces = make_plan(tmp_path, backbone, LONG), places_in(tmp_path), []
    monkeypatch.setattr(jobs, "Pace", lambda deadline: paces.append(Pace(deadline)) or paces[0])
    stage = Saboteur(lambda: setattr(paces[0], "deadline", time.monotonic()))
    first = conduct_in_jobs([plan], places, CREW, deadline=time.monotonic() + 600, stage=stage)
    assert first.missing
    assert not first.failed
    assert list((places.runs / "cohorts").glob("*/state.safetensors"))
    rest = Counter()
    assert not conduct([plan], places, stage=rest).missing
    assert not list((places.runs / "cohorts").glob("*/state.safetensors")), "they were gone on with"
    assert not {record.id for record in first.records} & set(rest.trained)


def test_what_is_compiled_is_compiled_by_one_process_while_others_do_something_else(tmp_path, backbone):
    plan, places = make_plan(tmp_path, backbone), places_in(tmp_path)
    recipe = Recipe({}, {}, "cpu", None, False, places.runs, None, 2)
    foreman = jobs._Foreman(Sitting([plan], places), places, recipe, Stage(), Pace(None))
    foreman._limits = dataclasses.replace(foreman._limits, compiles=True)
    first, second, *_ = (unit for unit in foreman._waiting if unit.items[0].arm.name == "full")
    cohort = next(unit for unit in foreman._waiting if unit.num_runs > 1)
    job = jobs._Job(0, None, None, tmp_path, unit=first, last=first.likeness)
    foreman._jobs.append(job)
    assert not foreman._may_begin(second)
    assert foreman._may_begin(cohort)
    foreman._hear_rows(job, 8)
    assert foreman._may_begin(second)


def test_a_run_that_others_go_on_from_is_trained_by_one_process(tmp_path, backbone):
    few = make_several(tmp_path, backbone, "few")
    places = places_in(tmp_path)
    recipe = Recipe({}, {}, "cpu", None, False, places.runs, None, 2)
    foreman = jobs._Foreman(Sitting([few], places), places, recipe, Stage(), Pace(None))
    (unit,) = foreman._waiting
    halves = [unit.take(unit.items[:2]), unit.take(unit.items[2:])]
    assert foreman._may_begin(halves[1])
    foreman._jobs.append(jobs._Job(0, None, None, tmp_path, unit=halves[0]))
    assert not foreman._may_begin(halves[1])
    source = places.runs / few.items[0].source.id
    source.mkdir(parents=True)
    for name in ("result.json", "best.safetensors"):
        (source / name).touch()
    assert foreman._may_begin(halves[1]), "its weights are there"
