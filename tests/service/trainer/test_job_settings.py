"""A customer's settings are a list of what is allowed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from inlay.errors import BadConfig
from inlay.model import METHODS
from inlay.service.trainer.job_settings import (
    BATCH_SETTINGS,
    METHODS_OFFERED,
    TRAIN_SETTINGS,
    check_settings,
    make_tree,
)
from inlay.settings import RunConfig, from_tree

GOOD = {
    "kind": "classify",
    "text": "mail",
    "pair": "reply",
    "label": "topic",
    "labels": ["a", "b"],
    "metric": "macro_f1",
    "merge_labels": True,
    "bad_rows": "skip",
    "dev_share": 0.2,
    "test_share": 0,
    "method": "lora",
    "size": 8,
    "epochs": 3,
    "lr": 1e-3,
    "seed": 1,
    "class_weights": "balanced",
    "max_length": 64,
    "thresholds": "dev",
    "from": "mail@2",
    "corrections": False,
}


def test_methods_that_train_a_copy_of_the_backbone_are_not_offered():
    assert set(METHODS_OFFERED) == {
        name for name, method in METHODS.items() if not method.is_finetuned and not method.is_joint
    }


def test_every_setting_that_is_allowed_becomes_one_of_a_run():
    assert GOOD.keys() == TRAIN_SETTINGS.keys()
    config = from_tree(RunConfig, make_tree(GOOD, None, TRAIN_SETTINGS))
    assert (config.data.text, config.data.pair, config.data.label, config.data.kind) == (
        "mail",
        "reply",
        "topic",
        "classify",
    )
    assert (config.data.labels, config.data.metric, config.data.merge_labels) == (("a", "b"), "macro_f1", True)
    assert (config.data.on_bad_row, config.data.dev_share, config.data.test_share) == ("skip", 0.2, 0.0)
    assert (config.method.name, config.method.size) == ("lora", 8)
    assert (config.train.epochs, config.train.lr, config.train.seed, config.train.max_length) == (3, 1e-3, 1, 64)
    assert (config.train.class_weights, config.train.thresholds, config.train.start) == ("balanced", "dev", ())


def test_what_is_left_open_is_the_recipes():
    config = from_tree(RunConfig, make_tree({"lr": None, "epochs": None}, None, TRAIN_SETTINGS))
    assert config == RunConfig()


@pytest.mark.parametrize(
    "name",
    [
        *("backbone", "source", "data", "data.source", "train", "start", "root", "dev", "test", "split", "encoding"),
        *("keep", "batch_size", "batchsize", "joint", "task", "answers", "device", "probes", "__class__", ""),
    ],
)
def test_everything_else_is_refused_with_a_hint(name):
    with pytest.raises(BadConfig) as refused:
        check_settings({name: "x"})
    assert refused.value.hint


def test_a_misspelt_setting_is_told_the_right_one():
    with pytest.raises(BadConfig, match=r"`settings.lerning_rate`") as refused:
        check_settings({"lerning_rate": 1})
    assert "lr" in str(refused.value.hint)
    with pytest.raises(BadConfig) as refused:
        check_settings({"epoch": 1})
    assert refused.value.hint == "did you mean `epochs`?"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lr", value) for value in (0, -1, 2, True, "0.1", float("nan"), float("inf"), [0.1])),
        *(("epochs", value) for value in (0, 201, 2.0, True, "3")),
        *(("size", value) for value in (0, 1025, -8, 64.0)),
        *(("max_length", value) for value in (3, 513, 10**9)),
        *(("seed", value) for value in (-1, 2**31, 0.5)),
        *(("dev_share", value) for value in (0, 0.009, 0.51, 1, "0.1")),
        *(("test_share", value) for value in (-0.1, 0.6)),
        *(("method", value) for value in ("full", "top", "hyperformer", "../x", 1, ["lora"])),
        *(("kind", value) for value in ("classification", 1)),
        *(("labels", value) for value in ("ab", ["a"], ["a", 1], ["a", ""], [str(n) for n in range(10_001)])),
        *(("text", value) for value in ("", " ", "x" * 501, 1, ["text"])),
        *(("class_weights", value) for value in ("some", True)),
        *(("bad_rows", value) for value in ("drop", False)),
        *(("merge_labels", value) for value in ("yes", 1)),
    ],
)
def test_values_outside_their_limits_are_refused(name, value):
    with pytest.raises(BadConfig, match=f"`settings.{name}`") as refused:
        check_settings({name: value})
    assert str(refused.value.hint).startswith("it must be ")


def test_a_long_value_is_not_repeated_whole():
    with pytest.raises(BadConfig) as refused:
        check_settings({"kind": "x" * 10_000})
    assert len(refused.value.message) < 200


def test_the_datasets_reading_holds_where_no_column_is_named():
    reading = {"text": "body", "pair": None, "label": "tag", "kind": "classify", "labels": [{"label": "a", "count": 3}]}
    assert make_tree({"lr": 0.1}, reading, TRAIN_SETTINGS)["data"] == {
        "text": "body",
        "label": "tag",
        "kind": "classify",
    }
    assert make_tree({"label": "other"}, reading, TRAIN_SETTINGS)["data"] == {"label": "other"}
    assert make_tree({}, reading, BATCH_SETTINGS)["data"] == {"text": "body"}


def test_a_batch_has_settings_of_its_own():
    check_settings({"version": 3, "text": "a", "pair": "b", "min_confidence": 0.5}, BATCH_SETTINGS)
    for wrong in ({"lr": 0.1}, {"version": 0}, {"min_confidence": 1.5}, {"label": "x"}):
        with pytest.raises(BadConfig):
            check_settings(wrong, BATCH_SETTINGS)


def test_checking_needs_neither_torch_nor_numpy():
    program = (
        "import sys; from inlay.service.trainer import check_settings\n"
        "check_settings({'lr': 0.1})\n"
        "assert not {'torch', 'numpy', 'pandas', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
