"""Several columns as one: joined texts, and labels as columns of 0 and 1."""

import json

import pandas as pd
import pytest

from inlay.data import load_task, make_task, read_split, stream_rows
from inlay.errors import BadData
from inlay.settings.run_config import DataConfig


def write(tmp_path, rows, name="a.csv"):
    path = tmp_path / name
    pd.DataFrame(rows).to_csv(path, index=False)
    return str(path)


def marked(number, *labels):
    names = ("toxic", "threat", "insult")
    return {"id": f"x{number}", "comment_text": f"comment {number}", **{name: int(name in labels) for name in names}}


SETS = [marked(0), *[marked(n, "toxic") for n in range(1, 20)], *[marked(n, "toxic", "insult") for n in range(20, 40)]]
ONE = [marked(n, ("toxic", "threat", "insult")[n % 3]) for n in range(30)]
MAIL = [
    {"title": f"Offer {n}" if n % 2 else "", "body": f"buy {n}" if n else "", "label": ("ham", "spam")[n % 2]}
    for n in range(1, 41)
]


def test_label_columns_are_found_and_said(tmp_path):
    task = load_task(DataConfig(write(tmp_path, SETS)), "task")
    assert (task.kind, task.labels) == ("multilabel", ("insult", "toxic"))
    row = task.train.texts.index("comment 29") if "comment 29" in task.train.texts else None
    assert row is None or task.train.targets[row].tolist() == [1.0, 1.0]
    found = [note for note in task.notes if note.startswith("labels: ")]
    assert found[0] == (
        "labels: columns `toxic`, `threat`, `insult` of 0 and 1, found as all other columns, read as sets of labels"
    )
    assert found[1] == "labels: no row has `threat`"


def test_exactly_one_in_each_row_is_one_label(tmp_path):
    path = write(tmp_path, ONE)
    task = load_task(DataConfig(path), "task")
    assert (task.kind, task.labels) == ("classify", ("insult", "threat", "toxic"))
    assert load_task(DataConfig(path, kind="multilabel"), "task").kind == "multilabel"


@pytest.mark.parametrize("spell", [int, bool, float, str, lambda mark: str(bool(mark))])
def test_label_columns_can_be_named(spell):
    rows = [{**row, "length": 7, **{name: spell(row[name]) for name in ("toxic", "insult")}} for row in SETS]
    config = DataConfig(text="comment_text", label="toxic, insult")
    assert make_task(rows, "task", config).labels == ("insult", "toxic")
    numbered = make_task(rows, "task", DataConfig(text="2", label="3,5"))
    assert numbered.digest == make_task(rows, "task", config).digest


def test_dev_rows_and_rows_to_score_are_read_as_the_training_rows(tmp_path):
    train, dev = write(tmp_path, SETS), write(tmp_path, [row for row in SETS if row["toxic"]][:6], "dev.csv")
    task = load_task(DataConfig(train, dev=dev), "task")
    assert task.dev.targets.shape == (6, 2)
    ones = write(tmp_path, [{**row, "threat": 0} for row in SETS[1:5]], "ones.csv")
    split = read_split(ones, task.labels, task.kind)
    assert split.targets.tolist() == [[0.0, 1.0]] * 4


@pytest.mark.parametrize(("cell", "shown"), [(2, "`2`"), ("yes", "`yes`"), (None, "nothing")])
def test_a_cell_that_is_no_mark_is_a_bad_row(tmp_path, cell, shown):
    rows = [dict(row) for row in SETS]
    rows[3]["insult"] = cell
    path = write(tmp_path, rows)
    config = DataConfig(path, text="comment_text", label="toxic,insult")
    with pytest.raises(BadData, match=rf":5: column `insult` holds {shown}, where 0 or 1 should be"):
        load_task(config, "task")
    task = load_task(DataConfig(**{**vars(config), "on_bad_row": "skip"}), "task")
    assert len(task.train) + len(task.dev) == len(SETS) - 1
    assert any("skipped 1 bad row" in note and "line 5" in note for note in task.notes)


def test_lists_of_labels_in_a_column_that_is_named_are_no_spans():
    rows = [{"text": f"t {n}", "mine": ["a", "b"][: n % 2 + 1]} for n in range(40)]
    assert make_task(rows, "task", DataConfig(text="text", label="mine")).labels == ("a", "b")


def test_one_column_of_numbers_is_no_set_of_labels(tmp_path):
    rows = [{"text": f"t {n}", "spam": n % 2} for n in range(20)]
    assert load_task(DataConfig(write(tmp_path, rows)), "task").labels == ("0", "1")
    more = [{**row, "label": "x" if row["spam"] else "y", "seen": 1} for row in rows]
    assert load_task(DataConfig(write(tmp_path, more)), "task").labels == ("x", "y")


def test_texts_are_joined(tmp_path):
    task = load_task(DataConfig(write(tmp_path, MAIL), text="title,body"), "task")
    texts = {*task.train.texts, *task.dev.texts}
    assert {"Offer 3\nbuy 3", "buy 2"} <= texts
    assert "text: columns `title`, `body` joined, each on a line of its own" in task.notes


def test_texts_to_predict_are_joined_and_columns_kept(tmp_path):
    path = write(tmp_path, [*MAIL[:3], {"title": "", "body": "", "label": "ham"}])
    rows = [row for chunk in stream_rows(path, DataConfig(text="title,body"), isolate=True) for row in chunk]
    assert [row.text for row in rows[:3]] == ["Offer 1\nbuy 1", "buy 2", "Offer 3\nbuy 3"]
    assert rows[0].record == {"title": "Offer 1", "body": "buy 1", "label": "spam"}
    assert "empty text in column `title,body`" in rows[3].error.message


def test_a_column_whose_name_has_a_comma_is_one(tmp_path):
    rows = [{"title,body": f"t {n}", "title": "x", "body": "y", "label": n % 2} for n in range(20)]
    task = load_task(DataConfig(write(tmp_path, rows), text="title,body", label="label"), "task")
    assert task.train.texts[0].startswith("t ")


@pytest.mark.parametrize(("setting", "name"), [("text", "title,boddy"), ("label", "toxic,insullt")])
def test_a_part_that_is_not_there_is_named(tmp_path, setting, name):
    path = write(tmp_path, [{**row, **mail} for row, mail in zip(SETS, MAIL, strict=True)])
    with pytest.raises(BadData, match=f"no column named `{name.rpartition(',')[2]}`") as caught:
        load_task(DataConfig(path, **{setting: name}), "task")
    assert "`insult`" in str(caught.value.hint)


def test_mixed_types_in_a_frame_are_bad_rows():
    rows = [{"text": f"t {n}", "label": n % 2} for n in range(20)]
    rows[4]["text"] = ["a", "list"]
    with pytest.raises(BadData, match="rows:5: column `text` holds a list"):
        make_task(rows, "task")
    frame = pd.DataFrame({"text": ["a", 1, 2.5, None, "b", "c"] * 4, "label": ["x", "y", "x", "y", "x", "y"] * 4})
    with pytest.raises(BadData, match="dataframe:4: empty text"):
        make_task(frame, "task")
    task = make_task(frame, "task", DataConfig(on_bad_row="skip"))
    assert {"a", "1", "2.5"} <= {*task.train.texts, *task.dev.texts}


def test_json_lines_may_lack_a_joined_column(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"title": "a", "body": "b"}, {"body": "c"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    read = [row.text for chunk in stream_rows(path, DataConfig(text="title,body")) for row in chunk]
    assert read == ["a\nb", "c"]
