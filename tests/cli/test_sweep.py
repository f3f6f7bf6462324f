"""`sweep`: one cohort, a table, the best published."""

from __future__ import annotations

from .conftest import Inlay, Mail

GRID = ("--lr", "1e-3,1e-2", "--size", "4,8", "--seeds", 2, "--epochs", 2, "--max-length", 24)


def test_sweep_ranks_every_combination_and_publishes_the_best(inlay: Inlay, mail: Mail) -> None:
    command = ("sweep", mail.data, "--task", "swept", "--backbone", mail.backbone, *GRID)
    ended = inlay(*command, "--json")
    assert ended.status == 0
    data = ended.data
    scores = [run["dev_metric"] for run in data["runs"]]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 8
    assert len({tuple(run["values"].items()) for run in data["runs"]}) == 4
    for setting in data["settings"]:
        own = [run["dev_metric"] for run in data["runs"] if run["values"] == setting["values"]]
        assert setting["mean"] == sum(own) / 2
    assert data["best"]["reference"] == "swept@1"
    assert data["best"]["run"] == data["runs"][0]["run_id"]
    shown = inlay("show", "swept", "--json").data
    assert shown["metrics"]["dev"][shown["metric"]] == scores[0]
    cohorts = list((mail.store / "runs" / "cohorts").glob("*/cohort.json"))
    assert len(cohorts) == 2, "mail's own cohort, and one for the whole sweep"
    again = inlay(*command, "--no-publish")
    assert "all 8 runs were finished before" in again.err
    assert "mean dev accuracy" in again.out
    assert "published" not in again.out


def test_every_ended_run_of_a_sweep_is_named(inlay: Inlay, mail: Mail) -> None:
    command = ("sweep", mail.data, "--task", "swept", "--backbone", mail.backbone, "--epochs", 1, "--max-length", 24)
    ended = inlay(*command, "--method", "bitfit,top", "--lr", "1e-4,1e-3", "--no-publish")
    assert ended.status == 0, ended.err
    for name in ("bitfit  lr 0.0001", "bitfit  lr 0.001", "top  lr 0.0001", "top  lr 0.001"):
        assert f"\n{name}  seed 0  72 rows  dev accuracy " in ended.err
    assert "None" not in ended.out + ended.err
    assert "\nepoch 1/1" not in ended.err


def test_a_sweep_says_how_many_runs_train_at_a_time_and_how_many_wait(inlay: Inlay, mail: Mail) -> None:
    command = ("sweep", mail.data, "--task", "swept", "--backbone", mail.backbone, "--epochs", 1, "--max-length", 24)
    few = ("--max-cohort", 2, "--token-budget", 500, "--checkpointing")
    ended = inlay(*command, "--lr", "1e-4,1e-3,1e-2", "--no-publish", *few)
    assert ended.status == 0, ended.err
    told = "\n2 runs together, 1 waiting, up to 500 tokens a forward pass, activations computed again\n"
    assert told in ended.err


def test_bad_value_of_a_sweep_is_refused_before_any_work(inlay: Inlay, mail: Mail) -> None:
    ended = inlay("sweep", mail.data, "--backbone", mail.backbone, "--lr", "1e-3,fast")
    assert (ended.status, ended.out) == (2, "")
    assert "`train.lr` is `fast`" in ended.err
    assert "columns:" not in ended.err, "the data was not read"
