"""Columns recognised by name, kinds inferred, cells read or refused with a reason."""

import time

import numpy as np
import pytest

from inlay.data.columns import Columns, Fault, Header, find_columns, read_text
from inlay.data.kinds import Scheme, find_scheme, infer_kind
from inlay.errors import BadConfig, BadData
from inlay.settings.run_config import DataConfig


def find(*names, labelled=True, **settings):
    return find_columns(Header("f.csv", names, 1), DataConfig(**settings), labelled=labelled)


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        (("text", "label"), Columns("text", None, "label")),
        (("v1", "v2"), Columns("v2", None, "v1")),
        (("Sentence1", "Sentence2", "Label"), Columns("Sentence1", "Sentence2", "Label")),
        (("idx", "premise", "hypothesis", "gold_label"), Columns("premise", "hypothesis", "gold_label")),
        (("index", "question", "sentence", "label"), Columns("question", "sentence", "label")),
        (("question", "label"), Columns("question", None, "label")),
        (("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"), Columns("#1 String", "#2 String", "Quality")),
        (("id", "text", "message", "score", "label"), Columns("text", None, "label")),
        (("text", "label", "split"), Columns("text", None, "label", "split")),
        (("tweet", "existence"), Columns("tweet", None, "existence")),
        (("utterance", "label"), Columns("utterance", None, "label")),
    ],
)
def test_columns_are_recognised_by_name(names, columns):
    assert find(*names) == columns


def test_named_columns_win_and_leave_the_others_to_recognition():
    assert find("text", "message", "label", label="message") == Columns("text", None, "message")
    assert find("premise", "hypothesis", "label", text="hypothesis") == Columns("hypothesis", None, "label")
    assert find("a", "b", "c", text="a", pair="c", label="b") == Columns("a", "c", "b")
    assert find("text", "extra", "label", pair="extra") == Columns("text", "extra", "label")
    assert find("text", "label", "part", split="part") == Columns("text", None, "label", "part")


def test_rows_to_predict_need_no_label():
    assert find("id", "body", labelled=False) == Columns("body")
    assert find("whatever", labelled=False) == Columns("whatever")
    assert find("utterance", "label", labelled=False) == Columns("utterance", None, "label")


def test_missing_column_is_refused_with_the_columns_there_are():
    with pytest.raises(BadData, match=r"f\.csv:1: no column named `txt` \(hint: columns there are: `text`, `label`"):
        find("text", "label", text="txt")
    with pytest.raises(
        BadData, match=r"f\.csv:1: no label column recognised.*`text`, `id`, `n`; name it with `--label`"
    ):
        find("text", "id", "n")
    with pytest.raises(BadData, match="no column named `0000012`"):
        find("text", "label", text="0000012")
    with pytest.raises(BadData, match=r"no text column recognised.*`a`, `b`, `label`.*not a header, use `--no-header`"):
        find("a", "b", "label")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["ham", "spam"], "classify"),
        (["0", "1", "1"], "classify"),
        ([0.0, 1.0], "classify"),
        ([True, False], "classify"),
        (["3.8", "5.000"], "regress"),
        ([str(number) for number in range(21)], "regress"),
        ([str(number) for number in range(20)], "classify"),
        ([str(number / 2) for number in range(30)] + ["oops"], "regress"),
        (["1", "2", "3"] * 20 + ["unknown"], "classify"),
        ([["a"], ["b", "c"]], "multilabel"),
        ([np.array(["a"]), []], "multilabel"),
        (["a|b", "c"], "classify"),
        (["nan", "inf"], "classify"),
    ],
)
def test_kind_is_inferred(values, kind):
    assert infer_kind(values) == kind


def test_labels_are_sorted_by_number_or_letter_unless_given():
    assert find_scheme(["10", "9", "2", "", None], DataConfig()).labels == ("2", "9", "10")
    assert find_scheme(["b", "a", "10"], DataConfig()).labels == ("10", "a", "b")
    assert find_scheme([1.0, 0.0], DataConfig()).labels == ("0", "1")
    assert find_scheme(["b", "a"], DataConfig(labels=("b", "a"))).labels == ("b", "a")
    assert find_scheme(["0.5", "1.5"], DataConfig(labels=("0.5", "1.5"))).kind == "classify"
    with pytest.raises(BadConfig, match="regress"):
        find_scheme(["0.5"], DataConfig(kind="regress", labels=("a",)))


def test_labels_of_one_cell_are_separated():
    scheme = find_scheme(["a|b", "c", "b|c "], DataConfig(kind="multilabel"))
    assert scheme == Scheme("multilabel", ("a", "b", "c"), "|")
    assert scheme.read("c|a").tolist() == [1, 0, 1]
    assert scheme.read("").tolist() == [0, 0, 0]
    assert scheme.read(["b"]).tolist() == [0, 1, 0]
    assert find_scheme(["x, y", "z"], DataConfig(kind="multilabel")).labels == ("x", "y", "z")
    assert find_scheme(["x, y|z"], DataConfig(kind="multilabel")).labels == ("x, y", "z")


def test_known_label_is_not_torn_at_a_separator():
    assert Scheme("multilabel", ("oil, gas", "x"), ",").read("oil, gas").tolist() == [1, 0]


def test_same_label_has_one_name_in_every_format():
    scheme = Scheme("classify", ("0", "1"))
    assert [scheme.read(value) for value in ("1", " 1 ", 1, 1.0)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("scheme", "value", "reason", "hint"),
    [
        (Scheme("classify", ("a", "b")), "c", "unseen label `c`", "known labels: a, b"),
        (Scheme("classify", ("a", "b")), "", "missing label", "fill it in"),
        (Scheme("classify", ("a", "b")), None, "missing label", "fill it in"),
        (Scheme("classify", ("a", "b")), float("nan"), "missing label", "fill it in"),
        (Scheme("classify", ("a", "b")), ["a"], "the label is a list", "--kind multilabel"),
        (Scheme("multilabel", ("a", "b")), ["a", "z"], "unseen label `z`", "known labels: a, b"),
        (Scheme("multilabel", ("a", "b")), None, "missing label", "empty list"),
        (Scheme("regress", ()), "many", "non-numeric target `many`", "a number"),
        (Scheme("regress", ()), "inf", "non-numeric target `inf`", "a number"),
        (Scheme("regress", ()), "1_000", "non-numeric target `1_000`", "a number"),
        (Scheme("regress", ()), " ", "missing label", "fill it in"),
    ],
)
def test_bad_label_says_why(scheme, value, reason, hint):
    with pytest.raises(Fault) as caught:
        scheme.read(value)
    assert caught.value.reason == reason
    assert hint in caught.value.hint


def test_targets_have_the_type_of_their_kind():
    assert Scheme("classify", ("a", "b")).collect([1, 0]).dtype == np.int64
    rows = [Scheme("multilabel", ("a", "b")).read(["a"])]
    assert Scheme("multilabel", ("a", "b")).collect(rows).dtype == np.float32
    assert Scheme("multilabel", ("a", "b")).collect([]).shape == (0, 2)
    assert Scheme("regress", ()).collect([0.5]).dtype == np.float64


def test_text_is_kept_as_it_is():
    assert read_text("  kept as is \n", "text") == "  kept as is \n"
    assert read_text(7, "text") == "7"
    assert read_text("naïve 😀", "text") == "naïve 😀"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "empty text"),
        (" \t", "empty text"),
        (None, "empty text"),
        (float("nan"), "empty text"),
        ({"a": 1}, "holds a dict, not a text"),
        ("half \ud83d", "lone surrogate"),
    ],
)
def test_bad_text_says_why(value, reason):
    with pytest.raises(Fault, match=reason):
        read_text(value, "text")


def test_a_number_too_large_for_a_float_is_a_label_and_no_number():
    cells = [10**400, -(10**400), 1, "2"]
    assert infer_kind(cells) == "classify"
    assert str(10**400) in find_scheme(cells, DataConfig()).labels
    with pytest.raises(Fault, match="non-numeric target"):
        Scheme("regress", ()).read(10**400)


def test_a_label_is_found_at_once_among_a_hundred_thousand():
    names = tuple(f"label {number}" for number in range(100_000))
    scheme = Scheme("classify", names)
    began = time.perf_counter()
    assert [scheme.index(name) for name in names] == list(range(len(names)))
    assert time.perf_counter() - began < 5
