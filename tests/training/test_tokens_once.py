"""A plan, cohorts and the scores after them tokenise each side of a task once; while they do, they are heard."""

from __future__ import annotations

import dataclasses

import pytest

from hooks import Hooks
from inlay.data import token_cache as once
from inlay.data.windows import encode_split
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import fit, make_run, publish
from inlay.training.evaluate import score_split
from inlay.training.run.plan import make_plan


@pytest.fixture
def tokenised(monkeypatch):
    """The numbers of rows of the sets that are really tokenised, as they come."""
    sizes = []

    def note(tokenizer, split, reading, progress=None):
        sizes.append(len(split))
        return encode_split(tokenizer, split, reading, progress)

    monkeypatch.setattr(once, "encode_split", note)
    monkeypatch.setattr(once, "_MEMORY", once.MemoryCache())
    return sizes


def make(backbone, task, **train):
    settings = {"batch_size": 8, "max_length": 32, "epochs": 1, **train}
    return make_run(task, RunConfig(method=MethodConfig("houlsby", 8), train=TrainConfig(**settings)), backbone)


def test_each_side_of_a_task_is_tokenised_once_by_all_who_read_it(tiny_bert, toy_task, tmp_path, tokenised):
    task = toy_task(num_rows=48)
    task = dataclasses.replace(task, test=toy_task(num_rows=30, seed=1).train)
    runs = [make(tiny_bert, task, seed=seed) for seed in (0, 1)]
    make_plan(runs[0], tiny_bert)
    assert tokenised == [48, 24]
    for run in runs:  # two cohorts, one after the other
        (result,) = fit([run], tiny_bert, tmp_path / "runs")
        publish(run, result, tiny_bert, Store(tmp_path / "store"))
        score_split(run, result, tiny_bert, task.dev)
    assert tokenised == [48, 24, 30]


def test_another_length_is_tokenised_anew(tiny_bert, toy_task, tmp_path, tokenised):
    runs = [make(tiny_bert, toy_task(num_rows=16), max_length=length) for length in (32, 16)]
    fit(runs, tiny_bert, tmp_path)
    assert tokenised == [16, 8, 16, 8]


class Listener(Hooks):
    def __init__(self):
        self.heard = []

    def on_encode(self, num_done, num_rows):
        self.heard.append((num_done, num_rows))

    def on_start(self, cohort):
        self.heard.append("start")


def test_tokenising_is_heard_before_training_starts(tiny_bert, toy_task, tmp_path, tokenised, monkeypatch):
    monkeypatch.setattr("inlay.data.encode.CHUNK_ROWS", 10)
    listener = Listener()
    fit([make(tiny_bert, toy_task(num_rows=24))], tiny_bert, tmp_path, emit=listener)
    assert listener.heard == [(10, 24), (20, 24), (24, 24), (10, 12), (12, 12), "start"]
