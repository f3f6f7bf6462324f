"""Drift: the same source looks alike, another does not, and copies of a text cannot hide or feign it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from inlay.data import Split
from inlay.errors import BadData
from inlay.explore import VersionReader, find_drift
from inlay.explore.drift import ALIKE, CLEARLY, SLIGHTLY, _mean_auc, judge, tell_apart
from inlay.settings import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import fit, make_run, publish


def keys_of(*sides):
    return [f"{side}-{row}" for side, vectors in enumerate(sides) for row in range(len(vectors))]


def test_the_mean_auc_of_one_fold_is_the_auc():
    generator = np.random.default_rng(0)
    scores, sides = generator.integers(0, 9, 80).astype(float), generator.integers(0, 2, 80)
    assert _mean_auc(scores, sides, np.zeros(80)) == pytest.approx(roc_auc_score(sides, scores))


def test_one_source_is_rarely_told_apart_and_another_always():
    verdicts = []
    for seed in range(6):
        generator = np.random.default_rng(seed)
        old, new = generator.normal(size=(80, 40)), generator.normal(size=(60, 40))
        auc, (low, _), p = tell_apart(old, new, keys_of(old, new), generator)
        verdicts.append(judge(auc, low, p))
    assert verdicts.count(ALIKE) == 6
    generator = np.random.default_rng(99)
    old, new = generator.normal(size=(80, 40)), generator.normal(0.6, 1, size=(60, 40))
    auc, (low, high), p = tell_apart(old, new, keys_of(old, new), generator)
    assert (p, judge(auc, low, p)) == (1 / 100, CLEARLY)
    assert low < auc < high


def test_the_same_texts_on_both_sides_are_alike():
    """With a text and its copy in different folds, a classifier learns the wrong side of each: AUC far below 0.5."""
    generator = np.random.default_rng(1)
    vectors = generator.normal(size=(60, 40))
    keys = [f"text-{row}" for row in range(60)]
    auc, (low, _), p = tell_apart(vectors, vectors, [*keys, *keys], generator)
    assert auc == pytest.approx(0.5)
    assert judge(auc, low, p) == ALIKE


def test_a_verdict_needs_size_and_proof():
    assert judge(0.9, 0.8, 0.5) == ALIKE
    assert judge(0.55, 0.52, 0.005) == ALIKE
    assert judge(0.65, 0.6, 0.005) == SLIGHTLY


@pytest.fixture(scope="module")
def trained(tiny_bert, toy_task, tmp_path_factory):
    store, task = Store(tmp_path_factory.mktemp("store")), toy_task(num_rows=160)
    train = TrainConfig(batch_size=8, max_length=12, epochs=2, lr=5e-3, pooling="mean")
    run = make_run(task, RunConfig(method=MethodConfig(size=8), train=train), tiny_bert)
    (result,) = fit([run], tiny_bert, store.root / "runs")
    return VersionReader(publish(run, result, tiny_bert, store), tiny_bert, store), task


def test_rows_of_the_same_source_look_alike_and_others_do_not(trained, toy_task):
    reader, task = trained
    same = find_drift(reader, toy_task(num_rows=100, seed=7).train, task.train)
    assert same.verdict == ALIKE
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(["☃", "zebra", "win", "x9"], size=9)) + f" {row}" for row in range(80)]
    other = find_drift(reader, Split(texts, None, None, list(range(1, 81))), task.train)
    assert other.verdict == CLEARLY
    assert other.auc > 0.95
    shifts = {shift.name: shift for shift in other.texts}
    assert shifts["share of unknown tokens"].new > 0.05 > shifts["share of unknown tokens"].train
    assert shifts["median tokens"].new > shifts["median tokens"].train
    assert shifts["median tokens"].p < 0.01
    assert len(other.odd) == 5
    assert other.odd[0].cosine <= other.odd[-1].cosine < 1
    assert repr(other).startswith("DriftReport(toy@1: clearly different, AUC ")
    assert "median tokens" in other._repr_html_()


def test_shares_of_answers_are_compared_by_what_the_version_says(trained):
    reader, task = trained
    answers = [answer["label"] for answer in reader.describe(reader.outputs(task.train))]
    first = [place for place, label in enumerate(answers) if label == task.labels[0]]
    found = find_drift(reader, task.train.take(first), task.train)
    shift = next(each for each in found.labels if each.name == task.labels[0])
    assert shift.new == 1.0
    assert shift.p < 0.01
    assert found.share_known == 1.0


def test_an_odd_row_among_usual_ones_is_listed_first(trained):
    reader, task = trained
    rows = dataclasses.replace(task.train.take(range(40)), targets=None)
    texts = [*rows.texts, "☃ ☃ ☃ ☃ ☃ ☃ ☃ ☃"]
    found = find_drift(reader, Split(texts, None, None, list(range(1, 42))), task.train)
    assert found.odd[0].line == 41


def test_too_few_rows_are_refused(trained):
    reader, task = trained
    with pytest.raises(BadData, match="10 different new rows are too few to compare"):
        find_drift(reader, Split([f"row {n}" for n in range(10)] * 5, None, None, list(range(50))), task.train)
