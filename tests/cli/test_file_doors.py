"""Files as people have them, from the command line: stdin, packed files, outputs with types, hints that work."""

from __future__ import annotations

import csv
import gzip
import io
import sys
from collections.abc import Callable
from pathlib import Path

import openpyxl
import pandas as pd
import pytest

from inlay.cli.output import open_rows
from inlay.cli.typed_files import MOST_CELL_LETTERS
from inlay.errors import BadConfig, BadData
from inlay.serving import Answer

from .conftest import SETTINGS, Inlay, write_mail


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    return lambda content: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_task_comes_from_stdin_and_answers_into_typed_files(
    inlay: Inlay, backbone_folder: Callable[[str], Path], tmp_path: Path, piped: Callable[[bytes], None]
) -> None:
    rows = write_mail(tmp_path / "mail.csv").read_bytes()
    backbone = backbone_folder("bert")
    piped(gzip.compress(rows))
    ended = inlay("train", "-", "--task", "mail", "--backbone", backbone, *SETTINGS)
    assert ended.status == 0, ended.err
    assert "stdin: read as csv" in ended.err
    piped(rows)
    assert inlay("evaluate", "mail", "-", "--json").data["num_rows"] == 80
    piped(b"")
    ended = inlay("evaluate", "mail", "-")
    assert ended.status == 4
    assert "nothing came on stdin" in ended.err
    # stdin of `predict` is lines, unless a format is said; all columns are kept
    piped(rows)
    ended = inlay("predict", "mail", "--input", "-", "--format", "csv", "-o", tmp_path / "out.parquet")
    assert ended.status == 0, ended.err
    frame = pd.read_parquet(tmp_path / "out.parquet")
    assert list(frame.columns) == ["text", "label", "predicted_label", "probability", "error"]
    assert len(frame) == 80
    assert frame["probability"].dtype == "float64"
    assert frame["error"].isna().all()
    packed = tmp_path / "new.csv.gz"
    packed.write_bytes(gzip.compress(b"n,text,ok\n1,=1+1 free prize,true\n2,,false\n3,see you home,true\n"))
    ended = inlay("predict", "mail", "--input", packed, "-o", tmp_path / "out.xlsx")
    assert ended.status == 0, ended.err
    book = openpyxl.load_workbook(tmp_path / "out.xlsx")
    (head, first, second, _) = book.worksheets[0].iter_rows()
    assert [cell.value for cell in head] == ["n", "text", "ok", "label", "probability", "error"]
    assert (first[1].value, first[1].data_type) == ("=1+1 free prize", "s")  # no formula
    assert "empty text" in second[5].value
    book.close()
    again = inlay("evaluate", "mail", tmp_path / "out.parquet", "--json")
    assert again.data["num_rows"] == 80
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".draft")]


@pytest.mark.parametrize("suffix", [".parquet", ".xlsx"])
def test_columns_have_the_type_of_all_their_cells(tmp_path: Path, suffix: str) -> None:
    records = [
        {"whole": 1, "number": 1, "mixed": 7, "flag": True, "list": ["a", "b"], "odd": {"a": 1}, "none": None},
        {"whole": 2, "number": 2.5, "mixed": "x", "flag": False, "list": [], "odd": [1, 2], "none": None},
        {"whole": None, "number": None, "mixed": None, "flag": None, "list": None, "odd": 10**30, "none": None},
    ]
    path = tmp_path / f"a{suffix}"
    with open_rows(path) as writer:
        writer.write_plain(records)
    assert sorted(tmp_path.iterdir()) == [path]
    if suffix == ".xlsx":
        assert pd.read_excel(path)["mixed"].tolist()[:2] == [7, "x"]
        return
    frame = pd.read_parquet(path, dtype_backend="pyarrow")
    types = {name: str(kind) for name, kind in frame.dtypes.items()}
    assert types["whole"] == "int64[pyarrow]"
    assert types["number"] == "double[pyarrow]"
    assert types["flag"] == "bool[pyarrow]"
    assert frame["mixed"].tolist()[:2] == ["7", "x"]
    assert list(frame["list"][0]) == ["a", "b"]
    assert frame["odd"].tolist() == ['{"a": 1}', "[1, 2]", str(10**30)]


def test_a_cell_too_long_for_a_workbook_is_cut_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_rows(tmp_path / "a.xlsx") as writer:
        writer.write_plain([{"text": "x" * 40_000}, {"text": "a\x00b"}])
    assert pd.read_excel(tmp_path / "a.xlsx")["text"].str.len().tolist() == [MOST_CELL_LETTERS, 2]
    assert "1 texts were cut" in capsys.readouterr().err


def test_nothing_is_half_written(tmp_path: Path) -> None:
    def fail(suffix: str) -> None:
        with open_rows(tmp_path / f"a{suffix}") as writer:
            writer.write_plain([{"a": 1}])
            raise RuntimeError

    for suffix in (".parquet", ".xlsx"):
        with pytest.raises(RuntimeError):
            fail(suffix)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BadConfig, match=r"does not end in one of \.csv, .*\.parquet"), open_rows(tmp_path / "a.ods"):
        pass


def test_an_interrupted_parquet_keeps_its_whole_windows(tmp_path: Path) -> None:
    def stop() -> None:
        with open_rows(tmp_path / "a.parquet") as writer:
            writer.write([{"text": "a"}], [Answer("mail", error=BadConfig("no answer"))])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="the first 1 rows"):
        stop()
    assert pd.read_parquet(tmp_path / "a.partial.parquet")["text"].tolist() == ["a"]
    assert not (tmp_path / "a.parquet").exists()


def test_too_many_rows_for_a_workbook_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inlay.cli.typed_files.MOST_SHEET_ROWS", 2)
    with open_rows(tmp_path / "a.xlsx") as writer:
        writer.write_plain([{"text": "a"}, {"text": "b"}])
    reached = []

    def write_three() -> None:
        with open_rows(tmp_path / "b.xlsx") as writer:
            writer.write_plain([{"text": "a"}, {"text": "b"}, {"text": "c"}])
            reached.append("the end of the work")

    with pytest.raises(BadData, match="at most 2 rows"):
        write_three()
    assert not reached


ODD_CELLS = {
    "half a character": ("\ud800x", "\\ud800x"),
    "half characters in a list": (["a", "\udfff"], '["a", "\\udfff"]'),
    "half characters in an object": ({"\ud800": ["\udc00"]}, '{"\\ud800": ["\\udc00"]}'),
    "400 digits": (10**400, str(10**400)),
    "20 digits": (-(10**20), str(-(10**20))),
    "no number": (float("nan"), "nan"),
    "infinity": (float("-inf"), "-inf"),
    "no character": ("a\uffff\x00\x0bb", "ab"),
    "more than a float's digits": (2**53 + 1, str(2**53 + 1)),
}


@pytest.mark.parametrize("suffix", [".parquet", ".xlsx", ".csv", ".tsv", ".jsonl"])
@pytest.mark.parametrize("what", ODD_CELLS)
def test_what_a_format_cannot_hold_becomes_text_and_costs_no_answers(tmp_path: Path, what: str, suffix: str) -> None:
    cell, text = ODD_CELLS[what]
    path = tmp_path / f"a{suffix}"
    names = ["odd", "\ud800k", "\\ud800k", "n\x00", "\uffff"]
    with open_rows(path) as writer:
        answer = Answer("mail", error=BadConfig("no answer"))
        writer.write([dict.fromkeys(names, "x") | {"odd": cell}, {"odd": "y"}, {"odd": 1}], [answer] * 3)
    if suffix == ".parquet":
        frame = pd.read_parquet(path)
        assert frame.columns.tolist()[:3] == ["odd", "\\ud800k", "\\ud800k.2"]
        assert frame["odd"].tolist() == ["a\uffff\x00\x0bb" if what == "no character" else text, "y", "1"]
        assert frame["error"].tolist() == ["no answer"] * 3
    elif suffix == ".xlsx":
        book = openpyxl.load_workbook(path)
        head, *rows = book.worksheets[0].iter_rows(values_only=True)
        assert head[:5] == ("odd", "\\ud800k", "\\ud800k.2", "n", None)
        assert [row[0] for row in rows] == [text, "y", 1]
        assert [row[-1] for row in rows] == ["no answer"] * 3
    else:
        assert path.read_text(encoding="utf8").count("no answer") == 3


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".xlsx"])
def test_a_table_that_is_nearly_all_blanks_is_refused_and_jsonl_is_not(tmp_path: Path, suffix: str) -> None:
    answer = Answer("mail", error=BadConfig("no answer"))
    wide = {f"column {number}": 1 for number in range(10_000)}
    rows = [wide] + [{"text": "a"}] * 999

    def write(path: Path) -> None:
        with open_rows(path) as writer:
            for window in (rows[:10], rows[10:], rows):
                writer.write(window, [answer] * len(window))

    with pytest.raises(BadData, match="nearly all of them blank") as refused:
        write(tmp_path / f"a{suffix}")
    assert "write .jsonl" in (refused.value.hint or "")
    write(tmp_path / "a.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_answers_to_answers_have_columns_of_their_own(tmp_path: Path) -> None:
    answer = Answer("mail", error=BadConfig("no answer"))
    with open_rows(tmp_path / "a.parquet") as writer:
        writer.write([{"text": "a", "error": "x", "predicted_error": "y"}], [answer])
    frame = pd.read_parquet(tmp_path / "a.parquet")
    assert frame["predicted_predicted_error"].tolist() == ["no answer"]
    assert frame["predicted_error"].tolist() == ["y"]


# Letters that show nothing, some of which a program removes before it looks at a cell.
UNSEEN = "\ufeff\u200b\u2060\u00ad\xa0\u061c\x00\x01\x85\u3164\u2800\u034f\ufe0f\u2028\U000e0020\ufff0"


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("start", ["=1+1", "＝1", "﹦1", "⁼1", "+a", "-a", "−a", "@a", "\tx", "\rx"])
def test_letters_that_show_nothing_hide_no_formula(tmp_path: Path, suffix: str, start: str) -> None:
    path = tmp_path / f"a{suffix}"
    cells = [unseen + start for unseen in ("", *UNSEEN, UNSEEN, "\ufeff\ufeff")]
    with open_rows(path) as writer:
        writer.write_plain([dict.fromkeys(cells, "x"), *({cells[0]: cell} for cell in cells)])
    lines = path.read_bytes().decode()
    assert lines.lstrip('"').startswith("'"), "no byte order mark, behind which the formula would begin"
    if suffix == ".csv":  # as written, behind the quote: nothing is removed
        names, _, *rows = csv.reader(io.StringIO(lines, newline=""))
        assert names == [f"'{cell}" for cell in cells] == [row[0] for row in rows]
        return
    names, _, *rows = [line.split("\t") for line in lines.removesuffix("\n").split("\n")]
    assert all(cell.startswith("'") for cell in (*names, *(row[0] for row in rows)))


@pytest.mark.parametrize("cell", ["-1.5", "−1.5", "+3e8", "\ufeffgood", "a\u200b=1", "½", "é", "", " ", "👍🏽 =)"])
def test_a_cell_that_begins_no_formula_is_written_as_it_is(tmp_path: Path, cell: str) -> None:
    with open_rows(tmp_path / "a.csv") as writer:
        writer.write_plain([{"n": 1, "text": cell}])
    with (tmp_path / "a.csv").open(encoding="utf8", newline="") as file:
        assert list(csv.reader(file))[1] == ["1", cell]
