"""`explain`, `pick`, `drift` and `learn-curve` on the command line."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import inlay as inlay_library
from inlay.errors import InlayError

from .conftest import HAM, SPAM, Inlay, Mail, write_mail


def test_explain_shows_words_checks_and_the_nearest_rows_and_writes_a_page(
    inlay: Inlay, mail: Mail, tmp_path: Path
) -> None:
    page = tmp_path / "why.html"
    ended = inlay("explain", "mail", "free prize to the cat who can call me now", "--html", page)
    assert ended.status == 0, ended.err
    assert "free prize to the cat who can call me now" in ended.out
    assert "without its top 2 words it falls by" in ended.out
    assert "training row" in ended.out
    assert page.read_text().count("<span") == 10
    by = inlay("explain", "mail", "free prize", "--by", "gradients", "--label", "ham", "--nearest", 0, "--json").data
    assert (by["by"], by["label"], by["nearest"]) == ("gradients", "ham", [])
    assert by["completeness"]["holds"]
    assert [word["text"] for word in by["words"]] == ["free", "prize"]


def test_explain_goes_on_without_training_rows_and_drift_does_not(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    moved = mail.data.with_name("moved.csv")
    mail.data.rename(moved)
    try:
        ended = inlay("explain", "mail", "free prize", "--json")
        assert ended.status == 0
        assert ended.data["nearest"] == []
        assert "no nearest training rows" in ended.data["notes"][-1]
        refused = inlay("drift", "mail", moved)
        assert refused.status == 9
        assert "name the file that has them now with `--data FILE`" in refused.err
        found = inlay("drift", "mail", moved, "--data", moved, "--json")
        assert found.status == 0, found.err
        wrong = inlay("drift", "mail", moved, "--data", write_mail(tmp_path / "other.csv", seed=9))
        assert wrong.status == 4
        assert "does not have the rows that `mail@1` was trained on" in wrong.err
    finally:
        moved.rename(mail.data)


def test_drift_ends_with_its_verdict(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    alike = inlay("drift", "mail", write_mail(tmp_path / "same.csv", 60, seed=3))
    assert alike.status == 0, alike.err
    assert "the new rows look like those `mail@1` was trained on" in alike.out
    other = tmp_path / "other.csv"
    other.write_text("text\n" + "".join(f"ten green dogs and {row} red mats why !\n" for row in range(40)))
    differs = inlay("drift", "mail", other)
    assert differs.status == 21, differs.out
    assert "clearly different" in differs.out
    assert "most unlike any training row" in differs.out


def test_pick_writes_rows_that_no_spreadsheet_runs(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    pool, picked = tmp_path / "pool.csv", tmp_path / "picked.csv"
    with pool.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "answer"])
        for row in range(30):
            writer.writerow([f"={HAM[row % 7]} {SPAM[row % 6]} {HAM[row % 5]} {row}", "mine"])
    ended = inlay("pick", pool, "--task", "mail", "--count", 5, "-o", picked)
    assert ended.status == 0, ended.err
    with picked.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    assert all(row["text"].startswith("'=") for row in rows)
    assert rows[0].keys() == {"text", "answer", "predicted_answer", "doubt", "distance"}
    assert inlay("pick", pool, "--task", "mail", "--by", "guess").status == 3


def test_files_with_another_name_and_without_a_header_are_read_as_they_are_said_to_be(
    inlay: Inlay, mail: Mail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows, as a table of tabs under the name of something else."""
    pool, moved = tmp_path / "pool.data", tmp_path / "moved.data"
    pool.write_text("".join(f"{HAM[row % 7]} {SPAM[row % 6]} {row}\tx\n" for row in range(30)))
    lines = [line.rpartition(",") for line in mail.data.read_text().splitlines()]
    moved.write_text("".join(f"{text}\t{label}\n" for text, _, label in lines))
    table = ("--format", "tsv", "--no-header")
    # 1. rows that a task looks at
    assert "--format" in inlay("pick", pool, "--task", "mail").err
    picked = inlay("pick", pool, "--task", "mail", "--count", 5, *table, "--text", 1, "--json")
    assert [row["line"] <= 30 for row in picked.data["rows"]] == [True] * 5
    drifted = inlay("drift", "mail", pool, *table, "--text", 1, "--json")
    assert drifted.data["num_new"] == 30, drifted.err
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(pool.read_bytes()), isatty=lambda: False))
    piped = inlay("pick", "-", "--task", "mail", "--count", 5, *table, "--text", 1, "--json")
    assert piped.data["rows"] == picked.data["rows"], piped.err
    # 2. the rows it was trained on, at another place
    assert "--format" in inlay("report", "mail", "--data", moved, "--json").err
    assert inlay("report", "mail", "--data", moved, "--format", "tsv", "--json").status == 0
    near = inlay("explain", "mail", "free win", "--data", moved, "--format", "tsv", "--json")
    assert len(near.data["nearest"]) == 3, near.err
    lone = inlay("report", "mail", "--format", "tsv")
    assert "without `--data`" in lone.err
    # 3. the same in Python
    rows = inlay_library.pick("mail", pool, count=5, format="tsv", header=False, text="1", progress=False).rows
    assert [row.line for row in rows] == [row["line"] for row in picked.data["rows"]]
    assert inlay_library.report("mail", data=moved, format="tsv", progress=False).main_scores.side == "test"
    with pytest.raises(InlayError, match="JSON"):
        inlay_library.drift("mail", pool, format="jsonl", progress=False)


@pytest.fixture
def curve(inlay: Inlay, mail: Mail) -> Any:
    settings = ("--backbone", mail.backbone, "--size", 4, "--epochs", 1, "--lr", "1e-2", "--max-length", 16)
    return ("learn-curve", mail.data, *settings, "--sizes", 4, "--draws", 2)


def test_learn_curve_trains_shares_as_one_cohort_once_and_draws_them(
    inlay: Inlay, mail: Mail, curve: Any, tmp_path: Path
) -> None:
    drawn = tmp_path / "curve.svg"
    ended = inlay(*curve, "--picture", drawn, "--json")
    assert ended.status == 0, ended.err
    assert len(ended.data["points"]) == 8
    assert ended.data["verdict"] in ("helps", "may help", "hardly", "nothing")
    assert drawn.read_text().startswith("<?xml")
    assert len(list((mail.store / "runs" / "cohorts").iterdir())) == 2, "mail's own cohort, and one for all shares"
    again = inlay(*curve)
    assert "all 8 runs were finished before" in again.err
    assert ended.data["sentence"] in again.out
    assert len(inlay("tasks", "--json").data["tasks"]) == 1, "nothing was published"


def test_learn_curve_refuses_before_any_work(inlay: Inlay, curve: Any, tmp_path: Path) -> None:
    assert "does not end in .svg or .png" in inlay(*curve, "--picture", tmp_path / "curve.gif").err
    few = inlay("learn-curve", write_mail(tmp_path / "few.csv", 30), *curve[2:])
    assert few.status == 4
    assert "are too few for a learning curve" in few.err
    assert "loading" not in few.err
