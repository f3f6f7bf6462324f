"""`study report`: what was measured, drawn without training anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Inlay

STUDIES = Path(__file__).parents[2] / "studies"
KEPT = Path(__file__).parents[2] / "results" / "untrained-pooler" / "glue" / "minilm-device.json"


def test_a_study_ends_with_its_report_and_report_draws_it_anew(inlay: Inlay, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = inlay("study", "uva", "--profile", "tiny", "--out", out, "--json")
    assert ended.status == 0, ended.err
    page = out / "uva" / "report.html"
    assert ended.data["report"] == str(page)
    first = page.read_text()
    assert "BERT (full), published" in first
    kept = [json.loads(line) for line in (out / "uva" / "tiny-tiny.jsonl").read_text().splitlines()]
    assert {record["extra"]["layers"] for record in kept} == {4}
    assert "85.0" in first
    assert "backbone: tiny instead of google-bert/bert-base-uncased" in first
    assert (out / "uva" / "tiny-tiny-uva.svg").exists()
    assert "](tiny-tiny-uva.svg)" in (out / "uva" / "report.md").read_text()
    page.unlink()
    drawn = inlay("study", "report", "uva", "--out", out)
    assert drawn.status == 0, drawn.err
    assert str(page) in drawn.out
    assert page.read_text() == first


def test_a_report_of_all_studies_says_which_were_not_run(inlay: Inlay, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert inlay("study", "squad", "--profile", "tiny", "--out", out).status == 0
    drawn = inlay("study", "report", "--out", out, "--json")
    assert drawn.data["report"] == str(out / "report.html")
    text = (out / "report.md").read_text()
    others = [path for path in STUDIES.glob("*.toml") if path.stem != "squad"]
    assert text.count("> Not run yet.") == len(others) > 12
    assert "](squad/tiny-tiny-squad.svg)" in text


def test_a_report_of_nothing_is_refused_saying_what_to_do(inlay: Inlay, tmp_path: Path) -> None:
    refused = inlay("study", "report", "--out", tmp_path / "nowhere")
    assert refused.status == 9
    assert "no results in" in refused.err
    assert "`--out DIR`" in refused.err


def test_a_report_of_a_backbone_without_results_names_those_that_have_some(inlay: Inlay, tmp_path: Path) -> None:
    kept = tmp_path / "out" / "glue" / "minilm-device.json"
    kept.parent.mkdir(parents=True)
    (record,) = [line for line in KEPT.read_text().splitlines() if line.startswith("{")][1:2]
    kept.write_text('{"study": "glue", "records": [' + record.rstrip(",") + "]}")
    refused = inlay("study", "report", "glue", "--backbone", "mpnet", "--out", tmp_path / "out")
    assert refused.status == 3
    assert "named `mpnet`" in refused.err
    assert "minilm" in refused.err


@pytest.mark.parametrize("option", [("--arms", "full"), ("--tasks", "glue/rte"), ("--budget", "1m"), ("--dry-run",)])
def test_a_report_refuses_what_chooses_among_runs(inlay: Inlay, option: tuple[str, ...]) -> None:
    refused = inlay("study", "report", *option)
    assert refused.status == 2
    assert f"`study report` has no `{option[0]}`" in refused.err
