"""`multitask` shows test scores, and refuses what cannot be before anything is loaded, with a hint that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from inlay.model.bank.methods import JOINT_METHODS, METHODS

from .conftest import SETTINGS, Ended, Inlay, write_mail


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Two tasks, `mail` and `post`."""
    write_mail(tmp_path / "mail.csv")
    write_mail(tmp_path / "post.csv", num_rows=40, seed=1)
    return "mail.csv", "post.csv"


def said(ended: Ended) -> str:
    """All of an error on one line."""
    assert "Traceback" not in ended.err
    return " ".join(ended.err.split())


@pytest.mark.parametrize("publish", ["--publish", "--no-publish"])
def test_test_scores_are_shown_where_there_are_test_rows(
    inlay: Inlay, tiny_bert_folder: Path, files: tuple[str, str], publish: str
) -> None:
    same = ("multitask", *files, "--backbone", tiny_bert_folder, *SETTINGS, "--steps", 4, "--test-share", 0.2, publish)
    ended = inlay(*same, "--json")
    assert ended.status == 0, ended.err
    scores = [item["test"]["accuracy"] for item in ended.data["tasks"]]
    assert ended.data["test_mean"] == pytest.approx(sum(scores) / 2)
    if publish == "--publish":
        shown = [inlay("show", name, "--json").data["metrics"]["test"]["accuracy"] for name in ("mail", "post")]
        assert scores == shown
    table = inlay(*same).out
    assert table.split()[:5] == ["task", "metric", "dev", "test", "published"]
    for line, score, item in zip(table.splitlines()[2:4], scores, ended.data["tasks"], strict=True):
        assert line.split()[2:4] == [f"{item['dev']['accuracy']:.4f}", f"{score:.4f}"]
    assert f"{ended.data['mean']:.4f} on dev, {ended.data['test_mean']:.4f} on test" in table


def test_a_run_without_test_rows_shows_dev_scores_alone(
    inlay: Inlay, tiny_bert_folder: Path, files: tuple[str, str]
) -> None:
    same = ("multitask", *files, "--backbone", tiny_bert_folder, *SETTINGS, "--steps", 2, "--no-publish")
    ended = inlay(*same, "--json")
    assert [item["test"] for item in ended.data["tasks"]] == [None, None]
    assert ended.data["test_mean"] is None
    table = inlay(*same).out
    assert table.split()[:4] == ["task", "metric", "dev", "published"]
    assert "on test" not in table


def test_there_is_no_mean_test_score_unless_all_tasks_have_one(
    inlay: Inlay, tiny_bert_folder: Path, files: tuple[str, str]
) -> None:
    same = ("multitask", *files, "--backbone", tiny_bert_folder, *SETTINGS, "--steps", 2, "--no-publish")
    ended = inlay(*same, "--set", "data.mail.test_share=0.2", "--json")
    assert ended.status == 0, ended.err
    assert [item["test"] is None for item in ended.data["tasks"]] == [False, True]
    assert ended.data["test_mean"] is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--weights", "mail=inf"), "`joint.weights` is `mail=inf` hint: it must be a finite number above 0"),
        (("--weights", "mail=nan"), "`joint.weights` is `mail=nan` hint: it must be a finite number above 0"),
        (("--weights", "mail=0"), "`joint.weights` is `mail=0` hint: it must be a finite number above 0"),
        (("--weights", "mail=x"), "`joint.weights` has no number for `mail`: `x`"),
        (("--weights", "mail=1,mail=2"), "`joint.weights` names `mail` twice: `mail=1` and `mail=2`"),
        (("--weights", "foo=2"), "`joint.weights` names `foo`, which is not a task of the run hint: its tasks: mail"),
        (("--like", "mail=cola,mail=rte"), "`joint.like` names `mail` twice: `mail=cola` and `mail=rte`"),
        (("--like", "foo=cola"), "`joint.like` names `foo`, which is not a task of the run hint: its tasks: mail"),
        (("--like", "mail"), "hint: it must be a new task and an old one: `--like new=old`"),
        (("--temperature", "inf"), "`joint.temperature` is `inf` hint: it must be a finite number above 0"),
    ],
)
def test_settings_of_tasks_are_checked_before_anything_is_loaded(inlay: Inlay, given: tuple[str, str], words) -> None:
    ended = inlay("multitask", "mail.csv", "--backbone", "no-such-folder", *given)  # neither of which is there
    assert ended.status == 2
    assert words in said(ended)


def test_a_task_named_twice_is_refused_before_anything_is_loaded(inlay: Inlay) -> None:
    ended = inlay("multitask", "mail=a.csv", "post=b.csv", "mail=c.tsv", "--backbone", "no-such-folder")
    assert ended.status == 2
    assert "task `mail` is named twice: for `a.csv` and for `c.tsv` hint: give each a name of its own" in said(ended)


def test_a_hint_about_dev_rows_says_how_one_task_is_given_them(
    inlay: Inlay, tiny_bert_folder: Path, files: tuple[str, str]
) -> None:
    ended = inlay("multitask", *files, "--backbone", tiny_bert_folder, "--set", "data.post.dev_share=0")
    assert ended.status == 2
    assert "task `post`: no dev rows hint: give a file with `--set data.post.dev=FILE`" in said(ended)


@pytest.mark.parametrize(
    ("command", "method", "hint"),
    [
        ("multitask", "pal-published", "hint: use `mahabadi-multi` or `hyperformer++`"),
        ("train", "pal", "hint: use `mahabadi`"),
        ("train", "pal-full", "hint: use `mahabadi`"),
    ],
)
def test_a_method_that_a_backbone_cannot_have_is_answered_with_those_of_the_same_command(
    inlay: Inlay, backbone_folder, files: tuple[str, str], command: str, method: str, hint: str
) -> None:
    ended = inlay(command, files[0], "--backbone", backbone_folder("t5"), "--method", method, "--max-length", 24)
    assert ended.status == 5
    assert said(ended).endswith(hint)
    known = JOINT_METHODS if command == "multitask" else METHODS
    assert set(hint.split("`")[1::2]) <= set(known)


def test_a_preset_of_encoders_is_refused_as_such_on_a_backbone_that_writes(
    inlay: Inlay, backbone_folder, files: tuple[str, str]
) -> None:
    same = ("multitask", *files, "--backbone", backbone_folder("t5"), "--preset", "stickland2019")
    ended = inlay(*same)
    assert ended.status == 5
    assert "preset `stickland2019` is for encoders" in said(ended)
    assert "generates text" in said(ended)
    assert "--pooling" not in said(ended)
    assert "leave out `--pooling`" in said(inlay(*same, "--pooling", "cls"))
