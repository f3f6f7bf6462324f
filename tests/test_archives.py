"""Zip files from outside: one error for all that is wrong, and no more memory than their content is worth."""

from __future__ import annotations

import random
import struct
import zipfile

import pytest

from inlay.archives import open_archive
from inlay.errors import StoreDamaged
from inlay.store.json_values import MOST_VALUES, parse_json


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(zipfile.ZipInfo("first"), b"1" * 300)
        file.writestr(zipfile.ZipInfo("second"), b"2")
    return path


def test_an_archive_is_read_as_python_reads_it(archive):
    with open_archive(archive, 1000) as file:
        assert [(name, len(file.read(name))) for name in file.namelist()] == [("first", 300), ("second", 1)]


def test_a_list_of_a_million_entries_is_refused_unread(archive, monkeypatch):
    content = archive.read_bytes()
    start, end = content.index(b"PK\x01\x02"), content.index(b"PK\x05\x06")
    entries = content[start:end] * 20_000
    last = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 40_000, 40_000, len(entries), start, 0)
    archive.write_bytes(content[:start] + entries + last)
    monkeypatch.setattr(zipfile, "ZipInfo", lambda *given, **settings: pytest.fail("an entry was made"))
    with pytest.raises(zipfile.BadZipFile, match=r"list of entries is [0-9,]+ bytes long"), open_archive(archive, 1000):
        pass


def test_whatever_is_wrong_with_an_archive_is_one_error(archive):
    """A name that is no utf-8, a time that is none, a size beyond the file, an entry that is encrypted …"""
    content, chance = archive.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(3000):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 1, 2, 4))):
            damaged[chance.randrange(len(damaged))] = chance.choice((0, 1, 8, 0x7F, 0xFF, chance.randrange(256)))
        archive.write_bytes(damaged)
        try:
            with open_archive(archive, 1000) as file:
                assert all(len(file.read(name)) < 1000 for name in file.namelist())
        except (zipfile.BadZipFile, OSError):
            refused += 1
    assert refused > 500


@pytest.mark.parametrize("value", ["[]", "{}", "1", '""'])
@pytest.mark.parametrize("as_text", [str, str.encode])
def test_json_of_more_values_than_anything_has_is_refused_before_it_is_parsed(value, as_text, monkeypatch):
    text = as_text('{"a":[' + f"{value}," * MOST_VALUES + "1]}")
    monkeypatch.setattr("json.loads", lambda *given, **settings: pytest.fail("it was parsed"))
    with pytest.raises(StoreDamaged, match=r"here: about [0-9,]+ JSON values, more than 2,000,000"):
        parse_json(text, "here")
