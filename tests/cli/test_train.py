"""`train` and `plan`: what is inferred is shown, the score is printed, and a stopped run goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import SETTINGS, Inlay, Mail, write_mail


def train_mail(mail: Mail, *more: object) -> tuple[object, ...]:
    same = ("train", mail.data, "--task", "mail", "--backbone", mail.backbone, "--test-share", 0.2, *SETTINGS)
    return (*same, *more)


def test_train_shows_what_it_inferred_and_prints_score_reference_and_next_command(
    inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path
) -> None:
    data = write_mail(tmp_path / "My Mail.csv")
    ended = inlay("train", data, "--backbone", tiny_bert_folder, *SETTINGS)
    assert ended.status == 0
    for note in (
        "columns: text `text`, label `label`",
        "kind: classify (inferred), 2 labels",
        "split: 72 train, 8 dev",
    ):
        assert note in ended.err
    assert "epoch 2/2" in ended.err
    assert "dev  accuracy 0." in ended.out or "dev  accuracy 1." in ended.out
    assert "published  my-mail@1" in ended.out
    assert "curve.png" in ended.out
    assert 'inlay predict my-mail "a text"' in ended.out
    assert "\x1b" not in ended.out + ended.err, "no colour without a terminal"


def test_finished_run_is_not_trained_again_and_gives_the_same_version(inlay: Inlay, mail: Mail) -> None:
    ended = inlay(*train_mail(mail, "--json"))
    assert ended.status == 0
    assert "finished before" in ended.err
    assert "epoch 1" not in ended.err
    assert (ended.data["reference"], ended.data["was_finished"]) == ("mail@1", True)
    assert set(ended.data["metrics"]) == {"dev", "test"}
    assert Path(ended.data["curve"]).is_file()


def test_unpublished_run_is_scored_and_leaves_the_store_alone(inlay: Inlay, mail: Mail) -> None:
    before = inlay("tasks", "--json").data
    ended = inlay(*train_mail(mail, "--no-publish", "--json"))
    assert ended.data["reference"] is None
    assert ended.data["metrics"]["test"] == inlay("show", "mail", "--json").data["metrics"]["test"]
    assert inlay("tasks", "--json").data == before


def test_name_publishes_under_another_name(inlay: Inlay, mail: Mail) -> None:
    assert inlay(*train_mail(mail, "--name", "post", "--json")).data["reference"] == "post@1"


def test_a_version_that_is_worse_than_an_earlier_one_says_so(inlay: Inlay, mail: Mail) -> None:
    assert "better" not in inlay(*train_mail(mail, "--name", "twice", "--epochs", 12)).out
    worse = inlay(*train_mail(mail, "--name", "twice", "--epochs", 1, "--lr", 1e-7))
    assert "better" in worse.out
    assert "twice@1, on the same dev rows: `twice@best` is that one, `twice` the new one" in worse.out


def test_a_version_as_good_as_an_earlier_one_is_not_called_worse(inlay: Inlay, mail: Mail) -> None:
    first = inlay(*train_mail(mail, "--json")).data
    tie = inlay(*train_mail(mail, "--batch-size", 15))
    scores = inlay("show", "mail@2", "--json").data["metrics"]["dev"], first["metrics"]["dev"]
    assert scores[0]["accuracy"] == scores[1]["accuracy"]
    assert "better" not in tie.out


def test_a_version_published_again_is_not_called_the_new_one(inlay: Inlay, mail: Mail) -> None:
    inlay(*train_mail(mail, "--epochs", 1))
    again = inlay(*train_mail(mail))
    assert "mail@1 (" in again.out
    assert "`mail` still means mail@2" in again.out
    assert 'inlay predict mail@1 "a text"' in again.out
    assert inlay("predict", "mail", "free", "--json").lines[0]["version"] == "mail@2"


def test_few_dev_rows_are_told(inlay: Inlay, mail: Mail) -> None:
    assert "8 dev rows say little" not in inlay(*train_mail(mail, "--dev-share", 0.5)).out
    assert "dev rows say little" in inlay(*train_mail(mail, "--dev-share", 0.1, "--test-share", 0.2)).out


def test_no_reuse_computes_the_frozen_layers_in_every_step(
    inlay: Inlay, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inlay.training.cohort.frozen_cache import FrozenCache

    kept: list[int] = []
    real = FrozenCache.keep
    monkeypatch.setattr(FrozenCache, "keep", lambda self, *given: kept.append(1) or real(self, *given))
    upper = ("--set", "method.layers=1:", "--epochs", 2, "--no-publish", "--json")
    without = inlay(*train_mail(mail, *upper, "--no-reuse", "--restart"))
    assert (without.status, kept) == (0, [])
    assert inlay(*train_mail(mail, *upper, "--seed", 1)).status == 0
    assert len(kept) == 2  # training and dev rows


def test_show_examples_prints_encoded_rows(inlay: Inlay, mail: Mail) -> None:
    text = inlay(*train_mail(mail, "--show-examples", 2)).out
    assert "example 2 of 2" in text
    assert "tokens    [CLS]" in text
    assert "label     " in text
    (example,) = inlay(*train_mail(mail, "--show-examples", 1, "--json")).data["examples"]
    assert len(example["ids"]) == len(example["tokens"]) == len(example["segments"])


def test_ctrl_c_saves_and_the_same_command_goes_on(inlay: Inlay, mail: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    from inlay.pipeline import TrainingProgress
    from inlay.training.events import Event, StepTaken

    real = TrainingProgress.__call__

    def interrupt_at_step_3(self: TrainingProgress, event: Event) -> None:
        real(self, event)
        if isinstance(event, StepTaken) and event.cohort.num_steps == 3:
            os.kill(os.getpid(), signal.SIGINT)

    command = train_mail(mail, "--seed", 5)
    with monkeypatch.context() as patched:
        patched.setattr(TrainingProgress, "__call__", interrupt_at_step_3)
        ended = inlay(*command)
    assert ended.status == 130
    assert "the same command goes on from there" in ended.err
    ended = inlay(*command)
    assert ended.status == 0
    assert "going on after step 3" in ended.err


def test_settings_come_from_file_then_flags_then_set(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('task = "filed"\n[method]\nsize = 4\n[train]\nlr = 1e-3\nepochs = 3\nmax_length = 24\n')
    command = ("plan", mail.data, "--config", config, "--backbone", mail.backbone, "--epochs", 2)
    ended = inlay(*command, "--set", "train.batch_size=24", "--json")
    assert ended.status == 0
    assert "task filed from" in ended.err
    assert "of size 4" in ended.err
    assert "at most 2 epochs" in ended.err
    assert "24 rows each, lr 0.001" in ended.err
    assert ended.data["num_steps"] == 6


@pytest.mark.parametrize("labels", ["spam,ham", "spam, ham", '["spam", "ham"]'])
def test_set_takes_a_list_with_commas(labels: str) -> None:
    from inlay.settings.run_config import RunConfig

    assert RunConfig().override([f"data.labels={labels}"]).data.labels == ("spam", "ham")
    assert RunConfig().override(["data.labels=1"]).data.labels == ("1",)


def test_none_is_a_word_where_a_setting_takes_words_and_no_value_where_it_may_have_none() -> None:
    from inlay.settings.run_config import RunConfig

    config = RunConfig().override(["method.norms=none", "train.dropout=none"])
    assert (config.method.norms, config.train.dropout) == ("none", None)


def test_config_file_that_is_not_utf8_is_refused(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes('task = "caf\xe9"'.encode("latin1"))
    ended = inlay("plan", mail.data, "--config", "run.toml")
    assert ended.status == 2
    assert "error: run.toml: not TOML: 'utf-8' codec" in ended.err


def test_method_that_trains_a_copy_of_the_backbone_says_so(inlay: Inlay, mail: Mail) -> None:
    ended = inlay("plan", mail.data, "--backbone", mail.backbone, "--method", "top", "--max-length", 24)
    assert ended.status == 0, ended.err
    assert "parameters; a copy of its weights is trained for the task" in ended.err
    assert "frozen" not in ended.err
    assert "method: top adds" in ended.err
    assert ended.out.split()[0] == "top"


def test_summary_names_the_settings_that_are_not_the_methods_own(inlay: Inlay, mail: Mail) -> None:
    settings = ("--set", "method.sharing=every-3", "--set", "method.depth=2", "--max-length", 24)
    ended = inlay("plan", mail.data, "--backbone", mail.backbone, *settings)
    assert "parameters, frozen" in ended.err
    assert "method: houlsby of size 64 (sharing every-3, depth 2) adds" in ended.err


def test_help_names_the_formats_and_the_methods_without_a_size(inlay: Inlay) -> None:
    shown = {name: " ".join(inlay(name, "--help").out.split()) for name in ("train", "predict", "sweep")}
    for name in ("train", "predict"):
        assert "CoNLL columns" in shown[name]
        assert "SQuAD JSON" in shown[name]
    for name in ("train", "sweep"):
        assert "not for ia3, bitfit, norms, head, full, top" in shown[name]


def test_plan_counts_what_training_then_adds(inlay: Inlay, mail: Mail) -> None:
    planned = inlay("plan", *train_mail(mail)[1:])
    assert planned.status == 0
    assert planned.out.splitlines()[0].split("  ")[-2:] == ["houlsby", "full fine-tuning"]
    data = inlay("plan", *train_mail(mail, "--json")[1:]).data
    assert data["inlay"]["trained_parameters"] == inlay("show", "mail", "--json").data["num_parameters"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--text", "body"), 4, ("no column named `body`", "columns there are: `text`, `label`")),
        (("--set", "train.lrr=1"), 2, ("no setting named `train.lrr`", "did you mean `train.lr`?")),
        (("--set", "lr=1"), 2, ("no setting named `lr`", "did you mean `train.lr`?")),
        (("--set", "data.labels=[ham,spam]"), 2, ("`data.labels` is `[ham,spam]`",)),
        (("--set", "lr"), 2, ("`lr` is not an assignment", "--set train.lr=3e-4")),
        (("--pooling", "max"), 2, ("`train.pooling` is `max`", "cls")),
        (("--task", "../up"), 2, ("`../up` cannot name a task",)),
        (("--device", "tpu"), 2, ("no device named `tpu`",)),
        (("--method", "houlsbi", "--max-length", "9"), 3, ("no method named `houlsbi`", "did you mean `houlsby`?")),
        (("--max-length", "5000"), 2, ("`train.max_length`", "--max-length 66")),
        (("--config", "none.toml"), 9, ("no config file",)),
        (("--epochs", "many"), 2, ("'--epochs'", "inlay train --help")),
        (("--sise", "8"), 2, ("--sise", "--size")),
    ],
)
def test_mistakes_are_refused_with_a_hint_and_no_traceback(
    inlay: Inlay, mail: Mail, arguments: tuple[str, ...], status: int, words: tuple[str, ...]
) -> None:
    ended = inlay("train", mail.data, "--backbone", mail.backbone, *arguments)
    assert (ended.status, ended.out) == (status, "")
    assert "error: " in ended.err
    assert "hint: " in ended.err
    assert "Traceback" not in ended.err
    for word in words:
        assert word in ended.err


def test_empty_file_is_refused(inlay: Inlay, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").touch()
    ended = inlay("train", "empty.csv", "--task", "t")
    assert ended.status == 4
    assert "empty.csv: the file is empty" in ended.err


def test_missing_file_is_refused_with_the_nearest_name(inlay: Inlay, mail: Mail) -> None:
    ended = inlay("train", mail.data.with_name("mial.csv"))
    assert ended.status == 9
    assert "mail.csv`?" in ended.err


def test_trouble_with_a_file_is_told_in_words(inlay: Inlay, mail: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = inlay("train", "x" * 300 + ".csv", "--task", "t")
    assert (ended.status, ended.out) == (1, "")
    assert "error: `xxx" in ended.err
    assert "File name too long" in ended.err
    monkeypatch.setattr("inlay.data.readers.find_encoding", _refuse(PermissionError(13, "Permission denied", "m.csv")))
    ended = inlay("evaluate", "mail", mail.data, "--json")
    assert json.loads(ended.err)["error"]["message"] == "`m.csv`: Permission denied"
    monkeypatch.setattr("inlay.data.readers.find_encoding", _refuse(BrokenPipeError(32, "Broken pipe")))
    ended = inlay("evaluate", "mail", mail.data)
    assert (ended.status, ended.err) == (1, ""), "a reader that went away is no error"


def _refuse(error: Exception) -> Callable[..., None]:
    def refuse(*arguments: object) -> None:
        raise error

    return refuse


def test_diverged_run_is_an_error_and_nothing_is_published(inlay: Inlay, mail: Mail) -> None:
    ended = inlay("train", mail.data, "--task", "wild", "--backbone", mail.backbone, "--max-length", 24, "--lr", 9.9)
    assert ended.status == 8
    assert "diverged" in ended.err
    assert "smaller" in ended.err
    assert [entry["task"] for entry in inlay("tasks", "--json").data["tasks"]] == ["mail"]


def test_debug_shows_the_traceback(mail: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    from inlay.cli import main
    from inlay.errors import UnknownName

    monkeypatch.setenv("INLAY_DEBUG", "")  # so that what --debug sets is undone after the test
    with pytest.raises(UnknownName):
        main(["--debug", "show", "mial"])


@pytest.mark.parametrize(("option", "value", "what"), [("--lr", "fast", "number"), ("--epochs", "many", "integer")])
def test_a_value_of_another_type_is_named(inlay: Inlay, option: str, value: str, what: str) -> None:
    ended = inlay("train", "rows.csv", option, value)
    assert ended.status == 2
    assert f"invalid value for '{option}': `{value}` should be a valid {what}" in ended.err
