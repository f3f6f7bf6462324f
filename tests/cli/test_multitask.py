"""`multitask` and `materialize`: several data files in, ordinary tasks out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import SETTINGS, Inlay, write_mail


@pytest.fixture
def trained(inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path):
    """Two tasks, one of them named."""
    first, second = write_mail(tmp_path / "mail.csv"), write_mail(tmp_path / "b.csv", num_rows=40, seed=1)
    return inlay(
        *("multitask", first, f"post={second}", "--backbone", tiny_bert_folder, *SETTINGS, "--steps", 4, "--json"),
        *("--batches", "mixed", "--seeds", 2),
    )


def test_the_help_says_which_method_is_taken(inlay: Inlay) -> None:
    assert "[default: hyperformer++]" in " ".join(inlay("multitask", "--help").out.split())


@pytest.mark.draws
def test_every_task_is_published_as_an_ordinary_one(inlay: Inlay, trained) -> None:
    assert trained.status == 0, trained.err
    assert "hyperformer++ 8 trains" in trained.err
    assert [item["reference"] for item in trained.data["tasks"]] == ["mail@1", "post@1"]
    assert len(trained.data["seeds"]) == 2
    assert trained.data["mean"] == max(item["mean"] for item in trained.data["seeds"])
    shown = inlay("show", "post", "--json").data
    assert shown["method"]["name"] == "mahabadi"
    assert "came from a run of 2 tasks with hyperformer++: mail, post" in " ".join(inlay("show", "post").out.split())
    assert inlay("predict", "post", "free prize", "--json").status == 0
    assert inlay("verify").status == 0


def test_materialize_publishes_a_task_of_a_finished_run_again(inlay: Inlay, trained) -> None:
    ended = inlay("materialize", trained.data["run"], "post", "--name", "again", "--json")
    assert ended.status == 0, ended.err
    assert ended.data["tasks"][0]["reference"] == "again@1"
    assert inlay("materialize", trained.data["run"], "letter").status == 3
    assert inlay("materialize", "0123").status == 3


def test_materialize_needs_the_rows_of_its_own_task_alone_wherever_it_is_called(
    inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mail(tmp_path / "mail.csv")
    write_mail(tmp_path / "b.csv", num_rows=40, seed=1)
    same = ("--backbone", tiny_bert_folder, *SETTINGS, "--steps", 2, "--no-publish", "--json")
    run = inlay("multitask", "mail.csv", "post=b.csv", *same).data["run"]
    (tmp_path / "mail.csv").unlink()
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    ended = inlay("materialize", run, "post", "--json")
    assert ended.status == 0, ended.err
    assert ended.data["tasks"][0]["reference"] == "post@1"
    gone = inlay("materialize", run, "mail")
    assert gone.status != 0
    assert "task `mail`: no file or folder" in " ".join(gone.err.split())
    moved = (tmp_path / "b.csv").rename(tmp_path / "c.csv")
    assert inlay("materialize", run, f"post={moved}", "--json").data["tasks"][0]["reference"] == "post@1"
    with moved.open("a") as file:
        file.write("one more row,spam\n")
    other = inlay("materialize", run, f"post={moved}")
    assert other.status == 4
    assert "task `post`: its rows are not those" in " ".join(other.err.split())


def test_tasks_trained_on_a_sample_are_materialised_like_others(
    inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path
) -> None:
    mail, drawn = write_mail(tmp_path / "mail.csv"), ("--set", "data.sample=12", "--set", "data.sample_seed=3")
    same = ("multitask", mail, "--backbone", tiny_bert_folder, *SETTINGS, "--steps", 2, "--set", "data.most_dev=5")
    ended = inlay(*same, *drawn, "--json")
    assert ended.status == 0, ended.err
    assert "training on 12 of" in ended.err
    again = inlay("materialize", ended.data["run"], "--name", "again", "--json")
    assert again.status == 0, again.err
    assert again.data["tasks"][0]["reference"] == "again@1"


def test_rows_of_several_tasks_are_read_by_the_flags_of_one(
    inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path
) -> None:
    mail = write_mail(tmp_path / "mail.csv")
    ended = inlay(
        *("multitask", mail, "--backbone", tiny_bert_folder, *SETTINGS, "--steps", 2, "--json"),
        *("--dev-share", 0.5, "--split-seed", 1, "--text", "text", "--label", "label", "--metric", "accuracy"),
    )
    assert ended.status == 0, ended.err
    assert ended.data["tasks"][0]["metric"] == "accuracy"
    one = inlay("plan", mail, "--backbone", tiny_bert_folder, "--dev-share", 0.5, "--split-seed", 1)
    said = next(line for line in one.err.splitlines() if "dev" in line and "rows" in line)
    assert said in ended.err


def write_scores(path: Path) -> Path:
    rows = [f"{word} {number},{number % 5}.5" for number in range(8) for word in ("free", "late", "home", "cat")]
    path.write_text("said,grade\n" + "\n".join(rows) + "\n")
    return path


def test_the_rows_of_one_task_have_settings_of_their_own(inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path) -> None:
    mail, score, config = write_mail(tmp_path / "mail.csv"), write_scores(tmp_path / "score.csv"), tmp_path / "run.toml"
    dev = write_mail(tmp_path / "dev.csv", num_rows=12, seed=7)
    config.write_text('[data.score]\ntext = "said"\nlabel = "grade"\nkind = "classify"\n[data]\ndev_share = 0.25\n')
    same = ("multitask", mail, score, "--backbone", tiny_bert_folder, *SETTINGS, "--steps", 2, "--config", config)
    own = ("--set", "data.score.kind=regress", "--set", "data.score.metric=pearson", "--set", f"data.mail.dev={dev}")
    ended = inlay(*same, *own, "--json", "--dry-run")
    assert ended.status == 0, ended.err
    tasks = ended.data["tasks"]
    assert [(item["kind"], item["metric"]) for item in tasks] == [("classify", "accuracy"), ("regress", "pearson")]
    assert [(item["num_train"], item["num_dev"]) for item in tasks] == [(80, 12), (24, 8)]
    for setting, words in [
        ("data.letter.text=a", "no task named `letter`"),
        ("data.score.lable=a", "task `score`: no setting named `data.lable`"),
        ("data.score.source=a.csv", "give the data as an argument: `score=a.csv`"),
        ("data.mail.metric=pearson", "task `mail`: "),
    ]:
        refused = inlay(*same, *own, "--set", setting)
        assert refused.status != 0
        assert words in " ".join(refused.err.split())


def test_written_texts_and_labels_are_tasks_of_one_run(inlay: Inlay, backbone_folder, tmp_path: Path) -> None:
    mail, reply = write_mail(tmp_path / "mail.csv", num_rows=20), tmp_path / "reply.csv"
    reply.write_text("text,label\n" + "".join(f"call {number},we see you\n" for number in range(12)))
    same = ("multitask", mail, reply, "--backbone", backbone_folder("t5"), *SETTINGS, "--steps", 2, "--json")
    ended = inlay(*same, "--set", "data.reply.kind=text", "--dry-run")
    assert ended.status == 0, ended.err
    assert [item["kind"] for item in ended.data["tasks"]] == ["classify", "text"]


def test_a_dry_run_tells_what_it_would_take_and_trains_nothing(
    inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path
) -> None:
    first, second = write_mail(tmp_path / "mail.csv"), write_mail(tmp_path / "b.csv", num_rows=40, seed=1)
    same = ("multitask", first, f"post={second}", "--backbone", tiny_bert_folder, *SETTINGS, "--temperature", 1)
    ended = inlay(*same, "--dry-run", "--json")
    assert ended.status == 0, ended.err
    made = ended.data
    rows = [item["num_train"] for item in made["tasks"]]
    assert [item["drawn_share"] for item in made["tasks"]] == pytest.approx([number / sum(rows) for number in rows])
    assert made["num_steps"] == 2 * -(-sum(rows) // 16)
    own = sum(item["own_parameters"] for item in made["tasks"])
    assert made["trained_parameters"] == made["shared_parameters"] + own
    assert f"trains {made['trained_parameters']:,} parameters" in ended.err
    assert made["seconds"] > 0
    assert made["memory_bytes"] > 0
    assert not list((tmp_path / "home").glob("runs/*/config.toml"))
    shown = inlay(*same, "--dry-run", "--seeds", 2).out
    assert "post" in shown
    assert "for each of 2 seeds" in shown


def test_a_new_task_starts_from_the_run(inlay: Inlay, trained, tiny_bert_folder: Path, tmp_path: Path) -> None:
    new = write_mail(tmp_path / "new.csv", num_rows=30, seed=3)
    same = ("multitask", new, "--backbone", tiny_bert_folder, "--max-length", 24, "--steps", 2, "--epochs", 1)
    more = ("--from-run", trained.data["run"], "--like", "new=post", "--trained", "task", "--json")
    ended = inlay(*same, *more)
    assert ended.status == 0, ended.err
    assert f"starts from what the tasks of run `{trained.data['run']}` share" in ended.err
    assert re.search(r"trains \d\d\d parameters, [\d.]+% of the backbone's, with [\d,]+ shared ones frozen", ended.err)
    assert "lr 0.03" in ended.err
    assert ended.data["tasks"][0]["reference"] == "new@1"
    named = inlay(*same, "--from-run", "post", *more[2:])  # by a task that it was published as
    assert (named.status, named.data["run"]) == (0, ended.data["run"]), named.err


def test_a_new_task_stands_on_the_backbone_of_the_run_it_starts_from(
    inlay: Inlay, trained, tiny_bert_folder: Path, backbone_folder, tmp_path: Path
) -> None:
    new = write_mail(tmp_path / "new.csv", num_rows=30, seed=3)
    same = ("multitask", new, "--max-length", 24, "--steps", 2, "--epochs", 1, "--from-run", trained.data["run"])
    ended = inlay(*same, "--json")
    assert ended.status == 0, ended.err
    assert inlay("show", "new", "--json").data["backbone"]["name"] == str(tiny_bert_folder)
    refused = inlay(*same, "--backbone", backbone_folder("roberta"))
    assert (refused.status, "Traceback" in refused.err) == (6, False)
    assert f"use `--backbone {tiny_bert_folder}`" in " ".join(refused.err.split())


@pytest.mark.parametrize("way", ["--method", "--set", "--config", "--preset"])
def test_a_method_of_one_task_is_refused_however_it_was_asked_for(
    inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path, way: str
) -> None:
    mail, config = write_mail(tmp_path / "mail.csv"), tmp_path / "run.toml"
    config.write_text('[method]\nname = "houlsby"\n')
    asked = {"--method": "houlsby", "--set": "method.name=houlsby", "--config": config, "--preset": "houlsby2019"}
    ended = inlay("multitask", mail, "--backbone", tiny_bert_folder, way, asked[way], "--max-length", 24, "--steps", 2)
    assert ended.status == 2
    assert "method `houlsby` trains one task at a time" in ended.err


def test_mistakes_are_refused_with_a_hint(inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path) -> None:
    mail = write_mail(tmp_path / "mail.csv")
    for arguments, words in [
        (("multitask",), "no task to train"),
        (("multitask", mail, "--method", "houlsby"), "one task at a time"),
        (("multitask", mail, mail), "a name of its own"),
        (("multitask", mail, "--from-run", "abc"), "no run of several tasks"),
        (("train", mail, "--method", "hyperformer++"), "inlay multitask"),
        (("train", mail, "--set", "joint.steps=3"), "`joint.steps` is `3` for a run of one task"),
        (("multitask", mail, "--like", "mail=nothing"), "`joint.like` is `mail=nothing`, but there is no run"),
        (("multitask", mail, "--trained", "task"), "`joint.trained` is `task`, but there is no run"),
        (("multitask", mail, "--set", "train.steps=bert"), "`train.steps` is `bert` for a run of several tasks"),
        (("multitask", mail, "--set", "train.bucket=4"), "`train.bucket` is `4` for a run of several tasks"),
        (("multitask", mail, "--set", "train.start=mail"), "--from-run"),
    ]:
        ended = inlay(*arguments, *(("--backbone", tiny_bert_folder) if len(arguments) > 1 else ()))
        assert ended.status != 0
        assert words in ended.err
        assert "Traceback" not in ended.err
