"""The baseline without a transformer: it learns, by the harness's own metrics."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from inlay.data.metrics import list_metrics, score
from inlay.data.tasks import Split
from inlay.errors import Unsupported
from inlay.explore.baseline import _Features, fit_baseline
from inlay.training.recipe.linear import fit_linear


@pytest.mark.parametrize(
    ("kind", "is_learnt"),
    [("classify", lambda x: x > 0.9), ("multilabel", lambda x: x > 0.9), ("regress", lambda x: x < 3.0)],
)
def test_a_task_is_learnt_and_scored_by_every_metric_of_its_kind(toy_task, kind, is_learnt):
    task = toy_task(kind=kind, num_rows=200)
    found = fit_baseline(dataclasses.replace(task, test=task.dev))
    assert is_learnt(found.metrics["dev"][task.metric]), found.metrics
    assert list(found.metrics["dev"]) == list_metrics(kind, len(task.labels))
    assert found.metrics["test"] == found.metrics["dev"]
    assert found.num_train == 200
    assert found.metrics["dev"][task.metric] == found.tried[f"{found.strength:g}"]


def test_strength_is_the_best_on_dev_and_the_weaker_of_equals(toy_task):
    found = fit_baseline(toy_task(num_rows=120), strengths=(1e-6, 1.0, 10.0))
    assert found.tried[f"{found.strength:g}"] == max(found.tried.values())
    first = next(strength for strength, value in found.tried.items() if value == max(found.tried.values()))
    assert f"{found.strength:g}" == first


def test_parameters_are_the_fitted_weights_and_biases(toy_task):
    two, three = (fit_baseline(toy_task(num_labels=labels, num_rows=90)) for labels in (2, 3))
    assert two.num_parameters == two.num_features + 1
    assert three.num_parameters == 3 * (three.num_features + 1)


def test_two_classes_have_the_probabilities_of_the_logistic_function(toy_task):
    from sklearn.linear_model import LogisticRegression

    task = toy_task(num_rows=60)
    features = _Features(task.train, chars=False)
    rows = features.read(task.train)
    logits = fit_linear("classify", rows, task.train.targets, 1.0, 2).outputs(rows)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(
        shares, LogisticRegression(C=1.0, max_iter=1000).fit(rows, task.train.targets).predict_proba(rows), atol=1e-6
    )


def test_label_without_a_training_row_is_never_predicted(toy_task):
    task = toy_task(num_labels=3, num_rows=90)
    without = task.train.take(np.flatnonzero(task.train.targets != 1))
    features = _Features(without, chars=False)
    outputs = fit_linear("classify", features.read(without), without.targets, 1.0, 3).outputs(features.read(task.dev))
    assert outputs.shape == (len(task.dev), 3)
    assert set(outputs.argmax(axis=1)) == {0, 2}
    only = task.train.take(np.flatnonzero(task.train.targets == 1))
    constant = fit_linear("classify", features.read(only), only.targets, 1.0, 3).outputs(features.read(task.dev))
    assert set(constant.argmax(axis=1)) == {1}


def test_label_that_every_row_has_is_always_predicted(toy_task):
    task = toy_task(kind="multilabel", num_rows=80)
    for split in (task.train, task.dev):
        split.targets[:, 0] = 1
    found = fit_baseline(task)
    assert found.metrics["dev"]["micro_f1"] > 0.9


def test_pairs_are_told_apart_by_how_much_they_overlap(toy_task):
    generator = np.random.default_rng(0)
    words = [f"word{number}" for number in range(4000)]  # most occur once: only the overlap tells anything

    def split(size):
        targets = generator.integers(2, size=size)
        texts = [" ".join(generator.choice(words, 6)) for _ in targets]
        pairs = [
            text if same else " ".join(generator.choice(words, 6)) for text, same in zip(texts, targets, strict=True)
        ]
        return Split(texts, pairs, targets.astype(np.int64), list(range(1, size + 1)))

    task = dataclasses.replace(toy_task(), train=split(200), dev=split(100))
    found = fit_baseline(task)
    assert found.metrics["dev"]["accuracy"] > 0.95


def test_letters_add_features_of_parts_of_words(toy_task):
    task = toy_task(num_rows=60)
    assert fit_baseline(task, chars=True).num_features > fit_baseline(task).num_features


def test_scores_are_those_of_the_harness_s_metric_functions(toy_task):
    task = toy_task(num_labels=3, num_rows=90)
    found = fit_baseline(task, strengths=(1.0,))
    features = _Features(task.train, chars=False)
    outputs = fit_linear("classify", features.read(task.train), task.train.targets, 1.0, 3).outputs(
        features.read(task.dev)
    )
    assert found.metrics["dev"] == {
        name: score(name, outputs, task.dev.targets) for name in ("accuracy", "macro_f1", "matthews")
    }


def test_kind_it_has_no_model_for_is_refused(toy_task):
    with pytest.raises(Unsupported, match="`tag` task"):
        fit_baseline(dataclasses.replace(toy_task(), kind="tag"))
