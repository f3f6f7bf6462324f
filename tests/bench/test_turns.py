"""Ways measured in turns: whole turns count, a way that fails is left out, and a stopped measurement goes on."""

from __future__ import annotations

import argparse
import json

import pytest
import report
import turns
from turns import Way

STUB = """
import json, sys, time
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "prepare":
        job = request
        print(json.dumps({"says": "loading"}), flush=True)
        time.sleep(job.get("sleep", 0))
        if job.get("dies"):
            sys.exit("no memory is left")
        print(json.dumps({"error": job["error"]} if "error" in job else {"kind": job["kind"]}), flush=True)
    else:
        seconds = job["seconds"].pop(0) if len(job["seconds"]) > 1 else job["seconds"][0]
        if seconds is None:
            print(json.dumps({"error": "out of memory"}), flush=True)
        else:
            print(json.dumps({"seconds": seconds, "samples": 12 * request["steps"]}), flush=True)
"""


@pytest.fixture
def options(tmp_path, monkeypatch):
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(turns, "OURS", tmp_path / "stub.py")
    monkeypatch.setattr(turns, "PEER", tmp_path / "stub.py")
    known = {"out": tmp_path / "report.json", "commit": "abc", "resume": False, "folder": tmp_path, "turns": 2}
    limits = {"adapters_python": None, "at_once": 2, "prepare_limit_s": 20.0, "device": "cpu"}
    return argparse.Namespace(**known, **limits)


def way(name, seconds, **more):
    return Way(name, {"kind": name, "seconds": seconds, **more}, is_ours=name == "ours")


def measure(options, ways):
    planned = turns.plan_turns(options)
    found = report.Report(options, planned, lambda parts: {"ways": turns.describe(ways), "ratios": turns.ratios(ways)})
    turns.measure_in_turns(ways, options, {one.name: 1 for one in ways}, found)
    return found


def test_rates_are_those_of_the_turns_and_the_warm_up_is_only_a_fact(options, capfd):
    ways = [way("ours", [9, 1, 2]), way("peer", [9, 4, 4])]
    found = measure(options, ways)
    assert [one.rates for one in ways] == [[12, 6], [3, 3]]
    assert ways[0].facts == {"kind": "ours", "warm_up_samples_per_s": round(12 / 9, 1)}
    assert turns.ratios(ways)["ours"]["peer"] == {"median": 3, "low": 2, "high": 4}
    assert found.missing == []
    said = capfd.readouterr().err
    assert "ours: loading" in said
    assert said.index("warm-up: measuring peer") < said.index("turn 1: measuring ours")


def test_ways_that_fail_say_why_and_the_others_go_on(options):
    options.prepare_limit_s, options.at_once = 3.0, 4
    fails = {"dies": {"dies": True}, "error": {"error": "no such library"}, "slow": {"sleep": 60}}
    ways = [way("ours", [1]), *(way(name, [1], **more) for name, more in fails.items()), way("peer", [1, None])]
    measure(options, ways)
    assert ways[0].rates == [12, 12]
    assert [one.error for one in ways] == [
        "",
        "ended without an answer, with status 1; its log ends with: no memory is left",
        "no such library",
        "took longer than 3 s",
        "out of memory",
    ]
    assert set(turns.describe(ways)["dies"]) == {"error"}
    assert turns.ratios(ways) == {"ours": {}}


def test_a_stopped_measurement_goes_on_with_the_turns_that_are_missing_and_the_ways_that_were_whole(options):
    options.turns = 1
    measure(options, [way("ours", [9, 1]), way("bad", [None]), way("peer", [9, 4])])
    options.turns, options.resume = 3, True
    ways = [way("ours", [9, 2, 3]), way("bad", [1]), way("peer", [9, 4])]
    found = measure(options, ways)
    assert [one.rates for one in ways] == [[12, 6, 4], [], [3, 3, 3]]
    assert ways[1].error == "out of memory"
    assert sorted(json.loads(options.out.read_text())["parts"]) == ["turn 1", "turn 2", "turn 3", "ways"]
    assert found.missing == []
