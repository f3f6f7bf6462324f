"""Studies whose runs have several tasks: a record for each task, nothing twice, and runs that go on from others."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from test_session import Counter, list_todo, without_times

from inlay.data import load_task
from inlay.model import load_backbone
from inlay.model.backbone.tiny import make_tiny_folder
from inlay.studies.run import units as work
from inlay.studies.run.estimate import estimate_units
from inlay.studies.run.records import StudyDirs
from inlay.studies.run.session import run_studies
from inlay.studies.run.units import Unit, UnitRunner
from inlay.studies.spec.planning import load_tasks, plan_study
from inlay.studies.spec.study import read_study
from inlay.studies.spec.toy import WORDS
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.run.joint import read_materialized, read_parts

TINY = """
[profiles.tiny]
backbone = "tiny"
rows = "toy"
seeds = 2
train = { epochs = 2, batch_size = 8, max_length = 16, dropout = 0.0, head_dropout = 0.0 }
fit = { token_budget = 4096 }
"""
FIRST = f"""
title = "several"
tasks = ["glue/cola", "glue/stsb"]
joint = {{ steps = 4 }}
[arms.hyper]
kind = "joint"
method = {{ name = "hyperformer++", size = 4 }}
axes = {{ lr = [1e-3, 1e-2] }}
[arms.multi-full]
kind = "joint"
seeds = 1
method = {{ name = "full-multi" }}
[arms.pals]
kind = "joint"
seeds = 1
joint = {{ sampling = "annealed" }}
method = {{ name = "pal-published" }}
[arms.alone]
kind = "single"
joint = {{ steps = 2 }}
method = {{ name = "mahabadi-multi", size = 4 }}
{TINY}"""
SECOND = f"""
title = "few"
report_on = "test"
tasks = ["cb", "imdb"]
like = {{ cb = "cola" }}
joint = {{ steps = 2 }}
most_rows = {{ dev = 10, test = 6 }}
[arms."hyper-{{n}}"]
kind = "single"
from = "several/hyper"
each = {{ n = [4, 8, 1000] }}
sample = "{{n}}"
method = {{ name = "hyperformer++", size = 4 }}
axes = {{ lr = [1e-3] }}
{TINY}"""


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return load_backbone(str(make_tiny_folder(tmp_path_factory.mktemp("backbones") / "tiny", WORDS)), device="cpu")


def make_plan(folder, backbone, name="several"):
    folder.mkdir(exist_ok=True)
    (folder / "several.toml").write_text(FIRST)
    (folder / "few.toml").write_text(SECOND)
    study = read_study(folder / f"{name}.toml", "tiny")
    return plan_study(study, backbone, *load_tasks(study, None))


@pytest.fixture(scope="module")
def done(tmp_path_factory, backbone):
    folder = tmp_path_factory.mktemp("done")
    plan, places = make_plan(folder, backbone), StudyDirs(folder / "results", folder / "runs")
    return plan, places, run_studies([plan], places, commit="abc")


def test_a_run_of_several_tasks_has_a_record_for_each(done, backbone):
    plan, _, outcome = done
    assert not outcome.missing
    hyper = [record for record in outcome.records if record.arm == "hyper"]
    assert len(hyper) == 2 * 2 * 2  # rates, seeds, tasks
    assert {record.task for record in hyper} == {"glue/cola", "glue/stsb"}
    by_run = {}
    for record in hyper:
        by_run.setdefault(record.extra["joint"]["run"], []).append(record)
        assert record.metric in record.dev
        assert len(record.curve) == 2
        assert len(record.extra["embedding"]) == 64
    item = next(item for item in plan.items if item.arm.name == "hyper")
    (member,) = (cohort := Cohort([item.run], backbone, CohortSettings(4096, 1, 100))).members
    fresh = member.read(cohort.bank)["cola/task.embedding"].tolist()
    first = next(record for record in hyper if (record.id, record.task) == (item.id, "glue/cola"))
    assert first.extra["embedding_start"] == pytest.approx(fresh, abs=1e-5)
    assert first.extra["embedding"] != first.extra["embedding_start"]
    total = sum(spec.num_parameters for spec in item.run.layout(backbone.anatomy))
    for records in by_run.values():
        assert sorted(record.id for record in records) == [records[0].extra["joint"]["run"], f"{records[0].id[:16]}-1"]
        assert sum(record.trained_parameters for record in records) == pytest.approx(total, abs=1)


def test_seeds_and_rates_of_a_method_train_as_one_cohort_and_copies_alone(tmp_path, done):
    units = list_todo([done[0]], StudyDirs(tmp_path / "results", tmp_path / "runs"))
    described = [(unit.describe(), unit.num_runs) for unit in units]
    assert described == [
        ("hyper on 2 tasks, 2 seeds, size 4", 4),
        ("multi-full on 2 tasks, seed 0, lr 5e-05", 1),
        ("pals on 2 tasks, seed 0, lr 5e-05", 1),
        ("alone on 2 tasks, 2 seeds, size 4, lr 0.001", 4),
    ]


def test_stopped_anywhere_and_resumed_it_ends_with_the_same_records(tmp_path, backbone, done):
    plan, places = make_plan(tmp_path, backbone), StudyDirs(tmp_path / "results", tmp_path / "runs")
    for stop_at in (3, 4, 3):
        with pytest.raises(KeyboardInterrupt):
            run_studies([plan], places, progress=Counter(stop_at))
    outcome = run_studies([plan], places, commit="abc")
    kept = [{**record, "commit": "abc"} for record in without_times(outcome.records)]
    assert kept == without_times(done[2].records)
    assert list_todo([plan], places) == []


def test_what_is_left_is_estimated_for_every_kind_of_run(tmp_path, backbone):
    plan = make_plan(tmp_path, backbone)
    estimates = estimate_units(list_todo([plan], StudyDirs(tmp_path / "results", tmp_path / "runs")), [plan])
    assert all(found.seconds > 0 and found.memory_bytes > 0 for found in estimates)
    assert not (tmp_path / "runs").exists()


def test_another_study_goes_on_from_a_run_and_trains_it_if_its_weights_are_not_here(tmp_path, backbone, done):
    few = make_plan(tmp_path, backbone, "few")
    assert few.items
    assert {item.arm.name for item in few.items} == {"hyper-4", "hyper-8"}, "no task has 1,000 rows"
    fresh = StudyDirs(tmp_path / "results", tmp_path / "runs")
    alone = run_studies([few], fresh, commit="abc")
    kept = StudyDirs(tmp_path / "other", tmp_path / "kept")
    shutil.copytree(done[1].runs, kept.runs)
    stage = Counter()
    after = run_studies([few], kept, commit="abc", progress=stage)
    # Not to the last bit: there it was trained in company.
    for ours, theirs in zip(alone.records, after.records, strict=True):
        assert ours.key == theirs.key
        assert ours.dev == pytest.approx(theirs.dev, abs=1e-3)
    assert len(set(stage.trained)) == len({item.id for item in few.items}), "the source is read back"
    for record in alone.records:
        assert record.num_train == int(record.arm.rpartition("-")[2])
        assert set(record.test) >= {"accuracy"}
        assert record.config["joint"]["start"] == few.items[0].source.id


def test_a_source_is_trained_in_its_cohort_and_before_what_goes_on_from_it(tmp_path, backbone):
    plans = [make_plan(tmp_path, backbone, name) for name in ("few", "several")]
    units = list_todo(plans, StudyDirs(tmp_path / "results", tmp_path / "runs"))
    described = [unit.describe() for unit in units]
    few = next(text for text in described if text.startswith("hyper-4"))
    assert described.index("hyper on 2 tasks, 2 seeds, size 4") < described.index(few)
    assert all(len({item.source is None for item in unit.items}) == 1 for unit in units), "in no unit of others"


def test_an_arm_says_of_which_tasks_it_wants_more_rows_than_there_are(tmp_path, backbone):
    (left_out,) = {text.partition(" on ")[0] for text in make_plan(tmp_path, backbone, "few").left_out}
    assert left_out == "hyper-1000"
    rows = [text.partition(": it has ")[2] for text in make_plan(tmp_path, backbone, "few").left_out]
    assert all(text.endswith(" training rows") for text in rows)
    assert len(rows) == 2


OWN = """
title = "own"
tasks = ["mine"]
joint = { steps = 2 }
[data.mine]
source = "{root}/Mine/rows.jsonl"
dev_share = 0.25
[arms.alone]
kind = "single"
method = { name = "mahabadi-multi", size = 4 }
[profiles.tiny]
backbone = "tiny"
train = { epochs = 1, batch_size = 8 }
most_rows = { dev = 5 }
"""


@pytest.mark.parametrize("sample", ["", "sample = 12\n"], ids=["all", "drawn"])
def test_a_run_knows_where_its_rows_are_and_its_record_names_no_folder(tmp_path, backbone, sample):
    (tmp_path / "data" / "Mine").mkdir(parents=True)
    rows = [{"text": f"{WORDS[number]} {WORDS[number + 1]}", "label": "ab"[number % 2]} for number in range(32)]
    (tmp_path / "data" / "Mine" / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "own.toml").write_text(OWN.replace("[profiles.tiny]", f"{sample}[profiles.tiny]"))
    study, root = read_study(tmp_path / "own.toml", "tiny"), str(tmp_path / "data")
    plan = plan_study(study, backbone, *load_tasks(study, root), root=root)
    places = StudyDirs(tmp_path / "results", tmp_path / "runs")
    (record,) = run_studies([plan], places).records
    assert (record.config["data"]["source"], record.config["data"]["root"]) == ("{root}/Mine/rows.jsonl", None)
    assert record.config["data"]["dev_share"] == 0.25
    folder = places.runs / record.id
    (config,) = read_parts(folder)
    assert config.data.source == f"{root}/Mine/rows.jsonl"
    (trained,) = read_materialized(folder, [load_task(config.data, config.task)], backbone)
    assert trained.result.dev_metrics == pytest.approx(record.dev)


def test_seeds_draw_the_samples_and_dev_and_test_rows_are_cut_once(tmp_path, backbone):
    few = make_plan(tmp_path, backbone, "few")
    chosen = [item for item in few.items if (item.arm.name, item.task) == ("hyper-4", "cb")]
    texts = [item.run.parts[0].task.train.texts for item in chosen]
    assert texts[0] != texts[1]
    assert len({item.run.parts[0].task.dev_digest for item in chosen}) == 1
    assert {(len(item.run.parts[0].task.dev), len(item.run.parts[0].task.test)) for item in few.items} == {(10, 6)}


def test_a_source_whose_weights_were_dropped_is_trained_again(tmp_path, backbone, done):
    places = StudyDirs(tmp_path / "results", tmp_path / "runs")
    shutil.copytree(done[1].runs, places.runs)
    few = make_plan(tmp_path, backbone, "few")
    (places.runs / few.items[0].source.id / "best.safetensors").unlink()
    outcome = run_studies([few], places)
    assert not outcome.missing
    assert (places.runs / few.items[0].source.id / "best.safetensors").is_file()


def test_the_source_of_a_run_that_has_ended_is_there_when_its_cohort_goes_on(tmp_path, backbone, monkeypatch):
    few, trained = make_plan(tmp_path, backbone, "few"), []
    runner = UnitRunner({"few": few}, tmp_path / "runs", lambda records: None)
    monkeypatch.setattr(work, "fit", lambda runs, *rest: trained.extend(run.id for run in runs))
    unit = Unit("runs", (dataclasses.replace(few.items[0], source=None),), resumed_with=(few.items[1],))
    runner._train_sources(unit, few, None, None)
    assert trained == [few.items[1].source.id]


def test_records_of_a_run_of_several_tasks_are_lent_to_other_studies(tmp_path, backbone, done):
    shutil.copytree(done[1].results, tmp_path / "results")
    study = dataclasses.replace(make_plan(tmp_path, backbone).study, name="other")
    other = plan_study(study, backbone, *load_tasks(study, None))
    stage = Counter()
    outcome = run_studies([other], StudyDirs(tmp_path / "results", tmp_path / "runs"), progress=stage)
    assert stage.trained == []
    assert not outcome.missing
    assert len(outcome.records) == len(done[2].records)
