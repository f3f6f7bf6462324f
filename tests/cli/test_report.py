"""`inlay report`, and the report and the model card in the folder of a trained run."""

from __future__ import annotations

from pathlib import Path

from .conftest import SETTINGS, Inlay, Mail, write_mail


def test_a_trained_run_has_a_report_and_a_card_in_its_folder(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    (page,) = mail.store.glob("runs/*/report.html")
    text = mail.data.read_text().splitlines()[1].split(",")[0]
    assert "<h1>mail@1</h1>" in page.read_text()
    assert "columns: text <code>text</code>" in page.read_text(), "what was inferred"
    assert "# mail@1" in page.with_name("card.md").read_text()
    assert text not in page.with_name("card.md").read_text()
    rows = write_mail(tmp_path / "private.csv", 40, seed=5)
    texts = [line.split(",")[0] for line in rows.read_text().splitlines()[1:]]
    where = ("--backbone", mail.backbone, *SETTINGS, "--json")
    private = inlay("train", rows, "--probes", "hashed", *where)
    said = Path(private.data["report"]).read_text()
    assert not any(text in said for text in texts)
    assert "The rows are left out of this report." in said
    without = inlay("train", rows, "--no-report", "--task", "other", "--set", "train.seed=3", *where)
    assert without.data["report"] is None
    assert not (Path(without.data["folder"]) / "report.html").exists()


def test_a_run_that_is_not_published_has_a_report_too(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    rows = write_mail(tmp_path / "fresh.csv", 40, seed=6)
    ended = inlay("train", rows, "--no-publish", "--backbone", mail.backbone, *SETTINGS)
    assert ended.status == 0, ended.err
    (page,) = (path for path in mail.store.glob("runs/*/report.html") if "<h1>fresh</h1>" in path.read_text())
    assert page.with_name("card.md").is_file()


def test_a_report_is_written_where_it_is_wanted(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    ended = inlay("report", "mail")
    assert ended.status == 0, ended.err
    assert ended.out.startswith("test accuracy ")
    assert (tmp_path / "mail-report.html").is_file()
    assert (tmp_path / "mail-card.md").is_file()
    found = inlay("report", "mail", "--json", "--no-rows", "--card", tmp_path / "own.md")
    assert (found.data["errors"], found.data["unsure"], found.data["shows_rows"]) == ([], [], False)
    assert found.data["scores"][1]["side"] == "test"
    assert sorted(path.name for path in tmp_path.glob("*.md")) == ["mail-card.md", "own.md"]
    nowhere = inlay("report", "mail", "--html", tmp_path / "none" / "page.html")
    assert nowhere.status == 9
    assert "create it first" in nowhere.err


def test_without_its_rows_the_report_of_the_training_is_named(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    moved = mail.data.with_name("moved.csv")
    mail.data.rename(moved)
    try:
        refused = inlay("report", "mail")
        assert refused.status == 9
        assert "name the file where they lie now with `--data FILE`" in refused.err
        assert "report.html" in refused.err
        assert inlay("report", "mail", "--data", moved).status == 0
        wrong = inlay("report", "mail", "--data", write_mail(tmp_path / "other.csv", seed=9))
        assert "does not have the rows that `mail@1` was trained on" in wrong.err
    finally:
        moved.rename(mail.data)
