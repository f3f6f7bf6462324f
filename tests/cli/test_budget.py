"""`train --budget`: candidates, halving and a deadline, on the screen and as data."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from inlay.training.cohort.cohort import Cohort
from inlay.training.run.plan import Durations

from .conftest import Inlay, Mail, write_mail

FAST = Durations(setup=0.01, once=0.0, epoch=0.01, dev=0.001, probe=0.001)


def command(mail: Mail, *more: object) -> tuple[object, ...]:
    # A head that begins fresh, four epochs; the rate is fixed, so the size is what is open.
    same = ("train", mail.data, "--task", "spent", "--backbone", mail.backbone, "--max-length", 24, "--lr", "1e-2")
    return (*same, *more)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are taken to be quick, however busy the machine is."""
    monkeypatch.setattr("inlay.training.measure_durations", lambda *given, **flags: FAST)


def test_candidates_are_tried_halved_and_the_best_published(inlay: Inlay, mail: Mail, quick: None) -> None:
    ended = inlay(*command(mail, "--epochs", 4, "--budget", "10m", "--test-share", 0.2))
    assert ended.status == 0, ended.err
    assert "2 candidates, of which continue: 1 after epoch 2" in ended.err
    assert "beside the usual settings: size 16" in ended.err
    assert ended.err.count("halved away at epoch 2: dev accuracy") == 1
    lines = ended.out.splitlines()
    assert lines[0].split() == ["lr", "size", "epochs", "dev", "accuracy", "epoch", "end"]
    assert lines[2].endswith("at its own end *")
    assert "halved away at epoch 2" in lines[3]
    assert "of 10 min 00 s; * is the candidate below" in ended.out
    assert "published  spent@1" in ended.out


def test_the_winner_is_the_run_it_would_be_alone_and_losers_stay_apart(inlay: Inlay, mail: Mail, quick: None) -> None:
    before = {path.name for path in (mail.store / "runs").iterdir()}
    given = command(mail, "--epochs", 4, "--budget", "10m", "--json")
    ended = inlay(*given)
    assert ended.status == 0, ended.err
    data, spent = ended.data, ended.data["budget"]
    assert spent["seconds"] == 600
    assert 0 < spent["spent"] < 600
    assert spent["is_enough"]
    assert spent["rungs"] == [{"epoch": 2, "kept": 1}]
    winner, loser = spent["candidates"]
    assert data["run"] == winner["run"]
    assert (winner["status"], winner["epochs_trained"]) == ("finished", 4)
    assert (loser["status"], loser["epochs_trained"]) == ("stopped-early", 2)
    assert {winner["values"]["method.size"], loser["values"]["method.size"]} == {64, 16}
    new = {path.name for path in (mail.store / "runs").iterdir()} - before
    assert new == {winner["run"]}, "a run that was halved away is not what its id stands for"
    alone = inlay(*command(mail, "--epochs", 4, "--size", winner["values"]["method.size"], "--json"))
    assert "finished before" in alone.err
    assert (alone.data["run"], alone.data["reference"]) == (winner["run"], data["reference"])
    again = inlay(*given)
    assert "all 2 runs were finished before" in again.err
    assert again.data["was_finished"]
    assert again.data["reference"] == data["reference"]
    assert again.data["budget"]["candidates"] == spent["candidates"]


def test_a_budget_that_is_too_small_trains_what_fits_and_says_so(
    inlay: Inlay, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Durations(setup=0.1, once=0.0, epoch=100.0, dev=0.01, probe=0.1)
    monkeypatch.setattr("inlay.training.measure_durations", lambda *given, **flags: slow)
    monkeypatch.setattr("inlay.training.recipe.halving.Halving.is_late", lambda self, num_active: True)
    ended = inlay(*command(mail, "--budget", "20s"))
    assert ended.status == 0, ended.err
    assert "that is too short for 1 epoch, for which use `--budget " in ended.err
    assert "the usual 10 epochs need `--budget 20m`" in ended.err
    assert "the budget is spent *" in ended.out
    assert "published  spent@1" in ended.out
    (folder,) = (mail.store / "budgets").iterdir()
    (history,) = folder.glob("*/metrics.jsonl")
    assert [json.loads(line)["step"] for line in history.read_text().splitlines()] == [1]


def test_fewer_epochs_than_usual_are_told(inlay: Inlay, mail: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Durations(setup=0.1, once=0.0, epoch=100.0, dev=0.0, probe=0.0)
    monkeypatch.setattr("inlay.training.measure_durations", lambda *given, **flags: slow)
    ended = inlay(*command(mail, "--budget", "6m", "--no-publish", "--json"))
    assert "there is time for 3 of the usual 10 epochs, which need `--budget 20m`" in ended.err
    (only,) = ended.data["budget"]["candidates"]
    assert (only["values"]["train.epochs"], only["status"]) == (3, "finished")


def test_ctrl_c_saves_and_the_same_command_goes_on_with_the_rest(
    inlay: Inlay, mail: Mail, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = command(mail, "--epochs", 4, "--budget", "10m", "--json")
    real = Cohort.step

    def interrupted(self: Cohort) -> int:
        if self.num_steps == 7:  # in the third epoch, after the rung
            os.kill(os.getpid(), signal.SIGINT)
        return real(self)

    monkeypatch.setattr(Cohort, "step", interrupted)
    stopped = inlay(*given)
    assert stopped.status != 0
    assert "the same command goes on from there" in stopped.err
    monkeypatch.setattr(Cohort, "step", real)
    ended = inlay(*given)
    assert ended.status == 0, ended.err
    assert "going on after step 8" in ended.err
    assert re.search(r"budget: \d s were trained before, the other 59\d s", ended.err)
    spent = ended.data["budget"]
    assert spent["trained_before"] > 0
    assert [item["epochs_trained"] for item in spent["candidates"]] == [4, 2]


def test_restart_makes_another_plan(inlay: Inlay, mail: Mail, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = command(mail, "--epochs", 4, "--budget", "10m", "--json")
    real = Cohort.step

    def interrupted(self: Cohort) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return real(self)

    monkeypatch.setattr(Cohort, "step", interrupted)
    assert inlay(*given).status != 0
    monkeypatch.setattr(Cohort, "step", real)
    ended = inlay(*given, "--restart")
    assert ended.status == 0, ended.err
    assert "going on after" not in ended.err
    assert ended.data["budget"]["trained_before"] == 0


def test_what_no_budget_can_be_is_refused_before_any_work(inlay: Inlay, tmp_path: Path) -> None:
    ended = inlay("train", write_mail(tmp_path / "mail.csv"), "--budget", "soon")
    assert (ended.status, ended.out) == (2, "")
    assert "`--budget` is `soon`" in ended.err
    both = inlay("train", write_mail(tmp_path / "mail.csv"), "--budget", "5m", "--folds", 3)
    assert (both.status, both.out) == (2, "")
    assert "`--folds 3` with `--budget 5m`" in both.err
    assert "columns:" not in both.err
    assert "columns:" not in ended.err
