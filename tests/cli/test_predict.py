"""`predict` and `evaluate`: texts, lines, files of mixed tasks, bad rows, and scores with intervals."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import SETTINGS, Inlay, Mail, write_mail

MIXED = """id,task,text,label
1,mail,free prize,spam
2,post,"the cat, sat",ham
3,nope,hello,ham
4,mail,,ham
5,,now,ham
"""


@pytest.fixture
def mixed(inlay: Inlay, mail: Mail, tmp_path: Path) -> Path:
    """A file whose rows ask two tasks, one that is not there, and none; one row has no text."""
    inlay("export", "mail", "mail.inlay")
    inlay("import", "mail.inlay", "--name", "post")
    path = tmp_path / "mixed.csv"
    path.write_text(MIXED)
    return path


def test_predict_answers_texts_with_probabilities(inlay: Inlay, mail: Mail) -> None:
    ended = inlay("predict", "mail", "free prize now", "see you home", "--json")
    assert ended.status == 0
    assert [line["text"] for line in ended.lines] == ["free prize now", "see you home"]
    for line in ended.lines:
        assert line["version"] == "mail@1"
        assert sum(line["probabilities"].values()) == pytest.approx(1)
        assert line["probability"] == max(line["probabilities"].values()) == line["probabilities"][line["label"]]
    shown = inlay("predict", "mail", "free prize now").out
    assert shown == f"{ended.lines[0]['label']}  {ended.lines[0]['probability']:.4f}  free prize now\n"


def test_columns_joined_in_training_are_joined_in_use(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    rows = list(csv.reader(mail.data.read_text().splitlines()))[1:]
    lines = [["title", "body", "label"], *([text.split()[0], text, label] for text, label in rows)]
    for name, columns in (("both.csv", (0, 1, 2)), ("body.csv", (1, 2))):
        (tmp_path / name).write_text("".join(",".join(line[place] for place in columns) + "\n" for line in lines))
    (tmp_path / "plain.csv").write_text("".join(f"{line[0]}\n" for line in [["text"], *rows]))
    options = ("--backbone", mail.backbone, *SETTINGS)
    assert inlay("train", "both.csv", "--task", "joined", "--text", "title,body", *options).status == 0
    given = inlay("predict", "joined", "--input", "both.csv", "--text", "title,body").out
    assert inlay("predict", "joined", "--input", "both.csv").out == given
    assert inlay("predict", "joined", "--input", "both.csv", "--text", "body").out != given
    scores = inlay("evaluate", "joined", "both.csv", "--text", "title,body", "--json").data["metrics"]
    assert inlay("evaluate", "joined", "both.csv", "--json").data["metrics"] == scores
    for command in (("predict", "joined", "--input", "body.csv"), ("evaluate", "joined", "body.csv")):
        refused = inlay(*command)
        assert refused.status == 4
        assert "no column named `title`" in refused.err
        assert "`title,body` joined" in refused.err
    assert inlay("predict", "joined", "--input", "plain.csv").status == 0  # no column of them: the usual one is read
    mixed = inlay("predict", "joined,mail", "--input", "both.csv")
    assert (mixed.status, "read other columns" in mixed.err) == (2, True)


def test_an_error_about_one_text_is_said_once_and_an_empty_stdin_too(
    inlay: Inlay, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = inlay("predict", "mail", "free", "--pair", "prize")
    assert refused.status == 4
    assert refused.err.count("but task `mail`") == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "stdin has no lines" in inlay("predict", "mail").err


def test_evaluate_gives_no_interval_where_every_draw_scores_the_same(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    own = inlay("predict", "mail", "free prize", "--json").lines[0]["label"]
    (tmp_path / "right.csv").write_text(f"text,label\nfree prize,{own}\nfree prize now,{own}\n")
    shown = inlay("evaluate", "mail", "right.csv").out
    assert "accuracy 1.0000  (95% interval 0." in shown
    assert "(95% interval 1.0000 to 1.0000)" not in shown


def test_evaluate_says_that_rows_are_those_of_training(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    note = "most dev rows of `mail@1` are among these"
    assert note in inlay("evaluate", "mail", mail.data).err
    assert note not in inlay("evaluate", "mail", write_mail(tmp_path / "other.csv", seed=5)).err


def test_several_tasks_each_answer_every_text(inlay: Inlay, mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {
        task: inlay("predict", task, "free prize now", "see you home").out.splitlines() for task in ("mail", "post")
    }
    shown = inlay("predict", "mail, post", "free prize now", "see you home").out.splitlines()
    assert shown == [f"{task}  {alone[task][text]}" for text in range(2) for task in ("mail", "post")]
    lines = inlay("predict", "mail,post", "free prize now", "--json").lines
    assert [(line["text"], line["task"], line["version"]) for line in lines] == [
        ("free prize now", task, f"{task}@1") for task in ("mail", "post")
    ]
    inlay("predict", "mail,post", "--input", mixed, "--output", "out.csv")
    with Path("out.csv").open(newline="") as file:
        rows = [(row["id"], row["task"], bool(row["error"])) for row in csv.DictReader(file)]
    own = [("1", "mail", False), ("2", "post", False), ("3", "nope", True), ("4", "mail", True)]
    assert rows == [*own, ("5", "mail", False), ("5", "post", False)]  # the row that names no task
    bad = inlay("predict", "mail,nope", "free prize now")
    assert bad.status == 3


def test_predict_reads_lines_from_stdin(inlay: Inlay, mail: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("free prize\n\nsee you\n"))
    ended = inlay("predict", "mail", "--json")
    assert [line["text"] for line in ended.lines] == ["free prize", "see you"]


def test_predict_file_answers_mixed_tasks_and_marks_bad_rows(inlay: Inlay, mixed: Path) -> None:
    ended = inlay("predict", "--input", mixed, "--output", "out.csv")
    assert ended.status == 0, "some rows were answered"
    assert "5 rows in " in ended.err
    assert "3 failed" in ended.err
    with Path("out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == list("12345")
    assert rows[1]["text"] == "the cat, sat"
    assert [row["label"] for row in rows] == ["spam", "ham", "ham", "ham", "ham"], "the input's own column is kept"
    for row in rows[:2]:
        assert row["predicted_label"] in ("ham", "spam")
        assert 0.5 <= float(row["probability"]) <= 1
        assert row["error"] == ""
    assert [row["predicted_label"] for row in rows[2:]] == ["", "", ""]
    assert "no task named `nope`" in rows[2]["error"]
    assert f"{mixed}:4: no task named" in rows[2]["error"]
    assert f"{mixed}:5: empty text" in rows[3]["error"]
    assert f"{mixed}:6: the row names no task" in rows[4]["error"]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_predict_gives_the_same_labels_in_every_format(inlay: Inlay, mixed: Path, suffix: str) -> None:
    expected = [line.get("predicted_label") for line in inlay("predict", "mail", "--input", mixed, "--json").lines]
    assert inlay("predict", "mail", "--input", mixed, "--output", f"out.{suffix}").status == 0
    lines = Path(f"out.{suffix}").read_text().splitlines()
    if suffix == "jsonl":
        found = [json.loads(line).get("predicted_label") for line in lines]
    else:
        found = [row["predicted_label"] or None for row in csv.DictReader(lines, delimiter="\t,"[suffix == "csv"])]
    assert found == expected
    assert found[4] in ("ham", "spam"), "a row that names no task is answered by TASK"


def test_columns_that_come_late_are_kept_in_json_lines_and_named_where_a_table_drops_them(
    inlay: Inlay, mail: Mail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inlay.cli.predict.WINDOW_ROWS", 512)
    lines = ['{"text": "now"}'] * 600 + ['{"text": "now", "colour": "red"}', "{broken"]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    ended = inlay("predict", "mail", "--input", "in.jsonl", "--output", "out.csv")
    assert ended.status == 0
    assert "left out columns that the first rows do not have: `colour`" in ended.err
    with Path("out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 602
    assert "in.jsonl:602: not JSON" in rows[-1]["error"]
    answers = inlay("predict", "mail", "--input", "in.jsonl").lines
    assert answers[600]["colour"] == "red"
    assert answers[601]["error"]["message"].endswith("in column 2, near `{broken`")
    assert answers[601]["error"]["hint"] == "one object in each line; fix the row"  # `predict` leaves no row out


def test_predict_does_not_depend_on_the_rows_beside(inlay: Inlay, mixed: Path) -> None:
    together = inlay("predict", "--input", mixed, "--json").lines
    alone = inlay("predict", "post", "the cat, sat", "--json").lines[0]
    assert together[1]["probability"] == pytest.approx(alone["probability"], abs=1e-5)


def test_strict_predict_fails_on_any_bad_row_but_writes_the_file(inlay: Inlay, mixed: Path) -> None:
    ended = inlay("predict", "--input", mixed, "--output", "out.jsonl", "--strict")
    assert ended.status == 4
    assert "3 of 5 rows failed" in ended.err
    assert len(Path("out.jsonl").read_text().splitlines()) == 5


def test_predict_fails_when_every_row_does(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a", "task": "nope"}\n{"text": "b", "task": "nope"}\n')
    assert inlay("predict", "--input", "bad.jsonl").status == 4
    assert inlay("predict", "mail", " ").status == 4


def test_pairs_in_a_file_for_a_task_of_single_texts_fail_naming_the_option(
    inlay: Inlay, mail: Mail, tmp_path: Path
) -> None:
    (tmp_path / "pair.csv").write_text("premise,hypothesis\nfree prize,now\nsee you,home\n")
    ended = inlay("predict", "mail", "--input", "pair.csv")
    assert ended.status == 4
    assert "2 of 2 rows failed, first: pair.csv:2: the row is a pair" in ended.err
    assert "hint: name the text's column with `--text COLUMN`" in ended.err
    assert inlay("predict", "mail", "--input", "pair.csv", "--text", "premise", "--strict").status == 0


def test_a_quote_that_never_ends_fails_the_whole_file(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('text\nfree\n"prize\n' + "now\n" * 50)
    ended = inlay("predict", "mail", "--input", "in.csv", "--output", "out.csv")
    assert ended.status == 4
    assert "in.csv:3: a quoted field never ends: lines 3–53" in ended.err
    assert not Path("out.csv").exists()


def test_failed_predict_leaves_no_file(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    (tmp_path / "two.csv").write_text("a,b\n1,2\n")
    ended = inlay("predict", "mail", "--input", "two.csv", "--output", "out.csv")
    assert ended.status == 4
    assert "no text column recognised" in ended.err
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("mial", "text"), 3, "did you mean `mail`?"),
        (("mail@7", "text"), 3, "versions of `mail`: 1"),
        ((), 2, "no task to ask"),
        (("mail", "text", "--pair", "second"), 4, "leave out the second text"),
        (("mail", "a", "b", "--pair", "second"), 2, "once for each text"),
        (("mail", "--pair", "second"), 2, "text<TAB>pair"),
        (("mail", "--input", "-", "--pair", "second"), 2, "text<TAB>pair"),
        (("mail", "text", "--input", "x.csv"), 2, "exclude each other"),
        (("mail", "--input", "x.csv"), 9, "no file or folder `x.csv`"),
        (("mail", "--input", "x.csv", "--output", "x.pdf"), 2, ".jsonl"),
    ],
)
def test_predict_refuses_what_cannot_be_asked(
    inlay: Inlay, mail: Mail, arguments: tuple[str, ...], status: int, words: str
) -> None:
    ended = inlay("predict", *arguments)
    assert (ended.status, ended.out) == (status, "")
    assert "error: " in ended.err
    assert words in ended.err
    assert "Traceback" not in ended.err


def test_predict_on_a_missing_terminal_text_says_how(inlay: Inlay, mail: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    ended = inlay("predict", "mail")
    assert ended.status == 2
    assert 'inlay predict mail "a text"' in ended.err


def test_version_on_another_backbone_is_refused_naming_both(inlay: Inlay, mail: Mail, backbone_folder) -> None:
    ended = inlay("predict", "mail", "text", "--backbone", backbone_folder("electra"))
    assert ended.status == 6
    assert str(mail.backbone) in ended.err
    assert "electra" in ended.err


def test_evaluate_reports_intervals_labels_and_confusion(inlay: Inlay, mail: Mail) -> None:
    data = inlay("evaluate", "mail", mail.data, "--json").data
    accuracy = data["metrics"]["accuracy"]
    assert accuracy["low"] <= accuracy["value"] <= accuracy["high"]
    assert [item["label"] for item in data["labels"]] == ["ham", "spam"]
    assert sum(map(sum, data["confusion"])) == data["num_rows"] == 80
    right = sum(data["confusion"][i][i] for i in range(2))
    assert accuracy["value"] == pytest.approx(right / 80)
    text = inlay("evaluate", "mail", mail.data).out
    assert text.startswith(f"accuracy {accuracy['value']:.4f}  (95% interval ")
    assert "precision" in text
    assert "true \\ predicted" in text


def test_evaluate_writes_the_rows_it_got_wrong(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    flipped = tmp_path / "flipped.csv"  # half the labels turned round, so that there is something wrong for certain
    swap = {"ham": "spam", "spam": "ham"}
    with mail.data.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with flipped.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([row["text"], swap[row["label"]] if n % 4 < 2 else row["label"]] for n, row in enumerate(rows))
    data = inlay("evaluate", "mail", flipped, "--errors", "wrong.csv", "--json").data
    with Path("wrong.csv").open(newline="") as file:
        wrong = list(csv.DictReader(file))
    assert len(wrong) == data["num_rows"] - sum(data["confusion"][i][i] for i in range(2)) > 0
    lines = flipped.read_text().splitlines()
    for row in wrong:
        assert lines[int(row["line"]) - 1] == f"{row['text']},{row['label']}"
        assert row["predicted"] != row["label"]
        assert 0.5 <= float(row["probability"]) <= 1


def test_outputs_that_are_not_finite_are_neither_answered_nor_judged(inlay: Inlay, mail: Mail) -> None:
    import torch

    from inlay.store import Store

    store = Store(mail.store)
    loaded = store.load(store.resolve("mail"))
    store.publish("lost", {**loaded.tensors, "head.bias": torch.full((2,), torch.nan)}, loaded.manifest)
    ended = inlay("predict", "lost", "free prize")
    assert ended.status == 12
    assert "the outputs of `lost@1` are not finite for this text" in ended.err
    assert "ham" not in ended.out
    ended = inlay("evaluate", "lost", mail.data)
    assert ended.status == 12
    assert "the outputs of `lost@1` are not finite for 80 of 80 rows, the first on line 2" in ended.err
    assert not ended.out


def test_evaluate_counts_a_label_not_seen_in_training_as_wrong(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    (tmp_path / "known.csv").write_text("text,label\nfree,spam\nhome,ham\n")
    known = inlay("evaluate", "mail", "known.csv", "--json").data
    (tmp_path / "odd.csv").write_text("text,label\nfree,spam\nhome,ham\nnow,eggs\ncat,eggs\n")
    ended = inlay("evaluate", "mail", "odd.csv", "--json", "--errors", "wrong.csv")
    assert ended.status == 0
    note = "odd.csv has 1 label that training never saw, counted as wrong rows: `eggs` (2 rows, first on line 4)"
    assert note in ended.err
    assert note in ended.data["notes"]
    assert ended.data["metrics"]["accuracy"]["value"] == known["metrics"]["accuracy"]["value"] / 2
    assert ended.data["unseen"] == ["eggs"]
    eggs = ended.data["labels"][-1]
    assert (eggs["label"], eggs["recall"], eggs["f1"], eggs["support"]) == ("eggs", 0, 0, 2)
    assert [sum(row) for row in ended.data["confusion"]] == [1, 1, 2]
    with open("wrong.csv", newline="") as file:
        assert [row["label"] for row in csv.DictReader(file)][-2:] == ["eggs", "eggs"]
    shown = inlay("evaluate", "mail", "odd.csv", "--on-bad-row", "skip", "--min-confidence", 0.01).out
    row = next(line.split() for line in shown.splitlines() if line.startswith("eggs"))
    assert row[:4] == ["eggs", "0.0000", "0.0000", "0.0000"]


def test_evaluate_refuses_a_file_with_no_label_of_the_task(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_text("text,label\nfree,eggs\nhome,fish\n")
    ended = inlay("evaluate", "mail", "odd.csv")
    assert ended.status == 4
    assert "odd.csv: no row has a label of the task; their labels are `eggs`, `fish`" in ended.err
    assert "--label" in ended.err


@pytest.mark.parametrize("kind", ["regress", "multilabel"])
def test_other_kinds_train_predict_and_evaluate(
    inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path, kind: str
) -> None:
    labels = {"regress": "0.5 1.5 2.5 3.5".split(), "multilabel": "a;b a b c;a".split()}[kind]
    rows = "".join(f"see you home {n},{labels[n % 4]}\n" for n in range(40))
    (tmp_path / "data.csv").write_text(f"text,label\n{rows}")
    command = ("train", "data.csv", "--task", "t", "--kind", kind, "--backbone", tiny_bert_folder, "--epochs", 1)
    assert inlay(*command, "--max-length", 24, "--size", 4).status == 0
    (line,) = inlay("predict", "t", "see you", "--json").lines
    assert isinstance(line["value"], float) if kind == "regress" else set(line["labels"]) <= {"a", "b", "c"}
    assert inlay("predict", "t", "--input", "data.csv", "--output", "out.csv").status == 0
    report = inlay("evaluate", "t", "data.csv", "--errors", "wrong.jsonl", "--json").data
    assert set(report["metrics"]) >= ({"spearman", "rmse"} if kind == "regress" else {"micro_f1"})
    assert inlay("evaluate", "t", "data.csv").status == 0
    assert len(Path("wrong.jsonl").read_text().splitlines()) <= 40


def test_task_of_pairs_reads_two_texts_from_options_lines_and_columns(
    inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "".join(
        f"see you home {n},{'see' if n % 2 else 'prize'} now {n},{'yes' if n % 2 else 'no'}\n" for n in range(40)
    )
    (tmp_path / "pairs.csv").write_text(f"premise,hypothesis,label\n{rows}")
    command = ("train", "pairs.csv", "--backbone", tiny_bert_folder, "--epochs", 1, "--max-length", 24, "--size", 4)
    trained = inlay(*command)
    assert "pair `hypothesis`" in trained.err
    assert '--pair "the second text"' in trained.out
    (line,) = inlay("predict", "pairs", "see you", "--pair", "see now", "--json").lines
    monkeypatch.setattr(sys, "stdin", io.StringIO("see you\tsee now\nonly one\n"))
    piped = inlay("predict", "pairs", "--json").lines
    assert piped[0]["probability"] == pytest.approx(line["probability"], abs=1e-5)
    assert "reads a pair" in piped[1]["error"]["message"]
    assert inlay("predict", "pairs", "--input", "pairs.csv", "--strict").status == 0
    assert inlay("evaluate", "pairs", "pairs.csv", "--json").data["num_rows"] == 40
    (tmp_path / "single.csv").write_text("text,label\nsee,yes\n")
    assert "`--pair COLUMN`" in inlay("predict", "pairs", "--input", "single.csv").err
    ended = inlay("evaluate", "pairs", "single.csv")
    assert ended.status == 4
    assert "the rows are single texts" in ended.err


FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1+1", "＝1+1"]
PLAIN = ["-1.5", "+47 123", "a=b", "1e-5", "-3E+8", ".5", "'x", "free prize", "a;=1+1"]


def read_cells(path: Path) -> list[list[str]]:
    """The cells of a table as they were written: a TSV has no quotes."""
    with path.open(newline="") as file:
        return list(csv.reader(file)) if path.suffix == ".csv" else [line.rstrip("\n").split("\t") for line in file]


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_table_has_no_cell_that_a_spreadsheet_runs(inlay: Inlay, mail: Mail, tmp_path: Path, suffix: str) -> None:
    rows = [{"text": text, "=2+2": f'"{text}'} for text in (*FORMULAS, *PLAIN)]
    path, out = tmp_path / "in.jsonl", tmp_path / f"out{suffix}"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("predict", "mail", "--input", path, "--text", "text", "-o", out)
    assert inlay(*asked).status == 0
    written = read_cells(out)
    assert written[0][:2] == ["text", "'=2+2"]
    for text, row in zip((*FORMULAS, *PLAIN), written[1:], strict=True):
        is_tame = text in PLAIN and text != "+47 123"
        expected = text if is_tame else f"'{text}"
        assert row[0] == (expected if suffix == ".csv" else expected.replace("\t", " ").replace("\r", " "))
        assert row[1][0] not in "=+-@\t\r " or text in ("-1.5", "-3E+8")
    assert suffix == ".tsv" or '"a;=1+1"' in out.read_text(), "where `;` parts cells it would begin one"
    assert inlay(*asked, "--keep-formulas").status == 0
    assert read_cells(out)[1][0] == "=1+1"


def test_a_full_disk_names_the_output_file_and_leaves_nothing(
    inlay: Inlay, mail: Mail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("inlay.cli.output.Writer.write", find_no_room)
    out = tmp_path / "answers" / "out.csv"
    out.parent.mkdir()
    ended = inlay("predict", "mail", "--input", mail.data, "-o", out)
    assert ended.status == 13
    assert f"no room on the disk for `{out}`" in ended.err
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_half_a_character_never_kills_an_output_file(inlay: Inlay, mail: Mail, tmp_path: Path, suffix: str) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / f"out{suffix}"
    rows = [
        {"text": "free prize"},
        {"text": "win", "more": "\ud83d"},
        {"text": "x\udc80"},
        {"text": "a", "task": "\ud800"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = inlay("predict", "mail", "--input", path, "-o", out)
    assert ended.status == 0, ended.err
    assert len(out.read_text(encoding="utf8").splitlines()) == (4 if suffix == ".jsonl" else 5)
    if suffix == ".jsonl":
        lines = [json.loads(line) for line in out.read_text(encoding="utf8").splitlines()]
        assert lines[1]["more"] == "\ud83d"
        assert ["error" in line for line in lines] == [False, False, True, True]
    assert [json.loads(line).keys() >= {"text"} for line in inlay("predict", "mail", "--input", path).out.splitlines()]


def test_a_byte_on_stdin_that_is_no_text_is_the_error_of_its_line(mail: Mail) -> None:
    asked = [sys.executable, "-m", "inlay", "predict", "mail", "--json"]
    environment = {**os.environ, "INLAY_HOME": str(mail.store), "PYTHONUTF8": "1"}
    done = subprocess.run(asked, input=b"free prize\nbad \xff\nhome\n", capture_output=True, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert ["error" in line for line in lines] == [False, True, False], done.stderr
    assert "half a character" in lines[1]["error"]["message"]
