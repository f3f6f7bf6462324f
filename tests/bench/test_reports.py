"""A report that grows is whole at every moment, ends at a signal with what it has, and goes on from there."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import report

PARTS = ("one", "two", "three")


def make(path: Path, *, resume: bool = False, commit: str = "abc", size: int = 64) -> report.Report:
    options = argparse.Namespace(out=path, commit=commit, resume=resume, size=size)
    return report.Report(options, PARTS, lambda parts: {"total": sum(parts.values())}, settings=("size",))


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf8"))


def test_every_part_is_on_disk_as_soon_as_it_is_there_and_the_missing_ones_are_named(tmp_path):
    found = make(tmp_path / "new" / "report.json")
    for number, name in enumerate(PARTS, start=1):
        found.add(name, number)
        now = read(tmp_path / "new" / "report.json")
        assert now["parts"] == dict(zip(PARTS[:number], range(1, number + 1), strict=True))
        assert now["total"] == sum(range(1, number + 1))
        assert now.get("stopped", {"missing": []})["missing"] == list(PARTS[number:])
    assert "stopped" not in read(tmp_path / "new" / "report.json")


@pytest.mark.parametrize("number", report.SIGNALS)
def test_a_signal_ends_the_block_and_what_was_measured_stays(tmp_path, monkeypatch, number):
    statuses = []
    monkeypatch.setattr(report.os, "_exit", statuses.append)
    found = make(tmp_path / "report.json")
    with found:
        found.add("one", 1)
        signal.raise_signal(number)
        found.add("two", 2)
    found.finish()
    assert found.missing == ["two", "three"]
    assert statuses == [report.STOPPED]
    assert read(tmp_path / "report.json")["stopped"] == {"missing": ["two", "three"]}


def test_a_report_that_was_not_stopped_leaves_the_signals_as_they_were(tmp_path):
    before = [signal.getsignal(number) for number in report.SIGNALS]
    with make(tmp_path / "report.json"):
        assert [signal.getsignal(number) for number in report.SIGNALS] != before
    assert [signal.getsignal(number) for number in report.SIGNALS] == before


def test_a_process_that_hears_no_exception_is_ended_all_the_same(tmp_path):
    script = f"""
import argparse, sys, time
sys.path.insert(0, {str(Path(report.__file__).parent)!r})
import report
report.describe_hardware, report.find_versions = dict, dict  # no library is needed here
found = report.Report(argparse.Namespace(out=None, commit="abc"), ["one"], dict, grace_s=0.2)
with found:
    while True:
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            pass
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout.readline() == b"ready\n"
        began = time.monotonic()
        process.terminate()
        assert process.wait(10) == report.STOPPED
        assert time.monotonic() - began < 5
        process.communicate()


def test_a_resumed_report_has_the_parts_that_were_measured_and_tries_failed_ones_again(tmp_path):
    first = make(tmp_path / "report.json")
    first._compose = lambda parts: {}
    first.add("one", 1)
    first.add("two", {"error": "took too long"})
    again = make(tmp_path / "report.json", resume=True)
    assert again.parts == {"one": 1}
    assert again.missing == ["two", "three"]
    assert make(tmp_path / "report.json").missing == list(PARTS)  # not asked to go on
    assert make(tmp_path / "other.json", resume=True).missing == list(PARTS)  # nothing there


@pytest.mark.parametrize(("change", "named"), [({"commit": "def"}, "commit"), ({"size": 8}, "settings")])
def test_a_report_of_another_commit_or_other_settings_is_not_gone_on_with(tmp_path, change, named):
    make(tmp_path / "report.json").add("one", 1)
    with pytest.raises(SystemExit, match=f"is of other {named}"):
        make(tmp_path / "report.json", resume=True, **change)
