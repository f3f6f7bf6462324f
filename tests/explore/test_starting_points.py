"""`suggest`: the closed form is exact, the better start ranks first, nothing is trained."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import torch

from inlay.data.encode import encode
from inlay.data.tasks import Split
from inlay.errors import Unsupported
from inlay.explore.starting_points import (
    StartCandidate,
    SuggestSettings,
    _load_candidates,
    pooled_vectors,
    predict_left_out,
    sample_rows,
    suggest,
)
from inlay.model.bank.bank import Bank
from inlay.model.batch.route import Row, collate, make_rows
from inlay.model.heads.inference import infer
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import fit, make_run, publish


def test_prediction_for_a_row_left_out_is_that_of_a_ridge_fitted_without_it(monkeypatch):
    generator = np.random.default_rng(0)
    vectors, targets = generator.normal(size=(12, 5)), generator.normal(size=(12, 2))
    monkeypatch.setattr(sys.modules["inlay.explore.starting_points"], "_PENALTIES", np.array([0.7]))
    predictions, _ = predict_left_out(vectors, targets)
    singular = np.linalg.svd(vectors - vectors.mean(0), compute_uv=False)
    penalty = 0.7 * (singular**2).mean()
    for row in range(12):
        others = np.arange(12) != row
        X = np.hstack([vectors[others], np.ones((11, 1))])
        shrink = penalty * np.diag([1.0] * 5 + [0.0])  # the intercept is free
        weights = np.linalg.solve(X.T @ X + shrink, X.T @ targets[others])
        np.testing.assert_allclose(predictions[row], np.append(vectors[row], 1) @ weights)


def test_vectors_that_say_nothing_explain_nothing_and_those_that_say_all_explain_all():
    generator = np.random.default_rng(1)
    targets = generator.normal(size=(60, 1))
    _, nothing = predict_left_out(generator.normal(size=(60, 4)), targets)
    _, everything = predict_left_out(np.hstack([targets, generator.normal(size=(60, 3))]), targets)
    assert nothing < 0.1
    assert everything > 0.99
    assert predict_left_out(np.ones((6, 3)), np.ones((6, 1)))[1] == 0.0, "constant vectors and targets"


def test_sample_keeps_the_shares_of_the_classes_and_no_text_twice(toy_task):
    task = toy_task(num_labels=3, num_rows=300)
    rows = sample_rows(task, 60)
    assert len(rows) == len(set(rows)) == 60
    texts = [task.train.texts[row] for row in rows]
    assert len(set(texts)) == 60
    whole, part = (np.bincount(task.train.targets[chosen], minlength=3) for chosen in (slice(None), rows))
    assert np.abs(part / 60 - whole / 300).max() < 0.04
    again = Split(task.train.texts * 2, None, np.tile(task.train.targets, 2), task.train.lines * 2)
    doubled = type(task)(**{**vars(task), "train": again})
    assert len(sample_rows(doubled, 10_000)) == len(set(task.train.texts))


@pytest.fixture(scope="module")
def store(tiny_bert, toy_task, tmp_path_factory):
    """Three tasks: `near` has the words of the new data's labels, `far` has other labels, `number` is a regression."""
    store = Store(tmp_path_factory.mktemp("store"))
    tasks = {
        "near": toy_task("near", num_rows=600),
        "far": toy_task("far", num_labels=3, seed=3),
        "number": toy_task("number", kind="regress", num_labels=5),
    }
    for name, task in tasks.items():
        epochs = 10 if name == "near" else 1
        train = TrainConfig(batch_size=8, max_length=32, epochs=epochs, lr=5e-3, pooling="mean")
        run = make_run(task, RunConfig(method=MethodConfig(size=16), train=train), tiny_bert)
        (result,) = fit([run], tiny_bert, store.root / "runs")
        publish(run, result, tiny_bert, store)
    return store


def test_vectors_in_mixed_batches_are_those_of_each_slot_alone(tiny_bert, toy_task, store):
    task = toy_task(num_rows=20)
    encoded = encode(tiny_bert.tokenizer, task.train.texts, None, 32)
    candidates, refused = _load_candidates(store, tiny_bert, None, task)
    assert not refused
    everyone = [StartCandidate("", None, {}), *candidates]
    together = pooled_vectors(everyone, tiny_bert, encoded, lambda num_rows: None)
    plain_batch = collate([Row(encoded.ids[7], 0)], tiny_bert.pad_id)
    with torch.no_grad():
        plain = tiny_bert.pool(tiny_bert.hidden(plain_batch), plain_batch.mask_BT, tiny_bert.default_pooling)
    np.testing.assert_allclose(together[0][7], plain[0].numpy(), atol=1e-5)
    for candidate, vectors in zip(candidates, together[1:], strict=True):
        bank = Bank(tiny_bert, 1)
        bank.put(0, candidate.spec, candidate.tensors)
        batch = collate([Row(encoded.ids[7], 0)], tiny_bert.pad_id)
        with torch.no_grad(), bank.routed(batch.route):
            alone = tiny_bert.pool(tiny_bert.hidden(batch), batch.mask_BT, "mean")
        np.testing.assert_allclose(vectors[7], alone[0].numpy(), atol=1e-5)


def test_the_task_with_the_same_labels_ranks_first_and_beats_the_plain_backbone(tiny_bert, toy_task, store):
    found = suggest(toy_task("new", num_rows=40, seed=10), tiny_bert, store)
    assert {item.reference for item in found.ranked} == {"near@1", "far@1", "number@1"}
    assert found.ranked[0].reference == "near@1"
    assert found.ranked[0].gain > 0
    assert [item.score for item in found.ranked] == sorted((item.score for item in found.ranked), reverse=True)
    assert found.ranked[1].gain == pytest.approx(found.ranked[1].score - found.plain.score)
    assert found.num_rows == 40


@pytest.mark.parametrize("probes", ["rows", "hashed"])
def test_a_task_on_the_same_rows_split_otherwise_is_no_start(tiny_bert, toy_task, tmp_path, probes):
    seen, store = toy_task("seen", num_rows=40), Store(tmp_path)
    run = make_run(seen, RunConfig(train=TrainConfig(epochs=1, max_length=32)), tiny_bert)
    (result,) = fit([run], tiny_bert, store.root / "runs")
    publish(run, result, tiny_bert, store, probes=probes)
    swapped = dataclasses.replace(seen, train=seen.dev, dev=seen.train, digest="another split")
    assert suggest(swapped, tiny_bert, store).refused == {"seen@1": "it was trained on these very rows"}
    assert not suggest(toy_task("new", num_rows=40, seed=10), tiny_bert, store).refused


@pytest.mark.parametrize("kind", ["regress", "multilabel"])
def test_other_kinds_are_ranked_by_their_own_metric(tiny_bert, toy_task, store, kind):
    task = toy_task("new", kind=kind, num_rows=64, seed=9)
    found = suggest(task, tiny_bert, store, ["near", "far"])
    assert found.metric == task.metric
    assert found.ranked[0].reference == "near@1"
    sign = -1 if kind == "regress" else 1
    assert sign * found.ranked[0].score >= sign * found.ranked[1].score
    assert found.ranked[0].gain == pytest.approx(sign * (found.ranked[0].score - found.plain.score))


def test_more_candidates_than_slots_give_the_same_scores(tiny_bert, toy_task, store, monkeypatch):
    task, seen = toy_task("new", num_rows=32), []
    settings = SuggestSettings(num_rows=32, max_length=32, on_rows=seen.append)
    whole = suggest(task, tiny_bert, store, settings=settings)
    assert sum(seen) == 4 * whole.num_rows
    monkeypatch.setattr(sys.modules["inlay.explore.starting_points"], "_SLOTS", 2)
    parts = suggest(task, tiny_bert, store, settings=settings)
    assert [item.reference for item in whole.ranked] == [item.reference for item in parts.ranked]
    assert [item.fit for item in whole.ranked] == pytest.approx([item.fit for item in parts.ranked], abs=1e-4)


def test_methods_mix_and_full_fine_tuning_goes_alone(tiny_bert, toy_task, tmp_path):
    store = Store(tmp_path)
    for method in ("lora", "bitfit", "full", "houlsby"):
        train = TrainConfig(batch_size=8, max_length=32, epochs=1, lr=1e-2, pooling="pooler")
        run = make_run(toy_task(method), RunConfig(method=MethodConfig(method), train=train), tiny_bert)
        (result,) = fit([run], tiny_bert, store.root / "runs")
        publish(run, result, tiny_bert, store)
    task = toy_task("new", num_rows=24)
    settings = SuggestSettings(max_length=32)
    together = {item.reference: item.fit for item in suggest(task, tiny_bert, store, settings=settings).ranked}
    assert set(together) == {"lora@1", "bitfit@1", "full@1", "houlsby@1"}
    for reference, value in together.items():
        (alone,) = suggest(task, tiny_bert, store, [reference], settings).ranked
        assert value == pytest.approx(alone.fit, abs=1e-4)
    encoded = encode(tiny_bert.tokenizer, task.train.texts, None, 32)
    for candidate in _load_candidates(store, tiny_bert, None, task)[0]:
        (vectors,) = pooled_vectors([candidate], tiny_bert, encoded, lambda num_rows: None)
        bank = Bank(tiny_bert, 1)
        bank.put(0, candidate.spec, candidate.tensors)
        logits = torch.stack(infer(bank, make_rows(encoded)))
        weight, bias = candidate.tensors["head.weight"].numpy(), candidate.tensors["head.bias"].numpy()
        np.testing.assert_allclose(vectors @ weight.T + bias, logits.numpy(), atol=1e-4)


def test_a_task_trained_on_the_very_rows_is_no_start(tiny_bert, toy_task, store):
    found = suggest(toy_task("far", num_labels=3, seed=3), tiny_bert, store)
    assert found.refused == {"far@1": "it was trained on these very rows"}
    assert {item.reference for item in found.ranked} == {"near@1", "number@1"}


def test_version_of_another_backbone_is_refused_by_name(backbone_of, toy_task, store):
    found = suggest(toy_task(), backbone_of("roberta"), store, ["near"])
    assert found.ranked == ()
    assert "it was trained on the backbone" in found.refused["near@1"]
    assert suggest(toy_task(), backbone_of("roberta"), store).refused == {}, "unasked, other backbones are passed over"


def test_kind_it_cannot_probe_is_refused(tiny_bert, toy_task, store):
    task = toy_task()
    with pytest.raises(Unsupported, match="`span` task"):
        suggest(type(task)(**{**vars(task), "kind": "span"}), tiny_bert, store)
