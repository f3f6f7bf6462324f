"""`inlay report`, and the report and the model card in the folder of a trained run."""

from __future__ import annotations

import re
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
    assert not any(each["errors"] or each["unsure"] for each in found.data["details"])
    assert found.data["shows_rows"] is False
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
        assert "name the file that has them now with `--data FILE`" in refused.err
        assert "report.html" in refused.err
        assert inlay("report", "mail", "--data", moved).status == 0
        wrong = inlay("report", "mail", "--data", write_mail(tmp_path / "other.csv", seed=9))
        assert "does not have the rows that `mail@1` was trained on" in wrong.err
    finally:
        moved.rename(mail.data)


def pages_of(store: Path) -> dict[Path, bool]:
    """Every run folder, and whether its report and its card are there."""
    folders = [path.parent for path in store.glob("**/config.toml")]
    return {folder: all((folder / name).is_file() for name in ("report.html", "card.md")) for folder in folders}


def test_every_run_of_a_sweep_and_of_folds_has_a_report_and_only_the_chosen_one_looks_at_rows(
    inlay: Inlay, mail: Mail, tmp_path: Path
) -> None:
    rows = write_mail(tmp_path / "fresh.csv", 40, seed=6)
    known = {path.name for path in (mail.store / "runs").iterdir()}
    where = ("--backbone", mail.backbone, "--size", 4, "--epochs", 1, "--max-length", 24)
    ended = inlay("sweep", rows, "--lr", "1e-3,1e-2", "--seeds", 2, "--test-share", "0.2", *where, "--json")
    assert ended.status == 0, ended.err
    assert inlay("train", rows, "--folds", 3, "--lr", "3e-3", *where).status == 0
    pages = {folder: found for folder, found in pages_of(mail.store).items() if folder.name not in known}
    assert len(pages) == 4 + 3 + 1
    assert all(pages.values())
    texts = [line.split(",")[0] for line in rows.read_text().splitlines()[1:]]
    chosen = {ended.data["best"]["run"]}
    for run in ended.data["runs"]:
        page = (mail.store / "runs" / run["run_id"] / "report.html").read_text()
        assert any(text in page for text in texts) == (run["run_id"] in chosen)
        assert ("no row was answered again" in page) == (run["run_id"] not in chosen)
    # trained by itself, a loser is read back, published, and gets its whole report
    loser = next(run for run in ended.data["runs"] if run["run_id"] not in chosen)
    given = ("--lr", loser["values"]["train.lr"], "--set", f"train.seed={loser['seed']}", "--test-share", "0.2")
    again = inlay("train", rows, *given, *where, "--json")
    assert (again.data["run"], again.data["was_finished"]) == (loser["run_id"], True)
    assert "no row was answered again" not in Path(again.data["report"]).read_text()


def test_without_reports_a_sweep_writes_none(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    rows, where = write_mail(tmp_path / "fresh.csv", 40, seed=7), ("--backbone", mail.backbone, "--epochs", 1)
    ended = inlay("sweep", rows, "--lr", "1e-3,1e-2", "--size", 4, "--no-report", *where, "--json")
    assert ended.data["best"]["report"] is None
    folders = [mail.store / "runs" / run["run_id"] for run in ended.data["runs"]]
    assert not any((folder / "report.html").exists() for folder in folders)


def test_a_run_of_several_tasks_has_a_page_that_leads_to_those_of_its_tasks(
    inlay: Inlay, mail: Mail, tmp_path: Path
) -> None:
    parts = [f"{name}={write_mail(tmp_path / f'{name}.csv', 40, seed=seed)}" for name, seed in (("one", 1), ("two", 2))]
    given = ("--backbone", mail.backbone, "--method", "mahabadi-multi", "--size", 4, "--epochs", 1, "--seeds", 2)
    ended = inlay("multitask", *parts, *given, "--max-length", 24, "--json")
    assert ended.status == 0, ended.err
    page = Path(ended.data["report"])
    said = page.read_text()
    links = re.findall(r'href="([^"#]+)"', said)
    assert links == ["tasks/000-one.html", "tasks/001-two.html"]
    for link, name in zip(links, ("one", "two"), strict=True):
        assert f"<h1>{name}@1</h1>" in (page.parent / link).read_text()
        assert (page.parent / link).with_suffix(".md").read_text().startswith("---")
    score = next(task["dev"]["accuracy"] for task in ended.data["tasks"] if task["task"] == "one")
    assert f"{100 * score:.1f}" in said
    (other,) = (
        Path(ended.data["folder"]).parent / seed["run"]
        for seed in ended.data["seeds"]
        if seed["run"] != ended.data["run"]
    )
    assert "one + two" in (other / "report.html").read_text()
    assert (other / "card.md").is_file()
