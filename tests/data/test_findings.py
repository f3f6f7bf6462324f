"""What is odd about rows is said with lines, and only what cannot be used is refused."""

import pytest

from inlay.data import load_task
from inlay.settings.run_config import DataConfig

MAIL = [f"win prize number {n},spam" for n in range(10)] + [f"see you at {n},ham" for n in range(30)]


def write(tmp_path, name, rows, header="text,label"):
    path = tmp_path / name
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf8")
    return str(path)


def load(source, **settings):
    return load_task(DataConfig(source=source, **settings), "task")


def find_note(task, words):
    """The one note that has these words."""
    (note,) = (note for note in task.notes if words in note)
    return note


def names(split, task):
    return {task.labels[target] for target in split.targets}


@pytest.mark.parametrize("seed", range(5))
def test_a_class_of_one_row_stays_in_training_and_is_named(tmp_path, seed):
    path = write(tmp_path, "a.csv", [*MAIL, "lonely,eggs", "alone,fish"])
    task = load(path, split_seed=seed, dev_share=0.3, test_share=0.3)
    assert {"eggs", "fish"} <= names(task.train, task)
    assert (names(task.dev, task), names(task.test, task)) == ({"ham", "spam"}, {"ham", "spam"})
    assert len(task.train) + len(task.dev) + len(task.test) == 42
    assert find_note(task, "no dev row") == (
        "2 labels have training rows but no dev row, so nothing judges them: "
        "`eggs` (1 row, line 42), `fish` (1 row, line 43)"
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_single_row_whose_text_another_class_has_too_is_trained_on(tmp_path, seed):
    rows = [*MAIL, "See you at 3,eggs", "win prize number 2,fish"]
    task = load(write(tmp_path, "a.csv", rows), split_seed=seed, dev_share=0.4)
    assert {"eggs", "fish"} <= names(task.train, task)
    assert len(task.dev) == 17, "as many as were asked for: 0.4 of 42"


def test_a_class_of_one_repeated_text_stays_in_training(tmp_path):
    task = load(write(tmp_path, "a.csv", [*MAIL, "same,eggs", "Same,eggs", "same ,eggs"]), dev_share=0.5)
    assert [task.labels[target] for target in task.train.targets].count("eggs") == 3
    assert find_note(task, "no dev row").endswith("it: `eggs` (3 rows of one text, first on line 42)")


def test_a_class_of_two_rows_has_one_in_dev_at_most(tmp_path):
    rows = [f"text {n},{'abcdefghij'[n // 2]}" for n in range(20)]
    task = load(write(tmp_path, "a.csv", rows), dev_share=0.4)
    assert names(task.train, task) == set("abcdefghij")
    assert len(task.dev) == 8
    unjudged = sorted(set("abcdefghij") - names(task.dev, task))
    assert [word for word in find_note(task, "no dev row").split("`") if len(word) == 1] == unjudged
    assert "(2 rows, first on line" in find_note(task, "no dev row")


def test_nothing_is_said_where_every_label_is_judged(tmp_path):
    task = load(write(tmp_path, "a.csv", MAIL))
    assert not any("no dev row" in note for note in task.notes)
    given = load(write(tmp_path, "b.csv", [*MAIL, "lonely,eggs"]), dev=write(tmp_path, "d.csv", ["new,ham"]))
    assert not any("no dev row" in note for note in given.notes), "whoever gives dev rows chose them"


def test_a_label_of_one_row_is_named_where_rows_have_several(tmp_path):
    rows = [f"text {n},{'a;b' if n % 2 else 'b'}" for n in range(20)] + ["rare,b;c"]
    task = load(write(tmp_path, "a.csv", rows), kind="multilabel", dev_share=0.2)
    assert find_note(task, "no dev row").endswith("it: `c` (1 row, line 22)")
