"""Rows that may be labelled wrongly: listed by `baseline` and `train --folds`, and a word of them by `train`."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from .conftest import HAM, SPAM, Inlay, write_mail

WRONG = (12, 33, 78, 101)  # lines


@pytest.fixture
def given(tiny_bert_folder: Path, tmp_path: Path) -> tuple[object, ...]:
    """Long mail that is easily told apart, of which four rows have the other label."""
    generator, lines = random.Random(0), ["text,label"]
    for line in range(2, 162):
        is_spam = line % 2 == 1
        label = "spam" if is_spam != (line in WRONG) else "ham"
        lines.append(f"{' '.join(generator.choices(SPAM if is_spam else HAM, k=14))},{label}")
    data = tmp_path / "mail.csv"
    data.write_text("\n".join(lines) + "\n")
    return (data, "--backbone", tiny_bert_folder)


TRAINED = ("--method", "head", "--max-length", 24)


def test_baseline_lists_rows_with_the_likely_label(inlay: Inlay, given: tuple[object, ...]) -> None:
    found = inlay("baseline", *given, "--json").data["probe"]["label_errors"]
    listed = {error["line"]: error for error in found["errors"]}
    assert len(set(WRONG) & set(listed)) >= 3
    assert len(listed) <= 6
    for line in set(WRONG) & set(listed):
        assert {listed[line]["given"], listed[line]["likely"]} == {"ham", "spam"}
        assert (listed[line]["likely"] == "spam") == (line % 2 == 1)
    shown = inlay("baseline", *given).out
    assert f"{len(listed)} of 160 rows may be labelled wrongly: a linear model fitted to other rows" in shown
    for line in listed:
        assert any(row.split()[:1] == [str(line)] for row in shown.splitlines())


def test_baseline_says_when_nothing_can_be_told(inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path) -> None:
    data = write_mail(tmp_path / "few.csv", num_rows=40)
    shown = inlay("baseline", data, "--backbone", tiny_bert_folder).out
    assert "wrong labels: not checked: 40 rows are too few" in shown


def test_train_says_that_there_are_some_and_where_they_are_listed(inlay: Inlay, given: tuple[object, ...]) -> None:
    ended = inlay("train", *given, *TRAINED, "--label", "label", "--json")
    (note,) = (note for note in ended.data["notes"] if "labelled wrongly" in note)
    command = note.partition("`")[2].partition("`")[0]
    assert command == f"inlay baseline {given[0]} --backbone {given[2]} --label label"
    assert "may be labelled wrongly" in inlay(*command.split()[1:]).out
    named = note.partition("on lines ")[2].partition(":")[0].split(", ")
    assert {int(line) for line in named} <= set(WRONG)


def test_folds_list_them_and_keep_them_in_the_folder_of_the_run(inlay: Inlay, given: tuple[object, ...]) -> None:
    command = ("train", *given, *TRAINED, "--folds", 4)
    ended = inlay(*command)
    assert (
        "of 160 rows may be labelled wrongly: the fold that left the row out confidently gives another label"
        in ended.out
    )
    assert "labelled wrongly" not in ended.err, "said once"
    report = inlay(*command, "--json").data
    errors = report["label_errors"]["errors"]
    assert {error["line"] for error in errors[:3]} <= set(WRONG)
    with (Path(report["folder"]) / "label_errors.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["line"]) for row in rows] == [error["line"] for error in errors]
    assert rows[0]["given"] == errors[0]["given"]
    assert rows[0]["text"] == errors[0]["text"]
