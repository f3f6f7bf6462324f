"""Rows for backbones that write: answers that are texts, pairs read as one text."""

from __future__ import annotations

import pytest

from inlay.data.metrics import score_all
from inlay.data.tasks import Split, load_task
from inlay.data.windows import Reading, encode_split
from inlay.errors import BadData
from inlay.settings.run_config import DataConfig
from tiny_backbones import make_tokenizer


def test_a_text_task_has_answers_for_targets_with_blanks_joined(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "".join(f"question {n},answer   number {n}\n" for n in range(20)))
    task = load_task(DataConfig(source=str(path), kind="text"), "answers")
    assert (task.kind, task.labels, task.metric) == ("text", (), "exact_match")
    assert set(task.train.targets) | set(task.dev.targets) == {f"answer number {n}" for n in range(20)}


def test_a_missing_answer_is_refused_with_its_line(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,label\nfirst,yes\nsecond,\nthird,no\n")
    with pytest.raises(BadData, match="missing answer") as caught:
        load_task(DataConfig(source=str(path), kind="text"), "answers")
    assert caught.value.line == 3


def test_written_answers_are_scored_as_squads_are():
    scores = score_all("text", (), ["the red cat", "a dog"], ["Red cat!", "the cat"])
    assert scores == {"token_f1": 0.5, "exact_match": 0.5}


def test_a_pair_is_read_as_one_text_with_words_before_its_parts():
    tokenizer = make_tokenizer("t5")
    pairs = [("the movie was good", "why not ?"), ("cat", "dog sat on the mat")]
    split = Split([a for a, _ in pairs], [b for _, b in pairs], None, [])
    encoded = encode_split(tokenizer, split, Reading("text", 64))
    for (first, second), ids in zip(pairs, encoded.ids, strict=True):
        assert ids.tolist() == tokenizer(f"sentence1: {first} sentence2: {second}")["input_ids"]
    assert encoded.segments is None


def test_of_a_pair_that_is_too_long_the_longer_text_is_cut():
    tokenizer = make_tokenizer("t5")
    split = Split(["cat " * 40], ["dog sat"], None, [])
    encoded = encode_split(tokenizer, split, Reading("text", 40))
    tokens = tokenizer.convert_ids_to_tokens(encoded.ids[0].tolist())
    assert len(tokens) <= 40
    assert tokens[-3:] == ["dog", "sat", "[SEP]"]
    assert tokens.count("[SEP]") == 1
    assert encoded.num_truncated == 1
