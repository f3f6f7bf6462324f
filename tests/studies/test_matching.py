"""Runs found by settings alone: as many as a dry run finds, and none whose settings, backbone or reading is another."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

import pytest

from inlay.model import load_backbone
from inlay.model.backbone.tiny import make_tiny_folder
from inlay.studies.run.records import FAILED, StudyDirs, StudyRecords, read_study
from inlay.studies.run.session import run_studies
from inlay.studies.spec.planning import load_tasks, plan_study
from inlay.studies.spec.study import read_study as read_study_file
from inlay.studies.spec.toy import WORDS

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
found_runs = importlib.import_module("found_runs")
BackboneFacts, Count, count_found = found_runs.BackboneFacts, found_runs.Count, found_runs.count_found

STUDY = """
title = "small"
tasks = ["glue/cola", "glue/stsb"]
[arms.tfidf]
kind = "baseline"
seeds = 1
[arms.adapters]
axes = { size = [4, 64], lr = [1e-3] }
[arms.again]
tasks = ["glue/cola"]
method = { size = 64 }
train = { pooling = "mean", max_length = 128, bucket = 1 }
[arms.spans]
kind = "spans"
tasks = ["glue/cola"]
method = { size = 64 }
[arms.turn]
kind = "sequence"
method = { size = 4 }
[arms.joint]
kind = "joint"
method = { name = "mahabadi-multi", size = 4 }
joint = { steps = 2 }
[arms.few]
kind = "joint"
sample = 8
method = { name = "mahabadi-multi", size = 4 }
joint = { steps = 2 }
[profiles.tiny]
backbone = "tiny"
rows = "toy"
seeds = 2
train = { epochs = 1, batch_size = 8, lr = 1e-3 }
fit = { token_budget = 4096 }
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A small study, run; its records, and what its backbone is."""
    place = tmp_path_factory.mktemp("done")
    (place / "small.toml").write_text(STUDY)
    study = read_study_file(place / "small.toml", "tiny")
    backbone = load_backbone(str(make_tiny_folder(place / "tiny", WORDS)), device="cpu")
    plan, places = plan_study(study, backbone, *load_tasks(study, None)), StudyDirs(place / "results", place / "runs")
    run_studies([plan], places)
    facts = BackboneFacts("tiny", backbone.fingerprint, backbone.default_pooling, backbone.anatomy.num_layers)
    return plan, places, facts, read_study(places.results, "small")


def count_really(plan, places):
    ledger, ids = StudyRecords([plan], places), {item.id for item in plan.items}
    return Count(len(ids - {item.id for item in plan.items if not ledger.is_known(item)}), len(ids))


def test_all_that_was_run_is_found_and_counted_as_a_dry_run_does(done):
    plan, places, facts, records = done
    assert count_found([plan.study], facts, records) == count_really(plan, places)
    assert count_really(plan, places) == Count(16, 16), "two arms ask for the same runs as `adapters`"
    assert Count(1, 1857).words == "finds 1 of 1,857 runs"


def change(record, section, **values):
    return dataclasses.replace(record, config={**record.config, section: {**record.config[section], **values}})


@pytest.mark.parametrize(
    ("arm", "alter"),
    [
        ("adapters", lambda record: change(record, "train", pooling="cls")),
        ("adapters", lambda record: change(record, "train", lr=2e-3)),
        ("adapters", lambda record: change(record, "method", size=5)),
        ("adapters", lambda record: change(record, "data", limit=7)),
        ("adapters", lambda record: dataclasses.replace(record, fingerprint="another")),
        ("adapters", lambda record: dataclasses.replace(record, status=FAILED)),
        ("adapters", lambda record: dataclasses.replace(record, task="glue/rte")),
        ("joint", lambda record: dataclasses.replace(record, extra={**record.extra, "pooling": "pooler"})),
        ("joint", lambda record: change(record, "joint", steps=3)),
        ("joint", lambda record: dataclasses.replace(record, arm="few")),
        ("turn", lambda record: dataclasses.replace(record, extra={**record.extra, "pooling": "pooler"})),
        ("turn", lambda record: change(record, "train", batch_size=9)),
    ],
)
def test_a_record_of_anything_else_is_not_found(done, arm, alter):
    plan, _, facts, records = done
    narrowed = dataclasses.replace(plan.study, arms={arm: plan.study.arms[arm]})
    own = [record for record in records if record.arm == arm]
    whole = count_found([narrowed], facts, own)
    assert whole.found == whole.planned > 0
    assert count_found([narrowed], facts, [alter(record) for record in own]).found == 0


def test_a_run_without_the_scores_of_spans_is_not_found_for_an_arm_of_them(done):
    plan, _, facts, records = done
    bare = [record for record in records if "spans" not in record.extra]
    assert count_found([plan.study], facts, bare) == Count(14, 16)


def test_arms_that_need_more_layers_are_not_planned(done):
    plan, _, facts, records = done
    deep = {name: dataclasses.replace(arm, min_layers=5) for name, arm in plan.study.arms.items()}
    assert count_found([dataclasses.replace(plan.study, arms=deep)], facts, records) == Count(0, 0)
