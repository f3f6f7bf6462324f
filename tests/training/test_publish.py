"""Settings in, a version out: the steps that everyone who trains and publishes takes."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest

from inlay.errors import Diverged
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import PreparedRun, current_commit, fit, make_run, publish, publish_result, report_run
from inlay.training.events import EpochEnded, RunEnded, ignore
from inlay.training.run import publish as publishing

CONFIG = RunConfig(method=MethodConfig(size=4), train=TrainConfig(batch_size=8, max_length=32, epochs=1, lr=5e-4))


def prepare(backbone, task, store):
    return PreparedRun(make_run(task, CONFIG, backbone, store), backbone, store)


def train(prepared, emit=ignore):
    (result,) = fit([prepared.run], prepared.backbone, prepared.runs_folder, emit=emit)
    return result


def test_the_pipeline_publishes_what_its_steps_by_hand_publish(tiny_bert, toy_task, tmp_path):
    events, task, theirs = [], toy_task(), Store(tmp_path / "b")
    prepared = prepare(tiny_bert, task, Store(tmp_path / "a"))
    assert not prepared.is_finished
    ours = publish_result(prepared, train(prepared, events.append))
    run = make_run(task, CONFIG, tiny_bert, theirs)
    (result,) = fit([run], tiny_bert, tmp_path / "runs")
    assert publish(run, result, tiny_bert, theirs).digest == ours.digest
    kinds = [type(event) for event in events]
    assert kinds.count(EpochEnded) == kinds.count(RunEnded) == 1


def test_a_run_that_was_finished_is_read_back_and_published_under_its_old_reference(tiny_bert, toy_task, tmp_path):
    store, task = Store(tmp_path), toy_task()
    prepared = prepare(tiny_bert, task, store)
    first = publish_result(prepared, train(prepared))
    again = prepare(tiny_bert, task, store)
    assert again.is_finished
    assert publish_result(again, train(again)) == first


def test_the_report_is_data_about_run_and_version(tiny_bert, toy_task, tmp_path):
    prepared = prepare(tiny_bert, toy_task(), Store(tmp_path))
    result = train(prepared)
    report = report_run(prepared, result, publish_result(prepared, result, name="mine"))
    assert report["reference"] == "mine@1"
    assert report["run"] == result.run_id
    assert report["metrics"]["dev"] == result.dev_metrics
    assert report["size_bytes"] > 0


def test_a_run_that_diverged_is_not_published(tiny_bert, toy_task, tmp_path):
    prepared = prepare(tiny_bert, toy_task(), Store(tmp_path))
    result = train(prepared)
    publish_result(prepared, result)
    diverged = dataclasses.replace(result, status="diverged", message="diverged at step 2")
    with pytest.raises(Diverged, match="diverged at step 2"):
        publish_result(prepared, diverged, name="other")
    assert [task.name for task in Store(tmp_path).ledger()] == [prepared.run.name]


@pytest.mark.parametrize("script", ["sleep 60", "sleep 60 &\nexec sleep 60", "exit 1", "printf '\\377'"])
def test_a_git_that_hangs_or_fails_does_not_stop_publishing(tmp_path, monkeypatch, script):
    git = tmp_path / "git"
    git.write_text(f"#!/bin/sh\n{script}\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(publishing, "_GIT_SECONDS", 0.5)
    began = time.monotonic()
    assert current_commit() in ("", "\ufffd")
    assert time.monotonic() - began < 20
