"""Settings in, a version out: one pipeline for everyone who trains and publishes."""

from __future__ import annotations

import dataclasses

import pytest

from inlay.errors import Diverged
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import fit, make_run, publish
from inlay.training.events import EpochEnded, RunEnded, RunPublished
from inlay.training.run.pipeline import publish_result, report_run, train_and_publish

CONFIG = RunConfig(method=MethodConfig(size=4), train=TrainConfig(batch_size=8, max_length=32, epochs=1, lr=5e-4))


def test_the_pipeline_publishes_what_its_steps_by_hand_publish(tiny_bert, toy_task, tmp_path):
    events, task = [], toy_task()
    ours, theirs = Store(tmp_path / "a"), Store(tmp_path / "b")
    done = train_and_publish(CONFIG, tiny_bert, ours, events.append, task=task)
    run = make_run(task, CONFIG, tiny_bert, theirs)
    (result,) = fit([run], tiny_bert, tmp_path / "runs")
    version = publish(run, result, tiny_bert, theirs)
    assert done.version.digest == version.digest
    assert not done.was_finished
    kinds = [type(event) for event in events]
    assert kinds.count(EpochEnded) == kinds.count(RunEnded) == 1
    assert kinds[-1] is RunPublished


def test_a_run_that_was_finished_is_read_back_and_published_under_its_old_reference(tiny_bert, toy_task, tmp_path):
    store, task = Store(tmp_path), toy_task()
    first = train_and_publish(CONFIG, tiny_bert, store, task=task)
    again = train_and_publish(CONFIG, tiny_bert, store, task=task)
    assert again.was_finished
    assert again.version == first.version


def test_the_report_is_data_about_run_and_version(tiny_bert, toy_task, tmp_path):
    done = train_and_publish(CONFIG, tiny_bert, Store(tmp_path), task=toy_task(), name="mine")
    report = report_run(done)
    assert report["reference"] == "mine@1"
    assert report["run"] == done.result.run_id
    assert report["metrics"]["dev"] == done.result.dev_metrics
    assert report["size_bytes"] > 0


def test_a_run_that_diverged_is_not_published(tiny_bert, toy_task, tmp_path):
    done = train_and_publish(CONFIG, tiny_bert, Store(tmp_path), task=toy_task())
    diverged = dataclasses.replace(done.result, status="diverged", message="diverged at step 2")
    with pytest.raises(Diverged, match="diverged at step 2"):
        publish_result(done.prepared, diverged, name="other")
    assert [task.name for task in Store(tmp_path).ledger()] == [done.prepared.run.name]
