"""Cross-validation of a run: scores of rows left out, the same settings in every fold, nothing left but answers."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from hooks import Hooks
from inlay.errors import Diverged, StoreDamaged
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import FitSettings, fit, make_run, publish
from inlay.training.evaluate import score_split
from inlay.training.recipe.cross_validation import LEFT_OUT, judge_folds, make_fold_runs

QUIET = FitSettings(draw_curves=False, keep_last=False)


def make(backbone, task, **train):
    settings = {"batch_size": 8, "max_length": 32, "epochs": 2, "lr": 3e-3, **train}
    return make_run(task, RunConfig(method=MethodConfig("houlsby", 8), train=TrainConfig(**settings)), backbone)


@pytest.fixture
def folded(tiny_bert, toy_task, tmp_path):
    planned = make_fold_runs(make(tiny_bert, toy_task(num_rows=64)), 3, tiny_bert)
    return planned, fit(planned.runs, tiny_bert, tmp_path, QUIET)


def test_folds_are_scored_on_the_rows_they_left_out(folded, tiny_bert):
    planned, results = folded
    alone = [
        score_split(run, result, tiny_bert, run.task.test) for run, result in zip(planned.runs, results, strict=True)
    ]
    found = judge_folds(planned, results, tiny_bert)
    values = [fold.metrics["accuracy"] for fold in found.folds]
    assert values == [own["accuracy"] for own in alone]
    assert found.means["accuracy"] == pytest.approx(sum(values) / 3)
    spread = sum((value - found.means["accuracy"]) ** 2 for value in values) / 2
    assert found.errors["accuracy"] == pytest.approx((spread / 3) ** 0.5)


def test_all_rows_left_out_are_scored_together_each_by_its_own_fold(folded, tiny_bert):
    planned, results = folded
    found = judge_folds(planned, results, tiny_bert)
    assert sorted(found.positions.tolist()) == list(range(len(planned.folds.rows)))
    right = sum(fold.metrics["accuracy"] * fold.num_rows for fold in found.folds)
    pooled = found.pooled.metrics["accuracy"]
    assert pooled.value == pytest.approx(right / found.pooled.num_rows)
    assert pooled.low < pooled.value < pooled.high
    targets = planned.folds.rows.targets[found.positions]
    assert (found.probabilities.argmax(axis=1) == targets).mean() == pytest.approx(pooled.value)
    assert np.allclose(found.probabilities.sum(axis=1), 1)


def test_a_fold_is_as_sure_as_it_was_right_about_the_rows_it_left_out(folded, tiny_bert, tmp_path):
    planned, results = folded
    judge_folds(planned, results, tiny_bert)
    for run in planned.runs:  # logits that are a hundred times as large change no answer
        path = tmp_path / run.id / LEFT_OUT
        content = json.loads(path.read_text())
        del content["crc32"]  # as in files from before there were checksums
        path.write_text(json.dumps(content | {"outputs": (100 * np.array(content["outputs"])).tolist()}))
    found = judge_folds(planned, results, tiny_bert)
    start = 0
    for fold in found.folds:
        sure = found.probabilities[start : start + fold.num_rows].max(axis=1).mean()
        assert sure == pytest.approx(fold.metrics["accuracy"], abs=0.15)
        start += fold.num_rows


def test_folds_differ_from_the_run_in_rows_alone_and_share_a_bank(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task(num_rows=64), lr=None, epochs=None)  # the recipe follows the rows of the run
    runs = make_fold_runs(run, 3, tiny_bert).runs
    assert all(fold.config == run.config for fold in runs)
    assert len({fold.id for fold in [run, *runs]}) == 4
    together = []
    watch = Hooks()
    watch.on_start = lambda cohort: together.append(len(cohort.members))
    fit([make(tiny_bert, fold.task, epochs=1) for fold in runs], tiny_bert, tmp_path, QUIET, watch)
    assert together == [3]


def test_weights_go_once_answers_are_kept_and_a_second_look_trains_nothing(folded, tiny_bert, tmp_path):
    planned, results = folded
    first = judge_folds(planned, results, tiny_bert)
    for run in planned.runs:
        assert not list((tmp_path / run.id).glob("*.safetensors"))
        assert (tmp_path / run.id / LEFT_OUT).is_file()
    again = judge_folds(planned, fit(planned.runs, tiny_bert, tmp_path, QUIET), tiny_bert)
    assert again.to_json() == first.to_json()
    assert np.array_equal(again.probabilities, first.probabilities)


@pytest.mark.parametrize("kind", ["multilabel", "regress", "tag", "span"])
def test_other_kinds_are_cross_validated_too(tiny_bert, toy_task, toy_tags, toy_answers, tmp_path, kind):
    tasks = {"tag": toy_tags, "span": toy_answers}
    task = tasks[kind](num_rows=32) if kind in tasks else toy_task(kind=kind, num_rows=32)
    planned = make_fold_runs(make(tiny_bert, task, epochs=1, max_length=64), 2, tiny_bert)
    results = fit(planned.runs, tiny_bert, tmp_path, QUIET)
    alone = [
        score_split(run, result, tiny_bert, run.task.test) for run, result in zip(planned.runs, results, strict=True)
    ]
    found = judge_folds(planned, results, tiny_bert)
    assert [fold.metrics[task.metric] for fold in found.folds] == pytest.approx([own[task.metric] for own in alone])
    assert found.pooled.num_rows == len(task.train) + len(task.dev)
    assert (found.probabilities is not None) == (kind == "multilabel")


def test_a_fold_that_diverged_gives_no_score(folded, tiny_bert):
    planned, results = folded
    results[1] = dataclasses.replace(results[1], status="diverged", message="diverged at step 3")
    with pytest.raises(Diverged, match="one of the folds, diverged at step 3"):
        judge_folds(planned, results, tiny_bert)


def test_answers_to_other_rows_are_refused(folded, tiny_bert, tmp_path):
    planned, results = folded
    judge_folds(planned, results, tiny_bert)
    one, other = (tmp_path / run.id / LEFT_OUT for run in planned.runs[:2])
    one.write_text(other.read_text())
    with pytest.raises(StoreDamaged, match="other rows"):
        judge_folds(planned, results, tiny_bert)
    one.write_text("{")
    with pytest.raises(StoreDamaged, match="not what a fold writes"):
        judge_folds(planned, results, tiny_bert)


def test_a_version_keeps_what_its_cross_validation_came_to(folded, tiny_bert, toy_task, tmp_path):
    found = judge_folds(*folded, tiny_bert)
    run, store = make(tiny_bert, toy_task(num_rows=64)), Store(tmp_path / "store")
    (result,) = fit([run], tiny_bert, tmp_path)
    plain = store.manifest(publish(run, result, tiny_bert, store, "plain"))
    kept = store.manifest(publish(run, result, tiny_bert, store, "folded", folds=found))
    assert kept.run_id == plain.run_id
    assert kept.metrics == plain.metrics | {"folds": found.means}
    assert kept.extra == plain.extra | {"folds": json.loads(json.dumps(found.to_manifest()))}
    assert set(kept.metrics["folds"]) == {"accuracy", "f1", "macro_f1", "matthews"}
