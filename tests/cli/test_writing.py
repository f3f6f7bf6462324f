"""Tasks on a text-to-text backbone from the command line: free texts, labels, plans, refusals."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from .conftest import SETTINGS, Inlay, write_mail

WORDS = {"ham": "see you home", "spam": "win a prize"}


def write_replies(path: Path) -> Path:
    """Mail whose answer is a short text."""
    rows = list(csv.DictReader(write_mail(path).read_text().splitlines()))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "target"])
        writer.writerows([row["text"], WORDS[row["label"]]] for row in rows)
    return path


def test_a_text_task_is_trained_asked_judged_and_proved(
    inlay: Inlay, backbone_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    data, backbone = write_replies(tmp_path / "reply.csv"), backbone_folder("mt5")
    wishes = ("--kind", "text", "--set", "train.beams=2", "--set", "train.max_answer=6")
    ended = inlay("train", data, "--backbone", backbone, *wishes, *SETTINGS, "--epochs", 6)
    assert ended.status == 0, ended.err
    assert ended.out.startswith("dev  exact_match ")
    (line,) = inlay("predict", "reply", "win win prize call now", "--json").lines
    assert isinstance(line["answer"], str)
    assert "probability" not in line
    report = inlay("evaluate", "reply", data, "--json").data
    assert set(report["metrics"]) == {"exact_match", "token_f1"}
    mistakes = tmp_path / "wrong.csv"
    assert inlay("evaluate", "reply", data, "--errors", mistakes).status == 0
    wrong = list(csv.DictReader(mistakes.read_text().splitlines()))
    assert all(row["label"] in WORDS.values() and row["predicted"] != row["label"] for row in wrong)
    assert inlay("verify", "reply").status == 0
    assert "it writes its answer" in inlay("show", "reply").out
    inlay("export", "reply", tmp_path / "reply.inlay")
    came = inlay("import", tmp_path / "reply.inlay", "--store", tmp_path / "other", "--backbone", backbone)
    assert came.status == 0, came.err
    (again,) = inlay("predict", "reply", "win win prize call now", "--json", "--store", tmp_path / "other").lines
    assert again["answer"] == line["answer"]


def test_labels_are_scored_and_what_cannot_leave_is_refused_with_a_hint(
    inlay: Inlay, backbone_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    data, backbone = write_mail(tmp_path / "mail.csv"), backbone_folder("t5")
    ended = inlay("train", data, "--backbone", backbone, "--method", "mahabadi", *SETTINGS)
    assert ended.status == 0, ended.err
    (line,) = inlay("predict", "mail", "free prize", "--json").lines
    assert line["label"] in ("ham", "spam")
    assert sum(line["probabilities"].values()) > 0.999
    assert inlay("predict", "mail", "free prize", "--precision", "int8").status == 0
    inlay("export", "mail", tmp_path / "mail.inlay")
    assert inlay("import", tmp_path / "mail.inlay", "--name", "again").status == 0
    for how in (("--format", "peft"), ("--format", "adapterhub"), ("--format", "onnx")):
        refused = inlay("export", "mail", *how, "--output", tmp_path / "out")
        assert refused.status != 0
        assert refused.err.startswith("error: ") or "\nerror: " in refused.err, how
        assert "Traceback" not in refused.err


def test_a_text_task_needs_a_backbone_that_writes(inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path) -> None:
    data = write_replies(tmp_path / "reply.csv")
    ended = inlay("train", data, "--backbone", tiny_bert_folder, "--kind", "text", *SETTINGS)
    assert ended.status != 0
    assert "writes no texts" in ended.err


def test_a_plan_for_a_backbone_that_writes_counts_no_head(
    inlay: Inlay, backbone_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    data = write_mail(tmp_path / "mail.csv")
    ended = inlay("plan", data, "--backbone", backbone_folder("t5"), *SETTINGS, "--json")
    assert ended.status == 0, ended.err
    assert "head" not in ended.data["parameters_by_part"]
