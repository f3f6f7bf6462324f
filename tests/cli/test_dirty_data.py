"""Small, skewed and dirty files: training goes on, and says what it found."""

from __future__ import annotations

from pathlib import Path

from .conftest import SETTINGS, Inlay, Mail, write_mail


def test_train_goes_on_with_a_class_of_one_row(inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path) -> None:
    data = write_mail(tmp_path / "mail.csv")
    data.write_text(data.read_text() + "see the cat,pets\n")
    ended = inlay("train", data, "--backbone", tiny_bert_folder, *SETTINGS, "--json")
    assert ended.status == 0
    note = "1 label has training rows but no dev row, so nothing judges it: `pets` (1 row, line 82)"
    assert note in ended.data["notes"]
    assert note in ended.err
    assert ended.data["labels"] == ["ham", "pets", "spam"]


def test_train_counts_unseen_labels_of_given_rows_as_wrong(
    inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path
) -> None:
    data, given = write_mail(tmp_path / "mail.csv"), tmp_path / "given.csv"
    given.write_text("text,label\nfree prize,spam\nsee you home,eggs\nwin now,eggs\ncat dog,eggs\n")
    command = ("train", data, "--backbone", tiny_bert_folder, *SETTINGS, "--json", "--dev", given, "--test", given)
    ended = inlay(*command)
    assert ended.status == 0
    note = f"{given} has 1 label that training never saw, counted as wrong rows: `eggs` (3 rows, first on line 3)"
    assert ended.data["notes"].count(note) == 2
    assert ended.data["labels"] == ["ham", "spam"]
    for side in ("dev", "test"):
        assert ended.data["metrics"][side]["accuracy"] <= 0.25


def test_spellings_of_a_label_are_merged_for_training_and_evaluation(
    inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path
) -> None:
    data, given = write_mail(tmp_path / "mail.csv"), tmp_path / "given.csv"
    data.write_text(data.read_text() + "free prize,Spam\nwin now,spam.\n")
    given.write_text("text,label\nfree prize,SPAM\nsee you home,ham\n")
    command = ("train", data, "--backbone", tiny_bert_folder, *SETTINGS, "--json")
    apart = inlay(*command)
    assert apart.data["labels"] == ["Spam", "ham", "spam", "spam."]
    assert "`spam` (40, first on line 3) and `Spam` (1, first on line 82)" in apart.err
    assert "--set data.merge_labels=true" in apart.err
    assert inlay("evaluate", "mail", given, "--json").data["unseen"] == ["SPAM"]
    merged = inlay(*command, "--set", "data.merge_labels=true", "--name", "merged")
    assert merged.data["labels"] == ["ham", "spam"]
    assert any(note.startswith("labels read as one: `Spam` (1, first on line 82) as") for note in merged.data["notes"])
    assert inlay("evaluate", "merged", given, "--json").data["unseen"] == []


def test_evaluate_merges_spellings_when_asked(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_text("text,label\nfree,Spam\nhome,ham\n")
    ended = inlay("evaluate", "mail", "odd.csv", "--json")
    assert "`Spam` (1 row, first on line 2; training has `spam`" in ended.err
    assert inlay("evaluate", "mail", "odd.csv", "--merge-labels", "--json").data["unseen"] == []


def test_train_says_that_a_backbone_does_not_know_the_script(
    inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path
) -> None:
    data = tmp_path / "mail.csv"
    texts = ("бесплатный приз звони сейчас", "увидимся дома вечером")
    data.write_text("text,label\n" + "".join(f"{texts[n % 2]} {n},{'ab'[n % 2]}\n" for n in range(20)), encoding="utf8")
    ended = inlay("train", data, "--backbone", tiny_bert_folder, *SETTINGS, "--json")
    (note,) = (note for note in ended.data["notes"] if "unknown to" in note)
    assert "many letters are Cyrillic: use a multilingual backbone" in note
    assert note in ended.err


def test_train_names_labels_that_it_never_predicts_and_what_to_try(
    inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path
) -> None:
    data = write_mail(tmp_path / "mail.csv")
    rare = "".join(f"see the cat {n},pets\n" for n in range(4))
    data.write_text(data.read_text() + rare)
    command = ("train", data, "--backbone", tiny_bert_folder, *SETTINGS, "--dev-share", 0.25, "--lr", 1e-5)
    ended = inlay(*command, "--json")
    (note,) = (note for note in ended.data["notes"] if note.startswith("never predicted on dev: "))
    assert "`pets` (1 dev row, 3 in training)" in note
    assert "; try `--class-weights balanced`, more rows of " in note
    assert note in ended.err
    again = inlay(*command)
    assert note in again.err, "also of a run that was finished before"
    balanced = inlay(*command, "--class-weights", "balanced", "--lr", 1e-7, "--json")
    assert not any("--class-weights" in note for note in balanced.data["notes"])


def test_nothing_is_said_where_every_label_is_predicted(inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path) -> None:
    data = write_mail(tmp_path / "mail.csv")
    ended = inlay("train", data, "--backbone", tiny_bert_folder, *SETTINGS, "--epochs", 6, "--json")
    assert ended.data["metrics"]["dev"]["accuracy"] > 0.6
    assert not any("never predicted" in note for note in ended.data["notes"])
