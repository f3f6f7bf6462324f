"""The records of plans: what was read in another way is another experiment, and is said to be there."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from inlay.cli.study_dry_run import describe_others
from inlay.model import load_backbone
from inlay.model.backbone.tiny import make_tiny_folder
from inlay.studies.run.records import StudyDirs, StudyRecords, count_other_poolings, read_records
from inlay.studies.run.session import run_studies
from inlay.studies.spec.planning import load_tasks, plan_study
from inlay.studies.spec.study import read_study
from inlay.studies.spec.toy import WORDS

STUDY = """
title = "small"
tasks = ["glue/cola", "glue/stsb"]
[arms.adapters]
method = { size = 4 }
[arms.first]
method = { size = 8 }
train = { pooling = "cls" }
[arms.turn]
kind = "sequence"
method = { size = 4 }
[arms.joint]
kind = "joint"
method = { name = "mahabadi-multi", size = 4 }
joint = { steps = 2 }
[profiles.tiny]
backbone = "tiny"
rows = "toy"
train = { epochs = 1, batch_size = 8, lr = 1e-3 }
fit = { token_budget = 4096 }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_folder(tmp_path_factory.mktemp("backbones") / "tiny", WORDS)


@pytest.fixture(scope="module")
def done(folder, tmp_path_factory):
    """The study, run where nothing in the files says how rows are read."""
    place = tmp_path_factory.mktemp("done")
    places = StudyDirs(place / "results", place / "runs")
    plan = make_plan(place, folder)
    assert plan.backbone.default_pooling == "mean"
    run_studies([plan], places)
    return plan, places


def make_plan(place, folder):
    path = place / "small.toml"
    path.write_text(STUDY)
    study = read_study(path, "tiny")
    return plan_study(study, load_backbone(str(folder), device="cpu"), *load_tasks(study, None))


def test_the_same_weights_read_in_another_way_are_another_experiment(done, folder, tmp_path):
    plan, places = done
    copy = tmp_path / "tiny"
    shutil.copytree(folder, copy)
    (copy / "1_Pooling").mkdir()
    (copy / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    other = make_plan(tmp_path, copy)
    assert other.backbone.fingerprint == plan.backbone.fingerprint
    known = StudyRecords([other], places)
    assert {item.arm.name for item in other.items if known.is_known(item)} == {"first"}, "whose pooling is named"
    assert count_other_poolings(other, places.results) == {"mean": 4}, "two tasks alone, a sequence, a run of both"
    (said,) = describe_others(other, places)
    assert "4 runs of small" in said
    assert "another experiment" in said


def test_a_plan_finds_its_own_and_nothing_otherwise(done):
    plan, places = done
    assert all(map(StudyRecords([plan], places).is_known, plan.items))
    assert count_other_poolings(plan, places.results) == {}
    assert describe_others(plan, places) == []


@pytest.mark.parametrize("setting", ["method.size=16", "train.warmup=0.5"])
def test_another_setting_besides_is_not_the_same_read_otherwise(done, setting):
    plan, places = done
    for settings, expected in ([["train.pooling=cls"], {"mean": 2}], [["train.pooling=cls", setting], {}]):
        items = [
            dataclasses.replace(item, config=item.config.override(settings))
            for item in plan.items
            if item.arm.name == "adapters"
        ]
        assert count_other_poolings(dataclasses.replace(plan, items=tuple(items)), places.results) == expected


def test_records_that_leave_the_pooling_open_say_what_it_came_to(done):
    places = done[1]
    (path,) = (places.results / "small").glob("*.jsonl")
    found = {(record.arm, record.config["train"]["pooling"], record.pooling) for record in read_records(path)}
    assert found == {
        ("adapters", "mean", "mean"),
        ("first", "cls", "cls"),
        ("turn", "auto", "mean"),
        ("joint", "auto", "mean"),
    }
