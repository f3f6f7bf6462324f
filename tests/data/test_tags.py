"""Tagged words: conventions become IOB2, spans become tags, entities are seqeval's."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from inlay.data import load_task, read_split
from inlay.data.metrics import evaluate_report, score_all
from inlay.data.tags import count_rows, join_words, sort_tags, split_words, tag_words, to_iob2
from inlay.errors import BadConfig, BadData, Missing
from inlay.settings.run_config import DataConfig

CONLL = """-DOCSTART- -X- O

EU NNP I-ORG
rejects VBZ O
German JJ I-MISC
call NN O

# sent_id = 2
Peter NNP I-PER
Blackburn NNP I-PER

Oslo NNP I-LOC
Bergen NNP B-LOC
"""


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf8")
    return str(path)


def repeated(text: str, times: int) -> str:
    return "\n".join(
        text.replace("Oslo", f"Oslo{n}").replace("EU", f"EU{n}").replace("Pet", f"P{n}") for n in range(times)
    )


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("I-PER I-PER O I-PER", "B-PER I-PER O B-PER"),  # IOB1: B- only between neighbours of one type
        ("I-PER B-PER I-LOC", "B-PER B-PER B-LOC"),
        ("B-PER I-PER E-PER S-LOC O", "B-PER I-PER I-PER B-LOC O"),  # IOBES
        ("B-PER L-PER U-LOC U-LOC", "B-PER I-PER B-LOC B-LOC"),  # BILOU
        ("B-PER E-PER I-PER", "B-PER I-PER B-PER"),  # ended: what goes on is another
        ("B-PER I-PER O B-PER B-PER", "B-PER I-PER O B-PER B-PER"),  # IOB2 stays
        ("NN VB O", "NN VB O"),
    ],
)
def test_every_convention_becomes_iob2(tags, expected):
    made, was_changed = to_iob2(tags.split())
    assert made == expected.split()
    assert was_changed == (tags != expected)
    assert to_iob2(made) == (made, False)


def test_labels_have_both_halves_of_every_type():
    assert sort_tags({"B-PER", "O", "I-LOC"}) == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert sort_tags({"VB", "NN"}) == ("NN", "VB")


def test_words_are_runs_of_letters_and_single_signs():
    text = "Dr. O'Neil paid $1,200.50 in Saint-Denis, twice (U.S.)! 東京"
    words = [text[start:end] for start, end in split_words(text)]
    assert words[:6] == ["Dr", ".", "O'Neil", "paid", "$", "1,200.50"]
    assert words[6:] == ["in", "Saint-Denis", ",", "twice", "(", "U.S", ".", ")", "!", "東", "京"]
    for word in ("हिन्दी", "cafe\u0301", "ไทย"):  # vowel signs and accents are parts of a word
        assert split_words(f"{word}, x") == ((0, len(word)), (len(word), len(word) + 1), (len(word) + 2, len(word) + 3))
    assert join_words(["In", "Oslo"]) == ("In Oslo", ((0, 2), (3, 7)))


def test_spans_of_characters_become_tags_of_whole_words():
    text = "Ada Lovelace met Bob"
    words = split_words(text)
    assert tag_words(words, [(0, 12, "PER"), (17, 20, "PER")]) == (["B-PER", "I-PER", "O", "B-PER"], 0)
    assert tag_words(words, [(5, 7, "PER")]) == (["O", "B-PER", "O", "O"], 1)
    with pytest.raises(ValueError, match="two spans"):
        tag_words(words, [(0, 12, "PER"), (4, 12, "PER")])


def test_columns_of_words_are_read_as_a_tagging_task(tmp_path):
    path = write(tmp_path / "ner.conll", repeated(CONLL, 5))
    task = load_task(DataConfig(source=path), "ner")
    assert (task.kind, task.metric) == ("tag", "entity_f1")
    assert task.labels == ("O", "B-LOC", "I-LOC", "B-MISC", "I-MISC", "B-ORG", "I-ORG", "B-PER", "I-PER")
    assert "15 sentences whose tags were not IOB2 (IOB1, IOBES or BILOU) were converted to it" in task.notes
    assert len(task.train) + len(task.dev) == 15
    texts = [*task.train.texts, *task.dev.texts]
    assert "EU3 rejects German call" in texts
    assert not any("DOCSTART" in text or "sent_id" in text for text in texts)
    row = task.train.texts.index("P0er Blackburn") if "P0er Blackburn" in task.train.texts else None
    if row is not None:
        assert task.train.targets[row] == ((0, 4, 7), (5, 14, 8))
    assert task.train.lines[0] == 3
    again = load_task(DataConfig(source=path), "other")
    assert again.digest == task.digest


def test_another_column_holds_plain_tags_and_its_metric_counts_words(tmp_path):
    path = write(tmp_path / "pos.conll", repeated(CONLL, 5))
    task = load_task(DataConfig(source=path, kind="tag", label="column2"), "pos")
    assert task.labels == ("JJ", "NN", "NNP", "VBZ")
    assert task.metric == "token_accuracy"
    with pytest.raises(BadConfig, match="`entity_f1` does not suit"):
        load_task(DataConfig(source=path, label="column2", kind="tag", metric="entity_f1"), "pos")


@pytest.mark.parametrize("name", ["ner.txt", "ner.tsv", "eng.testa"])
def test_columns_of_words_under_another_suffix_are_read_where_the_kind_is_given(tmp_path, name):
    path = write(tmp_path / name, repeated(CONLL, 5))
    task = load_task(DataConfig(source=path, dev=path, kind="tag"), "ner")
    assert len(task.train) == 15
    assert len(read_split(path, task.labels, "tag")) == 15


def test_a_line_without_its_tag_is_named(tmp_path):
    path = write(tmp_path / "bad.conll", "In O\nOslo B-LOC\n\nGo O\nBergen\n\nUp O\n")
    with pytest.raises(BadData, match=r"bad.conll:5: 1 columns where 2 should be"):
        load_task(DataConfig(source=path), "bad")
    skipped = load_task(DataConfig(source=path, on_bad_row="skip", dev_share=0.5), "bad")
    assert any(note.startswith("skipped 1 bad row") for note in skipped.notes)


def test_a_table_of_texts_is_not_taken_for_columns_of_words(tmp_path):
    path = tmp_path / "mail.tsv"
    path.write_text("label\ttext\nham\tsee you at home\nspam\tfree prize call now\n")
    with pytest.raises(BadData, match="the tag `see you at home` has spaces in it") as caught:
        load_task(DataConfig(source=str(path), kind="tag"), "mail")
    assert caught.value.line == 2


def test_texts_with_spans_are_read_as_a_tagging_task(tmp_path):
    lines = [
        f'{{"text": "Ada Lovelace went to Oslo{n}.", "spans": [{{"start": 0, "end": 12, "label": "PER"}}, '
        f'{{"start": 21, "end": 24, "label": "LOC"}}]}}'
        for n in range(6)
    ]
    task = load_task(DataConfig(source=write(tmp_path / "ner.jsonl", "\n".join(lines))), "ner")
    assert task.kind == "tag"
    assert [task.labels[label] for *_, label in task.train.targets[0]] == ["B-PER", "I-PER", "O", "O", "B-LOC", "O"]
    assert "6 spans that begin or end inside a word were widened to whole words" in task.notes
    bad = write(tmp_path / "bad.jsonl", '{"text": "Oslo", "spans": [{"start": 2, "end": 9, "label": "LOC"}]}\n' * 2)
    with pytest.raises(BadData, match=r"bad.jsonl:1: the span 2 to 9 is not in its text"):
        load_task(DataConfig(source=bad), "bad")


def test_a_type_not_seen_in_training_is_kept_and_named(tmp_path):
    path = write(tmp_path / "more.conll", "In O\nOslo B-LOC\n\nAda B-PER\n")
    split = read_split(path, ("O", "B-LOC", "I-LOC"), "tag")
    assert (split.unseen, [label for *_, label in split.targets[1]]) == (("B-PER",), [3])
    assert f"{path} has 1 label that training never saw, counted as wrong words: `B-PER` (1 word, first on line 4)" in (
        split.notes
    )
    assert len(read_split(path, ("O", "B-LOC", "I-LOC", "B-PER", "I-PER"), "tag")) == 2


def random_tags(seed: int, num_rows: int) -> list[list[str]]:
    generator = np.random.default_rng(seed)
    labels = ["O", "O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    return [[str(tag) for tag in generator.choice(labels, size=size)] for size in generator.integers(1, 12, num_rows)]


def as_targets(rows: list[list[str]], labels: tuple[str, ...]) -> np.ndarray:
    targets = np.empty(len(rows), dtype=object)
    for index, tags in enumerate(rows):
        targets[index] = tuple((2 * place, 2 * place + 1, labels.index(tag)) for place, tag in enumerate(tags))
    return targets


def test_scores_are_seqevals_own():
    from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score

    labels = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    truth = random_tags(0, 60)
    guess = [row if n % 2 else random_tags(n + 1, 1)[0][: len(row)] for n, row in enumerate(truth)]
    guess = [(row + ["O"] * 12)[: len(true)] for row, true in zip(guess, truth, strict=True)]
    scores = score_all("tag", labels, as_targets(truth, labels), guess)
    assert scores["entity_f1"] == pytest.approx(f1_score(truth, guess))
    assert scores["entity_precision"] == pytest.approx(precision_score(truth, guess))
    assert scores["entity_recall"] == pytest.approx(recall_score(truth, guess))
    assert scores["token_accuracy"] == pytest.approx(accuracy_score(truth, guess))
    report = evaluate_report("tag", labels, as_targets(truth, labels), guess, num_resamples=200)
    interval = report.metrics["entity_f1"]
    assert interval.value == pytest.approx(scores["entity_f1"])
    assert interval.low < interval.value < interval.high
    assert [item.label for item in report.labels] == ["LOC", "PER"]
    assert sum(item.support for item in report.labels) == int(
        count_rows(guess, as_targets(truth, labels), labels)[1].sum()
    )


def test_without_seqeval_only_entity_scores_are_refused(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "seqeval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "seqeval", None)
    path = write(tmp_path / "ner.conll", repeated(CONLL, 5))
    with pytest.raises(Missing, match="`seqeval`, which is not installed") as caught:
        load_task(DataConfig(source=path), "ner")
    assert "pip install seqeval" in caught.value.hint
    task = load_task(DataConfig(source=path, metric="token_accuracy"), "ner")
    tags = [tuple(task.labels[label] for *_, label in target) for target in task.dev.targets]
    assert score_all("tag", task.labels, task.dev.targets, tags) == {"token_accuracy": 1.0}


def test_a_frame_of_words_and_an_unlabelled_test_file_are_read(tmp_path):
    import pandas

    from inlay.data import make_task

    rows = [{"tokens": ["in", f"oslo{n}"], "ner_tags": ["O", "B-LOC"]} for n in range(8)]
    test = write(tmp_path / "test.jsonl", '{"text": "in oslo"}')
    task = make_task(pandas.DataFrame(rows), "ner", DataConfig(test=test))
    assert task.labels == ("O", "B-LOC", "I-LOC")
    assert task.test is None
    assert any("have no labels: left out" in note for note in task.notes)
