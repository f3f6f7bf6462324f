"""Spreadsheets as rows, and workbooks that are not what they say."""

from __future__ import annotations

import datetime
import io
import zipfile

import openpyxl
import pytest

from inlay.data import load_task, stream_rows
from inlay.data.readers import open_file
from inlay.errors import BadData
from inlay.settings import DataConfig


def write_book(path, *sheets):
    book = openpyxl.Workbook()
    book.remove(book.active)
    for number, rows in enumerate(sheets):
        sheet = book.create_sheet(f"Sheet {number}")
        for row in rows:
            sheet.append(row)
    book.save(path)
    return path


def change_part(path, name, change):
    """Write a workbook again with one of its parts changed."""
    with zipfile.ZipFile(path) as file:
        parts = {item.filename: file.read(item) for item in file.infolist()}
    parts[name] = change(parts[name])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for part, content in parts.items():
            file.writestr(part, content)
    return path


def read(path):
    stream = open_file(path)
    return stream, list(stream.records)


def test_rows_have_the_numbers_of_the_sheet(tmp_path):
    path = write_book(tmp_path / "a.xlsx", [["text", "label"], ["good", 1], [None, None], ["bad\nreally", 0.5]])
    stream, records = read(path)
    assert stream.header.names == ("text", "label")
    assert records == [(2, {"text": "good", "label": 1}), (4, {"text": "bad\nreally", "label": 0.5})]


def test_short_rows_are_filled_and_wide_ones_are_faults(tmp_path):
    path = write_book(tmp_path / "a.xlsx", [["text", "label", None], ["short"], ["a", "b", "c"]])
    _, records = read(path)
    assert records[0] == (2, {"text": "short", "label": None})
    assert isinstance(records[1][1], BadData)
    assert records[1][1].line == 3


def test_the_first_sheet_with_rows_is_read_and_said(tmp_path):
    path = write_book(tmp_path / "a.xlsx", [], [["text", "label"], ["x", datetime.date(2026, 1, 2)]])
    stream, records = read(path)
    assert records == [(2, {"text": "x", "label": "2026-01-02T00:00:00"})]
    assert any("Sheet 1" in note for note in stream.notes)


def test_a_workbook_trains_and_is_predicted_like_a_csv(tmp_path):
    rows = [[f"{word} number {number}", label] for number in range(20) for word, label in (("good", "a"), ("bad", "b"))]
    path = write_book(tmp_path / "a.xlsx", [["text", "label"], *rows])
    task = load_task(DataConfig(str(path)), "task")
    assert task.labels == ("a", "b")
    assert sum(len(chunk) for chunk in stream_rows(path)) == 40


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04 cut off"])
def test_other_bytes_are_refused(tmp_path, content):
    path = tmp_path / "a.xlsx"
    path.write_bytes(content)
    with pytest.raises(BadData):
        read(path)


def test_an_empty_workbook_is_refused(tmp_path):
    with pytest.raises(BadData, match="no rows"):
        read(write_book(tmp_path / "a.xlsx", []))


def test_a_zip_of_something_else_is_refused(tmp_path):
    path = tmp_path / "a.xlsx"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme.txt", "hello")
    with pytest.raises(BadData, match="not a readable workbook"):
        read(path)


def test_a_part_that_unpacks_to_gigabytes_is_refused_before_it_is_unpacked(tmp_path):
    path = write_book(tmp_path / "a.xlsx", [["text", "label"], ["x", "y"]])
    bomb = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            new.writestr(item.filename, old.read(item))
        with new.open("xl/media/bomb", "w", force_zip64=True) as file:
            for _ in range(300):
                file.write(b"\0" * 1_000_000)
    path.write_bytes(bomb.getvalue())
    with pytest.raises(BadData, match="unpacks to more"):
        read(path)


def test_cells_far_to_the_right_are_counted(tmp_path):
    path = write_book(tmp_path / "a.xlsx", [["text", "label"], ["x", "y"]])
    far = b"".join(b'<row r="%d"><c r="XFD%d"><v>1</v></c></row>' % (row, row) for row in range(3, 300))
    change_part(path, "xl/worksheets/sheet1.xml", lambda old: old.replace(b"</sheetData>", far + b"</sheetData>"))
    with pytest.raises(BadData, match="unpacks to more"):
        read(path)


def test_entities_that_multiply_are_refused(tmp_path):
    path = write_book(tmp_path / "a.xlsx", [["text", "label"], ["x", "y"]])
    lines = [b'<!ENTITY a0 "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa">']
    lines += [b'<!ENTITY a%d "%s">' % (number, b"&a%d;" % (number - 1) * 40) for number in range(1, 7)]
    bomb = b"<!DOCTYPE sst [" + b"".join(lines) + b"]>"

    change_part(
        path,
        "xl/worksheets/sheet1.xml",
        lambda old: b"<?xml version='1.0'?>" + bomb + old.replace(b"<t>text</t>", b"<t>&a6;</t>"),
    )
    with pytest.raises(BadData, match="not a readable workbook"):
        read(path)


SHEET = "xl/worksheets/sheet1.xml"
UNSAFE = {
    "one entity, three million times": (
        lambda old: (
            b'<!DOCTYPE a [<!ENTITY a "%s">]>' % (b"A" * 290)
            + old.replace(b"<t>text</t>", b"<t>%s</t>" % (b"&a;" * 3_000_000))
        ),
        "declares a document type",
    ),
    "a document type in UTF-16": (
        lambda old: b"<!DOCTYPE worksheet>".decode().encode("utf-16") + old.decode().encode("utf-16")[2:],
        "declares a document type",
    ),
    "an attribute of 20 MB": (
        lambda old: old.replace(b'<row r="2"', b'<row r="2" x="%s"' % (b"y>" * 10_000_000)),
        "a tag in it is longer than 1,048,576 bytes",
    ),
}


@pytest.mark.parametrize(("change", "reason"), UNSAFE.values(), ids=UNSAFE)
def test_a_part_that_is_unsafe_to_parse_is_refused_before_it_is(change, reason, tmp_path, monkeypatch):
    """Of 14 kB that became 2.7 GB, of 24 kB that took 26 s."""
    path = change_part(write_book(tmp_path / "a.xlsx", [["text", "label"], ["x", "y"]]), SHEET, change)
    assert path.stat().st_size < 50_000
    monkeypatch.setattr(openpyxl, "load_workbook", lambda *given, **settings: pytest.fail("it was read"))
    with pytest.raises(BadData, match=f"a.xlsx: not a readable workbook: .*{reason}") as refused:
        read(path)
    assert "save it again" in refused.value.hint


def test_a_workbook_in_utf_16_with_comments_is_read(tmp_path):
    path = write_book(tmp_path / "a.xlsx", [["text", "label"], ["x", "y"]])
    change_part(path, SHEET, lambda old: ("<!-- a & b -->" + old.decode()).encode("utf-16"))
    assert read(path)[1] == [(2, {"text": "x", "label": "y"})]


def test_texts_that_cells_share_are_read(tmp_path):
    """As spreadsheet programs write them; openpyxl itself writes texts into their cells."""
    path = write_book(tmp_path / "a.xlsx", [["text", "label"], ["x", "y"]])
    space = b"http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    shared = b'<sst xmlns="%s"><si><t>shared words</t></si></sst>' % space
    kind = b"application/vnd.openxmlformats-officedocument.spreadsheetml.sharedStrings+xml"
    override = b'<Override PartName="/xl/sharedStrings.xml" ContentType="%s" /></Types>' % kind
    change_part(path, "[Content_Types].xml", lambda old: old.replace(b"</Types>", override))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("xl/sharedStrings.xml", shared)
    cell = b'<c r="A2" t="inlineStr"><is><t>x</t></is></c>'
    change_part(
        path,
        "xl/worksheets/sheet1.xml",
        lambda old: old.replace(cell, b'<c r="A2" t="s"><v>0</v></c>'),
    )
    _, records = read(path)
    assert records == [(2, {"text": "shared words", "label": "y"})]


def test_a_damaged_sheet_is_refused_where_it_is_damaged(tmp_path):
    path = write_book(tmp_path / "a.xlsx", [["text", "label"], *([f"row {number}", "y"] for number in range(50))])
    change_part(path, "xl/worksheets/sheet1.xml", lambda old: old[: len(old) // 2])
    with pytest.raises(BadData, match="not a readable workbook"):
        read(path)


ELEMENTS = {
    "rows": ("xl/worksheets/sheet1.xml", b"</sheetData>", b"<row/>"),
    "cells of one row": ("xl/worksheets/sheet1.xml", b"</row></sheetData>", b"<c/>"),
    "styles": ("xl/styles.xml", b"</cellXfs>", b"<xf/>"),
    "names": ("xl/workbook.xml", b"</workbook>", b"<a/>"),
}


@pytest.mark.parametrize(("part", "end", "element"), ELEMENTS.values(), ids=ELEMENTS)
def test_millions_of_empty_elements_are_refused_before_any_is_built(part, end, element, tmp_path, monkeypatch):
    """Of 100 kB that became 7 GB, or took minutes."""
    path = write_book(tmp_path / "a.xlsx", [["text", "label"], ["x", "y"]])
    change_part(path, part, lambda old: old.replace(end, element * 1_600_000 + end))
    assert path.stat().st_size < 50_000
    monkeypatch.setattr(openpyxl, "load_workbook", lambda *given, **settings: pytest.fail("it was read"))
    with pytest.raises(BadData, match="more than 1,500,000 tags"):
        read(path)


def test_a_row_far_below_brings_no_millions_of_empty_ones(tmp_path):
    path = write_book(tmp_path / "a.xlsx", [["text", "label"], ["x", "y"]])
    far = b'<row r="2000000000"><c r="A2000000000"><v>1</v></c></row></sheetData>'
    change_part(path, "xl/worksheets/sheet1.xml", lambda old: old.replace(b"</sheetData>", far))
    with pytest.raises(BadData, match="unpacks to more"):
        read(path)
