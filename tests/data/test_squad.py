"""Answers in a context: SQuAD's files and tables of them, the official scores, the margin of saying nothing."""

from __future__ import annotations

import collections
import csv
import itertools
import json

import numpy as np
import pytest

from inlay.data import load_task, read_split, stream_rows
from inlay.data.metrics import evaluate_report, score_all
from inlay.data.squad import normalise_answer, score_answer, tune_threshold
from inlay.errors import BadData
from inlay.settings.run_config import DataConfig

CONTEXT = "The Denver Broncos beat the Carolina Panthers in Santa Clara."


def squad(questions, version="1.1"):
    return {"data": [{"title": "Game", "paragraphs": [{"context": CONTEXT, "qas": questions}]}], "version": version}


def question(text, *answers, **more):
    found = [{"text": answer, "answer_start": CONTEXT.index(answer)} for answer in answers]
    return {"id": text, "question": text, "answers": found, **more}


def write_squad(path, document):
    path.write_text(json.dumps(document))
    return str(path)


@pytest.mark.parametrize("is_squad2", [False, True])
@pytest.mark.parametrize(
    ("prediction", "golds", "exact", "overlap"),
    [
        ("Denver Broncos", ["Denver Broncos"], 1, 1),
        ("the denver broncos!", ["Denver Broncos"], 1, 1),  # case, article, punctuation
        ("Denver", ["Denver Broncos"], 0, 2 / 3),  # precision 1, recall 1/2
        ("Carolina Panthers", ["Denver Broncos"], 0, 0),
        ("Broncos", ["Denver Broncos", "Broncos"], 1, 1),  # the best over the gold answers
        ("in Santa  Clara", ["Santa Clara, California"], 0, 2 * (2 / 3) * (2 / 3) / (4 / 3)),
        ("a", ["Denver"], 0, 0),  # nothing is left of it
        ("", ["Denver"], 0, 0),
    ],
)
def test_scores_are_those_of_both_official_scripts(prediction, golds, exact, overlap, is_squad2):
    found = score_answer(prediction, [(0, gold) for gold in golds], is_squad2=is_squad2)
    assert found == (exact, pytest.approx(overlap))


def test_where_nothing_is_to_be_found_only_saying_nothing_is_right():
    assert score_answer("", [], is_squad2=True) == (1, 1)
    assert score_answer("the", [], is_squad2=True) == (1, 1)  # nothing is left of it
    assert score_answer("Denver", [], is_squad2=True) == (0, 0)


def official_1(prediction, golds):
    """evaluate-v1.1.py: every gold answer counts; F1 is 0 without a common word."""

    def f1(gold):
        predicted, true = normalise_answer(prediction).split(), normalise_answer(gold).split()
        num_same = sum((collections.Counter(predicted) & collections.Counter(true)).values())
        if num_same == 0:
            return 0
        precision, recall = num_same / len(predicted), num_same / len(true)
        return (2 * precision * recall) / (precision + recall)

    exact = max(int(normalise_answer(prediction) == normalise_answer(gold)) for gold in golds)
    return exact, max(f1(gold) for gold in golds)


def official_2(prediction, golds):
    """evaluate-v2.0.py: of the gold answers those that are something; if either is nothing, F1 is whether both are."""

    def f1(gold):
        predicted, true = normalise_answer(prediction).split(), normalise_answer(gold).split()
        num_same = sum((collections.Counter(predicted) & collections.Counter(true)).values())
        if len(predicted) == 0 or len(true) == 0:
            return int(predicted == true)
        if num_same == 0:
            return 0
        precision, recall = num_same / len(predicted), num_same / len(true)
        return (2 * precision * recall) / (precision + recall)

    golds = [gold for gold in golds if normalise_answer(gold)] or [""]
    exact = max(int(normalise_answer(prediction) == normalise_answer(gold)) for gold in golds)
    return exact, max(f1(gold) for gold in golds)


TEXTS = ["", "the", "A.", "?", "Denver", "the Denver Broncos", "Broncos beat Denver"]
GOLDS = [list(golds) for number in (1, 2) for golds in itertools.product(TEXTS[1:], repeat=number)]


def test_answers_that_normalise_to_nothing_are_scored_as_each_version_of_squad_does():
    assert score_answer("the", [(0, "the")], is_squad2=False) == official_1("the", ["the"]) == (1, 0)
    assert score_answer("the", [(0, "the")], is_squad2=True) == official_2("the", ["the"]) == (1, 1)
    for prediction, golds in itertools.product(TEXTS, GOLDS):
        placed = [(0, gold) for gold in golds]
        assert score_answer(prediction, placed, is_squad2=False) == pytest.approx(official_1(prediction, golds))
        assert score_answer(prediction, placed, is_squad2=True) == pytest.approx(official_2(prediction, golds))


def test_the_rows_say_which_version_of_squad_they_are():
    targets, answers = np.empty(2, dtype=object), ["the", "Oslo"]
    targets[:] = [((0, "a"),), ((0, "Oslo"),)]  # every question has an answer: 1.1
    assert score_all("span", (), targets, answers) == {"token_f1": 0.5, "exact_match": 1.0}
    targets[:] = [((0, "a"),), ()]  # one has none: 2.0
    assert score_all("span", (), targets, answers) == {"token_f1": 0.5, "exact_match": 0.5}
    assert evaluate_report("span", (), targets, answers).metrics["token_f1"].value == 0.5
    assert score_all("text", (), ["a"], ["the"]) == {"token_f1": 1.0, "exact_match": 1.0}  # written: no question


def test_normalising_lowers_and_drops_punctuation_articles_and_blanks():
    assert normalise_answer("  The  U.S. Army's\tan  answer ") == "us armys answer"


def test_means_and_intervals_are_over_questions():
    targets = np.empty(3, dtype=object)
    targets[:] = [((0, "Denver Broncos"),), (), ((0, "Oslo"),)]
    scores = score_all("span", (), targets, ["Denver", "", "Rome"])
    assert scores == {"token_f1": pytest.approx((2 / 3 + 1 + 0) / 3), "exact_match": pytest.approx(1 / 3)}
    report = evaluate_report("span", (), targets, ["Denver", "", "Rome"])
    assert report.metrics["exact_match"].low == 0
    assert report.metrics["exact_match"].high == 1


def test_squads_own_file_is_a_span_task(tmp_path):
    questions = [question(f"Who won {n}?", "Denver Broncos", "Broncos") for n in range(5)]
    train = write_squad(tmp_path / "train-v1.1.json", squad(questions))
    dev = write_squad(tmp_path / "dev-v1.1.json", squad([question("Where?", "Santa Clara")]))
    task = load_task(DataConfig(source=train, dev=dev), "game")
    assert (task.kind, task.labels, task.metric) == ("span", (), "token_f1")
    assert task.train.texts[0] == "Who won 0?"
    assert task.train.pairs[0] == CONTEXT
    assert task.train.targets[0] == ((4, "Denver Broncos"), (11, "Broncos"))
    assert task.dev.targets[0] == ((49, "Santa Clara"),)
    assert any("5 questions, 0 of them without an answer" in note for note in task.notes)
    (rows,) = stream_rows(dev)
    assert (rows[0].text, rows[0].pair, rows[0].record["id"]) == ("Where?", CONTEXT, "Where?")
    assert len(read_split(dev, (), "span")) == 1


def test_questions_without_an_answer_are_read_from_version_two(tmp_path):
    impossible = question("Who lost in Rome?", is_impossible=True)
    impossible["plausible_answers"] = [{"text": "Santa Clara", "answer_start": 49}]
    questions = [question("Who won?", "Denver Broncos", is_impossible=False), impossible]
    document = {"version": "v2.0", "data": squad(questions)["data"]}
    path = write_squad(tmp_path / "train-v2.0.json", document)
    task = load_task(DataConfig(source=path, dev=path), "game")
    assert list(task.train.targets) == [((4, "Denver Broncos"),), ()]


def test_tables_and_lines_of_questions_are_the_same_task(tmp_path):
    rows = [("Who won?", "Denver Broncos", 4), ("Where?", "Santa Clara", 49), ("When?", "", "")]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "context", "answer", "answer_start"])
        writer.writerows([text, CONTEXT, answer, start] for text, answer, start in rows)
    hub = [
        {
            "question": text,
            "context": CONTEXT,
            "answers": {"text": [answer] if answer else [], "answer_start": [start] if answer else []},
        }
        for text, answer, start in rows
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, hub)))
    digests = set()
    for name in ("rows.csv", "rows.jsonl"):
        task = load_task(DataConfig(source=str(tmp_path / name), dev=str(tmp_path / name)), "game")
        assert list(task.train.targets) == [((4, "Denver Broncos"),), ((49, "Santa Clara"),), ()]
        digests.add(task.digest)
    assert len(digests) == 1


def test_an_answer_that_is_not_in_its_context_is_refused_by_number(tmp_path):
    wrong = question("Who won?", "Denver Broncos")
    wrong["answers"][0]["answer_start"] = 5
    path = write_squad(tmp_path / "bad.json", squad([question("Where?", "Santa Clara"), wrong]))
    with pytest.raises(BadData, match=r"bad.json:2: the answer `Denver Broncos` is not at character 5"):
        load_task(DataConfig(source=path, dev=path), "bad")
    skipped = load_task(DataConfig(source=path, dev=path, on_bad_row="skip"), "bad")
    assert len(skipped.train) == 1


def test_no_context_is_on_both_sides_of_a_split(tmp_path):
    paragraphs = [
        {
            "context": f"{CONTEXT} It was game {n}.",
            "qas": [question(f"Who won {n}?", "Broncos"), question("Where?", "Clara")],
        }
        for n in range(12)
    ]
    path = write_squad(tmp_path / "many.json", {"data": [{"title": "x", "paragraphs": paragraphs}], "version": "1.1"})
    task = load_task(DataConfig(source=path, dev_share=0.3), "many")
    assert len(task.train) + len(task.dev) == 24
    assert not set(task.train.pairs) & set(task.dev.pairs)


def test_tables_without_the_columns_are_refused_naming_them(tmp_path):
    (tmp_path / "plain.csv").write_text("text,label\na,b\nc,d\n")
    with pytest.raises(BadData, match="no columns of a `span` task") as caught:
        load_task(DataConfig(source=str(tmp_path / "plain.csv"), kind="span"), "plain")
    assert "`question`, `context`, `answers`" in caught.value.hint


@pytest.mark.parametrize("seed", range(5))
def test_the_tuned_threshold_is_as_good_as_any(seed):
    generator = np.random.default_rng(seed)
    margins = generator.normal(size=20).round(1)  # some are equal
    targets = [((0, "x"),) if generator.random() < 0.6 else () for _ in margins]
    answers = ["x" if generator.random() < 0.7 else "y" for _ in margins]

    def total(threshold):
        said = ["" if margin > threshold else answer for margin, answer in zip(margins, answers, strict=True)]
        return sum(score_answer(text, golds, is_squad2=True)[1] for text, golds in zip(said, targets, strict=True))

    found = total(tune_threshold(margins, answers, targets))
    assert found == max(total(threshold) for threshold in [*margins, margins.min() - 1, margins.max() + 1])


def test_a_question_a_context_and_a_word_are_a_pair_to_classify(tmp_path):
    rows = [{"question": f"Is it {n}?", "context": CONTEXT, "answer": "yes" if n % 2 else "no"} for n in range(12)]
    (tmp_path / "boolean.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps({**row, "answer": None}) for row in rows))
    source, test = str(tmp_path / "boolean.jsonl"), str(tmp_path / "test.jsonl")
    task = load_task(DataConfig(source=source, label="answer", test=test), "boolean")
    assert (task.kind, task.labels, task.test) == ("classify", ("no", "yes"), None)
    assert task.train.pairs[0] == CONTEXT


def test_an_unlabelled_test_side_is_left_out_with_a_note(tmp_path):
    dev = write_squad(tmp_path / "dev.json", squad([question("Where?", "Santa Clara")]))
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "Who?", "context": CONTEXT}))
    task = load_task(DataConfig(source=dev, dev=dev, test=str(tmp_path / "test.jsonl")), "game")
    assert task.test is None
    assert any("have no labels: left out" in note for note in task.notes)
