"""Readers: exact lines, every bad row named, and streams of any length."""

import csv
import json
import sys
import tracemalloc
import types

import pandas as pd
import pytest

from inlay.data.sources import open_folder, open_hub, read_table, stream_rows, use_whole_paths
from inlay.errors import BadData, Missing
from inlay.settings.run_config import DataConfig

SKIP = DataConfig(on_bad_row="skip")


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content, encoding="utf8", newline="")
    return path


def test_csv_rows_keep_the_line_they_begin_on(tmp_path):
    table = read_table(write(tmp_path, "a.csv", 'text,label\n"two\nlines",x\n\n"a ""quote"", and comma",y\r\nplain,z'))
    assert table.header.names == ("text", "label")
    assert table.rows == [["two\nlines", "x"], ['a "quote", and comma', "y"], ["plain", "z"]]
    assert table.lines == [2, 5, 6]
    assert table.notes == ()


@pytest.mark.parametrize(("delimiter", "shown"), [(";", "`;`"), ("\t", "tab")])
def test_csv_delimiter_is_found_from_the_header_and_noted(tmp_path, delimiter, shown):
    table = read_table(write(tmp_path, "a.csv", f"text{delimiter}label\na, b{delimiter}1\n"))
    assert table.rows == [["a, b", "1"]]
    assert table.notes == (f"a.csv: delimiter {shown}",)


def test_csv_with_carriage_returns_alone_is_read(tmp_path):
    table = read_table(write(tmp_path, "a.csv", "text,label\ra,1\rb,2\r"))
    assert (table.rows, table.lines) == ([["a", "1"], ["b", "2"]], [2, 3])


def test_tsv_is_raw(tmp_path):
    table = read_table(write(tmp_path, "a.tsv", 'label\ttext\nham\t"open quote\nspam\ta\rb\u2028c\r\n'))
    assert table.rows == [["ham", '"open quote'], ["spam", "a\rb\u2028c"]]
    assert table.lines == [2, 3]


def test_tsv_with_a_quoted_header_is_quoted(tmp_path):
    table = read_table(write(tmp_path, "a.tsv", '"label"\t"text"\n"ham"\t"a\tb"\n'))
    assert (table.header.names, table.rows) == (("label", "text"), [["ham", "a\tb"]])


def test_file_without_header_takes_the_names_given(tmp_path):
    table = read_table(write(tmp_path, "a.tsv", "x\t1\ny\t0\n"), names=("text", "label"))
    assert (table.rows, table.lines, table.header.line) == ([["x", "1"], ["y", "0"]], [1, 2], None)


def test_very_long_text_is_read(tmp_path):
    text = "word " * 100_000
    assert read_table(write(tmp_path, "a.csv", f"text,label\n{text},1\n")).rows == [[text, "1"]]


def test_repeated_column_names_are_told_apart(tmp_path):
    table = read_table(write(tmp_path, "a.csv", "text,label,text\na,b,c\n"))
    assert table.header.names == ("text", "label", "text.2")
    assert "`text.2`" in table.notes[0]


def test_jsonl_keeps_values_and_fills_gaps(tmp_path):
    rows = '{"text": "a", "label": ["x", "y"]}\n\n{"text": "b", "n": 1}\n'
    table = read_table(write(tmp_path, "a.jsonl", rows))
    assert table.header.names == ("text", "label", "n")
    assert table.rows == [["a", ["x", "y"], None], ["b", None, 1]]
    assert table.lines == [1, 3]


def test_parquet_rows_are_numbered(tmp_path):
    path = tmp_path / "a.parquet"
    pd.DataFrame({"text": ["a", "b"], "label": [["x"], []]}).to_parquet(path)
    table = read_table(path)
    assert (table.rows, table.lines) == ([["a", ["x"]], ["b", []]], [1, 2])


def test_txt_is_one_text_per_line(tmp_path):
    assert read_table(write(tmp_path, "a.txt", "one\ntwo, three\n")).rows == [["one"], ["two, three"]]


@pytest.mark.parametrize(
    ("name", "content", "line", "reason"),
    [
        ("a.csv", "text,label\na,1\nb\n", 3, "ragged row: 1 fields, but there are 2 columns"),
        ("a.csv", "text,label\na,1,2\n", 2, "ragged row: 3 fields, but there are 2 columns"),
        ("a.csv", 'text,label\na,1\n"b,2\nc,3\n', 3, "a quoted field never ends: lines 3–4 are all in it"),
        ("a.csv", 'text,label\n"a"b,1\n', 2, "broken quoting"),
        ("a.tsv", "text\tlabel\na b\n", 2, "ragged row: 1 fields"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', 2, "not JSON"),
        ("a.jsonl", '{"text": "a"}\n["a", 1]\n', 2, "an array where an object should be"),
        ("a.jsonl", '"a"\n', 1, '`"a"` where an object should be'),
        ("a.csv", "", None, "the file is empty"),
        ("a.csv", "\n\n", None, "the file is empty"),
        ("a.csv", "text,label\n", None, "the file has no rows"),
        ("a.jsonl", "\n", None, "the file has no rows"),
        ("a.xls", "text", None, "unknown file type `.xls`"),
        ("a.parquet", "PAR1 not really", None, "not a readable Parquet file"),
    ],
)
def test_bad_file_is_refused_with_file_line_and_reason(tmp_path, name, content, line, reason):
    path = write(tmp_path, name, content)
    with pytest.raises(BadData) as caught:
        read_table(path)
    assert reason in caught.value.reason
    assert caught.value.line == line
    assert str(caught.value.path) == str(path)
    assert caught.value.hint


def test_unreadable_rows_can_be_left_out(tmp_path):
    table = read_table(write(tmp_path, "a.csv", 'text,label\na,1\nb\n"c"d,2\ne,3\n'), SKIP)
    assert table.rows == [["a", "1"], ["e", "3"]]
    assert [fault.line for fault in table.faults] == [3, 4]


UNCLOSED = 'text,label\na,1\n"b\nb","c\nd,2\r\ne,3\n'


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_quote_that_never_ends_is_refused_even_where_bad_rows_are_left_out(tmp_path, end):
    path = write(tmp_path, "a.csv", UNCLOSED + f"f,4{end}")
    with pytest.raises(BadData, match=r"a\.csv:4: a quoted field never ends: lines 4–7 are all in it") as caught:
        read_table(path, SKIP)
    assert "close or remove the quote" in caught.value.hint
    with pytest.raises(BadData, match="lines 4–7"):
        list(stream_rows(path, isolate=True))


def test_a_row_left_out_for_its_quoting_names_all_its_lines(tmp_path):
    table = read_table(write(tmp_path, "a.csv", 'text,label\n"a,1\n"b, c",2\nd,3\n'), SKIP)
    assert table.rows == [["d", "3"]]
    assert [fault.reason[:29] for fault in table.faults] == ["broken quoting in lines 2–3: "]


def test_missing_file_names_a_close_one(tmp_path):
    write(tmp_path, "train.csv", "text,label\na,1\n")
    with pytest.raises(Missing, match=r"did you mean `.*train\.csv`"):
        read_table(tmp_path / "trian.csv")


def test_folder_finds_its_sides(tmp_path):
    for name in ("train.csv", "validation.jsonl", "test.tsv", "notes.md"):
        write(tmp_path, name, '{"text": "a"}\n')
    assert set(open_folder(tmp_path, DataConfig()).sides) == {"train", "dev", "test"}
    write(tmp_path, "dev.csv", "text\na\n")
    with pytest.raises(BadData, match=r"two files of dev rows: `dev\.csv` and `validation\.jsonl`"):
        open_folder(tmp_path, DataConfig())


def test_stream_yields_chunks_with_the_original_columns(tmp_path):
    path = write(tmp_path, "a.csv", "id,text,task\n7,one,spam\n8,two,\n9,three,topic\n")
    chunks = list(stream_rows(path, chunk_size=2))
    assert [len(chunk) for chunk in chunks] == [2, 1]
    first, second, third = (row for chunk in chunks for row in chunk)
    assert (first.line, first.text, first.pair, first.task) == (2, "one", None, "spam")
    assert first.record == {"id": "7", "text": "one", "task": "spam"}
    assert (second.task, third.task) == (None, "topic")


def test_stream_reads_pairs_and_named_columns(tmp_path):
    path = write(tmp_path, "a.jsonl", json.dumps({"premise": "p", "hypothesis": "h", "other": "o"}) + "\n")
    ((row,),) = stream_rows(path)
    assert (row.text, row.pair) == ("p", "h")
    ((row,),) = stream_rows(path, DataConfig(text="other"))
    assert (row.text, row.pair) == ("o", None)
    with pytest.raises(BadData, match=r"no column named `nope`.*`premise`, `hypothesis`, `other`"):
        list(stream_rows(path, DataConfig(text="nope")))


def test_stream_takes_the_settings_a_task_was_trained_with(tmp_path):
    path = write(tmp_path, "a.csv", "v2\nhello\n")
    ((row,),) = stream_rows(path, DataConfig(text="v2", label="v1", split="part"))
    assert row.text == "hello"


def test_bad_row_stops_the_stream_or_comes_with_its_error(tmp_path):
    path = write(tmp_path, "a.csv", "text,n\none,1\n ,2\nthree\nfour,4\n")
    with pytest.raises(BadData, match=r"a\.csv:3: empty text in column `text`"):
        list(stream_rows(path))
    (rows,) = stream_rows(path, isolate=True)
    assert [row.text for row in rows] == ["one", "", "", "four"]
    assert rows[1].error.message.endswith("a.csv:3: empty text in column `text`")
    assert rows[1].record == {"text": " ", "n": "2"}
    assert "ragged row" in rows[2].error.message
    assert rows[0].error is rows[3].error is None


def test_stream_of_nothing_is_refused(tmp_path):
    with pytest.raises(BadData, match="no rows"):
        list(stream_rows(write(tmp_path, "a.csv", "text\n")))


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "tsv"])
def test_stream_holds_one_chunk_at_a_time(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    line = json.dumps({"text": "word " * 40}) if suffix == "jsonl" else "word " * 40
    with path.open("w") as file:
        file.write("" if suffix == "jsonl" else "text\n")
        file.writelines(line + "\n" for _ in range(30_000))  # 6 MB
    tracemalloc.start()
    num_rows = sum(len(chunk) for chunk in stream_rows(path, chunk_size=100))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_rows == 30_000
    assert peak < 4_500_000  # the scan for the encoding holds a megabyte of bytes and of text


class FakePart:
    def __init__(self, columns, features):
        self.columns, self.features, self.column_names = columns, features, list(columns)

    def __getitem__(self, name):
        return self.columns[name]


def install_fake_hub(monkeypatch, load_dataset):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


def test_hub_sides_are_read_with_class_names(monkeypatch):
    classes = types.SimpleNamespace(names=["no", "yes"])
    features = {"sentence": None, "label": classes}
    asked = []

    def load_dataset(*arguments):
        asked.append(arguments)
        return {
            "train": FakePart({"sentence": ["a", "b"], "label": [1, 0]}, features),
            "validation_matched": FakePart({"sentence": ["c"], "label": [1]}, features),
            "test": FakePart({"sentence": ["d"], "label": [-1]}, features),
        }

    install_fake_hub(monkeypatch, load_dataset)
    source = open_hub("nyu-mll/glue:cola", DataConfig())
    assert asked == [("nyu-mll/glue", "cola")]
    assert source.read("train").rows == [["a", "yes"], ["b", "no"]]
    assert source.read("train").header.path == "hub:nyu-mll/glue:cola[train]"
    assert source.read("dev").rows == [["c", "yes"]]
    assert source.read("test").rows == [["d", None]]


def test_code_that_comes_with_a_hub_set_is_switched_off(monkeypatch):
    install_fake_hub(monkeypatch, lambda *arguments: {})
    settings = types.SimpleNamespace(HF_DATASETS_TRUST_REMOTE_CODE=None)  # None: ask on stdin
    monkeypatch.setattr(sys.modules["datasets"], "config", settings, raising=False)
    open_hub("some", DataConfig())
    assert settings.HF_DATASETS_TRUST_REMOTE_CODE is False


def test_hub_lists_of_classes_are_named(monkeypatch):
    features = {"text": None, "labels": types.SimpleNamespace(feature=types.SimpleNamespace(names=["x", "y"]))}
    part = FakePart({"text": ["a", "b"], "labels": [[0, 1], []]}, features)
    install_fake_hub(monkeypatch, lambda *arguments: {"train": part})
    source = open_hub("some", DataConfig())
    assert source.read("train").rows == [["a", ["x", "y"]], ["b", []]]
    with pytest.raises(Missing, match=r"hub:some: no dev rows.*found there: train"):
        source.read("dev")


def test_absent_hub_library_and_unknown_dataset_say_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Missing, match=r"pip install 'inlay\[hub\]'"):
        open_hub("some", DataConfig())

    def load_dataset(*arguments):
        raise FileNotFoundError("Dataset 'some' doesn't exist on the Hub\nmore")

    install_fake_hub(monkeypatch, load_dataset)
    with pytest.raises(Missing, match=r"`some` could not be loaded: Dataset 'some' doesn't exist on the Hub \(hint"):
        open_hub("some", DataConfig())


def test_an_empty_second_text_is_none_so_that_one_file_may_mix_pair_tasks_with_others(tmp_path):
    path = tmp_path / "mixed.csv"
    path.write_text("task,sentence1,sentence2\nnli,a cat,an animal\nmood,fine,\nmood,good,  \n")
    (rows,) = stream_rows(path)
    assert [(row.task, row.text, row.pair) for row in rows] == [
        ("nli", "a cat", "an animal"),
        ("mood", "fine", None),
        ("mood", "good", None),
    ]


def test_places_are_kept_so_that_rows_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INLAY_DATA", "sets")
    kept = use_whole_paths(DataConfig(source="mail.csv", dev="more/dev.csv"))
    assert (kept.source, kept.dev, kept.root) == (str(tmp_path / "mail.csv"), str(tmp_path / "more/dev.csv"), None)
    kept = use_whole_paths(DataConfig(source="glue/cola"))
    assert (kept.source, kept.root) == ("glue/cola", str(tmp_path / "sets"))
    assert use_whole_paths(DataConfig(source="hub:imdb")) == DataConfig(source="hub:imdb")
    assert use_whole_paths(DataConfig()) == DataConfig()


def test_a_first_line_longer_than_a_csv_field_may_be_is_read(tmp_path):
    csv.field_size_limit(131_072)  # Python's own, as in a new process
    table = read_table(write(tmp_path, "a.csv", f"text,{'n' * 200_000}\na,1\n"))
    assert table.rows == [["a", "1"]]


@pytest.mark.parametrize(
    "line", ['{"text": "b", "label": ' + "1" * 5000 + "}", '{"text": "b", "label": [[[[' + "[" * 9999]
)
def test_json_that_python_will_not_parse_is_the_error_of_its_row(line, tmp_path):
    path = write(tmp_path, "a.jsonl", f'{{"text": "a", "label": "x"}}\n{line}\n{{"text": "c", "label": "y"}}\n')
    table = read_table(path, SKIP)
    assert [row[0] for row in table.rows] == ["a", "c"]
    assert [fault.line for fault in table.faults] == [2]


def test_a_squad_document_with_a_number_of_thousands_of_digits_is_refused(tmp_path):
    path = write(tmp_path, "a.json", '{"data": [{"title": ' + "1" * 5000 + ', "paragraphs": []}]}')
    with pytest.raises(BadData, match="not a SQuAD document"):
        read_table(path)


@pytest.mark.parametrize("at", [0.3, 0.5, 0.7])
def test_a_damaged_page_of_a_parquet_file_is_an_error_that_names_it(at, tmp_path):
    path = tmp_path / "a.parquet"
    frame = pd.DataFrame(
        {"text": [f"row {row} {row * 7919 % 1000}" for row in range(5000)], "label": ["x", "y"] * 2500}
    )
    frame.to_parquet(path, compression="zstd")
    content = bytearray(path.read_bytes())
    start = int(len(content) * at * 0.7)
    content[start : start + 400] = bytes(byte ^ 0xFF for byte in content[start : start + 400])
    path.write_bytes(content)
    with pytest.raises(BadData, match=r"a\.parquet: not a readable Parquet file"):
        read_table(path)
    with pytest.raises(BadData, match=r"a\.parquet"):
        list(stream_rows(path, isolate=True))


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_a_small_parquet_file_that_unpacks_to_a_gigabyte_is_refused_in_little_memory(use_dictionary, tmp_path):
    path = tmp_path / "a.parquet"
    frame = pd.DataFrame({"text": ["a" * 1_000_000] * 300, "label": ["x"] * 300})
    frame.to_parquet(path, compression="zstd", use_dictionary=use_dictionary)
    assert path.stat().st_size < 100_000
    with pytest.raises(BadData, match="unpacks to more than 100,000,000 characters"):
        read_table(path)
    with pytest.raises(BadData, match="unpacks"):
        list(stream_rows(path, isolate=True))


def test_parquet_values_that_repeat_and_nest_are_read_as_they_are(tmp_path):
    path = tmp_path / "a.parquet"
    rows = {"text": ["a", "a", None], "labels": [["x", "y"], [], None], "more": [{"k": "v"}, None, {"k": "w"}]}
    pd.DataFrame(rows).to_parquet(path)
    assert read_table(path).rows == [["a", ["x", "y"], {"k": "v"}], ["a", [], None], [None, None, {"k": "w"}]]


def test_a_text_of_millions_of_letters_is_the_error_of_its_row(tmp_path):
    path = write(tmp_path, "a.csv", f"text\ngood\n{'a ' * 600_000}\ngood\n")
    (rows,) = stream_rows(path, isolate=True)
    assert [row.error is None for row in rows] == [True, False, True]
    assert "a text of 1,200,000 characters, but a row may have 1,000,000" in rows[1].error.message


def test_chunks_of_long_rows_are_small(tmp_path):
    path = write(tmp_path, "a.jsonl", (json.dumps({"text": "a" * 900_000, "other": "b" * 900_000}) + "\n") * 12)
    assert [len(chunk) for chunk in stream_rows(path)] == [3, 3, 3, 3]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.parquet"])
def test_more_columns_than_a_table_of_texts_has_are_refused(name, tmp_path):
    names = [f"column{number}" for number in range(10_001)]
    path = tmp_path / name
    if path.suffix == ".parquet":
        pd.DataFrame([["a"] * len(names)], columns=names).to_parquet(path)
    elif path.suffix == ".jsonl":  # no row has them all
        rows = [dict.fromkeys(names[start : start + 100], "a") for start in range(0, len(names), 100)]
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        path.write_text(("," if path.suffix == ".csv" else "\t").join(names) + "\n")
    with pytest.raises(BadData, match="10,001 columns, but a table may have 10,000"):
        read_table(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_row_that_brings_too_many_columns_is_an_error_and_the_others_are_read(name, tmp_path):
    rows = [{"text": "a", **{f"{row} {number}": 1 for number in range(4_000)}} for row in range(40)] + [{"text": "b"}]
    shown = [json.dumps(row) for row in rows]
    path = write(tmp_path, name, "\n".join(shown) if name == "a.jsonl" else "[" + ",\n".join(shown) + "]")
    (read,) = stream_rows(path, isolate=True)
    assert [row.line for row in read if row.error is None] == [1, 2, 41]
    assert sum(len(row.record or {}) for row in read) == 2 * 4_001 + 1
    refused = f"{name}:3: with this row there are 12,001 columns, but a table may have 10,000"
    with pytest.raises(BadData, match=refused):
        read_table(path)
    document = write(tmp_path, "b.json", json.dumps({"data": rows}))
    with pytest.raises(BadData, match=r"b\.json:3: with this row"):
        read_table(document)


def test_rows_that_share_no_columns_are_refused_before_their_table_is_made(tmp_path):
    names = {f"column{number}": "a" for number in range(9_000)}
    path = write(tmp_path, "a.jsonl", json.dumps(names) + "\n" + "{}\n" * 200_000)
    tracemalloc.start()
    with pytest.raises(BadData, match="200,001 rows have 9,000 columns, nearly all of them blank"):
        read_table(path)
    assert tracemalloc.get_traced_memory()[1] < 100_000_000
    tracemalloc.stop()
    few = write(tmp_path, "b.jsonl", json.dumps(dict(list(names.items())[:50])) + "\n" + "{}\n" * 20_000)
    assert len(read_table(few).rows) == 20_001  # columns that most rows lack are no fault


def test_a_context_of_ten_thousand_questions_may_not_outgrow_its_file(tmp_path):
    def document(num_letters):
        answers = [{"text": "a", "answer_start": 0}]
        questions = [{"id": str(number), "question": "q", "answers": answers} for number in range(3_000)]
        paragraphs = [{"context": "a " * (num_letters // 2), "qas": questions}]
        return json.dumps({"version": "1.1", "data": [{"paragraphs": paragraphs}]})

    with pytest.raises(BadData, match="unpacks to more than 100,000,000 characters"):
        read_table(write(tmp_path, "a.json", document(50_000)))
    assert len(read_table(write(tmp_path, "b.json", document(5_000))).rows) == 3_000
