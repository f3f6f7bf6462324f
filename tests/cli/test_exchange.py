"""Versions leave as other libraries' folders and come back, by command."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .conftest import SETTINGS, Inlay, Mail


@pytest.fixture
def plain_mail(inlay: Inlay, mail: Mail) -> Mail:
    """The task `plain` beside `mail`, trained so that AdapterHub can express it."""
    setting = ("--set", "method.norms=none", "--set", "train.pooling=cls")
    ended = inlay("train", mail.data, "--task", "plain", "--backbone", mail.backbone, *SETTINGS, *setting)
    assert ended.status == 0, ended.err
    return mail


def test_a_task_goes_out_as_a_folder_and_comes_back(inlay: Inlay, plain_mail: Mail, tmp_path: Path) -> None:
    told = inlay("export", "plain", "--format", "adapterhub", "--output", tmp_path / "out", "--json").data
    assert told["folder"] == str(tmp_path / "out")
    assert {"adapter_config.json", "pytorch_adapter.bin", "head_config.json"} <= set(told["files"])
    came = inlay("import", tmp_path / "out", "--name", "back", "--json").data
    assert came["version"] == "back@1"
    assert any("adapters 1.3.0" in note for note in came["notes"])
    assert inlay("verify", "back").status == 0
    ask = ("free win prize call", "see you at home", "--json")
    ours, theirs = inlay("predict", "plain", *ask).lines, inlay("predict", "back", *ask).lines
    for before, after in zip(ours, theirs, strict=True):
        assert before["label"] == after["label"]
        assert before["probabilities"] == pytest.approx(after["probabilities"], rel=1e-5)
    assert "back" in inlay("tasks").out
    shown = inlay("show", "back").out
    assert "made by" in shown
    assert "adapters 1.3.0" in shown
    assert "settings" not in shown


def test_what_a_format_cannot_express_is_refused(inlay: Inlay, mail: Mail) -> None:
    ended = inlay("export", "mail", "--format", "adapterhub")
    assert ended.status == 5
    assert "AdapterHub keeps no trained layer norms" in ended.err
    assert "method.norms=none" in ended.err
    assert "--preset adapterhub-houlsby" in " ".join(ended.err.split())
    ended = inlay("export", "mail", "--format", "peft")
    assert (ended.status, "no method like `houlsby`" in ended.err) == (5, True)


def test_unknown_format_is_refused_with_the_known_ones(inlay: Inlay, mail: Mail) -> None:
    ended = inlay("export", "mail", "--format", "adapterhubs")
    assert ended.status == 3
    assert "did you mean `adapterhub`?" in ended.err


def test_formats_of_the_command_are_those_of_the_exchange_room() -> None:
    from inlay.cli.export import FORMATS as KNOWN
    from inlay.exchange import FORMATS

    assert ("inlay", *FORMATS, "onnx") == KNOWN


def test_options_of_folders_are_refused_for_files(inlay: Inlay, mail: Mail) -> None:
    inlay("export", "mail", "mail.inlay")
    ended = inlay("import", "mail.inlay", "--labels", "a,b")
    assert (ended.status, "`--labels` is for folders" in ended.err) == (2, True)


def test_damaged_weights_are_told_in_plain_words(inlay: Inlay, plain_mail: Mail, tmp_path: Path) -> None:
    inlay("export", "plain", "--format", "adapterhub", "--output", tmp_path / "out")
    path = tmp_path / "out" / "pytorch_adapter.bin"
    path.write_bytes(path.read_bytes()[:-100])
    ended = inlay("import", tmp_path / "out", "--name", "back")
    assert (ended.status, "damaged or cut short" in " ".join(ended.err.split())) == (4, True)
    assert "Warning" not in ended.err


def test_folder_of_nobody_is_refused(inlay: Inlay, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    ended = inlay("import", tmp_path / "nothing")
    assert (ended.status, "adapter_config.json" in ended.err) == (4, True)


def test_a_backbone_that_only_stored_data_name_is_not_loaded(
    inlay: Inlay, plain_mail: Mail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inlay import model

    inlay("export", "mail", "mail.inlay")
    inlay("export", "plain", "--format", "adapterhub", "--output", tmp_path / "out")
    shutil.rmtree(plain_mail.store / "backbones")  # as if both had come from elsewhere
    opened: list[str] = []
    load = model.load_backbone
    monkeypatch.setattr(model, "load_backbone", lambda name, **more: opened.append(name) or load(name, **more))
    name = str(plain_mail.backbone)
    for command in (
        ("predict", "mail", "a text"),
        ("evaluate", "mail", plain_mail.data),
        ("verify", "mail"),
        ("export", "plain", "--format", "adapterhub", "--output", tmp_path / "again"),
        ("import", tmp_path / "out", "--name", "back"),
    ):
        ended = inlay(*command)
        words = " ".join(ended.err.replace("│", " ").split()) + ended.out
        assert ended.status == (7 if command[0] == "verify" else 9), ended
        assert "you never named it" in words
        assert not opened
        assert f"--backbone {name}" in words
    assert inlay("predict", "mail", "a text", "--backbone", name).status == 0
    assert inlay("predict", "mail", "a text").status == 9
    assert inlay("backbone", "get", name).status == 0
    assert inlay("predict", "mail", "a text").status == 0
