"""QNLI's training rows rebuilt from SQuAD."""

from __future__ import annotations

import json

import pytest

from inlay.data import load_task
from inlay.data.published_sets import rebuild_qnli, split_sentences
from inlay.errors import BadData, Missing
from inlay.settings.run_config import DataConfig

CONTEXT = (
    "The old tower was built by Dr. A. Smith in 1880. It fell in 1901! A new tower stands\tthere now. "
    "Nobody (not even the mayor) likes it."
)


def question(text, answer):
    return {"id": text, "question": text, "answers": [{"text": answer, "answer_start": CONTEXT.index(answer)}]}


@pytest.fixture
def squad(tmp_path):
    qas = [question("Who built the old tower ?", "A. Smith"), question("When did it fall ?", "1901")]
    path = tmp_path / "SQuAD" / "train-v1.1.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": qas}]}]}))
    return path


def test_sentences_end_where_a_capital_follows_but_not_after_abbreviations():
    found = [CONTEXT[start:stop] for start, stop in split_sentences(CONTEXT)]
    assert found == [
        "The old tower was built by Dr. A. Smith in 1880.",
        "It fell in 1901!",
        "A new tower stands\tthere now.",
        "Nobody (not even the mayor) likes it.",
    ]


def test_a_question_comes_with_its_answers_sentence_and_the_likest_other(squad):
    table = rebuild_qnli(squad)
    assert table.header.names == ("question", "sentence", "label")
    assert table.rows == [
        ["Who built the old tower ?", "The old tower was built by Dr. A. Smith in 1880.", "entailment"],
        ["Who built the old tower ?", "A new tower stands there now.", "not_entailment"],
        ["When did it fall ?", "It fell in 1901!", "entailment"],
        ["When did it fall ?", "Nobody (not even the mayor) likes it.", "not_entailment"],
    ]
    assert table.lines == [1, 1, 2, 2]
    assert "reconstruction" in table.notes[0]


def test_no_more_rows_are_kept_than_glue_has_and_the_same_ones_each_time(squad, monkeypatch):
    whole = rebuild_qnli(squad).rows
    monkeypatch.setattr("inlay.data.published_sets.QNLI_ROWS", 3)
    kept = rebuild_qnli(squad).rows
    assert len(kept) == 3
    assert [row for row in whole if row in kept] == kept
    assert rebuild_qnli(squad).rows == kept


def test_qnli_without_its_training_file_is_rebuilt_and_says_so(squad, tmp_path):
    (tmp_path / "QNLI").mkdir()
    head = "index\tquestion\tsentence\tlabel\n"
    (tmp_path / "QNLI" / "dev.tsv").write_text(f"{head}0\tq?\ts.\tentailment\n")
    task = load_task(DataConfig(source="glue/qnli", root=str(tmp_path)), "qnli")
    assert task.labels == ("entailment", "not_entailment")
    assert (len(task.train), len(task.dev)) == (4, 1)
    assert any("reconstruction" in note for note in task.notes)
    (tmp_path / "QNLI" / "train.tsv").write_text(f"{head}0\ta?\tb.\tentailment\n1\tc?\td.\tnot_entailment\n")
    official = load_task(DataConfig(source="glue/qnli", root=str(tmp_path)), "qnli")
    assert official.train.texts == ["a?", "c?"]
    assert not any("reconstruction" in note for note in official.notes)


def test_a_file_that_is_no_squad_is_refused(tmp_path):
    path = tmp_path / "train-v1.1.json"
    path.write_text('{"data": [{"paragraphs": 3}]}')
    with pytest.raises(BadData, match="not a SQuAD document"):
        rebuild_qnli(path)


def test_without_squad_beside_it_qnli_has_no_training_rows(tmp_path):
    (tmp_path / "QNLI").mkdir()
    (tmp_path / "QNLI" / "dev.tsv").write_text("index\tquestion\tsentence\tlabel\n0\tq?\ts.\tentailment\n")
    with pytest.raises(Missing, match="no train rows"):
        load_task(DataConfig(source="glue/qnli", root=str(tmp_path)), "qnli")
