"""Kernels beside other ways: what needs no compiler comes first, and getting ready has a limit."""

from __future__ import annotations

import argparse
import sys
import time

import kernel_ways
import pytest


def make_case(name, makers, compiled=()):
    rivals = {"kernel": ("ours", tuple(way for way in makers if way != "ours"))}
    return kernel_ways.Case(name, {"width": 8}, tuple(makers), compiled, lambda: makers, rivals)


def spin():
    while True:
        time.sleep(0.01)


def test_compiled_ways_come_after_all_cases_one_by_one_with_ours_beside_them():
    makers = dict.fromkeys(("ours", "eager", "compiled", "unrolled"), lambda: lambda: None)
    cases = [make_case(name, makers, ("compiled", "unrolled")) for name in ("small", "large")]
    planned = {name: ways for name, (_, ways) in kernel_ways.plan(cases, is_compiled=True).items()}
    assert list(planned.items()) == [
        ("small: at once", ("ours", "eager")),
        ("large: at once", ("ours", "eager")),
        ("small: compiled", ("ours", "compiled")),
        ("large: compiled", ("ours", "compiled")),
        ("small: unrolled", ("ours", "unrolled")),
        ("large: unrolled", ("ours", "unrolled")),
    ]
    assert list(kernel_ways.plan(cases, is_compiled=False)) == list(planned)[:2]


def test_a_way_that_takes_too_long_or_fails_is_named_and_the_others_are_measured():
    def broken():
        raise ValueError("no such product\nmore of it")

    makers = {"ours": lambda: lambda: None, "slow": lambda: spin, "broken": lambda: broken}
    options = argparse.Namespace(way_limit_s=0.2, compiled_limit_s=0.2, launched=False, repeats=2)
    part = kernel_ways.measure_part(make_case("small", makers), tuple(makers), options)
    assert set(part["microseconds"]) == {"ours"}
    assert part["failed"] == {"slow": "not ready after 0.2 s", "broken": "ValueError: no such product"}
    assert part["error"]  # tried again when the report is gone on with


def test_the_limit_is_gone_with_its_block():
    with kernel_ways.limited(0.05):
        pass
    time.sleep(0.1)
    with pytest.raises(kernel_ways.TooLong), kernel_ways.limited(0.05):
        spin()


def test_a_verdict_compares_times_of_one_part_and_names_what_is_not_known():
    makers = dict.fromkeys(("ours", "eager", "compiled", "unrolled"), lambda: lambda: None)
    case = make_case("small", makers, ("compiled", "unrolled"))
    parts = {
        "small: at once": {"microseconds": {"ours": 10.0, "eager": 30.0}},
        "small: compiled": {"microseconds": {"ours": 20.0, "compiled": 23.0}},  # the machine was slower by then
    }
    (found,) = kernel_ways.find_verdicts([case], parts)
    assert found["other"] == "compiled"
    assert found["ratio"] == pytest.approx(1.15)
    assert found["passes"] == "yes"
    assert found["not_measured"] == ["unrolled"]
    lines = kernel_ways.describe_verdicts([found])
    assert "1.15×, at least 1.1×" in lines[0]
    assert lines[-1] == "kernel: passes: yes, 1.15× at least; at least 1.1× in 1 of 1 cases measured, of 1"


def test_a_kernel_passes_only_where_it_was_measured():
    makers = dict.fromkeys(("ours", "eager"), lambda: lambda: None)
    cases = [make_case(name, makers) for name in ("small", "large")]
    nothing = kernel_ways.find_verdicts(cases, {})
    assert [one["passes"] for one in nothing] == ["not measured"] * 2
    assert kernel_ways.judge_kernels(nothing)["kernel"]["passes"] == "not measured"
    parts = {"small: at once": {"microseconds": {"ours": 10.0, "eager": 30.0}}}
    (judged,) = kernel_ways.judge_kernels(kernel_ways.find_verdicts(cases, parts)).values()
    assert (judged["passes"], judged["cases_measured"], judged["cases"]) == ("yes", 1, 2)
    assert judged["not_measured"] == ["large: eager"]
    parts["large: at once"] = {"microseconds": {"ours": 10.0, "eager": 10.9}}
    (judged,) = kernel_ways.judge_kernels(kernel_ways.find_verdicts(cases, parts)).values()
    assert (judged["passes"], judged["fails_in"]) == ("no", ["large"])


def test_compiled_ways_have_a_limit_of_their_own():
    makers = {"ours": lambda: lambda: None, "compiled": lambda: spin}
    options = argparse.Namespace(way_limit_s=60, compiled_limit_s=0.2)
    ready, failed = kernel_ways.make_ready(make_case("small", makers, ("compiled",)), tuple(makers), options)
    assert set(ready) == {"ours"}
    assert failed == {"compiled": "not ready after 0.2 s"}


def test_shares_are_all_parts_once():
    parts = list(range(7))
    shares = [parts[kernel_ways.share_of(f"{place}/3")] for place in range(3)]
    assert sorted(part for share in shares for part in share) == parts


def test_processes_ahead_get_a_share_each_and_end_with_their_time(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "place = sys.argv[-1].replace('/', '-')\n"
        "pathlib.Path(sys.argv[1], place).touch()\n"
        "time.sleep(600 if place == '1-2' else 0)\n"
    )
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path)])
    began = time.monotonic()
    kernel_ways.compile_ahead(2, limit_s=5)
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "0-2", "1-2"}
    assert time.monotonic() - began < 60
