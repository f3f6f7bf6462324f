"""Kernels beside other ways: what needs no compiler comes first, and getting ready has a limit."""

from __future__ import annotations

import argparse
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
    options = argparse.Namespace(way_limit_s=0.2, launched=False, repeats=2)
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
    assert found["is_worth_it"]
    assert found["not_measured"] == ["unrolled"]
    lines = kernel_ways.describe_verdicts([found])
    assert "1.15×, at least 1.1×" in lines[0]
    assert lines[-1].endswith("at least 1.1× in 1 of 1 cases")
