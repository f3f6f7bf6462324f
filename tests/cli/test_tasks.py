"""What is in the store: listed, shown, carried elsewhere, dropped."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inlay.model.bank.methods import SlotSpec
from inlay.model.heads.heads import HeadSpec
from inlay.settings.run_config import MethodConfig
from inlay.store import Store

from .conftest import Inlay, Mail


def test_tasks_of_an_empty_store_says_how_to_train_the_first(inlay: Inlay) -> None:
    ended = inlay("tasks")
    assert (ended.status, ended.out) == (0, "")
    assert "inlay train" in ended.err
    assert inlay("tasks", "--json").data["tasks"] == []


def test_tasks_shows_the_ledger_and_the_multiple_of_the_backbone(inlay: Inlay, mail: Mail) -> None:
    ended = inlay("tasks", "--json")
    entry, total = ended.data["tasks"][0], ended.data["backbones"][0]
    assert (entry["task"], entry["kind"], entry["num_labels"], entry["versions"]) == ("mail", "classify", 2, [1])
    assert entry["share"] == pytest.approx(entry["num_parameters"] / total["num_parameters"])
    assert total["multiple"] == pytest.approx(1 + entry["num_parameters"] / total["num_parameters"])
    assert total["full_multiple"] == 1
    table = inlay("tasks").out
    assert "houlsby 8" in table
    assert f"{total['multiple']:.2f}×" in table
    assert "(full fine-tuning: 1×)" in table


def test_total_counts_every_task_once_and_by_backbone(inlay: Inlay, mail: Mail) -> None:
    inlay("export", "mail", "copy.inlay")
    for name in ("b", "c"):
        assert inlay("import", "copy.inlay", "--name", name).status == 0
    data = inlay("tasks", "--json").data
    (total,) = data["backbones"]
    added = sum(entry["num_parameters"] for entry in data["tasks"])
    assert (total["num_tasks"], total["added"], total["full_multiple"]) == (3, added, 3)


def test_show_tells_all_of_a_version(inlay: Inlay, mail: Mail) -> None:
    data = inlay("show", "mail", "--json").data
    assert data["reference"] == "mail@1"
    assert data["labels"] == ["ham", "spam"]
    assert set(data["metrics"]) == {"dev", "test"}
    assert [item["reference"] for item in data["versions"]] == ["mail@1"]
    assert data["sidecar"]["seconds"] > 0
    text = inlay("show", "mail@best").out
    for word in ("mail@1", "ham, spam", data["digest"], data["run_id"], "houlsby"):
        assert word in text


def test_show_names_what_of_method_and_head_is_not_the_usual(inlay: Inlay, mail: Mail) -> None:
    head = ("--set", "train.features=mix", "--set", "train.hidden=tanh")
    small = ("--size", 4, "--set", "method.alpha=2", "--epochs", 1, "--max-length", 24)
    ended = inlay("train", mail.data, "--task", "low", "--backbone", mail.backbone, "--method", "lora", *small, *head)
    assert ended.status == 0, ended.err
    assert "method: lora of size 4 (scale 0.5, alpha 2) adds" in ended.err
    shown = {line.split("  ")[0]: line for line in inlay("show", "low").out.splitlines()}
    assert "lora of size 4 (" in shown["method"]
    assert "alpha 2," in shown["method"]
    assert "scale 0.5" in shown["method"]
    assert "features mix, hidden tanh" in shown["head"]
    assert "mix" not in inlay("show", "mail").out


def test_export_import_remove_gc_round_trip(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    exported = inlay("export", "mail", "--json").data
    assert Path(exported["file"]) == Path("mail.inlay")
    assert "has the text of" in exported["notes"][0], "who sends it on should know"
    assert inlay("import", "mail.inlay", "--name", "post", "--json").data["version"] == "post@1"
    assert inlay("remove", "mail", "--json").data == {"removed": ["mail@1"]}
    assert inlay("gc", "--json").data["num_objects"] == 0, "post still needs the bytes"
    assert inlay("remove", "post@1").status == 0
    foretold = inlay("gc", "--dry-run", "--json").data
    assert foretold["num_objects"] == 1
    assert Path(foretold["paths"][0]).exists()
    assert inlay("gc", "--json").data["freed_bytes"] == foretold["freed_bytes"]
    assert not Path(foretold["paths"][0]).exists()
    assert inlay("import", "mail.inlay", "--json").data["version"] == "mail@2", "a number is never given twice"


def test_gc_keeps_the_cache_of_tokenised_texts_unless_it_is_told_to(
    inlay: Inlay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("INLAY_CACHE_BYTES", "100000")
    (tmp_path / "inlay" / "tokens").mkdir(parents=True)
    file = tmp_path / "inlay" / "tokens" / "ab.safetensors"
    file.write_bytes(bytes(2000))
    assert "inlay gc --cache" in inlay("gc").err
    assert "would delete 1 file of tokenised texts" in inlay("gc", "--cache", "--dry-run").out
    assert file.exists()
    told = inlay("gc", "--cache", "--json").data["cache"]
    about = {"folder": str(file.parent), "num_files": 1, "num_bytes": 2000}
    assert told == {**about, "is_chosen": True, "num_spared": 0}
    assert not file.exists()


def test_gc_keeps_compiled_programs_unless_it_is_told_to(
    inlay: Inlay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "inlay" / "compiled"
    kernel = folder / "triton" / "0" / "AB" / "kernel.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(bytes(3000))
    for path in (kernel, kernel.parent):
        os.utime(path, (0, 0))
    assert f"kept 1 file of compiled programs in {folder}: 3.0 kB" in inlay("gc").err
    assert "would delete 1 file of compiled programs" in inlay("gc", "--cache", "--dry-run").out
    assert kernel.exists()
    told = inlay("gc", "--cache", "--json").data["compiled"]
    about = {"folder": str(folder), "num_files": 1, "num_bytes": 3000}
    assert told == {**about, "is_chosen": True, "num_spared": 0}
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_gc_says_which_compiled_programs_it_spared(
    inlay: Inlay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, is_fresh in (("old", False), ("fresh", True)):
        kernel = tmp_path / "inlay" / "compiled" / name / "kernel.py"
        kernel.parent.mkdir(parents=True)
        kernel.write_bytes(bytes(3000))
        for path in () if is_fresh else (kernel, kernel.parent):
            os.utime(path, (0, 0))
    for flags, verb in (("--dry-run",), "would delete"), ((), "deleted"):
        ended = inlay("gc", "--cache", *flags)
        assert f"{verb} 1 file of compiled programs" in ended.out
        assert "kept 1 file of compiled programs used within the last hour" in ended.err
    assert inlay("gc", "--json").data["compiled"]["num_spared"] == 0, "nothing was to be deleted"
    assert inlay("gc", "--cache", "--json").data["compiled"]["num_spared"] == 1
    assert kernel.exists()


def test_export_makes_no_folder(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    ended = inlay("export", "mail", tmp_path / "typo" / "dir" / "x.inlay")
    assert ended.status == 9
    assert "dir`\nhint: create it first" in ended.err
    assert not (tmp_path / "typo").exists()


def test_unknown_task_is_an_error_with_a_suggestion(inlay: Inlay, mail: Mail) -> None:
    ended = inlay("show", "mial")
    assert ended.status == 3
    assert ended.err == "error: no task named `mial`\nhint: did you mean `mail`?\n"
    assert ended.out == ""


def test_error_is_a_json_line_on_stderr_where_data_would_be_json(inlay: Inlay, mail: Mail) -> None:
    import json

    ended = inlay("show", "mial", "--json")
    assert (ended.status, ended.out) == (3, "")
    assert json.loads(ended.err)["error"]["code"] == "unknown-name"


def test_show_says_where_labels_are_cut(
    inlay: Inlay, mail: Mail, tiny_bert: Any, publish_random: Callable[..., Any]
) -> None:
    for name, kind, cuts in (("sets", "multilabel", (-0.25, 0.5)), ("classes", "classify", (0.125,))):
        spec = SlotSpec.of(MethodConfig("lora", 4), HeadSpec(kind, 2, "cls", thresholds=cuts))
        publish_random(Store(mail.store), name, tiny_bert, spec)
    assert "a label is given if its logit is at least: label-0 -0.25, label-1 +0.5; tuned on dev" in " ".join(
        inlay("show", "sets").out.split()
    )
    said = "label-1 if its logit exceeds that of label-0 by +0.125 or more, tuned on dev"
    assert said in " ".join(inlay("show", "classes").out.split())
    assert "thresholds" not in inlay("show", "mail").out


def test_a_damaged_reference_is_named_and_the_others_are_listed_shown_and_verified(inlay: Inlay, mail: Mail) -> None:
    import shutil

    shutil.copytree(mail.store / "tasks" / "mail", mail.store / "tasks" / "swapped")
    assert inlay("tasks", "--json").data["damaged"][0]["version"] == "swapped@1"
    (mail.store / "tasks" / "mail" / "2.json").write_text("{")
    (mail.store / "tasks" / "mail" / "1.json").rename(mail.store / "tasks" / "mail" / "3.json")
    (mail.store / "tasks" / "swapped" / "1.json").rename(mail.store / "tasks" / "mail" / "1.json")
    ended = inlay("tasks")
    words = " ".join(ended.err.split())
    assert ended.status == 0
    assert "mail" in ended.out
    assert "mail@2 cannot be read" in words
    assert "mail@3 cannot be read" in words
    assert "this is the reference of `mail@1`" in words
    shown = inlay("show", "mail@1")
    assert (shown.status, "mail@2 cannot be read" in " ".join(shown.err.split())) == (0, True)
    ended = inlay("verify", "mail", "--json")
    stands = {check["version"]: check["stands"] for check in ended.data["checks"]}
    assert (ended.status, stands) == (7, {"mail@2": False, "mail@3": False, "mail@1": True})
