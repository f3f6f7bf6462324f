"""Runs that answer the same dev rows: how their scores vary together is measured once, and lies in their records."""

from __future__ import annotations

import numpy as np
import pytest

from inlay.model import load_backbone
from inlay.model.backbone.tiny import make_tiny_folder
from inlay.studies.judge.row_sampling import FILE, num_rows
from inlay.studies.run.records import StudyDirs, read_records
from inlay.studies.run.session import run_studies
from inlay.studies.spec.planning import load_tasks, plan_study
from inlay.studies.spec.study import read_study
from inlay.studies.spec.toy import WORDS

STUDY = """
title = "small"
tasks = ["glue/cola", "glue/stsb"]
[arms.full]
method = { name = "full" }
axes = { lr = [1e-3] }
[arms.adapters-4]
method = { name = "houlsby", size = 4 }
axes = { lr = [1e-2] }
[profiles.tiny]
backbone = "tiny"
rows = "toy"
seeds = 2
paired_rows = true
train = { epochs = 2, batch_size = 8 }
fit = { token_budget = 4096 }
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paired")
    backbone = load_backbone(str(make_tiny_folder(folder / "tiny", WORDS)), device="cpu")
    (folder / "small.toml").write_text(STUDY)
    study = read_study(folder / "small.toml", "tiny")
    plan, places = plan_study(study, backbone, *load_tasks(study, None)), StudyDirs(folder / "results", folder / "runs")
    run_studies([plan], places, commit="abc")
    (path,) = (places.results / "small").glob("*.jsonl")
    return plan, places, path


def test_every_run_of_a_task_knows_how_it_varies_with_the_others(done):
    _, _, path = done
    records = read_records(path)
    for task in ("glue/cola", "glue/stsb"):
        own = [record for record in records if record.task == task]
        assert len(own) == 4
        for metric in own[0].extra["row_covariances"]:
            matrix = np.array(
                [[one.extra["row_covariances"][metric][other.id] for other in own] for one in own], dtype=float
            )
            np.testing.assert_allclose(matrix, matrix.T)
            assert np.linalg.eigvalsh(matrix).min() > -1e-6, "what is a covariance is not negative"


def test_the_own_variance_is_that_of_the_metric(done):
    _, _, path = done
    for record in read_records(path):
        if record.task == "glue/cola":
            share, rows = record.dev["accuracy"], num_rows(record, "dev")
            measured = record.extra["row_covariances"]["accuracy"][record.id]
            assert measured == pytest.approx(share * (1 - share) / (rows - 1), rel=1e-4)


def test_neither_labels_nor_answers_are_in_the_results(done):
    plan, _, path = done
    num_dev = len(plan.tasks["glue/cola"].dev)

    def sizes(value):
        if isinstance(value, dict | list):
            yield len(value)
            for item in value.values() if isinstance(value, dict) else value:
                yield from sizes(item)

    assert num_dev > 8
    for record in read_records(path):
        assert max(sizes(record.extra["row_covariances"])) < num_dev


def test_a_second_session_changes_nothing(done):
    plan, places, path = done
    before = path.read_bytes()
    run_studies([plan], places, commit="abc")
    assert path.read_bytes() == before
    assert all((places.runs / record.id / FILE).is_file() for record in read_records(path))
