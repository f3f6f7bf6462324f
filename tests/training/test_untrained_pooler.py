"""A pooler that was never trained: nothing new is trained on it, and what was trained on it before still stands."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

import inlay
from inlay.errors import Unsupported
from inlay.model import load_backbone
from inlay.serving import Engine, Request, verify
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import fit, make_run, publish
from inlay.training.run.make_run import read_trained
from inlay.training.run.start import inherit
from tiny_backbones import untrain_pooler

QUICK = {"batch_size": 8, "max_length": 32, "epochs": 1, "lr": 3e-3}


@pytest.fixture(scope="module")
def noise(tiny_bert_folder, tmp_path_factory):
    """A tiny BERT whose pooler is as transformers draws one."""
    folder = tmp_path_factory.mktemp("noise") / "backbone"
    shutil.copytree(tiny_bert_folder, folder)
    untrain_pooler(folder)
    return load_backbone(str(folder), device="cpu")


@pytest.fixture(scope="module")
def before(noise, toy_task, tmp_path_factory):
    """A store with a task whose head reads that pooler, as it was trained when that was not refused."""
    store = Store(tmp_path_factory.mktemp("store"))
    run = make_run(toy_task("old"), configure(pooling="pooler"), noise, is_trained=True)
    (result,) = fit([run], noise, store.root / "runs")
    return store, run, publish(run, result, noise, store)


def configure(method="houlsby", **train):
    return RunConfig(method=MethodConfig(method, None if method == "full" else 8), train=TrainConfig(**QUICK | train))


def test_new_training_on_it_is_refused_with_what_to_do(noise, toy_task):
    in_python = 'pooling="mean"'
    for make, advice in (
        (lambda: make_run(toy_task(), configure(pooling="pooler"), noise), "--pooling mean"),
        (lambda: make_run(toy_task(), configure("full", pooling="pooler"), noise), "--pooling mean"),
        (lambda: inlay.make_run(toy_task(), noise, preset="houlsby2019", max_length=32), in_python),
        (lambda: inlay.make_joint_run([toy_task("one"), toy_task("two")], noise, pooling="pooler"), in_python),
    ):
        with pytest.raises(Unsupported, match="its pooler was never trained") as caught:
            make()
        assert advice in caught.value.hint
    assert inlay.make_run(toy_task(), noise, preset="houlsby2019", pooling="mean", max_length=32).notes == ()


def test_a_run_says_what_it_reads_where_its_user_did_not(noise, tiny_bert, toy_task, toy_tags):
    (said,) = make_run(toy_task(), configure(), noise).notes
    assert said.startswith(
        "pooling: mean (the mean over the tokens): it has no `1_Pooling/config.json`, and its pooler"
    )
    (said,) = make_run(toy_task(), configure(), tiny_bert).notes
    assert said.endswith("its pooler is a trained one")
    assert make_run(toy_task(), configure(pooling="cls"), noise).notes == ()
    assert make_run(toy_tags(), configure(), noise).notes == ()


def test_a_pooler_that_is_trained_with_the_task_may_begin_as_noise_and_a_note_says_so(noise, tiny_bert, toy_task):
    run = make_run(toy_task(), configure(hidden="pooler"), noise)
    assert (run.spec.head.pooling, run.spec.head.hidden) == ("cls", "pooler")
    assert "begins as noise" in run.notes[0]
    assert make_run(toy_task(), configure(hidden="pooler"), tiny_bert).notes == ()


def test_what_was_trained_on_it_before_stands_and_is_served(noise, before):
    store, _, version = before
    (check,) = verify([version], noise, store)
    assert check.stands, check.problem
    (answer,) = Engine(noise, store).predict([Request("old", "the movie was good")])
    assert answer.version == "old@1"


def test_a_finished_run_that_read_it_is_read_back(noise, before, toy_task):
    store, run, _ = before
    trained = read_trained(store.run_folder(run.id), toy_task("old"), noise)
    assert trained.run.id == run.id
    assert trained.spec.head.pooling == "pooler"


def test_what_goes_on_from_a_version_that_reads_it_reads_it_too_and_says_so(noise, before, toy_task):
    store = before[0]
    config = inherit(["old"], store)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **QUICK, start=("old",)))
    run = make_run(toy_task("new", seed=3), config, noise, store)
    assert run.spec.head.pooling == "pooler"
    assert "head included" in run.start.notes[0]
    assert "it still reads a pooler that is noise" in run.notes[0]
