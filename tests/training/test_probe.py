"""The linear probe: frozen vectors, a convex head, strength by cross-validation; what adapters are held against."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from inlay.data.tasks import Split
from inlay.errors import Unsupported
from inlay.training.recipe.probe import _Reader, fit_probe


def test_vectors_are_those_that_transformers_gives_alone(backbone_of):
    for family in ("bert", "mpnet", "deberta-v2"):
        backbone = backbone_of(family)
        texts = ["the movie was good", "no", "call now to win a free prize !"]
        split = Split(texts, None, np.zeros(3, dtype=np.int64), [1, 2, 3])
        found = _Reader(backbone, 64, lambda _: None)._vectors(split)
        for text, vector in zip(texts, found, strict=True):
            inputs = backbone.tokenizer(text, return_tensors="pt")
            with torch.inference_mode():
                states = backbone.model(**inputs).last_hidden_state
            pooled = backbone.pool(states, inputs["attention_mask"], backbone.default_pooling)
            np.testing.assert_allclose(vector, pooled[0].double().numpy(), atol=1e-5)


def test_the_probe_is_scikit_learns_logistic_regression_on_these_vectors(tiny_bert, toy_task):
    task = toy_task(num_rows=80)
    found = fit_probe(task, tiny_bert)
    reader = _Reader(tiny_bert, 128, lambda _: None)
    train, dev = reader.read(task.train, "single"), reader.read(task.dev, "single")
    scaler = StandardScaler().fit(train)
    model = LogisticRegression(C=found.strength, max_iter=1000).fit(scaler.transform(train), task.train.targets)
    assert found.metrics["dev"]["accuracy"] == model.score(scaler.transform(dev), task.dev.targets)
    assert found.tried["single"][f"{found.strength:g}"] == max(found.tried["single"].values())


@pytest.mark.parametrize("kind", ["classify", "multilabel", "regress"])
def test_every_kind_of_row_is_probed_and_scored(tiny_bert, toy_task, kind):
    task = toy_task(kind=kind, num_rows=60)
    found = fit_probe(dataclasses.replace(task, test=task.dev), tiny_bert)
    assert found.metrics["test"] == found.metrics["dev"]
    assert task.metric in found.metrics["dev"]
    assert (found.reading, found.cosine) == ("single", None)
    assert found.num_features == tiny_bert.hidden_size


def make_pairs(size: int, seed: int) -> Split:
    """Pairs of texts; the target is the share of words that the second has in common with the first."""
    draw = np.random.default_rng(seed)
    words = "the movie was good plot fine call now win free prize we come home late cat sat mat dog".split()
    texts, pairs, targets = [], [], []
    for _ in range(size):
        own = list(draw.choice(words, 6, replace=False))
        shared = int(draw.integers(0, 7))
        others = [word for word in words if word not in own]
        texts.append(" ".join(own))
        pairs.append(" ".join([*own[:shared], *draw.choice(others, 6 - shared, replace=False)]))
        targets.append(shared / 6)
    return Split(texts, pairs, np.array(targets), list(range(1, size + 1)))


def test_pairs_are_read_joined_and_as_towers_and_the_better_in_cross_validation_is_taken(tiny_bert, toy_task):
    task = dataclasses.replace(
        toy_task(kind="regress"), metric="spearman", train=make_pairs(150, 0), dev=make_pairs(80, 1)
    )
    found = fit_probe(task, tiny_bert)
    best = {reading: max(scores.values()) for reading, scores in found.tried.items()}
    assert set(best) == {"joined", "towers"}
    assert best[found.reading] == max(best.values())
    assert found.reading == "towers", "words in common are what two vectors show, even of an untrained backbone"
    assert found.metrics["dev"]["spearman"] > 0.5


def test_the_untrained_cosine_is_shown_for_pairs_with_a_number(tiny_bert, toy_task):
    task = dataclasses.replace(
        toy_task(kind="regress"), metric="spearman", train=make_pairs(60, 0), dev=make_pairs(80, 1)
    )
    found = fit_probe(task, tiny_bert)
    u, v = (
        _Reader(tiny_bert, 128, lambda _: None)._vectors(Split(texts, None, task.dev.targets, task.dev.lines))
        for texts in (task.dev.texts, task.dev.pairs)
    )
    cosine = (u * v).sum(1) / np.linalg.norm(u, axis=1) / np.linalg.norm(v, axis=1)
    from scipy.stats import spearmanr

    assert found.cosine["dev"]["spearman"] == pytest.approx(spearmanr(cosine, task.dev.targets).statistic)


def test_nothing_of_dev_or_test_chooses_anything(tiny_bert, toy_task):
    task = toy_task(num_rows=60)
    turned = dataclasses.replace(task, dev=dataclasses.replace(task.dev, targets=1 - task.dev.targets))
    first, second = fit_probe(task, tiny_bert), fit_probe(turned, tiny_bert)
    assert (first.strength, first.tried) == (second.strength, second.tried)


def test_a_kind_without_a_linear_model_is_refused(tiny_bert, toy_task):
    with pytest.raises(Unsupported, match="`tag` task"):
        fit_probe(dataclasses.replace(toy_task(), kind="tag"), tiny_bert)
