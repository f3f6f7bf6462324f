"""The sittings of a sweep add up, each with where its time went."""

from __future__ import annotations

import argparse
import json
import time
from types import SimpleNamespace

import pytest
import report
import sittings

from inlay.training.cohort.cohort import CohortSettings


def make_report(tmp_path, commit="abc"):
    return report.Report(argparse.Namespace(out=tmp_path / "report.json", commit=commit), ["sweep"], lambda parts: {})


def make_member(number):
    train = SimpleNamespace(lr=1e-3, epochs=3, seed=number)
    config = SimpleNamespace(train=train, method=SimpleNamespace(size=8))
    progress = SimpleNamespace(status="finished", best_metric=0.5 + number / 10)
    return SimpleNamespace(run=SimpleNamespace(id=f"run-{number}", config=config), progress=progress)


def sit(tmp_path, num_steps):
    """A sitting in which the first step compiles, every step is scored, and a run ends at the end."""
    heard = sittings.Sittings(4, tmp_path, make_report(tmp_path))
    earlier = len(heard.earlier)

    def step():
        if heard.now.steps == 0:
            heard.on_compile("compiling steps of up to 256 tokens")
        time.sleep(0.02)
        return 8

    calls = {"step": step, "finish_epochs": list, "refill": list}
    cohort = SimpleNamespace(num_seats=2, settings=CohortSettings(1024, 1, 100), **calls)
    with heard:
        heard.on_start(cohort)
        for _ in range(num_steps):
            num_rows = cohort.step()
            cohort.finish_epochs()
            heard.on_step(cohort, num_rows)
        heard.on_end(make_member(earlier))
    return heard


def test_sittings_add_up_and_a_step_that_compiles_counts_as_compiling(tmp_path):
    sit(tmp_path, 3)
    found = sit(tmp_path, 5).describe()
    assert found["steps"] == 8
    assert found["samples_trained"] == 64
    assert found["runs_ended"] == 2
    assert found["best_dev_so_far"] == pytest.approx(0.6)
    assert len(found["sittings"]) == 2
    assert found["seconds"] == pytest.approx(sum(found["sittings"]), abs=0.1)
    kept = json.loads((tmp_path / "sittings.json").read_text())["sittings"]
    for one, num_steps in zip(kept, (3, 5), strict=True):
        assert one["split"]["compiling"] >= 0.02
        assert one["split"]["steps"] >= 0.02 * (num_steps - 1)
        assert sum(one["split"].values()) <= one["seconds"]


def test_the_sittings_of_another_commit_are_refused(tmp_path):
    sit(tmp_path, 1)
    with pytest.raises(SystemExit, match="is of other commit"):
        sittings.Sittings(4, tmp_path, make_report(tmp_path, commit="def"))


def test_where_nothing_is_kept_a_signal_ends_the_next_step(tmp_path):
    told = make_report(tmp_path)
    heard = sittings.Sittings(4, None, told)
    heard.on_step(None, 8)
    told.is_told = True
    with pytest.raises(report.Stopped):
        heard.on_step(None, 8)
