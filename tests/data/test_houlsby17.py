"""The sets of the additional tasks by name, from small files in their published form."""

from __future__ import annotations

import json

import pandas
import pytest

from inlay.data import load_task, read_split
from inlay.data.published_sets import EXTRA
from inlay.errors import BadConfig, BadData, Missing, UnknownName
from inlay.settings.run_config import DataConfig


def write_csv(root, name, header, rows, encoding="utf8"):
    path = root / "houlsby17" / name
    path.parent.mkdir(parents=True)
    pandas.DataFrame(rows, columns=header).to_csv(path, index=False, encoding=encoding)


def load(root, name, **more):
    return load_task(DataConfig(source=f"extra/{name}", root=str(root), **more), name)


def all_rows(task):
    sides = [side for side in (task.train, task.dev, task.test) if side is not None]
    return {text: task.labels[target] for side in sides for text, target in zip(side.texts, side.targets, strict=True)}


def test_rows_are_cut_into_eighty_ten_and_ten_percent_by_the_seed(tmp_path):
    rows = [(f"tweet {number}", (number % 2 and "positive") or "negative", 0.5) for number in range(200)]
    header = ("text", "airline_sentiment", "airline_sentiment:confidence")
    write_csv(tmp_path, "crowdflower_airline/Airline-Sentiment-2-w-AA.csv", header, rows)
    task = load(tmp_path, "airline")
    assert (len(task.train), len(task.dev), len(task.test)) == (160, 20, 20)
    assert task.metric == "accuracy"
    assert all_rows(task) == {text: label for text, label, _ in rows}
    assert load(tmp_path, "airline").digest == task.digest
    assert load(tmp_path, "airline", split_seed=1).digest != task.digest
    assert len(load(tmp_path, "airline", test_share=0.5).test) == 100


def test_undecided_disasters_are_left_out_and_the_notes_say_so(tmp_path):
    rows = [(f"row {n}", ("Relevant", "Not Relevant", "Can't Decide")[n % 3]) for n in range(60)]
    header = ("text", "choose_one")
    write_csv(tmp_path, "crowdflower_disasters/socialmedia-disaster-tweets-DFE.csv", header, rows)
    task = load(tmp_path, "disasters")
    assert task.labels == ("not relevant", "relevant")
    assert sum(map(len, (task.train, task.dev, task.test))) == 40
    assert any("20 rows left out because of their label: `Can't Decide` (20)" in note for note in task.notes)


def test_global_warming_merges_the_spellings_of_yes_and_no(tmp_path):
    rows = [(f"row {n}", ("Y", "Yes", "N", "No", "NA", "N/A", "")[n % 7]) for n in range(70)]
    write_csv(tmp_path, "crowdflower_global_warming/1377884570_tweet_global_warming.csv", ("tweet", "existence"), rows)
    found = all_rows(load(tmp_path, "global-warming"))
    assert found == {text: {"Y": "yes", "N": "no"}[cell[0]] for text, cell in rows if cell in ("Y", "Yes", "N", "No")}


def test_stance_and_opinion_are_two_tasks_of_one_file(tmp_path):
    stances = ("AGAINST: We can\ninfer", "FOR: We can", "NONE OF THE ABOVE: No clue", "NEUTRAL: Neither")
    opinions = ("1.  The tweet explicitly", "2. The tweet does NOT", "3.  The tweet is not")
    rows = [(stances[n % 4], 0.7, opinions[n % 3], f"caf\xe9 {n}") for n in range(60)]
    header = ("q1_from_reading", "q1_from_reading:confidence", "q2_which_of", "tweet")
    write_csv(tmp_path, "crowdflower_progressive/progressive-tweet-sentiment.csv", header, rows, "latin-1")
    names = ("against", "for", "none", "neutral")
    assert all_rows(load(tmp_path, "progressive-stance")) == {f"caf\xe9 {n}": names[n % 4] for n in range(60)}
    assert load(tmp_path, "progressive-opinion").labels == ("about something else", "about the target", "none")


def test_an_article_is_relevant_if_its_positivity_was_rated(tmp_path):
    rows = [(f"article {n}", str(n % 9 + 1) if n % 2 else "") for n in range(60)]
    name = "crowdflower_us_economic_performance/us-economic-newspaper.csv"
    write_csv(tmp_path, name, ("text", "positivity"), rows)
    task = load(tmp_path, "us-economic-performance")
    assert all_rows(task) == {text: "relevant" if cell else "not relevant" for text, cell in rows}
    assert any("no relevance column" in note for note in task.notes)


def test_both_halves_of_the_newsgroups_are_cut_together(tmp_path):
    folder = tmp_path / "20_newsgroups"
    folder.mkdir()
    for side, start in (("train", 0), ("test", 60)):
        frame = pandas.DataFrame([(f"mail {n}", f"group-{n % 3}") for n in range(start, start + 60)])
        frame.set_axis(["text", "label"], axis=1).to_parquet(folder / f"{side}.parquet")
    task = load(tmp_path, "20-newsgroups")
    assert (len(task.train), len(task.dev), len(task.test)) == (96, 12, 12)
    assert all_rows(task) == {f"mail {n}": f"group-{n % 3}" for n in range(120)}


def test_the_spam_collection_has_neither_header_nor_suffix(tmp_path):
    folder = tmp_path / "houlsby17" / "sms_spam_collection"
    folder.mkdir(parents=True)
    lines = [f'{("ham", "spam")[n % 2]}\ttext "{n}\n' for n in range(40)]
    (folder / "SMSSpamCollection").write_text("".join(lines))
    assert all_rows(load(tmp_path, "sms-spam"))['text "1'] == "spam"


def test_sets_with_sides_of_their_own_keep_them(tmp_path):
    (tmp_path / "CB").mkdir()
    for side, num_rows in (("train", 6), ("val", 3), ("test", 2)):
        rows = [{"premise": f"{side} {n}", "hypothesis": "h", "idx": n} for n in range(num_rows)]
        labelled = rows if side == "test" else [{**row, "label": "ab"[n % 2]} for n, row in enumerate(rows)]
        (tmp_path / "CB" / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    task = load(tmp_path, "cb")
    assert (len(task.train), len(task.dev), task.test) == (6, 3, None)
    assert task.train.pairs == ["h"] * 6
    (tmp_path / "imdb").mkdir()
    for side in ("train", "test"):
        frame = pandas.DataFrame([(f"{side} film {n}", n % 2) for n in range(20)], columns=["text", "label"])
        frame.to_parquet(tmp_path / "imdb" / f"{side}.parquet")
    films = load(tmp_path, "imdb")
    assert (len(films.train), len(films.dev), len(films.test)) == (18, 2, 20)
    assert films.labels == ("negative", "positive")
    (tmp_path / "yelp_polarity").mkdir()
    for side in ("train", "test"):  # as published: no header, 1 is bad
        lines = [f'"{1 + row % 2}","{side}, place {row}"' for row in range(20)]
        (tmp_path / "yelp_polarity" / f"{side}.csv").write_text("\n".join(lines) + "\n")
    places = load(tmp_path, "yelp-polarity")
    assert (len(places.train), len(places.dev), len(places.test)) == (18, 2, 20)
    assert places.labels[places.test.targets[0]] == "negative"
    assert places.test.texts[0] == "test, place 0"


def test_a_set_of_test_rows_alone_is_for_evaluation(tmp_path):
    (tmp_path / "SciTail").mkdir()
    row = {"premise": "p", "hypothesis": "h", "label": "entailment"}
    (tmp_path / "SciTail" / "test.jsonl").write_text(json.dumps(row) + "\n")
    config = DataConfig(root=str(tmp_path))
    split = read_split("extra/scitail", ("entailment", "not_entailment"), "classify", config)
    assert (split.texts, split.pairs, split.targets.tolist()) == (["p"], ["h"], [0])
    with pytest.raises(Missing, match="no train rows"):
        load(tmp_path, "scitail")


def test_squad_is_a_span_task_of_its_two_files(tmp_path):
    (tmp_path / "SQuAD").mkdir()
    qas = [{"id": "1", "question": "who ?", "answers": [{"text": "Bob", "answer_start": 0}]}]
    document = json.dumps({"data": [{"title": "t", "paragraphs": [{"context": "Bob did it.", "qas": qas}]}]})
    for side in ("train", "dev"):
        (tmp_path / "SQuAD" / f"{side}-v1.1.json").write_text(document)
    task = load(tmp_path, "squad")
    assert (task.kind, task.metric, task.dev.pairs) == ("span", "token_f1", ["Bob did it."])


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UnknownName, match="airlines"):
        load(tmp_path, "airlines")
    with pytest.raises(Missing, match="crowdflower_airline"):
        load(tmp_path, "airline")
    with pytest.raises(Missing, match="--data-root"):
        load_task(DataConfig(source="extra/airline"), "airline")
    with pytest.raises(BadConfig, match=r"`data\.text` is set"):
        load(tmp_path, "airline", text="tweet")
    write_csv(tmp_path, "crowdflower_emotion/text_emotion.csv", ("sentiment", "words"), [("joy", "yes")])
    with pytest.raises(BadData, match="no column `content`"):
        load(tmp_path, "emotion")


def test_thirteen_of_the_papers_sets_are_known_and_cut():
    assert sum(entry.is_cut for entry in EXTRA.values()) == 13
