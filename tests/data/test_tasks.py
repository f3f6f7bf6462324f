"""Tasks from files, folders, hubs and frames: what is inferred is said, and what is bad is refused with its line."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from inlay.data import load_task, make_task, read_split
from inlay.data.splits import group_keys
from inlay.data.tasks import cut_task, take_sample
from inlay.errors import BadConfig, BadData, Missing, UnknownName
from inlay.settings.run_config import DataConfig

SPAM = [f"win prize number {n},spam" for n in range(10)] + [f"see you at {n},ham" for n in range(30)]


def write(tmp_path, name, rows, header="text,label"):
    path = tmp_path / name
    path.write_text("\n".join([*([header] if header else []), *rows]) + "\n", encoding="utf8")
    return str(path)


def load(source, **settings):
    return load_task(DataConfig(source=source, **settings), "task")


def refuse(source, error=BadData, **settings):
    with pytest.raises(error) as caught:
        load(source, **settings)
    assert caught.value.hint
    return caught.value


def test_csv_becomes_a_task(tmp_path):
    task = load(write(tmp_path, "sms.csv", SPAM), test_share=0.1)
    assert (task.name, task.kind, task.labels, task.metric) == ("task", "classify", ("ham", "spam"), "accuracy")
    assert (len(task.train), len(task.dev), len(task.test)) == (32, 4, 4)
    assert np.bincount(task.dev.targets).tolist() == [3, 1]
    rows = {line + 2: tuple(row.rsplit(",", 1)) for line, row in enumerate(SPAM)}
    for split in (task.train, task.dev, task.test):
        for text, target, line in zip(split.texts, split.targets, split.lines, strict=True):
            assert rows.pop(line) == (text, task.labels[target])
    assert rows == {}
    assert task.notes == (
        "columns: text `text`, label `label`",
        "kind: classify (inferred), 2 labels: ham (30), spam (10)",
        "split: 32 train, 4 dev, 4 test rows; dev and test made with seed 0, stratified, same texts on one side",
    )


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_every_format_gives_the_same_task(tmp_path, suffix):
    texts, labels = zip(*(row.rsplit(",", 1) for row in SPAM), strict=True)
    path = tmp_path / f"sms.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps({"text": t, "label": y}) + "\n" for t, y in zip(texts, labels, strict=True)))
    elif suffix == "parquet":
        pd.DataFrame({"text": texts, "label": labels}).to_parquet(path)
    else:
        separator = "," if suffix == "csv" else "\t"
        path.write_text(
            f"text{separator}label\n" + "".join(f"{t}{separator}{y}\n" for t, y in zip(texts, labels, strict=True))
        )
    task, frame_task = load(str(path)), make_task(pd.DataFrame({"text": texts, "label": labels}), "other")
    assert task.digest == frame_task.digest
    assert task.dev_digest == frame_task.dev_digest
    assert task.digest != task.dev_digest


def test_digest_covers_rows_labels_and_metric_but_not_the_place(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    base = load(write(tmp_path, "a.csv", SPAM))
    assert load(write(tmp_path / "elsewhere", "b.csv", SPAM)).digest == base.digest
    changed = [SPAM[0].replace("spam", "ham"), *SPAM[1:]]
    for other in (
        load(write(tmp_path, "c.csv", changed)),
        load(write(tmp_path, "d.csv", [SPAM[0].replace("win", "won"), *SPAM[1:]])),
        load(write(tmp_path, "a.csv", SPAM), labels=("spam", "ham")),
        load(write(tmp_path, "a.csv", SPAM), metric="f1"),
        load(write(tmp_path, "a.csv", SPAM), split_seed=1),
        load(write(tmp_path, "a.csv", SPAM), limit=20),
    ):
        assert other.digest != base.digest


def test_dev_digest_only_follows_the_dev_rows_and_what_scores_mean(tmp_path):
    dev = write(tmp_path, "dev.csv", ["hello,ham", "prize,spam"])
    base = load(write(tmp_path, "a.csv", SPAM), dev=dev)
    assert load(write(tmp_path, "b.csv", SPAM[1:]), dev=dev).dev_digest == base.dev_digest
    assert load(write(tmp_path, "a.csv", SPAM), dev=dev, metric="f1").dev_digest != base.dev_digest
    other = write(tmp_path, "dev2.csv", ["hello,ham", "prize!,spam"])
    assert load(write(tmp_path, "a.csv", SPAM), dev=other).dev_digest != base.dev_digest


def test_text_and_pair_cannot_change_places_in_the_digest(tmp_path):
    first = load(write(tmp_path, "a.csv", ["a,b c,x", "d,e,y", "f,g,x", "h,i,y"], "text,pair,label"))
    second = load(write(tmp_path, "b.csv", ["a b,c,x", "d,e,y", "f,g,x", "h,i,y"], "text,pair,label"))
    assert first.digest != second.digest


def test_equal_texts_stay_on_one_side_and_conflicts_are_reported(tmp_path):
    rows = [f"text {n % 20},{'x' if n % 2 else 'y'}" for n in range(60)] + ["Text  3,y"]
    task = load(write(tmp_path, "a.csv", rows), dev_share=0.3)
    train, dev = (set(group_keys(split.texts, None)) for split in (task.train, task.dev))
    assert not train & dev
    assert len(train | dev) == 20
    assert "41 rows repeat the text of an earlier row" in task.notes
    assert "1 text has conflicting labels, such as in lines 5 and 62" in task.notes


def test_split_is_the_same_every_time_and_follows_its_seed(tmp_path):
    path = write(tmp_path, "a.csv", SPAM)
    assert load(path).dev.lines == load(path).dev.lines
    assert load(path).dev.lines != load(path, split_seed=1).dev.lines


def test_given_dev_and_test_files_are_used_whole(tmp_path):
    dev, test = write(tmp_path, "d.csv", ["new,ham", "see you at 3,ham"]), write(tmp_path, "t.csv", ["old,spam"])
    task = load(write(tmp_path, "a.csv", SPAM), dev=dev, test=test)
    assert (len(task.train), task.dev.texts, task.test.texts) == (40, ["new", "see you at 3"], ["old"])
    assert "1 of 2 dev texts are also in the training rows" in task.notes
    assert not any(note.startswith("split") for note in task.notes)


def test_folder_gives_its_sides(tmp_path):
    write(tmp_path, "train.csv", SPAM)
    write(tmp_path, "val.csv", ["new,ham"])
    write(tmp_path, "test.csv", ["old"], header="text")
    task = load(str(tmp_path))
    assert (len(task.train), task.dev.texts, task.test) == (40, ["new"], None)
    assert any("test.csv have no labels: left out" in note for note in task.notes)
    (tmp_path / "train.csv").unlink()
    assert "no train rows" in refuse(str(tmp_path), Missing).message


def test_test_side_may_be_cut_while_dev_is_given(tmp_path):
    task = load(write(tmp_path, "a.csv", SPAM), dev=write(tmp_path, "d.csv", ["new,ham"]), test_share=0.2)
    assert (len(task.train), len(task.dev), len(task.test)) == (32, 1, 8)


def test_split_column_decides(tmp_path):
    words = ["training", "Dev", "test", "train", "valid", "val"]
    rows = [f"text {n},{'xy'[n % 4 // 2]},{words[n % 6]}" for n in range(24)]
    path = write(tmp_path, "a.csv", rows, "text,label,split")
    task = load(path)
    assert [len(task.train), len(task.dev), len(task.test)] == [8, 12, 4]
    assert task.test.lines == [4, 10, 16, 22]
    assert "split `split`" in task.notes[0]
    assert "both by column `split`" in refuse(path, BadConfig, dev=write(tmp_path, "d.csv", ["a,x"])).message
    renamed = write(tmp_path, "b.csv", rows, "text,label,part")
    assert load(renamed, split="part").digest == task.digest


def test_column_called_split_with_other_words_is_no_split(tmp_path):
    rows = [f"text {n},{'xy'[n % 2]},part {n}" for n in range(20)]
    path = write(tmp_path, "a.csv", rows, "text,label,split")
    assert len(load(path).dev) == 2
    error = refuse(path, split="split")
    assert (error.line, error.reason) == (2, "`part 0` in column `split` is not a side")


def test_limit_takes_a_seeded_sample_of_the_training_rows(tmp_path):
    path = write(tmp_path, "a.csv", SPAM)
    whole, some, fewer = load(path), load(path, limit=10), load(path, limit=5)
    assert (len(some.train), some.train.lines) == (10, sorted(some.train.lines))
    assert set(fewer.train.lines) < set(some.train.lines) < set(whole.train.lines)
    assert some.dev_digest == whole.dev_digest
    assert "training on 10 of 36 rows (limit, seed 0)" in some.notes


def test_numbers_become_a_regress_task(tmp_path):
    task = load(write(tmp_path, "a.csv", [f"text {n},{n / 4}" for n in range(40)], "text,score"))
    assert (task.kind, task.labels, task.metric) == ("regress", (), "spearman")
    assert task.train.targets.dtype == np.float64
    assert "kind: regress (inferred), targets from 0 to 9.75" in task.notes
    assert task.dev.targets.min() < 5 < task.dev.targets.max()
    assert load(write(tmp_path, "b.csv", SPAM[:2] * 2 + SPAM[-4:]), kind="classify").kind == "classify"


def test_lists_become_a_multilabel_task():
    frame = pd.DataFrame({"text": [f"t{n}" for n in range(20)], "labels": [["a", "b"], ["c"], [], ["a"]] * 5})
    task = make_task(frame, "topics")
    assert (task.kind, task.labels, task.metric) == ("multilabel", ("a", "b", "c"), "micro_f1")
    assert (task.train.targets.dtype, task.train.targets.shape) == (np.float32, (18, 3))
    by_text = dict(zip(task.train.texts, task.train.targets.tolist(), strict=True))
    assert [by_text.get("t0", [1, 1, 0]), by_text.get("t6", [0, 0, 0])] == [[1, 1, 0], [0, 0, 0]]


def test_joined_labels_need_the_kind_to_be_said(tmp_path):
    path = write(tmp_path, "a.csv", ["one,a|b", "two,b", "three,a", "four,a|b"] * 5)
    assert load(path, dev_share=0.25).labels == ("a", "a|b", "b")
    task = load(path, kind="multilabel", dev_share=0.25)
    assert task.labels == ("a", "b")
    assert any("separated by `|`" in note for note in task.notes)


@pytest.mark.parametrize(
    ("rows", "settings", "line", "reason"),
    [
        (["a,x", ",y"], {}, 3, "empty text in column `text`"),
        (["a,x", "b,", "c,y"], {}, 3, "missing label"),
        ([f"t{n},name {n}" for n in range(30)], {}, None, "30 of 30 rows have a label that no other row has"),
        (["a,x", "b,y"], {}, None, "too few different texts to split off dev rows"),
        (["a,1.5", "b,2.5", "c,many"], {"kind": "regress"}, 4, "non-numeric target `many`"),
        ([f"t{n},{n}.5" for n in range(15)] + ["c,NA"], {}, 17, "non-numeric target `NA`"),
        (["a,x", "b,y,z"], {}, 3, "ragged row: 3 fields, but there are 2 columns"),
        (["a,x", "b,y"] * 2, {"labels": ("x", "z")}, 3, "unseen label `y`"),
        (["a,x", "b,x"], {}, None, "every row has the label `x`"),
        (["a,x", "a,y"] * 2, {}, None, "too few different texts to split off dev rows"),
        ([], {}, None, "the file has no rows"),
        (["a,x", "b,y"] * 2, {"text": "body"}, 1, "no column named `body`"),
    ],
)
def test_bad_input_is_refused_with_file_line_and_reason(tmp_path, rows, settings, line, reason):
    path = write(tmp_path, "a.csv", rows)
    error = refuse(path, **settings)
    assert (error.reason, error.line, str(error.path)) == (reason, line, path)


@pytest.mark.parametrize("policy", ["refuse", "skip"])
def test_unseen_label_of_a_given_side_is_kept_and_named(tmp_path, policy):
    dev = write(tmp_path, "dev.csv", ["a,ham", "b,eggs", "c,fish", "d,fish"])
    task = load(write(tmp_path, "a.csv", SPAM), dev=dev, on_bad_row=policy)
    assert (task.labels, task.dev.unseen) == (("ham", "spam"), ("eggs", "fish"))
    assert (task.dev.texts, task.dev.targets.tolist()) == (list("abcd"), [0, 2, 3, 3])
    assert (
        f"{dev} has 2 labels that training never saw, counted as wrong rows: "
        "`fish` (2 rows, first on line 4), `eggs` (1 row, first on line 3)"
    ) in task.notes
    other = load(write(tmp_path, "a.csv", SPAM), dev=write(tmp_path, "e.csv", ["a,ham", "b,eels", "c,fish", "d,fish"]))
    assert other.dev_digest != task.dev_digest, "the names of unseen labels are part of what was read"


def test_a_file_of_unseen_labels_alone_is_refused(tmp_path):
    dev = write(tmp_path, "dev.csv", ["a,eggs", "b,fish"])
    error = refuse(write(tmp_path, "a.csv", SPAM), dev=dev)
    assert error.reason == "no row has a label of the task; their labels are `eggs`, `fish`"
    assert error.hint == "name the label column with `--label`; the task's labels are ham, spam"
    assert error.path == dev


def test_dev_file_without_a_needed_column_is_refused(tmp_path):
    path = write(tmp_path, "a.csv", SPAM)
    assert "no label column recognised" in refuse(path, dev=write(tmp_path, "d.csv", ["a"], "text")).reason
    pairs = write(tmp_path, "p.csv", ["a,b,x", "c,d,y"] * 2, "sentence1,sentence2,label")
    assert "no pairs, unlike the training rows" in refuse(pairs, dev=path).reason


def test_bad_rows_are_skipped_counted_and_reported(tmp_path):
    rows = [*SPAM, ",ham", "no label,", "too,many,fields", "lonely,eggs", " ,spam"]
    task = load(write(tmp_path, "a.csv", rows), on_bad_row="skip")
    assert (len(task.train) + len(task.dev), task.labels) == (40, ("ham", "spam"))
    (note,) = (note for note in task.notes if note.startswith("skipped"))
    assert note.startswith("skipped 5 bad rows of ")
    assert note.endswith(
        "line 42: empty text in column `text`; line 43: missing label; "
        "line 44: ragged row: 3 fields, but there are 2 columns; and 2 more"
    )


def test_file_of_nothing_but_bad_rows_is_refused_even_when_skipping(tmp_path):
    assert refuse(write(tmp_path, "a.csv", [",x", ",y"]), on_bad_row="skip").reason.startswith("no usable")


def test_dev_rows_must_come_from_somewhere(tmp_path):
    assert "--dev" in refuse(write(tmp_path, "a.csv", SPAM), BadConfig, dev_share=0.0).hint
    assert "glue/NAME" in refuse("", BadConfig).hint


def test_encoding_is_noted_with_the_task(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"text,label\n" + "\n".join(f"café {n},{'xy'[n % 2]}" for n in range(9)).encode("latin-1"))
    task = load(str(path))
    assert any("read as latin-1" in note for note in task.notes)
    assert any(text.startswith("café") for text in task.train.texts)
    assert "wrong encoding: not utf-8" in refuse(str(path), encoding="utf-8").reason


def test_frame_rows_are_named_in_messages():
    frame = pd.DataFrame({"text": ["a", "b", None], "label": [1, 0, 1]})
    with pytest.raises(BadData, match="dataframe:3: empty text"):
        make_task(frame, "x")
    with pytest.raises(BadData, match="dataframe:2: missing label"):
        make_task(pd.DataFrame({"text": ["a", "b", "c"], "label": [1, np.nan, 1]}), "x")
    with pytest.raises(BadData, match="no rows"):
        make_task(pd.DataFrame({"text": [], "label": []}), "x")
    with pytest.raises(BadData, match="dataframe: no label column recognised"):
        make_task(pd.DataFrame({"text": ["a"], "b": [1], "c": [2]}), "x")


def test_frame_of_categories_and_gaps_names_labels_plainly():
    frame = pd.DataFrame({"text": list("abcdef"), "label": [1, 0, None, 1, 0, 1]})
    assert make_task(frame, "x", DataConfig(on_bad_row="skip")).labels == ("0", "1")
    frame["label"] = pd.Categorical(["u", "v"] * 3)
    assert make_task(frame, "x").labels == ("u", "v")


def test_hub_dataset_becomes_a_task(monkeypatch):
    class Part(dict):
        features = {"text": None, "label": SimpleNamespace(names=["neg", "pos"])}
        column_names = ["text", "label"]

    parts = {
        "train": Part(text=["a", "b"], label=[0, 1]),
        "validation": Part(text=["c"], label=[1]),
        "test": Part(text=["d"], label=[-1]),
    }
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *arguments: parts))
    task = load("hub:some/name")
    assert (task.labels, task.dev.texts, task.dev.targets.tolist(), task.test) == (("neg", "pos"), ["c"], [1], None)


def test_rows_to_evaluate_use_the_labels_of_the_task(tmp_path):
    path = write(tmp_path, "new.csv", ["a,spam", "b,ham"])
    split = read_split(path, ("spam", "ham"), "classify")
    assert (split.texts, split.targets.tolist(), split.lines) == (["a", "b"], [0, 1], [2, 3])
    wrong = read_split(path, ("ham", "eggs"), "classify")
    assert (wrong.texts, wrong.targets.tolist(), wrong.unseen) == (["a", "b"], [2, 0], ("spam",))
    assert any("`spam` (1 row, first on line 2)" in note for note in wrong.notes)
    with pytest.raises(BadData, match=r"new\.csv: no row has a label of the task; their labels are `ham`, `spam`"):
        read_split(path, ("fish", "eggs"), "classify")
    with pytest.raises(BadData, match=r"new\.csv:2: non-numeric target `spam`"):
        read_split(path, (), "regress")
    with pytest.raises(BadData, match=r"no column named `mood`.*`text`, `label`"):
        read_split(path, ("x", "y"), "classify", DataConfig(label="mood"))


def test_evaluation_prefers_held_out_rows(tmp_path):
    rows = [f"text {n},{'xy'[n % 2]},{('train', 'dev', 'test')[n % 3]}" for n in range(12)]
    split = read_split(write(tmp_path, "a.csv", rows, "text,label,split"), ("x", "y"), "classify")
    assert split.lines == [4, 7, 10, 13]
    assert split.notes[-1].startswith("evaluated on 4 of 12 rows")
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder, "train.csv", ["a,x", "b,y"])
    with pytest.raises(Missing, match="no labelled dev or test rows"):
        read_split(folder, ("x", "y"), "classify")
    write(folder, "dev.csv", ["c,x"])
    write(folder, "test.csv", ["d"], header="text")
    assert read_split(folder, ("x", "y"), "classify").texts == ["c"]
    write(folder, "test.csv", ["d,y"])
    assert read_split(folder, ("x", "y"), "classify").texts == ["d"]


def test_split_can_be_taken_by_rows(tmp_path):
    rows = [f"a {n},b {n},{'xy'[n % 2]}" for n in range(10)]
    task = load(write(tmp_path, "a.csv", rows, "sentence1,sentence2,label"))
    taken = task.train.take([2, 0])
    assert taken.pairs == [task.train.pairs[2], task.train.pairs[0]]
    assert taken.lines == [task.train.lines[2], task.train.lines[0]]
    assert taken.targets.tolist() == task.train.targets[[2, 0]].tolist()


def test_importing_the_data_room_stays_light():
    heavy = "torch transformers pandas pyarrow sklearn scipy datasets".split()
    code = (
        f"import sys, inlay.data.encode, inlay.data.metrics; print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_sample_is_drawn_by_its_seed_and_is_another_task(tmp_path):
    task = load(write(tmp_path, "a.csv", SPAM))
    first, again, other = (take_sample(task, 10, seed) for seed in (0, 0, 1))
    assert len(first.train) == 10
    assert first.train.texts == again.train.texts
    assert first.train.texts != other.train.texts
    assert first.digest == again.digest != other.digest
    assert first.dev_digest == task.dev_digest
    assert set(first.train.texts) <= set(task.train.texts)
    assert take_sample(task, 10_000, 0) is task


def test_dev_and_test_rows_may_be_cut_and_that_is_noted(tmp_path):
    task = load(write(tmp_path, "a.csv", SPAM), test_share=0.2)
    few = cut_task(task, {"dev": 3, "test": 4})
    assert (len(few.dev), len(few.test), len(few.train)) == (3, 4, len(task.train))
    assert few.notes[-1] == f"3 of {len(task.dev)} dev rows, 4 of {len(task.test)} test rows"
    assert few.dev_digest != task.dev_digest
    assert cut_task(task, {"dev": 10_000}) is task


def test_test_rows_may_be_cut_from_given_dev_rows(tmp_path):
    dev = write(tmp_path, "d.csv", [f"new text {row},{'ham' if row % 2 else 'spam'}" for row in range(20)])
    source = write(tmp_path, "a.csv", SPAM)
    task = load(source, dev=dev, test_share=0.5, test_from="dev")
    assert (len(task.dev), len(task.test)) == (10, 10)
    assert len(task.train) == len(load(source, dev=dev).train)
    assert not set(task.dev.texts) & set(task.test.texts)
    with pytest.raises(BadConfig, match=r"`data\.test_from` is `dev`"):
        load(source, test_share=0.5, test_from="dev")


def test_what_settings_draw_is_what_a_study_draws(tmp_path):
    rows = "".join(f"text number {number},{'ab'[number % 2]}\n" for number in range(60))
    (tmp_path / "rows.csv").write_text("text,label\n" + rows)
    config = DataConfig(source=str(tmp_path / "rows.csv"), dev_share=0.2, test_share=0.2)
    drawn = load_task(dataclasses.replace(config, sample=9, sample_seed=4, most_dev=5, most_test=6), "rows")
    expected = take_sample(cut_task(load_task(config, "rows"), {"dev": 5, "test": 6}), 9, 4)
    assert drawn.digest == expected.digest
    assert (len(drawn.train), len(drawn.dev), len(drawn.test)) == (9, 5, 6)


def test_what_is_written_for_labels_is_part_of_what_a_task_learns_and_not_of_what_judges_it(tmp_path):
    path = write(tmp_path, "sms.csv", SPAM)
    plain, named = load(path), load(path, answers=("spam=1", "ham=0"))
    assert (plain.written, named.written) == (("ham", "spam"), ("0", "1"))
    assert named.digest != plain.digest
    assert named.dev_digest == plain.dev_digest
    assert take_sample(named, 4, 0).written == ("0", "1")
    assert take_sample(named, 4, 0).digest != take_sample(plain, 4, 0).digest
    assert load(path, answers=("spam=spam",)).digest == plain.digest
    assert load(path, answers=("spam=junk",)).written == ("ham", "junk")


def test_answers_that_cannot_be_told_apart_or_are_of_no_label_are_refused(tmp_path):
    path = write(tmp_path, "sms.csv", SPAM)
    assert "writes `ham` for 2 of the labels ham, spam" in refuse(path, BadConfig, answers=("spam=ham",)).message
    assert "`sapm`" in refuse(path, UnknownName, answers=("sapm=1",)).message
    numbers = write(tmp_path, "numbers.csv", [f"text {n},{n / 7}" for n in range(40)])
    assert "for a `regress` task" in refuse(numbers, BadConfig, answers=("1=2",)).message
    odd = write(tmp_path, "odd.csv", [f"text {n},{'a=b' if n % 2 else 'a'}" for n in range(40)])
    assert load(odd, answers=("a=x", "a=b=y")).written == ("x", "y")


@pytest.mark.parametrize("label", ['"\\udc80am"', '["a", "\\ud83d"]'])
def test_half_a_character_in_a_label_is_the_error_of_its_row(label, tmp_path):
    rows = [
        f'{{"text": "row {row}", "label": {"[" * (label[0] == "[")}"{"ab"[row % 2]}"{"]" * (label[0] == "[")}}}'
        for row in range(20)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*rows, f'{{"text": "bad", "label": {label}}}']))
    with pytest.raises(BadData, match=r"a\.jsonl:21: half a character \(a lone surrogate\) in column `label`"):
        load_task(DataConfig(source=str(path)), "t")
    assert load_task(DataConfig(source=str(path), on_bad_row="skip"), "t").labels == ("a", "b")
