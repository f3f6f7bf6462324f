"""Rows in memory: every form that people hold them in is the same task."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas
import pytest

from inlay.data import find_texts, load_task, make_task, read_split
from inlay.errors import BadData
from inlay.settings import DataConfig

TEXTS, LABELS = [f"a text {number}" for number in range(20)], ["no", "yes"] * 10
FRAME = pandas.DataFrame({"text": TEXTS, "label": LABELS})


class FakeDataset:
    """What `datasets.Dataset` is known by; the class numbers have names."""

    column_names = ("text", "label")
    features = {"text": None, "label": SimpleNamespace(names=["no", "yes"])}

    def __getitem__(self, name):
        return TEXTS if name == "text" else [0, 1] * 10


FORMS = {
    "frame": FRAME,
    "dicts": [{"text": text, "label": label} for text, label in zip(TEXTS, LABELS, strict=True)],
    "columns": {"text": TEXTS, "label": np.array(LABELS)},
    "X, y": (pandas.Series(TEXTS), LABELS),
    "arrays": (np.array(TEXTS, dtype=object), np.array(LABELS)),
    "to_pandas": SimpleNamespace(to_pandas=lambda: FRAME),
    "dataset": FakeDataset(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_task_is_the_same_in_whatever_form_its_rows_come(form):
    assert make_task(FORMS[form], "t").digest == make_task(FRAME, "t").digest
    assert read_split(FORMS[form], ("no", "yes"), "classify").texts == TEXTS


def test_sides_may_be_given_apart_in_any_form():
    parts = {"train": FRAME.head(12), "validation_matched": FRAME.tail(8)}
    task = make_task(parts, "t")
    assert (len(task.train), len(task.dev)) == (12, 8)
    same = load_task(DataConfig(), "t", {"train": FRAME.head(12), "dev": (TEXTS[12:], LABELS[12:])})
    assert same.digest == task.digest


def test_pairs_sets_and_words_are_read_from_lists():
    pairs = make_task(([(text, "second") for text in TEXTS], LABELS), "t")
    assert pairs.train.pairs == ["second"] * len(pairs.train)
    sets = make_task((TEXTS, [["a", "b"], []] * 10), "t")
    assert (sets.kind, sets.labels) == ("multilabel", ("a", "b"))
    tags = make_task(([text.split() for text in TEXTS], [["O", "B-X", "O"]] * 20), "t")
    assert tags.kind == "tag"
    assert list(find_texts(pandas.DataFrame({"one": ["a"], "two": ["b"]}))) == ["text", "pair"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((TEXTS, LABELS[:3]), "20 rows of texts, but 3 labels"),
        ({"text": TEXTS, "label": LABELS[:3]}, "different lengths: `text` 20, `label` 3"),
        (7, "a `int` cannot be read as rows"),
        ([], "has no rows"),
        ([1, 2], "a `list` cannot be read as rows"),
    ],
)
def test_what_is_no_rows_is_refused_with_its_reason(rows, message):
    with pytest.raises(BadData, match=message):
        make_task(rows, "t")
