"""Thresholds tuned on dev rows: asked for, stored with the head, used wherever labels are given; else as before."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from inlay.data.metrics import score
from inlay.exchange import ImportOptions, export_folder, import_folder
from inlay.exchange.onnx import GraphTask, _describe_task
from inlay.model.bank.methods import SlotSpec
from inlay.model.heads.heads import HEADS, HeadSpec, Output
from inlay.serving import Engine, Request
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import evaluate, fit, make_run, publish
from inlay.training.evaluate import judge_split, score_split

LABELS = ("a", "b", "c")


def answer(kind, logits, **settings):
    spec = HeadSpec(kind, len(logits), "cls", **settings)
    output = Output((torch.tensor(logits),))
    return HEADS[kind].answer(output, spec, LABELS[: len(logits)]), HEADS[kind].predict(output, spec, LABELS)


def test_labels_follow_the_thresholds_and_probabilities_do_not():
    plain, _ = answer("multilabel", [-0.5, 0.5, 3.0])
    cut, shifted = answer("multilabel", [-0.5, 0.5, 3.0], thresholds=(-1.0, 1.0, 0.0))
    assert (plain.labels, cut.labels) == (("b", "c"), ("a", "c"))
    assert cut.probabilities == plain.probabilities
    np.testing.assert_allclose(shifted, [0.5, -0.5, 3.0])
    plain, _ = answer("classify", [0.0, -0.5])
    cut, shifted = answer("classify", [0.0, -0.5], thresholds=(-1.0,))
    assert (plain.label, cut.label) == ("a", "b")
    assert cut.probabilities == plain.probabilities
    assert shifted.argmax() == 1


def test_a_class_is_as_sure_as_the_probability_of_the_label_that_is_given():
    head = HEADS["classify"]
    outcome, _ = answer("classify", [0.0, -0.5], thresholds=(-1.0,))
    given = outcome.probabilities["b"]
    assert given < 0.5
    assert head.abstain(outcome, given).label == "b"
    assert head.abstain(outcome, given + 1e-6).label is None
    sets, _ = answer("multilabel", [-0.5, 9.0, 9.0], thresholds=(-1.0, 0.0, 0.0))
    assert HEADS["multilabel"].confidence(sets) == pytest.approx(1 / (1 + np.exp(0.5)))


def test_a_head_without_thresholds_is_stored_as_before():
    assert "thresholds" not in HeadSpec("classify", 2, "cls").to_stored()
    stored = json.loads(json.dumps(HeadSpec("classify", 2, "cls", thresholds=(0.5,)).to_stored()))
    assert SlotSpec.from_stored(dataclasses.asdict(MethodConfig(size=4)), stored).head.thresholds == (0.5,)


def make(task, backbone, **train):
    """A run of rare labels that is stopped early: all its logits are low."""
    settings = {"batch_size": 32, "max_length": 32, "epochs": 2, "lr": 5e-3, "dropout": 0.0, **train}
    return make_run(task, RunConfig(method=MethodConfig(size=8), train=TrainConfig(**settings)), backbone)


def test_the_setting_is_no_part_of_the_id_of_a_run_that_leaves_it_open(tiny_bert, toy_task):
    task = toy_task(kind="multilabel", num_labels=3)
    assert make(task, tiny_bert).id == make(task, tiny_bert, thresholds="none").id
    assert make(task, tiny_bert).id != make(task, tiny_bert, thresholds="dev").id


def test_rare_labels_are_tuned_stored_served_and_better_on_fresh_rows(tiny_bert, toy_task, tmp_path):
    task = toy_task(kind="multilabel", num_labels=4, num_rows=400)
    fresh = toy_task(kind="multilabel", num_labels=4, num_rows=400, seed=9).train
    plain, tuned = make(task, tiny_bert), make(task, tiny_bert, thresholds="dev")
    before, after = (fit([run], tiny_bert, tmp_path / "runs")[0] for run in (plain, tuned))
    for one, other in zip(before.history, after.history, strict=True):
        assert "dev_untuned" not in one
        assert "thresholds" not in one["head"]
        scores = {name: value for name, value in one["dev"].items() if "ece" not in name}
        assert other.get("dev_untuned", scores) == scores, "weights are the same"
    best = after.history[after.best_epoch - 1]
    assert best["dev"]["micro_f1"] > best["dev_untuned"]["micro_f1"]
    head = after.spec(tuned).head
    assert head.thresholds == tuple(best["head"]["thresholds"])
    assert score_split(tuned, after, tiny_bert, fresh)["micro_f1"] > (
        score_split(plain, before, tiny_bert, fresh)["micro_f1"] + 0.02
    )
    # Stored, and served: an answer has the labels whose logits reach their thresholds.
    store = Store(tmp_path / "store")
    version = publish(tuned, after, tiny_bert, store, "tuned")
    assert tuple(store.manifest(version).head["thresholds"]) == head.thresholds
    publish(plain, before, tiny_bert, store, "plain")
    assert "thresholds" not in store.manifest(store.resolve("plain")).head
    answers = Engine(tiny_bert, store).predict([Request("tuned", text) for text in task.dev.texts])
    spec = after.spec(tuned)
    judged = judge_split(spec, after.tensors, tiny_bert, task.dev, tuned.reading)
    logits = np.stack([output.logits[0].numpy() for output in judged.outputs])
    for found, row in zip(answers, logits, strict=True):
        wanted = tuple(
            label for label, logit, cut in zip(task.labels, row, head.thresholds, strict=True) if logit >= cut
        )
        assert found.outcome.labels == wanted
    shown = score("micro_f1", (logits >= head.thresholds).astype(np.int64), task.dev.targets)
    assert shown == pytest.approx(best["dev"]["micro_f1"])
    # A run that starts from it has its own, or none.
    again = make_run(
        task, dataclasses.replace(plain.config, train=dataclasses.replace(plain.config.train, start=("tuned",))),
        tiny_bert, store,
    )  # fmt: skip
    assert again.spec.head.thresholds is None


def test_two_classes_are_tuned_by_the_tasks_own_metric(tiny_bert, toy_task, tmp_path, monkeypatch):
    task = dataclasses.replace(toy_task(num_rows=60), metric="f1")
    asked = []

    def tune(metric, logits, targets):
        asked.append((metric, logits.shape, targets.shape))
        return (-50.0,)

    monkeypatch.setattr(evaluate, "tune_thresholds", tune)
    run = make(task, tiny_bert, thresholds="dev", epochs=1)
    (result,) = fit([run], tiny_bert, tmp_path)
    assert asked == [("f1", (30, 2), (30,))]
    assert result.spec(run).head.thresholds == (-50.0,)
    positive = task.dev.targets.mean()
    assert result.dev_metrics["accuracy"] == pytest.approx(positive), "the second class is answered everywhere"
    fit([make(task, tiny_bert, epochs=1)], tiny_bert, tmp_path)
    assert len(asked) == 1, "nobody asked"


@pytest.mark.parametrize("kind", ["multilabel", "classify"])
@pytest.mark.parametrize("format_name", ["adapterhub", "peft"])
def test_folders_of_other_libraries_say_them_and_bring_them_back(
    kind, format_name, tiny_bert, publish_random, texts, tmp_path
):
    store = Store(tmp_path / "store")
    cuts = (-0.25, 0.5) if kind == "multilabel" else (0.125,)
    spec = SlotSpec.of(MethodConfig("lora", 4), HeadSpec(kind, 2, "pooler", thresholds=cuts))
    version = publish_random(store, "task", tiny_bert, spec)
    export_folder("task", store, tiny_bert, format_name, tmp_path / "folder")
    readme = (tmp_path / "folder" / "README.md").read_text()
    assert ", ".join(f"{cut:g}" for cut in cuts) in readme
    back = import_folder(tmp_path / "folder", tiny_bert, store, ImportOptions(name="back"))
    assert tuple(store.manifest(back.version).head["thresholds"]) == cuts
    answers = Engine(tiny_bert, store).predict([Request(task, text) for text in texts for task in ("task", "back")])
    for ours, theirs in zip(answers[::2], answers[1::2], strict=True):
        assert ours.outcome == theirs.outcome
    graph = GraphTask(version, store.manifest(version), spec, {})
    assert _describe_task(graph)["thresholds"] == list(cuts)
