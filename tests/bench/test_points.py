"""A point of growth: few shapes that return, and slots that are filled without drawing each."""

from __future__ import annotations

import argparse
import json

import growth
import numpy as np
import ours_training
import pytest
import torch
from worker import spaced

from inlay.model.backbone.tiny import make_tiny_folder
from inlay.model.bank.bank import Bank


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(Bank, "initialise", Bank.initialise)  # what the point does to it ends with the test
    lengths = np.random.default_rng(0).permutation(np.arange(3, 27))
    texts = [" ".join("a" * (length - 2)) for length in lengths]
    rows = {"texts": texts, "ids": [[1] * int(length) for length in lengths], "labels": [0, 1] * 12}
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    places = {"folder": str(make_tiny_folder(tmp_path / "tiny", num_layers=1)), "rows": str(tmp_path / "rows.json")}
    shape = {"batch_size": 2, "size": 8, "cohort": 3, "fixed_steps": 3, "warm_up": 2, "token_budget": None}
    return {"work": "train", "device": "cpu", "threads": 1, "eager": False, "alike": True, **places, **shape}


def test_the_batches_of_every_epoch_are_the_first_ones_and_their_lengths_evenly_spaced(job):
    training = ours_training.Training(job)
    member = training.cohort.members[0]
    assert member.train.lengths.tolist() == [5, 9, 13, 17, 21, 25]
    seen = []
    for _ in range(6):
        seen.append(member.next_batch().tolist())
        training.measure(1)
    assert seen[:3] == seen[3:]
    assert sorted(row for batch in seen[:3] for row in batch) == list(range(6))
    assert member.progress.step == 6


def test_slots_begin_alike_and_the_backbone_of_a_process_is_loaded_once(job):
    first, second = ours_training.Training(job), ours_training.Training(job | {"cohort": 2})
    assert second.backbone is first.backbone
    for training in (first, second):
        values = training.cohort.flat.values_SP
        torch.testing.assert_close(values, values[:1].expand_as(values), rtol=0, atol=0)
        assert values.abs().sum() > 0


def test_points_are_named_by_axis_and_value_and_slopes_are_of_the_last_two():
    options = argparse.Namespace(factor=4, max_slots=64, max_rows=32, max_size=8)
    assert list(growth.plan_axis("slots", options)) == ["slots 1", "slots 4", "slots 16", "slots 64"]
    assert growth.plan_axis("tokens", options)["tokens 32"] == {"cohort": 1, "batch_size": 32}
    point = {"seconds": 1.0, "memory": 1.0}
    parts = {"slots 16": {"seconds": 8.0, "memory": 1.0}, "slots 4": point, "sizes 8": {"error": "out of memory"}}
    found = growth.points_of(parts)
    assert [one["value"] for one in found["slots"]] == [4, 16]
    assert found["sizes"] == []
    assert growth.last_slope(found["slots"], "seconds") == 1.5


def test_a_peer_that_answers_few_rows_answers_evenly_spaced_lengths():
    rows = [[0] * length for length in (8, 1, 7, 2, 6, 3, 5, 4)]
    assert [len(row) for row in spaced(rows, 2)] == [3, 7]
    assert spaced(rows, 8) is rows
