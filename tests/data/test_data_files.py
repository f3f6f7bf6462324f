"""Packed files, stdin, other shapes of JSON, files without a header, and files that are not what their names say."""

import bz2
import gzip
import io
import json
import lzma
import sys
import zipfile

import pandas as pd
import pyarrow
import pytest

from inlay.data import load_task, packed_files, stream_rows
from inlay.data.data_files import Spool, local_file
from inlay.data.packed_files import unpack
from inlay.data.sources import name_of_source, open_folder, read_table, use_whole_paths
from inlay.errors import BadData, Missing
from inlay.settings.run_config import DataConfig

ROWS = [(f"{word} film, number {n}", label) for n in range(10) for word, label in (("good", "yes"), ("bad", "no"))]
CSV = "text,label\n" + "".join(f'"{text}",{label}\n' for text, label in ROWS)
RECORDS = [{"text": text, "label": label} for text, label in ROWS]


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def zipped(members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


PACKED = {
    "mail.csv.gz": gzip.compress(CSV.encode()),
    "mail.CSV.GZ": gzip.compress(CSV[:50].encode()) + gzip.compress(CSV[50:].encode()),
    "mail.csv.bz2": bz2.compress(CSV.encode()),
    "mail.csv.xz": lzma.compress(CSV.encode()),
    "mail.csv.zst": pyarrow.compress(CSV.encode(), codec="zstd", asbytes=True),
    "mail.zip": zipped({"in/mail.csv": CSV}),
}


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_file_is_read_as_the_one_in_it(tmp_path, name):
    table = read_table(write(tmp_path, name, PACKED[name]))
    plain = read_table(write(tmp_path, "plain.csv", CSV))
    assert (table.header.names, table.rows, table.lines) == (plain.header.names, plain.rows, plain.lines)
    assert table.header.path.endswith(name)
    assert name_of_source(str(tmp_path / name)) == "mail"


def test_formats_that_are_no_text_are_read_packed_too(tmp_path):
    frame, book = io.BytesIO(), io.BytesIO()
    pd.DataFrame(RECORDS).to_parquet(frame)
    pd.DataFrame(RECORDS).to_excel(book, index=False)
    for name, content in (("a.parquet.gz", frame), ("b.xlsx.gz", book)):
        assert read_table(write(tmp_path, name, gzip.compress(content.getvalue()))).rows == [list(row) for row in ROWS]
    assert len(read_table(write(tmp_path, "c.zip", zipped({"c.xlsx": book.getvalue()}))).rows) == len(ROWS)


def test_sides_of_a_folder_may_be_packed(tmp_path):
    write(tmp_path, "train.csv.gz", PACKED["mail.csv.gz"])
    write(tmp_path, "dev.zip", PACKED["mail.zip"])
    write(tmp_path, "train.old.csv", CSV)
    assert set(open_folder(tmp_path, DataConfig()).sides) == {"train", "dev"}


@pytest.mark.parametrize("packing", ["gz", "bz2", "xz", "zst", "zip"])
def test_a_bomb_is_refused_while_it_is_read(tmp_path, monkeypatch, packing):
    """What a file unpacks to is bounded by its own size, and no more than that is ever kept."""
    content = b"text,label\n" + b"a,b\n" * 30_000_000
    bomb = {
        "gz": lambda: gzip.compress(content, 1),
        "bz2": lambda: bz2.compress(content, 1),
        "xz": lambda: lzma.compress(content, preset=0),
        "zst": lambda: pyarrow.compress(content, codec="zstd", asbytes=True),
        "zip": lambda: zipped({"mail.csv": content}),
    }[packing]()
    path = write(tmp_path, f"mail.csv.{packing}" if packing != "zip" else "mail.zip", bomb)
    kept = []
    monkeypatch.setattr(Spool, "write", lambda self, piece: kept.append(len(piece)))
    with pytest.raises(BadData, match=r"mail.*unpacks to more than 100,000,000 bytes, from [\d,]+ bytes"):
        read_table(path)
    assert sum(kept) <= 100_000_000


DAMAGED = {
    "no gz": ("a.csv.gz", CSV.encode(), "Not a gzipped file"),
    "cut gz": ("a.csv.gz", gzip.compress(CSV.encode())[:-20], "not a readable .gz file"),
    "changed gz": ("a.csv.gz", gzip.compress(CSV.encode())[:-8] + b"12345678", "CRC"),
    "cut bz2": ("a.csv.bz2", bz2.compress(CSV.encode())[:-20], "not a readable .bz2 file"),
    "cut xz": ("a.csv.xz", lzma.compress(CSV.encode())[:-20], "it ends early"),
    "cut zst": ("a.csv.zst", PACKED["mail.csv.zst"][:-9], "not a readable .zst file"),
    "no zip": ("a.zip", b"no zip", "not a readable .zip file"),
    "two files": ("a.zip", zipped({"a.csv": CSV, "b.csv": CSV}), "has 2 files: `a.csv`, `b.csv`"),
    "no file": ("a.zip", zipped({"__MACOSX/a.csv": "x"}), "has no file in it"),
    "packed twice": ("a.zip", zipped({"a.csv.gz": PACKED["mail.csv.gz"]}), "packed file inside a packed file"),
    "tar": ("a.tar.gz", gzip.compress(b"x" * 1000), "tar archive"),
    "empty": ("a.csv.gz", gzip.compress(b""), "the file is empty"),
    "no text": ("a.csv.gz", gzip.compress(b"\0\1\2" * 100), "binary file"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_packed_file_is_refused_by_name(tmp_path, case):
    name, content, words = DAMAGED[case]
    with pytest.raises(BadData, match=words) as caught:
        read_table(write(tmp_path, name, content))
    assert str(tmp_path / name) in caught.value.message
    assert caught.value.hint


def test_an_xz_that_asks_for_much_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_files, "_MOST_XZ_MEMORY", 1 << 20)
    with pytest.raises(BadData, match=r"not a readable \.xz file"):
        read_table(write(tmp_path, "a.csv.xz", PACKED["mail.csv.xz"]))


MISNAMED = {
    "a.csv": (zipped({"xl/workbook.xml": "x", "docProps/app.xml": "y"}), "an Excel workbook", "--format xlsx"),
    "b.csv": (PACKED["mail.csv.gz"], "packed with gzip", "`.csv.gz`"),
    "c.jsonl": (b"PAR1" + b"0" * 100, "a Parquet file", "`.parquet`"),
    "d.tsv": (PACKED["mail.zip"], "a zip archive", "`.zip`"),
    "e.xlsx": (CSV.encode(), "this is text", "`.csv`"),
    "f.parquet": (json.dumps(RECORDS).encode(), "this is text", "`.json`"),
    "g.csv": (b"<!DOCTYPE html>\n<html>", "a web page", "Raw"),
    "h.xls": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1rest", "an old Excel", ".xlsx or CSV"),
    "i.docx": (zipped({"word/document.xml": "x"}), "a Word document", ".txt"),
    "j.pkl": (b"\x80\x04\x95rest", "a pickle", "Parquet"),
    "k.jsonl": (json.dumps(RECORDS, indent=1).encode(), "one list", ".json"),
    "l.dat": (CSV.encode(), "unknown file type `.dat`", "--format csv"),
}


@pytest.mark.parametrize("name", MISNAMED)
def test_a_wrong_suffix_gets_a_hint(tmp_path, name):
    content, what, hint = MISNAMED[name]
    with pytest.raises(BadData, match=what) as caught:
        read_table(write(tmp_path, name, content))
    assert hint in str(caught.value.hint)


def test_the_hint_of_a_wrong_suffix_works(tmp_path):
    book = io.BytesIO()
    pd.DataFrame(RECORDS).to_excel(book, index=False)
    path = write(tmp_path, "mail.csv", book.getvalue())
    with pytest.raises(BadData, match="Excel workbook"):
        read_table(path)
    assert len(read_table(path, DataConfig(format="xlsx")).rows) == len(ROWS)
    assert len(read_table(path.rename(tmp_path / "mail.xlsx")).rows) == len(ROWS)


DOCUMENTS = {
    "list": json.dumps(RECORDS),
    "list, indented": json.dumps(RECORDS, indent=2),
    "frame of pandas": pd.DataFrame(RECORDS).to_json(),
    "columns": json.dumps({name: [row[name] for row in RECORDS] for name in ("text", "label")}, indent=1),
    "list in an object": json.dumps({"version": "1.0", "data": RECORDS}, indent=2),
    "lines": "\n".join(map(json.dumps, RECORDS)),
}


@pytest.mark.parametrize("form", DOCUMENTS)
def test_json_documents_are_tables(tmp_path, form):
    table = read_table(write(tmp_path, "a.json", DOCUMENTS[form]))
    assert [dict(zip(table.header.names, row, strict=True)) for row in table.rows] == RECORDS


def test_a_column_of_objects_is_not_taken_for_all_rows(tmp_path):
    columns = {"text": ["a b", "c"], "spans": [{"start": 0}, {"start": 1}]}
    table = read_table(write(tmp_path, "a.json", json.dumps(columns, indent=1)))
    assert table.header.names == ("text", "spans")
    assert table.rows == [["a b", {"start": 0}], ["c", {"start": 1}]]


def test_rows_of_a_json_list_have_their_lines(tmp_path):
    path = write(tmp_path, "a.json", '[\n {"text": "a\\nb", "label": 1},\n\n 7,\n {"text":\n "c"}]\n')
    table = read_table(path, DataConfig(on_bad_row="skip"))
    assert table.lines == [2, 5]
    assert [fault.line for fault in table.faults] == [4]


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ('[{"text": "a"}\n {"text": "b"}]', 2, "no comma"),
        ('[{"text": "a"},\n{"text": }]', 2, "expecting value"),
        ('[{"text": "a"},\n{"text": "b"}', 2, "ends early"),
        ('[{"text": "a"}]\n[]', 2, "more text after"),
        ('{\n"text": [1,\n}', 3, "not JSON"),
        ('{"a": [1, 2], "b": [1]}', None, "no rows found"),
        ("[" * 100_000, 1, "nested too deeply"),
    ],
)
def test_a_broken_json_document_says_where(tmp_path, content, line, words):
    with pytest.raises(BadData, match=words) as caught:
        read_table(write(tmp_path, "a.json", content))
    assert caught.value.line == line


HEADERLESS = "".join(f'"{text}",{label}\n' for text, label in ROWS)


def test_a_file_without_a_header_is_found_and_said(tmp_path):
    task = load_task(DataConfig(str(write(tmp_path, "a.csv", HEADERLESS))), "task")
    assert task.labels == ("no", "yes")
    assert len(task.train) + len(task.dev) == len(ROWS)
    assert 1 in (*task.train.lines, *task.dev.lines)
    assert any("no header found (`yes` is in the first row and again below it)" in note for note in task.notes)


@pytest.mark.parametrize(
    "content",
    [
        "text,label\ntext,label\na,b\n",
        "message,spam\nbuy now,1\nhello,0\nhello again,0\n",
        "q1,q2,same\nwhat,who,1\nwho,what,0\n",
        "0,1\nbuy now,1\nhello,0\n",
        "what did you like most about it,why\nthe food,it was good\nall,none\n",
        ",text,label\n0,a,b\n1,c,d\n",
    ],
)
def test_a_header_stays_a_header(tmp_path, content):
    assert read_table(write(tmp_path, "a.csv", content)).header.line == 1


def test_whether_there_is_a_header_can_be_said(tmp_path):
    path = write(tmp_path, "a.csv", "one,x\ntwo,y\n")
    assert read_table(path).header.names == ("one", "x")
    table = read_table(path, DataConfig(header=False))
    assert table.header.names == ("text", "label")
    assert table.rows == [["one", "x"], ["two", "y"]]
    twice = write(tmp_path, "b.csv", "one,x\ntwo,x\n")
    assert len(read_table(twice).rows) == 2
    assert read_table(twice, DataConfig(header=True)).rows == [["two", "x"]]


def test_a_workbook_and_a_file_to_predict_may_have_no_header(tmp_path):
    path = tmp_path / "a.xlsx"
    pd.DataFrame(ROWS).to_excel(path, index=False, header=False)
    assert read_table(path).lines[0] == 1
    texts = write(tmp_path, "b.csv", "a film that was good\na film that was bad\n")
    rows = [row for chunk in stream_rows(texts) for row in chunk]
    assert [row.text for row in rows] == ["a film that was good", "a film that was bad"]


def test_columns_can_be_named_by_number(tmp_path):
    rows = "".join(f"{n},{label},{text[:4]},x{n}\n" for n, (text, label) in enumerate(ROWS))
    path = write(tmp_path, "a.csv", rows)
    with pytest.raises(BadData, match="no text column") as caught:
        load_task(DataConfig(str(path)), "task")
    assert "`column1`" in str(caught.value.hint)
    task = load_task(DataConfig(str(path), text="4", label="2"), "task")
    assert task.labels == ("no", "yes")
    assert task.train.texts[0].startswith("x")


def test_a_txt_is_a_text_in_each_line_or_columns_with_tabs(tmp_path):
    assert read_table(write(tmp_path, "a.txt", "one\ttwo\nthree, four\n")).rows == [["one\ttwo"], ["three, four"]]
    table = read_table(write(tmp_path, "b.txt", "".join(f'{label}\t"{text}\n' for text, label in ROWS)))
    assert table.header.names == ("label", "text")
    assert table.rows[0] == ["yes", f'"{ROWS[0][0]}']
    assert any("tabs between them" in note for note in table.notes)


class Piped(io.TextIOWrapper):
    def isatty(self):
        return False


@pytest.mark.parametrize(
    "content", [CSV.encode(), PACKED["mail.csv.gz"], PACKED["mail.zip"], json.dumps(RECORDS).encode()]
)
def test_stdin_is_read_whatever_comes(monkeypatch, content):
    monkeypatch.setattr(sys, "stdin", Piped(io.BytesIO(content)))
    task = load_task(DataConfig("-"), "task")
    assert len(task.train) + len(task.dev) == len(ROWS)
    assert load_task(DataConfig("-"), "task").digest == task.digest  # whoever asks again gets the same rows
    assert use_whole_paths(DataConfig("-")).source == "-"


def test_an_empty_stdin_is_said(monkeypatch):
    monkeypatch.setattr(sys, "stdin", Piped(io.BytesIO(b"")))
    with pytest.raises(BadData, match="nothing came on stdin") as caught:
        load_task(DataConfig("-"), "task")
    assert "|" in str(caught.value.hint)


def test_a_terminal_is_no_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(Missing, match="nothing is piped into it"):
        load_task(DataConfig("-"), "task")


def test_a_spool_beyond_its_memory_is_read_by_many(tmp_path):
    spool = Spool()
    spool._file.rollover()
    spool.write(b"0123456789")
    first, second = spool.open(), spool.open()
    assert (first.read(3), second.read(5), first.read()) == (b"012", b"01234", b"3456789")
    assert second.seek(-2, io.SEEK_END) == 8
    assert second.read() == b"89"


def test_what_is_unpacked_has_the_packed_files_name(tmp_path):
    file = unpack(local_file(write(tmp_path, "mail.csv.gz", PACKED["mail.csv.gz"])))
    assert (file.title, file.suffix, file.head()) == ("mail.csv.gz", ".csv", CSV.encode()[:4096])


def test_what_stands_behind_the_padding_of_an_xz_is_read_too(tmp_path):
    first, second = lzma.compress(CSV.encode()), lzma.compress(b"one more,ham\n")
    path = write(tmp_path, "a.csv.xz", first + b"\0" * (200_000 - len(first) % 4) + second)
    assert len(read_table(path).rows) == len(read_table(write(tmp_path, "b.csv", CSV)).rows) + 1
