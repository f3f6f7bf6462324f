"""Starting from stored tasks: the slot begins with their tensors, the id covers them, the version says so."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hooks import Hooks
from inlay.errors import BadConfig, Missing, UnknownName, WrongBackbone
from inlay.model.bank.bank import Bank
from inlay.model.batch.route import Row
from inlay.model.heads.inference import infer
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import FitSettings, fit, make_run, publish
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.run.start import inherit

SETTINGS = CohortSettings(16384, 1, 100)
TRAIN = {"batch_size": 8, "max_length": 32, "epochs": 2, "lr": 3e-3, "pooling": "mean"}


def train_and_publish(task, backbone, store, *, size=8, method="houlsby", **train):
    config = RunConfig(method=MethodConfig(method, size), train=TrainConfig(**{**TRAIN, **train}))
    run = make_run(task, config, backbone)
    (result,) = fit([run], backbone, store.root / "runs")
    return publish(run, result, backbone, store)


@pytest.fixture(scope="module")
def store(tiny_bert, toy_task, tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("start"))
    train_and_publish(toy_task("two"), tiny_bert, store)
    train_and_publish(toy_task("other", seed=5), tiny_bert, store, seed=1)
    train_and_publish(toy_task("three", num_labels=3), tiny_bert, store)
    train_and_publish(toy_task("wide"), tiny_bert, store, size=12)
    train_and_publish(toy_task("one-place"), tiny_bert, store, method="pfeiffer")
    train_and_publish(toy_task("number", kind="regress"), tiny_bert, store)
    return store


def start_from(task, backbone, store, *names, **train):
    config = inherit(names, store)
    settings = {**TRAIN, **train, "start": names}
    return make_run(
        task, dataclasses.replace(config, train=dataclasses.replace(config.train, **settings)), backbone, store
    )


def first_tensors(run, backbone):
    return Cohort([run], backbone, SETTINGS).bank.read(0)


def tensors_of(store, name):
    return store.load(store.resolve(name)).tensors


def test_slot_begins_with_the_tensors_of_the_version_head_included_where_labels_are_equal(tiny_bert, toy_task, store):
    run = start_from(toy_task("new", seed=7), tiny_bert, store, "two")
    first, source = first_tensors(run, tiny_bert), tensors_of(store, "two")
    assert first.keys() == source.keys()
    assert all(torch.equal(first[name], source[name]) for name in source)
    assert run.start.notes == ("starts from `two@1`, head included",)


def test_head_starts_fresh_where_the_labels_or_the_kind_differ(tiny_bert, toy_task, store):
    task = toy_task("new", seed=7)
    plain = first_tensors(make_run(task, RunConfig(MethodConfig(size=8)), tiny_bert), tiny_bert)
    for name, why in (("three", "`three@1` has other labels"), ("number", "`number@1` is of the kind regress")):
        run = start_from(task, tiny_bert, store, name)
        first, source = first_tensors(run, tiny_bert), tensors_of(store, name)
        assert all(torch.equal(first[key], source[key]) for key in source if not key.startswith("head."))
        assert torch.equal(first["head.weight"], plain["head.weight"])
        assert "head starts fresh" in run.start.notes[0]
        assert why in run.start.notes[0]


def test_head_starts_fresh_where_it_would_read_another_vector(tiny_bert, toy_task, store):
    run = start_from(toy_task("new"), tiny_bert, store, "two", pooling="cls")
    assert "reads the backbone in another way" in run.start.notes[0]
    assert "head.weight" not in run.start.tensors


def test_several_sources_give_their_mean(tiny_bert, toy_task, store):
    run = start_from(toy_task("new", seed=7), tiny_bert, store, "two", "other")
    first, one, two = first_tensors(run, tiny_bert), tensors_of(store, "two"), tensors_of(store, "other")
    for name in one:
        torch.testing.assert_close(first[name], (one[name] + two[name]) / 2)
    assert run.start.notes == ("starts from the mean of `two@1` and `other@1`, head included",)


def test_head_of_a_regression_answers_as_before_on_another_scale(tiny_bert, toy_task, store):
    task = toy_task("new", kind="regress", seed=3)
    task = dataclasses.replace(task, train=dataclasses.replace(task.train, targets=task.train.targets / 7 - 2))
    run = start_from(task, tiny_bert, store, "number")
    loaded = store.load(store.resolve("number"))
    row = Row(tiny_bert.tokenizer("the good cat")["input_ids"], 0)
    bank = Bank(tiny_bert, 1)
    from inlay.model.bank.methods import SlotSpec

    spec = SlotSpec.from_stored(loaded.manifest.method, loaded.manifest.head)
    bank.put(0, spec, loaded.tensors)
    before = float(infer(bank, [row])[0]) * spec.head.target_std + spec.head.target_mean
    bank.put(0, run.spec, run.start.tensors)
    after = float(infer(bank, [row])[0]) * run.spec.head.target_std + run.spec.head.target_mean
    assert spec.head.target_std != pytest.approx(run.spec.head.target_std)
    assert after == pytest.approx(before, rel=1e-5)


def test_method_is_the_source_s_unless_asked_otherwise(tiny_bert, toy_task, store):
    assert start_from(toy_task(), tiny_bert, store, "wide").config.method.size == 12
    assert start_from(toy_task(), tiny_bert, store, "one-place").config.method.name == "pfeiffer"


@pytest.mark.parametrize("method", ["lora", "ia3", "bitfit", "parallel", "norms", "head", "full", "top"])
def test_every_method_can_be_a_start(tiny_bert, toy_task, tmp_path, method):
    own = Store(tmp_path)
    size = 4 if method in ("lora", "parallel") else None
    train_and_publish(toy_task("source", num_labels=3), tiny_bert, own, method=method, size=size, epochs=1)
    run = start_from(toy_task("new", seed=7), tiny_bert, own, "source", epochs=1)
    first, source = first_tensors(run, tiny_bert), tensors_of(own, "source")
    body = [name for name in source if not name.startswith("head.")]
    assert {name for name in first if not name.startswith("head.")} == set(body)
    assert all(torch.equal(first[name], source[name]) for name in body)
    (result,) = fit([run], tiny_bert, tmp_path / "runs")
    assert result.dev_metric is not None


def test_sharing_and_running_statistics_go_along(tiny_bert, toy_task, tmp_path):
    own = Store(tmp_path)
    method = MethodConfig(size=8, sharing="every-2", inner_norm="batch")
    run = make_run(toy_task("source"), RunConfig(method=method, train=TrainConfig(**TRAIN)), tiny_bert)
    (result,) = fit([run], tiny_bert, tmp_path / "runs")
    publish(run, result, tiny_bert, own)
    child = start_from(toy_task("new", seed=7), tiny_bert, own, "source")
    assert (child.config.method.sharing, child.config.method.inner_norm) == ("every-2", "batch")
    first = first_tensors(child, tiny_bert)
    moved = [name for name in first if name.endswith(".running_mean")]
    assert len(moved) == 2, "three layers, two at a time"
    assert all(torch.equal(first[name], result.tensors[name]) for name in first)
    assert all(bool(first[name].any()) for name in moved)


def test_another_layout_is_refused_with_both_values(tiny_bert, toy_task, store):
    config = RunConfig(method=MethodConfig(size=16), train=TrainConfig(**TRAIN, start=("two",)))
    with pytest.raises(BadConfig, match=r"`method\.size` is `16`, but `two@1` has `8`"):
        make_run(toy_task(), config, tiny_bert, store)
    config = RunConfig(method=MethodConfig("pfeiffer", 8), train=TrainConfig(**TRAIN, start=("two",)))
    with pytest.raises(BadConfig, match=r"`method\.name` is `pfeiffer`, but `two@1` has `houlsby`"):
        make_run(toy_task(), config, tiny_bert, store)


def test_a_setting_that_leaves_the_layout_alone_may_differ(tiny_bert, toy_task, store):
    method = MethodConfig(size=8, init_std=1e-4)
    run = make_run(toy_task(), RunConfig(method=method, train=TrainConfig(**TRAIN, start=("two",))), tiny_bert, store)
    assert run.start.tensors


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("two", "wide"), "no mean of `two@1` \\(`method\\.size` `8`\\) and `wide@1` \\(`12`\\)"),
        (("two", "one-place"), "no mean of `two@1` \\(`method.name` `houlsby`\\) and `one-place@1`"),
        (("two", "two@1"), "has `two@1` twice"),
    ],
)
def test_sources_that_cannot_be_averaged_are_refused(tiny_bert, toy_task, store, names, words):
    with pytest.raises(BadConfig, match=words):
        start_from(toy_task(), tiny_bert, store, *names)


def test_wrong_backbone_and_unknown_task_are_refused(backbone_of, tiny_bert, toy_task, store):
    with pytest.raises(WrongBackbone, match="cannot start from `two@1`"):
        start_from(toy_task(), backbone_of("roberta"), store, "two")
    with pytest.raises(UnknownName, match="no task named `tow`"):
        start_from(toy_task(), tiny_bert, store, "tow")
    with pytest.raises(BadConfig, match="there is no store"):
        make_run(toy_task(), RunConfig(train=TrainConfig(start=("two",))), tiny_bert)


def test_run_id_covers_what_it_started_from(tiny_bert, toy_task, store):
    task = toy_task("new")
    runs = [start_from(task, tiny_bert, store, *names) for names in (("two",), ("other",), ("two", "other"))]
    fresh = make_run(task, RunConfig(MethodConfig(size=8), TrainConfig(**TRAIN)), tiny_bert)
    assert len({run.id for run in [*runs, fresh]}) == 4
    digest = store.resolve("two").digest
    assert runs[0].config.train.start == (f"two@1:{digest[:12]}",)
    assert start_from(task, tiny_bert, store, *runs[0].config.train.start).id == runs[0].id


def test_a_resolved_start_whose_content_is_gone_is_refused(tiny_bert, toy_task, store):
    with pytest.raises(Missing, match="is not the version the run started from"):
        start_from(toy_task(), tiny_bert, store, "two@1:0123456789ab")


def test_version_records_its_lineage(tiny_bert, toy_task, store):
    task = toy_task("child", seed=7)
    run = start_from(task, tiny_bert, store, "two", "other", epochs=1)
    (result,) = fit([run], tiny_bert, store.root / "runs")
    manifest = store.manifest(publish(run, result, tiny_bert, store))
    versions = [store.resolve(name) for name in ("two", "other")]
    assert manifest.extra["from"] == [{"reference": item.reference, "digest": item.digest} for item in versions]
    assert "from" not in store.manifest(versions[0]).extra


class _Stop(Hooks):
    def on_step(self, cohort, num_rows):
        if cohort.num_steps == 7:
            raise KeyboardInterrupt


def test_stopped_run_goes_on_and_ends_with_the_same_weights(tiny_bert, toy_task, store, tmp_path):
    run = start_from(toy_task("new", seed=7), tiny_bert, store, "two", epochs=3)
    (whole,) = fit([run], tiny_bert, tmp_path / "whole")
    settings = FitSettings(save_every=2)
    with pytest.raises(KeyboardInterrupt):
        fit([run], tiny_bert, tmp_path / "stopped", settings, _Stop())
    again = start_from(toy_task("new", seed=7), tiny_bert, store, "two", epochs=3)
    (resumed,) = fit([again], tiny_bert, tmp_path / "stopped", settings)
    assert all(torch.equal(whole.tensors[name], resumed.tensors[name]) for name in whole.tensors)


def test_runs_with_and_without_a_start_share_a_cohort_and_end_as_alone(tiny_bert, toy_task, store, tmp_path):
    task = toy_task("new", seed=7)
    quiet = {"dropout": 0.0, "head_dropout": 0.0, "epochs": 1}
    fresh = make_run(task, RunConfig(MethodConfig(size=8), TrainConfig(**{**TRAIN, **quiet})), tiny_bert)
    child = start_from(task, tiny_bert, store, "two", **quiet)
    together = fit([fresh, child], tiny_bert, tmp_path / "together")
    (alone,) = fit([child], tiny_bert, tmp_path / "alone")
    for name, tensor in alone.tensors.items():
        torch.testing.assert_close(together[1].tensors[name], tensor, atol=1e-5, rtol=1e-4)
