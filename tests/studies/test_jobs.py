"""Studies done by several processes: the same records as by one, whoever is stopped or dies on the way."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_joint_runs import make_plan as make_several
from test_session import ROW, Counter, file_of, make_plan, without_times

from inlay.errors import LostProcess
from inlay.model import load_backbone
from inlay.model.backbone.tiny import make_tiny_folder
from inlay.studies.run import worker_processes
from inlay.studies.run.claimed_work import Claims
from inlay.studies.run.records import StudyDirs, read_appended, read_records
from inlay.studies.run.session import Deadline, Session, StudyProgress, run_studies
from inlay.studies.run.worker_processes import JobSettings, run_studies_in_jobs
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
JOBS = JobSettings(2, "cpu", commit="abc")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return load_backbone(str(make_tiny_folder(tmp_path_factory.mktemp("backbones") / "tiny", WORDS)), device="cpu")


FORKS = multiprocessing.get_context("forkserver")
# Imported once, not by every process: tests that count on a process of its own, as users have it, ask for `spawned`.
FORKS.set_forkserver_preload(["inlay.studies.run.worker_processes", "inlay.model.backbone.families", "transformers"])


@pytest.fixture(autouse=True)
def quick_processes(monkeypatch):
    monkeypatch.setattr(worker_processes, "PROCESSES", FORKS)


@pytest.fixture
def spawned(quick_processes, monkeypatch):
    monkeypatch.setattr(worker_processes, "PROCESSES", multiprocessing.get_context("spawn"))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Processes share two cores with other tests."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)


@pytest.fixture
def started(monkeypatch):
    """The processes that are started, in their order."""
    found, start = [], worker_processes._Workers._start

    def note(self, number):
        found.append(start(self, number))
        return found[-1]

    monkeypatch.setattr(worker_processes._Workers, "_start", note)
    return found


def dirs_in(folder: Path) -> StudyDirs:
    return StudyDirs(folder / "results", folder / "runs")


class Saboteur(StudyProgress):
    """Does something once it has heard of steps."""

    def __init__(self, act):
        self._act, self.warnings, self.begun = act, [], []

    def begin(self, number, num_units, unit):
        self.begun.append((number, num_units, unit.describe()))

    def tell(self, num_done, num_runs, num_busy, num_rows):
        if self._act is not None and num_rows:
            act, self._act = self._act, None
            act()

    def warn(self, message):
        self.warnings.append(message)


def assert_alike(ours, theirs, **same):
    """Records of two sessions, which may have trained in other company, are the same."""
    expected = {record["id"] + record["arm"]: record for record in without_times(theirs)}
    assert len(ours) == len(expected)
    for record in without_times(ours):
        other = expected[record["id"] + record["arm"]]
        assert record.pop("dev") == pytest.approx(other.pop("dev"), abs=1e-3)
        assert {**record, "curve": 0, **same} == {**other, "curve": 0, **same}


def test_two_processes_come_to_the_records_of_one_though_one_of_them_dies(tmp_path, backbone, spawned, started):
    # Long enough to be at work when the first steps are heard of, and one unit more than processes.
    longer = LONG.replace('["glue/cola"]', '["glue/cola", "glue/rte"]')
    plan, dirs = make_plan(tmp_path, backbone, longer), dirs_in(tmp_path)
    stage = Saboteur(lambda: os.kill(next(each for each in started if each.unit).process.pid, signal.SIGKILL))
    result = run_studies_in_jobs([plan], dirs, JOBS, progress=stage)
    assert len(started) == 3, "another took its place"
    assert f"ended with status {-signal.SIGKILL}" in stage.warnings[0]
    assert "another process continues it" in stage.warnings[0]
    assert not result.failed
    assert not result.missing
    assert result.num_trained == {"small": len(plan.items)}
    written = read_appended(file_of(dirs))[0]
    assert len(written) == len(plan.items), "each is recorded once"
    assert all(record.status == "finished" for record in written)
    assert_alike(result.records, run_studies([plan], dirs_in(tmp_path / "alone"), commit="abc").records)
    assert not list((dirs.runs / "claims").glob("*.json")), "nothing is in hand any more"


@pytest.mark.long
def test_of_copies_one_after_another_a_killed_process_costs_nothing_that_was_done(tmp_path, backbone, started):
    text = ROW.replace('"glue/cola", "glue/stsb"', '"glue/cola"').replace("[1, 2, 3, 4]", "[40, 41, 42, 43]")
    plan, dirs = make_plan(tmp_path, backbone, text), dirs_in(tmp_path)

    class Killer(StudyProgress):
        def tell(self, num_done, num_runs, num_busy, num_rows):
            if started[0].has_stepped and started[0].process.is_alive() and len(started) == 2:
                os.kill(started[0].process.pid, signal.SIGKILL)

    result = run_studies_in_jobs([plan], dirs, JOBS, progress=Killer())
    assert len(started) == 3
    assert not result.failed
    assert not result.missing
    assert len(read_appended(file_of(dirs))[0]) == 4


def test_what_two_processes_die_of_is_recorded_as_failed_and_tried_again_next_time(tmp_path, backbone, started):
    plan, dirs = make_plan(tmp_path, backbone, LONG), dirs_in(tmp_path)

    class Killer(Saboteur):
        def tell(self, num_done, num_runs, num_busy, num_rows):
            for worker in started:
                is_copy = worker.unit is not None and worker.unit.is_finetuned
                if is_copy and worker.has_stepped and worker.process.is_alive():
                    os.kill(worker.process.pid, signal.SIGKILL)

    stage = Killer(None)
    result = run_studies_in_jobs([plan], dirs, JOBS, progress=stage)
    ((failed, said),) = result.failed
    assert result.missing == [failed]
    assert failed.arm.name == "full"
    assert f"ended with status {-signal.SIGKILL}" in said
    # A dead process has let go of its runs before the first one notices: another may take them, and die, once more.
    assert len(stage.warnings) in (2, 3)
    assert len(started) <= 5
    records = {record.id: record.status for record in read_records(file_of(dirs))}
    assert records.pop(failed.id) == "failed"
    assert set(records.values()) == {"finished"}
    assert not run_studies_in_jobs([plan], dirs, JOBS).missing
    assert {record.status for record in read_records(file_of(dirs))} == {"finished"}


def test_a_session_ends_after_three_processes_died_before_their_first_step(tmp_path, backbone, monkeypatch, started):
    plan, dirs = make_plan(tmp_path, backbone, LONG), dirs_in(tmp_path)
    settings = JobSettings(1, "cpu", root=str(tmp_path))
    monkeypatch.setattr(plan.backbone, "name", str(tmp_path / "gone"))
    with pytest.raises(LostProcess, match="one after another before their first step") as caught:
        run_studies_in_jobs([plan], dirs, settings)
    assert "gone" in caught.value.message, "its last words"
    assert "--jobs 1" in caught.value.hint
    assert len(started) == 3


STOPPED = """
import signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]
from test_jobs import JOBS, LONG, Saboteur, dirs_in, make_plan
from inlay.model import load_backbone
from inlay.studies.run.worker_processes import run_studies_in_jobs

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
    folder = Path(sys.argv[2])
    plan = make_plan(folder, load_backbone(sys.argv[3], device="cpu"), LONG)
    stage = Saboteur(lambda: print("at work", flush=True))
    try:
        run_studies_in_jobs([plan], dirs_in(folder), JOBS, progress=stage)
    except KeyboardInterrupt:
        print("stopped", flush=True)
"""


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
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
    rest = Counter()
    plan = make_plan(tmp_path, backbone, LONG)
    known = {record.id for record in read_records(file_of(dirs_in(tmp_path)))}
    assert not run_studies([plan], dirs_in(tmp_path), progress=rest).missing
    assert not known & set(rest.trained)
    assert not list((tmp_path / "runs" / "cohorts").glob("*/state.safetensors")), "they were gone on with"


def _children_of(pid: int) -> list[str]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.long
def test_at_the_deadline_what_is_in_hand_is_stopped_and_goes_on_in_the_next_session(tmp_path, backbone, monkeypatch):
    plan, dirs, deadlines = make_plan(tmp_path, backbone, LONG), dirs_in(tmp_path), []
    monkeypatch.setattr(worker_processes, "Deadline", lambda at: deadlines.append(Deadline(at)) or deadlines[0])
    stage = Saboteur(lambda: setattr(deadlines[0], "deadline", time.monotonic()))
    first = run_studies_in_jobs([plan], dirs, JOBS, deadline=time.monotonic() + 600, progress=stage)
    assert first.missing
    assert not first.failed
    assert list((dirs.runs / "cohorts").glob("*/state.safetensors"))
    rest = Counter()
    assert not run_studies([plan], dirs, progress=rest).missing
    assert not list((dirs.runs / "cohorts").glob("*/state.safetensors")), "they were gone on with"
    assert not {record.id for record in first.records} & set(rest.trained)


OTHER_TERMINAL = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]
from test_jobs import dirs_in
from test_session import Counter, make_plan
from inlay.model import load_backbone
from inlay.studies.run.session import run_studies

folder = Path(sys.argv[2])
plan = make_plan(folder, load_backbone(sys.argv[3], device="cpu"))
print("ready", flush=True)
sys.stdin.readline()
stage = Counter()
result = run_studies([plan], dirs_in(folder), progress=stage, commit="abc")
print(*stage.trained, flush=True)
"""


@pytest.mark.long
def test_two_processes_that_nobody_started_together_share_the_work_of_a_folder(tmp_path, backbone):
    """As in two terminals, or as tasks of an array of a cluster."""
    command = [sys.executable, "-c", OTHER_TERMINAL, str(Path(__file__).parent), str(tmp_path), str(backbone.folder)]
    terminals = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(2)
    ]
    for terminal in terminals:
        assert terminal.stdout.readline() == "ready\n"
    trained = []
    for terminal in terminals:
        terminal.stdin.write("go\n")
        terminal.stdin.flush()
    for terminal in terminals:
        said, _ = terminal.communicate(timeout=300)
        assert terminal.returncode == 0
        trained += said.split()
    assert len(trained) == len(set(trained)) == 4 + 8 + 1, "each run once, by one of them"
    dirs, plan = dirs_in(tmp_path), make_plan(tmp_path, backbone)
    found = run_studies([plan], dirs, commit="abc")
    assert found.num_trained == {"small": 0}
    assert not found.missing
    assert len(read_appended(file_of(dirs))[0]) == len(found.records)
    assert_alike(found.records, run_studies([plan], dirs_in(tmp_path / "alone"), commit="abc").records)


def make_session(plans, dirs, **known):
    return Session(plans, dirs, deadline=Deadline(None), **known)


CLAIMING = """
import sys
from pathlib import Path
from inlay.studies.run.claimed_work import Claims

claims = Claims(Path(sys.argv[1]))
with claims.choosing() as held:
    assert not held
    claims.claim(sys.argv[2:])
print("claimed", flush=True)
sys.stdin.readline()
"""


def test_what_another_process_has_claimed_is_left_to_it_until_it_dies(tmp_path, backbone):
    plan, dirs = make_plan(tmp_path, backbone), dirs_in(tmp_path)
    units = make_session([plan], dirs).list_units()
    ids = sorted(units[0].run_ids)
    command = [sys.executable, "-c", CLAIMING, str(dirs.runs), *ids]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "claimed\n"
        stage = Counter()
        result = run_studies([plan], dirs, progress=stage)
        assert {item.id for item in result.missing} == set(ids)
        assert not set(stage.trained) & set(ids)
        assert stage.warnings == ["other processes are working on what is left"]
        other.kill()
    with Claims(dirs.runs).choosing() as taken:
        assert not taken
    assert not list((dirs.runs / "claims").glob("*.json")), "its file is cleared"
    assert not run_studies([plan], dirs).missing


def test_a_claim_is_released_with_its_unit_and_by_ctrl_c(tmp_path, backbone):
    plan, dirs = make_plan(tmp_path, backbone, ROW), dirs_in(tmp_path)
    seen = []

    class Look(Counter):
        def begin(self, number, num_units, unit):
            (path,) = (dirs.runs / "claims").glob("*.json")
            with path.open("rb") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            seen.append(unit)

    with pytest.raises(KeyboardInterrupt):
        run_studies([plan], dirs, progress=Look(stop_at=2))
    assert len(seen) == 1
    with Claims(dirs.runs).choosing() as held:
        assert not held


def test_a_run_that_others_go_on_from_is_trained_by_one_process(tmp_path, backbone):
    few, dirs = make_several(tmp_path, backbone, "few"), dirs_in(tmp_path)
    session = make_session([few], dirs)
    (unit,) = session.list_units()
    halves = [unit.take(unit.items[:2]), unit.take(unit.items[2:])]
    source = few.items[0].source.id
    assert session._choose(halves, set()) is halves[0]
    with session.claim_next() as (claimed, _):
        assert claimed.run_ids == unit.run_ids
        with Claims(dirs.runs).choosing() as held:
            assert source in held
    assert session._choose(halves[1:], halves[0].run_ids | {source}) is None
    folder = dirs.runs / source
    folder.mkdir(parents=True)
    for name in ("result.json", "best.safetensors"):
        (folder / name).touch()
    assert session._choose(halves[1:], halves[0].run_ids | {source}) is halves[1], "its weights are there"


def test_what_goes_on_from_a_run_waits_for_the_cohort_that_trains_it(tmp_path, backbone):
    plans, dirs = [make_several(tmp_path, backbone, name) for name in ("several", "few")], dirs_in(tmp_path)
    session = make_session(plans, dirs, num_jobs=2)
    units = session.list_units()
    source = next(unit for unit in units if plans[1].items[0].source.id in unit.run_ids)
    (few,) = (unit for unit in units if unit.items[0].source)
    assert session._choose([few, source], set()) is source
    assert session._choose([few], source.run_ids) is None
    assert session._choose([few], set()) is few, "nobody else will train it"


def test_a_process_may_prefer_copies_and_what_needs_no_new_programs(tmp_path, backbone):
    text = LONG.replace("[2, 4]", "[2, 4, 65]")  # two cohorts
    plan, dirs = make_plan(tmp_path, backbone, text), dirs_in(tmp_path)
    for prefers_copies in (False, True):
        session = make_session([plan], dirs, num_jobs=2, prefers_copies=prefers_copies)
        units = sorted(session.list_units(), key=lambda unit: unit.is_finetuned)
        assert session._choose(units, set()).is_finetuned is prefers_copies
        others = [unit for unit in units if unit.compile_key == units[0].compile_key]
        session._compiled = units[0].compile_key
        assert len(others) == 2
        assert session._choose([units[-1], *others], set()).is_finetuned


def test_an_interrupt_is_noted_and_the_second_comes_at_once():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with worker_processes.noting_interrupts() as asked:
            signal.raise_signal(signal.SIGINT)
            assert asked.is_set()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_when_nobody_listens_a_process_is_interrupted_once():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    relay = worker_processes._PipeProgress(theirs)
    try:
        relay.send("rows", 1)
        assert ours.recv() == ("rows", 1)
        ours.close()
        with pytest.raises(KeyboardInterrupt):
            relay.send("rows", 1)
        relay.send("rows", 1)  # a second time would stop the saving
    finally:
        signal.signal(signal.SIGINT, before)


def test_half_a_word_is_the_end_of_a_process():
    ours, theirs = multiprocessing.Pipe(duplex=False)
    theirs.send(("rows", 3))
    theirs.send_bytes(b"half a w")
    assert list(worker_processes._receive(ours)) == [("rows", 3), ("gone", None)]


def test_tests_of_ctrl_c_run_in_the_background_of_a_shell_too():
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path.insert(0, sys.argv[1])\n"
        "import conftest; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    )
    tests = str(Path(__file__).parents[1])
    subprocess.run([sys.executable, "-c", program, tests], check=True)
