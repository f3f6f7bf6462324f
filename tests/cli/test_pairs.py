"""Pairs on the command line: two towers trained, asked, shown, proved, carried to another store and exported."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from .conftest import HAM, SETTINGS, SPAM, Inlay


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Pairs of texts, alike or not."""
    generator = random.Random(0)
    path = tmp_path / "alike.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sentence1", "sentence2", "label"])
        for row in range(60):
            first, second = (HAM, HAM) if row % 2 else (HAM, SPAM)
            texts = [" ".join(generator.choices(words, k=4)) for words in (first, second)]
            writer.writerow([*texts, "alike" if row % 2 else "apart"])
    return path


def test_towers_go_all_the_way(inlay: Inlay, pairs: Path, tiny_bert_folder: Path, tmp_path: Path) -> None:
    where = ("--backbone", tiny_bert_folder)
    joined = inlay("train", pairs, "--task", "joined", *where, *SETTINGS, "--json")
    towers = inlay("train", pairs, "--task", "towers", "--set", "data.pairs=towers", *where, *SETTINGS, "--json")
    assert (joined.status, towers.status) == (0, 0), towers.err
    assert "of each text of a pair (towers)" in towers.err
    assert "(towers)" not in joined.err
    asked = ("cat dog mat", "--pair", "free prize now")
    answers = [inlay("predict", task, *asked, "--json").lines[0] for task in ("towers", "joined")]
    assert all(sum(answer["probabilities"].values()) == pytest.approx(1) for answer in answers)
    assert answers[0]["probabilities"] != answers[1]["probabilities"]
    back = inlay("predict", "towers", "free prize now", "--pair", "cat dog mat", "--json").lines[0]
    assert back["probabilities"] != answers[0]["probabilities"], "the first text is another"
    assert inlay("predict", "towers", "cat dog mat").status != 0, "a pair is asked for"
    assert "pairs towers" in inlay("show", "towers").out
    assert "towers" not in inlay("show", "joined").out.replace(str(tmp_path), "")
    assert inlay("verify").status == 0
    assert inlay("evaluate", "towers", pairs, "--json").status == 0
    assert inlay("export", "towers", "towers.inlay").status == 0
    assert inlay("import", "towers.inlay", "--name", "other").status == 0
    assert inlay("predict", "other", *asked, "--json").lines[0]["probabilities"] == answers[0]["probabilities"]
    folder = tmp_path / "adapterhub"
    refused = inlay("export", "towers", "--format", "adapterhub", "--output", folder)
    assert refused.status != 0
    assert "reads its texts apart (towers)" in refused.err
    assert not folder.exists()


def test_towers_of_single_texts_are_refused_before_anything_is_trained(
    inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "single.csv"
    path.write_text("text,label\n" + "".join(f"cat {n},{'a' if n % 2 else 'b'}\n" for n in range(20)))
    ended = inlay("train", path, "--task", "single", "--set", "data.pairs=towers", "--backbone", tiny_bert_folder)
    assert ended.status != 0
    assert "its rows have no second text" in ended.err
    assert "--pair" in ended.err


def test_an_example_of_towers_shows_both_texts(inlay: Inlay, pairs: Path, tiny_bert_folder: Path) -> None:
    ended = inlay(
        "train", pairs, "--task", "t", "--set", "data.pairs=towers", "--backbone", tiny_bert_folder, *SETTINGS,
        "--show-examples", "1", "--json",
    )  # fmt: skip
    (example,) = ended.data["examples"]
    assert example["tokens"].count("[CLS]") == 2
    assert set(example["segments"]) == {0}
