"""Tagging and question answering from the command line: train, predict, evaluate, files, abstaining."""

from __future__ import annotations

import csv
import itertools
import json
import random
from pathlib import Path

import pytest

from .conftest import SETTINGS, Inlay, Mail

PLACES, OTHERS = "oslo home".split(), "the a it is was good bad see go come late early".split()
NUMBERS = "one two three four five".split()


def write_conll(path: Path, num_rows: int = 60) -> Path:
    generator, lines = random.Random(0), ["-DOCSTART- O", ""]
    for _ in range(num_rows):
        for _ in range(generator.randint(3, 6)):
            is_place = generator.random() < 0.4
            word = generator.choice(PLACES if is_place else OTHERS)
            lines.append(f"{word}\t{'I-LOC' if is_place else 'O'}")
        lines.append("")
    path.write_text("\n".join(lines))
    return path


def write_squad(path: Path, num_rows: int = 40) -> Path:
    generator, paragraphs = random.Random(0), []
    for row in range(num_rows):
        words = generator.choices(OTHERS, k=generator.randint(4, 40))
        place, number = generator.randrange(len(words)), generator.choice(NUMBERS)
        start = len(" ".join([*words[:place], "prize", ""]))
        words[place:place] = ["prize", number]
        answers = [{"text": number, "answer_start": start}]
        qas = [{"id": f"q{row}", "question": "what prize ?", "answers": answers}]
        paragraphs.append({"context": " ".join(words), "qas": qas})
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}], "version": "1.1"}))
    return path


def test_a_tagger_is_trained_asked_judged_and_proved(inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path) -> None:
    data = write_conll(tmp_path / "ner.conll")
    ended = inlay("train", data, "--kind", "tag", "--backbone", tiny_bert_folder, *SETTINGS, "--epochs", 6)
    assert ended.status == 0, ended.err
    assert "sentences whose tags were not IOB2" in ended.err
    assert ended.out.startswith("dev  entity_f1 ")
    assert "ece " in ended.out
    assert "windows of at most 24 tokens" in ended.err
    assert "pooling" not in ended.err
    (line,) = inlay("predict", "ner", "go home, it was oslo", "--json").lines
    for entity in line["entities"]:
        assert line["text"][entity["start"] : entity["end"]] == entity["text"]
    assert [word["text"] for word in line["words"]] == ["go", "home", ",", "it", "was", "oslo"]
    shown = inlay("predict", "ner", "go home, it was oslo").out
    assert shown.endswith("  go home, it was oslo\n")
    assert all(f"{entity['text']} ({entity['label']})" in shown for entity in line["entities"])
    report = inlay("evaluate", "ner", data, "--errors", "wrong.csv", "--json").data
    assert set(report["metrics"]) == {"entity_f1", "entity_precision", "entity_recall", "token_accuracy"}
    assert [item["label"] for item in report["labels"]] == ["LOC"]
    assert 0 <= report["ece"] <= 1
    with Path("wrong.csv").open(newline="") as file:
        wrong = list(csv.DictReader(file))
    assert all(row["label"] != row["predicted"] or "not" in row["words"] for row in wrong)
    assert "entity_f1" in inlay("evaluate", "ner", data).out
    assert inlay("predict", "ner", "--input", data, "-o", "out.csv").status == 0
    assert inlay("baseline", data, "--kind", "tag").err.endswith(
        "error: `inlay baseline` cannot fit a `tag` task\nhint: it knows: classify, multilabel, regress, ordinal\n"
    )
    assert "bit for bit" in inlay("verify").out
    assert "tag" in inlay("tasks").out
    assert "B-LOC" in inlay("show", "ner").out


def test_question_answering_is_recognised_trained_asked_and_judged(
    inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path
) -> None:
    data = write_squad(tmp_path / "squad.json")
    dev = write_squad(tmp_path / "dev-v1.1.json", 10)
    size = ("--size", 8, "--epochs", 2, "--lr", "1e-2", "--max-length", 32, "--set", "train.stride=4")
    ended = inlay("train", data, "--dev", dev, "--limit", 30, "--backbone", tiny_bert_folder, *size)
    assert ended.status == 0, ended.err
    assert "kind: span (inferred), 40 questions, 0 of them without an answer" in ended.err
    assert "30 rows read in " in ended.err
    assert "windows of at most 32 tokens" in ended.err
    assert "none: it answers with a passage" in inlay("show", "squad").out
    assert ended.out.startswith("dev  token_f1 ")
    context = "it was late , the prize two is good"
    (line,) = inlay("predict", "squad", "what prize ?", "--pair", context, "--json").lines
    assert line["answer"] == context[line["start"] : line["end"]] != ""
    assert line["probability"] == line["nbest"][0]["probability"]
    assert inlay("predict", "squad", "what prize ?", "--pair", context).out.startswith(line["answer"])
    report = inlay("evaluate", "squad", dev, "--errors", "wrong.jsonl", "--json").data
    assert report["num_rows"] == 10
    num_wrong = round(10 * (1 - report["metrics"]["exact_match"]["value"]))
    wrong = [json.loads(text) for text in Path("wrong.jsonl").read_text().splitlines()]
    assert len(wrong) == num_wrong
    assert all(row["predicted"] != row["label"] for row in wrong)
    assert inlay("predict", "squad", "--input", dev, "--output", "out.jsonl").status == 0
    answers = [json.loads(text) for text in Path("out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in answers] == [f"q{n}" for n in range(10)]
    assert all(row["answer"] in row["context"] for row in answers)
    assert "bit for bit" in inlay("verify").out


def test_unsure_answers_are_withheld_on_the_screen_and_in_files(inlay: Inlay, mail: Mail) -> None:
    (line,) = inlay("predict", "mail", "see free", "--json").lines
    (silent,) = inlay("predict", "mail", "see free", "--min-confidence", 1, "--json").lines
    assert silent["label"] is None
    assert silent["abstained"] is True
    assert silent["probabilities"] == pytest.approx(line["probabilities"])
    assert inlay("predict", "mail", "see free", "--min-confidence", 1).out.startswith("(abstained)  0.")
    assert inlay("predict", "mail", "--input", mail.data, "--output", "all.csv", "--min-confidence", 0).status == 0
    assert inlay("predict", "mail", "--input", mail.data, "--output", "some.csv", "--min-confidence", 1).status == 0
    for name, abstained in (("all.csv", "false"), ("some.csv", "true")):
        with Path(name).open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert {row["abstained"] for row in rows} == {abstained}
        assert {row["predicted_label"] for row in rows} <= ({"ham", "spam"} if abstained == "false" else {""})
        assert all(float(row["probability"]) >= 0.5 for row in rows)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"label": "ham"}, "ham"),
        ({"label": None, "abstained": True}, "(abstained)"),
        ({"labels": ()}, "(no labels)"),
        ({"labels": None, "abstained": True}, "(abstained)"),
        ({"value": 0.0}, "0"),
        ({"answer": ""}, "(no answer)"),
        ({"answer": None, "abstained": True}, "(abstained)"),
        ({"entities": []}, "(no entities)"),
        ({"entities": [], "abstained": True}, "(abstained)"),
        ({"entities": [{"text": "Oslo", "label": "LOC"}], "abstained": True}, "Oslo (LOC) (abstained)"),
    ],
)
def test_an_answer_that_says_nothing_says_why(about: dict[str, object], said: str) -> None:
    from inlay.serving.answers import answer_words

    assert answer_words(about) == said


def test_evaluate_reports_coverage_and_scores_of_the_answered_rows(inlay: Inlay, mail: Mail) -> None:
    whole = inlay("evaluate", "mail", mail.data, "--json").data
    assert whole["coverage"] is None
    lines = inlay("predict", "mail", "--input", mail.data, "--json").lines
    chances = sorted(line["probability"] for line in lines)[10:70]
    # In the widest gap, where rounding in another batch moves no row to the other side.
    threshold = sum(max(itertools.pairwise(chances), key=lambda pair: pair[1] - pair[0])) / 2
    sure = [line for line in lines if line["probability"] >= threshold]
    part = inlay("evaluate", "mail", mail.data, "--min-confidence", threshold, "--json").data
    assert part["coverage"] == pytest.approx(len(sure) / 80)
    assert part["num_rows"] == len(sure)
    right = sum(line["predicted_label"] == line["label"] for line in sure) / len(sure)
    assert part["metrics"]["accuracy"]["value"] == pytest.approx(right)
    assert "coverage " in inlay("evaluate", "mail", mail.data, "--min-confidence", 0.5).out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (
            ("predict", "mail", "text", "--min-confidence", "2"),
            2,
            "`--min-confidence` is `2`\nhint: give a probability",
        ),
        (("evaluate", "mail", "mail.csv", "--min-confidence", "2"), 2, "`--min-confidence` is `2`\nhint: give a"),
        (("predict", "mail", "text", "--min-confidence", "nan"), 2, "`--min-confidence` is `nan`"),
        (("train", "mail.csv", "--kind", "span"), 4, "no columns of a `span` task"),
        (("train", "mail.csv", "--kind", "tag"), 4, "no columns of a `tag` task"),
    ],
)
def test_what_does_not_suit_is_refused(
    inlay: Inlay, mail: Mail, arguments: tuple[str, ...], status: int, words: str
) -> None:
    ended = inlay(*(mail.data if word == "mail.csv" else word for word in arguments))
    assert ended.status == status
    assert words in ended.err
    assert "Traceback" not in ended.err
