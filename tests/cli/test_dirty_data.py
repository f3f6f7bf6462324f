"""Small, skewed and dirty files: training goes on, and says what it found."""

from __future__ import annotations

from pathlib import Path

from .conftest import SETTINGS, Inlay, write_mail


def test_train_goes_on_with_a_class_of_one_row(inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path) -> None:
    data = write_mail(tmp_path / "mail.csv")
    data.write_text(data.read_text() + "see the cat,pets\n")
    ended = inlay("train", data, "--backbone", tiny_bert_folder, *SETTINGS, "--json")
    assert ended.status == 0
    note = "1 label has training rows but no dev row, so nothing judges it: `pets` (1 row, line 82)"
    assert note in ended.data["notes"]
    assert note in ended.err
    assert ended.data["labels"] == ["ham", "pets", "spam"]
