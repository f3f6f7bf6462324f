"""Studies done by several processes: the same records as by one, whoever is stopped or dies on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_conduct_several import make_plan as make_several
from test_session import ROW, STUDY, Counter, file_of, make_plan, without_times

from inlay.errors import LostProcess, Missing
from inlay.model import load_backbone
from inlay.model.backbone.tiny import make_tiny_folder
from inlay.studies.run import jobs
from inlay.studies.run.jobs import Crew, conduct_in_jobs
from inlay.studies.run.recording import Origin, Recorder
from inlay.studies.run.records import read_records
from inlay.studies.run.session import Pace, Places, Sitting, Stage, conduct
from inlay.studies.run.worker import Order, Recipe, _Line, _Worker
from inlay.studies.spec.toy import WORDS

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
train = { epochs = 16, batch_size = 2, lr = 1e-3 }
fit = { token_budget = 4096 }
"""
CREW = Crew(2, "cpu", commit="abc")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return load_backbone(str(make_tiny_folder(tmp_path_factory.mktemp("backbones") / "tiny", WORDS)), device="cpu")


FORKS = multiprocessing.get_context("forkserver")
# Imported once, not by every process: tests that count on a process of its own, as users have it, ask for `spawned`.
FORKS.set_forkserver_preload(
    ["inlay.studies.run.units", "inlay.studies.spec.planning", "inlay.model.backbone.families", "transformers"]
)


@pytest.fixture(autouse=True)
def quick_processes(monkeypatch):
    monkeypatch.setattr(jobs, "PROCESSES", FORKS)


@pytest.fixture
def spawned(quick_processes, monkeypatch):
    monkeypatch.setattr(jobs, "PROCESSES", multiprocessing.get_context("spawn"))


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


def test_two_processes_come_to_the_records_of_one_and_one_that_dies_costs_its_own_unit(
    tmp_path, backbone, spawned, monkeypatch
):
    # Long enough to be at work when the first steps are heard of, and one unit more than processes.
    longer = LONG.replace('["glue/cola"]', '["glue/cola", "glue/rte"]')
    plan, places = make_plan(tmp_path, backbone, longer), places_in(tmp_path)
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
from multiprocessing import Pipe
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_jobs import CREW, LONG, Saboteur, make_plan, places_in
from inlay.model import load_backbone
from inlay.studies.run.jobs import conduct_in_jobs

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


def share_gpu(monkeypatch, num_jobs, share, num_parameters=1, writes=False, num_gpus=1):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100 * 2**30))
    gpu = SimpleNamespace(device=torch.device("cuda"), num_parameters=num_parameters, writes=writes)
    return jobs._Limits.of([gpu], num_jobs, share)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("num_parameters", [1, 2**26, 2**28, 2**31])
def test_a_share_of_the_memory_is_all_that_the_processes_take_together(monkeypatch, num_parameters, writes):
    for num_jobs, share in itertools.product((1, 2, 3, 8, 9), (1.0, 0.5)):
        limits = share_gpu(monkeypatch, num_jobs, share, num_parameters, writes)
        for num_copies in range(min(limits.most_copies, num_jobs) + 1):
            num_cohorts = min(limits.most_cohorts, num_jobs - num_copies)
            assert num_cohorts * limits.for_cohort + num_copies * limits.for_copy <= 0.9 * share + 1e-6
        assert limits.for_cohort > 0


@pytest.mark.parametrize(
    ("num_parameters", "writes", "expected"), [(2**24, False, 4), (2**26, False, 2), (2**24, True, 4), (2**26, True, 4)]
)
def test_few_cohorts_share_a_gpu_so_that_the_first_ones_end_soon(monkeypatch, num_parameters, writes, expected):
    assert share_gpu(monkeypatch, 9, 1.0, num_parameters, writes).most_cohorts == expected
    assert share_gpu(monkeypatch, 1, 1.0, num_parameters, writes).most_cohorts == 1


def take_gpu(foreman, limits):
    """Its limits are those of a GPU; gives a cohort, a copy and a baseline, to be dealt any number of times."""
    foreman._limits, units = limits, foreman._waiting
    foreman._waiting = []
    kinds = (jobs._is_cohort, lambda unit: unit.is_finetuned, lambda unit: unit.kind == "baseline")
    return [next(filter(kind, units)) for kind in kinds]


def begin(foreman, unit, number, folder):
    job = jobs._Job(number, None, None, folder, unit=unit, share=foreman._grant(unit, number))
    foreman._jobs.append(job)
    return job


def test_cohorts_get_the_memory_of_copies_once_none_waits(tmp_path, backbone, monkeypatch):
    foreman, _ = make_foreman(tmp_path, backbone)
    limits = share_gpu(monkeypatch, 8, 1.0, num_parameters=110_000_000)
    cohort, copy, baseline = take_gpu(foreman, limits)
    usable = limits.usable
    assert usable == pytest.approx(0.9 - 7 * 4 * 110e6 / (100 * 2**30)), "seven others hold a backbone, perhaps idle"
    foreman._waiting = [cohort, cohort] + [copy] * 6
    assert foreman._grant(cohort, 0) == pytest.approx(limits.for_cohort)
    foreman._waiting = [cohort, cohort, copy]
    assert foreman._grant(cohort, 0) == pytest.approx((usable - limits.for_copy) / 2)
    foreman._waiting = [cohort, cohort]
    first = begin(foreman, cohort, 0, tmp_path)
    assert first.share == pytest.approx(usable / 2)
    foreman._waiting = []
    assert begin(foreman, cohort, 1, tmp_path).share == pytest.approx(usable / 2)
    foreman._jobs = []
    assert begin(foreman, cohort, 0, tmp_path).share == pytest.approx(usable), "the last has it all"
    assert not foreman._has_room(copy, 3), "one that is put back waits for it"
    assert not foreman._has_room(cohort, 3)
    assert foreman._has_room(baseline, 3), "it takes none"
    foreman._jobs = []
    assert foreman._has_room(copy, 3)


def test_a_process_that_has_a_copy_in_hand_finds_room_for_a_cohort_after_it(tmp_path, backbone, monkeypatch):
    foreman, _ = make_foreman(tmp_path, backbone)
    limits = share_gpu(monkeypatch, 2, 1.0, num_parameters=110_000_000)
    cohort, copy, baseline = take_gpu(foreman, limits)
    for other in (copy, baseline):
        foreman._jobs, foreman._waiting = [], [cohort]
        beside = begin(foreman, other, 1, tmp_path)
        first = begin(foreman, cohort, 0, tmp_path)
        assert first.share == pytest.approx(limits.usable / 2)
        foreman._jobs.remove(beside)
        assert foreman._has_room(cohort, 1)


def test_whatever_begins_and_ends_no_unit_gets_less_than_its_least_and_all_no_more_than_there_is(
    tmp_path, backbone, monkeypatch
):
    foreman, _ = make_foreman(tmp_path, backbone)
    units = foreman._waiting
    for seed in range(400):
        draw = random.Random(seed)
        num_jobs, share, num_gpus = draw.choice([1, 2, 3, 8]), draw.choice([1.0, 0.6]), draw.choice([1, 2])
        num_parameters = draw.choice([1, 22_000_000, 110_000_000, 2**30])
        foreman._waiting, foreman._jobs = units, []
        limits = share_gpu(monkeypatch, num_jobs, share, num_parameters, num_gpus=num_gpus)
        cohort, copy, baseline = take_gpu(foreman, limits)
        least = {id(cohort): limits.for_cohort, id(copy): limits.for_copy, id(baseline): 0.0}
        foreman._waiting = [cohort] * draw.randrange(12) + [copy] * draw.randrange(20) + [baseline] * draw.randrange(4)
        while foreman._waiting or foreman._jobs:
            at_work = {job.number for job in foreman._jobs}
            idle = [number for number in range(num_jobs) if number not in at_work]
            able = [(n, unit) for n in idle for unit in foreman._waiting if foreman._has_room(unit, n)]
            assert able or foreman._jobs, "something may always begin where nothing is in hand"
            if not able or (foreman._jobs and draw.random() < 0.3):
                foreman._jobs.remove(ended := draw.choice(foreman._jobs))
                if ended.unit is copy and draw.random() < 0.1:  # a row broke: what is left of it is tried one by one
                    foreman._waiting += [copy] * draw.randrange(7)
                continue
            number, unit = draw.choice(able)
            foreman._waiting.remove(unit)
            job = begin(foreman, unit, number, tmp_path)
            assert job.share >= least[id(unit)], seed
            for gpu in range(num_gpus):
                on_it = [job.share for job in foreman._jobs if job.number % num_gpus == gpu]
                assert sum(on_it) <= 0.9 * share + 1e-5, seed


def test_no_more_copies_of_a_backbone_train_at_a_time_than_have_the_memory_they_need(monkeypatch):
    assert share_gpu(monkeypatch, 8, 1.0, num_parameters=2**26).most_copies == 8
    cramped = share_gpu(monkeypatch, 8, 0.25, num_parameters=2**26)
    assert cramped.most_copies == 2, "of 12.5 GiB for copies that need 4.5 each"
    assert share_gpu(monkeypatch, 8, 0.25, num_parameters=2**31).most_copies == 1, "one is tried at least"


def test_a_copy_waits_while_as_many_train_as_there_is_memory_for(tmp_path, backbone):
    foreman, _ = make_foreman(tmp_path, backbone)
    first, second, *_ = (unit for unit in foreman._waiting if unit.is_finetuned)
    foreman._jobs.append(jobs._Job(0, None, None, tmp_path, unit=first))
    assert foreman._may_begin(second)
    foreman._limits = dataclasses.replace(foreman._limits, most_copies=1)
    assert not foreman._may_begin(second)
    assert all(foreman._may_begin(unit) for unit in foreman._waiting if not unit.is_finetuned)


def test_copies_are_counted_on_each_gpu_by_itself(tmp_path, backbone):
    foreman, _ = make_foreman(tmp_path, backbone)
    first, second, *_ = (unit for unit in foreman._waiting if unit.is_finetuned)
    foreman._limits = dataclasses.replace(foreman._limits, most_copies=1, num_gpus=2)
    foreman._jobs.append(jobs._Job(4, None, None, tmp_path, unit=first))
    assert not foreman._may_begin(second, 0), "as 4, on the first"
    assert foreman._may_begin(second, 5)


def test_what_is_compiled_is_compiled_by_one_process_while_others_do_something_else(tmp_path, backbone):
    plan, places = make_plan(tmp_path, backbone), places_in(tmp_path)
    recipe = Recipe({}, {}, "cpu", None, False, places.runs, None, 2)
    foreman = jobs._Foreman(Sitting([plan], places), places, recipe, Stage(), Pace(None))
    foreman._limits = dataclasses.replace(foreman._limits, compiles=True)
    first, second, *_ = (unit for unit in foreman._waiting if unit.items[0].arm.name == "full")
    cohort = next(unit for unit in foreman._waiting if unit.num_runs > 1 and not unit.is_finetuned)
    job = jobs._Job(0, None, None, tmp_path, unit=first, last=first.likeness)
    foreman._jobs.append(job)
    assert not foreman._may_begin(second)
    assert foreman._may_begin(cohort)
    foreman._hear_rows(job, 8)
    assert foreman._may_begin(second)


def test_what_is_not_compiled_waits_for_no_other_process(tmp_path, backbone):
    foreman, _ = make_foreman(tmp_path, backbone)
    foreman._limits = dataclasses.replace(foreman._limits, compiles=True)
    (baseline,) = (unit for unit in foreman._waiting if unit.kind == "baseline")
    full = next(unit for unit in foreman._waiting if unit.items[0].arm.name == "full")
    assert foreman._compiles(full)
    assert not foreman._compiles(baseline)


def test_a_unit_that_is_done_is_familiar_though_it_told_of_no_step(tmp_path, backbone):
    foreman, theirs = make_foreman(tmp_path, backbone)
    foreman._limits = dataclasses.replace(foreman._limits, compiles=True)
    foreman._jobs = [foreman._hire(0)]
    foreman._deal()
    likeness = foreman._jobs[0].last
    theirs[0].send(("done", []))
    foreman._listen(0.1)
    assert likeness in foreman._familiar


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


def test_what_goes_on_from_a_run_waits_for_the_cohort_that_trains_it(tmp_path, backbone):
    plans, places = [make_several(tmp_path, backbone, name) for name in ("several", "few")], places_in(tmp_path)
    recipe = Recipe({}, {}, "cpu", None, False, places.runs, None, 2)
    foreman = jobs._Foreman(Sitting(plans, places), places, recipe, Stage(), Pace(None))
    source, few = (next(unit for unit in foreman._waiting if bool(unit.items[0].source) is it) for it in (False, True))
    assert not foreman._may_begin(few)
    foreman._waiting.remove(source)
    assert foreman._may_begin(few), "nobody else will train it"


def make_foreman(tmp_path, backbone, stage=None, text=STUDY):
    """A foreman whose processes are dealt to over pipes whose other ends are ours, and never started."""
    plan, places = make_plan(tmp_path, backbone, text), places_in(tmp_path)
    recipe = Recipe({}, {}, "cpu", None, False, places.runs, None, 2)
    foreman = jobs._Foreman(Sitting([plan], places), places, recipe, stage or Stage(), Pace(None))
    theirs = []

    def hire(number):
        ours, other = Pipe()
        theirs.append(other)
        return jobs._Job(number, Undead(), ours, tmp_path / "log")

    foreman._hire = hire
    return foreman, theirs


class Undead:
    """Stands for a process: alive until it is killed."""

    pid, exitcode = None, None

    def join(self, timeout=None):
        assert timeout is not None or self.exitcode is not None, "it would wait forever"

    def is_alive(self):
        return self.exitcode is None

    def kill(self):
        self.exitcode = -signal.SIGKILL


def test_a_process_that_broke_gets_no_other_unit_and_is_replaced(tmp_path, backbone):
    foreman, theirs = make_foreman(tmp_path, backbone)
    foreman._jobs = [foreman._hire(0)]
    foreman._deal()
    num_waiting = len(foreman._waiting)
    theirs[0].send(("broken", "AcceleratorError: illegal address"))
    foreman._listen(0.1)
    foreman._deal()
    assert len(foreman._waiting) == num_waiting
    theirs[0].close()
    foreman._listen(0.1)
    foreman._deal()
    assert len(theirs) == 2
    assert theirs[1].poll()
    assert len(foreman._sitting.failed) > 0


def make_row(tmp_path, backbone, stage=None):
    """A foreman, the other end of its only process, and the row of four copies that this one was dealt."""
    foreman, theirs = make_foreman(tmp_path, backbone, stage, ROW)
    foreman._jobs = [foreman._hire(0)]
    foreman._deal()
    return foreman, theirs[0], foreman._jobs[0].unit


def write_state(foreman, unit):
    """What a row leaves on disk, as far as it is looked at here."""
    folder = foreman._places.runs / "cohorts" / "row"
    folder.mkdir(parents=True)
    (folder / "cohort.json").write_text(json.dumps({"runs": [item.id for item in unit.items]}))
    (folder / "state.safetensors").touch()
    return folder / "state.safetensors"


def finish(foreman, item):
    (foreman._places.runs / item.id).mkdir(parents=True)
    (foreman._places.runs / item.id / "result.json").touch()


def test_a_process_that_dies_in_a_row_costs_the_copy_it_was_at_and_the_others_wait_singly(tmp_path, backbone):
    foreman, line, row = make_row(tmp_path, backbone)
    assert row.num_runs == 4
    first, second, *others = row.items
    state, (whole,) = write_state(foreman, row), foreman._waiting
    finish(foreman, first)
    for word in (("entered", first.id), ("rows", 8), ("entered", second.id), ("broken", "AcceleratorError")):
        line.send(word)
    foreman._listen(0.1)
    assert [item for item, _ in foreman._sitting.failed] == [second]
    assert [record.id for record in read_records(file_of(foreman._places))] == [second.id]
    assert [unit.items for unit in foreman._waiting] == [whole.items, (first,), *((item,) for item in others)]
    assert foreman._num_units == 2 + 3
    assert state.exists(), "the copy goes on from it in the next sitting"


def test_a_row_lost_before_anything_of_it_began_is_tried_singly_and_then_fails(tmp_path, backbone):
    foreman, line, row = make_row(tmp_path, backbone)
    state, foreman._waiting = write_state(foreman, row), []
    line.send(("broken", "AcceleratorError"))
    line.close()
    foreman._listen(0.1)
    assert not foreman._sitting.failed
    assert not state.exists(), "nobody would find it again"
    assert [unit.items for unit in foreman._waiting] == [(item,) for item in row.items]
    foreman._deal()
    (job,) = foreman._jobs
    single = job.unit
    finish(foreman, single.items[0])  # as if the process died whenever its rows are scored
    foreman._hear_breakdown(job, "AcceleratorError")
    assert [item for item, _ in foreman._sitting.failed] == list(single.items)
    assert len(foreman._waiting) == 3


def test_a_row_of_a_process_that_dies_while_all_are_stopped_stays_as_it_is(tmp_path, backbone):
    foreman, line, row = make_row(tmp_path, backbone)
    state = write_state(foreman, row)
    line.close()
    foreman._stop()
    assert state.exists()
    assert not foreman._sitting.failed
    assert not foreman._waiting


def test_of_rows_whose_process_is_killed_one_copy_is_missing(tmp_path, backbone, monkeypatch):
    text = ROW.replace('"glue/cola", "glue/stsb"', '"glue/cola"').replace("[1, 2, 3, 4]", "[40, 41, 42, 43]")
    plan, places, hired = make_plan(tmp_path, backbone, text), places_in(tmp_path), []
    hire = jobs._Foreman._hire
    monkeypatch.setattr(jobs._Foreman, "_hire", lambda self, number: hired.append(hire(self, number)) or hired[-1])

    class Killer(Stage):
        def tell(self, num_done, num_runs, num_busy, num_rows):
            if hired[0].has_stepped and hired[0].process.is_alive() and len(hired) == 2:
                os.kill(hired[0].process.pid, signal.SIGKILL)

    first = conduct_in_jobs([plan], places, CREW, stage=Killer())
    assert len(hired) == 3
    ((failed, _),) = first.failed
    assert first.missing == [failed]
    rest = Counter()
    assert not conduct([plan], places, stage=rest).missing
    assert rest.trained == [failed.id]


def test_a_sitting_ends_after_three_units_were_lost_before_their_first_step(tmp_path, backbone):
    class Ruin(Stage):
        def begin(self, number, num_units, unit):
            """It is said before it is asked for: to the foreman it is all the same."""
            theirs[-1].send(("broken", "AcceleratorError: illegal address"))

        def warn(self, message):
            theirs[-1].close()

    foreman, theirs = make_foreman(tmp_path, backbone, Ruin())
    foreman._recipe = dataclasses.replace(foreman._recipe, num_jobs=1)
    with pytest.raises(LostProcess, match="lost one after another") as caught:
        foreman.run()
    assert "--jobs 1" in caught.value.hint
    assert len(theirs) <= 4
    failed = [record for record in read_records(file_of(foreman._places)) if record.status == "failed"]
    assert len(failed) == len(foreman._sitting.failed)


class Words:
    """A line that keeps what is said."""

    def __init__(self):
        self.said = []

    def send(self, what, value=None):
        self.said.append((what, value))

    def interruptible(self):
        return contextlib.nullcontext()


def test_a_process_goes_on_after_what_a_user_can_mend_and_ends_after_what_nobody_foresaw(tmp_path, monkeypatch):
    line = Words()
    worker = _Worker(line, Recipe({}, {}, "cpu", None, False, tmp_path, None, 2), 0)
    errors = [Missing("no data", "fetch it"), RuntimeError("sticky")]
    monkeypatch.setattr(worker, "_do", lambda order: exec("raise error", {"error": errors.pop(0)}))
    assert worker.obey(None)
    assert not worker.obey(None)
    assert line.said == [("refused", ("no data", "fetch it")), ("broken", "RuntimeError: sticky")]


@pytest.fixture
def line():
    """A line of this process, whose handler of Ctrl-C it replaces meanwhile; and its other end."""
    before = signal.getsignal(signal.SIGINT)
    ours, theirs = Pipe()
    yield _Line(ours), theirs
    signal.signal(signal.SIGINT, before)


class Interrupting:
    """A value that brings a Ctrl-C while it is sent."""

    def __reduce__(self):
        signal.raise_signal(signal.SIGINT)
        return (int, ())


def test_an_interrupt_waits_until_a_word_is_out_and_comes_after_it(line):
    speaker, theirs = line
    with pytest.raises(KeyboardInterrupt), speaker.interruptible():
        speaker.send("rows", Interrupting())
    assert theirs.recv() == ("rows", 0)
    speaker.send("done", Interrupting())
    assert theirs.recv() == ("done", 0)
    with pytest.raises(KeyboardInterrupt), speaker.interruptible():
        pytest.fail("what came between two units stops the next one")
    with speaker.interruptible():
        pass


def test_when_nobody_listens_one_interrupt_comes_and_no_second(line):
    speaker, theirs = line
    theirs.close()
    with pytest.raises(KeyboardInterrupt), speaker.interruptible():
        speaker.send("rows", 1)
    with speaker.interruptible():
        speaker.send("records", [])


def test_a_process_that_is_stopped_as_it_says_it_is_done_stops_nobody_else(tmp_path, backbone):
    foreman, theirs = make_foreman(tmp_path, backbone)
    foreman._jobs = [foreman._hire(0)]
    foreman._deal()
    for word in (("done", []), ("stopped", None)):
        theirs[0].send(word)
    foreman._listen(0.1)
    assert not foreman._busy


def test_half_a_word_is_the_end_of_a_process_and_what_it_said_before_is_kept(tmp_path, backbone):
    foreman, theirs = make_foreman(tmp_path, backbone)
    foreman._jobs = [foreman._hire(0)]
    foreman._deal()
    unit, (job,) = foreman._jobs[0].unit, foreman._jobs
    plan = foreman._sitting.plans[unit.items[0].study]
    item = unit.items[0]
    theirs[0].send(
        (
            "records",
            [
                Recorder(plan, plan.backbone, Origin.here(plan.backbone, None)).record(
                    item, plan.tasks[item.task], dev={"matthews": 0.5}
                )
            ],
        )
    )
    theirs[0].send_bytes(b"half a w")
    foreman._listen(0.1)
    assert job.process.exitcode == -signal.SIGKILL
    assert foreman._jobs != [job]
    assert item not in [lost for lost, _ in foreman._sitting.failed]
    assert {lost.id for lost, _ in foreman._sitting.failed} == {other.id for other in unit.items if other != item}


def test_an_interrupt_is_heard_between_words_and_the_second_at_once(tmp_path, backbone):
    class Impatient(Stage):
        def begin(self, number, num_units, unit):
            theirs[number - 1].send(("stopped", None))
            signal.raise_signal(signal.SIGINT)

        def end(self, unit, seconds):
            ends.append(unit)

    ends = []
    foreman, theirs = make_foreman(tmp_path, backbone, Impatient())
    foreman._recipe = dataclasses.replace(foreman._recipe, num_jobs=1)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        foreman.run()
    assert isinstance(theirs[0].recv(), Order), "the order was given whole"
    assert len(ends) == 1, "what it said was heard"
    assert signal.getsignal(signal.SIGINT) is before
    with jobs._noting_interrupts() as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_process_that_dies_while_all_are_stopped_leaves_no_failure(tmp_path, backbone):
    foreman, theirs = make_foreman(tmp_path, backbone)
    foreman._jobs = [foreman._hire(0)]
    foreman._deal()
    theirs[0].close()
    foreman._stop()
    assert not foreman._busy
    assert not foreman._sitting.failed
    assert not file_of(foreman._places).exists()


def test_who_takes_the_place_of_a_process_that_could_not_be_dealt_to_gets_the_next_unit(tmp_path, backbone):
    class Quitting(Stage):
        def begin(self, number, num_units, unit):
            begun.append(unit)
            if number == 1:
                theirs[0].close()
            else:
                theirs[-1].send(("done", []))

    begun = []
    foreman, theirs = make_foreman(tmp_path, backbone, Quitting())
    foreman._recipe = dataclasses.replace(foreman._recipe, num_jobs=1)
    num_units = len(foreman._waiting)
    foreman.run()
    assert len(begun) == num_units
