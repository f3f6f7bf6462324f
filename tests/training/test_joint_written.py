"""Runs of several tasks on a backbone that writes: what each task writes is its own, and what cannot be is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from inlay.errors import BadConfig
from inlay.settings.run_config import MethodConfig, RunConfig
from inlay.training.cohort.cohort import Cohort
from inlay.training.run.joint import make_joint_run
from inlay.training.run.make_run import make_run
from joint_runs import QUIET, SETTINGS

CONFIG = RunConfig(method=MethodConfig("hyperformer++", 4)).override(
    [f"train.{key}={value}" for key, value in QUIET.items()]
)


@pytest.fixture
def t5(backbone_of):
    return backbone_of("t5")


def with_targets(task, targets):
    """The same texts with other targets, one after another."""
    sides = {
        side: dataclasses.replace(rows, targets=np.resize(np.array(targets), len(rows.texts)))
        for side, rows in (("train", task.train), ("dev", task.dev))
    }
    return dataclasses.replace(task, **sides)


def test_how_free_texts_are_written_is_of_the_tasks_that_write_them(t5, toy_task, toy_texts):
    tasks = [toy_task("two"), toy_texts("texts")]
    run = make_joint_run(tasks, CONFIG.override(["train.beams=3", "train.max_answer=7"]), t5)
    two, texts = (part.spec.head for part in run.parts)
    assert (texts.beams, texts.max_answer) == (3, 7)
    assert (two.beams, two.max_answer) == (type(two).beams, type(two).max_answer)
    assert (run.config.train.beams, run.config.train.max_answer) == (3, 7)
    with pytest.raises(BadConfig, match=r"`train\.beams` is set for the `classify` task `two`"):
        make_joint_run(tasks[:1], CONFIG.override(["train.beams=3"]), t5)


def test_answers_that_are_cut_or_cannot_be_written_are_counted(t5, toy_texts):
    odd = with_targets(toy_texts("texts"), np.array(["good " * 9, "bad", "☃ plot", "good"], dtype=object))
    cohort = Cohort([make_joint_run([odd], CONFIG.override(["train.max_answer=5"]), t5)], t5, SETTINGS)
    (part,) = cohort.members[0].parts
    assert part.num_cut_answers == len(odd.train.texts) // 4
    assert part.num_unwritable == len(odd.train.texts) // 4
    (plain,) = Cohort([make_joint_run([toy_texts("plain")], CONFIG, t5)], t5, SETTINGS).members[0].parts
    assert (plain.num_cut_answers, plain.num_unwritable) == (0, 0)


@pytest.mark.parametrize("labels", [("☃", "☂"), ("good movie", "good  movie")])
def test_labels_of_the_same_tokens_are_refused_and_other_answers_help(t5, toy_task, labels):
    task = dataclasses.replace(toy_task("smile"), labels=labels)
    for make in (lambda task: make_joint_run([task], CONFIG, t5), lambda task: make_run(task, RunConfig(), t5)):
        with pytest.raises(BadConfig, match=f"`{labels[0]}` and `{labels[1]}` are the same tokens") as caught:
            make(task)
        assert "data.answers" in caught.value.hint
        assert make(dataclasses.replace(task, answers=("good", "bad")))


@pytest.mark.parametrize(
    ("targets", "first", "last", "number"),
    [((0.0, 5.0), "0.0", "5.0", 26), ((0.0, 1.0), "0.00", "1.00", 51), ((0.0002, 0.0893), "0.000", "0.090", 46)],
)
def test_numbers_are_written_in_steps_that_suit_their_span(t5, toy_task, targets, first, last, number):
    """Of 0.2, as published for STS-B, where that leaves more than a few."""
    run = make_run(with_targets(toy_task("number", kind="regress"), targets), RunConfig(), t5)
    texts = run.spec.head.texts
    assert (texts[0], texts[-1], len(texts)) == (first, last, number)
    steps = np.diff([float(text) for text in texts])
    assert steps == pytest.approx(np.full(number - 1, steps[0]))


def test_too_many_numbers_are_refused_by_the_tasks_name(t5, toy_task):
    with pytest.raises(BadConfig, match=r"task `number`: targets from 0 to 1000 are 5,001 texts in steps of 0\.2"):
        make_run(with_targets(toy_task("number", kind="regress"), (0.0, 1000.0)), RunConfig(), t5)


def test_one_prompt_for_tasks_that_only_prompts_tell_apart_is_refused(t5, toy_task):
    config = dataclasses.replace(CONFIG, method=MethodConfig("full-multi")).override(["train.prompt=say"])
    with pytest.raises(BadConfig, match=r"`train\.prompt` is `say` for all tasks of `full-multi`"):
        make_joint_run([toy_task("two"), toy_task("five", num_labels=5)], config, t5)
    assert make_joint_run([toy_task("two")], config, t5).parts[0].spec.head.prompt == "say"
