"""Encodings are found over the whole file, and what is no text is refused with its place."""

import pytest

from inlay.data import data_files
from inlay.data.data_files import local_file
from inlay.data.file_formats import find_encoding
from inlay.errors import BadConfig, BadData


def write(tmp_path, content):
    path = tmp_path / "data.csv"
    path.write_bytes(content)
    return local_file(path)


@pytest.mark.parametrize(
    ("content", "name", "note"),
    [
        ("text\ncafé\n".encode(), "utf-8", None),
        (b"text\nplain\n", "utf-8", None),
        ("text\ncafé\n".encode("utf-8-sig"), "utf-8-sig", "data.csv: read as utf-8-sig"),
        ("text\ncafé\n".encode("utf-16"), "utf-16", "data.csv: read as utf-16"),
        (
            "text\ncafé\n".encode("latin-1"),
            "latin-1",
            "data.csv: not utf-8 (byte 0xe9 at position 8, line 2): read as latin-1",
        ),
        (
            "text\n\u201ccaf\u00e9\u201d\n".encode("cp1252"),
            "cp1252",
            "data.csv: not utf-8 (byte 0x93 at position 5, line 2): read as cp1252 (latin-1 with curly quotes)",
        ),
        (b"text\n\x81\xe9\n", "latin-1", "data.csv: not utf-8 (byte 0x81 at position 5, line 2): read as latin-1"),
    ],
)
def test_encoding_is_found_and_noted(tmp_path, content, name, note):
    found = find_encoding(write(tmp_path, content))
    assert found.name == name
    assert found.notes == (() if note is None else (note,))


def test_character_across_two_chunks_is_no_trouble(tmp_path, monkeypatch):
    path = write(tmp_path, "é€𝄞\n".encode() * 50)
    for size in (1, 2, 3, 5, 7):
        monkeypatch.setattr(data_files, "CHUNK_BYTES", size)
        assert find_encoding(path).name == "utf-8"


def test_trouble_in_a_late_chunk_has_its_place(tmp_path, monkeypatch):
    content = "é\n".encode() * 10 + b"\xe9\n"
    for size in (1, 3, 4, 1000):
        monkeypatch.setattr(data_files, "CHUNK_BYTES", size)
        assert find_encoding(write(tmp_path, content)).notes == (
            "data.csv: not utf-8 (byte 0xe9 at position 30, line 11): read as latin-1",
        )


def test_given_encoding_is_used_and_checked(tmp_path):
    path = write(tmp_path, "a\nb\ncafé\n".encode("latin-1"))
    assert find_encoding(path, "latin-1") == ("latin-1", ())
    with pytest.raises(BadData, match=r"data\.csv:3: wrong encoding: not utf-8 \(byte 0xe9 at position 7, line 3\)"):
        find_encoding(path, "utf-8")
    with pytest.raises(BadConfig, match=r"`data\.encoding` is `utf-99`"):
        find_encoding(path, "utf-99")
    with pytest.raises(BadConfig, match="text encoding"):
        find_encoding(path, "base64")


def test_mark_is_not_read_as_a_letter_when_utf8_is_given(tmp_path):
    assert find_encoding(write(tmp_path, "text\n".encode("utf-8-sig")), "UTF8").name == "utf-8-sig"


@pytest.mark.parametrize(
    "content",
    [
        b"text,label\nab\x00c,1\n",
        b"text,label\n\xff\xfe\x00\x01,1\n",
        b"\x1f\x8b" + bytes(range(1, 256)) * 3,
    ],
)
def test_binary_file_is_refused(tmp_path, content):
    with pytest.raises(BadData, match=r"data\.csv:\d: a binary file") as caught:
        find_encoding(write(tmp_path, content))
    assert "unpack" in caught.value.hint


@pytest.mark.parametrize("encoding", ["punycode", "idna", "unicode_escape", "raw_unicode_escape", "undefined", "a\0b"])
def test_an_encoding_that_no_file_has_is_refused(tmp_path, encoding):
    with pytest.raises(BadConfig, match=r"`data\.encoding` is"):
        find_encoding(write(tmp_path, b"text,label\na_b,x\n"), encoding)


def test_utf_16_without_its_mark_is_a_wrong_encoding(tmp_path):
    with pytest.raises(BadData, match="wrong encoding: not utf-16"):
        find_encoding(write(tmp_path, b"text,label\na,x\n"), "utf-16")
