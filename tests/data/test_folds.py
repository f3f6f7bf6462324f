"""Folds: every row is left out once, nothing that judges a fold has trained it, and texts are never torn."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.data.splits import assign_folds, make_folds
from inlay.data.tasks import Split
from inlay.errors import BadConfig


def test_folds_have_equal_parts_of_all_rows_and_of_every_class():
    strata = np.repeat([0, 1, 2], [61, 30, 10])
    folds = assign_folds([f"text {row}" for row in range(101)], strata, 5, seed=0)
    assert sorted(np.bincount(folds)) == [20, 20, 20, 20, 21]
    for stratum, size in ((0, 61), (1, 30), (2, 10)):
        counts = np.bincount(folds[strata == stratum], minlength=5)
        assert counts.min() == size // 5
        assert counts.max() <= size // 5 + 1


def test_many_small_classes_fill_all_folds_alike():
    folds = assign_folds([str(row) for row in range(300)], np.repeat(np.arange(100), 3), 5, seed=0)
    assert np.bincount(folds).tolist() == [60] * 5


def test_the_seed_decides_who_is_left_out_and_the_order_of_rows_does_not():
    keys, strata = [f"text {row}" for row in range(100)], np.arange(100) % 2
    first, other = (assign_folds(keys, strata, 5, seed) for seed in (0, 1))
    assert not np.array_equal(first, other)
    assert np.array_equal(assign_folds(keys[::-1], strata[::-1], 5, 0)[::-1], first)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=60))
def test_equal_texts_are_left_out_together_and_other_rows_of_the_class_stay(rows):
    keys, strata = [str(key) for key, _ in rows], np.array([stratum for _, stratum in rows])
    folds = assign_folds(keys, strata, 3, seed=0)
    first_stratum = {}
    for key, stratum in zip(keys, strata, strict=True):
        first_stratum.setdefault(key, int(stratum))
    for key in first_stratum:
        assert len({int(fold) for fold, other in zip(folds, keys, strict=True) if other == key}) == 1
    for stratum in set(first_stratum.values()):
        own = [row for row, key in enumerate(keys) if first_stratum[key] == stratum]
        assert len(set(folds[own].tolist())) > 1 or folds[own[0]] == -1


def test_every_row_that_is_no_test_row_is_left_out_once_and_trains_or_chooses_in_all_other_folds(toy_task):
    task = toy_task(num_rows=60)
    task = dataclasses.replace(task, test=task.dev)
    folds = make_folds(task, 5, seed=0)
    assert folds.rows.texts == [*task.train.texts, *task.dev.texts]
    assert sorted(np.concatenate(folds.left_out).tolist()) == list(range(len(folds.rows)))
    assert len({fold.digest for fold in folds.tasks}) == 5
    for fold, left in zip(folds.tasks, folds.left_out, strict=True):
        assert fold.test.texts == [folds.rows.texts[row] for row in left]
        assert np.array_equal(fold.test.targets, folds.rows.targets[left])
        assert len(fold.train) + len(fold.dev) + len(fold.test) == len(folds.rows)
        seen = {*fold.train.texts, *fold.dev.texts}
        assert not seen & set(fold.test.texts)
        assert not set(fold.train.texts) & set(fold.dev.texts)
        assert len(fold.dev) == pytest.approx((len(fold.train) + len(fold.dev)) / 3, abs=1)  # as in the task


def test_a_class_of_one_text_is_always_trained_on_and_said_to_be_unjudged(toy_task):
    task = toy_task(num_rows=60)
    targets = task.train.targets.copy()
    targets[7] = 2
    task = dataclasses.replace(
        task, labels=(*task.labels, "rare"), train=dataclasses.replace(task.train, targets=targets)
    )
    folds = make_folds(task, 4, seed=0)
    assert all((fold.train.targets == 2).sum() == 1 for fold in folds.tasks)
    assert sum(map(len, folds.left_out)) == len(folds.rows) - 1
    assert folds.notes == ("1 row is in no fold, since no other text has the label: trained on, and not scored",)


def test_dev_rows_with_a_label_that_training_never_saw_are_in_no_fold(toy_task):
    task = toy_task(num_rows=60)
    targets = task.dev.targets.copy()
    targets[3] = 2
    task = dataclasses.replace(task, dev=dataclasses.replace(task.dev, targets=targets, unseen=("new",)))
    folds = make_folds(task, 4, seed=0)
    assert len(folds.rows) == len(task.train) + len(task.dev) - 1
    assert task.dev.texts[3] not in folds.rows.texts[len(task.train) :]
    assert "1 dev rows have a label that training never saw" in folds.notes[0]


def test_questions_about_one_context_are_left_out_together(toy_answers):
    task = toy_answers(num_rows=40)
    contexts = [f"{context[: context.index('prize')]}prize" for context in task.train.pairs]
    contexts[1::2] = contexts[::2]
    split = Split([f"what {row} ?" for row in range(40)], contexts, task.train.targets, task.train.lines)
    for fold in make_folds(dataclasses.replace(task, train=split), 4, seed=0).tasks:
        assert not set(fold.test.pairs) & {*fold.train.pairs, *fold.dev.pairs}


def test_more_folds_than_texts_are_refused(toy_task):
    task = toy_task(num_rows=6)
    with pytest.raises(BadConfig, match="30 folds of 9 different texts"):
        make_folds(task, 30, seed=0)
