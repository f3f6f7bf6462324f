"""The benches of the kernels run whole in Triton's interpreter, at shapes that measure nothing: `make triton`."""

from __future__ import annotations

import json
import sys

import bottlenecks
import kernel_ways
import norm_attention
import pytest

pytestmark = pytest.mark.triton
TINY = {
    bottlenecks: ["--shape", "tiny", "tiny-wide"],
    norm_attention: ["--shape", "tiny", "tiny-single", "--dtype", "float32"],
}


def run(module, options, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module.__file__, *TINY[module], *options])
    monkeypatch.setattr(kernel_ways, "CALLS", 1)
    module.main()


@pytest.mark.parametrize("module", TINY, ids=lambda module: module.__name__)
def test_every_way_that_needs_no_compiler_is_measured_and_every_kernel_judged(module, monkeypatch, tmp_path, capfd):
    path = tmp_path / "report.json"
    run(module, ["--without-compiled", "--repeats", "1", "--out", str(path)], monkeypatch)
    report = json.loads(path.read_text(encoding="utf8"))
    assert not {name: part["failed"] for name, part in report["parts"].items() if part["failed"]}
    assert "stopped" not in report
    assert {judged["passes"] for judged in report["kernels"].values()} <= {"yes", "no"}
    assert all(way.endswith("compiled") for one in report["verdicts"] for way in one["not_measured"])


@pytest.mark.parametrize("module", TINY, ids=lambda module: module.__name__)
def test_cuts_of_every_program_are_tried(module, monkeypatch, capfd):
    for name in ("CUTS", "WEIGHTS_CUTS", "TRIED"):
        cuts = getattr(module, name, None)
        if isinstance(cuts, dict):
            monkeypatch.setattr(module, name, {key: tried[:2] for key, tried in cuts.items()})
        elif cuts is not None:
            monkeypatch.setattr(module, name, cuts[:2])
    run(module, ["--tune"], monkeypatch)
    shown = capfd.readouterr().out
    assert "inf" not in shown
    for program in {"bottlenecks": ("forward", "backward tokens", "backward weights")}.get(
        module.__name__, ("norm tiny FORWARD", "norm tiny BACKWARD", "attention tiny BACKWARD")
    ):
        assert program in shown
