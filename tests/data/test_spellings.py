"""Spellings of one label are named, and read as one only where that is asked for."""

import tomllib

import pandas as pd
import pytest

from inlay.data import load_task, make_task, read_split
from inlay.data.findings import spelling_key
from inlay.errors import BadConfig, BadData
from inlay.settings.run_config import DataConfig, RunConfig
from inlay.settings.trees import from_tree, write_toml

LABELS = ["true"] * 6 + ["false"] * 8 + ["True", "TRUE ", "false.", " False"]
ROWS = [f"text {n},{label}" for n, label in enumerate(LABELS)]


def write(tmp_path, name, rows):
    path = tmp_path / name
    path.write_text("\n".join(["text,label", *rows]) + "\n", encoding="utf8")
    return str(path)


def load(source, **settings):
    return load_task(DataConfig(source=source, **settings), "task")


def find_note(task, words):
    (note,) = (note for note in task.notes if words in note)
    return note


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("True", "true", True),
        ("not  spam", "Not spam", True),
        ("yes", "Yes.", True),
        ("yes", "yes !?", True),
        ("ﬁne", "fine", True),
        ("ｓｐａｍ", "spam", True),
        ("STRASSE", "straße", True),
        ("1", "1.0", True),
        ("1", "-1", False),
        ("?", "!", False),
        ("C", "C#", False),
        ("A", "A+", False),
        ("1.5", "1", False),
        ("spam", "not spam", False),
    ],
)
def test_a_key_is_what_spellings_have_in_common(one, other, is_same):
    assert (spelling_key(one) == spelling_key(other)) is is_same


def test_spellings_are_named_and_stay_apart(tmp_path):
    task = load(write(tmp_path, "a.csv", ROWS))
    assert task.labels == ("False", "TRUE", "True", "false", "false.", "true"), "blanks around a label never counted"
    assert find_note(task, "labels that differ") == (
        "labels that differ only in case, blanks or punctuation: "
        "`false` (8, first on line 8) and `False` (1, first on line 19) and `false.` (1, first on line 18); "
        "`true` (6, first on line 2) and `TRUE` (1, first on line 17) and `True` (1, first on line 16); "
        "read them as one with `--set data.merge_labels=true`"
    )
    plain = load(write(tmp_path, "b.csv", [row for row in ROWS if row.endswith((",true", ",false"))]))
    assert not any("labels that differ" in note for note in plain.notes)


def test_merged_labels_have_the_most_frequent_spelling(tmp_path):
    task = load(write(tmp_path, "a.csv", ROWS), merge_labels=True)
    clean = load(write(tmp_path, "b.csv", [f"text {n},{'true' if n < 6 or n in (14, 15) else 'false'}"
                                           for n in range(18)]))  # fmt: skip
    assert (task.labels, task.digest) == (("false", "true"), clean.digest)
    assert find_note(task, "read as one") == (
        "labels read as one: `True` (1, first on line 16) as `true`, `TRUE` (1, first on line 17) as `true`, "
        "`false.` (1, first on line 18) as `false`, `False` (1, first on line 19) as `false`"
    )


def test_merging_changes_nothing_where_every_label_has_one_spelling(tmp_path):
    path = write(tmp_path, "a.csv", [f"text {n},{'xy'[n % 2]}" for n in range(20)])
    assert load(path, merge_labels=True).digest == load(path).digest
    assert load(path, merge_labels=True).notes == load(path).notes


def test_given_labels_decide_how_merged_ones_are_spelled(tmp_path):
    task = load(write(tmp_path, "a.csv", ROWS), merge_labels=True, labels=("TRUE", "FALSE"))
    assert task.labels == ("TRUE", "FALSE")
    assert "`true` (6, first on line 2) as `TRUE`" in find_note(task, "read as one")
    with pytest.raises(BadData, match="unseen label `true`"):
        load(write(tmp_path, "a.csv", ROWS), labels=("TRUE", "FALSE"))


def test_given_rows_are_merged_with_the_spelling_of_training(tmp_path):
    path = write(tmp_path, "a.csv", [f"text {n},{'xy'[n % 2]}" for n in range(20)])
    dev = write(tmp_path, "d.csv", ["a,x", "b,X.", "c,y"])
    apart, merged = load(path, dev=dev), load(path, dev=dev, merge_labels=True)
    assert apart.dev.targets.tolist() == [0, 2, 1]
    assert "`X.` (1 row, first on line 3; training has `x`, see `data.merge_labels`)" in find_note(apart, "never saw")
    assert (merged.dev.targets.tolist(), merged.dev.unseen) == ([0, 0, 1], ())
    judged = read_split(dev, ("x", "y"), "classify", DataConfig(merge_labels=True))
    assert judged.targets.tolist() == [0, 0, 1]
    both = read_split(dev, ("X.", "x", "y"), "classify", DataConfig(merge_labels=True))
    assert both.targets.tolist() == [1, 0, 2], "labels that training told apart are not merged"


def test_labels_of_sets_are_merged(tmp_path):
    rows = [f"text {n},{cell}" for n, cell in enumerate(["a|b", "b", "a|B", "A|a", ""] * 4)]
    task = load(write(tmp_path, "a.csv", rows), kind="multilabel", merge_labels=True, dev_share=0.2)
    assert task.labels == ("a", "b")
    assert "separated by `|`: a (12), b (12)" in find_note(task, "kind:")
    apart = load(write(tmp_path, "a.csv", rows), kind="multilabel", dev_share=0.2)
    assert apart.labels == ("A", "B", "a", "b")
    assert "`a` (12, first on line 2) and `A` (4, first on line 5)" in find_note(apart, "labels that differ")


def test_both_halves_of_a_tag_are_spelled_alike(tmp_path):
    lines = "Ada B-PER\nLove I-per\n\nBob B-per\nRay I-PER\n\nSue B-PER\nin O\nOslo B-LOC\n\n" * 4
    path = tmp_path / "a.conll"
    path.write_text(lines)
    task = load(str(path), kind="tag", merge_labels=True, dev_share=0.3)
    assert task.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert "`per` (8, first on line" in find_note(task, "read as one")


def test_missing_labels_are_still_found_where_labels_are_merged():
    frame = pd.DataFrame({"text": ["a", "b", "c", "d"], "label": ["x", None, "X", "y"]})
    with pytest.raises(BadData, match="dataframe:2: missing label"):
        make_task(frame, "x", DataConfig(merge_labels=True))


def test_a_setting_that_is_true_or_false_takes_either_word_and_no_other():
    for given, wanted in {"true": True, "True": True, "false": False}.items():
        assert RunConfig().override([f"data.merge_labels={given}"]).data.merge_labels is wanted
    with pytest.raises(BadConfig, match=r"`data.merge_labels` is `1` \(hint: use true or false\)"):
        RunConfig().override(["data.merge_labels=1"])
    config = RunConfig(data=DataConfig(merge_labels=True))
    assert from_tree(RunConfig, tomllib.loads(write_toml(config))) == config
    plain = RunConfig()
    assert config.identify("digest", "backbone") == plain.identify("digest", "backbone"), "the rows' digest tells"
