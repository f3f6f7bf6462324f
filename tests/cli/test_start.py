"""`--from`, `suggest`, `baseline`, `--preset` and `presets` on the command line."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from .conftest import Inlay, Mail, write_mail

QUICK = ("--epochs", 1, "--lr", "1e-2", "--max-length", 24, "--batch-size", 16)


@pytest.fixture
def post(mail: Mail, tmp_path: Path) -> tuple[object, ...]:
    """New data with the labels of the task `mail`, on its backbone."""
    return (write_mail(tmp_path / "post.csv", 40, seed=3), "--backbone", mail.backbone)


def test_train_from_a_task_has_its_method_and_head_and_shows_the_lineage(inlay: Inlay, mail: Mail, post: tuple) -> None:
    ended = inlay("train", *post, "--from", "mail", *QUICK, "--json")
    assert ended.status == 0, ended.err
    assert "starts from `mail@1`, head included" in ended.err
    assert "starts from `mail@1`, head included" in ended.data["notes"]
    assert "houlsby of size 8" in ended.err, "the size of mail, not the default"
    shown = inlay("show", "post", "--json").data
    digest = inlay("show", "mail", "--json").data["digest"]
    assert shown["extra"]["from"] == [{"reference": "mail@1", "digest": digest}]
    assert shown["config"]["start"] == [f"mail@1:{digest[:12]}"]
    assert f"started from  mail@1 ({digest[:12]})" in inlay("show", "post").out
    folder = Path(shown["run_folder"])
    again = inlay("train", "--config", folder / "config.toml", "--json")
    assert again.data["was_finished"], "the settings in the run's folder are the same run"


def test_from_with_another_size_is_refused_naming_both(inlay: Inlay, mail: Mail, post: tuple) -> None:
    for more in (("--size", 64), ("--set", "method.size=64")):
        ended = inlay("train", *post, "--from", "mail", *more)
        assert ended.status == 2
        assert "`method.size` is `64`, but `mail@1` has `8`" in ended.err
        assert "leave it out" in ended.err
    ended = inlay("train", *post, "--from", "mail", "--method", "lora")
    assert ended.status == 2
    assert "`method.name` is `lora`, but `mail` has `houlsby`" in ended.err
    ended = inlay("plan", *post, "--from", "male")
    assert (ended.status, "did you mean `mail`?" in ended.err) == (3, True)


def test_sweep_starts_every_run_from_the_task(inlay: Inlay, mail: Mail, post: tuple) -> None:
    ended = inlay("sweep", *post, "--from", "mail", "--lr", "1e-3,1e-2", "--epochs", 1, "--max-length", 24, "--json")
    assert ended.status == 0, ended.err
    assert "starts from `mail@1`" in ended.err
    assert len(ended.data["runs"]) == 2
    assert inlay("show", "post", "--json").data["extra"]["from"][0]["reference"] == "mail@1"


def test_suggest_ranks_the_tasks_and_gives_a_command_that_works(inlay: Inlay, mail: Mail, post: tuple) -> None:
    ended = inlay("suggest", *post, "--json")
    assert ended.status == 0, ended.err
    (only,) = ended.data["ranked"]
    assert only["reference"] == "mail@1"
    assert only["gain"] == pytest.approx(only["score"] - ended.data["plain"]["score"])
    words = shlex.split(ended.data["next"])
    assert words[:3] == ["inlay", "train", str(post[0])]
    assert ("--from" in words) == (only["gain"] > 0)
    assert inlay(*words[1:], *QUICK).status == 0
    few = inlay("suggest", *post, "--rows", 16, "--among", "mail")
    assert "too few to rank starts reliably" in few.err
    shown = few.out
    assert "(the backbone)" in shown
    assert "16 used" in shown


def test_suggest_without_candidates_says_what_to_do(inlay: Inlay, mail: Mail, post: tuple, tmp_path: Path) -> None:
    ended = inlay("suggest", *post, "--store", tmp_path / "empty")
    assert (ended.status, "train one first" in ended.err) == (9, True)


def test_baseline_learns_the_mail_and_stores_nothing(inlay: Inlay, mail: Mail) -> None:
    before = inlay("tasks", "--json").data
    where = (mail.data, "--test-share", 0.2, "--backbone", mail.backbone)
    ended = inlay("baseline", *where, "--json")
    assert ended.status == 0, ended.err
    assert ended.data["metrics"]["dev"]["accuracy"] == 1.0
    assert set(ended.data["metrics"]) == set(ended.data["probe"]["metrics"]) == {"dev", "test"}
    assert inlay("tasks", "--json").data == before
    shown = inlay("baseline", *where, "--chars").out
    assert "test  accuracy 1.0000" in shown
    assert "parameters" in shown
    assert "'s frozen vectors" in shown
    alone = inlay("baseline", *where, "--no-probe", "--json").data
    assert alone["metrics"] == ended.data["metrics"]
    assert "probe" not in alone


def test_preset_sets_what_nothing_else_says(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('preset = "uva2019"\n[train]\nepochs = 3\n')
    where = (mail.data, "--backbone", mail.backbone, "--max-length", 24)
    ended = inlay("plan", *where, "--config", config, "--size", 4, "--json")
    assert ended.status == 0, ended.err
    assert "of size 4" in ended.err
    assert "at most 3 epochs" in ended.err
    assert "lr 2e-05, pooler pooling" in ended.err
    ended = inlay("plan", *where, "--preset", "houlsby2019", "--set", "train.lr=1e-3", "--json")
    assert "at most 20 epochs" in ended.err
    assert "lr 0.001" in ended.err
    ended = inlay("plan", *where, "--preset", "houlsby")
    assert (ended.status, "did you mean `houlsby2019`?" in ended.err) == (3, True)


def test_presets_are_listed_and_shown_whole(inlay: Inlay) -> None:
    from inlay.settings.presets import PRESETS

    listed = inlay("presets").out
    assert all(name in listed for name in PRESETS)
    assert inlay("presets", "--json").data.keys() == PRESETS.keys()
    shown = inlay("presets", "houlsby2019").out
    assert "train.optimizer" in shown
    assert "bert-adam" in shown
    assert inlay("presets", "holsby2019").status == 3
