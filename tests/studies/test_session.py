"""Running studies: nothing is repeated, everything resumes, budgets hold, and what cannot be is refused first."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hooks import Hooks
from inlay.errors import Missing, OutOfMemory, Unsupported
from inlay.model import load_backbone
from inlay.model.backbone.tiny import make_tiny_folder
from inlay.studies.run import session as session_module
from inlay.studies.run import units as work
from inlay.studies.run.estimate import estimate_units
from inlay.studies.run.recording import Recorder
from inlay.studies.run.records import StudyDirs, StudyRecords, append_records, read_records
from inlay.studies.run.session import Deadline, StudyProgress, _Alarm, make_agenda, run_studies
from inlay.studies.spec.planning import load_tasks, plan_study
from inlay.studies.spec.study import read_study
from inlay.studies.spec.toy import WORDS
from inlay.training.evaluate import score_split
from inlay.training.events import RowsAnswered
from inlay.training.run.run_folder import read_result

STUDY = """
title = "small"
tasks = ["glue/cola", "glue/stsb"]
[arms.baseline]
kind = "baseline"
tasks = ["glue/cola"]
seeds = 1
[arms.full]
method = { name = "full" }
axes = { lr = [1e-3] }
[arms.adapters]
method = { name = "houlsby" }
axes = { size = [2, 4], lr = [1e-2] }
[arms.adapters-4]
method = { name = "houlsby", size = 4 }
axes = { lr = [1e-2] }
[arms."top-{k}"]
tasks = ["glue/cola"]
seeds = 1
each = { k = [1, 9] }
min_layers = "{k}"
method = { name = "top", layers = "-{k}:" }
axes = { lr = [1e-3] }
[profiles.tiny]
backbone = "tiny"
rows = "toy"
seeds = 2
train = { epochs = 2, batch_size = 8 }
fit = { token_budget = 4096 }
"""


ROW = """
title = "small"
tasks = ["glue/cola", "glue/stsb"]
[arms.full]
method = { name = "full" }
axes = { epochs = [1, 2, 3, 4] }
[profiles.tiny]
backbone = "tiny"
rows = "toy"
train = { batch_size = 8, lr = 1e-3 }
fit = { token_budget = 4096 }
"""


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return load_backbone(str(make_tiny_folder(tmp_path_factory.mktemp("backbones") / "tiny", WORDS)), device="cpu")


@pytest.fixture
def places(tmp_path):
    return StudyDirs(tmp_path / "results", tmp_path / "runs")


class Done(NamedTuple):
    plan: Any
    places: StudyDirs
    stage: Any
    outcome: Any


@pytest.fixture(scope="module")
def done(tmp_path_factory, backbone):
    """The whole study, run once; tests leave it as it is."""
    folder, stage = tmp_path_factory.mktemp("done"), Counter()
    plan, places = make_plan(folder, backbone), StudyDirs(folder / "results", folder / "runs")
    return Done(plan, places, stage, run_studies([plan], places, commit="abc", progress=stage))


def make_plan(tmp_path, backbone, text=STUDY, name="small", **changes):
    path = tmp_path / f"{name}.toml"
    path.write_text(text)
    study = dataclasses.replace(read_study(path, "tiny"), **changes)
    return plan_study(study, backbone, *load_tasks(study, None))


class Counter(StudyProgress):
    """Notes which runs are trained, and stops at the n-th step, or at every step of the run that fails."""

    def __init__(self, stop_at=None, error=KeyboardInterrupt, fails=None):
        self.trained, self.warnings, self.units = [], [], []
        self.stop_at, self.error, self.steps, self.fails = stop_at, error, 0, fails

    def begin(self, number, num_units, unit):
        self.units.append(unit)

    def warn(self, message):
        self.warnings.append(message)

    def watch(self, unit):
        outer = self

        class Watch(Hooks):
            def on_step(self, cohort, num_rows):
                outer.steps += 1
                if outer.steps == outer.stop_at or outer.fails in [member.run.id for member in cohort.members]:
                    raise outer.error

            def on_end(self, member):
                outer.trained.append(member.run.id)

        return Watch()


def file_of(places, name="small"):
    return places.results / name / "tiny-tiny.jsonl"


def list_todo(plans, places):
    """The units that `run_studies` would do."""
    return make_agenda(plans, StudyRecords(plans, places), places.runs)


def without_times(records):
    timely = ("seconds", "date", "extra")
    return [{key: value for key, value in record.to_json().items() if key not in timely} for record in records]


def test_every_arm_task_and_seed_gets_a_record_that_says_all_about_it(done, backbone):
    assert done.plan.left_out == (f"top-9: {backbone.name} has 4 layers",)
    assert not done.outcome.missing
    records = read_records(file_of(done.places))
    assert len(records) == len(done.outcome.records) == 1 + 4 + 8 + 4 + 1
    for record in records:
        assert record.commit == "abc"
        assert record.hardware
        assert record.versions["torch"]
        assert record.status == "finished"
        assert record.metric in record.dev
        assert record.backbone == "tiny"
        assert record.arm == "baseline" or (record.seconds > 0 and len(record.curve) == 2)
        assert record.config["data"]["source"] == record.task
        assert (record.majority == 0.5) == (record.task == "glue/cola")
    adapters = [record for record in records if (record.arm, record.task) == ("adapters", "glue/cola")]
    sized = {record.axes["size"]: record.trained_parameters for record in adapters}
    # 2 adapters a layer, 4 layers, width 32: sizes 2 and 4 differ by 2 × (2·32 + 1) a place
    assert sized[4] - sized[2] == 8 * 2 * (2 * 32 + 1)


def test_finished_runs_are_never_repeated_and_those_of_two_arms_are_trained_once(tmp_path, backbone, done):
    trained = done.stage.trained
    assert len(trained) == len(set(trained)) == 4 + 8 + 1, "arm `adapters-4` is part of `adapters`"
    before, again = file_of(done.places).read_bytes(), Counter()
    outcome = run_studies([make_plan(tmp_path, backbone)], done.places, progress=again)
    assert again.units == again.trained == []
    assert outcome.num_trained == {"small": 0}
    assert file_of(done.places).read_bytes() == before


def test_another_study_borrows_records_though_the_runs_are_gone(tmp_path, backbone, places, done):
    shutil.copytree(done.places.results, places.results)
    stage = Counter()
    outcome = run_studies([make_plan(tmp_path, backbone, name="other")], places, progress=stage)
    assert stage.trained == []
    assert not outcome.missing
    assert {record.study for record in outcome.records} == {"other"}
    assert {record.study for record in read_records(file_of(places))} == {"small"}


def test_studies_asked_for_together_train_what_they_share_once_and_the_first_tier_of_each_before_the_next(
    tmp_path, backbone, places
):
    (tmp_path / "a").mkdir()
    rates = STUDY.replace("lr = [1e-2]", "lr = [1e-2, 1e-3]")
    plans = [make_plan(tmp_path / "a", backbone, rates), make_plan(tmp_path, backbone, rates, name="other")]
    stage = Counter()
    outcome = run_studies(plans, places, progress=stage)
    assert not outcome.missing
    assert len(stage.trained) == len(set(stage.trained)), "nobody's run twice"
    assert outcome.num_trained["small"] == outcome.num_trained["other"] == outcome.total_trained == 1 + 4 + 16 + 1
    assert {record.study for record in read_records(file_of(places, "other"))} == {"other"}
    tiers = [unit.items[0].tier for unit in stage.units]
    assert tiers == sorted(tiers)


def test_with_records_and_no_store_nothing_is_trained(tmp_path, backbone, places, done):
    """As on a new machine, to which only the files of results were carried."""
    shutil.copytree(done.places.results, places.results)
    assert list_todo([make_plan(tmp_path, backbone)], places) == []
    assert not run_studies([make_plan(tmp_path, backbone)], places).missing
    assert not places.runs.exists()


def test_a_file_of_another_machine_put_beside_ours_is_not_trained_again(tmp_path, backbone, places, done):
    plan, known = make_plan(tmp_path, backbone), read_records(file_of(done.places))
    known.sort(key=lambda record: record.arm != "full")  # no other arm asks for these
    elsewhere = [dataclasses.replace(record, hardware="another GPU") for record in known[1:]]
    append_records(places.results / "small" / "from-the-cluster.jsonl", elsewhere)
    (left,) = list_todo([plan], places)
    assert [item.id for item in left.items] == [known[0].id]
    records = StudyRecords([plan], places)
    records.add(known[:1])
    assert all(map(records.is_known, plan.items)), "what is beside counts also after ours was written"
    assert [record.key for record in read_records(file_of(places))] == [known[0].key], "and stays where it is"


def test_records_of_another_profile_and_of_a_backbone_by_another_name_are_lent(tmp_path, backbone, places, done):
    known = read_records(file_of(done.places))
    other = [
        dataclasses.replace(record, profile="device", backbone="copy", fingerprint="", extra={"layers": 99})
        for record in known
    ]
    append_records(places.results / "small" / "copy-device.jsonl", other)
    plan = make_plan(tmp_path, backbone)
    lent = run_studies([plan], places).records
    assert {record.key for record in lent} == {record.key for record in known}
    assert {(record.profile, record.backbone) for record in lent} == {("tiny", "tiny")}
    assert {record.fingerprint for record in lent} == {backbone.fingerprint}
    assert {record.extra["layers"] for record in lent} == {backbone.anatomy.num_layers}


def test_a_deadline_wants_cohorts_of_what_is_most_valuable_first(tmp_path, backbone, places):
    plan = make_plan(tmp_path, backbone, STUDY.replace("lr = [1e-2]", "lr = [1e-2, 1e-3]"))
    units = session_module.make_agenda([plan], StudyRecords([plan], places), places.runs, most_together=3)
    cohorts = [unit for unit in units if unit.num_runs > 1 and not unit.is_finetuned]
    assert [unit.num_runs for unit in cohorts] == [3] * 5, "of 16 the last goes alone"
    tiers = [item.tier for unit in units if unit.items[0].arm.name.startswith("adapters") for item in unit.items]
    assert tiers == [0] * 4 + [1] * 8 + [2] * 4, "seed 0 at the first rate; then seed 1 of it, and the second rate"


def test_copies_of_the_backbone_leave_no_weights_behind(done):
    kept = {path.parent.name for path in done.places.runs.glob("*/best.safetensors")}
    assert kept == {item.id for item in done.plan.items if item.arm.name.startswith("adapters")}


def test_runs_of_one_structure_are_one_cohort_and_copies_of_the_backbone_a_row_for_each_tier(tmp_path, backbone):
    units = list_todo([make_plan(tmp_path, backbone)], StudyDirs(tmp_path / "results", tmp_path / "runs"))
    described = [(unit.describe(), unit.num_runs) for unit in units]
    assert ("adapters on 2 tasks, 2 seeds, size 2 to 4, lr 0.01", 8) in described
    copies = [unit for unit in units if unit.is_finetuned]
    assert copies
    assert all(len({item.tier for item in unit.items}) == 1 for unit in copies)
    assert {unit.num_runs for unit in copies if unit.items[0].arm.name == "full"} == {2}, "of two tasks"
    seeds = [unit.items[0].seed for unit in units]
    assert seeds == sorted(seeds), "a seed of everything before the next seed"


@pytest.mark.parametrize(("num_jobs", "lengths"), [(1, [8]), (2, [4, 4]), (3, [3, 3, 2]), (16, [1] * 8)])
def test_each_of_several_processes_gets_its_part_of_the_copies_of_a_tier(tmp_path, backbone, num_jobs, lengths):
    plan, places = make_plan(tmp_path, backbone, ROW), StudyDirs(tmp_path / "results", tmp_path / "runs")
    known = StudyRecords([plan], places)
    units = session_module.make_agenda([plan], known, places.runs, most_together=64, num_jobs=num_jobs)
    assert [unit.num_runs for unit in units] == lengths


def test_a_row_that_was_stopped_in_its_first_copy_is_not_cut_by_a_deadline(tmp_path, backbone, places, monkeypatch):
    monkeypatch.setattr(work, "_SAVE_SECONDS", 0.0)
    plan = make_plan(tmp_path, backbone, ROW)
    stage = Counter(stop_at=8)
    with pytest.raises(KeyboardInterrupt):
        run_studies([plan], places, progress=stage)
    assert stage.trained == [], "it was at its first"
    (begun,) = list_todo([plan], places)
    deadline = Deadline(time.monotonic() + 100)
    fresh = dataclasses.replace(begun, is_begun=False)
    deadline.note(begun, 1e6)
    assert deadline.cut(fresh).num_runs == 1
    assert deadline.cut(begun) is begun
    rest = Counter()
    run_studies([plan], places, progress=rest)
    num_steps = sum(item.run.num_steps for item in plan.items)
    assert stage.steps + rest.steps < 8 + num_steps, "it went on where it had stopped"


def test_a_row_that_breaks_goes_on_one_by_one_and_leaves_no_state_behind(tmp_path, backbone, places, monkeypatch):
    monkeypatch.setattr(work, "_SAVE_SECONDS", 0.0)
    plan = make_plan(tmp_path, backbone, ROW.replace('"glue/cola", "glue/stsb"', '"glue/cola"'))
    broken = next(item for item in plan.items if item.config.train.epochs == 3)  # the longest is the first
    stage = Counter(error=OutOfMemory("no room", "use less"), fails=broken.id)
    outcome = run_studies([plan], places, progress=stage)
    assert [item.id for item, _ in outcome.failed] == [broken.id]
    assert sorted(stage.trained) == sorted(item.id for item in plan.items if item is not broken), "each once"
    assert not list((places.runs / "cohorts").glob("*/state.safetensors"))
    again = Counter()
    assert not run_studies([plan], places, progress=again).missing
    assert again.trained == [broken.id]


def test_a_copy_is_scored_on_its_test_rows_before_the_next_of_its_row_begins(tmp_path, backbone, places):
    text = ROW.replace('"glue/cola", "glue/stsb"', '"extra/airline"').replace("[1, 2, 3, 4]", "[1, 2, 3]")
    plan, known = make_plan(tmp_path, backbone, text, submission=True), []

    class Look(StudyProgress):
        def watch(self, unit):
            class Watch(Hooks):
                def on_end(self, member):
                    content = [json.loads(line) for line in file_of(places).read_text().splitlines()]
                    known.append([member.run.id in {record["id"] for record in content}, len(content)])

            return Watch()

    outcome = run_studies([plan], places, progress=Look())
    assert known == [[True, 1], [True, 2], [True, 3]]
    (kept,) = [item for item in plan.items if (places.runs / item.id / "best.safetensors").is_file()]
    (record,) = [record for record in outcome.records if record.id == kept.id]
    later = score_split(kept.run, read_result(places.runs / kept.id), backbone, kept.run.task.test)
    assert record.test == pytest.approx(later, abs=1e-6), "nothing was dropped, though training was not over"


def test_a_copy_for_which_there_is_no_room_beside_training_is_scored_after_it(tmp_path, backbone, places, monkeypatch):
    text = ROW.replace('"glue/cola", "glue/stsb"', '"extra/airline"').replace("[1, 2, 3, 4]", "[1, 2]")
    plan, is_full = make_plan(tmp_path, backbone, text), []
    record = Recorder.record_result

    def refuse(self, item, result, extra):
        if backbone.model.training or len(is_full) < 2:
            is_full.append(item.id)
            raise MemoryError
        return record(self, item, result, extra)

    monkeypatch.setattr(Recorder, "record_result", refuse)
    stage = Counter()
    outcome = run_studies([plan], places, progress=stage)
    assert len(is_full) == len(stage.trained) == 2
    assert not outcome.missing
    assert not outcome.failed
    assert all(record.test is not None for record in outcome.records)


def test_records_say_how_many_trained_together(done):
    together = {(record.arm, record.extra["together"]) for record in done.outcome.records if record.arm != "baseline"}
    assert together == {("full", 1), ("top-1", 1), ("adapters", 8), ("adapters-4", 8)}


def test_stopped_anywhere_and_resumed_it_ends_with_the_same_records(tmp_path, backbone, places, done):
    plan = make_plan(tmp_path, backbone)
    for stop_at in (1, 8, 5, 9):  # in the first copy of the backbone, twice in the second, in the cohort
        with pytest.raises(KeyboardInterrupt):
            run_studies([plan], places, progress=Counter(stop_at))
    outcome = run_studies([plan], places, commit="abc")
    kept = [{**record, "commit": "abc"} for record in without_times(outcome.records)]
    assert kept == without_times(done.outcome.records)


def test_a_deadline_stops_in_the_middle_keeps_what_is_done_and_says_what_is_missing(
    tmp_path, backbone, places, monkeypatch
):
    plan = make_plan(tmp_path, backbone)
    clock = iter(range(10_000))
    monkeypatch.setattr(session_module, "time", _Clock(clock))
    outcome = run_studies([plan], places, deadline=60.0)
    assert outcome.missing
    assert outcome.records
    assert len(outcome.missing) + len(outcome.records) == len(plan.items)
    monkeypatch.setattr(session_module, "time", time)
    rest = Counter()
    assert not run_studies([plan], places, progress=rest).missing
    assert not set(rest.trained) & {record.id for record in outcome.records}


class _Clock:
    """A second passes with every look at the clock."""

    def __init__(self, clock):
        self._clock = clock

    def monotonic(self):
        return float(next(self._clock))


def test_what_a_user_can_mend_fails_alone_and_is_tried_again(tmp_path, backbone, places):
    plan = make_plan(tmp_path, backbone)
    cola = next(item for item in plan.items if (item.arm.name, item.task, item.seed) == ("full", "glue/cola", 0))
    stage = Counter(error=Unsupported("no such thing", "leave it out"), fails=cola.id)
    outcome = run_studies([plan], places, progress=stage)
    assert [text for _, text in outcome.failed] == ["no such thing"]
    assert [item.id for item in outcome.missing] == [cola.id], "not what trains after it"
    assert stage.warnings[0].startswith("full on glue/cola")
    failed = [record for record in read_records(file_of(places)) if record.status == "failed"]
    assert [record.extra["message"] for record in failed] == ["no such thing"]
    assert not run_studies([plan], places).missing
    assert all(record.status == "finished" for record in read_records(file_of(places)))


def test_for_a_submission_the_best_copy_on_dev_stays(tmp_path, backbone, places):
    plan = make_plan(tmp_path, backbone, submission=True)
    plan = dataclasses.replace(plan, items=tuple(item for item in plan.items if item.arm.name == "full"))
    outcome = run_studies([plan], places)
    for task in plan.tasks:
        full = [record for record in outcome.records if (record.arm, record.task) == ("full", task)]
        best = max(record.dev[record.metric] for record in full)
        kept = [record for record in full if (places.runs / record.id / "best.safetensors").is_file()]
        assert [record.dev[record.metric] for record in kept] == [best]


def test_the_best_copy_of_one_study_stays_though_another_has_a_better_one(tmp_path, backbone, places):
    """Of two seeds the first answers for the study that asks for no other; the second is the best of both."""

    def plan_of(name, seeds):
        plan = make_plan(tmp_path, backbone, name=name, submission=True)
        asked = [item for item in plan.items if (item.arm.name, item.task) == ("full", "glue/cola")]
        return dataclasses.replace(plan, items=tuple(item for item in asked if item.seed in seeds))

    one, both = plan_of("one", [0]), plan_of("both", [0, 1])
    records = StudyRecords([both, one], places)
    recorder = Recorder(both)
    for item, score in zip(both.items, (0.1, 0.9), strict=True):
        (places.runs / item.id).mkdir(parents=True)
        (places.runs / item.id / "best.safetensors").touch()
        task = both.tasks[item.task]
        records.add([recorder.record(item, task, dev={task.metric: score})])
    assert [(places.runs / item.id / "best.safetensors").is_file() for item in both.items] == [True, True]


def test_tasks_with_test_rows_are_scored_on_them_also_when_the_record_was_lost(tmp_path, backbone, places):
    text = STUDY.replace('"glue/cola", "glue/stsb"', '"extra/airline"').replace('tasks = ["glue/cola"]\n', "")
    text = text.replace("seeds = 2", "seeds = 1")
    plan = make_plan(tmp_path, backbone, text)
    first = run_studies([plan], places)
    assert all(record.test is not None and "accuracy" in record.test for record in first.records)
    file_of(places).unlink()
    again = run_studies([plan], places)
    assert [record.test for record in again.records] == [record.test for record in first.records]


def test_what_is_left_is_estimated_and_what_is_done_is_not(backbone, places, done):
    plan = done.plan
    todo = list_todo([plan], places)
    estimates = estimate_units(todo, [plan])
    trained = [estimate for unit, estimate in zip(todo, estimates, strict=True) if unit.kind == "runs"]
    assert all(estimate.seconds > 0 and estimate.memory_bytes > 0 for estimate in trained)
    assert max(estimate.num_slots for estimate in trained) == 8
    assert not places.results.exists(), "a dry run writes nothing"
    assert list_todo([plan], done.places) == []


def test_missing_data_is_refused_naming_all_of_it_or_left_out_if_asked(tmp_path, monkeypatch):
    monkeypatch.delenv("INLAY_DATA", raising=False)
    path = tmp_path / "small.toml"
    path.write_text(STUDY.replace('rows = "toy"', ""))
    study = read_study(path, "tiny")
    with pytest.raises(Missing, match=r"lacks 2 of 2 data sets: `glue/cola`.*`glue/stsb`.*--data-root"):
        load_tasks(study, None)
    folder = tmp_path / "data" / "CoLA"
    folder.mkdir(parents=True)
    for side in ("train", "dev"):
        rows = [f"x\t{row % 2}\t\tthe cat sat {row} {side}" for row in range(8)]
        (folder / f"{side}.tsv").write_text("\n".join(rows) + "\n")
    root = str(tmp_path / "data")
    with pytest.raises(Missing, match=r"lacks 1 of 2 data sets: `glue/stsb`.*--skip-missing"):
        load_tasks(study, root)
    tasks, missing = load_tasks(study, root, skip_missing=True)
    assert list(tasks) == ["glue/cola"]
    assert list(missing) == ["glue/stsb"]


def test_a_run_that_cannot_fit_is_refused_before_the_first(tmp_path, backbone, monkeypatch):
    monkeypatch.setattr("inlay.training.available_bytes", lambda device: 300_000)
    with pytest.raises(OutOfMemory, match=r"a run of arm `full` takes .* are free on `cpu`.*--arms"):
        make_plan(tmp_path, backbone)


def test_records_of_a_run_are_on_disk_when_it_ends_not_when_its_cohort_does(tmp_path, backbone, places):
    text = STUDY.replace('tasks = ["glue/cola", "glue/stsb"]', 'tasks = ["glue/cola"]')
    text = text.replace("axes = { size = [2, 4], lr = [1e-2] }", "axes = { size = [2], epochs = [1, 4] }")
    plan = make_plan(tmp_path, backbone, text)
    seen = []

    class Look(StudyProgress):
        def watch(self, unit):
            class Watch(Hooks):
                def on_end(self, member):
                    content = [json.loads(line) for line in file_of(places).read_text().splitlines()]
                    seen.append(member.run.id in {record["id"] for record in content})

            return Watch()

    run_studies([plan], places, progress=Look())
    assert seen
    assert all(seen)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]
from inlay.model import load_backbone
from inlay.studies.run.records import StudyDirs
from inlay.studies.run.session import StudyProgress, run_studies
from test_session import Counter, make_plan, without_times
folder = Path(sys.argv[2])
backbone = load_backbone(sys.argv[3], device="cpu")
plan, places = make_plan(folder, backbone), StudyDirs(folder / "results", folder / "runs")

class Fate(Counter):
    def watch(self, unit):
        watch = super().watch(unit)
        step = watch.on_step
        def on_step(cohort, num_rows):
            step(cohort, num_rows)
            if self.steps == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        watch.on_step = on_step
        return watch

for kill_at in (4, 20):
    child = os.fork()
    if not child:
        stage = Fate()
        stage.kill_at = kill_at
        run_studies([plan], places, progress=stage)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, kill_at
whole = run_studies([plan], StudyDirs(folder / "a", folder / "b"))
assert without_times(run_studies([plan], places).records) == without_times(whole.records)
"""


@pytest.mark.long
def test_killed_anywhere_and_begun_again_it_ends_with_the_same_records(tmp_path, backbone):
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", KILLED, here, str(tmp_path), str(backbone.folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_deadline_is_heard_while_dev_rows_are_answered():
    early, late = (_Alarm(Deadline(time.monotonic() + seconds)) for seconds in (600, -1))
    early(RowsAnswered())
    with pytest.raises(KeyboardInterrupt):
        late(RowsAnswered())
    late(RowsAnswered())  # once: a second one would stop the saving
