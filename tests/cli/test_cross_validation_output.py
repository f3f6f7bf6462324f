"""`train --folds`: an honest score beside the version, which is the one that would be published without it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from .conftest import SETTINGS, Inlay, write_mail


@pytest.fixture
def command(tiny_bert_folder: Path, tmp_path: Path) -> tuple[object, ...]:
    data = write_mail(tmp_path / "mail.csv", num_rows=60)
    return ("train", data, "--backbone", tiny_bert_folder, *SETTINGS, "--folds", 3)


def test_the_report_has_both_scores_and_show_keeps_them(inlay: Inlay, command: tuple[object, ...]) -> None:
    ended = inlay(*command)
    assert ended.status == 0
    assert "cross-validation: 3 folds trained together, each on about 36 rows (4 more choose its epoch)" in ended.err
    assert "3 runs together" in ended.err
    assert "folds      cross-validated (3 folds): accuracy " in ended.out
    assert "over all 60 rows left out (95% interval" in " ".join(ended.out.split())
    assert "was trained on 54 rows, with 6 dev rows to choose its epoch" in " ".join(ended.out.split())
    again = inlay(*command, "--json")
    assert "all 3 runs were finished before" in again.err
    found = again.data["folds"]
    assert (found["num_folds"], found["num_rows"], len(found["runs"])) == (3, 60, 3)
    shown = inlay("show", "mail").out
    mean, error = found["mean"]["accuracy"], found["standard_error"]["accuracy"]
    assert f"3 folds      accuracy {mean:.4f} ± {error:.4f}" in shown
    assert f"{found['pooled']['accuracy']['value']:.4f} over all 60 rows left out" in shown
    assert inlay("show", "mail", "--json").data["metrics"]["folds"] == found["mean"]


def test_the_version_is_that_of_the_same_run_without_folds(inlay: Inlay, command: tuple[object, ...]) -> None:
    folded = inlay(*command, "--json").data
    plain = inlay(*command[:-2], "--name", "plain", "--json").data
    assert plain["was_finished"]
    assert folded["run"] == plain["run"]
    assert "folds" not in plain
    assert {**folded["metrics"], "folds": None} == {**plain["metrics"], "folds": None}
    runs = [Path(folded["folder"]).parent / run["run_id"] for run in folded["folds"]["runs"]]
    assert not [path for run in runs for path in run.glob("*.safetensors")]
    assert (Path(folded["folder"]) / "best.safetensors").is_file()


def test_ctrl_c_in_the_folds_saves_and_the_same_command_goes_on(
    inlay: Inlay, command: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from inlay.pipeline import TrainingProgress
    from inlay.training.events import Event, StepTaken

    real = TrainingProgress.__call__

    def interrupt_at_step_3(self: TrainingProgress, event: Event) -> None:
        real(self, event)
        if isinstance(event, StepTaken) and event.cohort.num_steps == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingProgress, "__call__", interrupt_at_step_3)
        assert inlay(*command).status == 130
    ended = inlay(*command)
    assert ended.status == 0
    assert "going on after step 3" in ended.err
    assert "cross-validated (3 folds)" in ended.out


@pytest.mark.parametrize(("folds", "reason"), [(1, "--folds"), (70, "70 folds of 60 different texts")])
def test_folds_that_cannot_be_are_refused(inlay: Inlay, command: tuple[object, ...], folds: int, reason: str) -> None:
    ended = inlay(*command[:-1], folds)
    assert ended.status != 0
    assert reason in ended.err
    assert "Traceback" not in ended.err
